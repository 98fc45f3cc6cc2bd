"""The card of a run: everything that a site shows about it, read from rows once (summary.json).

    analysis ─> card    device, date, badges, headline, sentences, and a line per case
    cards  ─> lines   the lines of all runs in one table, for the index and the pages of formats
           ─> cells   the cells of claims, by the claim's name

A card holds the times of one measure: kernel time with a cold cache, or the run's first measure.
`place` of a line numbers its contest. `problem` names it, and `fields` are its fields as
commands name them. `configuration` is the choice; `again` and `trial` are the commands that
measure the problem and the case itself. `wins` is true if nothing in the contest was faster, dense
contenders included. In the table each line has the processes and the day of its run, and whether
the run is a verdict.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from sparsebench.reports.figures._again import again_command, field_values, try_command
from sparsebench.reports.findings import general, headline, headlines
from sparsebench.reports.grids import about, doubt
from sparsebench.results.badges import Badge, badges
from sparsebench.results.claims.cells import ClaimCell
from sparsebench.results.claims.planned import PlannedClaim
from sparsebench.results.comparison.repeats import verdicts
from sparsebench.results.formatting import between, plain, selection, times
from sparsebench.results.problem_names import problem_name
from sparsebench.results.run.provenance import device_name, flat
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import is_replaced, usual, with_shapes
from sparsebench.results.tables.frame import fields, records
from sparsebench.results.tables.grid import Finding

SCHEMA = "sparsebench/card@15"
DOUBTS = {Badge.UNRELIABLE, Badge.BUSY, Badge.UNFINISHED}
PLACE = ["op", "dtype", "pattern", "m", "shape", "level", "block"]
LINE = ["case_id", "kind", "tile", "row", "kernel", "name", "side", "cache", "of_units"]
LINE += ["median_us", "gain", "low", "high", "decided", "mark", "dense_name", "dense_us"]
LINE += ["over", "zeros_gain", "zeros_low", "zeros_high"]
LINE += ["on_cards", "limited_processes", "limited"]
LINE += ["problem_id", "problem", "fields", "configuration", "again", "trial"]
UNSHOWN = {"algorithm", "code", "problem", "version"}  # parts of a choice
ROLES = {  # runs that were made from another run, by the key in run.json
    "confirms": "chosen cases of an earlier run, alone",
    "reproduces": "an earlier run again",
}
OF_RUN = ["run", "gpu", "suite", "name_of_run", "processes", "day", "verdict"]


@dataclass(frozen=True)
class Card:
    """A run in a site.

    address   its folder in the site, such as h200/sparsity-4096
    slug      its permanent name, from its GPU, its suite and the digest of its manifest
    identity  the SHA-256 of the manifest of its bundle, and `origin` that of the run as measured
    name      the name of the folder that it was published from
    role      the purpose of a run that was made from another one (ROLES), or ""
    source    the origin of the run that it was made from, or ""
    units     the UUIDs of its GPUs
    headline  the largest gain: its text, the rest of its sentence, and its case
    verdicts  the input of results/comparison/repeats.py
    """

    schema: str
    address: str
    slug: str
    identity: str
    origin: str
    name: str
    gpu: str
    suite: str
    title: str
    role: str
    source: str
    units: list[str]
    only: str
    started: str
    commit: str
    processes: int
    cases: int
    badges: list[list[str]]
    where: str
    sentences: list[str]
    gain: str
    headline: dict[str, Any]
    lines: list[dict[str, Any]]
    cells: dict[str, list[dict[str, Any]]]
    verdicts: dict[str, Any]

    @property
    def verdict(self) -> bool:
        """Return whether the run has enough processes, is reliable and ran undisturbed."""
        return is_verdict(Badge[name.upper()] for name, *_ in self.badges)

    @property
    def about(self) -> str:
        """Describe the run in a sentence: its device, the number, and whether it is a verdict."""
        number = " ".join(self.headline.get(part, "") for part in ("gain", "rest")).strip()
        return f"{self.gpu}, {self.badges[0][1].lower()}: {number or self.sentences[0]}"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def card(analysis: Analysis, claims: Sequence[PlannedClaim], **place: str) -> Card:
    """Return a run's card, with the cells of these claims.

    `place` are the fields that depend on the site: address, slug, identity, origin, name, commit.
    """
    run, cases = analysis.run, analysis.cases
    findings = headlines(analysis)
    table, facts = lines_of(analysis), flat(run.environment)
    of_run = {"run": place["address"], "commit": place["commit"][:12]}
    source: dict[str, Any] = next((run.state[name] for name in ROLES if run.state.get(name)), {})
    return Card(
        schema=SCHEMA,
        **place,
        gpu=device_name(run.environment),
        suite=str(run.state["suite"]),
        title=str(run.suite.get("title", run.state["suite"])),
        role=next((words for name, words in ROLES.items() if run.state.get(name)), ""),
        source=str(source.get("manifest_sha256", "")),
        units=sorted({value for name, value in facts.items() if name.endswith("gpu.uuid")}),
        only=selection(run.state["flags"]["only"]),
        started=str(run.state["started"]),
        processes=int(run.state["flags"]["replicates"]),
        cases=int(cases[~cases.twin.astype(bool)].case_id.nunique()),
        badges=[
            [label.badge.name.lower(), label.badge.value, label.why] for label in badges(analysis)
        ],
        where="" if table.empty else about(table, PLACE),
        sentences=general(analysis) or ["No case of this run has a time."],
        gain=_gain(findings[0]) if findings else "no times",
        headline=headline(analysis),
        lines=[] if table.empty else _plain(table[["place", *PLACE, *LINE, "wins"]]),
        cells={
            claim.name: [cell.to_json() | of_run for cell in claim_cells]
            for claim in claims
            if (claim_cells := claim.cells(analysis))
        },
        verdicts=asdict(verdicts(analysis, place["address"])),
    )


def run_lines(analysis: Analysis, address: str, gpu: str = "") -> pd.DataFrame:
    """Return the lines of a run with the columns of OF_RUN."""
    state = analysis.run.state
    about = [address, gpu or analysis.device, state["suite"], analysis.run.path.name]
    about += [int(state["flags"]["replicates"]), str(state["started"])[:10]]
    about += [is_verdict(each.badge for each in badges(analysis))]
    return lines_of(analysis).assign(**dict(zip(OF_RUN, about, strict=True)))


def lines(cards: Iterable[Card]) -> pd.DataFrame:
    """Return every line of every card with the columns of OF_RUN."""
    every = [
        dict(line, **dict(zip(OF_RUN, _of_run(card), strict=True)))
        for card in cards
        for line in card.lines
    ]
    return pd.DataFrame(every, columns=[*OF_RUN, "place", *PLACE, *LINE, "wins"])


def cells(cards: Iterable[Card]) -> dict[str, list[ClaimCell]]:
    """Return the cells of all cards, by the claim's name."""
    by_claim: dict[str, list[ClaimCell]] = {}
    for card in cards:
        for name, of_claim in card.cells.items():
            by_claim.setdefault(name, []).extend(map(ClaimCell.from_json, of_claim))
    return by_claim


