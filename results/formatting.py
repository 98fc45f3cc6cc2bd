"""How numbers and names are written on pages, in the terminal and in documents.

    5.6234 with an uncertainty of 0.083   ─>   5.62, 5.62×, 5.62× [5.54, 5.71]
    29.31 µs, 90 %, a, b and c

No ratio shows a digit that its measurement does not support. The uncertainty of a speedup is a
column of the cases (cases.py) and of the contests (contests.py). It is rounded up to one digit,
and the value is rounded to the same decimal place.
"""

import re
from collections.abc import Iterable, Mapping
from math import ceil, floor, isfinite, log10, nan
from typing import Any

import pandas as pd

PROCESSES = re.compile(r"\d+(?= process)")
FORMATS = {
    "active_csr": "CSR of activations",
    "block_mask": "block-sparse attention",
    "bsr": "BSR",
    "csr": "CSR",
    "int4_two_four": "2:4 int4",
    "cvse": "column vectors",
    "spense": "2:4",
    "twell": "TwELL",
}
"""Display names of formats; any other format is shown by its own name."""

PATTERNS = {
    "six_eight": "6:8",
    "spense_columns": "half 2:4 by columns",
    "spense_hidden": "half 2:4",
    "spense_rows": "half 2:4",
    "two_four": "2:4",
}
"""Display names of patterns; any other pattern is shown by its own name."""

NONE = "–"
CASES = 3  # a selection of more cases, or kernels, shows only their number
UNLIMITED = "not limited by power or heat"
MOST = 3  # digits after the point, however small the uncertainty


def number(value: float, uncertainty: float = nan) -> str:
    """Write a value to the last supported digit: `5.62`; a dash for NaN or infinity.

    Without an uncertainty (NaN or 0), write two significant digits.
    """
    if pd.isna(value) or not isfinite(value):
        return NONE
    if not _is_known(uncertainty):
        return f"{value:.{max(0, 1 - _place(value))}f}"
    places = min(MOST, -min(_place(_up(uncertainty)), _place(value)))  # rounded once, not twice
    return f"{round(value, places):.{max(0, places)}f}"


def times(ratio: float, uncertainty: float = nan, unit: str = "×") -> str:
    """Write a ratio to the last supported digit, with its unit: `5.62×`."""
    text = number(ratio, uncertainty)
    return text if text == NONE else text + unit


def between(
    ratio: float, low: float, high: float, uncertainty: float = nan, unit: str = "×"
) -> str:
    """Write a ratio with its interval: `5.58× [5.54, 5.60]`; the ratio has at least two digits.

    Without an uncertainty, use the distance to the farther end of the interval.
    """
    half = uncertainty if _is_known(uncertainty) else max(high - ratio, ratio - low)
    if pd.isna(ratio) or pd.isna(low) or high <= low:
        return times(ratio, half, unit)
    inside = min(half, abs(ratio) / 10)  # 0.15 [0.12, 0.21], where one digit would be 0.1
    return f"{times(ratio, inside, unit)} [{interval(low, high, half)}]"


def span_text(low: float, high: float, uncertainty: float = nan) -> str:
    """Write an interval for a cell, which shows it below its ratio: `[5.54, 5.60]`, or ""."""
    return "" if pd.isna(low) or high <= low else f"[{interval(low, high, uncertainty)}]"


def interval(low: float, high: float, uncertainty: float = nan) -> str:
    """Write both ends with one digit more than half the interval supports: `5.54, 5.60`."""
    half = uncertainty if _is_known(uncertainty) else (high - low) / 2
    if not _is_known(half):
        return f"{number(low)}, {number(high)}"
    step = 10.0 ** _place(_up(half))
    return ", ".join(number(end, min(step, 10.0 ** (_place(end) - 1))) for end in (low, high))


def plain(value: Any) -> str:
    """Write a float with four significant digits, a whole one with all, and others with `str`."""
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else f"{value:.4g}"
    return str(value)


def blocks_text(block: Any) -> str:
    """Write a block size: `64 × 64 blocks` for 64, `16 × 32 blocks` for 16x32."""
    rows, _, columns = plain(block).partition("x")
    return f"{rows} × {columns or rows} blocks"


