"""The badges of a run, such as `LOOK: 3 processes` or `BUSY MACHINE`, each with its reason."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any, NamedTuple

from sparsebench.results.formatting import amount
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.noise import Reliability


class Badge(StrEnum):
    """How much a run can show, in a word."""

    VERDICT = "VERDICT"
    LOOK = "LOOK"
    UNRELIABLE = "UNRELIABLE"
    BUSY = "BUSY MACHINE"
    UNFINISHED = "NOT FINISHED"
    EMPTY = "NO TIMES"


class Label(NamedTuple):
    """A badge of a run, its text such as `LOOK: 3 processes`, and its reason."""

    badge: Badge
    text: str
    why: str

    @property
    def parts(self) -> tuple[str, str, str]:
        return self.badge.name.lower(), self.text, self.why


def badges(analysis: Analysis) -> list[Label]:
    """Return the badges of a run, the most serious first."""
    cases, (reliability, why) = analysis.cases, analysis.noise.reliability
    state = analysis.run.state
    notes = {}
    if reliability is Reliability.UNRELIABLE:
        notes[Badge.UNRELIABLE] = why
    if busy := "; ".join(unfit(state)):
        notes[Badge.BUSY] = f"The machine was busy, so do not trust these numbers: {busy}."
    if (status := state.get("status", "finished")) != "finished":
        notes[Badge.UNFINISHED] = f"This run is not finished: its status is {status}."
    timed = cases[cases.median_us.notna()]
    if timed.empty:
        notes[Badge.EMPTY] = "No case of this run has a time."
        return [Label(badge, badge.value, reason) for badge, reason in notes.items()]
    count = int(timed.processes.max())
    processes, badge = amount(count, "process"), Badge.VERDICT if count >= FEWEST else Badge.LOOK
    look = f"{processes}: a look, no verdict; a verdict needs at least {FEWEST}."
    last = Label(
        badge, f"{badge.value}: {processes}", look if badge is Badge.LOOK else f"{processes}. {why}"
    )
    return [*(Label(other, other.value, reason) for other, reason in notes.items()), last]


def unfit(state: Mapping[str, Any]) -> list[str]:
    """Return what made the machine unfit before or during the run, from its run.json."""
    fitness = state.get("fitness", {})
    return [
        f"{finding['check']} {when} the run: {finding['found']}"
        for when in ("before", "during")
        for finding in fitness.get(when, [])
        if finding["level"] == "warning"
    ]
