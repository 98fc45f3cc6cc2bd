"""Which error is usual, and which bias is more than chance? What the contest knows beyond a bound.

    usual  =  the larger of the error that torch's own product leaves, in the problem's dtype and on
              this device, and of what plain rounding explains:

              sqrt( (0.21 eps(dtype) ||R||)² + (0.2 sums sqrt(d) ||S||)² + (products ||S||)² )

    ratio  =  error / usual         above 1.5: a mark.   above 3: wrong, unless the suite allows it

R, S, d, `products` and `sums` are check.py's. 0.21 eps is what one rounding to nearest leaves.
Sums of d terms one after the other leave 0.15 sums sqrt(d) where they are rounded, and up to 0.2
where they are cut off. Operands that are cut off (tf32) or rounded to e4m3 (ffn in fp8) leave 0.8
to 1.1 products. Torch's own product alone would not do: cuBLAS splits k and so leaves a
quarter of what a plain sum in fp32 does. Nor would rounding alone: in ffn G, U and h are rounded
too. The baseline itself is held against the same number.

In 21 published runs with 10,414 right outputs the largest ratios are 1.00 in 16 bits, but for
ffn_sparse (1.18) and cusparselt_hybrid, which adds two products in 16 bits (1.48); 1.28 in fp32;
1.00 in fp8. No right kernel is marked (NOTES.md).

    bias   =  the slope of Y - R over R, or the mean of Y - R over the size of R, the larger;
              6 standard errors of it count as chance and are taken off
    usual  =  usual error / 4 + products + sums sqrt(d) / 16

Roundings to nearest have no bias; cut-off operands (tf32) and sums (fp8) have one. Errors of a row
(a token) may share a cause, such as one rounding of h. So rows are the units of the standard error,
and fewer than 16 of them tell no bias.
"""

from math import hypot

from torch import Tensor

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
