"""Durations such as 90s, 10m and 1.5h."""

import re

from sparsebench.errors import SuiteError

UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(where: str, text: str, least: float = 0.0) -> float:
    """Return the seconds of a duration. Raises SuiteError below `least` seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    value = float(match[1]) * UNITS[match[2]] if match else 0.0
    if not match or value < least:
        expected = f"expected {least:g}s or more, such as 90s, 10m or 2h"
        raise SuiteError(f"{where}: {expected}; found {text!r}")
    return value
