"""Read a suite file into its contests: every problem with every contender.

    schema: sparsebench/suite@1
    title: Which block size pays?
    problems:                        # a list is a sweep; the product of all sweeps is the plan
      - op: linear
        shape: [{n: 4096, k: 4096}]  # a mapping sets several fields at once, under any name
        m: [64, 4096]
        dtype: bf16
        pattern: blocks
        block: [16, [32, 64]]        # 16x16 and 32x64
        sparsity: [0.5, 0.9]
    contenders:
      - {format: bsr, kernel: bsr_triton, params: {block: $block}}  # $field: the problem's, or
                                     # $dense_fraction, $split of a spense pattern
      - {format: bsr, params: {block: $block}}                      # the kernel that users get
      - {format: bsr, kernel: cublas_masked, op: linear_wgrad}      # only at problems of this op
      - {format: csr, kernel: scipy_csr, at: {m: [1, 16]}}          # only at these values
      - {format: spense, kernel: spense_ffn, params: {split: rows, wd.split: columns}}  # wd alone
      - {format: dense, kernel: acme.int8, error: {at_most: 0.01, why: its weights have 8 bits}}
    baselines:                       # the first that is supported is used
      - {format: dense, kernel: cublas}
    scopes: [kernel, op, chain]      # device time; as called from Python; a layer inside a chain
                                     # (bench/timing.py). Default: [kernel]
    caches: [cold, hot]              # default: [cold]

`source: {file: GLOB, tensor: GLOB}` takes operands from files below --data, one problem per match.
For an op with recorded operands, such as ffn, `tensor` matches groups: `NAME` if a file has
NAME.wg, NAME.wu, NAME.wd and NAME.x (_from_files.py). Sweeps are counted before they are expanded
(limits.py).
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sparsebench._discovery import canonical, did_you_mean
from sparsebench.errors import SuiteError
from sparsebench.harness.bench.operands import level_of
from sparsebench.harness.bench.sampling import SCOPES
from sparsebench.harness.catalog import declaration_of, declare_all, load_op, parameters
from sparsebench.harness.inputs import sources
from sparsebench.harness.ops._active import RECORDED
from sparsebench.harness.ops._op import Op
from sparsebench.harness.patterns._mask import derived
from sparsebench.harness.plan import limits
from sparsebench.harness.plan._from_files import fields_of_source, require_enough, sources_of
from sparsebench.harness.plan.document import document
from sparsebench.kernels._removed import not_installed, removal
from sparsebench.results import files
from sparsebench.results.record import Case, Contender, Problem, Source, format_of

Model = TypeVar("Model", bound=BaseModel)


class _SuiteModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class AllowedError(_SuiteModel):
    """The largest relative error ||Y - R|| / ||R|| that a contender may have, and why."""

    at_most: float = Field(gt=0.0, lt=1.0)
    why: str = Field(min_length=1, max_length=200, pattern=r"\S")


class ContenderEntry(_SuiteModel):
    """A contender as written: lists in `params` and `options` are sweeps.

    Without a kernel it is what users of the format get (kernels/nn/default.py).
    """

    format: str
    kernel: str = "default"
    op: str | None = None
    at: dict[str, Any] = {}
    params: dict[str, Any] = {}
    options: dict[str, Any] = {}
    error: AllowedError | None = None


class WrittenSuite(_SuiteModel):
    """A suite as written."""

    schema_: Literal["sparsebench/suite@1"] = Field(alias="schema")
    title: files.Title
    description: files.Description = ""
    problems: list[dict[str, Any]] = Field(min_length=1)
    contenders: list[ContenderEntry] = Field(min_length=1)
    baselines: list[ContenderEntry] = []
    scopes: list[str] = Field(default=["kernel"], min_length=1)
    caches: list[Literal["cold", "hot"]] = Field(default=["cold"], min_length=1)

    @property
    def entries(self) -> list[tuple[str, ContenderEntry]]:
        """Return every contender with its place in the file, baselines last."""
        groups = {"contenders": self.contenders, "baselines": self.baselines}
        return [(f"{group}[{i}]", e) for group, es in groups.items() for i, e in enumerate(es)]


@dataclass(frozen=True)
class Contest:
    """One problem and its contenders, baselines first.

    A `reference` contest is not the suite's: it measures the noise floor (selection.py).
    """

    problem: Problem
    contenders: tuple[Contender, ...]
    reference: bool = False


@dataclass(frozen=True)
class Suite:
    """A suite with its contests."""

    name: str
    title: str
    text: str
    contests: tuple[Contest, ...]
    measures: tuple[tuple[str, str], ...] = (("kernel", "cold"),)  # (scope, cache)


def read(name: str, data: Path | None = None) -> Suite:
    """Read a suite by its path, or a packaged one by its name. Raises SuiteError."""
    return expand(*document("suites", "suite", name), data)


def expand(where: str, text: str, data: Path | None = None, *, published: bool = False) -> Suite:
    """Expand the text of a suite. Raises SuiteError, which names the suite as `where`.

    `published` says that the text belongs to a run, which may be older than this version: it may
    name removed kernels.
    """
    suite_file = parse(where, text, WrittenSuite)
    try:
        for place, entry in suite_file.entries:
            if published:
                entry.format = format_of(entry.kernel, entry.format)
            elif reason := removal(entry.kernel):
                raise SuiteError(f"{place}: {reason}")
            else:
                entry.format = canonical("formats", entry.format)
        entries = [entry for _, entry in suite_file.entries]
        declare_all(
            {("kernels", e.kernel) for e in entries} | {("formats", e.format) for e in entries}
        )
        sweeps = [[entry.params, entry.options] for entry in entries]
        limits.require_few(suite_file.problems, sweeps)
        by_id: dict[str, Problem] = {}  # a problem of two sweeps is measured once
        for number, axes in enumerate(suite_file.problems):
            for problem in _problems(number, axes, data):
                by_id.setdefault(problem.id, problem)
        problems = [*by_id.values()]
        for place, entry in suite_file.entries:
            _require_competes(place, entry, problems)
            _require_accepted(place, entry, problems)
        _require_scopes(suite_file.scopes, {problem.op for problem in problems})
        contests = tuple(_contest(suite_file, problem) for problem in problems)
    except SuiteError as error:
        raise SuiteError(f"{where}: {error}") from error
    measures = tuple(dict.fromkeys(product(suite_file.scopes, suite_file.caches)))
    return Suite(Path(where).stem, suite_file.title, text, contests, measures)


def parse(where: str, text: str, model: type[Model]) -> Model:
    """Read YAML into a model. Raises SuiteError."""
    return _validate(where, model, files.from_yaml(where, text, SuiteError))


def _validate(where: str, model: type[Model], data: Any) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        if not isinstance(data, dict):
            keys = ", ".join(f.alias or n for n, f in model.model_fields.items() if f.is_required())
            actual = "an empty file" if data is None else type(data).__name__
            raise SuiteError(f"{where}: expected {keys}; found {actual}") from error
        names = [f.alias or name for name, f in model.model_fields.items()]
        if "schema" in names and "schema" not in data:
            expected = "expected the line schema: sparsebench/suite@1"
            raise SuiteError(f"{where}: {expected}, found none") from error
        raise SuiteError(f"{where}: {files.first_error(error, names)}") from error


def _problems(number: int, entry: dict[str, Any], data: Path | None) -> Iterator[Problem]:
    where = f"problems[{number}]"
    axes = dict(entry)
    name = axes.pop("op", None)
    if not isinstance(name, str):
        actual = repr(name) if "op" in entry else "none"
        raise SuiteError(f"{where}.op: expected the name of an op, found {actual}")
    op = load_op(name)
    seeds = _sweep(f"{where}.seed", axes.pop("seed", 0))
    limits.require_seeds(f"{where}.seed", seeds)
    for source in list(sources_of(where, axes.pop("source", None), data, op)):
        from_source = fields_of_source(op, source, data)
        sweeps = []
        for axis, value in axes.items():  # a mapping sets several fields at once
            values = _sweep(f"{where}.{axis}", value)
            sweeps.append([item if isinstance(item, dict) else {axis: item} for item in values])
        for point in product(*sweeps):
            fields = _fields(where, op, (from_source, *point), source)
            require_enough(where, op, fields, source, data)
            for seed in seeds:
                yield Problem(name, fields, seed, source, op.defaults)


def _sweep(where: str, value: Any) -> list[Any]:
    if value == [] or value == {} or (isinstance(value, list) and {} in value):
        raise SuiteError(f"{where}: expected at least one value, found {value}")
    return value if isinstance(value, list) else [value]


def _fields(
    where: str, op: Op, settings: tuple[dict[str, Any], ...], source: Source | None
) -> dict[str, Any]:
    merged: dict[str, Any] = {}
    for setting in settings:
        both = merged.keys() & setting.keys()
        if both:
            raise SuiteError(f"{where}: expected {min(both)} to be set once, found it set twice")
        merged |= setting
    fields = _validate(where, op.fields, merged).model_dump()
    limits.require_sizes(where, fields)
    if source is None and fields.get("skew") == RECORDED:
        raise SuiteError(f"{where}.skew: expected {RECORDED!r} only with a source")
    try:
        sources.agree(fields["pattern"], source)
        for weight in op.weights:
            level_of(op, fields, weight)
    except SuiteError as error:
        raise SuiteError(f"{where}: {error}") from error
    return fields


def _require_scopes(scopes: Collection[str], ops: Collection[str]) -> None:
    """Raise SuiteError for a scope that is not timed, and that no op reads itself."""
    choices = [*SCOPES, *(reading for op in sorted(ops) for reading in load_op(op).readings)]
    for scope in scopes:
        if scope not in choices:
            expected = f"one of {', '.join(choices)}"
            raise SuiteError(
                f"scopes: expected {expected}; found {scope!r}{did_you_mean(scope, choices)}"
            )
    if not any(scope in SCOPES for scope in scopes):
        raise SuiteError(f"scopes: expected at least one of {', '.join(SCOPES)}; found none")


def _require_competes(where: str, entry: ContenderEntry, problems: Collection[Problem]) -> None:
    """Raise SuiteError for an entry that matches no problem."""
    ops = {problem.op for problem in problems}
    for name, value in entry.at.items():
        values, place = [p.fields[name] for p in problems if name in p.fields], f"{where}.at.{name}"
        if not any(each in values for each in _sweep(place, value)):
            named = ", ".join(sorted({str(each) for each in values})) or "none"
            expected = f"the {name} of a problem, one of {named}"
            raise SuiteError(f"{place}: expected {expected}; found {value!r}")
    if entry.op is not None and entry.op not in ops:
        actual = f"{entry.op!r}{did_you_mean(entry.op, ops)}"
        expected = f"expected an op of the problems: {', '.join(sorted(ops))}"
        raise SuiteError(f"{where}.op: {expected}; found {actual}")
    if not any(_competes(entry, problem) for problem in problems):
        actual = f"expected a problem with all of these, found none: {entry.at}"
        raise SuiteError(f"{where}.at: {actual}")


def _require_accepted(where: str, entry: ContenderEntry, problems: Collection[Problem]) -> None:
    """Raise SuiteError for a format, params or options that a kernel does not take."""
    kernel = declaration_of("kernels", entry.kernel)
    names = {canonical("formats", name) for name in (kernel.consumes, entry.format)}
    if kernel.consumes != "any" and len(names) > 1:
        expected = f"expected format {kernel.consumes} for kernel {entry.kernel}"
        raise SuiteError(f"{where}: {expected}, found {entry.format}")
    accepted = parameters(entry.format)
    for op in {problem.op for problem in problems if _competes(entry, problem)}:
        of_one = {f"{weight}.{name}" for weight in load_op(op).weights for name in accepted}
        _require_names(f"{where}.params", entry.params, accepted, of_one)
    if not (removal(entry.kernel) or not_installed(entry.kernel)):
        _require_names(f"{where}.options", entry.options, {*kernel.options})


def _competes(entry: ContenderEntry, problem: Problem) -> bool:
    if entry.op not in (None, problem.op):
        return False
    fields = problem.fields
    return all(name in fields and fields[name] in _sweep(name, v) for name, v in entry.at.items())


def _contest(suite_file: WrittenSuite, problem: Problem) -> Contest:
    by_case: dict[str, Contender] = {}  # a baseline that is also a contender counts once
    entries = sorted(suite_file.entries, key=lambda entry: entry[0].startswith("contenders"))
    for where, entry in entries:  # baselines first
        baseline = where.startswith("baselines")
        for contender in _contenders(where, entry, problem, baseline=baseline):
            by_case.setdefault(Case(problem, contender).id, contender)
    if not by_case:
        named = ", ".join(f"{name}={value}" for name, value in problem.fields.items())
        raise SuiteError(f"contenders: expected one at {problem.op} with {named}, found none")
    return Contest(problem, tuple(by_case.values()))


def _contenders(
    where: str, entry: ContenderEntry, problem: Problem, *, baseline: bool
) -> Iterator[Contender]:
    points = [
        _expand(f"{where}.{name}", getattr(entry, name), problem) for name in ("params", "options")
    ]
    stated = entry.error.model_dump() if entry.error else None
    for params, options in product(*points) if _competes(entry, problem) else ():
        error = stated or declaration_of("kernels", entry.kernel).error(problem["dtype"])
        yield Contender(entry.format, entry.kernel, params, options, baseline, error=error)


def _require_names(
    where: str, mapping: Mapping[str, Any], allowed: set[str], of_one: Collection[str] = ()
) -> None:
    for name in mapping.keys() - allowed - set(of_one):
        takes, hint = ", ".join(sorted(allowed)), did_you_mean(name, {*allowed, *of_one})
        raise SuiteError(f"{where}.{name}: unknown key; takes {takes or 'nothing'}{hint}")


def _expand(where: str, mapping: Mapping[str, Any], problem: Problem) -> Iterator[dict[str, Any]]:
    """Yield each point of the sweeps, with `$field` replaced by the value of the problem."""
    values_by_name = {**problem.fields, **derived(problem.fields)}
    sweeps = [_sweep(f"{where}.{name}", value) for name, value in mapping.items()]
    for values in product(*sweeps):
        point = dict(zip(mapping, values, strict=True))
        limits.require_values(where, point)
        for name, value in point.items():
            if isinstance(value, str) and value.startswith("$"):
                if value[1:] not in values_by_name:
                    expected = f"$ and one of {', '.join(values_by_name)}"
                    raise SuiteError(f"{where}.{name}: expected {expected}; found {value}")
                point[name] = values_by_name[value[1:]]
        yield point
