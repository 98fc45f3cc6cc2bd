"""A plan shared out over the jobs of a cluster, one GPU a job, through submitit.

    RUN.parts ─> an array job with one task per part ─> each reserves contests until none is left
               ─> squeue, every POLL_S: a part whose job ended before it was done is sent again

The state is in RUN.parts, on the file system that the hosts share, so the waiting process may stop
and another one may resume. A part is done if its run directory says so. The scheduler's accounting
is not used, because it may be off, or not answer while a controller restarts.

Near its time limit a job receives a signal, keeps its results, and is queued again.
"""

import secrets
import shlex
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.plan.suite import Suite
from sparsebench.harness.run.measure import RunOptions, Stopped
from sparsebench.harness.shared_runs import shared_folder
from sparsebench.harness.shared_runs.run_paths import merged_at
from sparsebench.harness.shared_runs.shared_folder import PartProgress, Plan, work
from sparsebench.results import files
from sparsebench.results.run import store

POLL_S = 10.0
TRIES = 3  # jobs of a part that may end one after the other without a new contest
MINUTES = 240  # time limit of a job, unless `time` sets it
TIMEOUTS = 1000  # how often a job may reach its limit and be queued again
SQUEUE_S = 60.0  # then the controller is taken as away, and the next round retries
LOST = "lost"  # a part whose job the scheduler has ended or forgotten
FAILED = "launch failed"  # squeue's reason for a job that is held until an operator releases it


class Task:
    """What a job runs: one part. submitit calls `checkpoint` near the time limit."""

    def __init__(self, folder: Path, number: int) -> None:
        self.folder, self.number = folder, number

    def __call__(self) -> int:
        plan, suite = shared_folder.read(self.folder)
        work(self.folder, plan, suite, self.number)
        return self.number

    def checkpoint(self) -> Any:
        """Return what to queue again: the same task, which resumes its run directory."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def job_name() -> str:
    """Return a name that no other plan's jobs have."""
    return f"sparsebench-{secrets.token_hex(4)}"


def read_options(text: str) -> dict[str, Any]:
    """Read `partition=gpu time=60 gres=gpu:h200:1`. Raises SuiteError."""
    pairs = [pair.partition("=") for pair in text.split()]
    if bad := [name for name, _, value in pairs if not name or not value]:
        raise SuiteError(f"--slurm: expected NAME=VALUE, such as partition=gpu; found {bad[0]!r}")
    return {name: int(value) if value.isdigit() else value for name, _, value in pairs}


def measure_parts(folder: Path, suite: Suite, plan: Plan, options: RunOptions) -> None:
    """Wait until the jobs have measured the plan, and send lost ones again."""
    contests = plan.contests(suite)
    total = len(contests) * plan.flags.replicates
    tried: dict[int, tuple[int, int]] = {}  # by part: contests done when it was sent, and jobs
    try:
        while True:
            alive = _alive(folder, plan)
            parts = list(shared_folder.progress(folder, plan))
            free = shared_folder.count_free(folder, plan, contests)
            ended = [] if alive is None else [part for part in parts if part.number not in alive]
            lost = [part for part in ended if not part.complete]
            if free and not alive:
                lost = lost or ended[:1]  # any part can take a problem that is free
            done = min(sum(part.contests for part in parts), total)
            options.progress(done, total, _describe(alive, len(lost)))
            if alive is not None and not alive and not lost:
                return
            for part in lost:
                before, count = tried.get(part.number, (part.contests, 0))
                count = 0 if part.contests > before else count
                if count == TRIES:
                    raise ResultError(_given_up(folder, part))
                tried[part.number] = part.contests, count + 1
            if lost:
                with suppress(SuiteError):  # the controller may be away; the next round retries
                    send(folder, plan, [part.number for part in lost])
            time.sleep(POLL_S)
    except KeyboardInterrupt as stop:
        raise Stopped(merged_at(folder)) from stop