def size_text(shape: Any) -> str:
    """Write the size of a weight with its fields, `n × k 4096 × 64`; a model's name as it is."""
    return f"n × k {shape}" if "×" in str(shape) else str(shape)


def percent(level: float) -> str:
    """Write a sparsity in percent, with at most two decimals."""
    return NONE if pd.isna(level) else f"{round(100 * level, 2):g} %"


def significant(value: Any, digits: int = 3) -> str:
    """Write a number with `digits` significant digits and no exponent; a dash for NaN."""
    if pd.isna(value):
        return NONE
    if value == 0:
        return "0"
    near = float(f"{float(value):.{digits}g}")
    return f"{float(value):,.{max(0, digits - 1 - _place(near))}f}"


def duration(us: float) -> str:
    """Write a time in its usual unit: 52.0 µs, 3.70 ms, 1.20 s."""
    if pd.isna(us):
        return NONE
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if float(f"{us:.3g}") >= size:
            return f"{significant(us / size)} {unit}"
    return f"{significant(us)} µs"


def brackets(kinds: Iterable[Any]) -> str:
    """Say what brackets hold: `brackets: 95 % interval over 8 processes`; "" if unknown."""
    counts: dict[str, set[int]] = {}
    for name in {str(kind) for kind in kinds if not pd.isna(kind)} - {""}:
        of_name = counts.setdefault(PROCESSES.sub("{}", name), set())
        of_name.update(map(int, PROCESSES.findall(name)))
    names = [text.format(" or ".join(map(str, sorted(n)))) for text, n in sorted(counts.items())]
    return f"brackets: {', or '.join(names)}" if names else ""


def conditions(case: Mapping[Any, Any]) -> str:
    """Format the number of cards, and in how many processes power or heat limited their clock.

    `one card, limited by power or heat in 2 of 8 processes`; "" if neither is known. The columns
    are `on_cards`, `limited_processes` and `processes` of cases.py.
    """
    cards, limited = case["on_cards"], case["limited_processes"]
    if pd.isna(cards) or not cards:
        return ""
    where = "one card" if cards == 1 else f"{cards} cards"
    if pd.isna(limited):
        return where
    of_all = f"in {int(limited)} of {amount(int(case['processes']), 'process')}"
    return f"{where}, {f'limited by power or heat {of_all}' if limited else UNLIMITED}"


def amount(count: int, noun: str) -> str:
    """Write a count with its noun: `1 case`, `2 cases`, `3 processes`, `0 entries`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("y"):
        return f"{count} {noun[:-1]}ies"
    return f"{count} {noun}{'es' if noun.endswith('s') else 's'}"


def are(count: int, noun: str) -> str:
    """Write a count as the subject of a sentence: `1 case is`, `2 cases are`."""
    return f"{amount(count, noun)} {'is' if count == 1 else 'are'}"


def join_words(words: list[str]) -> str:
    """Join words as a sentence does: a, b and c."""
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), *words[-1:]])


def capital(text: str) -> str:
    """Capitalize the first word, unless it is a name in lower case: cuSPARSE, bf16, bsr_small."""
    is_name = re.match(r"[a-z]+[A-Z0-9_]", text)
    return text if is_name else text[:1].upper() + text[1:]


def kernel(label: str) -> str:
    """Return a contender's label without its format: `torch_bsr tuned=True`, `cublas`."""
    return label.partition("/")[2] or label


def selection(only: str) -> str:
    """Write a selection (--only): `m=16 block=64`; many cases or kernels as their number."""
    words = []
    for word in only.split():
        name, _, values = word.partition("=")
        count = len(values.split("|"))
        many = name in ("case", "kernel") and count > CASES
        words.append(amount(count, name) if many else word)
    return " ".join(words)


def _is_known(uncertainty: float) -> bool:
    return not pd.isna(uncertainty) and isfinite(uncertainty) and uncertainty > 0


def _up(uncertainty: float) -> float:
    """Round up to one digit."""
    unit = 10.0 ** _place(uncertainty)
    return ceil(round(uncertainty / unit, 6)) * unit


def _place(value: float) -> int:
    """Return the power of ten of the first digit."""
    return floor(log10(abs(value)) + 1e-12) if value else 0
