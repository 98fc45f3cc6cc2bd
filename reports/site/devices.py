"""Compare devices: one page for each suite that ran on several of them.

    compare/index.html    the suites
    compare/SUITE.html    the devices by name, each compared with the first
    compare/SUITE.json    the same for a script, with the names of the runs

Each device is represented by its run with the most processes, and by the newest if several have as
many. Simulated devices never stand beside real ones. A device that shares no sparse case with the
first is left out; this holds for a CPU, which is timed with a warm cache. Runs are read again only
if one of them is new or the code has changed.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsebench.reports import comparison
from sparsebench.reports.page import render
from sparsebench.reports.site.cards import PLACE, Card
from sparsebench.reports.site.pages import Site, safe
from sparsebench.results import store
from sparsebench.results.changes import Mean
from sparsebench.results.formatting import join_words
from sparsebench.results.sides import MOST, distinct_names, side

INDEX = "compare/index.html"


@dataclass(frozen=True)
class Devices:
    """A suite and the card of its run on each device."""

    suite: str
    cards: Sequence[Card]

    @property
    def names(self) -> str:
        return join_words([card.gpu for card in self.cards])

    @property
    def name(self) -> str:
        """Return the path of the pages in the site, without a suffix."""
        return f"compare/{safe(self.suite)}"


def find_devices(cards: Sequence[Card]) -> list[Devices]:
    """Return the suites that ran on several devices, sorted by name."""
    best: dict[str, dict[str, Card]] = {}
    real = [card for card in cards if not card.simulated]
    for card in sorted(real, key=lambda card: (card.processes, card.started, card.slug)):
        best.setdefault(card.suite, {})[card.gpu] = card
    suites = []
    for suite, of_device in sorted(best.items()):
        first, *others = sorted(of_device.values(), key=_rank)
        shared = [card for card in others if _timed_cases(card) & _timed_cases(first)]
        if shared:
            suites.append(Devices(suite, sorted([first, *shared][:MOST], key=_name)))
    return suites


def pages(
    to: Path, every: Sequence[Devices], redone: Collection[str], site: Site
) -> Iterator[tuple[str, str]]:
    """Yield the path and text of each page and its JSON; `redone` are addresses of new runs."""
    sentences = {}
    for devices in every:
        slugs = [card.address for card in devices.cards]
        files = [to / f"{devices.name}.{ending}" for ending in ("html", "json")]
        new = any(card.address in redone for card in devices.cards)
        if not new and all(file.exists() for file in files):
            texts = [file.read_text("utf-8") for file in files]
            data = json.loads(texts[1])
            if [slug for run in data["runs"].values() for slug in run] == slugs:
                sentences[devices.suite] = _mean_times(data)
                yield from zip([f"{devices.name}.html", f"{devices.name}.json"], texts, strict=True)
                continue
        runs = [replace(store.read(to / slug), path=Path(slug)) for slug in slugs]
        names = distinct_names(runs)
        sides = [side(run, name=name) for run, name in zip(runs, names, strict=True)]
        result = comparison.compare_sides(sides)
        yield f"{devices.name}.html", comparison.html(result, site, "../")
        data = comparison.to_json(result)
        sentences[devices.suite] = _mean_times(data)
        yield f"{devices.name}.json", json.dumps(data) + "\n"
    yield INDEX, render("site_compare.html", site=site, suites=every, sentences=sentences)


def _mean_times(data: dict[str, Any]) -> str:
    """Compare the times of each other device with those of the first in a sentence."""
    first, means = next(iter(data["runs"])), ("baselines_mean", "times_mean")
    return " ".join(
        comparison.mean_times(
            first, name, *(Mean(**change[mean]) if change[mean] else None for mean in means)
        )
        for name, change in data["changes"].items()
    )


def _rank(card: Card) -> tuple[int, str]:
    return -len(card.lines), card.gpu


def _name(card: Card) -> str:
    return card.gpu


def _timed_cases(card: Card) -> set[tuple[str, ...]]:
    """Return the sparse cases with a time: problem, name and cache state of each."""
    lines = [line for line in card.lines if line["side"] != "dense"]
    return {tuple(str(line[name]) for name in (*PLACE, "name", "cache")) for line in lines}
