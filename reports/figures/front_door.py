"""What users get beside the fastest kernel of the same format that a suite can name."""

from collections.abc import Iterator, Mapping
from typing import Any

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, describe_line, each_measure
from sparsebench.reports.figures._html import note
from sparsebench.reports.findings import who
from sparsebench.reports.tables import html_table
from sparsebench.results.cases import CONTEST
from sparsebench.results.families import DEFAULT, OF_ACTIVATIONS
from sparsebench.results.formatting import between, percent, significant
from sparsebench.results.frame import fields, records
from sparsebench.results.statistics import ratio_over

TITLE = "What users get, beside the fastest kernel of the format"
ORDER = 17

SHARE, SPARE_US = 0.03, 0.5  # fraction of the fastest kernel's time, and the scatter of a launch
HEADS = ["case", "by default", ">µs", "fastest named kernel", ">µs", ">default takes", "within"]

Case = Mapping[Any, Any]
"""A line of `timed` (results/analysis.py)."""


def draw(frames: Frames) -> Markup:
    """List each case of the contender without a kernel that has a rival of its format."""
    return each_measure(frames.raced, _draw)


def _draw(raced: pd.DataFrame) -> Markup:
    contests = raced.groupby(CONTEST, sort=False)
    pairs = [pair for _, contest in contests for pair in _pairs(records(contest))]
    if not pairs:
        return NOTHING
    users = pd.DataFrame([users for users, _ in pairs])
    names = ["op", *(name for name in fields(raced) if name not in ("seed", "sparsity")), "level"]
    differ = [name for name in names if users[name].nunique(dropna=False) > 1] or ["op"]
    same = describe_line(users.iloc[0], [name for name in names if name not in differ])
    inside = sum(_is_within(*pair) for pair in pairs)
    head = (
        f"{inside} of {len(pairs)} cases take at most {percent(SHARE)} plus {SPARE_US} µs longer "
        "than the fastest named kernel of the format. The kernel is chosen by a short search or a "
        f"list, as in a layer. {same}"
    )
    pairs.sort(key=lambda pair: -pair[0]["median_us"] / pair[1]["median_us"])
    return note(head) + html_table(HEADS, [_line(*pair, differ) for pair in pairs])


def _pairs(contest: list[dict[str, Any]]) -> Iterator[tuple[Case, Case]]:
    """Yield what users get of each format, and its fastest rival."""
    named_kernels = [case for case in contest if case["kernel"] != DEFAULT]
    sparse = [case for case in named_kernels if case["side"] != "dense"]  # also of a portfolio
    for users in contest:
        rivals = [case for case in sparse if _kind(case) == _kind(users)]
        if users["kernel"] == DEFAULT and users["format"] != "dense" and rivals:
            yield users, min(rivals, key=lambda case: float(case["median_us"]))


def _kind(case: Case) -> str:
    """Return what rivals share: the format and its params, or that they store activations."""
    stores_activations = case["format"] in OF_ACTIVATIONS
    return "activations" if stores_activations else f"{case['format']} {case['params']}"


def _is_within(users: Case, rival: Case) -> bool:
    return float(users["median_us"]) <= (1 + SHARE) * float(rival["median_us"]) + SPARE_US


def _line(users: Case, rival: Case, names: list[str]) -> list[str]:
    ratio = ratio_over(rival["blocks"], users["blocks"], users["between"])
    taken = between(ratio.value, ratio.low, ratio.high) if ratio else "–"
    us = [significant(case["median_us"]) for case in (users, rival)]
    within = "yes" if _is_within(users, rival) else "no"
    where = describe_line(pd.Series(users), names)
    return [where, who(users), us[0], rival["label"], us[1], taken, within]
