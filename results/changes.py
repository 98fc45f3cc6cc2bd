"""Changes between a run and other runs, case by case: another version, or another device.

    ratio        speedup there / speedup here, each over the baseline of its own run; for
                 baselines, and without one, the ratio of times if both ran on one kind of device
    low, high    from the ends of both intervals, so the test for a change is conservative
    uncertainty  of the ratio: the distance to the farther end, and at least that of the two
                 speedups combined

    slower           equal                 faster
   [======]     |    [====|===]     |     [======]      anything else is unclear
   -------------+---------+---------+-----------------> ratio
          1/(1+floor)     1     1+floor                 floor: the larger one, or LEAST

A case that was ok and no longer is counts as `broken`; one that became unsupported is `gone`, and
one that became ok is `new`.

`other_devices` finds the cases of a survey in published runs on other devices. Problems with equal
ids have the same operands on every device. Only shared problems are analysed, which takes seconds.
Two devices never share a process, so every comparison is between runs.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results import store
from sparsebench.results.analysis import Analysis, analyse, crossing
from sparsebench.results.comparison import KEYS, Comparison, compare
from sparsebench.results.formatting import amount
from sparsebench.results.noise import LEAST
from sparsebench.results.provenance import device_name, flat
from sparsebench.results.record import Status
from sparsebench.results.store import Run

FACTS = "versions.", "gpu.driver", "commit", "code_sha256", "plugins.", "tuned", "switches."
GATE = re.compile(r"slower:(\d+(?:\.\d+)?) ?%")


class Change(StrEnum):
    """What happened to a case between two runs."""

    BROKEN = "broken"
    SLOWER = "slower"
    FASTER = "faster"
    UNCLEAR = "unclear"
    EQUAL = "equal"
    GONE = "gone"
    NEW = "new"
    NONE = ""  # neither run has a time to compare


@dataclass(frozen=True)
class Changes:
    """A run against another one. `cases` are the comparison's, with ratio, low, high, word, why.

    same_device  both ran on the same kind of device, so times can be compared
    differences  other differences between the runs: name, here, there
    """

    comparison: Comparison
    cases: pd.DataFrame
    same_device: bool
    differences: list[tuple[str, str, str]]

    @property
    def contenders(self) -> pd.DataFrame:
        """Return the lines that are not baselines."""
        return self.cases[~self.cases.is_baseline]

    @property
    def counts(self) -> dict[str, int]:
        """Count the contenders by change, in the order of Change."""
        counts = self.contenders.word.value_counts()
        return {str(word): int(counts[word]) for word in Change if word and word in counts}

    @property
    def sentence(self) -> str:
        """Write the result: `57 cases: 16 slower, 41 equal; geometric mean of ratios 0.996`."""
        counts = ", ".join(f"{count} {word}" for word, count in self.counts.items())
        cases = amount(sum(self.counts.values()), "case")
        return f"{cases}: {counts}; geometric mean of ratios {self.mean:.4g}"

    @property
    def mean(self) -> float:
        """Return the geometric mean of the ratios; NaN if there is none."""
        return _mean(self.contenders.ratio)

    @property
    def baseline_mean(self) -> float:
        """Return the geometric mean ratio of baseline times; NaN between kinds of devices."""
        return _mean(self.cases[self.cases.is_baseline].ratio)


@dataclass(frozen=True)
class OtherDevice:
    """Another device, or another unit of the same kind, and the cases it shares with a survey.

    runs       names of the bundles that the lines come from
    same_kind  whether it is a device of the same name
    cases      lines of Changes.cases: a is the survey, b the other device
    ceilings   as in its environment.json
    """

    device: str
    runs: list[str]
    same_kind: bool
    cases: pd.DataFrame
    ceilings: dict[str, Any]

    @property
    def ratios(self) -> pd.DataFrame:
        """Return the lines with a ratio of speedups, the largest ratio first."""
        known = self.cases[self.cases.by_speedup & self.cases.ratio.notna()]
        return known.sort_values("ratio", ascending=False, kind="stable")

    @property
    def mean(self) -> float:
        """Return the geometric mean of the ratios, speedup there over speedup here."""
        return _mean(self.ratios.ratio)

    @property
    def break_evens(self) -> pd.DataFrame:
        """Return a line per contender with its `crossing` `here` and `there`, at shared levels."""
        known = self.ratios[self.ratios.level.notna()]
        swept = ("sparsity", "source", "seed")
        keys = [*(name for name in problem_fields(self.cases) if name not in swept), "label"]
        lines = []
        for key, group in known.groupby(keys, sort=False, dropna=False):
            if group.level.round(6).nunique() < 2:
                continue
            sides = {"here": group.speedup_a, "there": group.speedup_b}
            crossings = {side: crossing(_logs(s, group.level)) for side, s in sides.items()}
            lines.append(dict(zip(keys, key, strict=True)) | crossings)
        return pd.DataFrame(lines, columns=[*keys, "here", "there"])


def changes(here: Run, there: Run, analyses: tuple[Analysis, Analysis] | None = None) -> Changes:
    """Compare two runs, whose analyses may be given; raises ResultError if no case has a ratio."""
    comparison = compare(here, there, analyses)
    same = device_name(here.environment) == device_name(there.environment)
    cases = _with_ratios(comparison.cases, same)
    cases = cases.assign(word=[_change(line) for line in cases.to_dict("records")])
    if cases.word.eq(Change.NONE).all():
        expected = "a case with a time in either run"
        raise ResultError(f"{here.path} and {there.path}: expected {expected}, found none")
    moved = _mean(cases[cases.is_baseline].ratio)
    cases = cases.assign(why=[_why(line, moved) for line in cases.to_dict("records")])
    return Changes(comparison, cases, same, _differences(here, there))


def threshold(text: str) -> float:
    """Read `slower:3%` as 0.03; raises ResultError for any other form."""
    match = GATE.fullmatch(text.strip())
    if not match:
        raise ResultError(f"--fail-on: expected slower:P%, such as slower:3%; found {text!r}")
    return float(match[1]) / 100


def failing(changes: Changes, limit: float) -> pd.DataFrame:
    """Return the cases that are broken, or slower beyond the noise and by more than `limit`."""
    cases = changes.contenders
    slower = (cases.word == Change.SLOWER) & (cases.ratio < 1 / (1 + limit))
    return cases[slower | (cases.word == Change.BROKEN)]


def other_devices(
    surveyed: Sequence[tuple[Run, Analysis]], paths: Iterable[Path]
) -> tuple[list[OtherDevice], list[str]]:
    """Return the other devices, and an error line for each bundle that cannot be compared.

    `surveyed` are the runs of the survey and their analyses, the verdict before the look.
    """
    ids = {row.case.problem.id for run, _ in surveyed for row in run.rows}
    ours = {run.path.resolve() for run, _ in surveyed}
    by_device: dict[str, list[tuple[Run, list[Changes]]]] = {}
    errors = []
    for path in bundles(paths):
        if path.resolve() in ours:
            continue
        try:
            run = store.read(path)
            there = replace(run, rows=[row for row in run.rows if row.case.problem.id in ids])
            sharing = [(here, known) for here, known in surveyed if _share_a_case(here, there)]
            analysis = analyse(there) if sharing else None
            found = [changes(here, there, (known, analysis)) for here, known in sharing if analysis]
        except ResultError as error:
            errors.append(str(error))
            continue
        if found:
            by_device.setdefault(device_name(there.environment), []).append((there, found))
    return [_joined(device, found) for device, found in by_device.items()], errors


def bundles(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories at or below some paths."""
    return [file.parent for path in paths for file in sorted(path.rglob("run.json"))]


