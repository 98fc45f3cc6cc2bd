"""The history of the headlines: cases that several runs on one kind of GPU measured, by date.

    history.html    GPU ─> case ─> a line per run: day, commit, card, time, gain with its interval,
                    and how it differs from the line above

Only verdicts count. A case is listed if its kernel won a contest against every other one in one of
the runs; a run's headline cases come first. Every interval includes the variation between runs,
also that of a difference on two cards; `compare` shows the cause of a difference.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sparsebench.reports.comparison_tables import GAINS
from sparsebench.reports.page import render
from sparsebench.reports.site.cards import Card
from sparsebench.results.comparison.compare import difference
from sparsebench.results.comparison.sides import short_card
from sparsebench.results.formatting import FORMATS, between, duration, percent
from sparsebench.results.statistics.outcome import STYLES, outcome

PAGE = "history.html"
WIDTH = 120  # width of an interval's drawing, in pixels


@dataclass(frozen=True)
class Point:
    """A measurement of a case; `low`, `middle` and `high` are pixels of its drawing."""

    card: Card
    time: str
    gain: str
    low: float
    middle: float
    high: float
    change: str
    style: str
    differs: str


@dataclass(frozen=True)
class HistoryCase:
    """A case on one kind of GPU and its measurements, the oldest first."""

    gpu: str
    name: str
    is_headline: bool
    best: float
    points: Sequence[Point]


def page(cards: Sequence[Card], site: Any) -> str:
    """Return the page; without a case that was measured twice, it says so."""
    cases_over_time = histories(cards)
    gpus = {
        gpu: [case for case in cases_over_time if case.gpu == gpu]
        for gpu in {c.gpu: 0 for c in cases_over_time}
    }
    return render("site_history.html", site=site, gpus=gpus, width=WIDTH, units=units)


def histories(cards: Sequence[Card]) -> list[HistoryCase]:
    """Return the cases that at least two verdicts measured, headlines and large gains first."""
    measured: dict[tuple[str, str], list[tuple[Card, Mapping[str, Any]]]] = {}
    for card in sorted(cards, key=lambda card: (card.started, card.slug)):
        for line in card.lines if card.verdict else ():
            if line["side"] != "dense" and line["gain"] and line["low"]:
                measured.setdefault((card.gpu, line["case_id"]), []).append((card, line))
    headlines = {card.headline.get("case") for card in cards}
    cases = [
        _case(gpu, points, case in headlines)
        for (gpu, case), points in measured.items()
        if len(points) > 1 and any(line["wins"] and line["gain"] > 1 for _, line in points)
    ]
    return sorted(cases, key=lambda case: (not case.is_headline, -case.best))


def _case(
    gpu: str, measured: Sequence[tuple[Card, Mapping[str, Any]]], is_headline: bool
) -> HistoryCase:
    least = min(line["low"] for _, line in measured)
    most = max(line["high"] for _, line in measured)

    def place(gain: float) -> float:
        return float(round(6 + (WIDTH - 12) * (gain - least) / ((most - least) or 1), 1))

    points = []
    for number, (card, line) in enumerate(measured):
        change, style, differs = _change(*measured[number - 1], card, line) if number else ("",) * 3
        ends = [line[name] for name in ("gain", "low", "high")]
        middle, low, high = map(place, ends)
        time, gain = duration(line["median_us"]), between(*ends)
        points.append(Point(card, time, gain, low, middle, high, change, style, differs))
    return HistoryCase(gpu, _name(measured[-1][1]), is_headline, measured[-1][1]["gain"], points)


def _change(
    before: Card, then: Mapping[str, Any], card: Card, now: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return how a gain differs from the one before, in words, and what else differs."""
    same, searched = before.units == card.units, not (before.role or card.role)
    gains = [
        (line["gain"], line["low"], line["high"], line["between"] if same else 0.0)
        for line in (then, now)
    ]
    value, low, high = difference(*gains)
    word = outcome(low, high)
    text = f"{GAINS.get(word, str(word))} ({between(value, low, high)})"
    differs = [
        f"{name} {a or 'unknown'} to {b or 'unknown'}"
        for name, a, b in (
            ("commit", before.commit[:7], card.commit[:7]),
            *((n, before.versions.get(n), card.versions.get(n)) for n in card.versions),
        )
        if a != b
    ]
    differs += [] if same else ["another card"]
    differs += [] if searched else ["inherited configurations"]
    return text, STYLES[word], ", ".join(differs) or "nothing recorded"


def _name(line: Mapping[str, Any]) -> str:
    """Name a case: `BSR 64, 90 %, m 4096, 4096 × 4096, linear, bf16: bsr_wgmma`."""
    kind = f"{FORMATS.get(line['kind'], line['kind'])} {line['tile']}".strip()
    level = percent(line["level"]) if line["level"] else ""
    parts = [kind, level, f"m {line['m']}", line["shape"], line["op"], line["dtype"]]
    return f"{', '.join(filter(None, parts))}: {line['name']}"


def units(card: Card) -> str:
    """Return the short names of a run's cards."""
    return ", ".join(map(short_card, card.units)) or "–"
