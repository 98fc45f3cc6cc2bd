"""What the commands share: the app, its options, both consoles, exit codes, progress."""

import json
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

GATE_FAILED, BAD_INPUT, SOME_FAILED, UNFIT, INTERRUPTED = 1, 2, 3, 4, 130
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
Timeout = Annotated[float, typer.Option(help="Seconds a contender may stay silent.", min=0.1)]
Replicates = Annotated[
    int, typer.Option(help="Fresh processes to repeat the plan in: 3 to look, 8 to judge.", min=1)
]
Energy = Annotated[bool, typer.Option(help="Also the energy of a call: 2 s a case.")]


def wide() -> Console:
    """Return the console of tables: at least WIDE columns."""
    return Console(width=max(out.width, WIDE))


@contextmanager
def measuring(again: str = "run --resume") -> Iterator[Callable[[int, int, str], None]]:
    """Show progress; a stop, by Ctrl-C or by a scheduler's SIGTERM, keeps what was measured."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with progress_bar() as show:
            yield show
    except KeyboardInterrupt as stop:
        err.print(f"interrupted; what was measured is kept, and {again} goes on")
        raise typer.Exit(INTERRUPTED) from stop
    finally:
        signal.signal(signal.SIGTERM, before)


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
