"""What else is at work on the machine while a run measures, told and kept in run.json."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from sparsebench.harness.doctor import fitness
from sparsebench.harness.doctor.findings import Finding
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.run.runner import Runner

OnMessage = Callable[[Finding], None]
"""Called with each finding on the machine (doctor/fitness.py), before the run and after it; and
with why a case failed (findings.failure), when it does."""


class Watch:
    """What else is at work on the machine: before a run, and over all of it. Not where simulated.

    The time of a worker counts as ours once it has ended.
    """

    def __init__(self, device: str, runner: Runner, on_message: OnMessage) -> None:
        """Look at the machine while the worker waits."""
        self._kind = "" if simulated(device) else device.partition(":")[0]
        self._began, self._on_message = fitness.read_spent(), on_message
        self.found: dict[str, list[Finding]] = {}
        if self._kind:
            self._tell("before", fitness.before(self._kind, runner.about["identity"], runner.pid))

    def end(self) -> None:
        """Look again, when all workers have ended."""
        if self._kind:
            whole = fitness.host(self._began, fitness.read_spent(), self._kind)
            self._tell("during", [whole])

    @property
    def json(self) -> dict[str, Any]:
        """Return what goes into run.json."""
        found = {when: [asdict(one) for one in several] for when, several in self.found.items()}
        return {"fitness": found} if found else {}

    def _tell(self, when: str, several: list[Finding]) -> None:
        self.found[when] = several
        for finding in several:
            self._on_message(finding)
