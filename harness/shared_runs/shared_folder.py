"""RUN.parts: the folder in which a plan is measured in parts, beside the run that it becomes.

    plan.json      flags, how the plan is shared (devices, or jobs), what it reproduces
    suite.yaml     the suite, byte for byte
    reserved/      which part has reserved which problem; alike.json (run/plan_part.py)
    3/1            a piece of part 3: a run directory, which belongs to the GPU that measured it
    3/2            what part 3 measured later, on another GPU
    3/suite.yaml   locked by the process that measures part 3
    jobs/          of a cluster: files of submitit, and jobs.json with the ids of each part's jobs

Devices of a host, jobs of a cluster and sittings of a campaign all measure into such a folder; a
plan of a campaign has one part. The folder is on a file system that all hosts share, or is carried
from one to the next, and it is the whole state: any process that sees it can tell how far the plan
is, resume it, and finish it. It holds paths of this machine, which the run does not.

`work` measures a part in this process. It resumes a piece that was begun on this GPU; of one that
was begun on another GPU it keeps the whole contests, and measures the rest in a new piece. A
process that was killed leaves its piece as it was; the next process cuts it back to whole contests
and seals it. The contests of a piece that was lost are measured again.

`finish` makes the run once no contest is missing: it is the only piece, or all of them merged.
"""

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from sparsebench._writing import write_file
from sparsebench.errors import SuiteError
from sparsebench.harness.machine.cpu_placement import boot
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Contest, Suite, expand
from sparsebench.harness.run.measure import RunOptions, Unfinished, measure
from sparsebench.harness.run.plan_part import PlanPart, owners
from sparsebench.harness.run.recorded_plan import completed_rows
from sparsebench.harness.run.run_json import Counts, Flags
from sparsebench.harness.run.worker_process import about_device
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.run_paths import merged_at, pieces_of
from sparsebench.results import files
from sparsebench.results.record import Row
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import device_id_at

SCHEMA = "sparsebench/parts@1"


@dataclass(frozen=True)
class Plan:
    """What is shared out, and how.

    devices  one per part; for jobs, the name of the GPU that each job is given
    by       "devices" for threads of one process, "slurm" for jobs
    options  of the jobs: partition, time, gres ...
    job      a name that no other plan's jobs have
    """

    suite: str
    flags: Flags
    devices: tuple[str, ...]
    by: str = "devices"
    options: Mapping[str, Any] = field(default_factory=dict)
    job: str = ""
    origin: Mapping[str, Any] = field(default_factory=dict)

    @property
    def numbers(self) -> range:
        return range(1, len(self.devices) + 1)

    @property
    def is_one_part(self) -> bool:
        return len(self.devices) == 1

    def flags_of(self, number: int) -> Flags:
        return replace(self.flags, device=self.devices[number - 1])

    def contests(self, suite: Suite) -> list[Contest]:
        flags = self.flags
        return planned_contests(suite, flags.device, flags.only, flags.unpruned)


@dataclass(frozen=True)
class PartProgress:
    """How far a part is; `device` is the last one that measured for it."""

    number: int
    contests: int
    complete: bool
    device: str
    status: str


def create(folder: Path, plan: Plan, text: str) -> None:
    """Create the folder atomically. Raises ResultError if it exists."""
    with store.new_directory(folder) as fresh:
        (fresh / "reserved").mkdir()
        write_file(fresh / "suite.yaml", text)
        for number in plan.numbers:
            (fresh / str(number)).mkdir()
            write_file(fresh / str(number) / "suite.yaml", text)
        flags = asdict(plan.flags)
        flags["data"] = str(plan.flags.data.absolute()) if plan.flags.data else None
        data = {"schema": SCHEMA, **asdict(plan), "flags": flags}
        store.write_json(fresh / "plan.json", data)


def repair(folder: Path, plan: Plan, text: str) -> None:
    """Restore deleted folders of parts; their lost contests are measured again."""
    for name in ("reserved", *map(str, plan.numbers)):
        (folder / name).mkdir(exist_ok=True)
    for number in plan.numbers:
        if not (suite := folder / str(number) / "suite.yaml").exists():
            write_file(suite, text)


def read_plan(folder: Path) -> Plan:
    """Read the plan. Raises ResultError if the folder holds none, or one of another version."""
    return files.read_model(folder / "plan.json", Plan, SCHEMA)


def read(folder: Path) -> tuple[Plan, Suite]:
    """Read the plan and the suite, with source files where the plan had them."""
    plan = read_plan(folder)
    text = files.text(folder / "suite.yaml", files.YAML_BYTES)
    suite = expand(str(folder / "suite.yaml"), text, plan.flags.data)
    return plan, replace(suite, name=plan.suite)


