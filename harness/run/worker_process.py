"""A worker process as its parent sees it: start it, send it contests, read answers, end it.

    ─> a line for each contest       <─ announcements, then the rows: JSON lines
                                     <─ tracebacks: into failures.log
                                     <─ stderr: into worker.log, the last lines also into a row

machine/child_process.py talks to the process.
"""

import secrets
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sparsebench._writing import append_to
from sparsebench.errors import WorkerError
from sparsebench.harness.machine.child_process import PYTHON, Child, ChildLoss
from sparsebench.harness.machine.stand_in import stand_in
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Case, Row, Status
from sparsebench.results.run.store import without_paths

START_TIMEOUT_S = 300.0  # importing torch and starting CUDA on a cold disk
START_ATTEMPTS = 3
START_PAUSE_S = 1.0  # doubled after each attempt: memory or a GPU may become free
FAILURES = "failures.log"  # in the same folder as worker.log
COMMAND = *PYTHON, "sparsebench.harness.run.worker"


@dataclass(frozen=True)
class WorkerLoss:
    """The end of a worker: the case announced last ("" between cases), and the reason."""

    case: str
    status: Status
    detail: str


@dataclass(frozen=True)
class ContestResult:
    """A worker's answer: all rows of a contest, and the seconds spent by stage."""

    rows: list[Row]
    spent_s: dict[str, float]


@dataclass
class Log:
    """Output of workers and reasons of failures, kept in memory until `file` is set.

    `on_failure` is called with the reason why a case has no time, in one line, and with the
    traceback. Each worker has a thread that adds lines, so a lock serializes them.
    """

    file: Path | None = None
    on_failure: Callable[[str, str], None] = lambda reason, text: None
    lines: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    tracebacks: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, line: str) -> None:
        """Add a line, without paths: the file is published."""
        with self.lock:
            self.lines.append(without_paths(line))
            if self.file:
                _append(self.file, self.lines)

    def explain(self, reason: str, text: str) -> None:
        """Add the reason why a case failed; an identical traceback is written once."""
        reason, text = without_paths(reason), without_paths(text)
        with self.lock:
            repeated = text in self.tracebacks
            shown = "(the traceback is that of an earlier case)" if repeated else text
            self.tracebacks.add(text)
            self.failures.append(f"{reason}\n{shown.rstrip()}\n\n")
            if self.file:
                _append(self.file.with_name(FAILURES), self.failures)
        self.on_failure(reason, text)


def _append(path: Path, lines: list[str]) -> None:
    append_to(path, "".join(lines))
    lines.clear()


