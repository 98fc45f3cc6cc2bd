"""Estimates and intervals for a ratio of times over a few processes.

    d_p       log-ratio of process p: the median over rounds of log(T_baseline / T_contender)
    Walsh     (d_p + d_q) / 2 over all p <= q
    ratio     exp(median of Walsh)                                    Hodges & Lehmann 1963
    95 %      exp(k-th smallest of Walsh) to exp(k-th largest)        Hollander & Wolfe 1999, 3.3

outcome.py says which word an interval gets. The process is the unit of replication: samples of one
process are not independent (Hoefler & Belli 2015, doi:10.1145/2807591.2807644). k is exact if d_p
is symmetric about its centre; below FEWEST processes no such interval exists. No outlier is
dropped; one among eight changes the ratio little. tests/simulated measures the error rates. All
functions take natural logs; the last axis is that of the processes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

from sparsebench.results.statistics.outcome import MARGIN

FEWEST = 6  # the widest interval of 6 processes has 96.9 %, that of 5 only 93.75 %: below 95 %
MOST = 100  # the largest number of processes that more_processes considers
ONE_CARD = "measured on one card"
ACROSS_RUNS = ", plus variation between runs"  # on other cards and days, of other versions
TAIL = 0.025  # probability on each side of a 95 % interval

Floats = NDArray[np.float64]

Rounds = Mapping[tuple[int, int], Floats]
"""Median times of a case by round, in µs, for each (replicate, attempt)."""


class IntervalKind(StrEnum):
    """The kind of a speedup's interval; the value is the word in reports.

    QUARTILES   one process: the quartiles over its rounds, without a claim about other processes
    RANGE       fewer than FEWEST processes: their smallest and largest speedup
    CONFIDENCE  FEWEST or more processes: the exact 95 % confidence interval (Hodges-Lehmann)
    NONE        FEWEST or more processes on one card, if how far cards differ was not measured
    """

    QUARTILES = "quartiles"
    RANGE = "range"
    CONFIDENCE = "95 %"
    NONE = f"none ({ONE_CARD})"

    def over(self, processes: int, cards: bool = False) -> str:
        """Name the interval for a reader; `cards`: the variation between cards widens it."""
        if processes == 1:
            return f"{self} of the rounds in one process"
        if self is IntervalKind.NONE:
            return str(self)
        kind = f"{self} interval" if self is IntervalKind.CONFIDENCE else self
        return f"{kind} over {processes} processes{ACROSS_RUNS if cards else ''}"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, in the units of the input."""

    estimate: Any
    low: Any
    high: Any


@dataclass(frozen=True)
class Ratio:
    """A ratio of two times over `processes`, with an interval of `interval_kind`."""

    value: float
    low: float
    high: float
    interval_kind: IntervalKind
    processes: int


