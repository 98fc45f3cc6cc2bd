"""The cases of a survey on other devices: the same problems in runs that were published.

    survey's runs + bundles ─> of each bundle the rows of the survey's problems
      ─> changes.py: speed-ups over each device's own baseline, and their ratio
      ─> one line a case: the survey's verdict before its look, the bundle of most processes first

Problems of one id have the same operands on every device. Only shared problems are analysed, which
takes seconds. Everything here is between runs: two devices never share a process.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from sparsebench.errors import ResultError
from sparsebench.results import store
from sparsebench.results.analysis import Analysis, analyse
from sparsebench.results.changes import Changes, changes
from sparsebench.results.compare import KEYS
from sparsebench.results.environment import device_name
from sparsebench.results.store import Run
from sparsebench.results.summary import crossing


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
