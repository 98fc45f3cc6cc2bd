"""The card of a run: everything that a site shows about it, read from rows once (summary.json).

    run ─> card    device, date, badges, sentences, a line per case, the break-even of each format
    cards ─> lines, pays    tables over all runs, for the index and the pages of formats and kernels
          ─> cells          the cells of claims, by the claim's name

A card holds the times of one measure: kernel time with a cold cache, or the run's first measure.
`place` of a line numbers its contest. `wins` is true if nothing in the contest was faster, dense
contenders included. In the tables each line has the processes and the day of its run, and whether
the run is a verdict.
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
ROLES = {  # runs that were made from another run, by the key in run.json
    "confirms": "chosen cases of an earlier run, alone",
    "reproduces": "an earlier run again",
}
PAYS = ["op", "dtype", "m", "shape", "kind", "block", "slower", "faster", "decided"]
OF_RUN = ["run", "gpu", "suite", "name_of_run", "processes", "day", "verdict"]


@dataclass(frozen=True)
class Card:
    """A run in a site.

    slug      its folder, which never changes
    identity  the SHA-256 of the manifest of its bundle
    name      the name of the folder that it was published from
    role      the purpose of a run that was made from another one (ROLES), or ""
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
        """Return whether the run has enough processes for verdicts."""
        return any(name == Badge.VERDICT.name.lower() for name, *_ in self.badges)

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return asdict(self)


def card(
    run: Run,
    analysis: Analysis,
    slug: str,
    identity: str,
    claims: Sequence[PlannedClaim] = (),
    name: str = "",
) -> Card:
    """Read a run's card from its analysis, with the cells of these claims."""
    run_views = views(analysis.cases)
    about = (where(run_views[0]), variants(run_views[0], analysis.cases)) if run_views else ()
    lines = _lines(analysis.cases)
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
        cases=int(analysis.cases[~analysis.cases.twin.astype(bool)].case_id.nunique()),
        badges=[
            [badge.name.lower(), badge.value, why]
            for badge, why in badges(analysis.cases, analysis.noise, run.environment, run.state)
        ],
        where=" · ".join(filter(None, about)),
        sentences=sentences(run_views[0]) if run_views else ["No case of this run has a time."],
        gain=_gain(run_views[0]) if run_views else "no times",
        lines=[] if lines.empty else _plain(lines[["place", *PLACE, *LINE, "wins"]]),
        pays=_plain(_pays(run_views)),
        cells={
            claim.name: [cell.to_json() | {"run": slug} for cell in claim_cells]
            for claim in claims
            if (claim_cells := claim.cells(run, analysis))
        },
    )


def lines(cards: Iterable[Card]) -> pd.DataFrame:
    """Return every line of every card with the columns of OF_RUN."""
    return _table(cards, "lines", ["place", *PLACE, *LINE, "wins"])


def pays(cards: Iterable[Card]) -> pd.DataFrame:
    """Return the levels between which each format overtakes dense (BreakEven), by card."""
    table = _table(cards, "pays", PAYS)
    return table.astype({"slower": "float64", "faster": "float64"})


def cells(cards: Iterable[Card]) -> dict[str, list[Cell]]:
    """Return the cells of all cards, by the claim's name."""
    by_claim: dict[str, list[Cell]] = {}
    for card in cards:
        for name, records in card.cells.items():
            by_claim.setdefault(name, []).extend(map(Cell.from_json, records))
    return by_claim


def _lines(cases: pd.DataFrame) -> pd.DataFrame:
    raced = with_gains(cases)
    if raced.empty:
        return raced
    measures = raced[["scope", "cache"]].drop_duplicates().to_records(index=False).tolist()
    scope, cache = ("kernel", "cold") if ("kernel", "cold") in measures else measures[0]
    raced = with_shapes(raced[(raced.scope == scope) & (raced.cache == cache)])
    rank = raced.gain.fillna(-raced.median_us)
    keys = pd.MultiIndex.from_frame(raced[CONTEST])
    best = rank.groupby(keys.to_flat_index()).idxmax()
    texts = {name: raced[name].map(plain) if name in raced else "" for name in ("dtype", "pattern")}
    return raced.assign(wins=raced.index.isin(best), place=pd.factorize(keys)[0], **texts)


def _pays(run_views: list[View]) -> pd.DataFrame:
    """Return the break-evens of the views that have one block, one shape and one m."""
    records = []
    for view in run_views:
        same = {n: _one(view, n) for n in ("op", "dtype", "m", "shape", "block")}
        if view.units or ANY in view.choice.values():
            continue
        levels = view.formats.groupby(["kind", "y"]).x.nunique()
        for even in break_evens(view):
            if levels[even.kind, even.row] < 2:
                continue  # a single level is not a sweep
            fields = {**same, **({view.y: even.row} if view.y else {}), **vars(even)}
            if all(fields[name] is not None for name in ("m", "shape", "block")):
                records.append({name: fields[name] for name in PAYS})
    table = pd.DataFrame(records, columns=PAYS)
    return table.drop_duplicates(["op", "dtype", "m", "shape", "kind", "block"])


def _one(view: View, name: str) -> Any:
    values = set(view.cells[name].dropna()) if name in view.cells else set()
    return values.pop() if len(values) == 1 else None


def _gain(view: View) -> str:
    """Return a view's largest gain and its place, for a badge: 5.58× at 90 %, 64 × 64 blocks."""
    cells = view.cells[view.cells.best_gain.notna()]
    if cells.empty:
        return "no dense contender"
    chosen = cells[cells.x == 0.9] if view.x == "level" else cells
    top = (cells if chosen.empty else chosen).sort_values("best_gain").iloc[-1]
    names = [n for n in view.choice if n not in (view.x, view.y, "block", "pattern")]
    rest = [field_text(n, view.choice[n]) for n in names if view.choice[n] != "linear"]
    at = ", ".join(filter(None, [place(view, top), field_text("block", top.best_tile), *rest]))
    return f"{times(top.best_gain, top.best_half) if top.best_gain > 1 else 'dense wins'} {at}"


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return lines as JSON holds them: without NaN, with 6 decimals."""
    text: str = table.to_json(orient="records", double_precision=6)
    records: list[dict[str, Any]] = json.loads(text)
    return records


def _table(cards: Iterable[Card], what: str, columns: list[str]) -> pd.DataFrame:
    records = [
        dict(line, **dict(zip(OF_RUN, _of_run(card), strict=True)))
        for card in cards
        for line in getattr(card, what)
    ]
    return pd.DataFrame(records, columns=[*OF_RUN, *columns])


def _of_run(card: Card) -> list[Any]:
    day = card.started[:10]
    return [card.slug, card.gpu, card.suite, card.name, card.processes, day, card.verdict]
