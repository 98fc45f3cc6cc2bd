"""The contract that every file in kernels/ keeps.

A kernel file NAME.py names one KERNEL, and may name a DGRAD: the kernel NAME_dgrad of the input's
gradient, by the same code. `unsupported` answers before anything is built; `prepare` uploads,
packs, compiles and tunes; the Launch that it returns is what is timed.

What `prepare` may look at:

    weights       everything: their values stay as they are
    activations   shapes, strides, dtype; it may also time candidates on their values

The harness redraws the activations, from the same distribution, before the timing that is
published. So nothing that is computed from their values in `prepare` can be right. But what is
fastest may depend on their distribution, such as how many hidden units are on: the choice may, too,
and the row says what was chosen.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.kernels._common.capture import keep
from sparsebench.results.record import Problem


@dataclass(frozen=True)
class Operands:
    """What a kernel is given.

    weights      packed in the format the kernel consumes, by operand name; theirs to read for ever
    activations  dense and token-major, by operand name; redrawn in place between preparing and
                 timing: `prepare` may time candidates on them, and compute nothing from them
    definition   the op as a plain torch function of its dense operands, in their dtype
    pinned       the choice that `prepare` made for this case in an earlier process of the run (its
                 Launch.choice), to be taken again without a search; None where there is none
    timed        what an earlier process of the run timed for this case (its Launch.candidates): a
                 long search times the finalists of these and no others; empty where there is none
    pattern      of an op whose output is sparse (a weight's gradient): what the output must be
                 packed like; its values mean nothing. None where the output is dense, as it is for
                 whoever competes with format dense
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
        """Return where the operands are."""
        return next(iter(self.activations.values())).device


Output = Tensor | Format
"""What a launch returns: a dense token-major tensor, or a matrix packed like operands.pattern."""


@dataclass(frozen=True)
class Launch:
    """The timed work and nothing else: call it for the product, on the operands' device.

    `choice` records what `prepare` chose (tile, layout, algorithm), and how where the kernel
    tunes (`by`); that of a Portfolio has `chosen`. `code` is a digest of the machine code, where it
    is ours. `candidates` is what was timed for the choice, the default first (search.py). All three
    go into the row. A CUDA graph that it is captured into keeps what it reads (capture.py). `lost`
    counts values that the last call left out, since its format had no room for them: one is wrong,
    however small. The harness asks after each call that it checks.
    """

    run: Callable[[], Output]
    choice: Mapping[str, Any] = field(default_factory=dict)
    code: str | None = None
    candidates: Sequence[Mapping[str, Any]] = ()
    lost: Callable[[], int] | None = None

    def __call__(self) -> Output:
        """Enqueue the work on the current stream and return the output."""
        keep(self.run)
        return self.run()


@dataclass(frozen=True)
class Kernel:
    """One way to compute an op from weights in one format.

    op           the op's name, or "any": the kernel runs `operands.definition`
    consumes     the format's name, or "any"
    device       "cuda", "cpu" or "any"
    prepare      (operands, **options) to a Launch; raises Unsupported, and never falls back
    unsupported  (problem, device) to the reason why this kernel cannot run here, or None
    tunes        `prepare` takes the option `tuned` (_common/tuned_table.py): tables hold its
                 configurations
    """

    op: str
    consumes: str
    device: str
    prepare: Callable[..., Launch]
    unsupported: Callable[[Problem, torch.device], str | None] = lambda problem, device: None
    tunes: bool = False

    def refusal(self, problem: Problem, device: torch.device) -> str | None:
        """Say why it cannot run a problem on a device, or None; builds nothing."""
        if self.op not in ("any", problem.op):
            return f"computes {self.op}, not {problem.op}"
        if self.device not in ("any", device.type):
            return f"runs on {self.device}, not on {device.type}"
        return self.unsupported(problem, device)


@dataclass(frozen=True)
class Portfolio(Kernel):
    """A kernel that times other kernels on a whole problem and returns the launch of the fastest.

    The candidates are kernels of the same op that a suite can name, of any format, dense ones
    included. `Launch.choice` has the key `chosen`, "FORMAT, KERNEL", such as "dense, cublas":
    rows and reports name it, and a dense kernel is not a win of the portfolio's format.

    A kernel that searches its own configurations is no portfolio. Nor is one that builds an op from
    products of its own format and picks a kernel for each (bsr_ffn): its choice names them.
    """


DTYPES = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
    "tf32": torch.float32,
    "fp8": torch.float8_e4m3fn,
}
"""The dtypes of a problem, by the name a suite uses, and how its operands are stored.

tf32 is fp32 of which a product may use 10 bits of mantissa. An exact kernel may run it too.
fp8 is e4m3, whose sums may be kept in 13 bits of mantissa, as Hopper's tensor cores do. Weights of
ffn stand there for unit_scale(columns) times what is stored.
"""

OUTPUTS = DTYPES | {"fp8": torch.bfloat16}
"""How the output of a problem is stored, by the same names."""


def unit_scale(columns: int) -> float:
    """Return the power of two next to 1 / sqrt(columns), by which sums of as many terms keep to 1.

    It scales drawn weights; in fp8, where these have a deviation of 1, products with them.
    """
    return float(2.0 ** -round(math.log2(columns) / 2))
