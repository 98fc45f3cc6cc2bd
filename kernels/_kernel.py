"""The contract that every file in kernels/ keeps.

A kernel file names one KERNEL. One of ours is an Engine (_common/operator.py), which declares how
to plan a call; the operator offers the contract of this file for it.
 `unsupported` answers before anything is built. `prepare` uploads, packs, compiles and may search.
It may use:

    weights       everything: their values stay the same
    activations   shapes, strides and dtype; it may also time candidates on their values

The harness redraws the activations from the same distribution before the published timing, so
nothing that `prepare` computes from their values can be correct. Which candidate is fastest may
depend on their distribution, for instance on how many hidden units are active. The choice may
depend on it too, and the row records the choice.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.kernels._common.capture import keep
from sparsebench.results.record import Problem


@dataclass(frozen=True)
class Operands:
    """The operands of a problem, as `prepare` receives them.

    weights      by operand name, in the format that the kernel consumes, or dense if that format
                 stores activations; they remain valid for the launch's lifetime
    activations  by operand name, dense and token-major; redrawn in place between `prepare` and the
                 timing, so `prepare` may time candidates on them but compute nothing from them
    definition   the op as a plain torch function of its dense operands, in their dtype
    pinned       the Launch.choice of this case in an earlier process of the run, which `prepare`
                 takes again without a search; None if there is none
    timed        the Launch.candidates of this case in an earlier process of the run: a search
                 times only the finalists among these; empty if there are none
    pattern      for an op with a sparse output (a weight's gradient): a matrix in the layout that
                 the output must have; its values have no meaning. None if the output is dense, as
                 it is for contenders of format dense
    """

    problem: Problem
    weights: Mapping[str, Format]
    activations: Mapping[str, Tensor]
    definition: Callable[..., Tensor]
    pinned: Mapping[str, Any] | None = None
    pattern: Format | None = None
    timed: Sequence[Mapping[str, Any]] = ()

    @property
    def device(self) -> torch.device:
        """Return the device of the operands."""
        return next(iter(self.activations.values())).device


Output = Tensor | Format
"""The result of a launch: a dense token-major tensor, or a matrix packed like operands.pattern."""


@dataclass(frozen=True)
class Launch:
    """The timed work and nothing else: a call computes the product on the operands' device.

    choice      what `prepare` chose (tile, layout, algorithm), and for a kernel that tunes also
                how (`by`); a Portfolio's has `chosen`
    code        digest of the machine code, if it is ours
    candidates  what was timed for the choice, the default first (search.py)
    lost        counts the values that the last call dropped because its format had no room for
                them; the harness asks after each call that it checks, and any is an error
    readings    the times in µs that the last call read itself, by the names of Op.readings. Such a
                call waits for the device and its host, as a server does, and no graph captures it

    The row records the first three. A CUDA graph that captures the launch keeps alive what the
    launch reads (capture.py).
    """

    run: Callable[[], Output]
    choice: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    lost: Callable[[], int] | None = None
    readings: Callable[[], Mapping[str, float]] | None = None

    def __call__(self) -> Output:
        """Enqueue the work on the current stream and return the output."""
        keep(self.run)
        return self.run()


@dataclass(frozen=True)
class Lossy:
    """Why a kernel rounds more than its op's bounds allow (harness/bench/correctness.py).

    at_most  largest relative error ||Y - R|| / ||R||, by the problem's dtype; the bounds hold in
             any other
    why      a sentence for a reader of the report
    """

    at_most: Mapping[str, float]
    why: str


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op whose sparse operand has one format.

    op           name of the op, or "any": the kernel runs `operands.definition`
    consumes     name of the format of the sparse operand, weights or hidden activations; or "any"
    device       "cuda", "cpu" or "any"
    prepare      (operands, **options) -> Launch; raises Unsupported, and never falls back
    unsupported  (problem, device) -> reason why the kernel cannot run the problem, or None
    lossy        the larger error that the kernel may have, unless the suite states one. Only the
                 suite's counts for kernels outside this repository
    tunes        accepted from packages written for 0.3, and without effect
    """

    op: str
    consumes: str
    device: str
    prepare: Callable[..., Launch]
    unsupported: Callable[[Problem, torch.device], str | None] = lambda problem, device: None
    tunes: bool = False
    lossy: Lossy | None = None


def refuse(reason: str | None) -> None:
    """Raise Unsupported if there is a reason."""
    if reason:
        raise Unsupported(reason)


@dataclass(frozen=True)
class Portfolio(Kernel):
    """A kernel that times other kernels on a whole problem and returns the launch of the fastest.

    The candidates are kernels of the same op that a suite can name, of any format, including dense.
    `Launch.choice` has the key `chosen`, "FORMAT, KERNEL", such as "dense, cublas". Rows and
    reports name that kernel, and a dense kernel does not count as a win of the portfolio's format.

    A kernel that searches its own configurations is not a portfolio. Neither is one that builds an
    op from products in its format and picks a kernel for each (default): its choice names them.
    """


def unsupported(kernel: Kernel, problem: Problem, device: torch.device) -> str | None:
    """Return the reason why a kernel cannot run a problem on a device, or None; builds nothing.

    Checks the op and the kind of device before the kernel's own `unsupported`.
    """
    if kernel.op not in ("any", problem.op):
        return f"computes {kernel.op}, not {problem.op}"
    if kernel.device not in ("any", device.type):
        return f"runs on {kernel.device}, not on {device.type}"
    return kernel.unsupported(problem, device)


DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""The torch dtype of a problem's operands, by the name that a suite uses.

tf32 is fp32 of which a product may use 10 bits of mantissa; an exact kernel may run it too.
fp8 is e4m3, whose sums may have 13 bits of mantissa, as on Hopper's tensor cores. A weight of ffn
in fp8 means unit_scale(columns) times the stored value.
An int8 operand is STEPS times the value that it means; outputs are rounded and saturate.
"""

NAMES = {dtype: name for name, dtype in DTYPES.items() if name != "tf32"}
"""The names of the dtypes of tensors; that of fp32 is fp32."""

OUTPUTS = DTYPES | {"fp8": torch.bfloat16}
"""The torch dtype of a problem's output, by the same names."""


STEPS = 32
"""Steps of int8 in one unit: values with a standard deviation of 0.9 reach 127."""


def poison(values: Tensor) -> None:
    """Fill with NaN, or integers with the least one: wrong values that no right output has."""
    values.fill_(torch.nan if values.is_floating_point() else torch.iinfo(values.dtype).min)


def output_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of a product whose operands have this dtype: bf16 for fp8."""
    return OUTPUTS["fp8"] if dtype == DTYPES["fp8"] else dtype


def unit_scale(columns: int) -> float:
    """Return the power of two nearest to 1 / sqrt(columns). It keeps such sums near 1.

    It scales drawn weights. Drawn fp8 weights have a standard deviation of 1, so it scales their
    products instead.
    """
    return float(2.0 ** -round(math.log2(columns) / 2))


def sum_scale(dtype: str, columns: int) -> float:
    """Return the power of two that multiplies the sums of a linear layer of k = `columns`.

    In int8 it keeps outputs in the range of int8, as unit_scale does for values; otherwise it is 1.
    """
    return unit_scale(columns) / STEPS if dtype == "int8" else 1.0
