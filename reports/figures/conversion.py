"""The time to convert and prepare, and the number of calls that pays it back.

convert   from dense weights to the format              calls = convert / time saved per call
prepare   what the kernel does before its first call    calls = (convert + later) / time saved
first     prepare in the first process, which searches for a configuration
later     prepare in later processes, without a search: packing, loading code, one call
"""

import math

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, measures, panels
from sparsebench.reports.figures._html import fold_away, note
from sparsebench.reports.tables import html_table, without_dashes
from sparsebench.results.formatting import significant
from sparsebench.results.record import Status
from sparsebench.results.run.provenance import Choices, choices_of

TITLE = "Conversion"
ORDER = 60

HEADS = ["problems", "contender", ">convert, ms", ">worst, ms", ">prepare, ms, first"]
HEADS += [">later", ">calls to pay back", ">with preparing", ">never"]
OPEN = 12  # lines shown at once; if there are more, all are folded
READ = (
    "Times are medians over sparsities and m. “Calls to pay back” is the conversion time divided "
    "by the time that a call saves: its range over the cases that are clearly faster than the "
    "baseline. “Never” counts the other cases. “With preparing” adds the kernel's own work before "
    "its first call (packing, loading compiled code) in later processes, if these do not search "
    "for a configuration."
)


def draw(frames: Frames) -> Markup:
    """List the times to convert and prepare, and the calls that pay them back."""
    raced = frames.raced
    raced = raced[raced.label.isin(frames.series) & raced.convert_us.notna()]
    if raced.empty:
        return NOTHING
    prepared = _with_prepare_times(frames, measures(raced)[0])
    same, groups = panels(prepared, "level", ["m", "dtype", "pattern"])
    lines = [
        _line(title or same, str(label), cases)
        for title, group in groups
        for label, cases in group.groupby("label", sort=False)
    ]
    body = html_table(*without_dashes(HEADS, lines))
    shown = body if len(lines) <= OPEN else fold_away(f"All {len(lines)} lines", body)
    return note(f"{same}. {READ}") + shown


def _with_prepare_times(frames: Frames, cases: pd.DataFrame) -> pd.DataFrame:
    """Add the time to prepare in the first process, and in later ones if these do not search."""
    rows = frames.rows[frames.rows.status == Status.OK]
    first = rows.replicate == rows.replicate.min()
    searched = choices_of(frames.run.state) in (Choices.AMONG, Choices.EARLIER)
    later = rows[:0] if searched else rows[~first]
    medians = {
        name: cases.case_id.map(group.groupby("case_id").prepare_s.median())
        for name, group in {"first_s": rows[first], "later_s": later}.items()
    }
    return cases.assign(**medians)


def _line(title: str, label: str, cases: pd.DataFrame) -> list[str]:
    saved_us = (cases.median_us * (cases.speedup - 1)).where(cases.clear)
    return [
        title,
        label,
        significant(cases.convert_us.median() / 1e3),
        significant(cases.convert_us.max() / 1e3),
        significant(1e3 * cases.first_s.median()),
        significant(1e3 * cases.later_s.median()),
        _calls(cases.convert_us / saved_us),
        _calls((cases.convert_us + 1e6 * cases.later_s) / saved_us),
        f"{(~cases.clear).sum()} of {cases.speedup.notna().sum()}",
    ]


def _calls(calls: pd.Series) -> str:
    """Write the least and the greatest number of calls."""
    paid = calls.dropna()
    ends = [f"{math.ceil(end):,}" for end in (paid.min(), paid.max())] if len(paid) else ["–"]
    return "–".join(dict.fromkeys(ends))
