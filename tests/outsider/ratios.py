"""Ratios of times with their intervals, and the variation between cards.

    T_b = median of the samples of block b      d_p = median over b of log(T_b other / T_b ours)
    ratio = exp(d_p)                             1 process; brackets: quartiles of its blocks
          = exp(mean of d_p)                     2 to 5 processes; brackets: least and greatest
          = exp(median of the Walsh averages)    6 and more; brackets: 95 % signed-rank interval

The variation between cards is added to the interval in squares.
"""

import json
import re
from functools import cache
from itertools import combinations
from math import comb

import numpy as np
import pandas as pd

from tests.outsider.rows import HOME, LENGTHS, Blocks, cases, device, logs_of, runs

Estimate = tuple[float, float]  # a standard deviation and its degrees of freedom
FIGURE = re.compile(r"(-?[\d.]+)(?:×| %)?(?: \[(-?[\d.]+), (-?[\d.]+)\])?")


@cache
def ratio(ours: Blocks, other: Blocks, cards: float | None = None) -> tuple[float, float, float]:
    """Return how many times as fast `ours` is, and the ends of the interval.

    `cards` is the half that cards add, by default that of `ours`.
    """
    d = logs_of(ours, other)
    n = len(d)
    if n == 1:
        (process,) = ours.keys() & other.keys()
        both = min(len(ours[process]), len(other[process]))
        logs = np.log(other[process][:both] / ours[process][:both])
        return tuple(np.exp([d[0], *np.quantile(logs, [0.25, 0.75])]))
    if n < 6:
        return tuple(np.exp([d.mean(), d.min(), d.max()]))
    middle, low, high = walsh(d)
    cards = between(ours) if cards is None else cards
    low, high = np.hypot(middle - low, cards), np.hypot(high - middle, cards)
    return tuple(np.exp([middle, middle - low, middle + high]))


def walsh(d: np.ndarray) -> tuple[float, float, float]:
    """Return the median of the Walsh averages, and the ends of the signed-rank interval."""
    n = len(d)
    averages = np.sort([(d[i] + d[j]) / 2 for i in range(n) for j in range(i, n)])
    ways = np.ones(1)
    for rank in range(1, n + 1):
        ways = np.pad(ways, (0, rank)) + np.pad(ways, (rank, 0))
    k = np.searchsorted(np.cumsum(ways / 2.0**n), 0.025, side="right")
    return np.median(averages), averages[k - 1], averages[-k]


def between(ours: Blocks) -> float:
    """Return the half that cards add to the logarithm of a ratio; NaN if it was not measured."""
    cards = [*getattr(ours, "cards", {}).values()]
    if len(cards) < 6 or not all(card.startswith("GPU-") for card in cards):
        return 0.0
    (sd, freedom), count = of_stratum(ours.stratum, variation()), len({*cards})
    if count == 1 and ours.scope == "chain" and ours.stratum.partition(",")[0] not in chains():
        return float("nan")
    if count > 1:  # they also measured it themselves
        logs = pd.Series(ours.logs).groupby(pd.Series(ours.cards))
        noise = logs.apply(lambda card: ((card - card.mean()) ** 2).sum()).sum()
        noise *= (1 / logs.size()).mean() / max(1, len(ours.logs) - count)
        of_run = max(0.0, logs.mean().var(ddof=1) - noise)
        sd, freedom = weighted((sd, freedom), (of_run**0.5, count - 1))
    return student(freedom) * sd / count**0.5


def of_stratum(stratum: str, by_stratum: dict[str, Estimate]) -> Estimate:
    """Return the variation of a stratum, drawn towards that of all kernels with such times."""
    length = stratum.partition(", ")[2]
    return weighted(by_stratum[length], by_stratum.get(stratum, (0.0, 0.0)))


def weighted(*estimates: Estimate) -> Estimate:
    """Return the mean of some variances by their degrees of freedom, and the sum of these."""
    freedom = sum(of_one for _, of_one in estimates)
    return (sum(sd**2 * of_one for sd, of_one in estimates) / freedom) ** 0.5, freedom


@cache
def variation(without: frozenset[str] = frozenset()) -> dict[str, Estimate]:
    """Return the standard deviation over cards and its freedom, by stratum and by class of times.

    They come from the repeats that no card of `without` measured.
    """
    lines = repeats()
    lines = lines[[without.isdisjoint(cards) for cards in lines.cards]]
    by_length = dict(iter(lines.groupby(lines.stratum.str.partition(", ")[2])))
    estimates = {name: jackknife(by_length.get(name, lines)) for name in LENGTHS}
    of_class = {name: (sd, max(1.0, freedom)) for name, (sd, freedom) in estimates.items()}
    return of_class | {name: jackknife(group) for name, group in lines.groupby("stratum")}


def jackknife(lines: pd.DataFrame) -> Estimate:
    """Return the standard deviation over cards, with the freedom from leaving out each card."""
    every = [*zip(lines.cards, lines.excess, lines.of_a + lines.of_b, strict=True)]
    variance = max(0.0, sum(line[1] for line in every) / sum(line[2] for line in every))
    cards, left = frozenset().union(*lines.cards), []
    for card in cards:
        others = [line for line in every if card not in line[0]]
        if others:
            left.append(sum(line[1] for line in others) / sum(line[2] for line in others))
    error = sum((value - sum(left) / len(left)) ** 2 for value in left)
    error *= (len(left) - 1) / max(1, len(left))
    freedom = min(2 * variance**2 / error, len(cards) - 1) if error else 0.0
    return round(variance**0.5, 6), round(freedom, 3)


@cache
def chains() -> set[str]:
    """Return the kernels of which two cards measured a chain."""
    lines = repeats()
    return {stratum.partition(",")[0] for stratum in lines.stratum[lines.scope == "chain"]}


