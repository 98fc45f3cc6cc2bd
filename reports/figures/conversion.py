"""What converting and preparing cost, and after how many calls they are paid back."""

import math

import pandas as pd
from markupsafe import Markup

from sparsebench.reports.figures._figure import NOTHING, Frames, panels
from sparsebench.reports.figures._html import folded, note, significant, table

TITLE = "Conversion"
ORDER = 60

HEADS = ["problems", "contender", ">convert, ms", ">worst, ms", ">prepare, s"]
HEADS += [">calls to pay back", ">never"]
OPEN = 12  # lines shown at once


def draw(frames: Frames) -> Markup:
    """List convert and prepare times; calls = convert time / time saved a call."""
    raced = frames.raced
    ours = raced[raced.label.isin(frames.series) & raced.convert_us.notna()]
    if ours.empty:
        return NOTHING
    together = ["m", "dtype", "pattern", "scope", "cache"]
    same, groups = panels(ours, "level", together)
    lines = [
        _line(title or same, str(label), cases)
        for title, group in groups
        for label, cases in group.groupby("label", sort=False)
    ]
    words = f"{same}. Medians over sparsities and m. Calls: conversion over the time that a call "
    words += "saves against the baseline, least to most; never: cases where it saves none."
    body = table(HEADS, lines)
    return note(words) + (body if len(lines) <= OPEN else folded(f"All {len(lines)} lines", body))


def _line(title: str, label: str, cases: pd.DataFrame) -> list[str | Markup]:
    saved = cases.median_us * (cases.speedup - 1)
    calls = (cases.convert_us / saved)[saved > 0]
    ends = [f"{math.ceil(end):,}" for end in (calls.min(), calls.max())] if len(calls) else ["–"]
    return [
        title,
        label,
        significant(cases.convert_us.median() / 1e3),
        significant(cases.convert_us.max() / 1e3),
        significant(cases.prepare_s.dropna().median()),
        "–".join(dict.fromkeys(ends)),
        f"{(saved <= 0).sum()} of {saved.notna().sum()}",
    ]
