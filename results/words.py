"""How numbers and names are written wherever a result is read: pages and the terminal."""

from math import floor, log10
from typing import Any

import pandas as pd

from sparsebench.results.digits import rounded

FORMATS = {"bsr": "BSR", "csr": "CSR", "spense": "2:4", "activations": "sparse activations"}
"""What readers call a format; one that is not here is called by its name."""


def plain(value: Any) -> str:
    """Write a number with four significant digits, anything else as it is."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def percent(level: float) -> str:
    """Write a sparsity in percent, with at most two decimals."""
    return "–" if pd.isna(level) else f"{round(100 * level, 2):g} %"


def times(ratio: float) -> str:
    """Write a ratio with three significant digits and its sign: 12.3×."""
    return "–" if pd.isna(ratio) else f"{three(ratio)}×"


def three(ratio: float) -> str:
    """Write a ratio with three significant digits, at most three after the point: 12.3."""
    return f"{ratio:.{max(0, min(3, 2 - _magnitude(ratio)))}f}"


def supported(ratio: float, low: float, high: float) -> str:
    """Write a speed-up to the last digit that its interval supports, the third at most: 5.58×."""
    known = not pd.isna(low) and high > low
    return f"{rounded(ratio, _step(ratio, (high - low) / 2))}×" if known else times(ratio)


def between(ratio: float, low: float, high: float) -> str:
    """Write a speed-up with its interval, to the digits that it supports: 5.58× [5.54, 5.60]."""
    if pd.isna(ratio) or pd.isna(low) or high <= low:
        return times(ratio)
    half = _step(ratio, (high - low) / 2)
    ends = [rounded(end, min(half, abs(end) / 10)) for end in (low, high)]
    return f"{supported(ratio, low, high)} [{', '.join(ends)}]"


def significant(value: Any, digits: int = 3) -> str:
    """Write a number with so many significant digits and no exponent; a dash for NaN."""
    if pd.isna(value):
        return "–"
    if value == 0:
        return "0"
    return f"{float(value):,.{max(0, digits - 1 - _magnitude(float(value)))}f}"


def duration(us: float) -> str:
    """Write a time in the unit that people use for it: 52.0 µs, 3.70 ms, 1.20 s."""
    if pd.isna(us):
        return "–"
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if us >= size:
            return f"{significant(us / size)} {unit}"
    return f"{significant(us)} µs"


def listed(words: list[str]) -> str:
    """Join words as a sentence does: a, b and c."""
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), *words[-1:]])


def _magnitude(value: float) -> int:
    return len(f"{abs(value):.0f}") - 1 if abs(value) >= 1 else int(f"{value:e}"[-3:])


def _step(ratio: float, half: float) -> float:
    """Return an uncertainty, or the place of the third digit if that is larger."""
    return max(half, 10.0 ** (floor(log10(ratio)) - 2)) if ratio > 0 else half
