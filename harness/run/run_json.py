"""What run.json says of a run: who asked for what, how far it is, and since when.

    flags, counts, seconds ─> Record.at(status) ─> run.json

No path of this machine is in it: only a data folder below this one is named.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsebench.harness.doctor import other_work as fitness
from sparsebench.harness.doctor.findings import Finding
from sparsebench.harness.machine.device import portable, simulated
from sparsebench.harness.run.runner import Runner
from sparsebench.results.record import Row

KEPT = (
    "reproduces",
    "confirms",
    "choices",
    "part",
)  # what stays of the state before, on resuming too


@dataclass(frozen=True)
class Flags:
    """Where, how long and how often; never what. They are written into the run.

    `shard` is which part of the plan, "2/4" for the second of four; "" for all of it.
    """

    device: str
    data: Path | None = None
    timeout_s: float = 120.0
    replicates: int = 3
    only: str = ""
    energy: bool = False
    shard: str = ""


class Counts:
    """What rows count: contests by process and problem, and the suite's own cases by status.

    Rows are added as they come: an id is a hash, and a run has 10,000 rows and more.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        """Count these rows."""
        self.done: set[tuple[int, str]] = set()
        self.cases = Counter[str]()
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        """Count further rows."""
        for row in rows:
            self.done.add((row.replicate, row.case.problem.id))
            if not row.reference:
                self.cases[row.status.value] += 1


@dataclass(frozen=True)
class Record:
    """What run.json says. Of `before`, what it said, origins stay and times are added to."""

    suite: str
    flags: Flags
    contests: int
    before: Mapping[str, Any]
    since: datetime

    def at(self, status: str, counts: "Counts", spent_s: Mapping[str, float]) -> dict[str, Any]:
        """Return it for a status and what the rows on disk count."""
        seconds = self.before.get("seconds", 0) + (now() - self.since).total_seconds()
        return {
            "suite": self.suite,
            **{name: self.before[name] for name in KEPT if name in self.before},
            "status": status,
            "started": self.before.get("started", self.since.isoformat(timespec="seconds")),
            "seconds": round(seconds, 1),
            "flags": published(self.flags),
            "contests": {"done": len(counts.done), "of": self.contests},
            "cases": dict(counts.cases),
            "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
        }


def published(flags: Flags) -> dict[str, Any]:
    """Return flags without paths of this machine: a data folder below this one is named."""
    data = flags.data
    named = data and not data.is_absolute() and ".." not in data.parts
    return asdict(flags) | {"device": portable(flags.device), "data": str(data) if named else None}


def now() -> datetime:
    """Return the time, which run.json has in UTC."""
    return datetime.now(UTC)


OnMessage = Callable[[Finding], None]
"""Called with each finding on the machine (doctor/other_work.py), before the run and after it; and
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
