"""A worker process as its parent sees it: started, asked, heard, ended.

    ─> a contest a line              <─ what is announced, then the rows: JSON lines
                                     <─ tracebacks: into failures.log
                                     <─ stderr: into worker.log, the last words into a row

A worker leads a process group. When it ends, whatever a kernel has started in that group is killed;
what has left the group is waited for no longer than LEFT_S.
"""

import json
import os
import signal
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
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.machine.parent_watch import WAIT
from sparsebench.harness.plan.suite import Contest
from sparsebench.harness.run import early_start as ahead
from sparsebench.results.record import Case, Row, Status
from sparsebench.results.store import without_paths

COMMAND = ahead.MEASURES
SIMULATED = (sys.executable, "-P", "-m", "sparsebench.harness.sim.simulated_worker")
START_TIMEOUT_S = 300.0  # importing torch and starting CUDA on a cold disk
END_TIMEOUT_S = 60.0  # for a child that nobody asks any more; writing a core takes seconds
LEFT_S = 2.0  # for what a dead child's pipes still hold
START_ATTEMPTS = 3
START_PAUSE_S = 1.0  # and twice as long after each attempt: memory, or a GPU, may be freed
WORDS_KEPT = 3  # last lines of a dead worker's stderr that go into a row
LINES_KEPT = 200  # and into failures.log: also the stacks that faulthandler writes
STACKS = "Fatal Python error", "Thread 0x", "Current thread 0x"  # how these begin
DUMP_S, DUMP_STEP_S = 2.0, 0.1  # for the stacks of a worker that hangs, looked for in steps
FAILURES = "failures.log"  # beside worker.log

Explained = Callable[[str, str], None]
"""Called with the reason why a case has no time, in a line, and with its traceback."""


@dataclass(frozen=True)
class Lost:
    """How a worker was lost: the case last announced ("" between cases), and why."""

    case: str
    status: Status
    detail: str


@dataclass(frozen=True)
class Measured:
    """A worker's answer."""

    rows: list[Row]
    spent_s: dict[str, float]


@dataclass
class Log:
    """What workers print, and why cases failed: kept until there are files for it.

    A thread a worker adds to it, so one at a time does.
    """

    file: Path | None = None
    explained: Explained = lambda reason, text: None
    kept: list[str] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    known: set[str] = field(default_factory=set)
    lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, line: str) -> None:
        """Take one line; it is published, so paths are left out."""
        with self.lock:
            self.kept.append(without_paths(line))
            if self.file:
                _append(self.file, self.kept)

    def explain(self, reason: str, text: str) -> None:
        """Take why a case failed."""
        reason, text = without_paths(reason), without_paths(text)
        with self.lock:
            told = "(the traceback is that of an earlier case)" if text in self.known else text
            self.known.add(text)
            self.failures.append(f"{reason}\n{told.rstrip()}\n\n")
            if self.file:
                _append(self.file.with_name(FAILURES), self.failures)
        self.explained(reason, text)


def _append(path: Path, lines: list[str]) -> None:
    """Move lines to the end of a file."""
    with path.open("a") as file:
        file.write("".join(lines))
    lines.clear()