def problem_fields(cases: pd.DataFrame) -> list[str]:
    """Return the columns of a comparison that are the op and fields of problems."""
    names = list(cases.columns)
    return [str(name) for name in names[names.index("op") : names.index("level")]]


def _with_ratios(cases: pd.DataFrame, same_device: bool) -> pd.DataFrame:
    is_baseline = cases.label == cases.baseline_label_a
    speed = cases.speedup_b_over_a.notna() & ~is_baseline
    columns = {}
    ends = {"ratio": ("", ""), "low": ("_low", "_high"), "high": ("_high", "_low")}
    times = {"ratio": ("median", "median"), "low": ("low", "high"), "high": ("high", "low")}
    for name, (upper, lower) in ends.items():
        ratio = cases[f"speedup{upper}_b"] / cases[f"speedup{lower}_a"]
        over, under = times[name]
        of_times = cases[f"{over}_us_a"] / cases[f"{under}_us_b"]
        columns[name] = ratio.where(speed, of_times if same_device else np.nan)
    floor = cases[["floor_a", "floor_b"]].max(axis=1).fillna(LEAST)
    part_a, part_b = (cases[f"uncertainty_{s}"] / cases[f"speedup_{s}"] for s in ("a", "b"))
    ratio = columns["ratio"]
    least = (ratio * (part_a**2 + part_b**2) ** 0.5).where(speed)
    half = pd.concat([ratio - columns["low"], columns["high"] - ratio, least], axis=1).max(axis=1)
    columns |= {"is_baseline": is_baseline, "by_speedup": speed, "larger_floor": floor}
    return cases.assign(**columns, uncertainty=half)


