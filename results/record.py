"""The records of a run: what to measure (Problem, Contender, Case), and the result (Row).

    Problem    one op on one set of operands, with the same bits on every machine
    Contender  a format and the kernel that multiplies it
    Case       a problem and a contender; its id never changes
    Row        one case in one process, scope and cache state, with its raw samples

These are plain data that survive a round trip through JSON, without torch or sparsebench imports.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from typing import Any, Literal, Self

ROWS_SCHEMA = "sparsebench/rows@6"
# Rows of older versions lack these fields; the fields then have their defaults.
SINCE_6 = frozenset({"judged_part"})
SINCE_5 = SINCE_6 | {"values", "loads"}
OLDER_ROWS: Mapping[str, frozenset[str]] = {
    "sparsebench/rows@3": SINCE_5 | {"late"},
    "sparsebench/rows@4": SINCE_5,
    "sparsebench/rows@5": SINCE_6,
}

Value = bool | int | float | str | list[int] | None
"""A field of a problem or a parameter of a contender; a list is a block, [r, c]."""

FORMATS_ONCE_DENSE: Mapping[str, str] = {
    "decoder_few": "cvse",
    "ffn_few": "cvse",
    "ffn_sparse": "cvse",
    "ffn_step_sparse": "active_csr",
    "ffn_twell": "twell",
    "mlp_few": "cvse",
    "mlp_sparse": "cvse",
    "twell_authors": "twell",
}
"""The formats of kernels whose contenders were named `dense`, after their weights, up to 0.2.0.

Ids of cases still hash the old name. This table never grows.
"""


def format_of(kernel: str, stored: str) -> str:
    """Return the current name of a contender's format."""
    return FORMATS_ONCE_DENSE.get(kernel, stored) if stored == "dense" else stored


UNPRUNED = ", unpruned weights"
"""The end of a label: the contender multiplies the weights as they were before pruning."""

POWER_LIMITED = 0.2  # a row is marked above this share of the contest's time


class Status(StrEnum):
    """How a case ended. Only `ok` rows have samples; other rows have the reason in `detail`."""

    OK = "ok"
    UNSUPPORTED = "unsupported"
    WRONG = "wrong"
    FAILED = "failed"
    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    FASTER_THAN_LIGHT = "faster_than_light"


@dataclass(frozen=True)
class Source:
    """A file with operands. Its SHA-256 identifies it; `path` is its place at the time."""

    path: str
    sha256: str
    tensor: str | None = None

    @property
    def label(self) -> str:
        """Return the file, and the tensor in it, for a reader."""
        return f"{self.path}:{self.tensor}" if self.tensor else self.path


@dataclass(frozen=True)
class Problem:
    """One op with its fields (m, n, k, dtype, pattern, sparsity, block ...) and a seed.

    Problems with equal ids have the same bits in every operand on every device. `defaults` are
    those of the op's fields. A field with its default does not enter the id, so an op can gain a
    field and keep the ids of older rows; but a published default never changes.
    """

    op: str
    fields: Mapping[str, Value]
    seed: int = 0
    source: Source | None = None
    defaults: Mapping[str, Value] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        """Return one field; raises a KeyError that names the op and the field."""
        if name not in self.fields:
            raise KeyError(f"op {self.op} has no field {name}")
        return self.fields[name]

    @property
    def text(self) -> str:
        """Write the op and the fields that are set: `linear m=16 n=4096 k=4096`."""
        return " ".join([self.op, *(f"{n}={v}" for n, v in self.fields.items() if v is not None)])

    @cached_property
    def id(self) -> str:
        """Return the hash of the problem; a source counts by content, not by path."""
        fields = {n: v for n, v in self.fields.items() if (n, v) not in self.defaults.items()}
        source = asdict(self.source) if self.source else None
        if source:
            del source["path"]
        return _digest({"op": self.op, "fields": fields, "seed": self.seed, "source": source})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        source = Source(**data["source"]) if data.get("source") else None
        return cls(data["op"], dict(data["fields"]), data["seed"], source, dict(data["defaults"]))


