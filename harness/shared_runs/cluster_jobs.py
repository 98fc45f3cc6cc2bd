"""A plan shared out over the jobs of a cluster, one GPU a job, through submitit.

    RUN.shards ─> an array job of as many parts ─> each claims contests until none is left
               ─> squeue, every POLL_S: a part whose job is gone before it is done is sent again
               ─> all parts done ─> merged into RUN

The state is in RUN.shards, on the file system that the hosts share: whoever waits may stop, and
another process goes on. Whether a part is done its run directory tells, and no accounting of the
scheduler: that may be off, and a controller that starts again does not answer meanwhile.

Near its time limit a job is told by a signal, keeps what it has, and is queued again.
"""

import os
import secrets
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import Progress, RunOptions, Stopped
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.local_gpus import prepared
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.part_work import settle, work
from sparsebench.harness.shared_runs.shared_folder import Plan, Share
from sparsebench.results import files, store

POLL_S = {"slurm": 10.0, "local": 1.0}
OPTIONS = {"slurm": "--slurm", "local": "--submit local"}
TRIES = 3  # jobs of a part that may end one after the other without a new contest
MINUTES = 240  # of a job, unless `time` is given
TIMEOUTS = 1000  # how often a job may reach its limit and be queued again
ASK_S = 60.0  # for a controller that does not answer
FAILED = "launch failed"  # squeue's reason of a job that is held until somebody releases it


class Task:
    """What a job does: one part. submitit calls `checkpoint` near the time limit."""

    def __init__(self, folder: Path, number: int) -> None:
        """Keep where the plan is, and which part of it this is."""
        self.folder, self.number = folder, number

    def __call__(self) -> int:
        """Measure the part, and return its number."""
        plan = folders.read(self.folder)
        work(self.folder, plan, folders.suite(self.folder, plan), self.number)
        return self.number

    def checkpoint(self) -> Any:
        """Return what to queue again: the same task goes on with its run directory."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def job_name() -> str:
    """Return a name that the jobs of no other plan have."""
    return f"sparsebench-{secrets.token_hex(4)}"


def read_options(text: str) -> dict[str, Any]:
    """Read `partition=gpu time=60 gres=gpu:h200:1`; SuiteError says what was expected."""
    parts = [part.partition("=") for part in text.split()]
    if bad := [name for name, _, value in parts if not name or not value]:
        raise SuiteError(f"--slurm: expected NAME=VALUE, such as partition=gpu; found {bad[0]!r}")
    return {name: int(value) if value.isdigit() else value for name, _, value in parts}


def submit(
    suite: Suite,
    plan: Plan,
    out: Path,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> Path:
    """Send the plan to the cluster, wait for it, and return the merged run at `out`."""
    fresh = not (folders.beside(out) / "plan.json").exists()
    folder = prepared(out, suite, plan, options.pinned)
    try:
        if fresh:
            _send(folder, plan, folders.numbers(plan))
    except SuiteError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    return go_on(folder, suite, plan, options)


def go_on(
    folder: Path,
    suite: Suite,
    plan: Plan,
    options: RunOptions = RunOptions(),  # noqa: B008 (frozen)
) -> Path:
    """Wait for the jobs of a plan, send again those that were lost, and merge it."""
    asked = folders.contests(plan, suite)
    total = len(asked) * plan.flags.replicates
    tried: dict[int, tuple[int, int]] = {}  # of a part: contests done when it was sent, and jobs
    try:
        while True:
            alive = _alive(folder, plan)
            shares = list(folders.shares(folder, plan))
            lost = [] if alive is None else _lost(shares, alive, folders.unclaimed(folder, asked))
            _show(options.progress, shares, total, alive)
            if alive is not None and not alive and not lost:
                break
            for share in lost:
                before, count = tried.get(share.number, (share.contests, 0))
                count = 0 if share.contests > before else count
                if count == TRIES:
                    raise ResultError(_given_up(folder, share))
                tried[share.number] = share.contests, count + 1
            if lost:
                with suppress(SuiteError):  # a controller that is away for now: asked again
                    _send(folder, plan, [share.number for share in lost])
            time.sleep(POLL_S[plan.by])
    except KeyboardInterrupt as stop:
        raise Stopped(folders.merged_at(folder)) from stop
    runs = settle(folder, plan, suite)
    return merge(runs, folders.merged_at(folder), plan.flags.data, plugins=True)


def executor(plan: Plan, folder: Path) -> Any:
    """Return submitit's executor; SuiteError where there is no such cluster or option."""
    try:
        import submitit
    except ModuleNotFoundError as error:
        hint = "pip install 'sparsebench[cluster]'"
        raise SuiteError(f"{OPTIONS[plan.by]}: expected submitit, found none; {hint}") from error
    python = f"{shlex.quote(sys.executable)} -P"  # the working directory holds our folders
    given = dict(plan.options)
    kind = submitit.SlurmExecutor if plan.by == "slurm" else submitit.LocalExecutor
    try:
        found = kind(folder, max_num_timeout=TIMEOUTS, python=python)
        if plan.by == "slurm":
            if not simulated(plan.devices[0]) and plan.devices[0] != "cpu":
                given = {"gres": "gpu:1"} | given
            found.update_parameters(**{"time": MINUTES, "job_name": plan.job, **given})
        else:
            seen = os.environ.get("CUDA_VISIBLE_DEVICES")
            set_to = "unset CUDA_VISIBLE_DEVICES"
            if seen is not None:
                set_to = f"export CUDA_VISIBLE_DEVICES={shlex.quote(seen)}"
            found.update_parameters(timeout_min=MINUTES, setup=[set_to], **given)
    except (RuntimeError, ValueError, TypeError) as error:
        line = " ".join(str(error).split())
        expected = f"expected a cluster and options of it; {line}"
        raise SuiteError(f"{OPTIONS[plan.by]}: {expected}") from error
    return found


