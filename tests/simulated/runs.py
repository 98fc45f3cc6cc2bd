"""How often intervals, verdicts and looks are right: many runs at once, on simulated clocks.

    d_p = log ratio + regret + process + what is left of noise, drift and steps in one process

The last term is drawn through the simulated GPU's own clock (sim/gpu_model.py) and the ratio of
medians of rounds, the others as its spec says. Both contenders search, with a regret of `regret`.

`python tests/simulated/runs.py` prints the tables of harness/NOTES.md, in a minute.
"""

from dataclasses import dataclass
from functools import cache

import numpy as np

from sparsebench.kernels._common.search import FINALISTS, NEAR
from sparsebench.results.comparison.compare import APART, tolerance
from sparsebench.results.statistics.outcome import VERDICTS, Outcome, among_many
from sparsebench.results.statistics.ratio import (
    Floats,
    Interval,
    hodges_lehmann,
    median_logs,
    p_value,
)
from tests.simulated.gpu_model import Array, Spec, blur, samples, ways

SD_OF_HALF = 0.6028  # standard deviation of |N(0, 1)|
POOL = 2000  # processes through the clock, drawn from
MANY = 400  # processes of another run, whose mean is what it would estimate from very many
PROCESSES = 8
LENGTHS_US = {"below 8 µs": 4.5, "8 to 20 µs": 14.0, "20 to 100 µs": 40.0, "above 100 µs": 200.0}
# What speedups differed by over processes, sd in %, in the published runs (comparison/compare.py).
SPREAD = {"below 8 µs": 0.030, "8 to 20 µs": 0.019, "20 to 100 µs": 0.014, "above 100 µs": 0.010}


@dataclass(frozen=True)
class Design:
    """The processes that search: the number of groups that share a choice; 0 if none searches."""

    name: str
    groups: int
    widened: bool = False  # by what two searches differ by, known beforehand
    among: bool = False  # later processes search among the finalists of the first


DESIGNS = (
    Design("the first process, for all", 1),
    Design("the first process; widened by the known regret", 1, widened=True),
    Design("two of 8, for four processes each", 2),
    Design("four of 8, for two processes each", 4),
    Design("every process", 8),
    Design("every process, later ones among the finalists of the first", 8, among=True),
    Design("no process: fixed beforehand", 0),
)


@dataclass(frozen=True)
class Runs:
    """Log-ratios [runs, processes], and what another run of the same design would estimate."""

    logs: Floats
    another: Floats


