"""What changed between a run and another one, case by case, and why.

    ratio   how many times as fast in the other run:  speed-up there / speed-up here, each over the
            baseline of its own run; of a baseline itself, and where there is none, the ratio of
            times, if both ran on the same kind of device
    low     and high: from the ends of both intervals; so a case is called different rather late
    uncertainty   of the ratio: the farther end, at least what the two speed-ups' are together

    slower           equal                 faster
   [======]     |    [====|===]     |     [======]      anything else is unclear
   -------------+---------+---------+-----------------> ratio
          1/(1+floor)     1     1+floor                 floor: the larger one, or LEAST

A case that was ok and is not is `broken`; one that became unsupported, or ok, is `gone` or `new`.

The cases of a survey on other devices: the same problems in runs that were published.

    survey's runs + bundles ─> of each bundle the rows of the survey's problems
      ─> changes.py: speed-ups over each device's own baseline, and their ratio
      ─> one line a case: the survey's verdict before its look, the bundle of most processes first

Problems of one id have the same operands on every device. Only shared problems are analysed, which
takes seconds. Everything here is between runs: two devices never share a process.
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


class Word(StrEnum):
    """What became of a case."""

    BROKEN = "broken"
    SLOWER = "slower"
    FASTER = "faster"
    UNCLEAR = "unclear"
    EQUAL = "equal"
    GONE = "gone"
    NEW = "new"
    NONE = ""  # in neither run it has a time that can be compared


@dataclass(frozen=True)
class Changes:
    """A run against another one. `cases` are those of `found`, with ratio, low, high, word, why.

    same_device  both ran on the same kind of device: times can be compared
    differ       what else differs between the runs: name, here, there
    """

    found: Comparison
    cases: pd.DataFrame
    same_device: bool
    differ: list[tuple[str, str, str]]

    @property
    def own(self) -> pd.DataFrame:
        """Return the lines that are no baseline: those that are counted."""
        return self.cases[~self.cases.is_baseline]

    @property
    def counts(self) -> dict[str, int]:
        """Count the cases by word, in the order of Word."""
        found = self.own.word.value_counts()
        return {str(word): int(found[word]) for word in Word if word and word in found}

    @property
    def sentence(self) -> str:
        """Return the result: `of 57 cases 16 are slower, ...; geometric mean of ratios 0.996`."""
        named = ", ".join(f"{count} {word}" for word, count in self.counts.items())
        cases = amount(sum(self.counts.values()), "case")
        return f"{cases}: {named}; geometric mean of ratios {self.mean:.4g}"

    @property
    def mean(self) -> float:
        """Return the geometric mean of the ratios; NaN where there is none."""
        return _mean(self.own.ratio)

    @property
    def baseline_mean(self) -> float:
        """Return that of the baselines' times; NaN between kinds of devices."""
        return _mean(self.cases[self.cases.is_baseline].ratio)


def changes(here: Run, there: Run, known: tuple[Analysis, Analysis] | None = None) -> Changes:
    """Compare two runs, whose analyses may be known; ResultError where no case has a ratio."""
    found = compare(here, there, known)
    same = device_name(here.environment) == device_name(there.environment)
    cases = _with_ratios(found.cases, same)
    cases = cases.assign(word=[_word(line) for line in cases.to_dict("records")])
    if cases.word.eq(Word.NONE).all():
        expected = "a case with a time in either"
        raise ResultError(f"{here.path} and {there.path}: expected {expected}, found none")
    bases = cases[cases.is_baseline].set_index(["baseline", "case_id"]).ratio
    moved = _mean(bases)
    cases = cases.assign(why=[_why(line, moved) for line in cases.to_dict("records")])
    return Changes(found, cases, same, _differing(here, there))


def threshold(text: str) -> float:
    """Read `slower:3%` as 0.03; ResultError says what was expected."""
    match = GATE.fullmatch(text.strip())
    if not match:
        raise ResultError(f"--fail-on: expected slower:P%, such as slower:3%; found {text!r}")
    return float(match[1]) / 100


