"""A clock that a simulated worker advances by the seconds that the work takes on a GPU.

    process   START_S for the first one, AGAIN_S for one that imported beside the one before
    ceilings  CEILINGS_S
    contest   CONTEST_S, and ROW_S for each contender
    prepare   PREPARE_S: a whole search in the first process of a run, or among finalists

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
from tests.simulated.in_process import Here

START_S, AGAIN_S, CEILINGS_S = 4.0, 3.8, 13.0
CONTEST_S, ROW_S = 0.36, 0.06
PREPARE_S = 0.8, 0.15  # a whole search, and one among finalists
BEGAN = datetime.fromisoformat("2026-01-01T00:00:00+00:00")


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
                again = row.case.id in options["timed"] or row.case.contender.twin
                prepare_s = PREPARE_S[again]
                rows.append(replace(row, prepare_s=prepare_s))
                spent["prepare"] = spent.get("prepare", 0.0) + prepare_s
            clock.seconds += sum(spent.values())
            return ContestResult(rows, spent)

    for module in (runner, worker_process):
        patch.setattr(module, "Worker", Timed)
    for module in (survey, measure, runner):
        patch.setattr(module, "monotonic", clock)
    for module in (measure, run_json):
        patch.setattr(module, "now", clock.now)
    return clock
