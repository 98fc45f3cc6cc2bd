"""Both consoles, exit codes, progress, warnings, JSON, and interrupts that keep the results."""

import json
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from sparsebench.harness.doctor.findings import DoctorFinding

STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # Ctrl-C, a scheduler, a closed terminal
GATE_FAILED, BAD_INPUT, SOME_FAILED, UNFIT, UNCHECKED, DEFECT, INTERRUPTED = 1, 2, 3, 4, 5, 70, 130
PIPE_COLUMNS = 120  # width of tables in a pipe or a file
RESUME = "run --resume"
EVERY_S = 10.0  # interval of progress lines in a pipe
LEVELS = {"ok": "green", "note": "yellow", "warning": "bold red"}


class Show(Protocol):
    """Called with the parts done, the parts in all, the problem, and the step they are of."""

    def __call__(self, done: int, total: int, problem: str, step: str = "") -> None: ...


class Output(Console):
    """A console that drops its output once the pipe is closed, and lets the command finish.

    With `sparsebench run | head -1` the report is still written and the exit code is unchanged.
    """

    def on_broken_pipe(self) -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def write(self, text: str) -> None:
        """Write text without wrapping or styles."""
        try:
            self.file.write(text)
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()

    def say(self, text: str) -> None:
        """Print text without wrapping, highlighting or markup."""
        self.print(text, soft_wrap=True, highlight=False, markup=False)

    def flag(self, label: str, style: str, text: str) -> None:
        """Print `label: text` with a styled label."""
        line = f"[{style}]{label}:[/] {escape(text)}"
        self.print(line, soft_wrap=True, highlight=False)


if os.environ.get("COLUMNS") == "0":  # a terminal of unknown width, in which Rich prints nothing
    del os.environ["COLUMNS"]
stdout, stderr = Output(), Output(stderr=True)


def wide() -> Output:
    """Return a console for tables: as wide as the terminal or COLUMNS, or else PIPE_COLUMNS."""
    has_width = stdout.is_terminal or "COLUMNS" in os.environ
    return stdout if has_width else Output(width=PIPE_COLUMNS)


def print_json(data: Any) -> None:
    """Print data as JSON; a dataclass becomes an object."""
    stdout.write(json.dumps(data, indent=1, default=asdict) + "\n")


def warn(finding: "DoctorFinding") -> None:
    """Print a finding about the machine on stderr, unless its level is "ok"."""
    if finding.level != "ok":
        text = f"{finding.check}: {finding.found}. {finding.means} {finding.do}".rstrip()
        stderr.flag(finding.level, LEVELS[finding.level], text)


def show_warning(message: Warning | str, *_: object, **__: object) -> None:
    """Print a Python warning as one line on stderr, in place of warnings.showwarning."""
    stderr.flag("warning", LEVELS["warning"], " ".join(str(message).split()))


def warn_of_changes(runs: Iterable[Path]) -> None:
    """Warn of each run that differs from its seal; the command uses its files as they are."""
    from sparsebench.results.run.bundle import first_change

    for run in runs:
        if changed := first_change(run):
            text = f"{changed}; the result below is that of the files as they are now"
            stderr.flag("warning", "yellow", text)


def message_printer() -> "Callable[[DoctorFinding], None]":
    """Return a callback that prints findings and the reason of the first failed case on stderr."""
    from sparsebench.harness.doctor.findings import FAILED

    failed = False

    def on_message(finding: "DoctorFinding") -> None:
        nonlocal failed
        if finding.check != FAILED:
            warn(finding)
        elif not failed:
            failed = True
            text = f"{finding.check}: {finding.found}. {finding.do}"
            stderr.flag("warning", LEVELS["warning"], text)

    return on_message


@contextmanager
def measuring(resume: str = RESUME, out: Path | None = None) -> Iterator[Show]:
    """Show progress, and on a signal keep what was measured and say how to resume.

    resume  the command that takes the path of the interrupted run
    out     the folder with which the same command resumes instead

    The first signal ends the run; further ones are ignored until the results are written. A signal
    that was ignored before, such as SIGHUP under nohup, stays ignored.
    """
    before = {stop: signal.getsignal(stop) for stop in STOPS}
    handled = [stop for stop, handler in before.items() if handler is not signal.SIG_IGN]

    def interrupt(number: int, frame: object) -> None:
        for stop in handled:
            signal.signal(stop, signal.SIG_IGN)
        raise KeyboardInterrupt

    for stop in handled:
        signal.signal(stop, interrupt)
    try:
        with progress_bar() as show:
            yield show
    except KeyboardInterrupt as stopped:
        path = getattr(stopped, "path", "")  # set by measure.Stopped; the tuner needs no path
        command = f"`sparsebench {f'{resume} {path}'.rstrip()}`"
        command = f"the same command with --out {out}" if out else command
        text = f"the results so far are kept; {command} resumes"
        if not (out or path) and resume == RESUME:
            text = "nothing was measured yet"
        with suppress(OSError):  # the terminal may have been closed
            stderr.say(f"interrupted; {text}")
        raise typer.Exit(INTERRUPTED) from stopped
    finally:
        for stop in handled:
            signal.signal(stop, before[stop])


@contextmanager
def progress_bar() -> Iterator[Show]:
    """Show progress on stderr: a bar in a terminal, a line every EVERY_S seconds in a pipe.

    Either has the step, the parts done, the time left, and the problem that is measured.
    """
    if not stderr.is_terminal:
        yield progress_lines()
        return
    columns = (
        TextColumn("{task.fields[step]}"),
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=stderr, transient=True) as progress:
        task = progress.add_task("starting", total=None, step="")

        def show(done: int, total: int, problem: str, step: str = "") -> None:
            progress.update(task, completed=done, total=total, description=problem, step=step)

        yield show


def progress_lines() -> Show:
    """Return a callback that prints the first and the last part, and a line every EVERY_S.

    `screen 20/47 · 1:24 left · m=64 block=64 sparsity=0.9`

    The time left follows from the parts done since the first call, because a resumed run starts
    with some done. When another run follows, the estimate starts again. If that run came before the
    last one was complete, several runs take turns, or one was given up: then none is made.
    """
    due = since = time.monotonic()
    first, last, predictable = -1, (0, 0), True

    def show(done: int, total: int, problem: str, step: str = "") -> None:
        nonlocal due, since, first, last, predictable
        now, (done_before, total_before) = time.monotonic(), last
        if first < 0 or total != total_before or done < done_before:
            predictable = predictable and (first < 0 or done_before >= total_before)
            since, first = now, done
        last, repeated = (done, total), (done, total) == (done_before, total_before)
        if repeated if done == total else now < due:
            return
        due, left = now + EVERY_S, ""
        if predictable and done > first:
            left_s = (now - since) / (done - first) * (total - done)
            left = "{}:{:02d} left".format(*divmod(round(left_s), 60))
        stderr.say(" · ".join(filter(None, [f"{step} {done}/{total}".lstrip(), left, problem])))

    return show