def _change(line: Mapping[Any, Any]) -> Change:
    before, now = line["status_a"], line["status_b"]
    if before == Status.OK != now:
        return Change.GONE if now == Status.UNSUPPORTED else Change.BROKEN
    if now == Status.OK != before:
        return Change.NEW
    if np.isnan(line["ratio"]):
        return Change.NONE
    edge = 1 + line["larger_floor"]
    if line["high"] < 1 / edge:
        return Change.SLOWER
    if line["low"] > edge:
        return Change.FASTER
    close = 1 / edge <= line["ratio"] <= edge
    return Change.EQUAL if close else Change.UNCLEAR


def _why(line: Mapping[Any, Any], moved: float) -> str:
    """Name the possible reasons of a change: what is known to differ in this case."""
    if line["word"] in (Change.BROKEN, Change.GONE):
        return f"{line['status_b']}: {line['detail_b']}".replace("_", " ")
    if line["word"] in (Change.EQUAL, Change.NONE, Change.NEW):
        return ""
    reasons = []
    if _differs(line["code_a"], line["code_b"]):
        reasons.append("other compiled code")
    if _differs(line["choice_a"], line["choice_b"]):
        reasons.append("another choice")
    marks = [line[f"mark_{side}"] or "not marked" for side in ("a", "b")]
    if marks[0] != marks[1]:
        reasons.append(f"{marks[0]}, then {marks[1]}")
    if line["by_speedup"] and abs(np.log(moved)) > np.log1p(line["larger_floor"]):
        reasons.append(f"baselines are {moved:.3g} times as fast")
    return "; ".join(reasons) or "unknown"


def _differs(before: Any, now: Any) -> bool:
    return bool(pd.notna(before) and pd.notna(now) and before != now)


def _differences(here: Run, there: Run) -> list[tuple[str, str, str]]:
    before, now = flat(here.environment), flat(there.environment)
    names = [name for name in {**before, **now} if name.startswith(FACTS)]
    return [
        (name.removeprefix("versions."), before.get(name, "none"), now.get(name, "none"))
        for name in names
        if before.get(name) != now.get(name)
    ]


def _joined(device: str, found: list[tuple[Run, list[Changes]]]) -> OtherDevice:
    """Keep one line per case: the survey's verdict first, then the bundle of most processes."""
    lines = [
        each.cases.assign(run=there.path.name, rank=rank)
        for there, by_run in found
        for rank, each in enumerate(by_run)
    ]
    cases = pd.concat(lines, ignore_index=True)
    cases = cases.sort_values(["rank", "processes_b"], ascending=[True, False], kind="stable")
    cases = cases.drop_duplicates(KEYS)
    runs = [there.path.name for there, _ in found if there.path.name in set(cases.run)]
    first, by_run = found[0]
    ceilings: dict[str, Any] = first.environment.get("ceilings", {})
    return OtherDevice(device, runs, by_run[0].same_device, cases, ceilings)


def _share_a_case(run: Run, there: Run) -> bool:
    return not {row.case.id for row in run.rows}.isdisjoint(row.case.id for row in there.rows)


def _logs(speedups: "pd.Series[Any]", levels: "pd.Series[Any]") -> "pd.Series[Any]":
    return pd.Series(np.log(speedups), speedups.index).groupby(levels.round(6)).mean()


def _mean(ratios: pd.Series) -> float:
    logs = np.log(ratios.dropna())
    return float(np.exp(logs.mean())) if len(logs) else float("nan")
