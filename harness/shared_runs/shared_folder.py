"""The folder in which several GPUs share a plan: RUN.shards, beside the run that it will become.

    plan.json      flags, how it is shared (devices, or jobs), what it reproduces
    suite.yaml     the suite, byte for byte
    pinned.json    choices of another run, where it takes them
    claims/        which part has which problem; alike.json, what all share (run/plan_part.py)
    3/1            part 3: a run directory; 3/2 is what it went on with on another GPU
    3/suite.yaml   whoever measures part 3 holds a lock on it
    jobs/          of a cluster: what submitit writes, and jobs.json: the ids of each part's jobs

It is on a file system that all hosts share, and it is the whole state: any process that sees it can
tell how far the plan is, go on with it, and merge it. It holds paths of this machine; the merged
run holds none.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.plan.selection import planned
from sparsebench.harness.plan.suite import Contest, Suite, expand
from sparsebench.harness.run.plan_part import owners
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.runner import Pinned
from sparsebench.results import files, store
from sparsebench.results.provenance import device_id_at

SCHEMA = "sparsebench/shards@1"


@dataclass(frozen=True)
class Plan:
    """What is shared out, and how.

    devices  one a part; a part of a job that is given its own GPU has the name of that one
    by       "devices": threads of one process; "slurm" or "local": jobs
    options  of the jobs: partition, time, gres ...
    job      a name that the jobs have and no others
    """

    suite: str
    flags: Flags
    devices: tuple[str, ...]
    by: str = "devices"
    options: Mapping[str, Any] = field(default_factory=dict)
    job: str = ""
    origin: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Share:
    """How far a part is: `contests` done, and whether it is complete; `device` is its last one."""

    number: int
    contests: int
    complete: bool
    device: str
    status: str


def beside(run: Path) -> Path:
    """Return where the parts of a run are; RUN.shards itself is taken, too."""
    return run if run.name.endswith(".shards") else run.with_name(f"{run.name}.shards")


def merged_at(folder: Path) -> Path:
    """Return where the merged run is to be."""
    return folder.with_name(folder.name.removesuffix(".shards"))


def create(folder: Path, plan: Plan, text: str, pinned: Sequence[Pinned] = ()) -> None:
    """Make the folder, whole or not at all; ResultError where one is in its place."""
    with store.new_directory(folder) as fresh:
        (fresh / "claims").mkdir()
        (fresh / "suite.yaml").write_text(text)
        for number in numbers(plan):
            (fresh / str(number)).mkdir()
            (fresh / str(number) / "suite.yaml").write_text(text)
        if pinned:
            store.write_json(fresh / "pinned.json", list(pinned))
        flags = asdict(plan.flags)
        flags["data"] = str(plan.flags.data.absolute()) if plan.flags.data else None
        store.write_json(fresh / "plan.json", {"schema": SCHEMA, **asdict(plan), "flags": flags})


def read(folder: Path) -> Plan:
    """Read what is shared out; ResultError where it is not such a folder."""
    data = files.from_json(folder / "plan.json")
    if data.pop("schema", None) != SCHEMA:
        raise ResultError(f"{folder / 'plan.json'}: expected schema {SCHEMA}, found another")
    try:
        flags = data.pop("flags")
        flags["data"] = Path(flags["data"]) if flags["data"] else None
        return Plan(**{**data, "flags": Flags(**flags), "devices": tuple(data["devices"])})
    except (KeyError, TypeError) as error:
        raise ResultError(f"{folder / 'plan.json'}: expected a plan, found {error}") from error


def same(folder: Path, plan: Plan, text: str) -> None:
    """Refuse to go on with a folder of another plan."""
    before = read(folder)
    now = replace(plan, job=before.job, options=before.options)
    data = plan.flags.data.absolute() if plan.flags.data else None
    now = replace(now, flags=replace(plan.flags, data=data))
    if now != before or (folder / "suite.yaml").read_text() != text:
        expected = "the plan that is shared out there"
        raise SuiteError(f"{folder}: expected {expected}, found another suite or other options")


def suite(folder: Path, plan: Plan) -> Suite:
    """Return the suite that is shared out."""
    text = (folder / "suite.yaml").read_text()
    return replace(expand(str(folder / "suite.yaml"), text, plan.flags.data), name=plan.suite)


def contests(plan: Plan, asked: Suite) -> list[Contest]:
    """Return the contests that are shared out, those of the noise floor too."""
    return planned(asked, plan.flags.device, plan.flags.only, plan.flags.shard)


def numbers(plan: Plan) -> range:
    """Return the numbers of the parts."""
    return range(1, len(plan.devices) + 1)


def pieces(folder: Path, number: int) -> list[Path]:
    """Return the run directories of a part, in the order in which they were begun."""
    found = [run.parent for run in (folder / str(number)).glob("*/run.json")]
    return sorted(found, key=lambda run: int(run.name))


def pinned(folder: Path) -> list[Pinned]:
    """Return the choices that processes take from another run."""
    file = folder / "pinned.json"
    found: list[Pinned] = json.loads(file.read_text()) if file.exists() else []
    return found


def shares(folder: Path, plan: Plan) -> Iterator[Share]:
    """Yield how far each part is, as its run.json says."""
    claimed = set(owners(folder).values())
    for number in numbers(plan):
        runs = sorted(pieces(folder, number), key=lambda run: (run / "run.json").stat().st_mtime)
        states = [files.from_json(run / "run.json") for run in runs]
        done = sum(state["contests"]["done"] for state in states)
        status = states[-1]["status"] if states else "waiting"  # of the one written last
        complete = status == "finished" if states else number not in claimed
        device = device_id_at(runs[-1]) if runs else ""
        yield Share(number, done, complete, device, status)


def unclaimed(folder: Path, asked: Sequence[Contest]) -> int:
    """Return how many contests no part has taken yet."""
    return len({contest.problem.id for contest in asked} - owners(folder).keys())
