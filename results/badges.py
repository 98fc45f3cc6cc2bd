"""The badges of a run, such as `LOOK: 3 processes` or `BUSY MACHINE`, each with its reason."""

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Any

import pandas as pd

from sparsebench.results.formatting import amount
from sparsebench.results.noise import Noise, Reliability
from sparsebench.results.statistics import FEWEST


class Badge(StrEnum):
    """How much a run can show, in a word."""

    VERDICT = "VERDICT"
    LOOK = "LOOK"
    SIMULATED = "SIMULATED"
    UNRELIABLE = "UNRELIABLE"
    BUSY = "BUSY MACHINE"
    UNFINISHED = "NOT FINISHED"
    EMPTY = "NO TIMES"


def badges(
    cases: pd.DataFrame,
    noise: Noise,
    environment: Mapping[str, Any],
    state: Mapping[str, Any] = MappingProxyType({}),
) -> list[tuple[Badge, str]]:
    """Return the badges of a run with their reasons, the gravest first; `state` is its run.json."""
    reliability, why = noise.reliability
    notes = []
    if "sim" in environment:
        notes.append((Badge.SIMULATED, "No GPU ran: these times come from a model of one."))
    if reliability is Reliability.UNRELIABLE:
        notes.append((Badge.UNRELIABLE, why))
    if busy := "; ".join(unfit(state)):
        reason = f"The machine was busy, so do not trust these numbers: {busy}."
        notes.append((Badge.BUSY, reason))
    if (status := state.get("status", "finished")) != "finished":
        notes.append((Badge.UNFINISHED, f"This run is not finished: its status is {status}."))
    timed = cases[cases.median_us.notna()]
    if timed.empty:
        return [*notes, (Badge.EMPTY, "No case of this run has a time.")]
    count = int(timed.processes.max())
    if count < FEWEST:
        need = f"a verdict needs at least {FEWEST}."
        return [*notes, (Badge.LOOK, f"{amount(count, 'process')}: a look, no verdict; {need}")]
    return [*notes, (Badge.VERDICT, f"{amount(count, 'process')}. {why}")]


def badge_text(badge: Badge, cases: pd.DataFrame) -> str:
    """Write a badge: `LOOK: 3 processes`, `SIMULATED`."""
    if badge not in (Badge.LOOK, Badge.VERDICT):
        return badge.value
    most = int(cases[cases.median_us.notna()].processes.max())
    return f"{badge.value}: {amount(most, 'process')}"


def unfit(state: Mapping[str, Any]) -> list[str]:
    """Return what made the machine unfit before or during the run, from its run.json."""
    fitness = state.get("fitness", {})
    return [
        f"{when} the run {finding['found']} ({finding['check']})"
        for when in ("before", "during")
        for finding in fitness.get(when, [])
        if finding["level"] == "warning"
    ]
