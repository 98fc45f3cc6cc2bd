"""What calling a kernel from Python adds, in runs that time a case in both ways.

scope op      a call as users make it, on the host's clock
scope kernel  the device time of the same case
"""

import pandas as pd

from sparsebench.results.formatting import duration
from sparsebench.results.tables.frame import records

SAME = ["case_id", "cache"]


def sentence(timed: pd.DataFrame) -> str:
    """Write both times of each kernel's shortest call; "" if no case has both."""
    called, alone = (timed[timed.scope == scope] for scope in ("op", "kernel"))
    both = called.merge(alone[[*SAME, "median_us"]], on=SAME, suffixes=("", "_alone"))
    shortest = both.sort_values("median_us_alone").drop_duplicates("name").sort_values("median_us")
    calls = [
        f"{call['name']} {duration(call['median_us'])} ({duration(call['median_us_alone'])})"
        for call in records(shortest)
    ]
    start = "The shortest call of each kernel, called from Python (device time in brackets)"
    return f"{start}: {', '.join(calls)}." if calls else ""
