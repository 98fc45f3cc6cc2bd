"""Numbers with no digit that the measurement does not support.

    5.6234 with an uncertainty of 0.083   ─>   5.62 ± 0.09

The uncertainty of a speed-up is a column of the cases (verdict.py): half its interval, and at least
what A/A pairs of the same length of call allow. It is rounded up to one digit; the value ends at
the same place.
"""

from math import ceil, floor, isfinite, log10

MOST = 3  # digits after the point, however small the uncertainty


def rounded(value: float, uncertainty: float) -> str:
    """Write a value to the last digit that is supported: `5.62`; a dash for NaN.

    Without an uncertainty (NaN or 0) it has two digits.
    """
    if not isfinite(value):
        return "–"
    if not isfinite(uncertainty) or uncertainty <= 0:
        return f"{value:.{max(0, 1 - _place(value))}f}"
    places = -_place(_up(uncertainty))
    return f"{round(value, places):.{min(MOST, max(0, places))}f}"


def plus_minus(value: float, uncertainty: float) -> str:
    """Write a value with its uncertainty: `5.62 ± 0.09`; without one as `rounded` does."""
    if not isfinite(value) or not isfinite(uncertainty) or uncertainty <= 0:
        return rounded(value, uncertainty)
    least = max(_up(uncertainty), 10.0**-MOST)
    return f"{rounded(value, uncertainty)} ± {least:.{max(0, -_place(least))}f}"


def _up(uncertainty: float) -> float:
    """Round up to one digit."""
    unit = 10.0 ** _place(uncertainty)
    return ceil(round(uncertainty / unit, 6)) * unit


def _place(value: float) -> int:
    """Return the power of ten of the first digit."""
    return floor(log10(abs(value)) + 1e-12) if value else 0
