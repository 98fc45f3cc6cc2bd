"""What run.json says of a run: who asked for what, how far it is, and since when.

    flags, counts, seconds ─> Record.at(status) ─> run.json

No path of this machine is in it: only a data folder below this one is named.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from sparsebench.harness.machine.device import portable
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
