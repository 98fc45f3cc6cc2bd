"""What the commands share: the app, its options, both consoles, exit codes, progress, stops.

Exit codes are documented in harness/README.md, and nowhere else.
"""

import json
import os
import signal
import time
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from sparsebench.harness.doctor.findings import Finding

GATE_FAILED, BAD_INPUT, SOME_FAILED, UNFIT, UNCHECKED, DEFECT, INTERRUPTED = 1, 2, 3, 4, 5, 70, 130
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # Ctrl-C, a scheduler, a closed terminal
WIDE = 120  # columns where there is no window: of a pipe and of a file
RESUME = "run --resume"
EVERY_S = 10.0  # between two lines of progress in a pipe
# Options of `run` that a stopped run has of its own, and those one that is shared out has, too.
OF_A_RUN = "to", "only", "replicates", "energy", "devices", "slurm", "submit", "shards", "shard"
OF_A_PLAN = "device", "data", "timeout"
LEVELS = {"ok": "green", "note": "yellow", "warning": "bold red"}

Show = Callable[[int, int, str], None]
"""Called with parts done, parts in all, and what is next."""


class Output(Console):
    """A console whose reader may go, as `head -1` does: the rest is dropped, the command goes on.

    So `run | head -1` writes its report, and the exit code says what it always says.
    """

    def on_broken_pipe(self) -> None:
        """Write to nowhere from now on."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self.file.fileno())
        os.close(nowhere)

    def write(self, text: str) -> None:
        """Write text as it is: no wrapping, no style."""
        try:
            self.file.write(text)
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()


out, err = Output(), Output(stderr=True)
app = typer.Typer(
    help="Compare sparse matrix formats on a GPU, reproducibly.",
    no_args_is_help=True,
    rich_markup_mode=None,  # a usage error is a line, not a box
    pretty_exceptions_enable=False,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": out.width,  # the first line of a command's help is not cut
    },
)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]
RunPath = Annotated[Path, typer.Argument(help="A run directory.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N, default the best there is; run: sim or sim:FILE.yaml."),
]
Data = Annotated[Path | None, typer.Option(help="Folder that a suite's source files are in.")]
Peers = Annotated[
    Path | None,
    typer.Option(
        help="Folder with checkouts of peers that are no packages (kernels/peers).",
        callback=lambda folder: named_peers(folder),
        exists=True,
        file_okay=False,
        resolve_path=True,
    ),
]
Out = Annotated[Path | None, typer.Option("--out", help="Run directory; default: runs/...")]
Only = Annotated[str, typer.Option(help="Measure less: 'block=64 sparsity=0.8|0.9'.")]
Timeout = Annotated[
    float, typer.Option(help="Seconds a contender may stay silent.", min=0.1, max=86400)
]
Replicates = Annotated[
    int,
    typer.Option(
        help="Fresh processes to repeat the plan in: 3 to look, 8 to judge.", min=1, max=1000
    ),
]
Energy = Annotated[bool, typer.Option(help="Also the energy of a call: 2 s a case.")]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of every failure.")]
Profile = Annotated[
    str, typer.Option(help="Call each case once under ncu or nsys, in an NVTX range of its name.")
]
Repeat = Annotated[
    int,
    typer.Option(
        help="Check each case, then call it so often, untimed: for a profiler of yours.", min=0
    ),
]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown, for pasting.")]
Open = Annotated[bool, typer.Option("--open", help="Open the report in a browser.")]


def named_peers(folder: Path | None) -> Path | None:
    """Tell this process, and those that it starts, where peers' checkouts are."""
    if folder:
        os.environ["SPARSEBENCH_PEERS"] = str(folder)
    return folder


def _version(wanted: bool) -> None:
    if wanted:
        out.write(f"sparsebench {version('sparsebench')}\n")
        raise typer.Exit