def open_again(folder: Path, plan: Plan, text: str) -> Plan:
    """Return the plan that a folder holds, on the devices and by the data of `plan`.

    Raises SuiteError if the folder holds another plan.
    """
    before = read_plan(folder)
    elsewhere = {name: getattr(plan.flags, name) for name in ("device", "data", "timeout_s")}
    here = replace(before, flags=replace(before.flags, **elsewhere))
    if len(plan.devices) == len(before.devices):
        here = replace(here, devices=plan.devices)
    same = replace(plan, job=before.job, options=before.options)
    if here != same or (folder / "suite.yaml").read_text("utf-8") != text:
        expected = "the plan that is measured there"
        raise SuiteError(f"{folder}: expected {expected}, found another suite or other options")
    repair(folder, here, text)
    return here


def progress(folder: Path, plan: Plan) -> Iterator[PartProgress]:
    """Yield how far each part is, from its run.json."""
    with_work = {1} if plan.is_one_part else set(owners(folder).values())
    for number in plan.numbers:
        mtime = lambda run: (run / "run.json").stat().st_mtime  # noqa: E731
        runs = sorted(pieces_of(folder, number), key=mtime)
        states = [files.from_json(run / "run.json") for run in runs]
        yield PartProgress(
            number,
            contests=sum(state["contests"]["done"] for state in states),
            complete=states[-1]["status"] == "finished" if states else number not in with_work,
            device=device_id_at(runs[-1]) if runs else "",
            status=states[-1]["status"] if states else "waiting",
        )


def count_free(folder: Path, plan: Plan, contests: Sequence[Contest]) -> int:
    """Return how many problems no part has reserved yet; a plan of one part reserves none."""
    problems = {contest.problem.id for contest in contests}
    return 0 if plan.is_one_part else len(problems - owners(folder).keys())


OnStart = Callable[[PlanPart], None]
"""Called with a part before it is measured, so that another thread can stop it."""


def work(
    folder: Path,
    plan: Plan,
    suite: Suite,
    number: int,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
    *,
    on_start: OnStart = lambda part: None,
) -> None:
    """Measure a part until no problem is free.

    Raises ResultError if another process measures it.
    """
    flags = plan.flags_of(number)
    with store.lock_run(folder / str(number)):
        runs = pieces_of(folder, number)
        card = str(about_once(flags.device, flags.data)["identity"]) if runs else ""
        ours, earlier = _split_by_card(runs, card, suite, plan)
        part = PlanPart(folder, number, boot(), earlier, alone=plan.is_one_part)
        if not part.reserve(plan.contests(suite)):
            return
        on_start(part)
        # Contests with many contenders first, so that the last ones of a plan are short.
        rank = options.rank or (lambda contest: -len(contest.contenders))
        options = replace(options, rank=rank, part=part, origin=plan.origin)
        places = (folder / str(number) / str(count) for count in itertools.count(1))
        out = None if ours else next(place for place in places if not place.exists())
        measure(suite, flags, out, ours, options)


@cache
def about_once(device: str, data: Path | None) -> dict[str, Any]:
    """Return what a worker says about a device; starting one takes 14 s, so it is asked once."""
    return about_device(device, data)


def _split_by_card(
    pieces: Sequence[Path], card: str, suite: Suite, plan: Plan
) -> tuple[Path | None, list[Row]]:
    """Return the last piece of this card, to be resumed, and the rows of other cards' pieces."""
    ours = [piece for piece in pieces if device_id_at(piece) == card]
    others = [piece for piece in pieces if piece not in ours]
    rows = [row for piece in others for row in _seal_completed(piece, suite, plan)]
    return (ours[-1] if ours else None), rows


def _seal_completed(run: Path, suite: Suite, plan: Plan) -> list[Row]:
    """Return the rows of whole contests; seal a run that was killed with these alone."""
    rows = completed_rows(run, suite, plan.flags, plan.contests(suite))
    if not (run / bundle.MANIFEST).exists() or len(rows) != len(store.rows(run)):
        with store.lock_run(run):
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


def finish(folder: Path, plan: Plan, suite: Suite) -> Path:
    """Make the run of its parts, remove them, and return it; raise Unfinished if it is not whole.

    Raises ResultError if a process still measures a part.
    """
    rows, out = dict[Path, list[Row]](), merged_at(folder)
    for number in plan.numbers:
        with store.lock_run(folder / str(number)):
            rows |= {p: _seal_completed(p, suite, plan) for p in pieces_of(folder, number)}
    pieces = [piece for piece, measured in rows.items() if measured]
    done = len(Counts(row for piece in pieces for row in rows[piece]).done)
    of = len(plan.contests(suite)) * plan.flags.replicates
    if done < of:
        raise Unfinished(out, done, of)
    if len(pieces) == 1:
        bundle.verify(pieces[0])
        state = dict(store.read(pieces[0]).state)
        for name in ("schema", "part"):  # it is the whole run, no part
            state.pop(name, None)
        bundle.unseal(pieces[0])
        store.set_state(pieces[0], state)
        bundle.seal(pieces[0])
        pieces[0].rename(out)
    else:
        merge(pieces, out, suite)
    shutil.rmtree(folder)
    return out
