"""A plan shared out over the GPUs of this host: a thread a GPU, each with worker processes.

    thread i ─ CPUs near its GPU, none of another's ─> workers on devices[i] ─> RUN.shards/i/1
    all threads done ─> merged into RUN

The threads take contests from one plan as they go (harness/run/plan_part.py), so no GPU waits for
another until the last contest. They start side by side: imports and ceilings take no longer.
"""

import os
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from math import inf
from pathlib import Path

from sparsebench.errors import SuiteError
from sparsebench.harness.machine.cpu_placement import apart
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import Progress, RunOptions, Stopped
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.runner import Pinned
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.part_work import settle, work
from sparsebench.harness.shared_runs.shared_folder import Plan
from sparsebench.results import store
from sparsebench.results.files import utf8

STOP_S = 0.5  # between two looks at threads that are to end


def share(
    suite: Suite,
    flags: Flags,
    devices: Sequence[str],
    out: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> Path:
    """Run the suite on several devices and return the merged run at `out`.

    A run that was stopped goes on: its parts are beside `out`. Raises as `measure` and `merge` do.
    """
    plan = Plan(suite.name, flags, tuple(devices), origin=dict(options.origin or {}))
    folder = prepared(out, suite, plan, options.pinned)
    return go_on(folder, suite, plan, options)


def prepared(out: Path, suite: Suite, plan: Plan, pinned: Sequence[Pinned]) -> Path:
    """Return the folder of the parts, a new one or that of the same plan; SuiteError otherwise."""
    twice = [name for name, count in Counter(plan.devices).items() if count > 1]
    if plan.by == "devices" and twice:
        raise SuiteError(f"--devices: expected each device once, found {twice[0]} twice")
    if not utf8(str(out)):
        raise SuiteError(f"--out: expected a name in UTF-8, found {str(out)!a}")
    if not store.is_new(out):
        raise SuiteError(f"--out {out}: expected a new directory, found one")
    count = len(folders.contests(plan, suite))
    if len(plan.devices) > count:
        expected = f"{count} parts at most, one a problem"
        raise SuiteError(f"{suite.name}: expected {expected}, found {len(plan.devices)}")
    folder = folders.beside(out)
    if (folder / "plan.json").exists():
        folders.same(folder, plan, suite.text)
    else:
        folders.create(folder, plan, suite.text, pinned)
    return folder


def go_on(
    folder: Path,
    suite: Suite,
    plan: Plan,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> Path:
    """Measure what is left of a plan on the devices of this host, and merge it."""
    shown = _Shown(options.progress, len(folders.contests(plan, suite)) * plan.flags.replicates)
    parts: list[Part] = []
    cpus = apart(plan.devices)

    def one(number: int) -> None:
        os.sched_setaffinity(0, cpus[number - 1])  # of this thread, and of what it starts
        own = replace(options, progress=shown.of(number))
        work(folder, plan, suite, number, own, begun=parts.append)

    with ThreadPoolExecutor(len(plan.devices)) as threads:
        running = [threads.submit(one, number) for number in folders.numbers(plan)]
        try:
            ended, _ = wait(running, return_when=FIRST_EXCEPTION)
        except KeyboardInterrupt as stop:
            end(parts, running)
            raise Stopped(folders.merged_at(folder)) from stop
        failed = [error for future in ended if (error := future.exception())]
        if failed:
            end(parts, running)
            raise failed[0]
    return merge(
        settle(folder, plan, suite),
        folders.merged_at(folder),
        plan.flags.data,
        plugins=True,
        whole=options.until == inf,
    )


def end(parts: Sequence[Part], running: Sequence[Future[None]]) -> None:
    """End all threads, whatever they are doing, and wait for them."""
    left: set[Future[None]] = set(running)
    while left:
        for part in parts:
            part.stop()
        _, left = wait(left, timeout=STOP_S)


class _Shown:
    """Progress of several parts as one: contests done of all, and what a part measures now."""

    def __init__(self, progress: Progress, total: int) -> None:
        self._progress, self._total = progress, total
        self._done: dict[int, int] = {}

    def of(self, number: int) -> Progress:
        """Return what one part calls."""

        def show(done: int, total: int, problem: str) -> None:
            self._done[number] = done
            self._progress(sum(self._done.values()), self._total, problem)

        return show
