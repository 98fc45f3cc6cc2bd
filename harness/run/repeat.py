"""A bundle measured again: its own suite.yaml by its own flags, here, as a run of its own.

    RUN ─> whole? ─> plan as it was? ─> choices pinned on the same kind ─> measured ─> a new run

On a device of the same kind process p takes the configurations that process p of the bundle settled
on. So a reproduction is about those configurations, and says so (results/provenance.py).
results/comparison.py then says of each cell whether the two agree.
"""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.plan.selection import meets
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.recorded_plan import own_suite, require_planned, require_plugins
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.runner import pinned_by_process
from sparsebench.harness.run.worker_process import Log, Worker
from sparsebench.harness.sim.gpu_model import faults
from sparsebench.results import bundle, store
from sparsebench.results.analysis import analyse, compared
from sparsebench.results.comparison import KEYS
from sparsebench.results.consistency import check_consistency
from sparsebench.results.frame import fields
from sparsebench.results.noise import Reliability
from sparsebench.results.provenance import device_name
from sparsebench.results.record import Status
from sparsebench.results.statistics import Outcome
from sparsebench.results.store import Run

Engine = Callable[[Suite, Flags, Path | None, Path | None, RunOptions], Path]
"""Measures as `measure` does: here, on several GPUs, or in pieces."""


def reproduce(
    path: Path,
    device: str,
    data: Path | None,
    out: Path | None,
    options: RunOptions,
    engine: Engine = measure,
) -> Path:
    """Measure a bundle again and return the new run; `engine` may share it out over several GPUs.

    ResultError and SuiteError as for `own_suite` and `require_planned`, before anything runs.
    Its sources are below `data`: where they were on the machine that measured it tells nothing.
    """
    origin = {"reproduces": {"manifest_sha256": bundle.identity(path)}}
    return again(whole(path), device, data, out, replace(options, origin=origin), engine)


def whole(path: Path) -> Run:
    """Read a bundle; ResultError where a file, or anything in its rows, is not as it should be."""
    bundle.verify(path)
    run = store.read(path)
    for _ in check_consistency(run):
        pass
    return run


def again(
    run: Run,
    device: str,
    data: Path | None,
    out: Path | None,
    options: RunOptions,
    engine: Engine = measure,
    **changed: Any,
) -> Path:
    """Measure a bundle's own suite by its own flags, but for what is `changed`; return the run.

    An `out` that is a run of the same origin is gone on with. What kernels chose is taken
    again on a device of the same kind; elsewhere they search anew.
    """
    _require_comparable(run, device)
    require_plugins(run)
    suite = own_suite(run, data)
    require_planned(run, suite)
    known = {field.name for field in dataclasses.fields(Flags)}
    recorded = {name: flag for name, flag in run.state["flags"].items() if name in known}
    flags = Flags(**{**recorded, "device": device, "data": data, **changed})
    same_kind = device_name(_environment(device, data)) == device_name(run.environment)
    pinned = pinned_by_process([*run.reference, *run.rows]) if same_kind else ()
    stopped = out if out and _is_of(out, options.origin or {}) else None
    return engine(suite, flags, out, stopped, replace(options, pinned=pinned))


def _require_comparable(run: Run, device: str) -> None:
    """Refuse to measure what can then agree in no case: a simulated GPU is not a real one."""
    faults(device)  # a description that cannot be read is said before a worker starts
    before: str = run.state["flags"]["device"]
    if simulated(device) != simulated(before) or (device == "cpu") != (before == "cpu"):
        expected = f"one of the kind of {before}, on which {run.path} was measured"
        raise SuiteError(f"--device: expected {expected}; found {device}")


def _is_of(out: Path, origin: Mapping[str, Any]) -> bool:
    """Say whether a run is there already that was made from the same bundle for the same end."""
    if not (out / "run.json").exists():
        return False
    return origin.items() <= store.read(out).state.items()


def _environment(device: str, data: Path | None) -> dict[str, Any]:
    """Ask a worker what the device is: this process keeps off the GPU, which is to be idle."""
    worker = Worker(device, data, Log())
    worker.kill()
    found: dict[str, Any] = worker.about["environment"]
    return found


@dataclass(frozen=True)
class Headline:
    """What a confirming run says of one chosen case: confirmed means faster than its baseline."""

    case_id: str
    confirmed: bool
    sentence: str


def confirm(
    path: Path,
    device: str,
    data: Path | None,
    out: Path | None,
    options: RunOptions,
    *,
    cases: int,
    replicates: int,
    condition: str = "",
    engine: Engine = measure,
) -> Path:
    """Measure the cases with the largest speed-ups in `path` again; return the new run.

    They are among those that meet a `condition`, written as for --only.
    """
    identity = bundle.identity(path)
    run = whole(path)
    raced = analyse(run).cases
    asked = {
        row.case.id for row in run.rows if meets(row.case.problem, row.case.contender, condition)
    }
    raced = raced[compared(raced) & (raced.status == Status.OK) & raced.case_id.isin(asked)]
    if raced.empty:
        raise ResultError(f"{path}: expected a case with a speed-up to confirm, found none")
    best = raced.sort_values("speedup", ascending=False).drop_duplicates("case_id")[:cases]
    chosen = best[KEYS].to_dict("records")
    about = {"manifest_sha256": identity, "cells": chosen, "screened": len(raced)}
    ids = f"case={'|'.join(best.case_id)}"
    options = replace(options, origin={"confirms": about})
    return again(run, device, data, out, options, engine, only=ids, replicates=replicates)


def headlines(run: Run) -> list[Headline]:
    """Return the sentence of each cell that a confirming run was made for.

    An unreliable run (results/noise.py) confirms nothing.
    """
    found = analyse(run)
    lines = found.cases.set_index(KEYS, drop=False)
    cells = [tuple(cell[key] for key in KEYS) for cell in run.state["confirms"]["cells"]]
    reliable = found.noise.reliability[0] is not Reliability.UNRELIABLE
    names = [name for name in [*fields(found.cases), "source"] if name != "pattern"]
    return [_headline(run, lines.loc[cell].to_dict(), names, reliable) for cell in cells]


def _headline(run: Run, cell: dict[str, Any], names: list[str], reliable: bool) -> Headline:
    confirmed = reliable and cell["outcome"] == Outcome.FASTER
    why = (cell["outcome"] or cell["status"]) if reliable else "unreliable run"
    word = "Confirmed" if confirmed else f"Not confirmed ({why.replace('_', ' ')})"
    if cell["status"] == Status.OK:
        interval = f"{cell['speedup_low']:.3g} to {cell['speedup_high']:.3g}, {cell['interval']}"
        said = f"is {cell['speedup']:.3g} times as fast as {cell['baseline_label']} ({interval})"
    else:
        said = f"gave no time: {cell['detail']}"
    known = [f"{name}={cell[name]}" for name in names if not pd.isna(cell[name])]
    place = f"{cell['scope']} time, {cell['cache']} cache, {device_name(run.environment)}"
    what = f"{cell['op']} {cell['pattern']} {' '.join(known)}; {place}"
    return Headline(cell["case_id"], confirmed, f"{word}: {cell['label']} {said}: {what}.")
