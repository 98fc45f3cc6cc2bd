"""The parent process: contests to rows, through a worker that may crash, hang or run out of memory.

    contest ─> worker ─> rows
                 │ no line in time          the contender last announced: timeout
                 │ gone, or a CUDA error    the contender last announced: failed
                 │ another answer           likewise: it names its contest and has every row
                 └> a fresh worker runs the contest again without it; earlier samples are discarded

A second attempt waits for and announces every sample, so that an error while contenders take turns
finds its owner; where it does not, the contest is given up and every row says so. So it is where
no worker starts. The worker itself is child.py.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

from sparsebench.errors import WorkerError
from sparsebench.harness.bench.samples import possible
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run.child import Log, Lost, Measured, Worker, started
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Case, Contender, Row, Status

BLAMELESS_ATTEMPTS = 2  # attempts that may end without an offender before the contest is given up

Pinned = Mapping[str, Mapping[str, Any]]
"""By case id, what a kernel chose (Row.choice)."""


def pinned_in(rows: Iterable[Row]) -> Pinned:
    """Return what kernels chose in these rows, the ok ones."""
    return {row.case.id: row.choice for row in rows if row.status is Status.OK and row.choice}


def pinned_by_process(rows: Sequence[Row]) -> list[Pinned]:
    """Return what kernels chose in each process; where one has no ok row, what another chose."""
    numbers = sorted({row.replicate for row in rows})
    every = pinned_in(rows)
    return [{**every, **pinned_in(r for r in rows if r.replicate == n)} for n in numbers]


@dataclass(frozen=True)
class Wanted:
    """What is asked of every contest of a run; ContestOptions (entry.py) says what each means."""

    measures: tuple[tuple[str, str], ...] = (("kernel", "cold"),)
    ceilings: Mapping[str, Any] | None = None
    energy: bool = False

    def after(self, rows: Iterable[Row]) -> Self:
        """Return what is asked after these rows: a reference among them may raise the ceilings."""
        if self.ceilings is None:
            return self
        ceilings, _ = Ceilings.from_json(self.ceilings).after(rows)
        return replace(self, ceilings=asdict(ceilings))


class Runner:
    """Runs contests one after the other, in one worker after the other.

    `pinned` has the choices of another run: process p takes those of its process p, and begins
    again with the first where that run had fewer. With `share`, what a kernel chose in an `ok` row
    is handed to every later process. Without either, each process searches for itself.
    """

    def __init__(
        self,
        device: str,
        data: Path | None,
        timeout_s: float,
        pinned: Sequence[Pinned] = (),
        share: bool = True,
    ) -> None:
        """Start the first worker: `about` tells the device."""
        self.log = Log()
        self._pinned, self._share = pinned, share
        self._shared: dict[str, Mapping[str, Any]] = {}
        self._device = device
        self._start: Callable[[], Worker] = partial(started, device, data, self.log)
        self._timeout_s = timeout_s
        self._worker: Worker | None = self._start()
        self.about = self._worker.about

    @property
    def pid(self) -> int:
        """Return the process id of the worker that waits; 0 where none does."""
        return self._worker.pid if self._worker else 0

    def ceilings(self) -> dict[str, Any]:
        """Return what the device can do at most, measured now."""
        self._worker = self._worker or self._start()
        return self._worker.ceilings()

    def run(
        self, contests: Iterable[Contest], replicate: int = 0, wanted: Wanted | None = None
    ) -> Iterator[Measured]:
        """Yield every contest's rows, complete, in order."""
        wanted = wanted or Wanted()
        for contest in contests:
            measured = self._complete(contest, replicate, wanted)
            self.pin(measured.rows)
            wanted = wanted.after(measured.rows)
            yield measured

    def pin(self, rows: Iterable[Row]) -> None:
        """Remember what kernels chose, for the processes that share it."""
        if self._share:
            self._shared |= pinned_in(rows)

    def fresh(self) -> None:
        """Give the next contests a worker of their own: the process is the unit of replication."""
        if self._worker:
            self._worker.close()
        self._worker = None

    def kill(self) -> None:
        """Stop whatever runs."""
        if self._worker:
            self._worker.kill()
        self._worker = None

    def _complete(self, contest: Contest, replicate: int, wanted: Wanted) -> Measured:
        """Run a contest until every contender has its rows."""
        left = list(contest.contenders)
        lost_rows: list[Row] = []
        blameless = attempt = 0
        while left:
            part = Contest(contest.problem, tuple(left))
            options = asdict(wanted) | {
                "measures": possible(wanted.measures, self._device),
                "replicate": replicate,
                "attempt": attempt,
                "reference": contest.reference,
                "pinned": self._known(part, replicate),
            }
            answer = self._measured(part, options)
            if isinstance(answer, Measured):
                return Measured(_in_order(contest, lost_rows + answer.rows), answer.spent_s)
            self._worker = None
            attempt += 1
            offenders = [c for c in left if Case(contest.problem, c).id == answer.case]
            blameless += not offenders
            if blameless == BLAMELESS_ATTEMPTS:
                offenders = list(left)
            for offender in offenders:
                blank = self._lost(contest, offender, answer, replicate, attempt)
                lost_rows += [replace(blank, scope=s, cache=c) for s, c in options["measures"]]
                left.remove(offender)
        return Measured(_in_order(contest, lost_rows), {})

    def _measured(self, contest: Contest, options: Mapping[str, Any]) -> Measured | Lost:
        try:
            self._worker = self._worker or self._start()
        except WorkerError as error:
            return Lost("", Status.FAILED, str(error))
        return self._worker.measure(contest, options, self._timeout_s)

    def _known(self, contest: Contest, replicate: int) -> Pinned:
        """Return what is known of these contenders; a twin takes what its original took."""
        given = self._pinned[replicate % len(self._pinned)] if self._pinned else {}
        chosen = {**self._shared, **given}
        known = {}
        for contender in contest.contenders:
            original = Case(contest.problem, replace(contender, twin=False)).id
            if original in chosen:
                known[Case(contest.problem, contender).id] = chosen[original]
        return known

    def _lost(
        self, contest: Contest, offender: Contender, lost: Lost, replicate: int, attempt: int
    ) -> Row:
        return Row(
            Case(contest.problem, offender),
            lost.status,
            replicate=replicate,
            attempt=attempt - 1,
            reference=contest.reference,
            device=self.about["identity"],
            detail=lost.detail,
        )


def _in_order(contest: Contest, rows: list[Row]) -> list[Row]:
    place = {Case(contest.problem, c).id: i for i, c in enumerate(contest.contenders)}
    return sorted(rows, key=lambda row: place[row.case.id])
