"""What the pages of a site say of a run: its card, read from rows once and kept as summary.json.

    run ─> card    who, when, badges, sentences; a line a case; from which sparsity each format pays
    cards ─> lines, pays    tables over all runs: index, page a format, page a kernel
          ─> cells          what claims are judged by, by the claim's name

A card has the times of one measure: kernel time with a cold cache, or the first that the run has.
`place` of a line is its contest; `wins` says that nothing in it was faster, dense included.
In the tables each line has the processes and the day of its run, and whether it is a verdict.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from sparsebench.results.analysis import CONTEST, Analysis
from sparsebench.results.answer import (
    Badge,
    badges,
    break_evens,
    field_text,
    place,
    sentences,
    variants,
    where,
)
from sparsebench.results.claims.cells import Cell
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.contests import ANY, View, views, with_gains, with_shapes
from sparsebench.results.formatting import plain, selection, times
from sparsebench.results.provenance import device_name, flat
from sparsebench.results.store import Run

SCHEMA = "sparsebench/card@6"
PLACE = ["op", "dtype", "pattern", "m", "shape", "level", "block"]
LINE = ["kind", "tile", "kernel", "name", "side", "cache"]
LINE += ["median_us", "gain", "low", "high", "decided"]
ROLES = {  # of a run that was made of another one: what run.json calls it
    "confirms": "chosen cases of an earlier run, alone",
    "reproduces": "an earlier run again",
}
PAYS = ["op", "dtype", "m", "shape", "kind", "block", "slower", "faster", "decided"]
OF_RUN = ["run", "gpu", "suite", "name_of_run", "processes", "day", "verdict"]


@dataclass(frozen=True)
class Card:
    """A run in a site. `slug` is its folder and never changes; `identity` names its bundle.

    `name` is what the folder was called that it was published from.
    `role` says what a run is that was made of another one (ROLES); else it is "".
    """

    schema: str
    slug: str
    identity: str
    name: str
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

    @property
    def verdict(self) -> bool:
        """Say whether it ran in enough processes for verdicts."""
        return any(name == Badge.VERDICT.name.lower() for name, *_ in self.badges)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def card(
    run: Run,
    found: Analysis,
    slug: str,
    identity: str,
    claims: Sequence[PlannedClaim] = (),
    name: str = "",
) -> Card:
    """Read a run's card from its analysis, with the cells of these claims."""
    ways = views(found.cases)
    about = (where(ways[0]), variants(ways[0], found.cases)) if ways else ()
    lines = _lines(found.cases)
    return Card(
        schema=SCHEMA,
        slug=slug,
        identity=identity,
        name=name or str(run.state["suite"]),
        gpu=device_name(run.environment),
        suite=str(run.state["suite"]),
        title=str(run.suite.get("title", run.state["suite"])),
        role=next((words for name, words in ROLES.items() if run.state.get(name)), ""),
        only=selection(run.state["flags"]["only"]),
        started=str(run.state["started"]),
        commit=flat(run.environment).get("commit", ""),
        processes=int(run.state["flags"]["replicates"]),
        cases=int(found.cases[~found.cases.twin.astype(bool)].case_id.nunique()),
        badges=[
            [badge.name.lower(), badge.value, why]
            for badge, why in badges(found.cases, found.noise, run.environment, run.state)
        ],
        where=" · ".join(filter(None, about)),
        sentences=sentences(ways[0]) if ways else ["No case of this run has a time."],
        gain=_gain(ways[0]) if ways else "no times",
        lines=[] if lines.empty else _plain(lines[["place", *PLACE, *LINE, "wins"]]),
        pays=_plain(_pays(ways)),
        cells={
            claim.name: [cell.to_json() | {"run": slug} for cell in own]
            for claim in claims
            if (own := claim.cells(run, found))
        },
    )


def lines(cards: Iterable[Card]) -> pd.DataFrame:
    """Return every line of every card, with what OF_RUN names."""
    return _table(cards, "lines", ["place", *PLACE, *LINE, "wins"])


def pays(cards: Iterable[Card]) -> pd.DataFrame:
    """Return between which levels each format begins to pay, by card: BreakEven."""
    found = _table(cards, "pays", PAYS)
    return found.astype({"slower": "float64", "faster": "float64"})


def cells(cards: Iterable[Card]) -> dict[str, list[Cell]]:
    """Return the cells of all cards, by the claim's name."""
    found: dict[str, list[Cell]] = {}
    for card in cards:
        for name, own in card.cells.items():
            found.setdefault(name, []).extend(map(Cell.from_json, own))
    return found


def _lines(cases: pd.DataFrame) -> pd.DataFrame:
    found = with_gains(cases)
    if found.empty:
        return found
    measures = found[["scope", "cache"]].drop_duplicates().to_records(index=False).tolist()
    scope, cache = ("kernel", "cold") if ("kernel", "cold") in measures else measures[0]
    found = with_shapes(found[(found.scope == scope) & (found.cache == cache)])
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
        levels = view.formats.groupby(["kind", "y"]).x.nunique()
        for each in break_evens(view):
            if levels[each.kind, each.row] < 2:
                continue  # one level is no sweep
            given = {**same, **({view.y: each.row} if view.y else {}), **vars(each)}
            if all(given[name] is not None for name in ("m", "shape", "block")):
                found.append({name: given[name] for name in PAYS})
    table = pd.DataFrame(found, columns=PAYS)
    return table.drop_duplicates(["op", "dtype", "m", "shape", "kind", "block"])


def _one(view: View, name: str) -> Any:
    values = set(view.cells[name].dropna()) if name in view.cells else set()
    return values.pop() if len(values) == 1 else None


def _gain(view: View) -> str:
    """Return the largest gain of a view and its cell, for a badge: 5.58× at 90 %, blocks of 64."""
    cells = view.cells[view.cells.best_gain.notna()]
    if cells.empty:
        return "no dense contender"
    chosen = cells[cells.x == 0.9] if view.x == "level" else cells
    top = (cells if chosen.empty else chosen).sort_values("best_gain").iloc[-1]
    said = [n for n in view.choice if n not in (view.x, view.y, "block", "pattern")]
    rest = [field_text(n, view.choice[n]) for n in said if view.choice[n] != "linear"]
    at = ", ".join(filter(None, [place(view, top), field_text("block", top.best_tile), *rest]))
    return f"{times(top.best_gain, top.best_half) if top.best_gain > 1 else 'dense wins'} {at}"


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return lines as JSON has them: no NaN, numbers with 6 digits."""
    text: str = table.to_json(orient="records", double_precision=6)
    found: list[dict[str, Any]] = json.loads(text)
    return found


def _table(cards: Iterable[Card], what: str, columns: list[str]) -> pd.DataFrame:
    found = [
        dict(line, **dict(zip(OF_RUN, _of_run(card), strict=True)))
        for card in cards
        for line in getattr(card, what)
    ]
    return pd.DataFrame(found, columns=[*OF_RUN, *columns])


def _of_run(card: Card) -> list[Any]:
    day = card.started[:10]
    return [card.slug, card.gpu, card.suite, card.name, card.processes, day, card.verdict]
