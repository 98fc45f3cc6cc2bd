"""Is the output right? Two questions, both against the op's definition in fp64.

    whole      ||Y - R|| <= eps ||S||
    element    |Y - R| <= eps |R| + 8 eps S + t, where S > 0

R is the reference, S the op's `spread` (for a dot product sqrt(sum (x w)²), what random signs leave
of it), and eps = eps(dtype) + eps(fp32) sqrt(d): one rounding to the output's dtype, and fp32
accumulation over d, the most non-zero terms of a sum. A kernel that accumulates in 16 bits drifts
by about 0.2 eps(dtype) sqrt(d) and fails the first; one wrong element fails the second. S is zero
where a row of weights is empty: only an exact zero passes there. t is half of the dtype's smallest
subnormal (fp16: 3e-8), to which a product near zero is rounded whatever its size.

In a tf32 problem both operands of a product may lose all but 10 bits of mantissa: eps is 2^-10
larger, which is 2^-11 for each. Of that bound, operands rounded to 10 bits take 0.3, operands cut
off there (what tensor cores do unasked) 0.8, and operands rounded to bf16 2.4.

In an fp8 problem sums may be kept in 13 bits of mantissa and cut off there, which is what Hopper's
tensor cores do (arXiv:2411.10958, 2412.19437): 2^-13 sqrt(d) takes the place of eps(fp32) sqrt(d).
Of that bound, for k from 2048 to 51200, sums cut off after every 32 products take 0.14 to 0.19, and
one operand rounded to e5m2, which has a bit less, 4.7 to 1.8.

Where a kernel rounds activations to e4m3 (ffn in fp8: X, and h before the last product), eps is
2^-5 for any d. Their rounding leaves 0.023 to 0.026 of ||S||; sums in 13 bits, and G and U
in bf16, add 0.0003 to that. Of the bound, for n from 512 to 25600, every activation and 8 tokens or
more, right outputs take 0.73 to 0.82 (of one token, 512 units and relu2 0.75 +- 0.12). Wrong ones
take: X in e5m2, which has a bit less, 1.2 to 1.3, h 1.01 to 1.1, both 1.3 to 1.8; 64 of 5120
columns of X left out 2.6; 128 of 25600 hidden units 1.3, but 0.84 where half of their weights are
zero; a scale forgotten, 15 and more. Smaller errors are found where the same kernel runs in bf16.

A packed output (a weight's gradient) must have the pattern's own indices. R and S are then taken
where it stores elements; the padding of a block that leaves the matrix must be zero. An output of
several results, one below the other, answers the first question for each of them.

Within that bound an error may still be unusual (usual.py): above 1.5 times the usual one it is
marked, above 3 times wrong. A suite may allow a contender a larger error, and says why. That error
then takes the place of both.

8: the largest of 10^8 normal deviates is 5.7 sd, and split-k partial sums are rounded once each.
"""

from dataclasses import dataclass, replace
from math import hypot

import torch
from torch import Tensor

from sparsebench.formats._format import Format

ELEMENT = 8.0
TF32 = 2.0**-10
FP8 = 2.0**-13
E4M3 = 3 * 2.0**-7  # with bf16's eps, 2^-5
FP32 = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Expected:
    """The right answer [rows, columns] in fp64, and how far from it is still right.

    `products` is the relative error that each product may have, `sums` the eps of accumulators:
    see `roundings`. `parts` are the rows of each result, where there are several in one. `plain` is
    torch's own answer in the problem's dtype; without it no error is unusual. `allowed` is the
    relative error that a suite allows.
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

    @property
    def eps(self) -> float:
        """Return the relative size of one output's rounding errors."""
        accumulated = float(self.sums * self.depth**0.5)
        return float(torch.finfo(self.dtype).eps) + accumulated + self.products


@dataclass(frozen=True)
class Verdict:
    """`reason` is None when the output is right; the errors are None where it is not finite."""

    reason: str | None
    error: float | None = None
    error_of_bound: float | None = None
    usual_error: float | None = None
    bias: float | None = None
    usual_bias: float | None = None


