"""The parent process: contests to rows, through a worker that may crash, hang or run out of memory.

    contest ─> worker ─> rows
                 │ no line in time          the contender last announced: timeout
                 │ gone, or a CUDA error    the contender last announced: failed
                 │ another answer           likewise: it names its contest and has every row
                 └> a fresh worker runs the contest again without it; earlier samples are discarded

A second attempt waits for and announces every sample, so that an error while contenders take turns
finds its owner; where it does not, the contest is given up and every row says so. So it is where
no worker starts. The worker itself is child.py.

While a worker takes its device, those of the next processes import everything, which takes seconds.
Then they idle, without a device, until it is their turn: nothing is imported while a contest runs.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any, Self

from sparsebench.errors import WorkerError
from sparsebench.harness.bench.sampling import possible
from sparsebench.harness.catalog import load_kernel
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run.early_start import AHEAD
from sparsebench.harness.run.worker_process import Log, Lost, Measured, Worker, spare, started
from sparsebench.results.ceilings import FP32, TF32, Ceilings
from sparsebench.results.record import Case, Contender, Row, Status

BLAMELESS_ATTEMPTS = 2  # attempts that may end without an offender before the contest is given up

Pinned = Mapping[str, Mapping[str, Any]]
"""By case id, what a kernel chose (Row.choice)."""

Timed = Mapping[str, Sequence[Mapping[str, Any]]]
"""By case id, what was timed for that (Row.candidates)."""


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
    is handed to every later process. Without either, each process searches for itself: the first
    one among all candidates, later ones among its finalists (kernels/_common/search.py).
    `processes` is how many there will be: `fresh` is called once less. `spent_s` has the seconds
    that were waited for workers to start, and for ceilings. A runner in a thread ends by
    `stopping`, as by Ctrl-C, once its worker is killed.
    """

    def __init__(
        self,
        device: str,
        data: Path | None,
        timeout_s: float,
        pinned: Sequence[Pinned] = (),
        share: bool = True,
        processes: int = 1,
    ) -> None:
        """Start the first worker: `about` tells the device."""
        self.log = Log()
        self._pinned, self._share = pinned, share
        self._shared: dict[str, Mapping[str, Any]] = {}
        self._timed: dict[str, Row] = {}
        self._device, self._data = device, data
        self._timeout_s = timeout_s
        self.stopping = Event()
        self._to_come = processes - 1
        self.spent_s = {"start": 0.0, "ceilings": 0.0}
        self._worker: Worker | None = None
        self._spares: list[Worker] = []
        self._worker = self._start()
        self.about = self._worker.about

    @property
    def pid(self) -> int:
        """Return the process id of the worker that waits; 0 where none does."""
        return self._worker.pid if self._worker else 0

    def ceilings(self, contests: Iterable[Contest]) -> dict[str, Any]:
        """Return what the device can do at most in the dtypes of contests, as measured lately."""
        worker = self._worker = self._worker or self._start()
        began, kind = monotonic(), "cpu" if self._device == "cpu" else "cuda"
        dtypes = {str(contest.problem["dtype"]) for contest in contests if _runs(contest, kind)}
        dtypes |= {TF32} if FP32 in dtypes else set()
        if self._device.startswith("cuda"):
            found = ceilings(self.about["identity"], dtypes, worker.ceilings)
        else:
            found = worker.ceilings(dtypes)
        self.spent_s["ceilings"] += monotonic() - began
        return found

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
        """Remember what kernels chose, or timed, for the processes that share it."""
        if self._share:
            self._shared |= pinned_in(rows)
            return
        for row in rows:
            if row.status is Status.OK and row.candidates:
                before = self._timed.setdefault(row.case.id, row)
                if row.replicate < before.replicate:
                    self._timed[row.case.id] = row

    def fresh(self) -> None:
        """Give the next contests a worker of their own: the process is the unit of replication."""
        if self._worker:
            self._worker.close()
        self._worker = None
        self._to_come -= 1

    def kill(self) -> None:
        """Stop whatever runs."""
        running = [worker for worker in (self._worker, *self._spares) if worker]
        self._worker, self._spares = None, []
        for worker in running:
            worker.kill()

    def _start(self) -> Worker:
        """Return a worker that has its device, when none that is to come imports any more."""
        began, given = monotonic(), (self._device, self._data, self.log)
        ready = self._spares.pop(0) if self._spares else None
        if ready:
            ready.begin()
        importing: list[Worker] = []
        if not self._spares:
            importing += [spare(*given) for _ in range(min(self._to_come, AHEAD))]
            self._spares = importing
        try:
            worker = ready if ready and self._did(ready.there) else started(*given)
        except WorkerError:
            self.kill()
            raise
        if importing:
            self._spares = [each for each in importing if self._did(each.imported)]
        self.spent_s["start"] += monotonic() - began
        return worker

    def _did(self, step: Callable[[], None]) -> bool:
        """Say whether a spare worker got through a step; the next one is then started anew."""
        try:
            step()
        except WorkerError as error:
            self.log.add(f"{error}\n")
            return False
        return True

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
                "timed": self._candidates(part),
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
        self._go_on()
        try:
            worker = self._worker = self._worker or self._start()
        except WorkerError as error:
            return Lost("", Status.FAILED, str(error))
        answer = worker.measure(contest, options, self._timeout_s)
        self._go_on()
        return answer

    def _go_on(self) -> None:
        """End here if another thread has asked for it: a worker that it killed is no row."""
        if self.stopping.is_set():
            raise KeyboardInterrupt

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

    def _candidates(self, contest: Contest) -> Timed:
        """Return what the first process that has them timed for these contenders."""
        cases = [Case(contest.problem, contender).id for contender in contest.contenders]
        return {case: self._timed[case].candidates for case in cases if case in self._timed}

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


def _runs(contest: Contest, kind: str) -> bool:
    """Say whether any contender of a contest is for a kind of device."""
    return any(load_kernel(k.kernel).device in ("any", kind) for k in contest.contenders)


def _in_order(contest: Contest, rows: list[Row]) -> list[Row]:
    place = {Case(contest.problem, c).id: i for i, c in enumerate(contest.contenders)}
    return sorted(rows, key=lambda row: place[row.case.id])


KEPT_S = 600.0  # clocks and temperature settle within a minute; other users come and go

Measure = Callable[[Collection[str]], dict[str, Any]]
"""Returns the ceilings of a device, those of products of some dtypes, as JSON."""


@dataclass(frozen=True)
class _Known:
    at: float
    dtypes: frozenset[str]
    ceilings: Mapping[str, Any]


_known: dict[str, _Known] = {}


def ceilings(card: str, dtypes: Collection[str], measure: Measure) -> dict[str, Any]:
    """Return a GPU's ceilings, its name being `card`: known ones, or those that `measure` finds."""
    asked, now = frozenset(dtypes), monotonic()
    known = _known.get(card)
    if known and now - known.at > KEPT_S:
        known = None
    if known and asked <= known.dtypes:
        return {**known.ceilings, "age_s": round(now - known.at, 1)}
    wanted = asked | known.dtypes if known else asked
    found = measure(wanted)
    _known[card] = _Known(monotonic(), wanted, found)
    return found
