"""Measure a suite in parts on several GPUs, and resume it; other folders call this module.

    suite, Plan ─> RUN.parts ─> a thread for each GPU of this host: workers near it    ┐
                             ─> jobs of a cluster, one GPU each (cluster_jobs.py)      ┴─> RUN

A run that was stopped, or whose process ended, is resumed from RUN.parts alone. Threads and jobs
take contests from one plan as they go (run/plan_part.py), so no GPU waits for another until the
last contest. Threads start at the same time, so imports and ceilings take no longer.
"""

import os
import shutil
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from time import monotonic

from sparsebench.errors import SuiteError
from sparsebench.harness.machine.cpu_placement import apart
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions, Stopped, require_new
from sparsebench.harness.run.plan_part import PlanPart
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.shared_runs import cluster_jobs, shared_folder
from sparsebench.harness.shared_runs.run_paths import merged_at, parts_of
from sparsebench.harness.shared_runs.shared_folder import OnStart, Plan, finish, work

STOP_S = 0.5  # interval at which to check whether stopping threads have ended


def share(
    suite: Suite,
    plan: Plan,
    out: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> Path:
    """Measure a suite as planned and return the run at `out`, or resume it.

    Raises SuiteError if the plan cannot be shared in this way, Unfinished if the time ends before
    the run is whole, and the errors of `measure` and `merge`.
    """
    folder, plan = open_plan(suite, plan, out, options)
    return _measure(folder, suite, plan, options)


def measure_alone(
    suite: Suite,
    flags: Flags,
    out: Path,
    options: RunOptions,
    *,
    as_begun: bool = False,
    on_start: OnStart = lambda part: None,
) -> Path:
    """Measure a suite in one part, or what is left of it, and return the run at `out`.

    as_begun  a run that has begun keeps its flags: what claims lack may have changed meanwhile

    Raises Unfinished if the time ends before the run is whole.
    """
    if as_begun and parts_of(out).exists():
        before = shared_folder.read_plan(parts_of(out))
        names = "only", "replicates", "energy"
        flags = replace(flags, **{name: getattr(before.flags, name) for name in names})
        options = replace(options, origin=before.origin)
    folder, plan = open_plan(suite, Plan(suite.name, flags, (flags.device,)), out, options)
    try:
        if monotonic() < options.until:
            work(folder, plan, suite, 1, options, on_start=on_start)
    except Stopped as stop:
        raise Stopped(out) from stop
    return finish(folder, plan, suite)


def open_plan(suite: Suite, plan: Plan, out: Path, options: RunOptions) -> tuple[Path, Plan]:
    """Return the folder of a run's parts and its plan; make the folder, and send jobs, if needed.

    Raises SuiteError if the folder holds another plan, or the plan cannot be shared in this way.
    """
    plan = replace(plan, origin=dict(options.origin or {}))
    _require_new(suite, plan, out)
    folder = parts_of(out)
    if folder.exists():
        return folder, shared_folder.open_again(folder, plan, suite.text)
    shared_folder.create(folder, plan, suite.text)
    try:
        if plan.by != "devices":
            cluster_jobs.send(folder, plan, plan.numbers)
    except SuiteError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return folder, plan


def resume(run: Path, options: RunOptions = RunOptions()) -> Path:  # noqa: B008 (frozen)
    """Measure the rest of a run that is in parts, and return the run."""
    folder = parts_of(run)
    plan, suite = shared_folder.read(folder)
    shared_folder.repair(folder, plan, suite.text)
    return _measure(folder, suite, plan, options)


def _measure(folder: Path, suite: Suite, plan: Plan, options: RunOptions) -> Path:
    measure = _measure_on_this_host if plan.by == "devices" else cluster_jobs.measure_parts
    measure(folder, suite, plan, options)
    return finish(folder, plan, suite)


def _require_new(suite: Suite, plan: Plan, out: Path) -> None:
    (device, count), *_ = Counter(plan.devices).most_common(1)
    if plan.by == "devices" and count > 1:
        raise SuiteError(f"--devices: expected each device once, found {device} twice")
    require_new(out)
    count, parts = len(plan.contests(suite)), len(plan.devices)
    if parts > count:
        expected = f"at most {count} parts, one for each problem"
        raise SuiteError(f"{suite.name}: expected {expected}; found {parts}")


def _measure_on_this_host(folder: Path, suite: Suite, plan: Plan, options: RunOptions) -> None:
    done: Counter[int] = Counter()  # contests, by part
    total = len(plan.contests(suite)) * plan.flags.replicates
    parts: list[PlanPart] = []

    def measure_part(index: int) -> None:
        def show(count: int, _: int, problem: str) -> None:
            done[index] = count
            options.progress(done.total(), total, problem)

        shown = replace(options, progress=show)
        work(folder, plan, suite, index + 1, shown, on_start=parts.append)

    on_each_device(plan.devices, measure_part, parts, merged_at(folder))


def on_each_device(
    devices: Sequence[str],
    call: Callable[[int], None],
    parts: Sequence[PlanPart],
    path: Path,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Call with the index of each device, in threads that have separate CPUs.

    On Ctrl-C or the first error, call `stopping` and end all `parts`. Raises that error, or Stopped
    with the path.
    """
    cpus = apart(devices)

    def pinned_call(index: int) -> None:
        os.sched_setaffinity(0, cpus[index])  # for this thread, and for the workers it starts
        call(index)

    with ThreadPoolExecutor(len(devices)) as threads:
        running = [threads.submit(pinned_call, index) for index in range(len(devices))]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
            errors = [error for future in ended if (error := future.exception())]
        except KeyboardInterrupt as stop:
            errors = [Stopped(path)]
            errors[0].__cause__ = stop
        if errors:
            stopping()
            _end(parts, running)
            raise errors[0]


def _end(parts: Sequence[PlanPart], running: Sequence[Future[None]]) -> None:
    left: set[Future[None]] = set(running)
    while left:
        for part in parts:
            part.stop()
        _, left = wait(left, timeout=STOP_S)
