"""One part of a shared plan, measured in this process.

    begun before on this GPU     resume that run directory
    begun before on another GPU  keep its whole contests, and measure the rest in a new directory
    nothing left to claim        make nothing

A process that was killed leaves its run directory as it was; the next process cuts it back to whole
contests and seals it.
"""

import itertools
from collections.abc import Callable, Sequence
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
from sparsebench.harness.run.worker_process import about_device
from sparsebench.harness.shared_runs import shared_folder
from sparsebench.harness.shared_runs.shared_folder import Plan
from sparsebench.results import bundle, store
from sparsebench.results.provenance import device_id_at
from sparsebench.results.record import Row

Begun = Callable[[Part], None]
"""Called with a part before it is measured, so that another thread can stop it."""


def large_first(contest: Contest) -> int:
    """Rank contests with many contenders first, so that the last ones of a plan are short."""
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
    """Measure a part until nothing is left to claim.

    Raises ResultError if another process measures it.
    """
    flags = plan.flags_of(number)
    with store.locked(folder / str(number)):
        runs = shared_folder.runs_of(folder, number)
        device_id = str(about_device(flags.device, flags.data)["identity"]) if runs else ""
        ours, earlier = split(runs, device_id, suite, flags)
        part = Part(folder, number, boot(), earlier)
        if not part.reserve(planned(suite, flags.device, flags.only, flags.shard)):
            return
        begun(part)
        rank, pinned = options.rank or large_first, shared_folder.pinned(folder)
        options = replace(options, rank=rank, part=part, pinned=pinned, origin=plan.origin)
        places = (folder / str(number) / str(count) for count in itertools.count(1))
        out = None if ours else next(place for place in places if not place.exists())
        measure(suite, flags, out, ours, options)


def split(
    runs: Sequence[Path], device_id: str, suite: Suite, flags: Flags
) -> tuple[Path | None, list[Row]]:
    """Return the last run of this device, to be resumed, and the rows of other devices' runs."""
    ours = [run for run in runs if device_id_at(run) == device_id]
    others = [run for run in runs if run not in ours]
    rows = [row for run in others for row in seal_completed(run, suite, flags)]
    return (ours[-1] if ours else None), rows


def seal_completed(run: Path, suite: Suite, flags: Flags) -> list[Row]:
    """Return the rows of whole contests; seal a run that was killed with these alone."""
    rows = completed_rows(run, suite, flags, planned(suite, flags.device, flags.only, flags.shard))
    if not (run / bundle.MANIFEST).exists() or len(rows) != len(store.rows(run)):
        with store.locked(run):
            state = dict(store.read(run).state)
            state.pop("schema")
            counts = Counts(rows)
            contests = {"done": len(counts.done), "of": state["contests"]["of"]}
            status = "finished" if contests["done"] == contests["of"] else "interrupted"
            store.replace_rows(run, rows)
            ended = {"status": status, "contests": contests, "cases": dict(counts.cases)}
            store.set_state(run, state | ended)
            bundle.seal(run)
    return rows


def seal_all(folder: Path, plan: Plan, suite: Suite) -> list[Path]:
    """Return the run directories of all parts, sealed.

    Raises ResultError if a process still measures a part, or no contest was measured.
    """
    sealed = list[Path]()
    for number in plan.numbers:
        with store.locked(folder / str(number)):
            runs = shared_folder.runs_of(folder, number)
            sealed += [run for run in runs if seal_completed(run, suite, plan.flags_of(number))]
    if not sealed:
        raise ResultError(f"{folder}: expected a contest that was measured, found none")
    return sealed
