"""A worker process as its parent sees it: start it, send it contests, read answers, end it.

    ─> a line for each contest       <─ announcements, then the rows: JSON lines
                                     <─ tracebacks: into failures.log
                                     <─ stderr: into worker.log, the last lines also into a row

A worker leads a process group. When it ends, every process that a kernel started in that group is
killed. The parent waits at most DRAIN_S for output of processes that left the group.
"""

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any

from sparsebench.errors import WorkerError
from sparsebench.harness.machine.stand_in import stand_in
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Case, Row, Status
from sparsebench.results.run.store import without_paths

START_TIMEOUT_S = 300.0  # importing torch and starting CUDA on a cold disk
END_TIMEOUT_S = 60.0  # wait for a child that is no longer needed; writing a core takes seconds
DRAIN_S = 2.0  # to read what a dead child left in its pipes
START_ATTEMPTS = 3
START_PAUSE_S = 1.0  # doubled after each attempt: memory or a GPU may become free
LINES_IN_ROW = 3  # last lines of a dead worker's stderr that go into a row
LINES_IN_LOG = 200  # and into failures.log, with the stacks that faulthandler writes
STACKS = "Fatal Python error", "Thread 0x", "Current thread 0x"  # first words of stacks
DUMP_S, DUMP_STEP_S = 2.0, 0.1  # time for a hanging worker to write its stacks, polled in steps
FAILURES = "failures.log"  # in the same folder as worker.log
PYTHON = sys.executable, "-P", "-m"  # -P: our folders must not shadow packages of the same name
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
    with path.open("a", encoding="utf-8", errors="backslashreplace") as file:
        file.write("".join(lines))
    lines.clear()


def spawn(*command: str) -> subprocess.Popen[str]:
    """Start a process connected by pipes, in its own session: Ctrl-C reaches the parent alone."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace",
        start_new_session=True,
    )  # fmt: skip


class Worker:
    """A child process. It imports; after `begin` it takes its device, which `about` describes."""

    def __init__(self, device: str, data: Path | None, log: Log) -> None:
        """Start the child. Raises WorkerError."""
        self._arguments = [device, *([str(data)] if data else [])]
        module = stand_in(device)
        try:
            self._child = spawn(*((*PYTHON, module) if module else COMMAND))
        except OSError as error:
            raise WorkerError(f"the worker did not start: {error}") from error
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._log = log
        self._last_lines: list[str] = []
        self._killed = self._begun = False

        def hear(line: str) -> None:
            log.add(line)
            self._last_lines = [*self._last_lines, line][-LINES_IN_LOG:]

        pipes = (self._child.stdout, self._answers.put), (self._child.stderr, hear)
        self._readers = [_reader(*pipe) for pipe in pipes]
        self._end = threading.Thread(target=self._reap, daemon=True)
        self._end.start()
        self.about: dict[str, Any] = {}

    def wait_imported(self) -> None:
        """Wait until the child has imported everything and is idle. Raises WorkerError."""
        self._answer("the worker did not start")

    def begin(self) -> None:
        """Let a spare child take its device; a second call does nothing."""
        if not self._begun:
            self._begun = True
            self._send(self._arguments)

    def wait_ready(self) -> None:
        self.about = self._answer("the worker did not start")

    def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
        """Measure the device's ceilings now. Raises WorkerError."""
        failed = "the ceilings were not measured"
        answer = self._answer(failed, self._send({"ceilings": sorted(dtypes)}))
        if not isinstance(ceilings := answer.get("ceilings"), dict):
            raise WorkerError(f"{failed}: found {str(answer)[:80]}")
        return ceilings

    def _answer(self, failed: str, loss: WorkerLoss | None = None) -> dict[str, Any]:
        answer = loss or self._next(START_TIMEOUT_S)
        if isinstance(answer, WorkerLoss):
            raise WorkerError(f"{failed}: {answer.detail}")
        return answer

    def measure(
        self, contest: Contest, options: Mapping[str, Any], timeout_s: float
    ) -> ContestResult | WorkerLoss:
        """Measure a contest. After a WorkerLoss the child is dead."""
        contenders = [asdict(contender) for contender in contest.contenders]
        nonce = secrets.token_hex(16)  # rows that a kernel writes into the pipe itself lack it
        request = {"problem": asdict(contest.problem), "contenders": contenders, **options}
        request["nonce"] = nonce
        if loss := self._send(request):
            return loss
        case = ""
        while True:
            answer = self._next(timeout_s)
            if isinstance(answer, WorkerLoss):
                if not self._killed:
                    self._explain(contest, options, case, answer.detail, "".join(self._last_lines))
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
                self._kill()
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
        if self._child.stdin and not self._child.stdin.closed:
            with suppress(OSError):
                self._child.stdin.close()
        self._end.join(END_TIMEOUT_S)
        if self._end.is_alive():
            _kill_group(self._child.pid)
            self._end.join()
        code: int = self._child.returncode
        return code

    def kill(self) -> None:
        """Kill the child and everything that it started, without logging the loss."""
        self._killed = True
        self._kill()

    def _kill(self) -> None:
        if self._end.is_alive():
            _kill_group(self._child.pid)
        self.close()

    def _reap(self) -> None:
        """Wait for the child's end, end its group, and report the end once its output is read.

        The child stays a zombie until its group is killed, so that its number is not used again.
        """
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(self._child.pid)
        self._child.wait()
        for reader in self._readers:
            reader.join(DRAIN_S)
        self._answers.put("")

    def _send(self, message: Mapping[str, Any] | list[str]) -> WorkerLoss | None:
        assert self._child.stdin
        try:
            print(json.dumps(message), file=self._child.stdin, flush=True)
        except (OSError, ValueError):  # ValueError: the pipe was closed when the child was ended
            return WorkerLoss("", Status.FAILED, self._last_words(self.close()))
        return None

    def _next(self, timeout_s: float) -> dict[str, Any] | WorkerLoss:
        try:
            line = self._answers.get(timeout=timeout_s)
        except Empty:
            self._dump_stacks()
            self._kill()
            return WorkerLoss("", Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        if not line:
            return WorkerLoss("", Status.FAILED, self._last_words(self.close()))
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        self._kill()
        return WorkerLoss("", Status.FAILED, f"expected an answer in JSON, found {line[:80]!r}")

    def _dump_stacks(self) -> None:
        """Ask a hanging worker for its stacks (worker.py), and give it DUMP_S to write them."""
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGUSR1)
        deadline = time.monotonic() + DUMP_S
        while self._end.is_alive() and time.monotonic() < deadline:
            time.sleep(DUMP_STEP_S)
            if any(line.startswith(STACKS[-1]) for line in self._last_lines):
                time.sleep(DUMP_STEP_S)  # for the frames below it
                return

    def _last_words(self, code: int) -> str:
        lines = takewhile(lambda line: not line.startswith(STACKS), self._last_lines)
        words = " | ".join([word.strip() for word in lines if word.strip()][-LINES_IN_ROW:])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the worker process ended with {how}" + (f": {words}" if words else "")


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


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


def _reader(stream: IO[str] | None, take: Callable[[str], None]) -> threading.Thread:
    def read() -> None:
        assert stream
        with suppress(OSError, ValueError), stream:
            for line in stream:
                take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


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
