"""What run.json records: the flags of a run, its progress, and the state of the machine.

    flags, counts, seconds                                ─> Record.at(status) ─> run.json
    other work on the machine, before and during the run  ─> Watch.json        ─> run.json

No path of this machine is recorded: a data folder is named only if it lies below this folder.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self

from sparsebench.harness.doctor import other_work
from sparsebench.harness.doctor.findings import DoctorFinding
from sparsebench.harness.machine.stand_in import stand_in
from sparsebench.results.record import Row

KEPT = "reproduces", "confirms", "choices", "part"  # keys that a resumed run keeps

OnMessage = Callable[[DoctorFinding], None]
"""Called with each finding about the machine, before and after the run, and with the reason why a
case failed (findings.failure) as soon as it fails."""


@dataclass(frozen=True)
class Flags:
    """Where, how long and how often a run measures; they are recorded in the run.

    Without `unpruned`, no dense contender multiplies unpruned weights (plan/unpruned.py). A run of
    an older version, which does not record it, is measured again as it was.
    """

    device: str
    data: Path | None = None
    timeout_s: float = 120.0
    replicates: int = 3
    only: str = ""
    energy: bool = False
    unpruned: bool = True

    @classmethod
    def from_state(cls, state: Mapping[str, Any], **changed: Any) -> Self:
        names, flags = {field.name for field in fields(cls)}, {"unpruned": False, **state["flags"]}
        return cls(**{n: f for n, f in flags.items() if n in names} | changed)

    @property
    def published(self) -> dict[str, Any]:
        """Return the flags as a run records them, without paths of this machine."""
        data = self.data
        named = data and not data.is_absolute() and ".." not in data.parts
        return asdict(self) | {"data": str(data) if named else None}


class Counts:
    """Counts rows as they come: contests by process and problem, and the suite's cases by status.

    Counting anew would be slow: a case id is a hash, and a run has more than 10,000 rows.
    """

    def __init__(self, rows: Iterable[Row] = ()) -> None:
        self.done: set[tuple[int, str]] = set()
        self.cases = Counter[str]()
        self.add(rows)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.done.add((row.replicate, row.case.problem.id))
            if not row.reference:
                self.cases[row.status.value] += 1


@dataclass(frozen=True)
class Record:
    """The content of run.json. `before` is its content before a resume; times are added to it."""

    suite: str
    flags: Flags
    contests: int
    before: Mapping[str, Any]
    since: datetime

    def at(self, status: str, counts: Counts, spent_s: Mapping[str, float]) -> dict[str, Any]:
        here = max(0.0, (now() - self.since).total_seconds())  # the clock may be set back
        seconds = self.before.get("seconds", 0) + here
        return {
            "suite": self.suite,
            **{name: self.before[name] for name in KEPT if name in self.before},
            "status": status,
            "started": self.before.get("started", self.since.isoformat(timespec="seconds")),
            "seconds": round(seconds, 1),
            "flags": self.flags.published,
            "contests": {"done": len(counts.done), "of": self.contests},
            "cases": dict(counts.cases),
            "spent_s": {stage: round(s, 2) for stage, s in spent_s.items()},
        }


def now() -> datetime:
    """Return the present time in UTC."""
    return datetime.now(UTC)


class Watch:
    """Looks for other work on the machine, before a run and during it; not for a stand-in.

    A worker's processor time counts as the run's own once the worker has ended.
    """

    def __init__(self, device: str, identity: str, worker: int, on_message: OnMessage) -> None:
        """Inspect the machine while the worker, given by its process id, waits."""
        self._kind = "" if stand_in(device) else device.partition(":")[0]
        self._began, self._on_message = other_work.read_spent(), on_message
        self._findings: dict[str, list[DoctorFinding]] = {}
        if self._kind:
            self._report("before", other_work.before(self._kind, identity, worker))

    def end(self) -> None:
        if self._kind:
            whole = other_work.host(self._began, other_work.read_spent(), self._kind)
            self._report("during", [whole])

    @property
    def json(self) -> dict[str, Any]:
        findings = {when: [asdict(f) for f in group] for when, group in self._findings.items()}
        return {"fitness": findings} if findings else {}

    def _report(self, when: str, findings: list[DoctorFinding]) -> None:
        self._findings[when] = findings
        for finding in findings:
            self._on_message(finding)
