"""Worker processes that start before the run is planned, because importing torch takes seconds.

    command ─> start: workers import, without a device          ┐ at the same time
            ─> the command itself imports torch, reads, plans   ┘
            ─> worker_process.py takes them as first workers    ┐ at the same time
            ─> import_meanwhile: what the report needs          ┘

A process that no run takes ends with the command. Nothing here imports torch.
"""

import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from threading import Thread

from sparsebench.harness.machine.stand_in import stand_in

PYTHON = sys.executable, "-P", "-m"  # -P: our folders must not shadow packages of the same name
COMMAND = *PYTHON, "sparsebench.harness.run.worker"
AHEAD = max(1, len(os.sched_getaffinity(0)) // 2)  # workers that import while another one starts

Process = subprocess.Popen[str]

idle_processes: list[Process] = []
_threads: list[Thread] = []


def spawn(*command: str) -> Process:
    """Start a process connected by pipes, in its own session: Ctrl-C reaches the parent alone."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace",
        start_new_session=True,
    )  # fmt: skip


def start(device: str | None, devices: int, processes: int) -> None:
    """Start the first workers of a run; they import and wait. A stand-in needs none."""
    if not stand_in(device or ""):
        count = devices and max(devices, min(processes, 1 + AHEAD))
        idle_processes.extend(spawn(*COMMAND) for _ in range(count))


def take() -> Process | None:
    """Return a process that was started early, or None if none is left."""
    try:
        return idle_processes.pop()  # several threads may call this at once
    except IndexError:
        return None


def import_meanwhile(*modules: str) -> None:
    """Import modules in a thread; `wait_for_imports` waits for it.

    An import error appears when the module is imported again to be used.
    """

    def import_all() -> None:
        for module in modules:
            with suppress(Exception):
                import_module(module)

    _threads.append(Thread(target=import_all, daemon=True))
    _threads[-1].start()


def wait_for_imports() -> None:
    while _threads:
        _threads.pop().join()


def end() -> None:
    """End the processes that no run took."""
    while process := take():
        with process:  # closes its pipes, and waits
            process.kill()
