"""Run cases under a profiler: each is checked as in a run, then called in a named NVTX range.

    nsys profile --trace cuda,nvtx sparsebench run SUITE --repeat 1
    ncu --profile-from-start off --nvtx sparsebench try KERNEL --repeat 1

    range    bsr/bsr_wgmma linear m=64 n=4096 ... case 1f0c...

On a GPU, the calls also lie between cudaProfilerStart and Stop, which ncu waits for. A profiler
slows everything down, so nothing is timed, and there is no run directory.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from sparsebench.harness.bench.contest import RunningContest
from sparsebench.harness.bench.prepare import entries_of
from sparsebench.harness.bench.stages import Stages
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Status


@dataclass(frozen=True)
class ProfiledCase:
    """The range of a case that was called, or why it could not be called."""

    text: str
    status: Status


def call_each(
    contests: Iterable[Contest], device: torch.device, data: Path | None, times: int
) -> Iterator[ProfiledCase]:
    """Check the cases of each contest, call the correct ones in their ranges, and yield each."""
    for planned in contests:
        entries = entries_of(planned.problem, planned.contenders, device)
        contest = RunningContest(entries, Stages(device), data, together=True)
        contest.prepare()
        contest.start()
        for entry in entries:
            case, row = entry.row.case, entry.row
            name = f"{case.contender.label} {case.problem.text} case {case.id}"
            if not entry.calls:
                yield ProfiledCase(f"{name}: {row.status}: {row.detail}", row.status)
                continue
            with _mark_range(name, device):
                for _ in range(times):
                    entry.calls["kernel"].work.run()
            yield ProfiledCase(name, Status.OK)


@contextmanager
def _mark_range(name: str, device: torch.device) -> Iterator[None]:
    """Mark the block's work for a GPU profiler; do nothing on a CPU."""
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
