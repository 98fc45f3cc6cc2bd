"""Is the output right? Three questions, all against the op's definition in fp64.

    whole      ||Y - R|| <= eps ||S||
    element    |Y - R| <= eps |R| + 8 eps S + t, where S > 0
    usual      ||Y - R|| / ||R|| <= 3 usual errors, unless the suite allows more

**Bounds.** R is the reference, S the op's `spread` (for a dot product sqrt(sum (x w)²), its size if
signs are random), and eps = eps(dtype) + eps(fp32) sqrt(d): one rounding to the output's
dtype, and fp32 accumulation over d, the most non-zero terms of a sum. A kernel that accumulates in
16 bits drifts by about 0.2 eps(dtype) sqrt(d) and fails the first test; one wrong element fails the
second. S is zero where a row of weights is empty: only an exact zero passes there. t is half of the
dtype's smallest subnormal (fp16: 3e-8), to which a product near zero is rounded whatever its size.
The factor of S is 8, because the largest of 10^8 normal deviates is 5.7 sd, and each partial sum of
a split k is rounded.

In a tf32 problem both operands of a product may lose all but 10 bits of mantissa: eps is 2^-10
larger, 2^-11 for each. In an fp8 problem sums may be kept in 13 bits of mantissa and truncated
there, as Hopper's tensor cores do (arXiv:2411.10958, 2412.19437): 2^-13 sqrt(d) replaces
eps(fp32) sqrt(d). If a kernel rounds activations to e4m3 (ffn in fp8: X, and h before the last
product), eps is 2^-5 for any d. NOTES.md has how much of each bound right and wrong outputs take.

Integers have an eps(dtype) of 0 and a step of 1. So t is 0.5, the error of rounding, and the first
test allows it for each element, too. A product that fails one rounding is wrong.

A packed output (a weight's gradient) must have exactly the pattern's indices. R and S are then
taken where it stores elements; the padding of a block that extends beyond the matrix must be zero.
An output with several results, one below the other, is judged for each of them. If the right answer
is that of a part of the problem, the whole output must have its shape and be finite, and the part
is judged.

**Usual errors.** The usual error is the larger of the error of torch's own product, in the
problem's dtype and on this device, and of what plain rounding explains:

    sqrt( (0.21 eps(dtype) ||R||)² + (0.2 sums sqrt(d) ||S||)² + (products ||S||)² )

`sums` and `products` are those of Expected. An error above 1.5 usual ones is marked in the row;
above 3 it is wrong. A suite may allow a contender a larger error and must say why; that error then
replaces both bounds. 0.21 eps is the error of one rounding to nearest. Adding d terms one by one
gives an error of 0.15 sums sqrt(d) if each sum is rounded, and up to 0.2 if it is truncated.
Truncating operands (tf32) or rounding them to e4m3 (ffn in fp8) gives 0.8 to 1.1 products. torch's
product alone is too strict a reference, because cuBLAS splits k, which leaves a quarter of the
error of a plain sum in fp32. So is rounding alone, because in ffn G, U and h are rounded too. The
baseline is judged by the same number.

No right kernel of 21 published runs is marked (NOTES.md).

**Bias.** The bias is the larger of the slope of Y - R over R, and the mean of Y - R over the size
of R, less 6 standard errors, which chance explains. A usual bias is at most usual error / 4 +
products + sums sqrt(d) / 16. Roundings to nearest have no bias; truncated operands (tf32) and sums
(fp8) have one. Errors of a row (a token) may share a cause, such as one rounding of h. So the
standard error is taken over rows, and fewer than 16 rows give no bias.
"""

from dataclasses import dataclass, replace
from math import hypot
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.ops._op import Sample
from sparsebench.results.record import WRONG

ELEMENT = 8.0
TF32 = 2.0**-10
FP8 = 2.0**-13
E4M3 = 3 * 2.0**-7  # with bf16's eps, 2^-5
FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """The right answer [rows, columns] in fp64, and which errors are allowed.

    products  relative error of each product (`roundings`)
    sums      eps of the accumulators
    parts     rows of each result, if the output has several
    plain     torch's own answer in the problem's dtype; without it no error is unusual
    allowed   relative error that the suite allows
    sample    set if this is the answer of a part of the problem
    """

    reference: Tensor
    spread: Tensor
    dtype: torch.dtype
    depth: int
    products: float = 0.0
    sums: float = FP32
    parts: tuple[int, ...] = ()
    plain: Tensor | None = None
    allowed: float | None = None
    sample: Sample | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the whole output."""
        return self.sample.shape if self.sample else tuple(self.reference.shape)

    def part(self, out: Any) -> Any:
        """Return the part of an output that this answers."""
        return self.sample.part(out) if self.sample else out

    @property
    def eps(self) -> float:
        """Return the relative size of one output's rounding errors."""
        accumulated = float(self.sums * self.depth**0.5)
        return eps_of(self.dtype) + accumulated + self.products


