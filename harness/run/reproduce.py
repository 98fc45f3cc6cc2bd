"""A bundle measured again: its own suite.yaml by its own flags, here, as a run of its own.

    RUN ─> whole? ─> plan as it was? ─> choices pinned on the same kind ─> measured ─> a new run

On a device of the same kind process p takes the configurations that process p of the bundle settled
on. So a reproduction is about those configurations, and says so (results/provenance.py).
results/comparison.py then says of each cell whether the two agree.
"""

from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from sparsebench.errors import SuiteError
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.child import Log, Worker
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.own_suite import own_suite, require_planned
from sparsebench.harness.run.plugins import require_plugins
from sparsebench.harness.run.runner import pinned_by_process
from sparsebench.harness.run.state import Flags
from sparsebench.harness.sim.clock import faults
from sparsebench.results import bundle, store
from sparsebench.results.consistency import inspect
from sparsebench.results.provenance import device_name
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
    for _ in inspect(run):
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
    known = {field.name for field in fields(Flags)}
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