def _send(folder: Path, plan: Plan, numbers: Iterable[int]) -> None:
    """Submit jobs for parts and remember their ids; SuiteError where the cluster takes none."""
    wanted = list(numbers)
    try:
        sender = executor(plan, (folder / "jobs").absolute())
        tasks = [Task(folder.absolute(), number) for number in wanted]
        if len(tasks) == 1:
            sent = [sender.submit(tasks[0])]
        else:
            with sender.batch():
                sent = [sender.submit(task) for task in tasks]
    except SuiteError:
        raise
    except Exception as error:  # submitit raises what sbatch said, in several classes
        line = " ".join(str(error).split())[-300:]
        expected = f"expected a cluster that takes jobs; {line}"
        raise SuiteError(f"{OPTIONS[plan.by]}: {expected}") from error
    known = jobs(folder)
    for number, job in zip(wanted, sent, strict=True):
        known.setdefault(str(number), []).append(str(job.job_id))
    store.write_json(folder / "jobs" / "jobs.json", known)


def jobs(folder: Path) -> dict[str, list[str]]:
    """Return the ids of each part's jobs, the last one last."""
    file = folder / "jobs" / "jobs.json"
    return files.from_json(file) if file.exists() else {}


def _alive(folder: Path, plan: Plan) -> dict[int, str] | None:
    """Return the state of each part that has a job, queued or running; None: nobody can say."""
    known = [(int(number), job) for number, ids in jobs(folder).items() for job in ids]
    if plan.by == "local":
        return {number: "RUNNING" for number, job in known if _runs(job)}
    command = ["squeue", "--noheader", "--array", "--format=%i %T %r", f"--name={plan.job}"]
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASK_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    lines = [line.split(maxsplit=2) for line in told.stdout.splitlines() if line.strip()]
    states = {job: state for job, state, *reason in lines if FAILED not in "".join(reason)}
    return {number: states[job] for number, job in known if job in states}


def _runs(job: str) -> bool:
    """Say whether a local job's process is there; one that nobody has waited for has no words."""
    with suppress(OSError):
        return b"submitit" in Path(f"/proc/{job}/cmdline").read_bytes()
    return False


def _lost(shares: Sequence[Share], alive: Mapping[int, str], unclaimed: int) -> list[Share]:
    """Return the parts to send again: begun and not done; or any one, for what nobody claimed."""
    gone = [share for share in shares if share.number not in alive]
    lost = [share for share in gone if not share.complete]
    return lost or (gone[:1] if unclaimed and not alive else [])


def _show(
    progress: Progress, shares: Sequence[Share], total: int, alive: Mapping[int, str] | None
) -> None:
    done = sum(share.contests for share in shares)
    if alive is None:
        said = "the scheduler does not answer"
    else:
        states = sorted(set(alive.values()))
        counts = [f"{list(alive.values()).count(state)} {state.lower()}" for state in states]
        said = f"jobs: {', '.join(counts) or 'none left'}"
    progress(min(done, total), total, said)


def _given_up(folder: Path, share: Share) -> str:
    """Say of a part whose jobs end without a new contest what the last one said."""
    job = jobs(folder)[str(share.number)][-1]
    logs = sorted((folder / "jobs").glob(f"{job}_*_log.err"))
    lines = logs[-1].read_text("utf-8", "replace").splitlines() if logs else []
    words = " | ".join(line.strip() for line in lines if line.strip())[-400:]
    said = f"found {TRIES} jobs that ended without one; the last, {job}: {words or 'no words'}"
    return f"{folder / str(share.number)}: expected new contests of part {share.number}, {said}"
