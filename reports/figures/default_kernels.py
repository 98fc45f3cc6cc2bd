"""What users get beside the fastest kernel of the same format that a suite can name."""

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, describe_line
from sparsebench.reports.figures._html import note
from sparsebench.reports.figures._verdict import intervals
from sparsebench.reports.findings import contender_name
from sparsebench.reports.tables import html_table
from sparsebench.results.formatting import between, significant
from sparsebench.results.statistics.ratio import ratio_over
from sparsebench.results.tables.default_kernels import BOUND, TimedCase, is_within, pairs
from sparsebench.results.tables.frame import fields

TITLE = "What users get, beside the fastest kernel of the format"
ORDER = 17

HEADS = ["case", "by default", ">µs", "fastest named kernel", ">µs", ">default takes", "within"]


def draw(frames: Frames) -> Markup:
    """List each case of the contender without a kernel that has a rival of its format."""
    cases = frames.first
    every = pairs(cases)
    if not every:
        return NOTHING
    users = pd.DataFrame([users for users, _ in every])
    names = ["op", *(name for name in fields(cases) if name not in ("seed", "sparsity")), "level"]
    differ = [name for name in names if users[name].nunique(dropna=False) > 1] or ["op"]
    same = describe_line(users.iloc[0], [name for name in names if name not in differ])
    inside = sum(is_within(*pair) for pair in every)
    head = (
        f"{inside} of {len(every)} cases take at most {BOUND} longer "
        "than the fastest named kernel of the format. The contender default chooses its kernel by "
        f"a short search or from a list, as a layer does. {intervals(users)} {same}"
    )
    every.sort(key=lambda pair: -pair[0]["median_us"] / pair[1]["median_us"])
    return note(head) + html_table(HEADS, [_line(*pair, differ) for pair in every])


def _line(users: TimedCase, rival: TimedCase, names: list[str]) -> list[str]:
    ratio = ratio_over(rival["blocks"], users["blocks"], users["between"])
    taken = between(ratio.value, ratio.low, ratio.high) if ratio else "–"
    us = [significant(case["median_us"]) for case in (users, rival)]
    within = "yes" if is_within(users, rival) else "no"
    where = describe_line(pd.Series(users), names)
    return [where, contender_name(users), us[0], contender_name(rival), us[1], taken, within]
