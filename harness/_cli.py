"""What the commands share: the app, its options, both consoles, exit codes, progress, stops.

Exit codes are documented in harness/README.md, and nowhere else.
"""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

GATE_FAILED, BAD_INPUT, SOME_FAILED, UNFIT, UNCHECKED, DEFECT, INTERRUPTED = 1, 2, 3, 4, 5, 70, 130
STOPS = signal.SIGINT, signal.SIGTERM, signal.SIGHUP  # Ctrl-C, a scheduler, a closed terminal
WIDE = 120  # columns of a table; a narrower terminal wraps lines rather than lose columns

app = typer.Typer(
    help="Compare sparse matrix formats on a GPU, reproducibly.",
    no_args_is_help=True,
    rich_markup_mode=None,  # a usage error is a line, not a box
    add_completion=False,
    pretty_exceptions_enable=False,
)
out, err = Console(), Console(stderr=True)

Json = Annotated[bool, typer.Option("--json", help="Print JSON for a script to read.")]
RunPath = Annotated[Path, typer.Argument(help="A run directory.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N, default the best there is; run: sim or sim:FILE.yaml."),
]
Data = Annotated[Path | None, typer.Option(help="Folder that a suite's source files are in.")]
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


def wide() -> Console:
    """Return the console of tables: at least WIDE columns."""
    return Console(width=max(out.width, WIDE))


@contextmanager
def measuring(again: str = "run --resume") -> Iterator[Callable[[int, int, str], None]]:
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
        with suppress(OSError):  # the terminal may be gone
            err.print(f"interrupted; what was measured is kept, and {again} goes on")
        raise typer.Exit(INTERRUPTED) from stopped
    finally:
        for stop in heard:
            signal.signal(stop, before[stop])


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """Show contests done, the problem being measured and the time left, on stderr."""
    columns = (
        MofNCompleteColumn(),
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=err, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(done: int, total: int, problem: str) -> None:
            progress.update(task, completed=done, total=total, description=problem)

        yield show


def print_json(data: Any) -> None:
    """Print data for a script to read."""
    sys.stdout.write(json.dumps(data, indent=1) + "\n")