@dataclass(frozen=True)
class OutputCheck:
    """`reason` is None if the output is right; errors are None if it is not finite."""

    reason: str | None
    error: float | None = None
    error_of_bound: float | None = None
    usual_error: float | None = None
    bias: float | None = None
    usual_bias: float | None = None


def roundings(dtype: str, rounds_inputs: bool) -> tuple[float, float]:
    """Return `products` and `sums` of Expected; with `rounds_inputs`, kernels may round inputs."""
    if dtype == "fp8":
        return (E4M3, FP32) if rounds_inputs else (0.0, FP8)
    return TF32 if dtype == "tf32" else 0.0, FP32


def eps_of(dtype: torch.dtype) -> float:
    """Return the relative distance of two neighbours of a floating-point dtype; 0 for integers."""
    return float(torch.finfo(dtype).eps) if dtype.is_floating_point else 0.0


def half_step(dtype: torch.dtype) -> float:
    """Return half of the smallest difference of two values."""
    if not dtype.is_floating_point:
        return 0.5
    limits = torch.finfo(dtype)
    return float(limits.smallest_normal * limits.eps / 2)


def check(out: object, expected: Expected, pattern: Format | None = None) -> OutputCheck:
    """Compare an output with the right answer, packed like `pattern` if there is one."""
    if pattern is None:
        return _dense(out, expected)
    if not isinstance(out, Format) or type(out) is not type(pattern) or out.shape != pattern.shape:
        layout = f"{type(pattern).__name__} {list(pattern.shape)}, packed like the weight"
        return OutputCheck(f"expected {layout}, found {_name(out)}")
    for name, array in pattern.arrays().items():
        other = out.arrays()[name]
        same = array.dtype == other.dtype and array.device == other.device
        if name != "values" and not (same and array.equal(other)):
            return OutputCheck(f"expected the {name} of the weight's own pattern, found others")
    return _dense(out.arrays()["values"], where_stored(expected, pattern))


def where_stored(expected: Expected, pattern: Format | None) -> Expected:
    """Return the expected elements that a pattern stores; without a pattern, all elements."""
    if pattern is None:
        return expected

    def stored(full: Tensor) -> Tensor:
        return pattern.sample(full).arrays()["values"]

    reference, spread = stored(expected.reference), stored(expected.spread)
    plain = None if expected.plain is None else stored(expected.plain)
    return replace(expected, reference=reference, spread=spread, plain=plain)


def _dense(out: object, expected: Expected) -> OutputCheck:
    reference = expected.reference
    if type(out) is not Tensor:  # a subclass may compute when it is read
        return OutputCheck(f"expected a tensor, found {_name(out)}")
    if out.shape != expected.shape:
        return OutputCheck(f"expected shape {list(expected.shape)}, found {list(out.shape)}")
    if out.dtype != expected.dtype or out.device != reference.device:
        kind = f"{expected.dtype} on {reference.device}"
        return OutputCheck(f"expected {kind}, found {out.dtype} on {out.device}")
    if not out.is_contiguous():
        return OutputCheck(f"expected a contiguous output, found strides {list(out.stride())}")
    if bad := int((~out.isfinite()).sum()):
        return OutputCheck(f"expected finite values, found {bad} of {out.numel()} that are not")
    if not out.numel():
        return OutputCheck(None, 0.0, 0.0)
    result = _worst(expected.part(out), expected)
    if expected.sample and result.reason:
        return replace(result, reason=f"{expected.sample.text}: {result.reason}")
    return result