def roundings(dtype: str, rounded: bool) -> tuple[float, float]:
    """Return `products` and `sums` of a problem; `rounded`: kernels may round activations to it."""
    if dtype == "fp8":
        return (E4M3, FP32) if rounded else (0.0, FP8)
    return TF32 if dtype == "tf32" else 0.0, FP32


def check(out: object, expected: Expected, pattern: Format | None = None) -> Verdict:
    """Hold a launch's output against the right answer, packed like `pattern` if there is one."""
    return _dense(out, expected) if pattern is None else _packed(out, expected, pattern)


def where_stored(expected: Expected, pattern: Format | None) -> Expected:
    """Return what is expected of the elements that a pattern stores; all of them without one."""
    if pattern is None:
        return expected

    def stored(full: Tensor) -> Tensor:
        return pattern.sample(full).arrays()["values"]

    reference, spread = stored(expected.reference), stored(expected.spread)
    plain = None if expected.plain is None else stored(expected.plain)
    return replace(expected, reference=reference, spread=spread, plain=plain)


def _packed(out: object, expected: Expected, pattern: Format) -> Verdict:
    if not isinstance(out, Format) or type(out) is not type(pattern) or out.shape != pattern.shape:
        wanted = f"{type(pattern).__name__} {list(pattern.shape)}"
        return Verdict(f"expected {wanted}, packed like the weight, found {_name(out)}")
    for name, array in pattern.arrays().items():
        if name != "values" and not _same(out.arrays()[name], array):
            return Verdict(f"expected the {name} of the weight's own pattern, found others")
    return _dense(out.arrays()["values"], where_stored(expected, pattern))


def _dense(out: object, expected: Expected) -> Verdict:
    reference = expected.reference
    if type(out) is not Tensor:  # a subclass may compute when it is read
        return Verdict(f"expected a tensor, found {_name(out)}")
    if out.shape != reference.shape:
        return Verdict(f"expected shape {list(reference.shape)}, found {list(out.shape)}")
    if out.dtype != expected.dtype or out.device != reference.device:
        wanted = f"{expected.dtype} on {reference.device}"
        return Verdict(f"expected {wanted}, found {out.dtype} on {out.device}")
    if not out.is_contiguous():
        return Verdict(f"expected a contiguous output, found strides {list(out.stride())}")
    if not bool(out.isfinite().all()):
        bad = int((~out.isfinite()).sum())
        return Verdict(f"expected finite values, found {bad} of {out.numel()} that are not")
    return _worst(out, expected) if out.numel() else Verdict(None, 0.0, 0.0)


def _worst(out: Tensor, expected: Expected) -> Verdict:
    """Judge each part; the first wrong one, or the largest errors of all."""
    if not expected.parts:
        return _judge(out, expected)
    each = [t.split(expected.parts) for t in (out, expected.reference, expected.spread)]
    plain = expected.plain.split(expected.parts) if expected.plain is not None else None
    row, verdicts = 0, []
    for number, (part, reference, spread) in enumerate(zip(*each, strict=True)):
        own = {"reference": reference, "spread": spread, "plain": plain and plain[number]}
        verdict = _judge(part, replace(expected, **own))
        if verdict.reason:
            return replace(verdict, reason=f"from row {row}: {verdict.reason}")
        row += len(part)
        verdicts.append(verdict)
    worst = max(verdicts, key=lambda v: (v.error or 0.0) / (v.usual_error or 1.0))
    biased = max(verdicts, key=lambda v: abs(v.bias or 0.0) / (v.usual_bias or 1.0))
    excess = max(v.error_of_bound or 0.0 for v in verdicts)
    tilt = biased.bias, biased.usual_bias
    return replace(worst, error_of_bound=excess, bias=tilt[0], usual_bias=tilt[1])


def _name(out: object) -> str:
    shape = f" {list(out.shape)}" if isinstance(out, Tensor | Format) else ""
    return type(out).__name__ + shape


def _same(array: Tensor, other: Tensor) -> bool:
    return array.dtype == other.dtype and array.device == other.device and array.equal(other)


