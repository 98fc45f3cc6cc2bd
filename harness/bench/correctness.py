"""Is the output right? Two questions, both against the op's definition in fp64.

    whole      ||Y - R|| <= ||ulp / 2|| + w ||S||
    element    |Y - R| <= ulp(|R| + a) / 2 + a, where S > 0

        w  =     products + 2 r + 0.6 sums sqrt(d)      r  =  3/8 eps(dtype) if the op has
        a  =  8 (products +   r +     sums sqrt(d)) S + c     intermediates to round, else 0
        c  =  eps(fp32) d |R| / 16 in 16 bits and fp8

**Bounds.** R is the reference and S the op's `spread`: for a dot product sqrt(sum (x w)²), its size
if signs are random. An output may be as far from R as one rounding to its dtype explains, half a
unit in the last place (ulp) of its own binade, plus the error a of what was rounded. That is fp32
accumulation over d, the most non-zero terms of a sum, and in some problems a relative error of the
terms of S. A linear product in 16 bits has no such error: each output is rounded once, and a zero
is right only where |R| is below 8 eps(fp32) sqrt(d) S. A kernel that accumulates in 16 bits, or
rounds twice, fails both tests. S is zero where a row of weights is empty: only an exact zero passes
there. The smallest ulp is the dtype's smallest subnormal (fp16: 6e-8). The factor 8 is there
because the largest of 10^8 normal deviates is 5.7 sd, and each partial sum of a split k is rounded.

Tensor cores do not round a sum, they truncate it (Fasi et al., PeerJ CS 7:e330, 2021), once for the
terms of an instruction: 16 in 16 bits, of which 2:4 leaves 8 that are not zero. Each of these d / 8
truncations loses at most eps(fp32) of a sum that grows from 0 to |R|, on average of |R| / 2. All
have the sign of the sum, so they add up, to at most c. The bound without c was too small by 0.3 %:
an output of cuBLAS, at 4,096 tokens, 25,600 inputs and 2:4 weights, took 1.003 of it.

An op declares which intermediates a kernel may round to the problem's dtype (Op.intermediates). S
has a term for each. Rounding to nearest leaves 0.21 eps(dtype) of it in the mean, and at most 0.5.
If one hidden unit is larger than all others, the whole output shares its roundings; hence the 2
in w.

In a tf32 problem both operands of a product may lose all but 10 bits of mantissa: `products` is
2^-10, 2^-11 for each. In an fp8 problem sums may be kept in 13 bits of mantissa and truncated
there, as Hopper's tensor cores do (arXiv:2411.10958, 2412.19437): `sums` is 2^-13 instead of
eps(fp32). If a kernel rounds activations to e4m3 (ffn in fp8: X, and h before the last product),
`products` is 3/128 for any d. NOTES.md has how much of each bound right and wrong outputs take.

The ulp of an integer is 1. A product that fails one rounding is wrong.

A packed output (a weight's gradient) must have exactly the pattern's indices. R and S are then
taken where it stores elements; the padding of a block that extends beyond the matrix must be zero.
An output with several results, one below the other, is judged for each of them. If the right answer
is that of a part of the problem, the whole output must have its shape and be finite, and the part
is judged.

A contender may have a larger error if its suite allows it or its kernel is lossy, and says why.
That error then replaces the bound of the whole and, if it is larger, w S in that of an element.

**Usual errors.** The usual error is the larger of the error of torch's own product, in the
problem's dtype and on this device, and of what plain rounding explains:

    sqrt( (0.21 eps(dtype) ||R||)² + (0.2 sums sqrt(d) ||S||)² + (products ||S||)² )

An error above 1.5 usual ones is marked in the row. 0.21 eps is the error of one rounding to
nearest. Adding d terms one by one gives an error of 0.15 sums sqrt(d) if each sum is rounded, and
up to 0.2 if it is truncated, a third of what w allows. Truncating operands (tf32) or rounding them
to e4m3 (ffn in fp8) gives 0.8 to 1.1 products. torch's product alone is too strict a reference,
because cuBLAS splits k, which leaves a quarter of the error of a plain sum in fp32. So is rounding
alone, because in ffn G, U and h are rounded too. The baseline is judged by the same number.

**Bias.** The bias is the larger of the slope of Y - R over R, and the mean of Y - R over the size
of R, less 6 standard errors, which chance explains. A usual bias is at most usual error / 4 +
products + sums sqrt(d) / 16. Roundings to nearest have no bias; truncated operands (tf32) and sums
(fp8) have one. Errors of a row (a token) may share a cause, such as one rounding of h. So the
standard error is taken over rows, and fewer than 16 rows give no bias.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.harness.ops._op import INTERMEDIATE, Sample

ELEMENT, UNITS, WHOLE = 8.0, 2.0, 0.6
TRUNCATION = 1 / 16  # eps of fp32 for each term, where 8 terms share an instruction
TF32 = 2.0**-10
FP8 = 2.0**-13
E4M3 = 3 * 2.0**-7
FP32 = torch.finfo(torch.float32).eps
EXPONENT = 0x7FF << 52  # of fp64

Packing = Callable[[Tensor], Tensor]
"""Takes what an output stores from a matrix."""


@dataclass(frozen=True)
class Expected:
    """The right answer [rows, columns] in fp64, and which errors are allowed.

    products  relative error of each product (`roundings`)
    sums      eps of the accumulators
    parts     rows of each result, if the output has several
    rounded   whether intermediates may be rounded to the dtype (Op.intermediates)
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
    rounded: bool = False
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
    def intermediates(self) -> float:
        """Return the error of rounded intermediates, as a part of the spread."""
        return INTERMEDIATE * eps_of(self.dtype) if self.rounded else 0.0

    @property
    def accumulated(self) -> float:
        """Return the most that accumulation may change, as a part of the spread."""
        return float(self.sums * self.depth**0.5)


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


