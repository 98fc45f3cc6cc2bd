"""A plan in a real Slurm: no row is lost or measured twice, whatever happens to jobs and nodes."""

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.machine import stand_in
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.validation import validate
from sparsebench.harness.shared_runs import cluster_jobs
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.run_paths import parts_of
from sparsebench.harness.shared_runs.shared_folder import Plan
from sparsebench.harness.shared_runs.sharing import share
from sparsebench.results.record import Row
from sparsebench.results.run import store
from tests.simulated.in_process import in_this_process
from tests.slurm import waiting_worker
from tests.slurm.box import Box, box, missing

pytest.importorskip("submitit")
pytestmark = [
    pytest.mark.slurm,
    pytest.mark.exhaustive,
    pytest.mark.skipif(bool(missing()), reason=missing() or "all is here"),
]
WAIT_S = 240.0
SUITE = """
schema: sparsebench/suite@1
title: In a cluster
problems:
  - {op: linear, n: 4096, k: 4096, m: [1, 16, 64, 512], dtype: bf16, pattern: blocks,
     block: [16, 64], sparsity: [0.5, 0.9, 0.99]}
contenders:
  - {format: bsr, kernel: bsr_triton, params: {block: $block}}
baselines:
  - {format: dense, kernel: cublas}
caches: [cold, hot]
"""
DRAIN = "nodename=n2", "state=drain", "reason=test"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    with box(tmp_path_factory.mktemp("slurm")) as sandbox:
        os.environ |= sandbox.environment
        yield sandbox
        del os.environ["SLURM_CONF"]


def until(true: Callable[[], object], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, f"{what}: not within {WAIT_S:g} s"
        time.sleep(0.2)


def send_signal(job: str, number: signal.Signals) -> None:
    """Send a signal to all processes of a job at once; scancel sends another one and waits."""
    array, _, task = job.partition("_")
    ids = {f"SLURM_JOB_ID={array}"}
    if task:
        ids = {f"SLURM_ARRAY_JOB_ID={array}", f"SLURM_ARRAY_TASK_ID={task}"}
    processes = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if ids <= set((process / "environ").read_text(errors="replace").split("\0")):
                processes.append(int(process.name))
    for process_id in processes:  # reading /proc takes a loaded host seconds, enough for a row
        with suppress(OSError):
            os.kill(process_id, number)


class Sent:
    """A plan that a thread submits, as `run --slurm` does, and its state as its folder shows it."""

    def __init__(self, suite: Path, out: Path, parts: int) -> None:
        self.suite, self.folder = read(str(suite)), parts_of(out)
        flags, devices = Flags("sim", replicates=2), ("sim",) * parts
        options = {"partition": "sim", "time": 60}
        self.plan = Plan(self.suite.name, flags, devices, "slurm", options, cluster_jobs.job_name())
        self.failed: list[BaseException] = []

        def go() -> None:
            try:
                share(self.suite, self.plan, out)
            except BaseException as error:
                self.failed.append(error)

        self.thread = threading.Thread(target=go)
        self.thread.start()
        until(lambda: len(cluster_jobs.jobs(self.folder)) == parts, "jobs sent")

    def done(self, number: int) -> int:
        return next(
            s.contests for s in folders.progress(self.folder, self.plan) if s.number == number
        )

    def job(self, number: int) -> str:
        return cluster_jobs.jobs(self.folder)[str(number)][-1]

    def ended(self, number: int) -> bool:
        """Say whether no process holds the lock of a part."""
        try:
            with store.lock_run(self.folder / str(number)):
                return True
        except ResultError:
            return False

    def tell(self, cluster: Box) -> str:
        logs = [log.read_text() for log in (self.folder / "jobs").glob("*_log.err")]
        return f"{self.failed} {cluster.ask('squeue').stdout} {logs}"


def test_nothing_that_happens_to_a_cluster_costs_a_row_or_makes_one_twice(
    cluster, tmp_path, monkeypatch
) -> None:
    monkeypatch.setattr(cluster_jobs, "POLL_S", 0.5)
    suite, out, hold = (tmp_path / name for name in ("cluster.yaml", "run", "hold"))
    suite.write_text(SUITE)
    hold.touch()
    monkeypatch.setenv(waiting_worker.FILE, str(hold))
    monkeypatch.setenv(stand_in.VARIABLE, "sim=tests.slurm.waiting_worker")
    sent = Sent(suite, out, 3)  # on two nodes of one CPU: one waits
    until(lambda: sent.done(1) > 1 and sent.done(2) > 1, "two parts begun")

    first, second = sent.job(1), sent.job(2)
    cluster.kill_controller()  # the controller goes and comes back: jobs stay meanwhile
    time.sleep(2)
    cluster.start_controller()
    until(lambda: cluster.nodes() & {"alloc", "mix"}, "the controller knows the nodes")

    send_signal(first, signal.SIGKILL)  # as on a host that is out of memory
    assert not cluster.ask("scontrol", "update", *DRAIN).returncode  # a node is drained: its job
    assert not cluster.ask("scontrol", "requeue", second).returncode  # begins again, on the other
    state = "squeue", "--noheader", "--array", "--format=%T", f"--jobs={second}"
    until(lambda: cluster.ask(*state).stdout.strip() == "PENDING", "the job is queued again")
    cluster.ask("scontrol", "update", f"jobid={second}", "starttime=now")  # not in two minutes

    until(lambda: len(cluster_jobs.jobs(sent.folder)["1"]) > 1, "the killed job is sent again")
    until(lambda: sent.ended(1), "no job has part 1")
    send_signal(sent.job(1), signal.SIGKILL)
    shutil.rmtree(sent.folder / "1" / "1")  # a shard is lost
    cluster.ask("scontrol", "update", "nodename=n2", "state=resume")
    until(lambda: sent.done(1) or sent.done(3), "a second part has begun again")
    hold.unlink()

    sent.thread.join(WAIT_S)
    assert not sent.thread.is_alive(), sent.tell(cluster)
    assert not sent.failed, sent.tell(cluster)
    assert all(line.checked for line in validate(out))
    in_this_process(monkeypatch)
    alone = store.read(measure(sent.suite, sent.plan.flags, tmp_path / "alone", None))
    merged = store.read(out)
    assert facts(merged.rows) == facts(alone.rows)
    assert Counter(map(key, merged.rows)).most_common(1)[0][1] == 1
    assert len(merged.state["shards"]) >= 2  # the third may find all claimed


def key(row: Row) -> tuple[object, ...]:
    return row.case.id, row.replicate, row.scope, row.cache


def facts(rows: list[Row]) -> dict[tuple[object, ...], tuple[float, ...]]:
    return {key(row): row.samples_us for row in rows}
