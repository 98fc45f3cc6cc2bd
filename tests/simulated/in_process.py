"""The simulated GPU's worker in the tests' own process: starting one takes seconds."""

from collections.abc import Collection, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run import repeat as reproduce
from sparsebench.harness.run import worker_process as child
from sparsebench.harness.run.worker_process import Log, Measured
from sparsebench.harness.sim import gpu_model as clock
from sparsebench.harness.sim import simulated_contest as contest
from sparsebench.harness.sim import simulated_worker as worker


def in_this_process(patch: pytest.MonkeyPatch) -> None:
    """Let runs have no worker processes."""
    patch.setattr(child, "Worker", Here)
    patch.setattr(reproduce, "Worker", Here)


class Here(child.Worker):
    """A worker of the simulated GPU without a process of its own."""

    def __init__(self, device: str, data: Path | None, log: Log, **how: object) -> None:
        """Read the spec."""
        self.spec = clock.read(device)
        environment = {"gpu": {"name": "simulated H200", "uuid": self.spec.identity}}
        same = {"versions": {}, "device": device}
        self.about = {"environment": environment | same, "identity": self.spec.identity}
        self.about["slug"] = "sim"

    @property
    def pid(self) -> int:
        """There is no process."""
        return 0

    def imported(self) -> None:
        """Do nothing."""

    def begin(self) -> None:
        """Do nothing."""

    def there(self) -> None:
        """Do nothing."""

    def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
        """Return what the spec says."""
        return asdict(worker._ceilings(self.spec))

    def measure(self, asked: Contest, options: Mapping[str, Any], timeout_s: float) -> Measured:
        """Draw the rows."""
        known = ContestOptions.from_json(dict(options))
        given = self.spec, asked.problem, asked.contenders, known
        return Measured(contest.run(*given, lambda case, stage: None), {})

    def close(self) -> int:
        """Do nothing."""
        return 0

    def kill(self) -> None:
        """Do nothing."""