@dataclass(frozen=True)
class Contender:
    """A format and a kernel, by name. The format is that of the sparse operand.

    params    of the format: `block` for all weights, `wd.block` for the weight wd only
    options   of the kernel, such as `tuned`
    baseline  whether speedups are relative to it
    twin      whether it is the second half of an A/A pair of equal kernels
    error     the larger relative error that it may have, `at_most`, and `why`, by its suite or
              because its kernel is lossy; else None
    weights   `pruned`, or `original`: a dense product with the weights as they were before pruning,
              of the layer that a sparse one replaces (plan/unpruned.py)
    """

    format: str
    kernel: str
    params: Mapping[str, Value] = field(default_factory=dict)
    options: Mapping[str, Value] = field(default_factory=dict)
    baseline: bool = False
    twin: bool = False
    error: Mapping[str, Any] | None = None
    weights: Literal["pruned", "original"] = "pruned"

    @property
    def is_unpruned(self) -> bool:
        return self.weights == "original"

    @cached_property
    def label(self) -> str:
        """Return the name for a reader: `bsr/bsr_triton`, `bsr/torch_bsr tuned=True`."""
        options = "".join(f" {name}={value}" for name, value in sorted(self.options.items()))
        ends = f"{UNPRUNED if self.is_unpruned else ''}{' (twin)' if self.twin else ''}"
        return f"{self.format}/{self.kernel}{options}{ends}"

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Read what asdict wrote, with the format as it is named today."""
        return cls(**{**data, "format": format_of(data["kernel"], data["format"])})

    def params_of(self, weight: str) -> dict[str, Value]:
        """Return the parameters of one weight; its own override those of all weights."""
        of_all = {name: value for name, value in self.params.items() if "." not in name}
        prefix = f"{weight}."
        return of_all | {
            name.removeprefix(prefix): value
            for name, value in self.params.items()
            if name.startswith(prefix)
        }


@dataclass(frozen=True)
class Case:
    """One problem and one contender: everything needed to run it again."""

    problem: Problem
    contender: Contender

    @cached_property
    def id(self) -> str:
        """Hash the canonical JSON, without `baseline` and `error`, which do not affect the run."""
        names = "format", "kernel", "params", "options", "twin"
        contender = {name: getattr(self.contender, name) for name in names}
        if self.contender.kernel in FORMATS_ONCE_DENSE:
            contender["format"] = "dense"
        if self.contender.is_unpruned:  # else the id is that of rows up to 0.4
            contender["weights"] = self.contender.weights
        return _digest({"problem": self.problem.id, "contender": contender})

    @property
    def original(self) -> Self:
        """Return the case that an A/A twin repeats; any other case returns itself."""
        return replace(self, contender=replace(self.contender, twin=False))

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(Problem.from_json(data["problem"]), Contender.from_json(data["contender"]))


@dataclass(frozen=True)
class Row:
    """The result of one case in one process, for one scope and cache state.

    A contest is one problem in one process, with its contenders timed in turn, round by round. So
    rows of one problem, `replicate` and `attempt` were measured side by side. `samples_us` are in
    the order taken, `samples_per_block` in each round.
    """

    case: Case
    status: Status
    replicate: int = 0
    attempt: int = 0  # at the contest; a crash or a hang leads to another attempt
    reference: bool = False  # whether the row is of a noise-floor contest, which every run has
    device: str = "cpu"  # GPU UUID, or the name of the CPU
    # kernel: device time; op: time of a call from Python, host cost included; chain: device time of
    # a layer in a chain of equal layers in one graph
    scope: str = "kernel"
    cache: str = "cold"  # the L2 cache before each sample: cold (flushed) or hot
    clock: str = "host"  # host, events (CUDA) or graph (events around a CUDA-graph replay)
    detail: str = ""
    choice: Mapping[str, Any] = field(default_factory=dict)  # the choice of `prepare`
    candidates: tuple[Mapping[str, Any], ...] = ()  # timed by `prepare`, the default first
    code: str | None = None  # digest of the compiled code; None for libraries
    error: float | None = None  # ||out - reference|| / ||reference||
    error_of_bound: float | None = None  # the error over its bound: of an element, or of the whole
    usual_error: float | None = None  # that of torch's product, or expected from rounding
    bias: float | None = None  # systematic part of the error, relative, beyond chance
    usual_bias: float | None = None  # the part expected from rounding and truncation
    judged_part: str = ""  # of the output, if no process had the memory for the whole answer
    draws: tuple[int, ...] = ()  # seeds of the activations that were checked
    values: Mapping[str, str] = field(default_factory=dict)  # distribution of each operand
    sparsity: float | None = None  # achieved, over all elements of the weights
    nnz: int | None = None
    digest: str | None = None  # digest of the operands
    flops: float | None = None  # on non-zeros only: no padding, no skipped zeros
    dense_flops: float | None = None
    fewest_bytes: int | None = None
    bound_us: float | None = None  # shortest time that the device's measured ceilings allow
    bound_by: str | None = None  # memory or compute
    raises: float | None = None  # factor by which a reference row beats bound_us
    stored_bytes: int | None = None
    dense_bytes: int | None = None
    held_bytes: int | None = None  # kept between calls on the device: packing, output, workspace
    peak_bytes: int | None = None  # peak on the device during prepare and the first call
    convert_us: float | None = None
    prepare_s: float | None = None
    energy_j: float | None = None  # energy of one hot call, from the board's sensor
    energy_window_s: float | None = None
    # `half`, with pauses, and `full`, back to back for 3 s: us_per_call, j_per_call, sm_mhz,
    # window_s, calls (bench/energy.py)
    loads: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    telemetry: Mapping[str, float] = field(default_factory=dict)  # see telemetry.py
    samples_us: tuple[float, ...] = ()
    samples_per_block: int = 1
    late: float | None = None  # share of samples in which the GPU may have waited for the host

    @property
    def chosen(self) -> str:
        """Return the kernel that a portfolio chose, "FORMAT, KERNEL"; "" for other kernels.

        Rows up to 0.2.0 call the format cvse "sparse activations".
        """
        return str(self.choice.get("chosen", "")).replace("sparse activations, ", "cvse, ")

    @classmethod
    def from_json(cls, data: Mapping[str, Any], case: Case | None = None) -> Self:
        """Read a row; `case` is its case if that was read before, so that its rows share it."""
        fixed = {
            "case": case or Case.from_json(data["case"]),
            "status": Status(data["status"]),
            "samples_us": tuple(data["samples_us"]),
            "draws": tuple(data["draws"]),
            "candidates": tuple(data["candidates"]),
        }
        return cls(**{**data, **fixed})


def _digest(data: Mapping[str, Any]) -> str:
    canonical = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
