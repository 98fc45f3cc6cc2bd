"""A child process that answers in JSON: start it, send it lines, read its answers, end it.

    ─> a line for each request       <─ answers: one JSON object a line
                                     <─ stderr: lines go to `hear`, the last ones into a reason

`Child` is the parent's side, and `answer_parent` begins the child's.
A child leads a process group. When it ends, every process that it started in that group is killed.
The parent waits at most DRAIN_S for output of processes that left the group.
"""

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import takewhile
from queue import Empty, SimpleQueue
from typing import IO, Any

from sparsebench.errors import WorkerError
from sparsebench.harness.machine.parent_watch import end_with_parent
from sparsebench.results.files import ROWS_BYTES, parse_json
from sparsebench.results.record import Status

END_TIMEOUT_S = 60.0  # wait for a child that is no longer needed; writing a core takes seconds
DRAIN_S = 2.0  # to read what a dead child left in its pipes
LINES_IN_ROW = 3  # last lines of a dead child's stderr that go into a row
LONGEST_LINE = 2**16  # characters of a line of stderr
LINES_IN_LOG = 200  # and into failures.log, with the stacks that faulthandler writes
STACKS = "Fatal Python error", "Thread 0x", "Current thread 0x"  # first words of stacks
DUMP = signal.SIGUSR1  # asks for the stacks of all threads, on stderr
DUMP_S, DUMP_STEP_S = 2.0, 0.1  # time for a hanging child to write its stacks, polled in steps
PYTHON = sys.executable, "-P", "-m"  # -P: our folders must not shadow packages of the same name


Send = Callable[[Mapping[str, Any]], None]
"""Sends an answer to the parent."""


def answer_parent() -> Send:
    """Become a child that answers, and ends with its parent; what it prints goes to stderr."""
    end_with_parent()
    faulthandler.enable()  # the stack of a crash, on stderr
    faulthandler.register(DUMP)
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for stream in (sys.stdout, sys.stderr):  # the parent reads UTF-8, whatever the locale is
        assert isinstance(stream, TextIOWrapper)
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")

    def send(message: Mapping[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    return send


@dataclass(frozen=True)
class ChildLoss:
    """The end of a child, and the reason."""

    status: Status
    detail: str


def spawn(*command: str) -> subprocess.Popen[str]:
    """Start a process connected by pipes, in its own session: Ctrl-C reaches the parent alone."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, stdin=pipe, stdout=pipe, stderr=pipe, encoding="utf-8", errors="replace",
        start_new_session=True,
    )  # fmt: skip


class Child:
    """A child process; after a ChildLoss it is dead.

    what        names it in reasons: "the worker process"
    last_lines  of its stderr
    """

    def __init__(
        self,
        what: str,
        command: Sequence[str],
        hear: Callable[[str], object],
        longest: int = ROWS_BYTES,
    ) -> None:
        """Start the child, which is ended by an answer that is too long. Raises WorkerError."""
        self._what = what
        try:
            self._process = spawn(*command)
        except OSError as error:
            raise WorkerError(f"{what} did not start: {error}") from error
        self._answers: SimpleQueue[str] = SimpleQueue()
        self.last_lines: list[str] = []

        def remember(line: str) -> None:
            hear(line)
            self.last_lines = [*self.last_lines, line][-LINES_IN_LOG:]

        self._readers = [
            _reader(self._process.stdout, self._answers.put, longest),
            _reader(self._process.stderr, remember, LONGEST_LINE),
        ]
        self._end = threading.Thread(target=self._reap, daemon=True)
        self._end.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def send(self, message: Mapping[str, Any] | Sequence[str]) -> ChildLoss | None:
        assert self._process.stdin
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except (OSError, ValueError):  # ValueError: the pipe was closed when the child was ended
            return ChildLoss(Status.FAILED, self._last_words(self.close()))
        return None

    def next(self, timeout_s: float) -> dict[str, Any] | ChildLoss:
        """Return the next answer."""
        try:
            line = self._answers.get(timeout=timeout_s)
        except Empty:
            self._dump_stacks()
            self.kill()
            return ChildLoss(Status.TIMEOUT, f"no answer within {timeout_s:g} s")
        if not line:
            return ChildLoss(Status.FAILED, self._last_words(self.close()))
        with suppress(ValueError, RecursionError):
            answer = parse_json(line)
            if isinstance(answer, dict):
                return answer
        self.kill()
        return ChildLoss(Status.FAILED, f"expected an answer in JSON, found {line[:80]!r}")

    def close(self) -> int:
        """End the child, whatever it is doing, and return its exit code."""
        if self._process.stdin and not self._process.stdin.closed:
            with suppress(OSError):
                self._process.stdin.close()
        self._end.join(END_TIMEOUT_S)
        if self._end.is_alive():
            _kill_group(self._process.pid)
            self._end.join()
        code: int = self._process.returncode
        return code

    def kill(self) -> None:
        """Kill the child and everything that it started."""
        if self._end.is_alive():
            _kill_group(self._process.pid)
        self.close()

    def _reap(self) -> None:
        """Wait for the child's end, end its group, and report the end once its output is read.

        The child stays a zombie until its group is killed, so that its number is not used again.
        """
        os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
        _kill_group(self._process.pid)
        self._process.wait()
        for reader in self._readers:
            reader.join(DRAIN_S)
        self._answers.put("")

    def _dump_stacks(self) -> None:
        """Ask a hanging child for its stacks, and give it DUMP_S to write them."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, DUMP)
        deadline = time.monotonic() + DUMP_S
        while self._end.is_alive() and time.monotonic() < deadline:
            time.sleep(DUMP_STEP_S)
            if any(line.startswith(STACKS[-1]) for line in self.last_lines):
                time.sleep(DUMP_STEP_S)  # for the frames below it
                return

    def _last_words(self, code: int) -> str:
        lines = takewhile(lambda line: not line.startswith(STACKS), self.last_lines)
        words = " | ".join([word.strip() for word in lines if word.strip()][-LINES_IN_ROW:])
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        return f"{self._what} ended with {how}" + (f": {words}" if words else "")


def _kill_group(leader: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _reader(stream: IO[str] | None, take: Callable[[str], None], most: int) -> threading.Thread:
    """Take each line of a stream, or the parts of one that has more characters."""

    def read() -> None:
        assert stream
        with suppress(OSError, ValueError), stream:
            while line := stream.readline(most):
                take(line)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread
