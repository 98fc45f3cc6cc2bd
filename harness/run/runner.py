"""The parent process: contests to rows, through a worker that may crash, hang or run out of memory.

    contest ─> worker ─> rows
                 │ no line in time          the contender last announced: timeout
                 │ gone, or a CUDA error    the contender last announced: failed
                 │ another answer           likewise: it names its contest and has every row
                 └> a fresh worker runs the contest again without it; earlier samples are discarded

A second attempt waits for and announces every sample, so that an error while contenders take turns
finds its owner; where it does not, the contest is given up and every row says so. So it is where
no worker starts.

A worker leads a process group. When it ends, whatever a kernel has started in that group is killed;
what has left the group is waited for no longer than LEFT_S.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, Self

from sparsebench.errors import WorkerError
from sparsebench.harness.bench.timing import possible
from sparsebench.harness.machine.device import simulated
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.record import Case, Contender, Row, Status
from sparsebench.results.store import without_paths

# -P: the repository's own folders must not shadow installed packages of the same name.
COMMAND = (sys.executable, "-P", "-m", "sparsebench.harness.run.worker")
SIMULATED = (sys.executable, "-P", "-m", "sparsebench.harness.sim.worker")
START_TIMEOUT_S = 300.0  # importing torch and starting CUDA on a cold disk
END_TIMEOUT_S = 60.0  # for a child that nobody asks any more; writing a core takes seconds
LEFT_S = 2.0  # for what a dead child's pipes still hold
START_ATTEMPTS = 3
START_PAUSE_S = 1.0  # and twice as long after each attempt: memory, or a GPU, may be freed
BLAMELESS_ATTEMPTS = 2  # attempts that may end without an offender before the contest is given up
WORDS_KEPT = 3  # last lines of a dead worker's stderr that go into a row


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
    """What workers print: kept until there is a file for it."""

    file: Path | None = None
    kept: list[str] = field(default_factory=list)

    def add(self, line: str) -> None:
        """Take one line; it is published, so paths are left out."""
        self.kept.append(without_paths(line))
        if self.file:
            with self.file.open("a") as file:
                file.write("".join(self.kept))
            self.kept.clear()


class Worker:
    """A child process. Its first answer, `about`, describes the device."""

    def __init__(self, device: str, data: Path | None, log: Log) -> None:
        """Start the child and wait until it has its device."""
        arguments = [device, *([str(data)] if data else [])]
        pipe = subprocess.PIPE
        try:
            self._child = subprocess.Popen(
                [*(SIMULATED if simulated(device) else COMMAND), *arguments],
                stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace",
                start_new_session=True,  # Ctrl-C is for the parent, which ends the child's group
            )  # fmt: skip
        except OSError as error:
            raise WorkerError(f"the worker did not start: {error}") from error
        self._answers: SimpleQueue[str] = SimpleQueue()
        self._words: list[str] = []
        self._readers = [
            _reader(self._child.stdout, self._answers.put),
            _reader(self._child.stderr, lambda line: self._hear(line, log)),
        ]
        self._end = threading.Thread(target=self._see_off, daemon=True)
        self._end.start()
        about = self._next(START_TIMEOUT_S)
        if isinstance(about, Lost):
            raise WorkerError(f"the worker did not start: {about.detail}")
        self.about: dict[str, Any] = about

    def ceilings(self) -> dict[str, Any]:
        """Return what the device can do at most, measured now; a WorkerError where it cannot."""
        lost = self._ask({"ceilings": True})
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
                return Lost(case, answer.status, answer.detail)
            try:
                if "at" in answer:
                    case = str(answer["at"][0])
                elif "fatal" in answer:
                    self.close()
                    return Lost(answer["fatal"][0] or case, Status.FAILED, answer["fatal"][1])
                else:
                    rows = [Row.from_json(row) for row in answer["rows"]]
                    _require_all(contest, answer, rows, options["measures"])
                    return Measured(rows, dict(answer["spent_s"]))
            except (ValueError, KeyError, TypeError, LookupError) as error:
                self.kill()
                return Lost(case, Status.FAILED, f"no answer to its contest: {error!r}"[:400])

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
        """End the child at once, and whatever it has started."""
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

    def _ask(self, message: Mapping[str, Any]) -> Lost | None:
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
            self.kill()
            return Lost("", Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        if not line:
            return Lost("", Status.FAILED, self._last_words(self.close()))
        with suppress(ValueError):
            answer = json.loads(line)
            if isinstance(answer, dict):
                return answer
        self.kill()
        return Lost("", Status.FAILED, f"expected an answer in JSON, found {line[:80]!r}")

    def _last_words(self, code: int) -> str:
        words = " | ".join(word.strip() for word in self._words if word.strip())
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"the worker process ended with {how}" + (f": {words}" if words else "")

    def _hear(self, line: str, log: Log) -> None:
        log.add(line)
        self._words = [*self._words, line][-WORDS_KEPT:]


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


def started(device: str, data: Path | None, log: Log) -> Worker:
    """Start a worker, in a few attempts; WorkerError where none succeeds."""
    for attempt in range(START_ATTEMPTS - 1):
        try:
            return Worker(device, data, log)
        except WorkerError as error:
            log.add(f"{error}\n")
            time.sleep(START_PAUSE_S * 2**attempt)
    return Worker(device, data, log)


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
