"""The time of each part of a call whose mask changes, alone, beside that of the whole call.

    candidates of a row                              median over the processes
    {"of": "select", "choice": {}, "median_us": 9}   {"select": 9.1, "lists": 4.2, "attention": 130}
    {"of": "lists", "choice": {}, "median_us": 4}

`lines_of_parts` (kernels/_common/search.py) times each part alone, with a cold cache. Its line is
the only one with this name in `of`, and has an empty choice. The lines of a search have several
choices for a name.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import nan
from statistics import median
from typing import Any

from sparsebench.results.record import Row, Status


def parts_of(rows: Iterable[Row]) -> dict[str, dict[str, float]]:
    """Return the µs of each part by the id of a case, for the cases that have parts.

    A part that failed in some process is NaN.
    """
    cases: dict[str, dict[tuple[int, str], float]] = {}
    for row in rows:
        if row.status is Status.OK and (parts := _parts(row.candidates)):
            times = {(row.replicate, name): us for name, us in parts.items()}
            cases.setdefault(row.case.id, {}).update(times)
    return {case: _medians(times) for case, times in cases.items()}


def _parts(candidates: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    lines = [line for line in candidates if "of" in line]
    counts = Counter(str(line["of"]) for line in lines)
    alone = [line for line in lines if counts[line["of"]] == 1 and line.get("choice") == {}]
    return {str(line["of"]): float(line.get("median_us", nan)) for line in alone}


def _medians(times: Mapping[tuple[int, str], float]) -> dict[str, float]:
    names = dict.fromkeys(name for _, name in times)
    by_name = {name: [us for (_, part), us in times.items() if part == name] for name in names}
    return {name: nan if any(us != us for us in by) else median(by) for name, by in by_name.items()}
