"""How numbers and names are written wherever a result is read: pages and the terminal."""

from typing import Any

import pandas as pd

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


def between(ratio: float, low: float, high: float) -> str:
    """Write a speed-up with its interval: 5.58× [5.54, 5.60]; a dash for NaN."""
    if pd.isna(ratio):
        return "–"
    return times(ratio) if pd.isna(low) else f"{times(ratio)} [{three(low)}, {three(high)}]"


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
