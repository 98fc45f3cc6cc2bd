"""What changed between two sides of a comparison, case by case, and where the change comes from.

    time       time of a / time of b; above 1, b takes less time. `word` is its outcome.
    ratio      gain of b / gain of a, each over the baseline of the same run; `gain` is its outcome

The logarithm of each is a difference of two means over processes, because the two sides share no
contest. Half of its 95 % interval is

    h = sqrt( (t s)^2 + between a^2 + between b^2 )    s, t: Welch 1947; 6 processes or more
    h = the larger of that Welch half and tolerance    fewer processes (compare.py)

`between` is the variation between cards (between_cards.py). It counts if no card ran the case on
both sides. Faster and slower also need q <= 5 % over all cases.

    mean       exp( mean of log ratio +- mean of h )       over cases: geometric mean, 95 % interval

The cases of a side are not independent, because they share cards, days and often processes, and
nothing here estimates how strongly they depend on each other. But the standard deviation of a mean
is at most the mean of the standard deviations, however they do. So the interval of a mean is as
wide as if all cases had one common error: it never shrinks with their number. It holds for these
cases alone, and says nothing about others.

The baseline is the control: it ran beside the kernel, so if its library and its search are the
same, a change of its time comes from the card, and a change of the gain from the kernel.

    gain changed, and the baseline is a control        ─> the kernel: our code, its configuration,
    time changed, and the baseline is no control       ─> or the version of its library
    only the baseline changed, and it is no control    ─> the baseline
    kernel and baseline changed together               ─> the card, or its clock; the machine,
                                                          if the device is a CPU
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import scipy

from sparsebench.errors import ResultError
from sparsebench.results.comparison.compare import Comparison, compare, half_between, same_code
from sparsebench.results.comparison.sides import Side, bundles, short_card, short_name, side
from sparsebench.results.formatting import between
from sparsebench.results.record import Status
from sparsebench.results.run import store
from sparsebench.results.run.provenance import device_name, flat
from sparsebench.results.run.store import Run
from sparsebench.results.statistics.outcome import DIFFERENT, Outcome, among_many
from sparsebench.results.statistics.ratio import FEWEST, q_values, welch
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.families import is_ours
from sparsebench.results.tables.frame import records

NORMAL = 1.96  # 95 % of a normal distribution
TIME = ["time", "time_low", "time_high"]
GAIN = ["ratio", "low", "high"]
FACTS = "versions.", "gpu.driver", "commit", "code_sha256", "plugins.", "tuned", "switches."
LIBRARIES = "versions.", "gpu.driver"
GATE = re.compile(r"slower:(\d+(?:\.\d+)?) ?%")

Line = Mapping[Any, Any]


class Cause(StrEnum):
    """What a change comes from, as far as the runs record it."""

    KERNEL = "our kernel"
    CONFIGURATION = "the configuration"
    LIBRARY = "the library's version"
    BASELINE = "the baseline"
    CARD = "the card"
    MACHINE = "the machine"
    UNKNOWN = "nothing recorded"
    NONE = ""


OUTSIDE = (Cause.BASELINE, Cause.CARD, Cause.MACHINE)
"""Causes outside the kernel."""


@dataclass(frozen=True)
class Mean:
    """The geometric mean of a ratio over `cases` cases, with its 95 % interval."""

    value: float
    low: float
    high: float
    cases: int

    @property
    def inverse(self) -> "Mean":
        return Mean(1 / self.value, 1 / self.high, 1 / self.low, self.cases)

    @property
    def text(self) -> str:
        """Write it in percent: `87 % [85, 89]`."""
        return between(100 * self.value, 100 * self.low, 100 * self.high, unit=" %")


@dataclass(frozen=True)
class Changes:
    """Side b against side a. `cases` are the comparison's, with the columns of this module.

    same_device  both ran on one kind of device
    differences  what else differs between the runs: name, in a, in b
    """

    a: Side
    b: Side
    comparison: Comparison
    cases: pd.DataFrame
    same_device: bool
    differences: list[tuple[str, str, str]]

    @property
    def contenders(self) -> pd.DataFrame:
        """Return the lines that are not baselines, without those that neither side measured."""
        return self.cases[~self.cases.is_baseline & self.cases.word.ne("")]

    @property
    def counts(self) -> dict[str, int]:
        """Count the contenders by outcome, and those that broke."""
        words, broken = self.contenders.word.value_counts(), int(self.contenders.broken.sum())
        counts = {str(word): int(words[word]) for word in Outcome if word in words}
        return counts | ({"broken": broken} if broken else {})


def changes(a: Side, b: Side) -> Changes:
    """Compare two sides; raises ResultError if no case has a time on either."""
    comparison, same = compare(a, b), a.device == b.device
    cases = comparison.cases.reset_index(drop=True)
    if not (cases.status_a.eq(Status.OK) | cases.status_b.eq(Status.OK)).any():
        expected = "expected a case with a time on either side"
        raise ResultError(f"{a.paths} and {b.paths}: {expected}, found none")
    cases["is_baseline"] = cases.label == cases.baseline_label_a
    cases["by_speedup"] = cases.speedup_b_over_a.notna() & ~cases.is_baseline
    lines = records(cases)
    times = [ratio_of_means(line["times_b"], line["times_a"], line) for line in lines]
    gains = [
        ratio_of_means(_log(line["speedups_a"]), _log(line["speedups_b"]), line)
        if line["by_speedup"]
        else (np.nan,) * 4
        for line in lines
    ]
    for names, word, tests in ((TIME, "word", times), (GAIN, "gain", gains)):
        table = pd.DataFrame(tests, cases.index, [*GAIN, "p"], dtype="float64")
        cases[names] = table[GAIN]
        cases[word] = outcomes(table)
    cases["uncertainty"] = np.maximum(cases.ratio - cases.low, cases.high - cases.ratio)
    lost = cases.status_a.eq(Status.OK) & cases.status_b.ne(Status.OK)
    cases["broken"] = lost & cases.status_b.ne(Status.UNSUPPORTED)
    cases.loc[lost | (cases.status_b.eq(Status.OK) & cases.status_a.ne(Status.OK)), "word"] = str(
        Outcome.NOT_MEASURED
    )
    facts = [[flat(run.environment) for run in each.runs] for each in (a, b)]
    causes = [_cause(line, facts, same) for line in records(cases)]
    cases["control"] = [control for control, _, _ in causes]
    cases["cause"] = [str(cause) for _, cause, _ in causes]
    cases["why"] = [why for _, _, why in causes]
    return Changes(a, b, comparison, cases, same, _differences(facts[0][0], facts[1][0]))


def ratio_of_means(
    under: Sequence[float], over: Sequence[float], line: Line
) -> tuple[float, float, float, float]:
    """Return exp(mean over - mean under) with its 95 % interval and p; NaN without both."""
    if not under or not over or np.isnan([*under, *over]).any():
        return (np.nan,) * 4
    ratio, half = welch(under, over)
    if min(len(under), len(over)) < FEWEST:
        half = float(np.fmax(np.log1p(line["tolerance"]), half))  # Welch's is NaN for one process
    else:
        half = float(np.hypot(half, half_between(line)))
    p = 2 * float(scipy.stats.norm.sf(NORMAL * abs(ratio) / max(half, 1e-9)))
    value, low, high = np.exp([ratio, ratio - half, ratio + half]).tolist()
    return value, low, high, p


def difference(before: Sequence[float], now: Sequence[float]) -> tuple[float, float, float]:
    """Return the ratio of two gains and its interval, from the intervals of both.

    A gain is a tuple: its value, its ends, and the half in logs that cards added to them if both
    gains come from one card, else 0. Without the processes, this approximates what `ratio_of_means`
    returns.
    """
    ratio = float(np.log(now[0] / before[0]))
    squares = [
        max(0.0, (np.log(high / low) / 2) ** 2 - cards**2) for _, low, high, cards in (before, now)
    ]
    half = float(np.sqrt(sum(squares)))
    value, low, high = np.exp([ratio, ratio - half, ratio + half]).tolist()
    return value, low, high


def outcomes(tests: pd.DataFrame) -> list[str]:
    """Return the outcome of each test; "" without one."""
    tested = tests[tests.p.notna()]
    ends = zip(tested.low, tested.high, q_values(tested.p), strict=True)
    words = {place: str(among_many(*each)) for place, each in zip(tested.index, ends, strict=True)}
    return [words.get(place, "") for place in tests.index]


def threshold(text: str) -> float:
    """Read `slower:3%` as 0.03; raises ResultError for any other form."""
    match = GATE.fullmatch(text.strip())
    if not match:
        raise ResultError(f"--fail-on: expected slower:P%, such as slower:3%; found {text!r}")
    return float(match[1]) / 100


def gate_failures(changes: Changes, limit: float) -> pd.DataFrame:
    """Return the cases that broke, or whose kernel is slower by more than `limit`.

    A kernel is judged by its gain if the baseline is a control, or on another kind of device, and
    by its time if not. A change that comes from the card or the baseline fails no gate.
    """
    cases = changes.contenders
    by_gain = cases.control | (not changes.same_device)
    word, value = cases.gain.where(by_gain, cases.word), cases.ratio.where(by_gain, cases.time)
    slower = word.eq(Outcome.SLOWER) & (value < 1 / (1 + limit)) & ~cases.cause.isin(OUTSIDE)
    return cases[slower | cases.broken]


def other_devices(
    surveyed: Sequence[Analysis], paths: Iterable[Path]
) -> tuple[list[Changes], list[str]]:
    """Return the changes from a survey to other devices, and a line for each refused bundle.

    `surveyed` are the runs of the survey. Only cases that the survey has are read from the bundles
    below `paths`.
    """
    here = Side("here", surveyed)
    problems = {row.case.problem.id for run in here.runs for row in run.rows}
    cases = {row.case.id for run in here.runs for row in run.rows}
    ours = {run.path.resolve() for run in here.runs}
    by_device: dict[str, list[Run]] = {}
    others, errors = [], []
    for path in (path for path in bundles(paths) if path.resolve() not in ours):
        try:
            run = store.read(path)
        except ResultError as error:
            errors.append(str(error))
            continue
        rows = [row for row in run.rows if row.case.problem.id in problems]
        if not cases.isdisjoint(row.case.id for row in rows):
            by_device.setdefault(device_name(run.environment), []).append(replace(run, rows=rows))
    for device, runs in by_device.items():
        another = "another " if device == here.device else ""
        try:
            others.append(changes(here, side(*runs, name=another + short_name(device))))
        except ResultError as error:
            errors.append(str(error))
    return others, errors


def problem_fields(cases: pd.DataFrame) -> list[str]:
    """Return the columns of a comparison that are the op and fields of problems."""
    names = list(cases.columns)
    return [str(name) for name in names[names.index("op") : names.index("level")]]


def mean(cases: pd.DataFrame, of: list[str]) -> Mean | None:
    """Return the mean of TIME or GAIN over the cases that have it; None if none has.

    Every interval is symmetric in logs, so the ends of the mean's are the means of the ends.
    """
    logs = np.log(cases[of].dropna().to_numpy(dtype=float))
    if not len(logs):
        return None
    value, low, high = np.exp(logs.mean(axis=0)).tolist()
    return Mean(value, low, high, len(logs))


def _log(speedups: Any) -> list[float]:
    return np.log(speedups).tolist() if isinstance(speedups, tuple) else []


def _cause(
    line: Line, facts: Sequence[Sequence[dict[str, str]]], same: bool
) -> tuple[bool, Cause, str]:
    """Return whether the baseline is a control, the cause of a change, and the reason for it."""
    for mine, other in (("b", "a"), ("a", "b")):
        if line[f"status_{mine}"] != Status.OK == line[f"status_{other}"]:
            status = str(line[f"status_{mine}"]).replace("_", " ")
            return False, Cause.NONE, f"{status}: {line[f'detail_{mine}']}"
    before, now = facts[0][line["run_a"]], facts[1][line["run_b"]]
    # a case that ran on both sides does not use a library that one side lacks
    differ = [each for each in _differences(before, now, LIBRARIES) if "none" not in each]
    libraries = ", ".join(f"{name} {was} > {now}" for name, was, now in differ)
    searched = line["searched_a"] and line["searched_b"]
    source = before.get("code_sha256") != now.get("code_sha256")
    control = bool(same and line["by_speedup"] and searched and not libraries)
    time, gain = line["word"] in DIFFERENT, line["gain"] in DIFFERENT
    device = _device(line, "gpu.name" in now)
    cause, why = Cause.NONE, ""
    if not same:
        pass
    elif line["is_baseline"] and time:
        cause, why = _of_baseline(libraries, searched, device)
    elif gain if control else time:
        cause, why = _of_kernel(line, libraries, searched, source, device)
    elif gain:
        cause, why = _of_baseline(libraries, searched, device)
        cause = Cause.LIBRARY if libraries else Cause.BASELINE
    elif time:
        cause, why = device
    marks = [line[f"mark_{end}"] or "not marked" for end in "ab"]
    marked = f"; {marks[0]}, then {marks[1]}" if cause and marks[0] != marks[1] else ""
    return control, cause, why + marked


def _of_baseline(libraries: str, searched: bool, device: tuple[Cause, str]) -> tuple[Cause, str]:
    if libraries:
        return Cause.LIBRARY, libraries
    if not searched:
        return Cause.CONFIGURATION, "taken from another run"
    return device


def _of_kernel(
    line: Line, libraries: str, searched: bool, source: bool, device: tuple[Cause, str]
) -> tuple[Cause, str]:
    same = same_code(line["codes_a"], line["codes_b"])
    if source and is_ours(line["kernel"]) and not same:
        what = "other source" if same is None else "other compiled code"
        return Cause.KERNEL, what + (f", or {libraries}" if libraries else "")
    if libraries:
        return Cause.LIBRARY, libraries
    if not searched or line["choice_a"] != line["choice_b"]:
        return Cause.CONFIGURATION, "another choice" if searched else "taken from another run"
    if source:
        return Cause.UNKNOWN, "other source, the same compiled code"
    cause, why = device
    return (cause if line["cards_a"] != line["cards_b"] else Cause.UNKNOWN), why


def _device(line: Line, gpu: bool) -> tuple[Cause, str]:
    """Return the card or the machine as a cause, and whether both sides ran on the same."""
    cause, kind = (Cause.CARD, "card") if gpu else (Cause.MACHINE, "CPU")
    if line["cards_a"] == line["cards_b"]:
        return cause, f"the same {kind}"
    ends = ("+".join(sorted(map(short_card, line[f"cards_{end}"]))) for end in "ab")
    return cause, f"another {kind}, {' > '.join(ends)}"


def _differences(
    before: Mapping[str, str], now: Mapping[str, str], of: tuple[str, ...] = FACTS
) -> list[tuple[str, str, str]]:
    return [
        (name.removeprefix("versions."), before.get(name, "none"), now.get(name, "none"))
        for name in {**before, **now}
        if name.startswith(of) and before.get(name) != now.get(name)
    ]
