"""The noise floor of a run: the difference that it measured between equal kernels.

    A/A pair   one kernel twice in one contest, prepared twice
    d_p        its log-ratio in process p: the median over rounds of log(A_i / a_i)
    floor      of a class: the 95th percentile of |d_p|, at least 0.5 %; with fewer than ENOUGH d_p,
               at least that of 203 pairs on an NVIDIA H200 (FLOORS; harness/NOTES.md)

A class is the length of a call, by its median time; class `op` holds all calls timed from Python.
The floor holds for one process: two equal kernels differ by more in 5 % of processes. The floor of
the mean of n processes is floor / sqrt(n). Verdicts do not need a floor, because their intervals
cover the differences between processes.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import numpy as np
import pandas as pd
import scipy

from sparsebench.results.problem_names import field_text
from sparsebench.results.statistics.ratio import FEWEST, hodges_lehmann
from sparsebench.results.tables.frame import fields, records

LEAST = 0.005  # the lowest floor
ROUNDING = 1e-9  # an end of an interval that is not apart from 0
ENOUGH = 20  # with fewer d_p, the 95th percentile is close to the largest value
FLOORS = {"below 8 µs": 0.021, "8 to 20 µs": 0.038, "20 to 100 µs": 0.013, "above 100 µs": LEAST}
EDGES_US = 8.0, 20.0, 100.0  # limits between these classes
PERCENTILE = 0.95  # over single processes, not over means of pairs
CHANCE = 0.05  # probability that one pair, or too many pairs, differ although nothing is wrong
TOO_MANY = 0.1  # fraction of the pairs

PAIR = ["class", "label", "problem", "reference", "scope", "cache", "median_us", "bound_by"]
PAIR += ["logs", "ratio", "low", "high", "different"]


class Reliability(StrEnum):
    """Whether the A/A pairs of a run came out equal often enough.

    UNRELIABLE  more than 10 % of the pairs differ, and by chance (5 % of pairs) so many would
                differ in fewer than 1 of 20 runs
    UNKNOWN     no pair was measured in FEWEST or more processes
    """

    RELIABLE = "reliable"
    UNRELIABLE = "unreliable"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Noise:
    """The A/A pairs of a run and its noise floors.

    pairs   one line per pair: its class and d_p of each process (`logs`); with FEWEST or more
            processes also the interval of its ratio, and whether it excludes 1 (`different`)
    floors  for one process, a fraction by class (0.005 is 0.5 %); empty without a pair
    """

    pairs: pd.DataFrame
    floors: dict[str, float]

    def floor(self, table: pd.DataFrame) -> pd.Series:
        """Return the floor of each line of a frame or a summary; NaN if the run has none.

        A class without a pair gets the largest floor, or that of FLOORS if it is larger.
        """
        largest = max(self.floors.values(), default=np.nan)
        lengths = classes(table)
        least = lengths.map(FLOORS).astype("float64").fillna(LEAST).clip(lower=largest)
        return lengths.map(self.floors).astype("float64").fillna(least if self.floors else np.nan)

    @property
    def sentence(self) -> str:
        """Write the floor of each class in a sentence."""
        if not self.floors:
            return "The run has no A/A pair (the same kernel twice): its noise floor is unknown."
        percents = {name: float(f"{100 * floor:.2g}") for name, floor in self.floors.items()}
        timed = {name: name if name in FLOORS else field_text("scope", name) for name in percents}
        texts = [f"{each:g} % ({timed[name]})" for name, each in percents.items()]
        return f"Noise floor of one process: {', '.join(texts)}."

    @property
    def reliability(self) -> tuple[Reliability, str]:
        """Return whether the run is reliable, and the reason in a sentence."""
        differences = self.pairs.different.dropna()
        count, different = len(differences), int(differences.sum())
        if not count:
            why = f"it has no A/A pair in {FEWEST} or more processes."
            return Reliability.UNKNOWN, f"Whether this run is reliable is unknown: {why}"
        differ = f"{different} of {count} A/A pairs (the same kernel twice) came out different"
        if different <= TOO_MANY * count:
            why = f"This run is reliable: {differ}, and up to {100 * TOO_MANY:g} % may."
            return Reliability.RELIABLE, why
        # binom.sf(different - 1, count, CHANCE); scipy.stats takes 0.5 s to import
        chance = scipy.special.bdtrc(different - 1, count, CHANCE)
        if chance < CHANCE:
            differ += f", and by chance alone so many do in fewer than {100 * CHANCE:g} % of runs"
            why = f"This run is unreliable: {differ}. Its small differences mean nothing."
            return Reliability.UNRELIABLE, why
        why = f"By chance alone, {different} or more differ in {100 * chance:.2g} % of runs"
        limit = f"a run is unreliable if that is less than {100 * CHANCE:g} %"
        return Reliability.RELIABLE, f"This run is reliable: {differ}. {why}; {limit}."


def noise(rows: pd.DataFrame, reference: pd.DataFrame) -> Noise:
    """Return the noise of a run from the frames of its `rows` and `reference` rows."""
    all_pairs = pairs(rows, reference)
    return Noise(all_pairs, floors(all_pairs))


def classes(table: pd.DataFrame) -> pd.Series:
    """Return the class of each line of a frame or a summary: the length of its call."""
    numbers = np.searchsorted(EDGES_US, table.median_us, side="right")
    lengths = pd.Series(np.array(list(FLOORS))[numbers], table.index, dtype=object)
    return lengths.where(table.scope == "kernel", table.scope)


def pairs(*tables: pd.DataFrame) -> pd.DataFrame:
    """Return one line per A/A pair of these frames; see Noise."""
    lines = pd.DataFrame([line for table in tables for line in _pairs(table)], columns=PAIR)
    lines = lines.astype({"median_us": "float64", "different": "boolean"})
    return lines.assign(**{"class": classes(lines)})


def floors(pairs: pd.DataFrame) -> dict[str, float]:
    """Return the floor of each class that has a pair, as a fraction, short calls first."""
    sizes = pairs.set_index("class").logs.explode().astype("float64").abs()
    by_class = {
        str(name): max(
            float(np.expm1(logs.quantile(PERCENTILE))),
            LEAST if len(logs) >= ENOUGH else FLOORS.get(str(name), LEAST),
        )
        for name, logs in sizes.groupby(level=0)
    }
    return {
        name: by_class[name] for name in dict.fromkeys([*FLOORS, *by_class]) if name in by_class
    }


def _pairs(table: pd.DataFrame) -> list[dict[str, Any]]:
    names = fields(table)
    needed = {"case_id", "op", "replicate", "aa_log", *PAIR, *names}
    columns = [name for name in table.columns if name in needed]
    by_pair: dict[Hashable, dict[int, dict[str, Any]]] = {}
    for line in records(table.loc[table.aa_log.notna(), columns]):
        pair = line["reference"], line["case_id"], line["scope"], line["cache"]
        by_pair.setdefault(pair, {})[line["replicate"]] = line
    pairs = ([*processes.values()] for processes in by_pair.values())
    return [_pair(each) | {"problem": _problem(each[0], names)} for each in pairs]


def _pair(processes: list[dict[str, Any]]) -> dict[str, Any]:
    logs = [process["aa_log"] for process in processes]
    median_us = float(np.median([process["median_us"] for process in processes]))
    line = processes[0] | {"logs": tuple(logs), "median_us": median_us}
    if len(logs) < FEWEST:
        return line | {"ratio": np.exp(np.median(logs))}
    exact = hodges_lehmann(logs)
    line |= {"ratio": np.exp(exact.estimate), "low": np.exp(exact.low), "high": np.exp(exact.high)}
    return line | {"different": bool(exact.low > ROUNDING or exact.high < -ROUNDING)}


def _problem(line: dict[str, Any], names: list[str]) -> str:
    names_with_value = [name for name in names if not pd.isna(line[name]) and line[name] != ""]
    return " ".join([line["op"], *(f"{name}={line[name]}" for name in names_with_value)])