def regrets(spec: Spec, draw: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Return by how much the log times of searches' choices exceed the best."""
    return np.abs(draw.normal(0, 1, shape)) * (spec.regret / SD_OF_HALF)


@cache
def within(call_us: float) -> Array:
    """Return what two equal contenders differ by in each of POOL processes without an effect."""
    spec = Spec(process=0.0)
    taken = samples(spec, [call_us, call_us], np.random.default_rng(5), processes=POOL)
    return np.median(median_logs(*np.median(taken, axis=-1).swapaxes(0, 1)), axis=-1)


def simulated(
    runs: int,
    draw: np.random.Generator,
    *,
    ratio: float = 1.0,
    process: float = 0.004,
    regret: float = 0.0,
    groups: int = PROCESSES,
    processes: int = PROCESSES,
    call_us: float = 200.0,
) -> Runs:
    """Return runs of two contenders, one of which is `ratio` times as fast."""
    spec = Spec(process=process, regret=regret)
    noise = draw.choice(within(call_us), (runs, processes))
    noise = noise + draw.normal(0, process, (runs, processes)) + np.log(ratio)
    another = np.full(runs, np.log(ratio))
    if not groups or not regret:
        return Runs(noise, another)
    base, single = regrets(spec, draw, (2, runs, groups))
    logs = noise + np.repeat(base - single, -(-processes // groups), axis=1)[:, :processes]
    if groups < processes:  # another run's searches settle on something else
        base, single = regrets(spec, draw, (2, runs, groups)).mean(axis=-1)
        another = another + base - single
    return Runs(logs, another)


def among_finalists(
    runs: int,
    draw: np.random.Generator,
    *,
    process: float = 0.004,
    regret: float = 0.0,
    processes: int = PROCESSES,
    call_us: float = 200.0,
) -> Runs:
    """Return runs of two equal contenders whose later processes search among finalists.

    Both have the same ways, and finalists of their own. So has the other run.
    """
    spec = Spec(process=process, regret=regret)
    every = np.repeat(ways(spec, draw, (1, runs)), 2, axis=0)
    base, single = settled(spec, every, draw, processes)
    noise = draw.choice(within(call_us), (runs, processes))
    noise = noise + draw.normal(0, process, (runs, processes))
    base_again, own_again = settled(spec, every, draw, MANY)[:, :, 1:].mean(axis=-1)
    return Runs(noise + base - single, base_again - own_again)


def settled(spec: Spec, every: Array, draw: np.random.Generator, processes: int) -> Array:
    """Return the log time [..., processes] of what each process settles on, of `every` [..., ways].

    The first searches all of them, the others its finalists (kernels/_common/search.py).
    """
    first = blur(spec, every, draw)
    least, ranks = first.min(axis=-1, keepdims=True), first.argsort(axis=-1).argsort(axis=-1)
    near = (first <= least + np.log(NEAR)) & (ranks < FINALISTS)
    near[..., 0] = True  # the default
    estimates = [np.take_along_axis(every, first.argmin(axis=-1)[..., None], axis=-1)]
    for _ in range(processes - 1):
        again = np.where(near, blur(spec, every, draw), np.inf).argmin(axis=-1)
        estimates.append(np.take_along_axis(every, again[..., None], axis=-1))
    return np.concatenate(estimates, axis=-1)


def interval(logs: Floats, design: Design, regret: float) -> Interval:
    estimate = hodges_lehmann(logs)
    if not design.widened:
        return estimate
    extra = (1.96 * 2 * regret) ** 2  # two contenders, two runs
    below, above = estimate.estimate - estimate.low, estimate.high - estimate.estimate
    low, high = (np.sqrt(side**2 + extra) for side in (below, above))
    return Interval(estimate.estimate, estimate.estimate - low, estimate.estimate + high)


def covered(bounds: Interval, another: Floats) -> float:
    """Return how often the interval holds what another run would estimate."""
    return float(np.mean((bounds.low <= another) & (another <= bounds.high)))


def different(bounds: Interval) -> float:
    """Return how often the interval excludes 1."""
    return float(np.mean((bounds.low > 0) | (bounds.high < 0)))


def outcomes(logs: Floats) -> dict[Outcome, float]:
    """Return how often each outcome is said, as of a case alone in its run (verdict.py)."""
    estimate, p = hodges_lehmann(logs), p_value(logs)
    ends = zip(np.exp(estimate.low), np.exp(estimate.high), p, strict=True)
    clear = [among_many(*each) for each in ends]
    return {word: clear.count(word) / len(clear) for word in VERDICTS}


def apart(length: str, processes: int, ratio: float, runs: int, draw: np.random.Generator) -> float:
    """Return how often two looks are further apart than the tolerance; the second is `ratio`."""
    same = {"process": SPREAD[length], "processes": processes, "call_us": LENGTHS_US[length]}
    a, b = (simulated(runs, draw, ratio=r, **same).logs.mean(axis=-1) for r in (1.0, ratio))
    allowed = np.log1p(tolerance(APART[length], processes, processes))
    return float(np.mean(np.abs(b - a) > allowed))


def overlap(length: str, processes: int, runs: int, draw: np.random.Generator) -> float:
    """Return how often the ranges of two looks at the same ratio are disjoint."""
    same = {"process": SPREAD[length], "processes": processes, "call_us": LENGTHS_US[length]}
    a, b = (simulated(runs, draw, **same).logs for _ in range(2))
    low = np.maximum(a.min(axis=-1), b.min(axis=-1))
    return float(np.mean(low > np.minimum(a.max(axis=-1), b.max(axis=-1))))


def main(runs: int = 4000) -> None:
    draw = np.random.default_rng(17)
    print("| who searches | process sd | covers another run's | width | equal, called different |")
    print("|---|---|---|---|---|")
    for design in DESIGNS:
        for process in (0.003, 0.01):
            same = {"process": process, "regret": 0.01}
            experiment = (
                among_finalists(runs, draw, **same)
                if design.among
                else simulated(runs, draw, groups=design.groups, **same)
            )
            lengths = interval(experiment.logs, design, 0.01)
            width = 100 * np.mean(lengths.high - lengths.low)
            numbers = 100 * covered(lengths, experiment.another), width, 100 * different(lengths)
            cells = "{:.0f} % | {:.1f} % | {:.0f} %".format(*numbers)
            print(f"| {design.name} | {100 * process:g} % | {cells} |")
    print("\n| process sd | true difference | different | equal | not settled |")
    print("|---|---|---|---|---|")
    for process in (0.001, 0.003, 0.01):
        for ratio in (1.0, 1.005, 1.01, 1.02, 1.03):
            verdicts = outcomes(simulated(runs, draw, ratio=ratio, process=process).logs)
            words = verdicts[Outcome.FASTER] + verdicts[Outcome.SLOWER]
            numbers = words, verdicts[Outcome.EQUAL], verdicts[Outcome.NOT_SETTLED]
            cells = " | ".join(f"{100 * number:.1f} %" for number in numbers)
            print(f"| {100 * process:g} % | {100 * (ratio - 1):.2g} % | {cells} |")
    print(
        "\n| length | processes | tolerance | equal, apart | 5 % | 10 % | ranges disjoint, equal |"
    )
    print("|---|---|---|---|---|---|---|")
    for length in LENGTHS_US:
        for processes in (1, 3):
            allowed = 100 * tolerance(APART[length], processes, processes)
            lengths = [apart(length, processes, ratio, runs, draw) for ratio in (1.0, 1.05, 1.1)]
            cells = " | ".join(f"{100 * number:.1f} %" for number in lengths)
            ranges = f"{100 * overlap(length, processes, runs, draw):.0f} %"
            shown = ranges if processes > 1 else "–"
            print(f"| {length} | {processes} | {allowed:.1f} % | {cells} | {shown} |")


if __name__ == "__main__":
    main()
