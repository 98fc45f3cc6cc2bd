"""The simulated GPU's worker in the tests' own process: starting one takes seconds."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run import runner, worker_process
from sparsebench.harness.run.measure import Progress
from sparsebench.harness.run.worker_process import ContestResult, Log
from tests.simulated import gpu_model, simulated_contest, worker


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let runs have no worker processes."""
    for module in (runner, worker_process):
        patch.setattr(module, "Worker", Here)


def stopping(after: int) -> Progress:
    """Return a progress callback that interrupts the thread that measures."""

    def show(done: int, total: int, problem: str) -> None:
        if done >= after:
            raise KeyboardInterrupt

    return show


class Here(worker_process.Worker):
    """A worker of the simulated GPU in this process."""

    def __init__(self, device: str, data: Path | None, log: Log) -> None:
        self.spec = gpu_model.read(device)
        self.about = worker.about(device, self.spec)

    @property
    def pid(self) -> int:
        return 0

    def wait_imported(self) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def wait_ready(self) -> None:
        """Do nothing."""

    def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
        return asdict(worker.ceilings(self.spec))

    def measure(
        self, contest: Contest, options: Mapping[str, Any], timeout_s: float
    ) -> ContestResult:
        rest = ContestOptions.from_json(dict(options))
        arguments = self.spec, contest.problem, contest.contenders, rest
        return ContestResult(simulated_contest.run(*arguments, lambda case, stage: None), {})

    def close(self) -> int:
        """Do nothing."""
        return 0

    def kill(self) -> None:
        """Do nothing."""
