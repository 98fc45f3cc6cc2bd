"""Compile the kernels of a suite before the screening, in several processes at once.

    start   beside the doctor, one process compiles front.cpp, and MOST import torch and wait
    finish  each of these claims problem after problem, coarse ones first, and prepares its
            contenders; at `until` all are killed

Compilers use one core or a few, so a single process would spend a third of the screening on them.
Machine code stays in the caches on disk, and everything else is dropped: nothing is timed while
several processes share the device, and choices that layers make then go into a folder that is
removed. Dense contenders are left out, because their libraries compile nothing.

Usage: python -P -m sparsebench.harness.new_gpu.compile_ahead DEVICE SUITE FOLDER, which begins
after a line on stdin
"""

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from time import monotonic, sleep
from typing import Self

import torch

from sparsebench.errors import SparsebenchError
from sparsebench.harness.bench.contest import RunningContest
from sparsebench.harness.bench.prepare import entries_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.machine.parent_watch import end_with_parent
from sparsebench.harness.new_gpu.choices import coarse
from sparsebench.harness.plan.suite import Contest, read
from sparsebench.harness.run.early_start import PYTHON
from sparsebench.harness.run.worker import CUDA_PACKAGES
from sparsebench.kernels._common import front_extension, search

COMMAND = *PYTHON, "sparsebench.harness.new_gpu.compile_ahead"
CORES, MOST = 2, 8  # a process compiles in several threads; more than MOST take too much memory
FEWEST = 4  # cores of the host: with fewer, the processes would only wait for each other
STEP_S = 0.1
COMPILE = f"from {front_extension.__name__} import front_type; front_type()"
FRONT = sys.executable, "-P", "-c", COMPILE
CHOICES = "SPARSEBENCH_CHOICES"  # the folder of kernels/_common/choices.py


@dataclass
class CompileAhead:
    """The waiting processes, and the folder of their claims and choices."""

    device: str
    suite: str
    folder: TemporaryDirectory[str] = field(default_factory=TemporaryDirectory)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()
        self.folder.cleanup()

    def start(self) -> None:
        """Start the processes, and one that compiles front.cpp, which takes 20 s."""
        self._spawn(*FRONT)
        cores = len(os.sched_getaffinity(0))
        for _ in range(min(MOST, cores // CORES) if cores >= FEWEST else 0):
            self._spawn(*COMMAND, self.device, self.suite, self.folder.name)

    def _spawn(self, *command: str) -> None:
        process = subprocess.Popen(
            command, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True,
            env={**os.environ, CHOICES: self.folder.name}, encoding="utf-8",
        )  # fmt: skip
        self.processes.append(process)

    def finish(self, until: float, progress: Callable[[int, int, str], None]) -> None:
        """Let the processes compile until `until`, a time.monotonic(), or the end of the suite."""
        if not self.processes:
            return
        contests, claims = len(read(self.suite).contests), -1
        for process in self.processes:
            assert process.stdin
            with suppress(OSError):
                process.stdin.write("begin\n")
                process.stdin.flush()
        while monotonic() < until and any(process.poll() is None for process in self.processes):
            before, claims = claims, len(list(Path(self.folder.name).glob("claim-*")))
            if claims != before:
                progress(claims, contests, "")
            sleep(STEP_S)
        self._end()

    def _end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            # Leaving `process` closes its pipe and waits. If it ended before it read "begin", the
            # pipe still holds the line, and closing it raises.
            with suppress(BrokenPipeError), process:
                pass
        self.processes.clear()


def main() -> None:
    """Prepare the contests that no other process has claimed."""
    end_with_parent()
    search.compile_only = True
    name, suite, folder = sys.argv[1:]
    for package in CUDA_PACKAGES:
        with suppress(ImportError):  # the kernel reports it when it is used
            import_module(package)
    contests, device = list(read(suite).contests), torch.device(name)
    ranks = coarse([contest.problem for contest in contests])
    contests.sort(key=lambda contest: ranks[contest.problem.id])
    if not sys.stdin.readline():
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    for number, contest in enumerate(contests):
        with suppress(FileExistsError):
            (Path(folder) / f"claim-{number}").mkdir()
            _compile(contest, device)


def _compile(contest: Contest, device: torch.device) -> None:
    """Prepare the sparse contenders; the screening reports any error again."""
    sparse = [contender for contender in contest.contenders if contender.format != "dense"]
    with suppress(SparsebenchError, torch.OutOfMemoryError):
        RunningContest(entries_of(contest.problem, sparse, device), Stages(device)).prepare()
    gc.collect()  # cycles hold operands, and the other processes need the memory
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
