"""One part of a shared plan, measured in this process, or what is left of it.

    begun before on this GPU        that run directory is gone on with
    begun on another GPU            what is whole there is kept, and the rest goes into a new one
    nothing left to claim           nothing is made

A process that was killed leaves its run directory as it was: whoever comes next cuts it back to
whole contests and seals it.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sparsebench.errors import ResultError
from sparsebench.harness.machine.cpu_placement import boot
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import Contest, Suite
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.plan_part import Part
from sparsebench.harness.run.recorded_plan import completed_rows
from sparsebench.harness.run.run_json import Counts, Flags
from sparsebench.harness.run.worker_process import Log, Worker
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.shared_folder import Plan
from sparsebench.results import bundle, store
from sparsebench.results.provenance import device_id_at
from sparsebench.results.record import Row

Begun = Callable[[Part], None]
"""Called with the part before it is measured, so that another thread can stop it."""


def large_first(contest: Contest) -> int:
    """Rank contests with many contenders first, so that those that end a plan are short."""
    return -len(contest.contenders)


def work(
    folder: Path,
    plan: Plan,
    suite: Suite,
    number: int,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    begun: Begun = lambda part: None,
) -> None:
    """Measure a part until nothing is left to claim; a ResultError where another process does."""
    flags = _flags(plan, number)
    contests = planned(suite, flags.device, flags.only, flags.shard)
    with store.locked(folder / str(number)):
        pieces = folders.pieces(folder, number)
        here = _identity(flags) if pieces else ""
        same = [run for run in pieces if device_id_at(run) == here]
        earlier = list[Row]()
        for run in pieces:
            if run not in same:
                earlier += settled(run, suite, flags, contests)
        part = Part(folder, number, boot(), earlier)
        if not part.reserve(contests):
            return
        begun(part)
        pinned = folders.pinned(folder)
        rank = options.rank or large_first
        options = replace(options, rank=rank, part=part, pinned=pinned, origin=plan.origin)
        out = folder / str(number) / str(len(pieces) + 1)
        measure(suite, flags, None if same else out, same[-1] if same else None, options)


def settled(run: Path, suite: Suite, flags: Flags, contests: list[Contest]) -> list[Row]:
    """Return the rows of whole contests; seal a run that was killed with these alone."""
    rows = completed_rows(run, suite, flags, contests)
    if not (run / bundle.MANIFEST).exists() or len(rows) != len(store.rows(run)):
        with store.locked(run):
            state = dict(store.read(run).state)
            state.pop("schema")
            counts = Counts(rows)
            counted = {"done": len(counts.done), "of": state["contests"]["of"]}
            whole = counted["done"] == counted["of"]
            store.replace_rows(run, rows)
            ended = {"status": "finished" if whole else "interrupted", "contests": counted}
            store.set_state(run, state | ended | {"cases": dict(counts.cases)})
            bundle.seal(run)
    return rows


def settle(folder: Path, plan: Plan, suite: Suite) -> list[Path]:
    """Return the run directories of all parts, sealed; a ResultError where a part is at work."""
    found = []
    for number in folders.numbers(plan):
        flags = _flags(plan, number)
        contests = planned(suite, flags.device, flags.only, flags.shard)
        with store.locked(folder / str(number)):
            runs = folders.pieces(folder, number)
            found += [run for run in runs if settled(run, suite, flags, contests)]
    if not found:
        raise ResultError(f"{folder}: expected a contest that was measured, found none")
    return found


def _flags(plan: Plan, number: int) -> Flags:
    return replace(plan.flags, device=plan.devices[number - 1])


def _identity(flags: Flags) -> str:
    """Ask a worker which GPU this is: a part that goes on may be on another one."""
    worker = Worker(flags.device, flags.data, Log())
    worker.kill()
    return str(worker.about["identity"])
