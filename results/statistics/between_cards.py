"""The variation between runs on cards of one kind, which the processes of one run do not show.

    sd^2     =  (F V + f v) / (F + f)               partial pooling (Smyth 2004)
    between  =  t(F + f) sd / sqrt(cards)           widens an interval: half' = hypot(half, between)

    v, f     variance of a card's log speedup around the mean over cards, and its degrees of
             freedom: of one stratum, a kernel and a class of times (EDGES_US)
    V, F     the same of all kernels in this class of times

Cards of one kind do not have exactly the same speedups: their clocks under load differ, and so do
the configurations that a search chooses. Days, hosts and versions of the harness differ, too. The
processes of one run share all of these, so their interval does not contain this variation. It was
3.7 % for `bsr_wgrad` and 0.3 % for `bsr_wgmma` above 50 µs, so one value does not fit all kernels.
But few cards measured most strata. So the variance of a stratum counts by its freedom, and that of
its class of times has the rest of the weight: 2.0 % below 12 µs for all kernels, 1.0 % above 50 µs.
With that of all times, 1.3 %, only 72 % of the intervals below 12 µs held a second card's speedup,
where 85 % are expected; with that of their class, 88 % do. repeats.py estimates both from the
published cases that two cards measured, and between_cards.json holds them.

A run on several cards also estimates the variation itself. This estimate, with cards - 1 degrees of
freedom, is pooled with the published one. A CPU has no cards. A chain of calls has no interval
until a second card measured a chain of its kernel: the repeats are nearly all isolated calls, so
they do not show how far chains vary.
"""

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from math import nan, sqrt
from typing import Any

import numpy as np

from sparsebench.errors import ResultError
from sparsebench.results.statistics.ratio import student_quantile

FILE = "between_cards.json"
SCHEMA = "sparsebench/between-cards@3"
CARDS = ("GPU-", "MIG-")  # beginnings of the UUIDs of cards
CHAIN = "chain"  # the scope of a call inside a chain
EDGES_US = 12.0, 50.0  # 96, 246 and 244 of the first 586 repeats lie between these
CLASSES = "below 12 µs", "12 to 50 µs", "above 50 µs"


@dataclass(frozen=True)
class Variation:
    """A standard deviation between cards, its degrees of freedom, and what it comes from.

    cases  the number of repeats (repeats.py), on this number of `cards`
    """

    sd: float
    freedom: float
    cases: int
    cards: int

    def half(self, cards: int = 1) -> float:
        """Return half of its 95 % interval for the mean over `cards` cards, in logs."""
        return student_quantile(self.freedom) * self.sd / sqrt(cards)

    def pooled_with(self, sd: float, freedom: float) -> "Variation":
        """Return this variation pooled with another estimate of it, each by its freedom."""
        total = self.freedom + freedom
        variance = (self.freedom * self.sd**2 + freedom * sd**2) / total
        return replace(self, sd=sqrt(variance), freedom=total)


@dataclass(frozen=True)
class BetweenCards:
    """The variation between cards: of each class of times, and of each stratum by its name.

    chains  the kernels of which two cards measured a chain
    """

    classes: Mapping[str, Variation]
    strata: Mapping[str, Variation]
    chains: Sequence[str]

    def of(self, kernel: str, us: float) -> Variation:
        """Return the variation of a kernel whose calls take `us` µs."""
        of_kernel = self.strata.get(stratum(kernel, us), Variation(0.0, 0.0, 0, 0))
        return self.classes[time_class(us)].pooled_with(of_kernel.sd, of_kernel.freedom)


def time_class(us: float) -> str:
    """Return the class of a time, one of CLASSES."""
    return CLASSES[bisect_right(EDGES_US, us)]


def stratum(kernel: str, us: float) -> str:
    """Return the name of a stratum: `bsr_small, below 12 µs`."""
    return f"{kernel}, {time_class(us)}"


def count_cards(devices: Sequence[str]) -> int:
    """Return the number of different cards; 0 for a CPU."""
    cards = set(devices)
    return len(cards) if all(card.startswith(CARDS) for card in cards) else 0


def half_of(
    logs: Sequence[float], cards: Sequence[str], kernel: str, us: float, scope: str
) -> float:
    """Return `between`, the half that cards add to the interval of a log ratio; 0 without a card.

    `logs` are the log ratios of the processes, and `cards` the device of each. The half is NaN for
    a chain on one card if no second card measured a chain of the kernel.
    """
    count, packaged = count_cards(cards), packaged_variation()
    if not count:
        return 0.0
    if count == 1 and scope == CHAIN and kernel not in packaged.chains:
        return nan
    variation = packaged.of(kernel, us)
    variation = variation.pooled_with(*_within(logs, cards)) if count > 1 else variation
    return variation.half(count)


@cache
def packaged_variation() -> BetweenCards:
    """Return the variation that comes with the package; raises ResultError if it is unusable."""
    file = files("sparsebench.results") / FILE
    try:
        return from_json(json.loads(file.read_text("utf-8")))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{file}: expected {SCHEMA}, found {error!r}") from error


def from_json(data: Mapping[str, Any]) -> BetweenCards:
    """Return the variation in a file; raises ValueError, KeyError or TypeError."""
    if data["schema"] != SCHEMA:
        raise ValueError(data["schema"])
    classes = {name: Variation(**data["classes"][name]) for name in CLASSES}
    strata = {name: Variation(**entry) for name, entry in data["strata"].items()}
    return BetweenCards(classes, strata, data["chains"])


def _within(logs: Sequence[float], cards: Sequence[str]) -> tuple[float, float]:
    """Return the standard deviation between the cards of a run, and its degrees of freedom."""
    groups = [
        np.array([log for log, card in zip(logs, cards, strict=True) if card == name])
        for name in sorted(set(cards))
    ]
    inside = sum(float(((group - group.mean()) ** 2).sum()) for group in groups)
    noise = inside / max(1, len(logs) - len(groups))
    noise *= float(np.mean([1 / group.size for group in groups]))
    apart = float(np.var([group.mean() for group in groups], ddof=1))
    return sqrt(max(0.0, apart - noise)), len(groups) - 1
