"""Measure a bundle again: `reproduce` all of it, or `confirm` its largest speedups.

    reproduce   RUN, if it is complete and has its whole plan ─> its suite.yaml, measured again
    confirm     RUN, a screening of N cells ─> the cells with the largest speedups, without the
                others, in fresh processes ─> the headline, with the interval of the new run

The largest of many noisy numbers is larger than what it estimates (the winner's curse). So the
screening only chooses cells: none of its numbers is in the headline.

Every contender, the baseline included, searches again: the best configuration on one card is not
always the best on another, and a baseline that inherits a slow one makes all other contenders look
better. results/comparison/changes.py decides whether the new run reproduces the bundle.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.plan.selection import meets
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions
from sparsebench.harness.run.recorded_plan import (
    require_planned_rows,
    require_plugins,
    suite_of_run,
)
from sparsebench.harness.run.run_json import Flags
from sparsebench.results.formatting import between, conditions
from sparsebench.results.problem_names import problem_name
from sparsebench.results.record import Status
from sparsebench.results.run import bundle, store
from sparsebench.results.run.consistency import check_consistency
from sparsebench.results.run.provenance import device_name
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.cases import has_baseline
from sparsebench.results.tables.frame import KEYS, fields, records
from sparsebench.results.tables.noise import Reliability

Engine = Callable[[Suite, Flags, Path | None, RunOptions], Path]
"""Measures a suite in parts, or what is left of it, and returns the run (shared_runs)."""


@dataclass(frozen=True)
class Setup:
    """Where and how a bundle is measured again; `out` is the new run, or one that was stopped."""

    device: str
    data: Path | None
    out: Path | None
    options: RunOptions
    engine: Engine


@dataclass(frozen=True)
class Confirmation:
    """The sentence of a confirming run about one cell; confirmed means faster than its baseline."""

    case_id: str
    confirmed: bool
    sentence: str


def reproduce(path: Path, setup: Setup) -> Path:
    """Measure a bundle again, with sources below `setup.data`, and return the new run.

    Before anything runs, raises the errors of `suite_of_run` and `require_planned_rows`.
    """
    origin = {"reproduces": {"manifest_sha256": bundle.identity(path)}}
    return measure_again(read_bundle(path), setup, origin)


def confirm(path: Path, setup: Setup, cases: int, replicates: int, condition: str = "") -> Path:
    """Measure the cases with the largest speedups again, and return the new run.

    They are chosen among the cases that meet `condition`, written as for --only.
    """
    identity = bundle.identity(path)
    run = read_bundle(path)
    matches = {
        row.case.id for row in run.rows if meets(row.case.problem, row.case.contender, condition)
    }
    every = analyse(run).cases
    candidates = every[
        has_baseline(every) & (every.status == Status.OK) & every.case_id.isin(matches)
    ]
    if candidates.empty:
        raise ResultError(f"{path}: expected a case with a speedup to confirm, found none")
    best = candidates.sort_values("speedup", ascending=False).drop_duplicates("case_id")[:cases]
    chosen = records(best[KEYS])
    about = {"manifest_sha256": identity, "cells": chosen, "screened": len(candidates)}
    only = f"case={'|'.join(best.case_id)}"
    return measure_again(run, setup, {"confirms": about}, only=only, replicates=replicates)


def confirmations(run: StoredRun) -> list[Confirmation]:
    """Return the sentence about each cell that a confirming run measured.

    An unreliable run (results/tables/noise.py) confirms nothing.
    """
    analysis = analyse(run)
    lines = analysis.cases.set_index(KEYS, drop=False)
    reliable = analysis.noise.reliability[0] is not Reliability.UNRELIABLE
    names = ["op", *fields(analysis.cases), "source", "scope", "cache"]
    result = []
    for chosen in run.state["confirms"]["cells"]:
        cell = lines.loc[tuple(chosen[key] for key in KEYS)].to_dict()
        confirmed = reliable and cell["outcome"] == Outcome.FASTER
        why = (cell["outcome"] or cell["status"]) if reliable else "unreliable run"
        verdict = "Confirmed" if confirmed else f"Not confirmed ({why.replace('_', ' ')})"
        outcome = f"has no time: {cell['detail']}"
        if cell["status"] == Status.OK:
            speedup = between(cell["speedup"], cell["speedup_low"], cell["speedup_high"])
            outcome = f"is {speedup} as fast as {cell['baseline_label']} ({cell['interval']})"
        where = conditions(cell)
        place = [problem_name(cell, names), device_name(run.environment), where]
        sentence = f"{verdict}: {cell['label']} {outcome}: {', '.join(filter(None, place))}."
        result.append(Confirmation(cell["case_id"], confirmed, sentence))
    return result


def read_bundle(path: Path) -> StoredRun:
    """Read a bundle. Raises ResultError if a file was changed or a row is inconsistent."""
    bundle.verify(path)
    run = store.read(path)
    for _ in check_consistency(run):
        pass
    return run


def measure_again(run: StoredRun, setup: Setup, origin: Mapping[str, Any], **changed: Any) -> Path:
    """Measure a bundle's own suite by its own flags, except those `changed`; return the new run."""
    device, data = setup.device, setup.data
    before: str = run.state["flags"]["device"]
    kind = before.partition(":")[0]
    if device.partition(":")[0] != kind:
        expected = f"{kind}, on which {run.path} was measured"
        raise SuiteError(f"--device: expected {expected}; found {device}")
    require_plugins(run)
    suite = suite_of_run(run, data)
    require_planned_rows(run, suite)
    flags = Flags.from_state(run.state, device=device, data=data, **changed)
    return setup.engine(suite, flags, setup.out, replace(setup.options, origin=origin))
