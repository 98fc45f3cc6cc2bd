"""A clock that a simulated worker advances by the seconds that the work takes on a GPU.

    process   START_S for the first one, AGAIN_S for one that imported beside the one before
    ceilings  CEILINGS_S
    contest   CONTEST_S, and ROW_S for each contender
    prepare   by kernel: a whole search in the first process of a run, or among finalists, as in
              other contests of a process with the same dense product

The seconds are those of `new-gpu --budget 8m` on an NVIDIA H100, whose kernels were compiled ahead.
"""

from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from sparsebench.harness.new_gpu import survey
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run import measure, run_json, runner, worker_process
from sparsebench.harness.run.worker_process import ContestResult, Log
from sparsebench.results.record import Problem
from tests.simulated.in_process import Here

START_S, AGAIN_S, CEILINGS_S = 4.0, 3.8, 13.0
CONTEST_S, ROW_S = 0.36, 0.06
PREPARE_S = {  # a whole search, and one among finalists
    "bsr_small": (0.65, 0.66),
    "bsr_triton": (0.08, 0.05),
    "bsr_wgmma": (0.03, 0.05),
    "bsr_wgrad": (0.16, 0.11),
    "bsr_wgrad_small": (0.8, 0.43),
    "cublas": (1.6, 0.15),
    "cusparselt": (1.05, 0.12),
    "cusparselt_hybrid": (0.72, 0.13),
    "default": (1.0, 0.35),
    "ffn_few": (0.05, 0.03),
    "ffn_sparse": (0.92, 1.07),
    "spense_mma": (0.03, 0.05),
    "spense_wgmma": (0.06, 0.06),
    "torch_bsr": (0.64, 0.1),
}
OTHER_S = 0.5, 0.1
DENSE = "cublas", "cublas_ffn"
BEGAN = datetime.fromisoformat("2026-01-01T00:00:00+00:00")


def product(problem: Problem) -> tuple[Any, ...]:
    """Return what problems with the same dense products have in common."""
    return problem.op, *(problem.fields.get(name) for name in ("m", "n", "k", "dtype"))


class Clock:
    """Seconds since some moment."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        """Return the time, as time.monotonic does."""
        return self.seconds

    def now(self) -> datetime:
        """Return the time, as run_json.now does."""
        return BEGAN + timedelta(seconds=self.seconds)


def timed(patch: pytest.MonkeyPatch) -> Clock:
    """Let surveys of a simulated GPU run in this process, on a clock of their own."""
    clock, started = Clock(), list[object]()

    class Timed(Here):
        def __init__(self, device: str, data: Path | None, log: Log) -> None:
            super().__init__(device, data, log)
            if not started:
                clock.seconds += START_S - AGAIN_S
            started.append(self)
            self.searched: set[tuple[Any, ...]] = set()

        def wait_ready(self) -> None:
            clock.seconds += AGAIN_S

        def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
            clock.seconds += CEILINGS_S
            return super().ceilings(dtypes)

        def measure(
            self, contest: Contest, options: Mapping[str, Any], timeout_s: float
        ) -> ContestResult:
            result = super().measure(contest, options, timeout_s)
            rows, spent = [], {"operands": CONTEST_S, "timing": ROW_S * len(result.rows)}
            for row in result.rows:
                kernel, searched = row.case.contender.kernel, product(contest.problem)
                again = row.case.id in options["timed"] or row.case.contender.twin
                again |= kernel in DENSE and searched in self.searched
                prepare_s = PREPARE_S.get(kernel, OTHER_S)[again]
                rows.append(replace(row, prepare_s=prepare_s))
                spent["prepare"] = spent.get("prepare", 0.0) + prepare_s
            self.searched.add(product(contest.problem))
            clock.seconds += sum(spent.values())
            return ContestResult(rows, spent)

    for module in (runner, worker_process):
        patch.setattr(module, "Worker", Timed)
    for module in (survey, measure, runner):
        patch.setattr(module, "monotonic", clock)
    for module in (measure, run_json):
        patch.setattr(module, "now", clock.now)
    return clock
