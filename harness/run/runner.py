"""The parent process: run contests through a worker that may crash, hang or run out of memory.

    contest ─> worker ─> rows
                 │ no line in time          the contender announced last gets the status timeout
                 │ dead, or a CUDA error    the contender announced last gets the status failed
                 │ a wrong answer           likewise; an answer names its contest and has every row
                 └> a fresh worker runs the contest again without it; earlier samples are discarded

A second attempt announces every sample and waits for it, so that an error while contenders take
turns is attributed to the right one. If that fails too, or if no worker starts, the contest is
given up and every row says why. worker_process.py talks to the worker.

While a worker takes its device, the workers of the next processes import everything, which takes
seconds. They then idle without a device: nothing is imported while a contest runs.
"""

import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from math import inf
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any

from sparsebench.errors import WorkerError
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.sampling import distinct_measures
from sparsebench.harness.catalog import declaration_of, load_op
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run.history import History
from sparsebench.harness.run.worker_process import (
    ContestResult,
    Log,
    Worker,
    WorkerLoss,
    start_worker,
)
from sparsebench.results.ceilings import FP32, TF32
from sparsebench.results.record import Case, Row, Status

BLAMELESS_ATTEMPTS = 2  # attempts of a contest that may fail with no case to blame
AHEAD = max(1, len(os.sched_getaffinity(0)) // 2)  # workers that import while another one starts
CEILINGS_KEPT_S = 1800.0  # clocks settle within a minute, but other users come and go


class Runner:
    """Runs contests one after the other, in one worker after the other.

    history    what earlier processes chose, timed and found right
    processes  their number; `next_process` starts each but the first
    spent_s    seconds of waiting for workers to start, and for ceilings
    stopping   set by another thread, which then kills the worker: the run ends as by Ctrl-C
    """

    def __init__(
        self,
        device: str,
        data: Path | None,
        timeout_s: float,
        *,
        history: History | None = None,
        processes: int = 1,
    ) -> None:
        """Start the first worker, whose `about` describes the device."""
        self.log = Log()
        self.stopping = Event()
        self.spent_s = {"start": 0.0, "ceilings": 0.0}
        self._device, self._data, self._timeout_s = device, data, timeout_s
        self.history = history or History()
        self._to_come = processes - 1
        self._worker: Worker | None = None
        self.spares: list[Worker] = []
        self._worker = self._start()
        self.about = self._worker.about

    @property
    def pid(self) -> int:
        return self._worker.pid if self._worker else 0

    def ceilings(self, contests: Iterable[Contest]) -> dict[str, Any]:
        """Return the device's ceilings; {} for a CPU, whose cores other work may share."""
        if self._device == "cpu":
            return {}
        worker = self._worker = self._worker or self._start()
        began = monotonic()
        dtypes = {
            str(contest.problem["dtype"])
            for contest in contests
            if any(
                declaration_of("kernels", k.kernel).device in ("any", "cuda")
                for k in contest.contenders
            )
        }
        dtypes |= {TF32} if FP32 in dtypes else set()
        if self._device.startswith("cuda"):
            ceilings = recent_ceilings(self.about["identity"], dtypes, worker.ceilings)
        else:
            ceilings = worker.ceilings(dtypes)
        self.spent_s["ceilings"] += monotonic() - began
        return ceilings

    def run(
        self,
        contests: Iterable[Contest],
        options: ContestOptions = ContestOptions(),  # noqa: B008 (frozen)
    ) -> Iterator[ContestResult]:
        """Yield every contest's rows, complete, in order; a reference may raise the ceilings."""
        for contest in contests:
            result = self._complete(contest, options)
            self.history.remember(result.rows)
            options = options.with_ceilings_after(result.rows)
            yield result

    def next_process(self) -> None:
        """Give the next contests a new worker: the process is the unit of replication.

        The next worker takes its device while the last one releases it; each takes 0.5 s.
        """
        worker, self._worker = self._worker, None
        if self.spares:
            self.spares[0].begin()
        if worker:
            worker.close()
        self._to_come -= 1

    def kill(self) -> None:
        running = [worker for worker in (self._worker, *self.spares) if worker]
        self._worker, self.spares = None, []
        for worker in running:
            worker.kill()

    def _start(self) -> Worker:
        """Return a worker that has its device, once no later worker is importing any more."""
        began, arguments = monotonic(), (self._device, self._data, self.log)
        spare = self.spares.pop(0) if self.spares else None
        if spare:
            spare.begin()  # unless `next_process` did
        importing: list[Worker] = []
        if not self.spares:
            importing += [Worker(*arguments) for _ in range(min(self._to_come, AHEAD))]
            self.spares = importing
        try:
            ready = spare is not None and self._succeeds(spare.wait_ready)
            worker = spare if spare and ready else start_worker(*arguments)
        except WorkerError:
            self.kill()
            raise
        if importing:
            self.spares = [each for each in importing if self._succeeds(each.wait_imported)]
        self.spent_s["start"] += monotonic() - began
        return worker

    def _succeeds(self, step: Callable[[], None]) -> bool:
        try:
            step()
        except WorkerError as error:
            self.log.add(f"{error}\n")
            return False
        return True

    def _complete(self, contest: Contest, options: ContestOptions) -> ContestResult:
        left = list(contest.contenders)
        lost_rows: list[Row] = []
        blameless = attempt = 0
        energy = options.energy and not contest.reference  # nothing reads that of a reference
        readings = load_op(contest.problem.op).readings
        measures = distinct_measures(options.measures, self._device, readings)
        while left:
            part = replace(contest, contenders=tuple(left))
            options = replace(
                options,
                attempt=attempt,
                reference=contest.reference,
                energy=energy,
                timeout_s=self._timeout_s,
                measures=measures,
                **self.history.options(part),
            )
            result = self._measure(part, asdict(options))
            if isinstance(result, ContestResult):
                return ContestResult(_in_order(contest, lost_rows + result.rows), result.spent_s)
            self._worker = None
            offenders = [c for c in left if Case(contest.problem, c).id == result.case]
            blameless += not offenders
            if blameless == BLAMELESS_ATTEMPTS:
                offenders = list(left)
            about = options.replicate, attempt, contest.reference
            for offender in offenders:
                facts = {"device": self.about["identity"], "detail": result.detail}
                blank = Row(Case(contest.problem, offender), result.status, *about, **facts)
                lost_rows += [replace(blank, scope=s, cache=c) for s, c in options.measures]
                left.remove(offender)
            attempt += 1
        return ContestResult(_in_order(contest, lost_rows), {})

    def _measure(self, contest: Contest, options: Mapping[str, Any]) -> ContestResult | WorkerLoss:
        self._end_if_stopping()
        try:
            worker = self._worker = self._worker or self._start()
        except WorkerError as error:
            return WorkerLoss("", Status.FAILED, str(error))
        result = worker.measure(contest, options, self._timeout_s)
        self._end_if_stopping()
        return result

    def _end_if_stopping(self) -> None:
        """End here if another thread stops this run: the worker that it killed gives no row."""
        if self.stopping.is_set():
            raise KeyboardInterrupt


def _in_order(contest: Contest, rows: list[Row]) -> list[Row]:
    place = {Case(contest.problem, c).id: i for i, c in enumerate(contest.contenders)}
    return sorted(rows, key=lambda row: place[row.case.id])


_recent: dict[str, tuple[float, frozenset[str], dict[str, Any]]] = {}
"""When a GPU's ceilings were measured, for which dtypes, and the ceilings."""


def recent_ceilings(
    card: str, dtypes: Collection[str], measure: Callable[[Collection[str]], dict[str, Any]]
) -> dict[str, Any]:
    """Return a GPU's ceilings: those that this process measured lately, or new ones.

    Measuring takes 10 s on an H200, and a campaign has 45 runs, so runs share ceilings that are at
    most CEILINGS_KEPT_S old and have all `dtypes`; `age_s` says how old they are.
    """
    required, now = frozenset(dtypes), monotonic()
    at, dtypes_before, before = _recent.get(card, (-inf, frozenset(), {}))
    if now - at <= CEILINGS_KEPT_S:
        if required <= dtypes_before:
            return {**before, "age_s": round(now - at, 1)}
        required |= dtypes_before
    ceilings = measure(required)
    _recent[card] = monotonic(), required, ceilings
    return ceilings
