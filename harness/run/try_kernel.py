"""Try one kernel on one problem: `sparsebench try`, for use after each change of a kernel.

    sparsebench try bsr_wgmma m=4096 n=4096 k=4096 block=64 sparsity=0.9

    words ─> a suite of one problem ─> contest: the kernel beside its baseline ─> a line for each

A word is a field of the op (m=64), an option of the kernel (tuned=false), a parameter of the format
(dense_fraction=0.5, wd.split=columns), or one of OF_TRY. A parameter that is not given takes the
field of its name, so a BSR kernel's blocks are the problem's. One process is a look, never a
verdict.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import yaml
from rich.console import Group
from rich.markup import escape
from rich.table import Table

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError, Unsupported
from sparsebench.harness.bench import contest
from sparsebench.harness.bench import device_ceilings as ceilings
from sparsebench.harness.bench.contest_state import ContestOptions, OnFailure
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import Declaration, declaration_of, is_outside, load_op, parameters
from sparsebench.harness.patterns._mask import derived
from sparsebench.harness.plan.suite import Contest, expand
from sparsebench.harness.plan.unpruned import with_unpruned
from sparsebench.harness.run.profiling import call_each
from sparsebench.results import files
from sparsebench.results.record import Row, Status
from sparsebench.results.tables.contests import SHORT_US
from sparsebench.results.tables.frame import frame

OF_TRY = {"op", "format", "baseline", "seed"}
HEADINGS = "time, µs", "quartiles", "speedup", "of limit", "error", "of usual", "of allowed"
ON_CUDA = {"attention": "sdpa_cudnn", "attention_backward": "sdpa_cudnn_backward"}
"""The baselines on CUDA of ops that cuBLAS does not compute."""
DTYPES = {"cuda": "bf16", "cpu": "fp32"}
CLOCKS = {
    "graph": "device time of a CUDA-graph replay, cold L2",
    "events": "device time, cold L2",
    "host": "host time",
}


@dataclass(frozen=True)
class TrialResult:
    """A row of the kernel, one of its baseline, the device's name and a GPU's empty launch."""

    rows: list[Row]
    device: str
    launch_us: float | None

    @property
    def right(self) -> bool:
        return all(row.status is Status.OK for row in self.rows)


def try_kernel(
    name: str,
    words: Sequence[str],
    device: torch.device,
    data: Path | None = None,
    on_failure: OnFailure = lambda *failure: None,
) -> TrialResult:
    """Generate operands, convert them, and check and time a kernel beside its baseline.

    `on_failure` receives tracebacks. Raises SuiteError for a word that cannot be used, and
    Unsupported if the kernel cannot run the problem here.
    """
    planned = plan(name, words, device, data)
    contenders = [*planned.contenders]
    # Check first: ceilings and the baseline's search take 30 to 70 s.
    for contender in sorted(contenders, key=lambda contender: contender.baseline):
        if is_outside(contender):
            continue  # its own process says so
        if reason := unsupported(planned.problem, contender, device):
            raise Unsupported(f"{contender.kernel}: {reason}")
    measured = ceilings.measure(device) if device.type == "cuda" else None
    options = ContestOptions(ceilings=measured)
    rows, _ = contest.run(planned.problem, contenders, device, data, options, on_failure=on_failure)
    rows.sort(key=lambda row: row.case.contender.baseline)
    for row in rows:
        if row.status is Status.UNSUPPORTED:
            raise Unsupported(f"{row.case.contender.kernel}: {row.detail}")
    called = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return TrialResult(rows, called, measured.launch_us if measured else None)


def repeat(
    name: str, words: Sequence[str], device: torch.device, times: int, data: Path | None = None
) -> None:
    """Run a checked kernel `times` times, alone and untimed, for a profiler.

    On a GPU the calls lie in an NVTX range (profiling.py). Raises Unsupported, or SuiteError if the
    output is wrong.
    """
    planned = plan(name, words, device, data)
    alone = next(c for c in planned.contenders if c.kernel == name)
    for case in call_each([replace(planned, contenders=(alone,))], device, data, times):
        if case.status is not Status.OK:
            error = Unsupported if case.status is Status.UNSUPPORTED else SuiteError
            raise error(case.text)


def plan(
    name: str, words: Sequence[str], device: torch.device, data: Path | None = None
) -> Contest:
    """Return the contest of the words: the kernel and its baseline. Raises SuiteError."""
    kernel, values = declaration_of("kernels", name), _parse_fields(words)
    settings = {word: values.pop(word) for word in OF_TRY & values.keys()}
    op = str(settings.get("op", "linear" if kernel.op == "any" else kernel.op))
    stored = str(settings.get("format", "dense" if kernel.consumes == "any" else kernel.consumes))
    usual = ON_CUDA.get(op) if device.type == "cuda" else None
    baseline = str(settings.get("baseline", usual or ceilings.DENSE[device.type]))
    seed = settings.get("seed", 0)
    if type(seed) is not int:
        raise SuiteError(f"try: seed: expected an integer, found {seed!r}")
    fields, options, params = _sort_values(values, kernel, op, stored)
    blocks = "blocks" if "block" in fields else "unstructured"
    pattern = blocks if fields.get("sparsity") else "dense"
    fields = {"dtype": DTYPES[device.type], "pattern": pattern, **fields}

    def expanded(params: Mapping[str, Any]) -> Contest:
        contender = {"format": stored, "kernel": name}
        suite = {
            "schema": "sparsebench/suite@1",
            "title": f"try {name}",
            "problems": [{"op": op, "seed": seed, **_one(fields)}],
            "contenders": [contender | {"params": _one(params), "options": _one(options)}],
            "baselines": [{"format": "dense", "kernel": baseline}],
        }
        (contest,) = with_unpruned(expand(f"try {name}", yaml.safe_dump(suite), data).contests)
        return contest

    every = expanded(params).problem.fields
    values = {**every, **derived(every)}  # a parameter takes the value of a field of its name
    names = parameters(stored) & values.keys()
    return expanded({name: values[name] for name in names} | params)


def _parse_fields(words: Sequence[str]) -> dict[str, Any]:
    """Parse field=value; a value is YAML, or 32x64 for a block of 32 rows and 64 columns."""
    values: dict[str, Any] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not (name and equals and text):
            raise SuiteError(f"try: expected field=value, found {word!r}")
        if name in values:
            raise SuiteError(f"try: expected {name} once, found it twice")
        block = re.fullmatch(r"(\d+)x(\d+)", text)
        sides = block and [int(side) for side in block.groups()]
        values[name] = sides or files.from_yaml(f"try: {name}", text, SuiteError)
    return values


def _one(values: Mapping[str, Any]) -> dict[str, Any]:
    """Wrap each value in a list, because a list in a suite is a sweep."""
    return {name: [value] for name, value in values.items()}


def _sort_values(
    values: Mapping[str, Any], kernel: Declaration, op: str, stored: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    loaded = load_op(op)
    fields, options = set(loaded.fields.model_fields), {*kernel.options}
    params = parameters(stored)
    params |= {f"{weight}.{name}" for weight in loaded.weights for name in params}
    names = fields | options | params | OF_TRY
    for name in values.keys() - names:
        expected = f"expected one of {', '.join(sorted(names))}"
        raise SuiteError(f"try: {expected}; found {name!r}{did_you_mean(name, names)}")
    groups = fields, options - fields, params - fields - options
    of_field, option, param = ({n: v for n, v in values.items() if n in g} for g in groups)
    return of_field, option, param


def report(result: TrialResult) -> Group:
    """Return the result for a terminal, one line per row."""
    table, rows = frame(result.rows), result.rows
    shown = Table(title=rows[0].case.problem.text, title_justify="left", box=None, pad_edge=False)
    for heading in ("", *HEADINGS):
        shown.add_column(heading, justify="right" if heading else "left", no_wrap=True)
    reasons: list[str] = []  # below the table, which cuts long texts off
    for row, (_, line) in zip(rows, table.iterrows(), strict=True):
        label = escape(row.case.contender.label)
        if row.status is not Status.OK:
            shown.add_row(label, f"[red]{row.status}[/]")
            reasons.append(f"{label}: {row.status}: {escape(row.detail)}")
            continue
        faster = "baseline" if line.label == line.baseline_label else f"{line.speedup:.2f}"
        of_bound = f"{line.of_bound:.0%}" if line.of_bound > 0 else ""
        quartiles = f"{line.q1_us:.2f} to {line.q3_us:.2f}"
        errors = f"{row.error or 0:.1e}", f"{line.error_of_usual:.2f}"
        allowed = f"{row.error_of_bound or 0:.2f}"
        shown.add_row(label, f"{line.median_us:.2f}", quartiles, faster, of_bound, *errors, allowed)
    return Group(shown, *reasons, *_notes(rows[0], table.iloc[0], result))


def _notes(row: Row, line: pd.Series, result: TrialResult) -> list[str]:
    choice = ", ".join(f"{name} {value}" for name, value in row.choice.items())
    floor = ""
    if result.launch_us and line.median_us < SHORT_US:
        floor = f"{result.launch_us:.2f} µs, the floor of an isolated call"
    weights = ""
    if row.stored_bytes and row.dense_bytes:
        weights = f"{row.stored_bytes} bytes, {row.stored_bytes / row.dense_bytes:.1%} of dense"
    facts = {
        "slower than it should be": str(line["mark"]),
        "accuracy": str(line.marks),
        "choice": choice,
        "hardware limit": f"{row.bound_us:.2f} µs by {row.bound_by}" if row.bound_us else "",
        "empty launch": floor,
        "weights": weights,
        "before the first call": f"convert {row.convert_us or 0:.0f} µs, "
        f"prepare {row.prepare_s or 0:.2f} s",
        "machine code": row.code or "",
    }
    lines = [f"{name}: {escape(text)}" for name, text in facts.items() if text]
    return [*lines, f"{result.device}, {CLOCKS[row.clock]}, one process: a look"]
