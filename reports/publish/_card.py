"""What the pages of a site say of a run: its card, read from rows once and kept as summary.json.

    run ─> card    who, when, badges, sentences; a line a case; from which sparsity each format pays
    cards ─> lines, pays    tables over all runs: index, page a format, page a kernel
          ─> cells          what claims are judged by, by the claim's name

A card has the times of one measure: kernel time with a cold cache, or the first that the run has.
`place` of a line is its contest; `wins` says that nothing in it was faster, dense included.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from sparsebench.results.analysis import Analysis
from sparsebench.results.answer import badges, break_evens, sentences, where
from sparsebench.results.claims.asked import Asked
from sparsebench.results.claims.cells import Cell
from sparsebench.results.contests import raced
from sparsebench.results.environment import device_name, flat
from sparsebench.results.store import Run
from sparsebench.results.summary import CONTEST, NoCrossing
from sparsebench.results.views import ANY, View, asked, views
from sparsebench.results.words import part, percent, plain, times

SCHEMA = "sparsebench/card@4"
PLACE = ["op", "dtype", "pattern", "m", "shape", "level", "block"]
LINE = ["kind", "tile", "kernel", "name", "side", "cache"]
LINE += ["median_us", "gain", "low", "high", "settled"]
ROLES = {  # of a run that was made of another one: what run.json calls it
    "confirms": "chosen cases of an earlier run, alone",
    "reproduces": "an earlier run again",
}
PAYS = ["op", "dtype", "m", "shape", "kind", "block", "level", "note", "first", "last", "settled"]


@dataclass(frozen=True)
class Card:
    """A run in a site. `slug` is its folder and never changes; `identity` names its bundle.

    `role` says what a run is that was made of another one (ROLES); else it is "".
    """

    schema: str
    slug: str
    identity: str
    gpu: str
    suite: str
    title: str
    role: str
    only: str
    started: str
    commit: str
    processes: int
    cases: int
    badges: list[list[str]]
    where: str
    sentences: list[str]
    gain: str
    lines: list[dict[str, Any]]
    pays: list[dict[str, Any]]
    cells: dict[str, list[dict[str, Any]]]

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def card(run: Run, found: Analysis, slug: str, identity: str, claims: Sequence[Asked] = ()) -> Card:
    """Read a run's card from its analysis, with the cells of these claims."""
    ways = views(found.cases)
    lines = _lines(found.cases)
    return Card(
        schema=SCHEMA,
        slug=slug,
        identity=identity,
        gpu=device_name(run.environment),
        suite=str(run.state["suite"]),
        title=str(run.suite.get("title", run.state["suite"])),
        role=next((words for name, words in ROLES.items() if run.state.get(name)), ""),
        only=part(run.state["flags"]["only"]),
        started=str(run.state["started"]),
        commit=flat(run.environment).get("commit", ""),
        processes=int(run.state["flags"]["replicates"]),
        cases=int(found.cases[~found.cases.twin.astype(bool)].case_id.nunique()),
        badges=[
            [badge.name.lower(), badge.value, why]
            for badge, why in badges(found.cases, found.noise, run.environment, run.state)
        ],
        where=where(ways[0]) if ways else "",
        sentences=sentences(ways[0]) if ways else ["No case of this run has a time."],
        gain=_gain(ways[0]) if ways else "no times",
        lines=[] if lines.empty else _plain(lines[["place", *PLACE, *LINE, "wins"]]),
        pays=_plain(_pays(ways)),
        cells={
            asked.name: [cell.to_json() | {"run": slug} for cell in own]
            for asked in claims
            if (own := asked.cells(run, found))
        },
    )


def lines(cards: Iterable[Card]) -> pd.DataFrame:
    """Return every line of every card, with `run`, `gpu` and `suite`."""
    return _table(cards, "lines", ["place", *PLACE, *LINE, "wins"])


def pays(cards: Iterable[Card]) -> pd.DataFrame:
    """Return from which level on each format pays, by card; `text` is what a table says."""
    found = _table(cards, "pays", PAYS)
    return found.assign(text=[_from(line) for line in found.to_dict("records")])


def cells(cards: Iterable[Card]) -> dict[str, list[Cell]]:
    """Return the cells of all cards, by the claim's name."""
    found: dict[str, list[Cell]] = {}
    for card in cards:
        for name, own in card.cells.items():
            found.setdefault(name, []).extend(map(Cell.from_json, own))
    return found


def _lines(cases: pd.DataFrame) -> pd.DataFrame:
    found = raced(cases)
    if found.empty:
        return found
    measures = found[["scope", "cache"]].drop_duplicates().to_records(index=False).tolist()
    scope, cache = ("kernel", "cold") if ("kernel", "cold") in measures else measures[0]
    found = asked(found[(found.scope == scope) & (found.cache == cache)])
    haste = found.gain.fillna(-found.median_us)
    keys = pd.MultiIndex.from_frame(found[CONTEST])
    best = haste.groupby(keys.to_flat_index()).idxmax()
    texts = {name: found[name].map(plain) if name in found else "" for name in ("dtype", "pattern")}
    return found.assign(wins=found.index.isin(best), place=pd.factorize(keys)[0], **texts)


def _pays(ways: list[View]) -> pd.DataFrame:
    """Return the break-evens of views whose block, shape and m are given."""
    found = []
    for view in ways:
        same = {n: _one(view, n) for n in ("op", "dtype", "m", "shape", "block")}
        if view.units or ANY in view.choice.values():
            continue
        for each in break_evens(view):
            given = {**same, **({view.y: each.row} if view.y else {}), **vars(each)}
            if all(given[name] is not None for name in ("m", "shape", "block")):
                found.append({name: given[name] for name in PAYS})
    table = pd.DataFrame(found, columns=PAYS).astype({"note": str})
    return table.drop_duplicates(["op", "dtype", "m", "shape", "kind", "block"])


def _one(view: View, name: str) -> Any:
    values = set(view.cells[name].dropna()) if name in view.cells else set()
    return values.pop() if len(values) == 1 else None


def _from(line: dict[Any, Any]) -> str:
    if line["note"] == NoCrossing.BELOW:
        return f"≤ {percent(line['first'])}"
    if line["note"] == NoCrossing.ABOVE:
        return f"> {percent(line['last'])}"
    return percent(1 - float(f"{1 - line['level']:.2g}"))


def _gain(view: View) -> str:
    """Return the largest gain of a view with its level, for a badge: 5.58× at 90 %."""
    cells = view.cells[view.cells.best_gain.notna()]
    if cells.empty:
        return "no dense contender"
    chosen = cells[cells.x == 0.9] if view.x == "level" else cells
    top = (cells if chosen.empty else chosen).sort_values("best_gain").iloc[-1]
    place = f" at {percent(top.x)}" if view.x == "level" else ""
    gain = times(top.best_gain, top.best_half)
    return f"{gain}{place}" if top.best_gain > 1 else f"dense wins{place}"


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return lines as JSON has them: no NaN, numbers with 6 digits."""
    text: str = table.to_json(orient="records", double_precision=6)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _table(cards: Iterable[Card], what: str, columns: list[str]) -> pd.DataFrame:
    found = [
        {**line, "run": card.slug, "gpu": card.gpu, "suite": card.suite}
        for card in cards
        for line in getattr(card, what)
    ]
    return pd.DataFrame(found, columns=["run", "gpu", "suite", *columns])