@app.callback()
def common(
    _: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Compare sparse matrix formats on a GPU, reproducibly."""


def require_own(given: typer.Context, names: Collection[str]) -> None:
    """Refuse options beside --resume that the run has of its own."""
    found = []
    for option in given.command.params:
        source = given.get_parameter_source(option.name or "")
        if option.name in names and source and source.name == "COMMANDLINE":
            found.append(option.opts[0])
    if found:
        said = f"found {' '.join(found)} beside it"
        raise typer.BadParameter(f"expected --resume RUN, which has flags of its own; {said}")


def wide() -> Output:
    """Return the console of tables: as wide as the window, or WIDE where there is none."""
    return out if out.is_terminal else Output(width=max(out.width, WIDE))


def warn(finding: "Finding") -> None:
    """Say on stderr what is found of the machine, unless it is well."""
    if finding.level != "ok":
        level = f"[{LEVELS[finding.level]}]{finding.level}:[/]"
        said = f"{finding.check}: {finding.found}. {finding.means} {finding.do}".rstrip()
        err.print(f"{level} {escape(said)}", soft_wrap=True, highlight=False)


def telling(debug: bool = False) -> "Callable[[Finding], None]":
    """Return what says on stderr what is found of the machine, and why the first case failed.

    With `debug` it says why every case failed, with its traceback, and so does an error of ours.
    """
    from sparsebench.harness.doctor.findings import FAILED

    failed = 0
    if debug:
        os.environ["SPARSEBENCH_TRACEBACK"] = "1"

    def told(finding: "Finding") -> None:
        nonlocal failed
        if finding.check != FAILED:
            warn(finding)
            return
        failed += 1
        if debug or failed == 1:
            rest = f"\n{finding.means}" if debug else f" {finding.do} --debug prints all."
            said = f"{finding.check}: {finding.found}.{rest}"
            err.print(f"[bold red]warning:[/] {escape(said)}", soft_wrap=True, highlight=False)

    return told


@contextmanager
def measuring(again: str = RESUME) -> Iterator[Show]:
    """Show progress; a stop keeps what was measured.

    The first signal ends the run, and further ones are ignored until it is written. What was
    ignored before, as SIGHUP under nohup, stays so.
    """
    before = {stop: signal.getsignal(stop) for stop in STOPS}
    heard = [stop for stop, handler in before.items() if handler is not signal.SIG_IGN]

    def end(number: int, frame: object) -> None:
        for stop in heard:
            signal.signal(stop, signal.SIG_IGN)
        raise KeyboardInterrupt

    for stop in heard:
        signal.signal(stop, end)
    try:
        with progress_bar() as show:
            yield show
    except KeyboardInterrupt as stopped:
        path = getattr(stopped, "path", "")  # measure.Stopped has it; the tuner needs none
        said = f"what was measured is kept, and {again} {path}".rstrip() + " goes on"
        if not path and again == RESUME:
            said = "nothing was measured yet"
        with suppress(OSError):  # the terminal may be gone
            err.print(f"interrupted; {said}", soft_wrap=True, highlight=False, markup=False)
        raise typer.Exit(INTERRUPTED) from stopped
    finally:
        for stop in heard:
            signal.signal(stop, before[stop])


@contextmanager
def progress_bar() -> Iterator[Show]:
    """Show parts done, the time left, what is measured and who led last, on stderr.

    A window has a bar. A pipe has a line every EVERY_S seconds, and the first and the last.
    """
    if not err.is_terminal:
        yield _lines()
        return
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(done: int, total: int, problem: str) -> None:
            progress.update(task, completed=done, total=total, description=problem)

        yield show


def _lines() -> Show:
    began = time.monotonic()
    due, left = began, _Left()

    def show(done: int, total: int, problem: str) -> None:
        nonlocal due
        now = time.monotonic()
        left_s = left.after(now, done, total)
        if now < due and done < total:
            return
        due = now + EVERY_S
        told = "" if left_s is None else f", {left_s:.0f} s left"
        line = f"{done}/{total} after {now - began:.0f} s{told}  {problem}".rstrip()
        err.print(line, soft_wrap=True, highlight=False, markup=False)

    return show


class _Left:
    """The seconds left, by what was done since the first call: a resumed run begins with some done.

    A run that follows a whole one begins anew. Where another one comes before that, several take
    turns, or one was given up: from then on nobody knows.
    """

    def __init__(self) -> None:
        self._first: tuple[float, int] | None = None
        self._last = 0, 0
        self._known = True

    def after(self, now: float, done: int, total: int) -> float | None:
        """Return the seconds left when so many parts are done; None where that is not known."""
        before, of = self._last
        if self._first is None:
            self._first = now, done
        elif total != of or done < before:
            self._first = now, done
            self._known = self._known and before >= of
        self._last = done, total
        since, first = self._first
        if not self._known or done == first:
            return None
        return (now - since) / (done - first) * (total - done)


def ended(error: BaseException) -> tuple[int, str]:
    """Return the exit code and the line for what ended a command."""
    from sparsebench.errors import SparsebenchError, WorkerError

    match error:
        case SystemExit():
            return int(error.code or 0), ""
        case KeyboardInterrupt():
            return INTERRUPTED, "interrupted"
        case SparsebenchError():
            return BAD_INPUT, str(error)
        case WorkerError():
            return UNFIT, str(error)
        case OSError():
            return BAD_INPUT, f"{error.filename or 'a file'}: {error.strerror or error}"
        case MemoryError():
            return BAD_INPUT, "expected enough memory, found none left"
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    hint = "SPARSEBENCH_TRACEBACK=1 shows where"
    said = f"{type(error).__name__}: {error} ({place}; {hint})"
    plugin = _plugin(error)
    if plugin:
        return BAD_INPUT, f"an error of the plug-in {plugin}: {said}"
    return DEFECT, f"an error of sparsebench: {said}"


def _plugin(error: BaseException) -> str | None:
    """Name the package of others that an error comes from: libraries below it have no fault."""
    from sparsebench._discovery import others

    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    packages = [frame.f_globals.get("__name__", "").partition(".")[0] for frame in frames]
    named = [name for name in packages if name in {"sparsebench", *others}]
    return named[-1] if named and named[-1] != "sparsebench" else None


def show_page(page: Path) -> None:
    """Open a report in a browser."""
    if typer.launch(page.resolve().as_uri()) != 0:
        err.print(f"no browser opened {page}", soft_wrap=True, highlight=False, markup=False)


def print_json(data: Any) -> None:
    """Print data for a script to read."""
    out.write(json.dumps(data, indent=1) + "\n")