def confirmation(screened: Card, other: Card) -> str:
    """Return the gain in another run of the case that is a run's headline; "" if it has none."""
    case = screened.headline.get("case")
    lines = [line for line in other.lines if line["case_id"] == case and line["gain"] is not None]
    return between(lines[0]["gain"], lines[0]["low"], lines[0]["high"]) if lines else ""


def is_verdict(of_run: Iterable[Badge]) -> bool:
    """Return whether badges are those of a run that is a verdict without a doubt."""
    names = {*of_run}
    return Badge.VERDICT in names and not names & DOUBTS


def lines_of(analysis: Analysis) -> pd.DataFrame:
    """Return the lines of a run; an empty table if no case has a time."""
    if analysis.timed.empty:
        return analysis.timed
    timed, names = with_shapes(usual(analysis.timed)), fields(analysis.timed)
    lines = records(timed)
    again = again_command(analysis.run, analysis.cases)
    timed = timed.assign(
        problem=[problem_name(line, ["op", *names, "scope", "cache"]) for line in lines],
        fields=pd.Series([field_values(line, names) for line in lines], timed.index),
        configuration=[_configuration(line["choice"]) for line in lines],
        again=[again(line) for line in lines],
        trial=[try_command(line, names) for line in lines],
    )
    rank = timed.gain.fillna(-timed.median_us)[~is_replaced(timed)]
    best = rank.groupby(timed.place).idxmax()
    texts = {name: timed[name].map(plain) if name in timed else "" for name in ("dtype", "pattern")}
    return timed.assign(wins=timed.index.isin(best), **texts)


def _configuration(choice: str) -> str:
    """Write a choice without what a library or a plan notes beside it."""
    chosen = flat(json.loads(choice or "{}"))
    parts = {n: v for n, v in chosen.items() if not {*n.split(".")} & UNSHOWN}
    return ", ".join(f"{name} {value}" for name, value in parts.items())


def _gain(finding: Finding) -> str:
    """Return a headline for a badge: 5.52× linear, bf16, m 4096, 90 %, 64 × 64 blocks."""
    case = finding.best
    if pd.isna(case["gain"]):
        return "no dense contender"
    word = f" ({reason})" if (reason := doubt(case)) else ""
    return f"{times(case['gain'], case['half'])}{word} {finding.group}"


def _plain(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return lines as JSON holds them: without NaN, with 6 decimals."""
    text: str = table.to_json(orient="records", double_precision=6)
    plain_lines: list[dict[str, Any]] = json.loads(text)
    return plain_lines


def _of_run(card: Card) -> list[Any]:
    run = [card.address, card.gpu, card.suite, card.name]
    return [*run, card.processes, card.started[:10], card.verdict]