def half_ulp(sizes: Tensor, dtype: torch.dtype) -> Tensor:
    """Return half the distance of two neighbours of the dtype, at sizes (not negative, fp64)."""
    if not dtype.is_floating_point:
        return torch.full_like(sizes, 0.5)
    limits = torch.finfo(dtype)
    binades = (sizes.view(torch.int64) & EXPONENT).view(torch.float64)  # powers of two
    return binades.mul_(limits.eps / 2).clamp_(min=limits.smallest_normal * limits.eps / 2)


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
    return _dense(out.arrays()["values"], where_stored(expected, packing_of(pattern)))


def packing_of(pattern: Format | None) -> Packing:
    """Return what takes the elements that a pattern stores; without a pattern, all elements."""
    return (lambda full: pattern.sample(full).arrays()["values"]) if pattern else lambda full: full


def where_stored(expected: Expected, pack: Packing) -> Expected:
    """Return the expected elements that are stored."""
    reference, spread = pack(expected.reference), pack(expected.spread)
    plain = None if expected.plain is None else pack(expected.plain)
    return replace(expected, reference=reference, spread=spread, plain=plain)


def form_of(out: object) -> list[Any]:
    """Return shape, dtype and strides of a tensor, or the name of anything else."""
    if type(out) is not Tensor:  # a subclass may compute when it is read
        return [_name(out)]
    return [list(out.shape), str(out.dtype), list(out.stride())]


def form_error(form: list[Any], expected: Expected) -> str:
    """Return "" or why an output of this form cannot be right."""
    if len(form) < 3:
        return f"expected a tensor, found {form[0]}"
    shape, dtype, strides = form
    if shape != [*expected.shape]:
        return f"expected shape {[*expected.shape]}, found {shape}"
    if dtype != str(expected.dtype):
        return f"expected {expected.dtype}, found {dtype}"
    contiguous = zip(shape, strides, torch.empty(shape, device="meta").stride(), strict=True)
    if any(size > 1 and stride != right for size, stride, right in contiguous):
        return f"expected a contiguous output, found strides {strides}"
    return ""


def _dense(out: object, expected: Expected) -> OutputCheck:
    reference = expected.reference
    if reason := form_error(form_of(out), expected):
        return OutputCheck(reason)
    assert isinstance(out, Tensor)
    if out.device != reference.device:
        return OutputCheck(f"expected an output on {reference.device}, found {out.device}")
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
    reference, spread = expected.reference, expected.spread
    products, rounded, summed = expected.products, expected.intermediates, expected.accumulated
    errors, element = out.double() - reference, products + rounded + summed
    scale, whole, spreads = float(reference.norm()), float(errors.norm()), float(spread.norm())
    if expected.allowed is not None and spreads:
        element = max(element, expected.allowed * scale / spreads)
    unrounded, sizes = spread * (ELEMENT * element), reference.abs()
    if eps_of(expected.dtype) > FP32:
        unrounded.add_(sizes, alpha=TRUNCATION * FP32 * expected.depth)
    bound = half_ulp(sizes.add_(unrounded), expected.dtype).mul_(spread > 0)
    most = float(bound.norm()) + (products + UNITS * rounded + WHOLE * summed) * spreads
    most = most if expected.allowed is None else expected.allowed * scale
    parts = errors.abs().div_(bound.add_(unrounded)).nan_to_num_(nan=0.0)  # inf becomes the largest
    largest, worst = float(parts.max()), parts.argmax()
    del unrounded, sizes, bound, parts  # so that their memory is free for what follows
    error, usual = whole / scale if scale else whole, usual_error(expected)
    largest_bias = usual / 4 + products + summed / 16
    excess = max(largest, whole / most if most else 0.0)
    result = OutputCheck(None, error, excess, usual, bias(errors, reference), largest_bias)
    if whole > most:
        empty = " (all zero)" if not bool(out.any()) else ""
        limit = most / scale if scale else 0.0
        more = "; a suite can allow it (error: at_most, why)" if expected.allowed is None else ""
        reason = f"relative error {error:.2e} above {limit:.2e}{empty}{more}"
        return replace(result, reason=reason)
    if largest > 1:
        at = [int(i) for i in torch.unravel_index(worst, out.shape)]
        values = f"{float(out[*at]):.6g}, expected {float(reference[*at]):.6g}"
        return replace(result, reason=f"element {at} is {values}: {largest:.1f} times its bound")
    return result


ROUNDED, SUMMED = 0.21, 0.2
CHANCE = 6.0  # standard errors
FEWEST_ROWS = 16


def usual_error(expected: Expected) -> float:
    reference, plain = expected.reference, expected.plain
    size = float(reference.norm())
    if not size:
        return 0.0
    terms = hypot(SUMMED * expected.accumulated, expected.products)
    terms *= float(expected.spread.norm()) / size
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
