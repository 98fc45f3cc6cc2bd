"""Processes of workers, started before anything is known of a run: importing torch takes seconds.

    command ─> early: workers import, without a device          ┐ at the same time
            ─> the command itself imports torch, reads, plans   ┘
            ─> child.py makes them the first workers            ┐ at the same time
            ─> meanwhile: the command imports what reports need ┘

Those that nobody took end with the command. Nothing here imports torch.
"""

import os
import subprocess
import sys
from contextlib import suppress
from importlib import import_module
from threading import Thread

from sparsebench.harness.machine.parent_watch import WAIT

MEASURES = (sys.executable, "-P", "-m", "sparsebench.harness.run.worker")
# -P: the repository's own folders must not shadow installed packages of the same name.

AHEAD = max(1, len(os.sched_getaffinity(0)) // 4)  # workers that import beside another one

Process = subprocess.Popen[str]

_early: list[Process] = []
_importing: list[Thread] = []


def spawn(*command: str) -> Process:
    """Start a process of its own session, by pipes; Ctrl-C is for the parent, which ends it."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
        start_new_session=True,
    )  # fmt: skip


def early(device: str | None, devices: int, processes: int) -> None:
    """Start the first workers of a run, unless its device is simulated; they import and wait."""
    if not (device or "").startswith("sim"):
        count = devices and max(devices, min(processes, 1 + AHEAD))
        _early.extend(spawn(*MEASURES, WAIT) for _ in range(count))


def taken() -> Process | None:
    """Return a process that was started early, each once; None if there is none left."""
    try:
        return _early.pop()  # threads may ask at once
    except IndexError:
        return None


def meanwhile(*modules: str) -> None:
    """Import modules in a thread, while a worker takes its device; `settled` waits for them.

    An error is raised where the module is imported again, for its use.
    """

    def imported() -> None:
        for module in modules:
            with suppress(Exception):
                import_module(module)

    _importing.append(Thread(target=imported, daemon=True))
    _importing[-1].start()


def settled() -> None:
    """Wait for the threads that import."""
    while _importing:
        _importing.pop().join()


def end() -> None:
    """End the processes that nobody took."""
    while process := taken():
        with process:  # closes its pipes, and waits
            process.kill()
