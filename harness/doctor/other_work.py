"""Detect other work beside a run: once before it, and over all of it; 0.3 s in all.

    host    processor time of others    = busy time of all cores - our own, over the elapsed time
    GPU     before the run: other processes on it, and its utilization while our worker waited

Every run does this. The doctor checks more, and takes seconds. On a CPU other work slows down
the measured calls; beside a GPU it only delays launches.
"""

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sparsebench.harness.doctor import findings
from sparsebench.harness.doctor.findings import DoctorFinding
from sparsebench.harness.machine.nvml import NoNvml, board

STAT = Path("/proc/stat")
GLANCE_S = 0.3
TAKEN = {"cpu": (0.1, 0.25), "cuda": (0.5, 0.9)}  # share of all cores: a note, a warning
CHECK = "other work on the host"


@dataclass(frozen=True)
class Spent:
    """Seconds: the time, the busy time of all cores, and that of this process and its children."""

    at_s: float
    busy_s: float
    own_s: float
    cores: int


def read_spent() -> Spent | None:
    """Read the counters, or return None. Children count once they have ended."""
    try:
        lines = STAT.read_text("utf-8").splitlines()
    except OSError:
        return None
    user, nice, system, _, _, irq, softirq, steal = map(int, lines[0].split()[1:9])
    busy_s = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    own_s = sum(os.times()[:4])  # user and system time, also of children
    cores = sum(line.startswith("cpu") for line in lines) - 1
    return Spent(time.monotonic(), busy_s, own_s, cores)


def before(kind: str, identity: str, worker: int) -> list[DoctorFinding]:
    """Look for other work while a worker (a process id) waits; `kind` is cpu or cuda."""
    began = read_spent()
    time.sleep(GLANCE_S)
    on_host = host(began, read_spent(), kind)
    return [on_host, gpu(identity, worker)] if kind == "cuda" else [on_host]


def host(began: Spent | None, now: Spent | None, kind: str) -> DoctorFinding:
    """Judge how many of the host's cores others used between two readings."""
    if began is None or now is None:
        return findings.unknown(CHECK)
    others_s = (now.busy_s - began.busy_s) - (now.own_s - began.own_s)
    cores = max(0.0, others_s / (now.at_s - began.at_s))
    reading = f"it used {cores:.1f} of {now.cores} cores"
    slow, unfit = (share * now.cores for share in TAKEN[kind])
    means = "Times vary, and speedups hold only for the remaining cores."
    if kind == "cuda":
        means = "It delays calls from Python, so their times vary."
    do = "End it, or wait until it ends."
    return findings.grade(cores, (slow, unfit), CHECK, reading, means, do)


def gpu(identity: str, worker: int) -> DoctorFinding:
    """Judge other processes on a GPU; our idle worker is one of its processes."""
    try:
        with board(identity) as card:
            listed, rates = card.ask("ComputeRunningProcesses_v3"), card.ask("UtilizationRates")
    except NoNvml as error:
        return findings.note("other work on the GPU", str(error))
    pids = None if listed is None else _others([process.pid for process in listed], worker)
    busy_percent = None if rates is None else float(rates.gpu)  # over the last second or less
    return findings.others(pids, busy_percent)


def _others(pids: Sequence[int], worker: int) -> list[int]:
    """Leave out the worker; if ids are of another namespace, it is any one of those listed."""
    return [pid for pid in pids if pid != worker] if worker in pids else list(pids)[1:]