def failing(found: Changes, limit: float) -> pd.DataFrame:
    """Return the cases that are broken, or slower beyond the noise and by more than `limit`."""
    own = found.own
    slower = (own.word == Word.SLOWER) & (own.ratio < 1 / (1 + limit))
    return own[slower | (own.word == Word.BROKEN)]


def _with_ratios(cases: pd.DataFrame, same_device: bool) -> pd.DataFrame:
    is_baseline = cases.label == cases.baseline_label_a
    speed = cases.speedup_b_over_a.notna() & ~is_baseline
    columns = {}
    ends = {"ratio": ("", ""), "low": ("_low", "_high"), "high": ("_high", "_low")}
    times = {"ratio": ("median", "median"), "low": ("low", "high"), "high": ("high", "low")}
    for name, (upper, lower) in ends.items():
        ratio = cases[f"speedup{upper}_b"] / cases[f"speedup{lower}_a"]
        over, under = times[name]
        alone = cases[f"{over}_us_a"] / cases[f"{under}_us_b"]
        columns[name] = ratio.where(speed, alone if same_device else np.nan)
    floor = cases[["floor_a", "floor_b"]].max(axis=1).fillna(LEAST)
    part_a, part_b = (cases[f"uncertainty_{s}"] / cases[f"speedup_{s}"] for s in ("a", "b"))
    ratio = columns["ratio"]
    least = (ratio * (part_a**2 + part_b**2) ** 0.5).where(speed)
    far = pd.concat([ratio - columns["low"], columns["high"] - ratio, least], axis=1).max(axis=1)
    columns |= {"is_baseline": is_baseline, "by_speedup": speed, "larger_floor": floor}
    return cases.assign(**columns, uncertainty=far)


def _word(line: Mapping[Any, Any]) -> Word:
    before, now = line["status_a"], line["status_b"]
    if before == Status.OK != now:
        return Word.GONE if now == Status.UNSUPPORTED else Word.BROKEN
    if now == Status.OK != before:
        return Word.NEW
    if np.isnan(line["ratio"]):
        return Word.NONE
    edge = 1 + line["larger_floor"]
    if line["high"] < 1 / edge:
        return Word.SLOWER
    if line["low"] > edge:
        return Word.FASTER
    close = 1 / edge <= line["ratio"] <= edge
    return Word.EQUAL if close else Word.UNCLEAR


def _why(line: Mapping[Any, Any], moved: float) -> str:
    """Say what could be the reason of a change: what is known to differ in this case."""
    if line["word"] in (Word.BROKEN, Word.GONE):
        return f"{line['status_b']}: {line['detail_b']}".replace("_", " ")
    if line["word"] in (Word.EQUAL, Word.NONE, Word.NEW):
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
    return "; ".join(reasons) or "not told by the rows"


def _differs(before: Any, now: Any) -> bool:
    return bool(pd.notna(before) and pd.notna(now) and before != now)


def _differing(here: Run, there: Run) -> list[tuple[str, str, str]]:
    before, now = flat(here.environment), flat(there.environment)
    names = [name for name in {**before, **now} if name.startswith(FACTS)]
    return [
        (name.removeprefix("versions."), before.get(name, "none"), now.get(name, "none"))
        for name in names
        if before.get(name) != now.get(name)
    ]


def _mean(ratios: pd.Series) -> float:
    known = np.log(ratios.dropna())
    return float(np.exp(known.mean())) if len(known) else float("nan")


