"""Devices held against each other: a page for each suite that a site has of several devices.

    compare/SUITE.html    A is the run of the device with most cases, B, C ... those of the others
    compare/SUITE.json    the same for a script; it names the runs that the page is of

Of each device it takes the run with the most processes, the newest of these. Simulated devices come
last. A device that has no sparse case in common with A is left out, as a CPU, which times warm
caches.
Runs are read again only where one of them is new or the code has changed.
"""

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from sparsebench.reports import comparison
from sparsebench.reports.site.cards import PLACE, Card
from sparsebench.reports.site.pages import safe
from sparsebench.results import store
from sparsebench.results.answer import Badge
from sparsebench.results.formatting import listed

MOST = 26  # runs of one comparison, A to Z


@dataclass(frozen=True)
class Devices:
    """A suite, and its runs by device; `pages` lie in the site."""

    suite: str
    cards: Sequence[Card]

    @property
    def title(self) -> str:
        """Say what is compared."""
        return f"{self.suite}: {listed([card.gpu for card in self.cards])}"

    @property
    def name(self) -> str:
        """Return the path of the pages, without an ending."""
        return f"compare/{safe(self.suite)}"


def compared(cards: Sequence[Card]) -> list[Devices]:
    """Return the suites that ran on several devices, by name."""
    best: dict[str, dict[str, Card]] = {}
    for card in sorted(cards, key=lambda card: (card.processes, card.started, card.slug)):
        best.setdefault(card.suite, {})[card.gpu] = card
    found = []
    for suite, of_device in sorted(best.items()):
        first, *others = sorted(of_device.values(), key=_rank)
        shared = [card for card in others if _timed(card) & _timed(first)]
        if shared:
            found.append(Devices(suite, [first, *shared][:MOST]))
    return found


def pages(to: Path, every: Sequence[Devices], redone: Collection[str]) -> Iterator[tuple[str, str]]:
    """Yield path and text of each suite's page and of its JSON; `redone` are slugs of runs."""
    for devices in every:
        slugs = [f"runs/{card.slug}" for card in devices.cards]
        files = [to / f"{devices.name}.{ending}" for ending in ("html", "json")]
        new = any(card.slug in redone for card in devices.cards)
        if not new and all(file.exists() for file in files):
            texts = [file.read_text("utf-8") for file in files]
            if [*json.loads(texts[1])["runs"].values()] == slugs:
                yield from zip([f"{devices.name}.html", f"{devices.name}.json"], texts, strict=True)
                continue
        found = comparison.compared([replace(store.read(to / s), path=Path(s)) for s in slugs])
        yield f"{devices.name}.html", comparison.html(found, root="../")
        yield f"{devices.name}.json", json.dumps(comparison.to_json(found)) + "\n"


def _rank(card: Card) -> tuple[bool, int, str]:
    return _simulated(card), -len(card.lines), card.gpu


def _timed(card: Card) -> set[tuple[str, ...]]:
    """Return what is sparse and has a time: its problem, its name, and the state of the cache."""
    lines = [line for line in card.lines if line["side"] != "dense"]
    return {tuple(str(line[name]) for name in (*PLACE, "name", "cache")) for line in lines}


def _simulated(card: Card) -> bool:
    return any(badge[0] == Badge.SIMULATED.name.lower() for badge in card.badges)
