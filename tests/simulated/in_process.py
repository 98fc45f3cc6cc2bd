"""The simulated GPU's worker in the tests' own process: starting one takes seconds."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run import runner, worker_process
from sparsebench.harness.run.worker_process import ContestResult, Log
from sparsebench.harness.sim import gpu_model, simulated_contest, simulated_worker


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let runs have no worker processes."""
    for module in (runner, worker_process):
        patch.setattr(module, "Worker", Here)


class Here(worker_process.Worker):
    """A worker of the simulated GPU without a process of its own."""

    def __init__(self, device: str, data: Path | None, log: Log) -> None:
        """Read the spec."""
        self.spec = gpu_model.read(device)
        environment = simulated_worker._environment(device, self.spec)
        self.about = {"environment": environment, "identity": self.spec.identity, "slug": "sim"}

    @property
    def pid(self) -> int:
        """There is no process."""
        return 0

    def wait_imported(self) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def wait_ready(self) -> None:
        """Do nothing."""

    def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
        """Return what the spec says."""
        return asdict(simulated_worker._ceilings(self.spec))

    def measure(
        self, contest: Contest, options: Mapping[str, Any], timeout_s: float
    ) -> ContestResult:
        """Draw the rows."""
        rest = ContestOptions.from_json(dict(options))
        arguments = self.spec, contest.problem, contest.contenders, rest
        return ContestResult(simulated_contest.run(*arguments, lambda case, stage: None), {})

    def close(self) -> int:
        """Do nothing."""
        return 0

    def kill(self) -> None:
        """Do nothing."""