@dataclass(frozen=True)
class Elsewhere:
    """Another device, or another card of the kind, and what it shares with a survey.

    runs      the bundles that lines come from
    alike     it is a device of the same name
    cases     lines of Changes.cases: a is here, b is there
    ceilings  as its environment.json has them
    """

    device: str
    runs: list[str]
    alike: bool
    cases: pd.DataFrame
    ceilings: dict[str, Any]

    @property
    def own(self) -> pd.DataFrame:
        """Return the lines with a ratio of speed-ups, the largest ratio first."""
        found = self.cases[self.cases.by_speedup & self.cases.ratio.notna()]
        return found.sort_values("ratio", ascending=False, kind="stable")

    @property
    def mean(self) -> float:
        """Return the geometric mean of the ratios, speed-up there over speed-up here."""
        return float(np.exp(np.log(self.own.ratio).mean()))

    @property
    def break_evens(self) -> pd.DataFrame:
        """Return a line a contender: from which level on it is faster, `here` and `there`.

        Both sides have the levels that both devices have.
        """
        known = self.own[self.own.level.notna()]
        keys = [name for name in fields(self.cases) if name != "sparsity"]
        lines = []
        for key, group in known.groupby([*keys, "label"], sort=False, dropna=False):
            if group.level.round(6).nunique() < 2:
                continue
            sides = {"here": group.speedup_a, "there": group.speedup_b}
            found = {name: crossing(_logs(side, group.level)) for name, side in sides.items()}
            lines.append(dict(zip([*keys, "label"], key, strict=True)) | found)
        return pd.DataFrame(lines, columns=[*keys, "label", "here", "there"])


def fields(cases: pd.DataFrame) -> list[str]:
    """Name the op and the fields of problems in the lines of a comparison."""
    names = list(cases.columns)
    return [str(name) for name in names[names.index("op") : names.index("level")]]


def bundles(paths: Iterable[Path]) -> list[Path]:
    """Return the run directories at or below some paths."""
    return [file.parent for path in paths for file in sorted(path.rglob("run.json"))]


def elsewhere(
    own: Sequence[tuple[Run, Analysis]], paths: Iterable[Path]
) -> tuple[list[Elsewhere], list[str]]:
    """Return the other devices, and a line for each bundle that cannot be compared.

    `own` are the runs of the survey and their analyses, the one that counts more first.
    """
    ids = {row.case.problem.id for run, _ in own for row in run.rows}
    mine = {run.path.resolve() for run, _ in own}
    shared: dict[str, list[tuple[Run, list[Changes]]]] = {}
    refused = []
    for path in bundles(paths):
        if path.resolve() in mine:
            continue
        try:
            there = _only(store.read(path), ids)
            met = [each for each in own if _meet(each[0], there)]
            known = analyse(there) if met else None
            found = [changes(run, there, (here, known)) for run, here in met if known]
        except ResultError as error:
            refused.append(str(error))
            continue
        if found:
            shared.setdefault(device_name(there.environment), []).append((there, found))
    return [_joined(device, found) for device, found in shared.items()], refused


def _joined(device: str, found: list[tuple[Run, list[Changes]]]) -> Elsewhere:
    lines = [
        own.cases.assign(run=there.path.name, rank=rank)
        for there, several in found
        for rank, own in enumerate(several)
    ]
    cases = pd.concat(lines, ignore_index=True)
    cases = cases.sort_values(["rank", "processes_b"], ascending=[True, False], kind="stable")
    cases = cases.drop_duplicates(KEYS)
    runs = [there.path.name for there, _ in found if there.path.name in set(cases.run)]
    first, several = found[0]
    ceilings: dict[str, Any] = first.environment.get("ceilings", {})
    return Elsewhere(device, runs, several[0].same_device, cases, ceilings)


def _only(run: Run, ids: set[str]) -> Run:
    return replace(run, rows=[row for row in run.rows if row.case.problem.id in ids])


def _meet(run: Run, there: Run) -> bool:
    """Say whether two runs have a case in common."""
    return not {row.case.id for row in run.rows}.isdisjoint(row.case.id for row in there.rows)


def _logs(speedups: "pd.Series[Any]", levels: "pd.Series[Any]") -> "pd.Series[Any]":
    return pd.Series(np.log(speedups), speedups.index).groupby(levels.round(6)).mean()