class Worker:
    """A child process. Its first answer, `about`, describes the device.

    A spare one imports everything, and has no device before it is `begun` and `there`.
    """

    def __init__(
        self,
        device: str,
        data: Path | None,
        log: Log,
        *,
        spare: bool = False,
        process: ahead.Process | None = None,
    ) -> None:
        """Start the child and wait until it has its device, unless it is a spare one.

        A `process` that waits already is taken in its place.
        """
        self._given = [device, *([str(data)] if data else [])]
        command = SIMULATED if simulated(device) else COMMAND
        try:
            self._child = process or ahead.spawn(*command, *([WAIT] if spare else self._given))
        except OSError as error:
            raise WorkerError(f"the worker did not start: {error}") from error
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._log = log
        self._words: list[str] = []
        self._unasked = False
        self._readers = [
            _reader(self._child.stdout, self._answers.put),
            _reader(self._child.stderr, lambda line: self._hear(line, log)),
        ]
        self._end = threading.Thread(target=self._see_off, daemon=True)
        self._end.start()
        self.about: dict[str, Any] = {}
        if process and not spare:
            self.imported()
            self.begin()
        if not spare:
            self.there()

    def imported(self) -> None:
        """Wait until a spare child has imported everything and is idle. Raises WorkerError."""
        self._started()

    def begin(self) -> None:
        """Let a spare child take its device."""
        self._ask(self._given)

    def there(self) -> None:
        """Wait until the child has its device. Raises WorkerError."""
        self.about = self._started()

    def _started(self) -> dict[str, Any]:
        said = self._next(START_TIMEOUT_S)
        if isinstance(said, Lost):
            raise WorkerError(f"the worker did not start: {said.detail}")
        return said

    def ceilings(self, dtypes: Collection[str]) -> dict[str, Any]:
        """Return what the device can do at most, measured now; a WorkerError where it cannot."""
        lost = self._ask({"ceilings": sorted(dtypes)})
        answer = lost or self._next(START_TIMEOUT_S)
        if isinstance(answer, Lost):
            raise WorkerError(f"the ceilings were not measured: {answer.detail}")
        if not isinstance(found := answer.get("ceilings"), dict):
            raise WorkerError(f"the ceilings were not measured: found {str(answer)[:80]}")
        return found

    def measure(
        self, contest: Contest, options: Mapping[str, Any], timeout_s: float
    ) -> Measured | Lost:
        """Return the contest's rows, or how the worker was lost over it; then it is dead."""
        contenders = [asdict(contender) for contender in contest.contenders]
        asked = {"problem": asdict(contest.problem), "contenders": contenders, **options}
        if lost := self._ask(asked):
            return lost
        case = ""
        while True:
            answer = self._next(timeout_s)
            if isinstance(answer, Lost):
                if not self._unasked:
                    self._explain(contest, options, case, answer.detail, "".join(self._words))
                return Lost(case, answer.status, answer.detail)
            try:
                if "at" in answer:
                    case = str(answer["at"][0])
                elif "failed" in answer:
                    self._explain(contest, options, *map(str, answer["failed"]))
                elif "fatal" in answer:
                    self.close()
                    return Lost(answer["fatal"][0] or case, Status.FAILED, answer["fatal"][1])
                else:
                    rows = [Row.from_json(row) for row in answer["rows"]]
                    _require_all(contest, answer, rows, options["measures"])
                    return Measured(rows, dict(answer["spent_s"]))
            except (ValueError, TypeError, LookupError) as error:
                self._kill()
                return Lost(case, Status.FAILED, f"no answer to its contest: {error!r}"[:400])

    def _explain(
        self, contest: Contest, options: Mapping[str, Any], case: str, why: str, text: str
    ) -> None:
        """Log why a case of a contest failed; "" is nobody's."""
        problem = contest.problem
        of = {Case(problem, contender).id: contender.label for contender in contest.contenders}
        fields = " ".join(f"{name}={value}" for name, value in problem.fields.items())
        who = f"{of.get(case, 'all contenders')} at {problem.op} {fields}"
        process = f"process {options.get('replicate', 0)}, attempt {options.get('attempt', 0)}"
        self._log.explain(f"{who} ({process}): {why}", text)

    @property
    def pid(self) -> int:
        """Return the child's process id."""
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
        """End the child at once, and whatever it has started; nobody asks it any more."""
        self._unasked = True
        self._kill()

    def _kill(self) -> None:
        if self._end.is_alive():
            _kill_group(self._child.pid)
        self.close()

    def _see_off(self) -> None:
        """Wait for the child's end, end its group, and say so once its last lines are read.

        The child stays a zombie meanwhile, so that no other process can have its number.
        """
        os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(self._child.pid)
        self._child.wait()
        for reader in self._readers:
            reader.join(LEFT_S)
        self._answers.put("")

    def _ask(self, message: Mapping[str, Any] | list[str]) -> Lost | None:
        assert self._child.stdin
        try:
            self._child.stdin.write(json.dumps(message) + "\n")
            self._child.stdin.flush()
        except (OSError, ValueError):  # ValueError: closed, since it was ended
            return Lost("", Status.FAILED, self._last_words(self.close()))
        return None

    def _next(self, timeout_s: float) -> dict[str, Any] | Lost:
        try:
            line = self._answers.get(timeout=timeout_s)
        except Empty:
            self._dump()
            self._kill()
            return Lost("", Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        if not line:
            return Lost("", Status.FAILED, self._last_words(self.close()))
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        self._kill()
        return Lost("", Status.FAILED, f"expected an answer in JSON, found {line[:80]!r}")

    def _dump(self) -> None:
        """Ask a worker that hangs for its stacks (worker.py), and give it DUMP_S to write them."""
        with suppress(ProcessLookupError):
            os.kill(self._child.pid, signal.SIGUSR1)
        late = time.monotonic() + DUMP_S
        while self._end.is_alive() and time.monotonic() < late:
            time.sleep(DUMP_STEP_S)
            if any(line.startswith(STACKS[-1]) for line in self._words):
                time.sleep(DUMP_STEP_S)  # for the frames below it
                return

    def _last_words(self, code: int) -> str:
        own = takewhile(lambda line: not line.startswith(STACKS), self._words)
        words = " | ".join([word.strip() for word in own if word.strip()][-WORDS_KEPT:])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the worker process ended with {how}" + (f": {words}" if words else "")

    def _hear(self, line: str, log: Log) -> None:
        log.add(line)
        self._words = [*self._words, line][-LINES_KEPT:]


def _kill_group(leader: int) -> None:
    """End a process and all of its group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _require_all(
    contest: Contest, answer: Mapping[str, Any], rows: Sequence[Row], measures: Iterable[Any]
) -> None:
    """Raise ValueError unless these are the rows of this contest, each case once a measure."""
    if answer["contest"] != contest.problem.id:
        raise ValueError(f"expected contest {contest.problem.id}, found {answer['contest']!r}")
    cases = [Case(contest.problem, contender).id for contender in contest.contenders]
    expected = sorted((case, *measure) for case in cases for measure in measures)
    found = sorted((row.case.id, row.scope, row.cache) for row in rows)
    if found != expected:
        raise ValueError(f"expected {len(expected)} rows, each once, found {len(found)}")


def _reader(stream: IO[str] | None, take: Callable[[str], None]) -> threading.Thread:
    """Read a stream to its end in the background."""

    def read() -> None:
        assert stream
        with suppress(OSError, ValueError), stream:
            for line in stream:
                take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread


def spare(device: str, data: Path | None, log: Log) -> Worker:
    """Start a worker that has no device yet, or take one that a command started early."""
    early = None if simulated(device) else ahead.taken()
    return Worker(device, data, log, spare=True, process=early)


def started(device: str, data: Path | None, log: Log) -> Worker:
    """Start a worker, in a few attempts; WorkerError where none succeeds."""
    if not simulated(device) and (early := ahead.taken()):
        with suppress(WorkerError):  # then another one is started, as if there had been none
            return Worker(device, data, log, process=early)
    for attempt in range(START_ATTEMPTS - 1):
        try:
            return Worker(device, data, log)
        except WorkerError as error:
            log.add(f"{error}\n")
            time.sleep(START_PAUSE_S * 2**attempt)
    return Worker(device, data, log)
