"""Compare devices: any two GPUs by workload, and a page for each suite that ran on several.

    compare/index.html    two selects, a table of workloads (reports/workloads.py), the suites
    compare/SUITE.html    the devices by name, each compared with the first
    compare/SUITE.json    the same for a script, with the names of the runs

A device is represented by all its runs of the suite that share a sparse case with the device that
has the most; if several hold a case, results/comparison/sides.py says which one counts. A device
without such a run is left out; this holds for a CPU, which is timed with a warm cache. Runs are
read again only if one is new or the code has changed.
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path

from sparsebench.reports import comparison
from sparsebench.reports.page import render
from sparsebench.reports.site.cards import PLACE, Card, lines
from sparsebench.reports.site.pages import Site, safe
from sparsebench.reports.workloads import two_gpus
from sparsebench.results.comparison.sides import MOST, distinct_names, side
from sparsebench.results.formatting import join_words
from sparsebench.results.run import store

INDEX = "compare/index.html"


@dataclass(frozen=True)
class Devices:
    """A suite and the cards of its runs on each device."""

    suite: str
    sides: Sequence[Sequence[Card]]

    @property
    def names(self) -> str:
        return join_words([cards[0].gpu for cards in self.sides])

    @property
    def title(self) -> str:
        return self.sides[0][0].title

    @property
    def name(self) -> str:
        """Return the path of the pages in the site, without a suffix."""
        return f"compare/{safe(self.suite)}"

    @property
    def addresses(self) -> list[list[str]]:
        """Return the addresses of the runs of each side."""
        return [[card.address for card in cards] for cards in self.sides]


def find_devices(cards: Sequence[Card]) -> list[Devices]:
    """Return the suites that ran on several devices, sorted by name."""
    runs: dict[str, dict[str, list[Card]]] = {}
    for card in sorted(cards, key=lambda c: (c.processes, c.started, c.slug), reverse=True):
        runs.setdefault(card.suite, {}).setdefault(card.gpu, []).append(card)
    suites = []
    for suite, of_device in sorted(runs.items()):
        first, *others = sorted(of_device.values(), key=_rank)
        shared = [_sharing(side, first) for side in others]
        sides = [_sharing(first, [card for side in shared for card in side]), *shared]
        if any(shared):
            suites.append(Devices(suite, sorted([*filter(None, sides)][:MOST], key=_name)))
    return suites


def _sharing(cards: Sequence[Card], others: Sequence[Card]) -> list[Card]:
    """Return the cards that share a sparse case with one of the others."""
    cases = {case for card in others for case in _timed_cases(card)}
    return [card for card in cards if _timed_cases(card) & cases]


def suite_pages(
    to: Path, redone: Collection[str], site: Site, work: tuple[str, Sequence[Sequence[str]]]
) -> dict[str, str]:
    """Return the page of a suite and its JSON, by path.

    redone  addresses of new runs
    work    the path of the pages without a suffix, and the addresses of the runs of each side
    """
    name, slugs = work
    files = [to / f"{name}.{ending}" for ending in ("html", "json")]
    new = any(slug in redone for of_side in slugs for slug in of_side)
    if not new and all(file.exists() for file in files):
        texts = [file.read_text("utf-8") for file in files]
        if [*json.loads(texts[1])["runs"].values()] == slugs:
            return dict(zip([f"{name}.html", f"{name}.json"], texts, strict=True))
    runs = [
        [replace(store.read(to / slug), path=Path(slug)) for slug in of_side] for of_side in slugs
    ]
    names = distinct_names([of_side[0] for of_side in runs])
    sides = [side(*of_side, name=each) for of_side, each in zip(runs, names, strict=True)]
    result = comparison.compare_sides(sides)
    data = json.dumps(comparison.to_json(result)) + "\n"
    return {f"{name}.html": comparison.html(result, site, "../"), f"{name}.json": data}


def index(every: Sequence[Devices], site: Site, cards: Sequence[Card]) -> str:
    """Return the page that compares any two GPUs by workload, and lists the suites."""
    gpus, of_cards = sorted({card.gpu for card in cards if card.units}), lines(cards)
    pairs = [two_gpus(of_cards, a, b) for a, b in permutations(gpus, 2)]
    labels = list(dict.fromkeys(two.a for two in pairs))
    return render("site_compare.html", site=site, suites=every, pairs=pairs, gpus=labels)


def _rank(cards: Sequence[Card]) -> tuple[int, str]:
    return -sum(len(card.lines) for card in cards), cards[0].gpu


def _name(cards: Sequence[Card]) -> str:
    return cards[0].gpu


def _timed_cases(card: Card) -> set[tuple[str, ...]]:
    """Return the sparse cases with a time: problem, name and cache state of each."""
    lines = [line for line in card.lines if line["side"] != "dense"]
    return {tuple(str(line[name]) for name in (*PLACE, "name", "cache")) for line in lines}
