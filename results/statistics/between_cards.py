"""The variation between runs on cards of one kind, which the processes of one run do not show.

Cards of one kind do not have exactly the same speedups: their clocks under load differ, and so do
the configurations that a search chooses. Days, hosts and versions of the harness differ, too. The
processes of one run share all of these, so their interval does not contain this variation.
repeats.py estimates it from the published cases that two cards measured, and between_cards.json
holds the result for each state of a run:

    sd        standard deviation of a card's log speedup around the mean over cards
    freedom   degrees of freedom of that estimate

    between  =  t(freedom) sd / sqrt(cards)    widens an interval: half' = sqrt(half^2 + between^2)

A run on several cards also estimates the variation itself. This estimate, with cards - 1 degrees of
freedom, is pooled with the published one. A CPU has no cards.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib.resources import files
from math import sqrt
from typing import Any

import numpy as np

from sparsebench.errors import ResultError
from sparsebench.results.record import POWER_LIMITED
from sparsebench.results.statistics.ratio import student_quantile

FILE = "between_cards.json"
SCHEMA = "sparsebench/between-cards@1"
CARDS = ("GPU-", "MIG-")  # beginnings of the UUIDs of cards


class State(StrEnum):
    """The states of a run on which the variation between cards depends.

    FREE       the run searched, and its card was limited for at most POWER_LIMITED of the time
    LIMITED    the run searched, and its card was limited for longer
    INHERITED  the run took its configurations from a run on another card
    """

    FREE = "free"
    LIMITED = "limited"
    INHERITED = "inherited"


@dataclass(frozen=True)
class Variation:
    """The variation between cards of a state, from `cases` cases in `pairs` pairs of runs."""

    sd: float
    freedom: float
    cases: int
    pairs: int

    def half(self, cards: int = 1) -> float:
        """Return half of its 95 % interval for the mean over `cards` cards, in logs."""
        return student_quantile(self.freedom) * self.sd / sqrt(cards)

    def pooled_with(self, logs: Sequence[float], cards: Sequence[str]) -> "Variation":
        """Return this variation pooled with that in a run on several cards.

        `logs` are the log ratios of its processes, and `cards` the card of each.
        """
        groups = [
            np.array([log for log, card in zip(logs, cards, strict=True) if card == name])
            for name in sorted(set(cards))
        ]
        inside = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
        noise = inside / max(1, len(logs) - len(groups))
        noise *= float(np.mean([1 / group.size for group in groups]))
        more = len(groups) - 1
        estimate = max(0.0, float(np.var([group.mean() for group in groups], ddof=1)) - noise)
        freedom = self.freedom + more
        variance = (self.freedom * self.sd**2 + more * estimate) / freedom
        return Variation(sqrt(variance), freedom, self.cases, self.pairs)


def state_of(limited: float, inherited: bool) -> State:
    """Return the state of a case; `limited` is a share of its time, NaN if unknown."""
    if inherited:
        return State.INHERITED
    return State.LIMITED if limited > POWER_LIMITED else State.FREE


def count_cards(devices: Sequence[str]) -> int:
    """Return the number of different cards; 0 for a CPU."""
    cards = set(devices)
    return len(cards) if all(card.startswith(CARDS) for card in cards) else 0


def half_of(logs: Sequence[float], cards: Sequence[str], state: State) -> float:
    """Return `between`, the half that cards add to the interval of a log ratio; 0 without a card.

    `logs` are the log ratios of the processes, and `cards` the device of each.
    """
    count = count_cards(cards)
    if not count:
        return 0.0
    variation = packaged_variation()[state]
    variation = variation.pooled_with(logs, cards) if count > 1 else variation
    return variation.half(count)


@cache
def packaged_variation() -> Mapping[State, Variation]:
    """Return the variation that comes with the package; raises ResultError if it is unusable."""
    file = files("sparsebench.results") / FILE
    try:
        return from_json(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{file}: expected {SCHEMA}, found {error!r}") from error


def from_json(data: Mapping[str, Any]) -> dict[State, Variation]:
    """Return the variation in a file; raises ValueError, KeyError or TypeError."""
    if data["schema"] != SCHEMA:
        raise ValueError(data["schema"])
    return {state: Variation(**data["variation"][state]) for state in State}
