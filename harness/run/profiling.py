"""Cases under a profiler: each checked as in a run, then called in an NVTX range of its name.

    run SUITE --profile nsys    nsys profile ... run SUITE --repeat 1
    try KERNEL --profile ncu    ncu ... try KERNEL --repeat 1

    range    bsr/bsr_wgmma linear m=64 n=4096 ... case 1f0c...

On a GPU, calls lie between cudaProfilerStart and Stop as well, which ncu waits for. A profiler
slows everything down, so nothing is timed, and there is no run directory.
"""

import gc
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest_state import ContestOptions, Entry
from sparsebench.harness.plan.suite import Contest
from sparsebench.kernels._kernel import Launch
from sparsebench.results.record import Case, Row, Status

TOOLS = {
    "ncu": ("ncu", "--profile-from-start", "off", "--nvtx", "--set", "detailed"),
    "nsys": ("nsys", "profile", "--trace", "cuda,nvtx"),
}
NAMES = {"ncu": "Nsight Compute", "nsys": "Nsight Systems"}


@dataclass(frozen=True)
class Called:
    """A case that was called, or the reason why it could not be."""

    said: str
    fine: bool


def under(tool: str, command: Sequence[str], device: str, data: Path | None) -> int:
    """Run a command of sparsebench with `--repeat 1` under a profiler; return its exit code.

    Raises SuiteError where the profiler is unknown or not there.
    """
    if tool not in TOOLS:
        raise SuiteError(f"--profile: expected {' or '.join(TOOLS)}, found {tool!r}")
    if shutil.which(tool) is None:
        raise SuiteError(f"--profile: expected {tool} ({NAMES[tool]}) on PATH, found none")
    place = ["--device", device, *(["--data", str(data)] if data else [])]
    own = [sys.executable, "-P", "-m", "sparsebench", *command, *place, "--repeat", "1"]
    return subprocess.run([*TOOLS[tool], *own], check=False).returncode


def call_each(
    contests: Iterable[Contest], device: torch.device, data: Path | None, times: int
) -> Iterator[Called]:
    """Check the cases of each contest, call the right ones in their ranges, and yield each."""
    for one in contests:
        entries = [Entry(Row(Case(one.problem, c), Status.OK)) for c in one.contenders]
        running = contest.start(
            one.problem, entries, device, data, ContestOptions(), lambda case, stage: None
        )
        try:
            for entry in entries:
                name = range_of(entry.row.case)
                if entry.launch is None:
                    fine = entry.row.status is Status.UNSUPPORTED
                    yield Called(f"{name}: {entry.row.status}: {entry.row.detail}", fine)
                    continue
                with marked(name, device):
                    call(entry.launch, times)
                yield Called(name, fine=True)
        finally:
            running.guard.watched.clear()  # it knows the contest: a cycle would keep all memory
            gc.collect()


def range_of(case: Case) -> str:
    """Name the range of a case."""
    fields = " ".join(f"{name}={value}" for name, value in case.problem.fields.items())
    return f"{case.contender.label} {case.problem.op} {fields} case {case.id}"


def call(launch: Launch, times: int) -> None:
    """Call a launch so many times."""
    for _ in range(times):
        launch()


@contextmanager
def marked(name: str, device: torch.device) -> Iterator[None]:
    """Mark the work of the block for a profiler of GPUs; on a CPU there is none."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.profiler.start()
    torch.cuda.nvtx.range_push(name)
    try:
        yield
        torch.cuda.synchronize(device)
    finally:
        torch.cuda.nvtx.range_pop()
        torch.cuda.profiler.stop()
