"""What calling a kernel from Python adds, in runs that time a case in both ways.

    scope op      a call as users make it, on the host's clock
    scope kernel  the device time of the same case

It is shown in the problem with the shortest device time, in which the host's part is the clearest.
"""

import pandas as pd

from sparsebench.results.formatting import duration
from sparsebench.results.problem_names import problem_name
from sparsebench.results.tables.contests import usual
from sparsebench.results.tables.frame import fields, records

SAME = ["case_id", "cache"]


def sentence(timed: pd.DataFrame) -> str:
    """Write both times of the contenders of one problem; "" if no case has both."""
    alone, called = usual(timed[timed.scope == "kernel"]), timed[timed.scope == "op"]
    both = called.merge(alone[[*SAME, "median_us"]], on=SAME, suffixes=("", "_alone"))
    if both.empty:
        return ""
    first = records(both.sort_values("median_us_alone"))[0]
    calls = [
        f"{call['name']} {duration(call['median_us'])} ({duration(call['median_us_alone'])})"
        for call in records(both[both.problem_id == first["problem_id"]].sort_values("median_us"))
    ]
    names = [name for name in fields(timed) if name != "sparsity"]
    where = problem_name(first, [*names, "level", "cache"])
    return f"Called from Python (device time in brackets): {', '.join(calls)}; {where}."
