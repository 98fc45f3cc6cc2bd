"""A time as people write it: 90s, 10m, 1.5h."""

import re

from sparsebench.errors import SuiteError

UNITS = {"s": 1, "m": 60, "h": 3600}


def seconds(where: str, text: str, least: float = 0.0) -> float:
    """Return the seconds of a time: 90s, 10m, 1.5h. Raises SuiteError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    told = float(found[1]) * UNITS[found[2]] if found else 0.0
    if not found or told < least:
        expected = f"expected {least:g}s or more, as 90s, 10m or 2h"
        raise SuiteError(f"{where}: {expected}; found {text!r}")
    return told