class Worker:
    """A child process. It imports; after `begin` it takes its device, which `about` describes."""

    def __init__(self, device: str, data: Path | None, log: Log) -> None:
        """Start the child. Raises WorkerError."""
        self._arguments = [device, *([str(data)] if data else [])]
        module = stand_in(device)
        self._log = log
        command = (*PYTHON, module) if module else COMMAND
        self._child = Child("the worker process", command, log.add)
        self._killed = self._begun = False
        self.about: dict[str, Any] = {}

    def wait_imported(self) -> None:
        """Wait until the child has imported everything and is idle. Raises WorkerError."""
        self._answer("the worker did not start")

    def begin(self) -> None:
        """Let a spare child take its device; a second call does nothing."""
        if not self._begun:
            self._begun = True
            self._child.send(self._arguments)

    def wait_ready(self) -> None:
        self.about = self._answer("the worker did not start")

    def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
        """Measure the device's ceilings now. Raises WorkerError."""
        failed = "the ceilings were not measured"
        answer = self._answer(failed, self._child.send({"ceilings": sorted(dtypes)}))
        if not isinstance(ceilings := answer.get("ceilings"), dict):
            raise WorkerError(f"{failed}: found {str(answer)[:80]}")
        return ceilings

    def _answer(self, failed: str, loss: ChildLoss | None = None) -> dict[str, Any]:
        answer = loss or self._child.next(START_TIMEOUT_S)
        if isinstance(answer, ChildLoss):
            raise WorkerError(f"{failed}: {answer.detail}")
        return answer

    def measure(
        self, contest: Contest, options: Mapping[str, Any], timeout_s: float
    ) -> ContestResult | WorkerLoss:
        """Measure a contest. After a WorkerLoss the child is dead."""
        contenders = [asdict(contender) for contender in contest.contenders]
        nonce = secrets.token_hex(16)  # rows that another process writes into the pipe lack it
        request = {"problem": asdict(contest.problem), "contenders": contenders, **options}
        request["nonce"] = nonce
        if loss := self._child.send(request):
            return WorkerLoss("", loss.status, loss.detail)
        case = ""
        while True:
            answer = self._child.next(timeout_s)
            if isinstance(answer, ChildLoss):
                if not self._killed:
                    lines = "".join(self._child.last_lines)
                    self._explain(contest, options, case, answer.detail, lines)
                return WorkerLoss(case, answer.status, answer.detail)
            try:
                if "at" in answer:
                    case = str(answer["at"][0])
                elif "failed" in answer:
                    self._explain(contest, options, *map(str, answer["failed"]))
                elif "fatal" in answer:
                    self.close()
                    return WorkerLoss(answer["fatal"][0] or case, Status.FAILED, answer["fatal"][1])
                else:
                    rows = [Row.from_json(row) for row in answer["rows"]]
                    _require_all(contest, answer, rows, options["measures"])
                    if answer.get("nonce") != nonce:
                        raise ValueError("expected the worker's own answer, found a forged one")
                    return ContestResult(rows, dict(answer["spent_s"]))
            except (ValueError, TypeError, LookupError) as error:
                self._child.kill()
                return WorkerLoss(case, Status.FAILED, f"no answer to its contest: {error!r}"[:400])

    def _explain(
        self, contest: Contest, options: Mapping[str, Any], case: str, why: str, text: str
    ) -> None:
        """Log why a case of a contest failed; without a case, why all failed."""
        labels = {Case(contest.problem, each).id: each.label for each in contest.contenders}
        where = f"{labels.get(case, 'all contenders')} at {contest.problem.text}"
        process = f"process {options.get('replicate', 0)}, attempt {options.get('attempt', 0)}"
        self._log.explain(f"{where} ({process}): {why}", text)

    @property
    def pid(self) -> int:
        return self._child.pid

    def close(self) -> int:
        """End the child, whatever it is doing, and return its exit code."""
        return self._child.close()

    def kill(self) -> None:
        """Kill the child and everything that it started, without logging the loss."""
        self._killed = True
        self._child.kill()


def _require_all(
    contest: Contest, answer: Mapping[str, Any], rows: Sequence[Row], measures: Iterable[Any]
) -> None:
    if answer["contest"] != contest.problem.id:
        raise ValueError(f"expected contest {contest.problem.id}, found {answer['contest']!r}")
    cases = [Case(contest.problem, contender).id for contender in contest.contenders]
    expected = sorted((case, *measure) for case in cases for measure in measures)
    present = sorted((row.case.id, row.scope, row.cache) for row in rows)
    if present != expected:
        raise ValueError(f"expected {len(expected)} rows, each once, found {len(present)}")


def about_device(device: str, data: Path | None) -> dict[str, Any]:
    """Return what a worker says about a device; this process must not open a GPU itself."""
    worker = start_worker(device, data, Log())
    worker.kill()
    return worker.about


def start_worker(device: str, data: Path | None, log: Log) -> Worker:
    """Start a worker that has its device, in START_ATTEMPTS attempts. Raises WorkerError."""
    attempt = 0
    while True:
        try:
            worker = Worker(device, data, log)
            worker.wait_imported()
            worker.begin()
            worker.wait_ready()
            return worker
        except WorkerError as error:
            attempt += 1
            if attempt == START_ATTEMPTS:
                raise
            log.add(f"{error}\n")
            time.sleep(START_PAUSE_S * 2 ** (attempt - 1))