def _judge(out: Tensor, expected: Expected) -> Verdict:
    reference, spread, eps = expected.reference, expected.spread, expected.eps
    errors = out.double() - reference
    distance = errors.abs()
    scale, whole, spreads = float(reference.norm()), float(distance.norm()), float(spread.norm())
    error = whole / scale if scale else whole
    most = eps * spreads if expected.allowed is None else expected.allowed * scale
    eps = max(eps, most / spreads) if spreads else eps
    limits = torch.finfo(expected.dtype)
    smallest = limits.smallest_normal * limits.eps / 2
    bound = eps * reference.abs() + ELEMENT * eps * spread + smallest * (spread > 0)
    excess = float(
        (distance / bound).nan_to_num(nan=0.0, posinf=torch.finfo(torch.float64).max).max()
    )
    verdict = _usual(Verdict(None, error, excess), errors, expected)
    if whole > most:
        empty = " (all zero)" if not bool(out.any()) else ""
        limit = most / scale if scale else 0.0
        return replace(verdict, reason=f"relative error {error:.2e} above {limit:.2e}{empty}")
    if excess > 1:
        worst = (distance / bound).nan_to_num(nan=0.0).argmax()
        at = [int(i) for i in torch.unravel_index(worst, out.shape)]
        found = f"{float(out[*at]):.6g} where {float(reference[*at]):.6g} is right"
        return replace(verdict, reason=f"element {at} is {found}, {excess:.1f} times its bound")
    usual = verdict.usual_error or 0.0
    known = expected.plain is not None and expected.allowed is None
    if known and error > WRONG * usual > 0:
        found = f"relative error {error:.2e}, {error / usual:.1f} times the usual {usual:.2e}"
        return replace(verdict, reason=f"{found}; a suite can allow it (error: at_most, why)")
    return verdict


def _usual(verdict: Verdict, errors: Tensor, expected: Expected) -> Verdict:
    """Add the error and the bias that are usual, and the bias that was found."""
    own = float(torch.finfo(expected.dtype).eps)
    sums = float(expected.sums * expected.depth**0.5)
    usual = usual_error(
        expected.reference, expected.spread, expected.plain, own, sums, expected.products
    )
    return replace(
        verdict,
        usual_error=usual,
        bias=bias(errors, expected.reference),
        usual_bias=usual_bias(usual, sums, expected.products),
    )


WRONG = 3.0  # times the usual error; results/frame.py marks what is above 1.5
ROUNDED, SUMMED = 0.21, 0.2
CHANCE = 6.0  # standard errors
FEWEST_ROWS = 16


def usual_error(
    reference: Tensor,
    spread: Tensor,
    plain: Tensor | None,
    eps: float,
    sums: float,
    products: float,
) -> float:
    """Return the relative error that is usual; `sums` with sqrt(d)."""
    size = float(reference.norm())
    if not size:
        return 0.0
    terms = hypot(SUMMED * sums, products) * float(spread.norm()) / size
    explained = hypot(ROUNDED * eps, terms)
    if plain is None or not bool(plain.isfinite().all()):
        return explained
    return max(explained, float((plain.double() - reference).norm()) / size)


def usual_bias(usual: float, sums: float, products: float) -> float:
    """Return the bias up to which rounding and cutting off explain it; `sums` with sqrt(d)."""
    return usual / 4 + products + sums / 16


def bias(errors: Tensor, reference: Tensor) -> float:
    """Return the relative bias of errors Y - R in fp64, without what chance explains."""
    rows = len(reference)
    size = float(reference.norm())
    if rows < FEWEST_ROWS or not size:
        return 0.0
    errors, reference = errors.reshape(rows, -1), reference.reshape(rows, -1)
    slope = float((errors * reference).sum()) / size**2
    scores = ((errors - slope * reference) * reference).sum(1)
    scale = (reference.numel() ** 0.5) * size  # from a sum of errors to a part of R's size
    mean = float(errors.sum()) / scale
    deviations = (errors - errors.mean()).sum(1)
    of_slope = _beyond(slope, float(scores.norm()) / size**2)
    of_mean = _beyond(mean, float(deviations.norm()) / scale)
    return max(of_slope, of_mean, key=abs)


def _beyond(value: float, standard_error: float) -> float:
    """Return how far a value is from zero beyond chance, with its sign."""
    left = max(0.0, abs(value) - CHANCE * standard_error)
    return left if value > 0 else -left
