"""A plan shared out over the GPUs of this host: one thread per GPU, each with worker processes.

    thread i ─ CPUs near its GPU and for it alone ─> workers on devices[i] ─> RUN.shards/i/1

The threads take contests from one plan as they go (run/plan_part.py), so no GPU waits for another
until the last contest. They start at the same time, so imports and ceilings take no longer.
"""

import os
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path

from sparsebench.harness.machine.cpu_placement import apart
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions, Stopped
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.shared_runs.part_work import work
from sparsebench.harness.shared_runs.shared_folder import Plan, merged_at

STOP_S = 0.5  # between two checks of threads that are to end


def measure_parts(folder: Path, suite: Suite, plan: Plan, options: RunOptions) -> None:
    """Measure the rest of a plan on the devices of this host."""
    done: Counter[int] = Counter()  # contests, by part
    total = len(plan.contests(suite)) * plan.flags.replicates
    parts: list[Part] = []

    def measure_part(index: int) -> None:
        def show(count: int, _: int, problem: str) -> None:
            done[index] = count
            options.progress(done.total(), total, problem)

        shown = replace(options, progress=show)
        work(folder, plan, suite, index + 1, shown, begun=parts.append)

    on_each_device(plan.devices, measure_part, parts, merged_at(folder))


def on_each_device(
    devices: Sequence[str],
    call: Callable[[int], None],
    parts: Sequence[Part],
    path: Path,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Call with the index of each device, in threads with CPUs of their own.

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


def _end(parts: Sequence[Part], running: Sequence[Future[None]]) -> None:
    """Stop all parts, and wait until their threads have ended."""
    left: set[Future[None]] = set(running)
    while left:
        for part in parts:
            part.stop()
        _, left = wait(left, timeout=STOP_S)
