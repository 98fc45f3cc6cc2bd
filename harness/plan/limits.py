"""How much a suite may ask for: counted before anything is expanded, each limit with its name.

PROBLEMS   points of all sweeps of `problems`     an entry has the product of its lists
CASES      problems times contenders              a contender has the product of its lists
SIZE       a field, a block's side, a seed        what a kernel's 32-bit index can hold

Durations of budgets are written as 90s, 10m or 1.5h (`seconds`).
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from math import isfinite, prod
from typing import Any

from sparsebench.errors import SuiteError

PROBLEMS = 20_000  # the largest packaged suite has 264
CASES = 100_000
SIZE = 2**31 - 1


def require_few(
    problems: Iterable[Mapping[str, Any]], contenders: Iterable[Sequence[Mapping[str, Any]]]
) -> None:
    """Raise SuiteError for more problems than PROBLEMS, or more cases than CASES.

    Every contender counts at every problem; the files of a source are not counted.
    """
    count = sum(points(entry) for entry in problems)
    cases = count * sum(prod(points(part) for part in parts) for parts in contenders)
    for where, actual, most, limit in (
        ("problems", count, PROBLEMS, f"{PROBLEMS} problems (PROBLEMS)"),
        ("contenders", cases, CASES, f"{CASES} cases (CASES)"),
    ):
        if actual > most:
            number = actual if actual < 10**18 else "more than 10^18"
            raise SuiteError(f"{where}: expected at most {limit}, found {number}")


def points(entry: Mapping[str, Any]) -> int:
    """Return how many points the product of an entry's lists has."""
    return prod(len(value) for value in entry.values() if isinstance(value, list))


def require_seeds(where: str, seeds: Iterable[Any]) -> None:
    """Raise SuiteError for a seed that is no integer from 0 to SIZE."""
    for seed in seeds:
        if type(seed) is not int or not 0 <= seed <= SIZE:
            raise SuiteError(f"{where}: expected an integer from 0 to {SIZE}, found {seed!r}")


def require_sizes(where: str, fields: Mapping[str, Any]) -> None:
    """Raise SuiteError for a size above SIZE."""
    for name, value in fields.items():
        for size in value if isinstance(value, list) else [value]:
            if isinstance(size, int | float) and not abs(size) <= SIZE:
                limit = f"{SIZE} (SIZE)"
                raise SuiteError(f"{where}.{name}: expected at most {limit}, found {size}")


def require_values(where: str, point: Mapping[str, Any]) -> None:
    """Raise SuiteError for a value that no parameter or option of a contender can have."""
    for name, value in point.items():
        whole = bool(value) and isinstance(value, list) and all(type(i) is int for i in value)
        number = isinstance(value, float) and isfinite(value)
        if not (whole or number or value is None or isinstance(value, bool | int | str)):
            expected = "a number, a text, true, false or a list of integers"
            raise SuiteError(f"{where}.{name}: expected {expected}; found {str(value)[:60]!r}")


UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(where: str, text: str, least: float = 0.0) -> float:
    """Return the seconds of a duration. Raises SuiteError below `least` seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    value = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not match or value < least:
        expected = f"expected {least:g}s or more, such as 90s, 10m or 2h"
        raise SuiteError(f"{where}: {expected}; found {text!r}")
    return value