@cache
def repeats() -> pd.DataFrame:
    """Return the cases whose kernels two runs measured on different cards, the older first."""
    started = {run: json.loads((HOME / run / "run.json").read_text())["started"] for run in runs()}
    lines = []
    for pair in combinations(sorted(runs(), key=started.get), 2):
        (code, *same), (other_code, *other) = map(build_of, pair)
        if same != other:
            continue
        a, b = map(verdicts, pair)
        for key in a.keys() & b.keys():
            (base, one), (other_base, two) = a[key], b[key]
            cards = [{*one.cards.values()}, {*two.cards.values()}]
            if base != other_base or cards[0] & cards[1] or one.inherited or two.inherited:
                continue
            compiled = one.compiled | two.compiled
            if code != other_code and compiled and not one.compiled & two.compiled:
                continue
            logs = [np.array([*side.over_zeros.values()]) for side in (one, two)]
            parts = np.array([side.var(ddof=1) / len(side) for side in logs])
            d, counts = logs[1].mean() - logs[0].mean(), [1 / len(side) for side in cards]
            freedom = parts.sum() ** 2 / (parts**2 / [len(side) - 1 for side in logs]).sum()
            half = student(freedom) * parts.sum() ** 0.5
            (first, low, high), (second, *_) = map(walsh, logs)
            gap, reach = second - first, high - first if second > first else first - low
            strata = one.stratum, two.stratum, one.op, one.scope
            numbers = *counts, d**2 - parts.sum(), d, half, gap, reach
            lines.append((pair, cards[0] | cards[1], *strata, *numbers))
    names = ["pair", "cards", "stratum", "other", "op", "scope", "of_a", "of_b"]
    return pd.DataFrame(lines, columns=[*names, "excess", "d", "half", "gap", "reach"])


@cache
def verdicts(run: str) -> dict[str, tuple[str, Blocks]]:
    """Return the pruned baseline and the times of each case of 6 processes or more on GPUs."""
    lines = cases(run)
    lines = lines[lines.pruned_base.notna() & (lines.weights != "original")]
    lines = lines[(lines.label != lines.pruned_base) & ~lines.twin.astype(bool)]
    return {
        key: (base, blocks)
        for key, base, blocks in zip(lines.key, lines.pruned_base, lines.blocks, strict=True)
        if len(blocks.over_zeros) >= 6 and all(c.startswith("GPU-") for c in blocks.cards.values())
    }


@cache
def build_of(run: str) -> list:
    """Return the code and the libraries of a run, and its kind of GPU."""
    facts = json.loads((HOME / run / "environment.json").read_text())
    names = [facts["versions"].get(name) for name in ("torch", "cuda", "triton")]
    return [facts["code_sha256"], device(run), *names]


@cache
def agreements() -> pd.DataFrame:
    """Return which repeats are inside, and unchanged by processes alone and with cards."""
    checks = []
    for repeat in repeats().itertuples():
        by_stratum = variation(frozenset(repeat.cards))
        halves = [
            student(freedom) * sd * of_one**0.5
            for stratum, of_one in ((repeat.stratum, repeat.of_a), (repeat.other, repeat.of_b))
            for sd, freedom in [of_stratum(stratum, by_stratum)]
        ]
        inside = abs(repeat.gap) <= np.hypot(repeat.reach, halves[0])
        with_cards = np.hypot(repeat.half, np.hypot(*halves))
        checks.append((inside, abs(repeat.d) <= repeat.half, abs(repeat.d) <= with_cards))
    return pd.DataFrame(checks, columns=["inside", "alone", "with cards"])


def unlikely(counts: list[tuple[int, int]]) -> list[float]:
    """Return how likely so few are inside if 85 % were expected, for all counts together (Holm)."""
    below = [
        sum(comb(n, k) * 0.85**k * 0.15 ** (n - k) for k in range(inside + 1))
        for inside, n in counts
    ]
    order = sorted(range(len(below)), key=below.__getitem__)
    steps = [min(1.0, below[place] * (len(below) - rank)) for rank, place in enumerate(order)]
    return [max(steps[: order.index(place) + 1]) for place in range(len(below))]


@cache
def student(freedom: float) -> float:
    """Return the 97.5 % quantile of Student's t: its tangent is spread as a power of a cosine."""
    angle = np.linspace(0, np.pi / 2, 100001)
    density = np.cos(angle) ** (freedom - 1)
    share = np.append(0, np.cumsum((density[1:] + density[:-1]) / 2))
    return float(freedom**0.5 * np.tan(np.interp(0.95, share / share[-1], angle)))


def fastest(contest: pd.DataFrame, eligible: pd.Series) -> pd.Series | None:
    """Return the eligible contender with the largest ratio over the contest's baseline."""
    base, some = contest[contest.baseline], contest[eligible]
    if base.empty or some.empty:
        return None
    gains = [ratio(blocks, base.blocks.iloc[0])[0] for blocks in some.blocks]
    return some.assign(gain=gains).sort_values(["gain", "label"], ascending=[False, True]).iloc[0]


def agrees(shown: str, value: float) -> bool:
    """Return whether a number is a value to the last digit shown; closing zeros do not count."""
    after = len(shown.partition(".")[2])
    unit = 10.0**-after if after else 10.0 ** (len(shown) - len(shown.rstrip("0")))
    return abs(float(shown) - value) <= unit * 0.5000001


def shows(text: str, values: tuple[float, ...]) -> bool:
    """Return whether a text starts with a value, with or without the ends of its interval."""
    shown = FIGURE.match(text)
    pairs = zip(shown.groups() if shown else (), values, strict=False)
    return bool(shown) and all(agrees(text, value) for text, value in pairs if text)
