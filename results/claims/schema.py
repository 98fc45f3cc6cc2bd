"""The file of a claim: who said what, under which conditions, and which tests would show it.

    schema: sparsebench/claim@1
    title: Spense makes fp8 layers faster          for tables
    statement: ...                                 at most 25 words if it is verbatim
    verbatim: true
    source: {title: ..., url: ..., date: "2026-06-09", kind: preprint, checked: how we read it}
    hardware: {scope: named, gpus: [B200]}         general: a failure on any GPU refutes it
    conditions:                                    published: null means unknown
      dtype: {published: fp8, ours: fp8}
      timing: {published: null, ours: device time}
    readings: [how we read vague words]
    measure: {suite: spense-ffn, only: "dtype=fp8"}    or a suite: problems, contenders, baselines
                                                   data: true if its problems are files below
                                                   --data; without it, those in the runs count
    tests:
      - name: at decode
        subject: {format: spense}                  the fastest of these in each contest ...
        baseline: {format: dense}                  ... over the fastest of these
        metric: speedup                            metrics.py
        at_least: 1.2                              or at_most
        claimed: up to 1.25×                       as the source states it, if it differs from that
        unit: x
        quantifier: exists                         or typical (the mean of all cells), for_all
        at: {m: [16, 64]}                          cells: problems with these fields
        levels: [0.5, 0.95]                        and sparsity in this range, to a percent
        over: linear                               each speedup over that of this op
        proxy: one layer, not a served model       why this is less than what was claimed
      - trained: parameters                        cells: trainings of train_lm.py --pattern, each
        ...                                        against dense of equal parameters or width
      - whole: step                                cells: files of whole_model.py, a pass or step;
        ...                                        kernels are those of the MLP
    bounds: ["bytes of 2:4 in fp8: at most 1.6×"]  what the format allows, by arithmetic
    commands: [sparsebench claims check NAME]      that measure it again; the default is this one
    missing: a B200, and vLLM with this format     why the claim itself is not tested
    caveats: [what a reader must know]

`read` refuses a claim that is incomplete or contradicts itself, and names the line.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sparsebench.errors import SuiteError
from sparsebench.results import files
from sparsebench.results.claims.metrics import METRICS, SIGNS

SCHEMA = "sparsebench/claim@1"
QUOTED_WORDS = 25  # the longest verbatim quotation
OF_TRAINING = "speedup", "memory_saved", "loss_saved"
OF_WHOLE = "speedup", "memory_saved", "energy_saved"
FIELDS_OF_TRAINING = "data", "pattern", "block", "width"

Text = Annotated[str, Field(min_length=1, max_length=600, pattern=r"\S")]
Share = Annotated[float, Field(gt=0, le=1)]
Level = Annotated[float, Field(ge=0, lt=1)]
Scalar = str | int | float | bool


class _ClaimModel(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ClaimSource(_ClaimModel):
    """The source of a statement, and how we checked that it says so."""

    title: Text
    url: Annotated[str, Field(pattern=r"^https?://\S+$")]
    date: Annotated[str, Field(pattern=r"^\d{4}(-\d\d){0,2}$")]
    kind: Literal["announcement", "paper", "preprint", "documentation", "code", "issue"]
    checked: Text


class Hardware(_ClaimModel):
    """The GPUs that a statement names, and whether it is about them or about any GPU."""

    scope: Literal["named", "general"]
    gpus: list[Text] = []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.scope == "named" and not self.gpus:
            raise ValueError("gpus, because the scope is named")
        return self


class Condition(_ClaimModel):
    """A condition: the published value and ours; null is an unknown one, or one not measured."""

    published: str | int | float | None
    ours: str | int | float | None = None


class Chosen(_ClaimModel):
    """A choice of contenders: of a format, of these kernels, with these options."""

    format: str | None = None
    kernel: str | list[str] = []
    options: dict[str, Scalar] = {}

    @model_validator(mode="after")
    def _some(self) -> Self:
        if not (self.format or self.kernel):
            raise ValueError("a format or a kernel")
        return self

    @property
    def kernels(self) -> list[str]:
        """Return the names of the kernels; an empty list means any."""
        return [self.kernel] if isinstance(self.kernel, str) else self.kernel


class Measure(_ClaimModel):
    """What to run: a suite by name or file, or one given here."""

    suite: str | None = None
    only: str = ""
    problems: list[dict[str, Any]] = []
    contenders: list[dict[str, Any]] = []
    baselines: list[dict[str, Any]] = []
    energy: bool = False
    data: bool = False

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.suite is None) == (not self.problems):
            raise ValueError("the name of a suite, or problems, and not both")
        if self.problems and not self.contenders:
            raise ValueError("contenders, because problems are given")
        if self.problems and (self.only or self.data):
            raise ValueError("only and data together with the name of a suite")
        if self.data and self.only:
            raise ValueError("at and levels in a test instead of only, because data is true")
        return self


class Test(_ClaimModel):
    """One threshold on one metric over some cells."""

    __test__ = False  # pytest collects classes of this name

    name: Text
    subject: Chosen
    baseline: Chosen
    metric: Literal["speedup", "of_ideal", "energy_saved", "memory_saved", "loss_saved", "storage"]
    unit: Literal["x", "%"]
    at_least: float | None = None
    at_most: float | None = None
    claimed: Text | None = None
    quantifier: Literal["exists", "typical", "for_all"]
    at: dict[str, Scalar | list[Scalar]] = {}
    levels: Annotated[list[Level], Field(min_length=2, max_length=2)] | None = None
    over: Text | None = None
    measure: Measure | None = None
    trained: Literal["width", "parameters", "time"] | None = None
    whole: Literal["forward", "step"] | None = None
    proxy: Text | None = None

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if self.unit != (unit := METRICS[self.metric].unit):
            raise ValueError(f"unit {unit} of {self.metric}, not {self.unit}")
        if (self.at_least is None) == (self.at_most is None):
            actual = "both" if self.at_least is not None else "neither"
            raise ValueError(f"a threshold, at_least or at_most, not {actual}")
        self._agree_on_files()
        if self.over and (self.metric != "speedup" or self.quantifier == "exists"):
            raise ValueError("over with a speedup that is typical or for_all")
        return self

    @property
    def of_file(self) -> bool:
        """Return whether its cells come from a file of a command and not from a suite."""
        return self.trained is not None or self.whole is not None

    @property
    def distance(self) -> int:
        """Return how far a test is from its claim: no proxy, a whole model, a part of one."""
        return 0 if not self.proxy else 1 if self.of_file else 2

    @property
    def samples(self) -> str:
        """Return what an interval is over: `processes`, or `seeds` of a training."""
        return "seeds" if self.trained else "processes"

    def _agree_on_files(self) -> None:
        if self.trained is None and self.metric == "loss_saved":
            raise ValueError("trained, for a metric of the loss")
        if self.of_file and (self.measure or (self.trained and self.whole)):
            raise ValueError("one of measure, trained and whole, not two")
        kind, metrics = ("training", OF_TRAINING) if self.trained else ("a whole model", OF_WHOLE)
        if self.of_file and self.metric not in metrics:
            raise ValueError(f"a metric of {kind}, {' or '.join(metrics)}, not {self.metric}")
        fields = FIELDS_OF_TRAINING if self.trained else ()
        if self.of_file and (lost := [name for name in self.at if name not in fields]):
            expected = ", ".join(fields) or "none"
            raise ValueError(f"fields of {kind}, some of {expected}, not {lost[0]}")

    @property
    def upward(self) -> bool:
        """Return whether larger values support the claim."""
        return self.at_least is not None

    @property
    def limit(self) -> float:
        """Return the tested value, in the unit."""
        value = self.at_least if self.at_least is not None else self.at_most
        assert value is not None
        return value

    @property
    def limit_text(self) -> str:
        """Write the tested value: `1.25×`."""
        return f"{self.limit:g}{SIGNS[self.unit]}"

    @property
    def claimed_text(self) -> str:
        """Return the value as the source states it; else the tested one."""
        return self.claimed or ("" if self.upward else "at most ") + self.limit_text

    @property
    def over_text(self) -> str:
        return f" over that of {self.over}" if self.over else ""

    def meets(self, value: float) -> bool:
        """Return whether a value reaches the tested one."""
        return value >= self.limit if self.upward else value <= self.limit

    @property
    def sentence(self) -> str:
        sign = "≥" if self.upward else "≤"
        how = {
            "exists": "in a cell",
            "typical": "on average",
            "for_all": "in every cell",
        }
        metric = self.metric.replace("_", " ") + self.over_text
        return f"{metric} {sign} {self.limit_text} {how[self.quantifier]}"


class Claim(_ClaimModel):
    """A claim; the module's docstring shows an example."""

    schema_: Literal["sparsebench/claim@1"] = Field(alias="schema")
    title: Text
    statement: Text
    verbatim: bool
    source: ClaimSource
    hardware: Hardware
    conditions: dict[str, Condition] = Field(min_length=1)
    readings: list[Text] = []
    measure: Measure | None = None
    tests: list[Test] = []
    bounds: list[Text] = []
    commands: list[Text] = []
    missing: Text | None = None
    caveats: list[Text] = []

    @model_validator(mode="after")
    def _agree(self) -> Self:
        words = len(self.statement.split())
        if self.verbatim and words > QUOTED_WORDS:
            raise ValueError(f"a quote of at most {QUOTED_WORDS} words, not {words}")
        for test in self.tests:
            if not (test.measure or self.measure or test.of_file):
                raise ValueError(f"measure, for the test {test.name}")
        names = [test.name for test in self.tests]
        if len(set(names)) < len(names):
            raise ValueError(f"tests of different names, not {', '.join(names)}")
        whole = [test.name for test in self.tests if not test.proxy]
        if (self.missing is None) != bool(whole):
            why = "why the claim itself is not tested"
            raise ValueError(f"missing ({why}) exactly if every test is a proxy")
        return self

    def measured(self, test: Test) -> Measure | None:
        """Return what a test measures: its own `measure`, or the claim's."""
        return test.measure or (None if test.of_file else self.measure)


KEYS = [
    info.alias or name
    for model in (Claim, ClaimSource, Hardware, Condition, Chosen, Measure, Test)
    for name, info in model.model_fields.items()
]


@dataclass(frozen=True)
class ClaimFile:
    """A claim with its name, and the lines of its parts in the file."""

    name: str
    where: str
    claim: Claim
    root: yaml.Node

    def at(self, *path: str | int) -> str:
        """Return `FILE:LINE` of a part; if it is missing, of its nearest parent."""
        return f"{self.where}:{files.line_of(self.root, path)}"


def parse(where: str, text: str) -> ClaimFile:
    """Read the text of a claim; error messages begin with `where`."""
    data = files.from_yaml(where, text, SuiteError)
    root = yaml.compose(text, yaml.SafeLoader)
    if not isinstance(data, dict) or root is None:
        raise SuiteError(f"{where}:1: expected a claim, found {type(data).__name__}")
    try:
        claim = Claim.model_validate(data)
    except ValidationError as error:
        raise SuiteError(f"{where}:{files.first_error(error, KEYS, root)}") from error
    return ClaimFile(Path(where).stem, where, claim, root)
