"""What converting and preparing cost, and after how many calls they are paid back.

convert     dense weights to the format                        calls = convert / saved a call
preparing   and what the kernel does before its first call     calls = (convert + later) / saved
later       in processes after the first: packing, loading compiled code, one call; no search
"""

import math

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, measures, panels
from sparsebench.reports.figures._html import folded, known, note, significant, table
from sparsebench.results.record import Status

TITLE = "Conversion"
ORDER = 60

HEADS = ["problems", "contender", ">convert, ms", ">worst, ms", ">prepare, ms, first"]
HEADS += [">later", ">calls to pay back", ">with preparing", ">never"]
OPEN = 12  # lines shown at once
READ = (
    "Medians over sparsities and m. Calls: conversion over the time that a call saves against the "
    "baseline, least to most, where it is clearly faster; never: where it is not. With preparing: "
    "conversion and what the kernel itself does before its first call (packing, loading compiled "
    "code) in processes after the first, which take the choice of the first without a search."
)


def draw(frames: Frames) -> Markup:
    """List the times of converting and preparing, and the calls that pay for them."""
    raced = frames.raced
    raced = raced[raced.label.isin(frames.series) & raced.convert_us.notna()]
    if raced.empty:
        return NOTHING
    ours = _prepared(frames, measures(raced)[0])
    same, groups = panels(ours, "level", ["m", "dtype", "pattern"])
    lines = [
        _line(title or same, str(label), cases)
        for title, group in groups
        for label, cases in group.groupby("label", sort=False)
    ]
    body = table(*known(HEADS, lines))
    shown = body if len(lines) <= OPEN else folded(f"All {len(lines)} lines", body)
    return note(f"{same}. {READ}") + shown


def _prepared(frames: Frames, cases: pd.DataFrame) -> pd.DataFrame:
    """Add the time of preparing in the first process, and in later ones that did not search.

    Runs without reference contests are of a time when every process searched.
    """
    rows = frames.rows[frames.rows.status == Status.OK]
    first = rows.replicate == rows.replicate.min()
    later = rows[~first] if frames.run.reference else rows[:0]
    times = {"first_s": rows[first], "later_s": later}
    medians = {name: found.groupby("case_id").prepare_s.median() for name, found in times.items()}
    return cases.assign(**{name: cases.case_id.map(found) for name, found in medians.items()})


def _line(title: str, label: str, cases: pd.DataFrame) -> list[str | Markup]:
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
    """Write the fewest and the most calls."""
    paid = calls.dropna()
    ends = [f"{math.ceil(end):,}" for end in (paid.min(), paid.max())] if len(paid) else ["–"]
    return "–".join(dict.fromkeys(ends))
