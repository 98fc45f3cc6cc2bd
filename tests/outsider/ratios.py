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

import numpy as np
import pandas as pd

from tests.outsider.rows import HOME, Blocks, cases, device, logs_of, runs

FIGURE = re.compile(r"(-?[\d.]+)(?:×| %)?(?: \[(-?[\d.]+), (-?[\d.]+)\])?")


@cache
def ratio(ours: Blocks, other: Blocks) -> tuple[float, float, float]:
    """Return how many times as fast `ours` is, and the ends of the interval."""
    d = logs_of(ours, other)
    n = len(d)
    if n == 1:
        (process,) = ours.keys() & other.keys()
        both = min(len(ours[process]), len(other[process]))
        logs = np.log(other[process][:both] / ours[process][:both])
        return tuple(np.exp([d[0], *np.quantile(logs, [0.25, 0.75])]))
    if n < 6:
        return tuple(np.exp([d.mean(), d.min(), d.max()]))
    (middle, low, high), cards = walsh(d), between(ours)
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


def between(ours: dict) -> float:
    """Return the half that cards add to the logarithm of a ratio."""
    cards = [*getattr(ours, "cards", {}).values()]
    if len(cards) < 6 or not all(card.startswith("GPU-") for card in cards):
        return 0.0
    (sd, freedom), count = variation()[ours.state], len({*cards})
    if count > 1:  # they also measured it themselves
        logs = pd.Series(ours.logs).groupby(pd.Series(ours.cards))
        noise = logs.apply(lambda card: ((card - card.mean()) ** 2).sum()).sum()
        noise *= (1 / logs.size()).mean() / max(1, len(ours.logs) - count)
        of_run = max(0.0, logs.mean().var(ddof=1) - noise)
        variance = (freedom * sd**2 + (count - 1) * of_run) / (freedom + count - 1)
        sd, freedom = variance**0.5, freedom + count - 1
    return student(freedom) * sd / count**0.5


@cache
def variation(without: tuple[str, str] | None = None) -> dict[str, tuple[float, float]]:
    """Return the standard deviation over cards and its degrees of freedom, by state."""
    lines = repeats()
    lines = lines[lines.pair != without]
    inherited, slow = lines.b == "inherited", (lines[["a", "b"]] == "limited").any(axis=1)
    by_state: dict[str, tuple[float, float]] = {}
    for state, chosen in (
        ("free", ~inherited & ~slow),
        ("limited", ~inherited & slow),
        ("inherited", inherited),
    ):
        same = lines[chosen] if lines[chosen].pair.nunique() > 1 else lines[~inherited]
        weight, excess = same.of_a + same.of_b, same.excess
        if state == "inherited":
            of_first = same.a.map(lambda first: by_state[first][0] ** 2)
            weight, excess = same.of_b, excess - of_first * same.of_a
        variance = max(0.0, excess.sum() / weight.sum())
        scatter = (excess - variance * weight).groupby(same.pair).sum()
        error = (scatter**2).sum() / weight.sum() ** 2 * len(scatter) / (len(scatter) - 1)
        estimate = variance**0.5, max(1.0, 2 * variance**2 / error)
        by_state[state] = max(
            [estimate, *by_state.values()], key=lambda entry: entry[0] * student(entry[1])
        )
    return {state: (round(sd, 6), round(freedom, 3)) for state, (sd, freedom) in by_state.items()}


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
            if base != other_base or cards[0] & cards[1] or one.state == "inherited":
                continue
            compiled = one.compiled | two.compiled
            if code != other_code and compiled and not one.compiled & two.compiled:
                continue
            logs = [np.array([*side.logs.values()]) for side in (one, two)]
            parts = np.array([side.var(ddof=1) / len(side) for side in logs])
            d, counts = logs[1].mean() - logs[0].mean(), [1 / len(side) for side in cards]
            freedom = parts.sum() ** 2 / (parts**2 / [len(side) - 1 for side in logs]).sum()
            half = student(freedom) * parts.sum() ** 0.5
            lines.append((pair, one.state, two.state, *counts, d**2 - parts.sum(), d, half))
    names = "pair", "a", "b", "of_a", "of_b", "excess", "d", "half"
    return pd.DataFrame(lines, columns=names)


@cache
def verdicts(run: str) -> dict[str, tuple[str, Blocks]]:
    """Return the baseline and the times of each case that 6 processes or more timed on GPUs."""
    lines = cases(run)
    lines = lines[(lines.label != lines.base) & ~lines.twin.astype(bool)]
    return {
        key: (base, blocks)
        for key, base, blocks in zip(lines.key, lines.base, lines.blocks, strict=True)
        if len(blocks.logs) >= 6 and all(card.startswith("GPU-") for card in blocks.cards.values())
    }


def build_of(run: str) -> list:
    """Return the code and the libraries of a run, and its kind of GPU."""
    facts = json.loads((HOME / run / "environment.json").read_text())
    names = [facts["versions"].get(name) for name in ("torch", "cuda", "triton")]
    return [facts["code_sha256"], device(run), *names]


def agreements(repeat: tuple) -> list[bool]:
    """Return whether the interval of the difference contains 0: by processes alone, with cards."""
    checks = []
    for by_state in ({}, variation(repeat.pair)):
        cards = [
            student(by_state[state][1]) * by_state[state][0] * count**0.5 if by_state else 0.0
            for state, count in ((repeat.a, repeat.of_a), (repeat.b, repeat.of_b))
        ]
        checks.append(abs(repeat.d) <= np.hypot(repeat.half, np.hypot(*cards)))
    return checks


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