def _worst(out: Tensor, expected: Expected) -> OutputCheck:
    """Judge each part; return the first wrong one, or the largest errors of all."""
    if not expected.parts:
        return judge_values(out, expected)
    each = [t.split(expected.parts) for t in (out, expected.reference, expected.spread)]
    plain = expected.plain.split(expected.parts) if expected.plain is not None else None
    row, results = 0, []
    for number, (part, reference, spread) in enumerate(zip(*each, strict=True)):
        sliced = {"reference": reference, "spread": spread, "plain": plain and plain[number]}
        result = judge_values(part, replace(expected, **sliced))
        if result.reason:
            return replace(result, reason=f"from row {row}: {result.reason}")
        row += len(part)
        results.append(result)
    worst = max(results, key=lambda v: (v.error or 0.0) / (v.usual_error or 1.0))
    biased = max(results, key=lambda v: abs(v.bias or 0.0) / (v.usual_bias or 1.0))
    excess = max(v.error_of_bound or 0.0 for v in results)
    bias, usual = biased.bias, biased.usual_bias
    return replace(worst, error_of_bound=excess, bias=bias, usual_bias=usual)


def _name(out: object) -> str:
    shape = f" {list(out.shape)}" if isinstance(out, Tensor | Format) else ""
    return type(out).__name__ + shape


def judge_values(out: Tensor, expected: Expected) -> OutputCheck:
    reference, spread, eps = expected.reference, expected.spread, expected.eps
    errors = out.double() - reference
    distance = errors.abs()
    scale, whole, spreads = float(reference.norm()), float(distance.norm()), float(spread.norm())
    error = whole / scale if scale else whole
    most = eps * spreads if expected.allowed is None else expected.allowed * scale
    eps = max(eps, most / spreads) if spreads else eps
    smallest, filled = half_step(expected.dtype), spread > 0
    bound = eps * reference.abs() + ELEMENT * eps * spread + smallest * filled
    most += smallest * float(filled.sum()) ** 0.5
    relative = (distance / bound).nan_to_num(nan=0.0)  # an infinite one becomes the largest
    excess, worst = float(relative.max()), relative.argmax()
    del relative  # so that its memory is free for what follows
    usual, sums = usual_error(expected), float(expected.sums * expected.depth**0.5)
    largest_bias = usual / 4 + expected.products + sums / 16
    result = OutputCheck(None, error, excess, usual, bias(errors, reference), largest_bias)
    if whole > most:
        empty = " (all zero)" if not bool(out.any()) else ""
        limit = most / scale if scale else 0.0
        return replace(result, reason=f"relative error {error:.2e} above {limit:.2e}{empty}")
    if excess > 1:
        at = [int(i) for i in torch.unravel_index(worst, out.shape)]
        values = f"{float(out[*at]):.6g}, expected {float(reference[*at]):.6g}"
        return replace(result, reason=f"element {at} is {values}: {excess:.1f} times its bound")
    judged = expected.plain is not None and expected.allowed is None
    if judged and error > WRONG * usual > 0:
        excess_text = f"relative error {error:.2e}, {error / usual:.1f} times the usual {usual:.2e}"
        reason = f"{excess_text}; a suite can allow it (error: at_most, why)"
        return replace(result, reason=reason)
    return result


ROUNDED, SUMMED = 0.21, 0.2
CHANCE = 6.0  # standard errors
FEWEST_ROWS = 16


def usual_error(expected: Expected) -> float:
    reference, plain = expected.reference, expected.plain
    size = float(reference.norm())
    if not size:
        return 0.0
    sums = float(expected.sums * expected.depth**0.5)
    terms = hypot(SUMMED * sums, expected.products) * float(expected.spread.norm()) / size
    explained = hypot(ROUNDED * eps_of(expected.dtype), terms)
    if plain is None or not bool(plain.isfinite().all()):
        return explained
    return max(explained, float((plain.double() - reference).norm()) / size)


def bias(errors: Tensor, reference: Tensor) -> float:
    """Return the relative bias of errors Y - R in fp64, less what chance explains."""
    rows = len(reference)
    size = float(reference.norm())
    if rows < FEWEST_ROWS or not size:
        return 0.0
    errors, reference = errors.reshape(rows, -1), reference.reshape(rows, -1)
    slope = float((errors * reference).sum()) / size**2
    scores = ((errors - slope * reference) * reference).sum(1)
    scale = (reference.numel() ** 0.5) * size  # turns a sum of errors into a part of R's size
    mean = float(errors.sum()) / scale
    deviations = (errors - errors.mean()).sum(1)
    of_slope = _beyond(slope, float(scores.norm()) / size**2)
    of_mean = _beyond(mean, float(deviations.norm()) / scale)
    return max(of_slope, of_mean, key=abs)


def _beyond(value: float, standard_error: float) -> float:
    """Return by how much a value exceeds chance, with its sign."""
    left = max(0.0, abs(value) - CHANCE * standard_error)
    return left if value > 0 else -left