def send(folder: Path, plan: Plan, numbers: Iterable[int]) -> None:
    """Submit jobs for parts and record their ids.

    Raises SuiteError if there is no such cluster or option, or the cluster takes no jobs.
    """
    sender = _executor(plan, (folder / "jobs").absolute())
    numbers = list(numbers)
    tasks = [Task(folder.absolute(), number) for number in numbers]
    try:
        with sender.batch() if len(tasks) > 1 else nullcontext():
            new_jobs = [sender.submit(task) for task in tasks]
    except Exception as error:  # submitit raises what sbatch printed, in several classes
        line = " ".join(str(error).split())[-300:]
        expected = f"expected a cluster that takes jobs; {line}"
        raise SuiteError(f"--slurm: {expected}") from error
    ids = jobs(folder)
    for number, job in zip(numbers, new_jobs, strict=True):
        ids.setdefault(str(number), []).append(str(job.job_id))
    store.write_json(folder / "jobs" / "jobs.json", ids)


def _executor(plan: Plan, folder: Path) -> Any:
    try:
        import submitit
    except ModuleNotFoundError as error:
        hint = "pip install 'sparsebench[cluster]'"
        raise SuiteError(f"--slurm: expected submitit, found none; {hint}") from error
    python = f"{shlex.quote(sys.executable)} -P"  # the working directory holds our folders
    parameters = dict(plan.options)
    try:
        executor = submitit.SlurmExecutor(folder, max_num_timeout=TIMEOUTS, python=python)
        if plan.devices[0].startswith("cuda"):
            parameters = {"gres": "gpu:1"} | parameters
        executor.update_parameters(**{"time": MINUTES, "job_name": plan.job, **parameters})
    except (RuntimeError, ValueError, TypeError) as error:
        line = " ".join(str(error).split())
        expected = f"expected a cluster and options of it; {line}"
        raise SuiteError(f"--slurm: {expected}") from error
    return executor


def jobs(folder: Path) -> dict[str, list[str]]:
    """Return the ids of each part's jobs, oldest first."""
    file = folder / "jobs" / "jobs.json"
    return files.from_json(file) if file.exists() else {}


def _alive(folder: Path, plan: Plan) -> dict[int, str] | None:
    """Return the state of each part with a job that is queued or running; None if unknown."""
    ids = [(int(number), job) for number, each in jobs(folder).items() for job in each]
    command = ["squeue", "--noheader", "--array", "--format=%i %T %r", f"--name={plan.job}"]
    try:
        reply = subprocess.run(command, capture_output=True, timeout=SQUEUE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    text = reply.stdout.decode("utf-8", "replace")
    lines = [line.split(maxsplit=2) for line in text.splitlines() if line.strip()]
    states = {job: state for job, state, *reason in lines if FAILED not in "".join(reason)}
    return {number: states[job] for number, job in ids if job in states}


def statuses(folder: Path, plan: Plan, parts: Iterable[PartProgress]) -> dict[int, str]:
    """Return a word for each part: its own status, or lost if its job ended before it was done."""
    alive = None if plan.by == "devices" else _alive(folder, plan)
    running = plan.numbers if alive is None else alive
    return {p.number: p.status if p.complete or p.number in running else LOST for p in parts}


def _describe(alive: Mapping[int, str] | None, lost: int) -> str:
    if alive is None:
        return "the scheduler does not answer"
    counts = sorted(Counter([*alive.values(), *[LOST] * lost]).items())
    return f"jobs: {', '.join(f'{n} {name.lower()}' for name, n in counts) or 'none left'}"


def _given_up(folder: Path, part: PartProgress) -> str:
    job = jobs(folder)[str(part.number)][-1]
    logs = sorted((folder / "jobs").glob(f"{job}_*_log.err"))
    lines = logs[-1].read_text("utf-8", "replace").splitlines() if logs else []
    words = " | ".join(line.strip() for line in lines if line.strip())[-400:]
    message = f"found {TRIES} jobs that ended without one; the last, {job}: {words or 'no output'}"
    return f"{folder / str(part.number)}: expected new contests of part {part.number}, {message}"
