"""Who chose the configurations of a run: what its intervals hold, and what they do not.

A kernel that tunes itself settles on one of several configurations, in part by chance. In a verdict
every process chooses for itself, so what a search settles on is inside the interval. Whatever the
processes share instead is no part of it, and is named beside it. harness/NOTES.md has the figures.

    verdict   process 0    all candidates, hundreds ─> finalists: within 10 %, 24 at most
              processes 1 to 7    the finalists, timed anew ─> a choice of its own
    look      process 0    all candidates ─> its choice, which the others take
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sparsebench.results.statistics import FEWEST


class Choices(StrEnum):
    """Who chose; the value is the word in run.json. Runs without the word are FIRST.

    AMONG   every process, by a search of its own; later ones among the first's finalists
    EACH    likewise, but every process among all candidates: runs before AMONG
    FIRST   the first process; the others took what it had settled on
    BUNDLE  another run: process p took what its process p had settled on
    """

    AMONG = "each process, among the finalists of the first"
    EACH = "each process"
    FIRST = "first process"
    BUNDLE = "bundle"

    @property
    def sentence(self) -> str:
        """Say what an interval of the run holds."""
        return {
            Choices.AMONG: "Each process tuned anew, and later ones among the first's finalists: "
            "intervals hold what a search settles on.",
            Choices.EACH: "Each process tuned anew: intervals hold what a search settles on.",
            Choices.FIRST: "The first process tuned, and the others took its choices: "
            "intervals are of these configurations, and leave out what a search settles on.",
            Choices.BUNDLE: "Configurations are those of the earlier run, taken without a search: "
            "the result is about them, and not about what a search would settle on.",
        }[self]


def choices(state: Mapping[str, Any]) -> Choices:
    """Return who chose in a run, by its run.json."""
    return Choices(state.get("choices", Choices.FIRST))


def planned(replicates: int, pinned: bool) -> Choices:
    """Return who is to choose in a run of so many processes; `pinned`: choices of a bundle."""
    if pinned:
        return Choices.BUNDLE
    return Choices.AMONG if replicates >= FEWEST else Choices.FIRST
