"""What a few processes say about a ratio, and no more than that.

    d_p       one log-ratio a process: the median over blocks of log(T_baseline / T_contender)
    Walsh     (d_p + d_q) / 2 over all p <= q
    ratio     exp(median of Walsh)                                    Hodges & Lehmann 1963
    95 %      exp(k-th smallest of Walsh) to exp(k-th largest)        Hollander & Wolfe 1999, 3.3

        slower           no difference            faster
       [======]     |      [====|===]     |      [======]       anything else is inconclusive
    ----------------+-----------+---------+-----------------> ratio
               1/(1+floor)      1      1+floor

The process is the unit of replication: samples of one process are not independent (Hoefler & Belli
2015, doi:10.1145/2807591.2807644). k is exact and supposes only that d_p is symmetric about its
centre: below FEWEST processes there is no such interval. No outlier is ever dropped; one among
eight moves the ratio little. Everything but `outcome` takes natural logs, processes last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

FEWEST = 6  # 2 of the 2^6 sign patterns are 3.1 %; with 5 processes the widest interval is 93.75 %
MOST = 100  # no run takes more processes than that
TAIL = 0.025  # of 95 %, on each side
FALSE_DISCOVERIES = 0.05

Floats = NDArray[np.float64]


class Outcome(StrEnum):
    """What an interval says; `inconclusive` is never to be read as `no_difference`."""

    FASTER = "faster"
    SLOWER = "slower"
    NO_DIFFERENCE = "no_difference"
    INCONCLUSIVE = "inconclusive"


class IntervalKind(StrEnum):
    """What lies between the two ends of a case's speed-up; the value is the word in reports.

    QUARTILES   one process: the quartiles over its blocks; no statement about other processes
    RANGE       several processes: the least and the greatest speed-up of a process
    CONFIDENCE  FEWEST processes or more: the exact 95 % confidence interval (Hodges-Lehmann)
    """

    QUARTILES = "quartiles"
    RANGE = "range"
    CONFIDENCE = "95 %"

    def over(self, processes: int) -> str:
        """Name the interval for a reader: `95 % over 8 processes`."""
        return f"{self} over {processes} processes" if processes > 1 else f"{self} in one process"


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval, in the units of what was given."""

    estimate: Any
    low: Any
    high: Any


def by_block(samples: Sequence[float], size: int) -> Floats:
    """Return samples [blocks, size] as they were taken; those after the last whole one are left."""
    size = min(size, len(samples))
    whole = len(samples) // size * size
    return np.reshape(samples[:whole], (-1, size))


def block_logs(theirs: Floats, ours: Floats) -> Floats:
    """Return log(theirs / ours) by block, for samples of shape (..., blocks, samples a block).

    Blocks of one index were taken within moments of each other. The one with fewer blocks is
    paired with the first of the other.
    """
    over, under = np.median(theirs, axis=-1), np.median(ours, axis=-1)
    pairs = min(over.shape[-1], under.shape[-1])
    logs: Floats = np.log(over[..., :pairs] / under[..., :pairs])
    return logs


def hodges_lehmann(logs: ArrayLike) -> Interval:
    """Return the Hodges-Lehmann estimate and its exact 95 % interval.

    Hodges & Lehmann 1963 (Ann. Math. Statist. 34, 598); the interval is Tukey's, after Hollander &
    Wolfe. A ValueError below FEWEST processes.
    """
    values = _enough(logs)
    first, second = np.triu_indices(values.shape[-1])
    walsh = np.sort((values[..., first] + values[..., second]) / 2, axis=-1)
    k = _rank(values.shape[-1])
    low, high = (np.take(walsh, i, axis=-1) for i in (k - 1, -k))
    return Interval(np.median(walsh, axis=-1), low, high)


def student(logs: ArrayLike) -> Interval:
    """Return the mean and Student's 95 % interval: a check, exact where d_p is normal."""
    values = _enough(logs)
    mean, error = values.mean(axis=-1), stats.sem(values, axis=-1)
    half = stats.t.ppf(1 - TAIL, values.shape[-1] - 1) * error
    return Interval(mean, mean - half, mean + half)


def p_value(logs: ArrayLike, floor: float) -> Floats:
    """Return p for 'the ratio is no further from 1 than the floor', a fraction.

    Twice the smaller of two one-sided t-tests, one at each end of the floor: p <= 0.05 where
    Student's interval lies beyond one of them. With no floor it is the two-sided t-test.
    """
    values = _enough(logs)
    beyond = np.abs(values.mean(axis=-1)) - np.log1p(floor)
    error = np.maximum(stats.sem(values, axis=-1), 1e-12)  # no clock resolves less
    p: Floats = np.minimum(1, 2 * stats.t.sf(beyond / error, values.shape[-1] - 1))
    return p


def q_values(p: ArrayLike) -> Floats:
    """Return the false-discovery rate at which each line of a table is found.

    Benjamini & Hochberg 1995: of the lines with q <= 0.05, at most 5 % are expected to be wrong.
    """
    q: Floats = stats.false_discovery_control(p) if np.size(p) else np.asarray(p, dtype=float)
    return q


def outcome(low: float, high: float, floor: float) -> Outcome:
    """Return what the interval of a ratio says beside a noise floor (0.005 is 0.5 %)."""
    if low > 1 + floor:
        return Outcome.FASTER
    if high < 1 / (1 + floor):
        return Outcome.SLOWER
    if 1 / (1 + floor) <= low and high <= 1 + floor:
        return Outcome.NO_DIFFERENCE
    return Outcome.INCONCLUSIVE


def more_processes(logs: ArrayLike, floor: float) -> int | None:
    """Say how many more processes would decide, if they scatter about the same mean as these.

    The fewest, up to MOST in all, at which Student's half-width is less than the way from the
    mean to the nearer end of the floor; None where no such number is.
    """
    values = _enough(logs)
    way = abs(abs(values.mean()) - np.log1p(floor))
    counts = np.arange(values.size + 1, MOST + 1)
    halves = stats.t.ppf(1 - TAIL, counts - 1) * values.std(ddof=1) / np.sqrt(counts)
    deciding = counts[halves < way]
    return int(deciding[0]) - values.size if deciding.size else None


@cache
def _rank(count: int) -> int:
    """Return k: the largest for which P(signed-rank statistic < k) <= TAIL."""
    ways = np.ones(1)  # ways[w]: sets of ranks 1 to count whose sum is w
    for rank in range(1, count + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    return int(np.searchsorted(np.cumsum(ways / 2.0**count), TAIL, side="right"))


def _enough(logs: ArrayLike) -> Floats:
    values = np.asarray(logs, dtype=float)
    if values.shape[-1] < FEWEST:
        raise ValueError(f"an interval: expected {FEWEST} processes, found {values.shape[-1]}")
    return values