def medians_by_round(samples: Sequence[Floats], sizes: Sequence[int]) -> list[Floats]:
    """Return the median of each round of several samples, without an incomplete last round.

    Samples are in the order taken, `sizes` of them in a round. All of one shape share a call of
    numpy, which takes 25 µs.
    """
    shapes = [(len(each), min(size, len(each))) for each, size in zip(samples, sizes, strict=True)]
    medians = [np.empty(0)] * len(samples)
    for length, size in {*shapes} - {(0, 0)}:
        places = [place for place, shape in enumerate(shapes) if shape == (length, size)]
        whole = [samples[place][: length // size * size] for place in places]
        of_rounds = np.median(np.reshape(whole, (len(places), -1, size)), axis=-1)
        for place, each in zip(places, of_rounds, strict=True):
            medians[place] = each
    return medians


def median_logs(base: Floats, other: Floats) -> Floats:
    """Return log(base / other) by round, for the medians of the rounds: shape (..., rounds).

    Rounds of one index were taken within moments of each other. If one side has fewer rounds, they
    are paired with the first rounds of the other.
    """
    pairs = min(base.shape[-1], other.shape[-1])
    logs: Floats = np.log(base[..., :pairs] / other[..., :pairs])
    return logs


def quantiles(samples: Sequence[Sequence[float] | Floats], shares: Sequence[float]) -> Floats:
    """Return the quantiles of several samples, [samples, shares]; NaN for one without a value.

    All samples of one length share a call of numpy, which takes 60 µs.
    """
    result = np.full((len(samples), len(shares)), np.nan)
    for length in {len(each) for each in samples} - {0}:
        places = [place for place, each in enumerate(samples) if len(each) == length]
        result[places] = np.quantile([samples[place] for place in places], shares, axis=1).T
    return result


def ratio_over(case: Rounds, base: Rounds, between: float = 0.0) -> Ratio | None:
    """Return the speedup of a case over another one of the same contests; None if they share none.

    The definition is that of a speedup, with `base` in place of the baseline.
    """
    logs = contest_logs(case, base)
    return ratio(list(logs.values()), between) if logs else None


def contest_logs(case: Rounds, base: Rounds) -> dict[tuple[int, int], Floats]:
    """Return log(time of base / time of case) by round, for each contest that both ran in."""
    shared = [contest for contest in case if contest in base]
    return {each: median_logs(base[each], case[each]) for each in shared}


def hodges_lehmann(logs: ArrayLike) -> Interval:
    """Return the Hodges-Lehmann estimate and its exact 95 % interval.

    Hodges & Lehmann 1963 (Ann. Math. Statist. 34, 598); the interval is Tukey's, after Hollander &
    Wolfe. Raises ValueError if there are fewer than FEWEST processes.
    """
    values = _enough(logs)
    first, second = np.triu_indices(values.shape[-1])
    walsh = np.sort((values[..., first] + values[..., second]) / 2, axis=-1)
    k = _rank(values.shape[-1])
    low, high = (np.take(walsh, i, axis=-1) for i in (k - 1, -k))
    return Interval(np.median(walsh, axis=-1), low, high)


def widen(value: Any, low: Any, high: Any, between: float) -> tuple[Any, Any]:
    """Return the ends of an interval in logs, widened by the variation between runs.

    `between` is the half that other cards, days and versions add (between_cards.py). It is
    independent of the scatter over processes, so the two add in squares.
    """
    return value - np.hypot(value - low, between), value + np.hypot(high - value, between)


def ratio(logs: Sequence[Floats], between: float = 0.0) -> Ratio:
    """Return the ratio of two times from log-ratios by round, one array per process.

    d_p is the median of a process. With FEWEST or more processes the ratio is the Hodges-Lehmann
    estimate, with fewer the geometric mean. It is NaN if a process has no round. A confidence
    interval is widened by `between`; its ends are NaN if that is NaN, unknown.
    """
    medians = np.array([_median(rounds) for rounds in logs])
    if len(logs) == 1:
        ends = np.quantile(logs[0], [0.25, 0.75]) if logs[0].size else (np.nan, np.nan)
        logs_of, kind = (medians[0], *ends), IntervalKind.QUARTILES
    elif len(logs) < FEWEST or np.isnan(medians).any():
        logs_of, kind = (medians.mean(), medians.min(), medians.max()), IntervalKind.RANGE
    else:
        exact = hodges_lehmann(medians)
        ends = widen(exact.estimate, exact.low, exact.high, between)
        logs_of, kind = (exact.estimate, *ends), IntervalKind.CONFIDENCE
        kind = IntervalKind.NONE if np.isnan(between) else kind
    value, low, high = np.exp(logs_of).tolist()
    return Ratio(value, low, high, kind, len(logs))


def student(logs: ArrayLike) -> Interval:
    """Return the mean and Student's 95 % interval, a cross-check that is exact if d_p is normal."""
    values = _enough(logs)
    mean = values.mean(axis=-1)
    half = student_quantile(values.shape[-1] - 1) * _standard_error(values)
    return Interval(mean, mean - half, mean + half)


def welch(a: ArrayLike, b: ArrayLike) -> tuple[float, float]:
    """Return mean(b) - mean(a) and the half of its 95 % interval; NaN with one process.

    Welch 1947: the two sides are independent and may scatter differently.
    """
    sides = [np.asarray(logs, dtype=float) for logs in (a, b)]
    difference = float(sides[1].mean() - sides[0].mean())
    if min(side.size for side in sides) < 2:
        return difference, float("nan")
    parts = [side.var(ddof=1) / side.size for side in sides]
    if not sum(parts):
        return difference, 0.0
    freedom = sum(parts) ** 2 / sum(
        part**2 / (side.size - 1) for part, side in zip(parts, sides, strict=True)
    )
    return difference, student_quantile(freedom) * float(np.sqrt(sum(parts)))


def p_value(logs: ArrayLike, between: float = 0.0) -> Floats:
    """Return the p-value of the two-sided t-test that the ratio is 1.

    `between` counts as a separate standard error, so that p is 5 % if Student's interval, widened
    by it, ends at 1.
    """
    values = _enough(logs)
    cards = between / student_quantile(values.shape[-1] - 1)
    error = np.hypot(_standard_error(values), cards)
    error = np.maximum(error, 1e-12)  # no clock resolves less
    away = np.abs(values.mean(axis=-1)) / error
    p: Floats = np.minimum(1, 2 * scipy.special.stdtr(values.shape[-1] - 1, -away))
    return p


def q_values(p: ArrayLike) -> Floats:
    """Return the smallest false-discovery rate at which each p-value is significant.

    Benjamini & Hochberg 1995: among lines with q <= 0.05, at most 5 % are expected to be wrong.
    """
    q: Floats = scipy.stats.false_discovery_control(p) if np.size(p) else np.asarray(p, dtype=float)
    return q


def more_processes(logs: ArrayLike, margin: float = MARGIN, between: float = 0.0) -> int | None:
    """Return how many more processes would decide, assuming the same mean and deviation.

    At this number, the smallest up to MOST in total, Student's interval, widened by `between`,
    excludes 1 or is within the margin. None if there is no such number.
    """
    values = _enough(logs)
    mean = abs(values.mean())
    distance = max(mean, np.log1p(margin) - mean)
    counts = np.arange(values.size + 1, MOST + 1)
    halves = scipy.special.stdtrit(counts - 1, 1 - TAIL) * values.std(ddof=1) / np.sqrt(counts)
    halves = np.hypot(halves, between)
    deciding = counts[halves < distance]
    return int(deciding[0]) - values.size if deciding.size else None


@cache
def student_quantile(freedom: float) -> float:
    """Return the quantile of Student's t at which a 95 % interval ends."""
    return float(scipy.special.stdtrit(freedom, 1 - TAIL))


@cache
def _rank(count: int) -> int:
    """Return the largest k for which P(signed-rank statistic < k) <= TAIL."""
    ways = np.ones(1)  # ways[w]: number of sets of ranks 1 to count with sum w
    for rank in range(1, count + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    return int(np.searchsorted(np.cumsum(ways / 2.0**count), TAIL, side="right"))


def _median(rounds: Floats) -> Any:
    """Return the median of some rounds; np.median takes 15 µs, for a single value, too."""
    if rounds.size < 2:
        return rounds[0] if rounds.size else np.nan
    return np.median(rounds)


def _standard_error(values: Floats) -> Any:
    """Return the standard error of the mean; scipy.stats.sem takes ten times as long."""
    return values.std(axis=-1, ddof=1) / np.sqrt(values.shape[-1])


def _enough(logs: ArrayLike) -> Floats:
    values = np.asarray(logs, dtype=float)
    if values.shape[-1] < FEWEST:
        raise ValueError(f"an interval: expected {FEWEST} processes, found {values.shape[-1]}")
    return values
