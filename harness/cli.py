"""The command line: each command is a few lines over the library.

Exit codes: 0 all is well; 2 bad input, nothing written; 3 the run finished, but a case came out
wrong, failed, timed out or ran out of memory; 130 interrupted, what was measured is kept.
"""

import json
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

BAD_INPUT, SOME_FAILED, INTERRUPTED = 2, 3, 130
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
    str | None, typer.Option(help="cpu, cuda or cuda:N; default: the best there is.")
]
Data = Annotated[Path | None, typer.Option(help="Folder that a suite's source files are in.")]
Only = Annotated[str, typer.Option(help="Measure less: 'block=64 sparsity=0.9 kernel=bsr_triton'.")]
Timeout = Annotated[float, typer.Option(help="Seconds a contender may stay silent.", min=0.1)]
Replicates = Annotated[int, typer.Option(help="Repeat the plan in fresh processes.", min=1)]


def main() -> int:
    """Run a command and return its exit code; bad input is one line on stderr."""
    from sparsebench.harness._errors import SuiteError
    from sparsebench.results._errors import ResultError

    try:
        app()
    except (SuiteError, ResultError) as error:
        err.print(f"[red]error:[/] {escape(str(error))}", soft_wrap=True, highlight=False)
        return BAD_INPUT
    except SystemExit as end:
        return int(end.code or 0)
    return 0


@app.command("list")
def list_(as_json: Json = False) -> None:
    """Name the ops, formats, kernels and suites, each with its first line."""
    from sparsebench.harness.catalog import listing

    found = listing()
    if as_json:
        _print_json(found)
        return
    for title, entries in found.items():
        table = Table(
            title=title, title_justify="left", title_style="bold", show_header=False, box=None
        )
        for name, line in entries.items():
            table.add_row(name, escape(line))
        out.print(table)


@app.command()
def check(
    suite: Annotated[str, typer.Argument(help="A suite's name, or a file.yaml.")],
    device: Device = None,
    data: Data = None,
    only: Only = "",
    as_json: Json = False,
) -> None:
    """Say how many cases, how long, and what is unsupported here and why; run nothing."""
    from sparsebench.harness.device import pick
    from sparsebench.harness.plan import plan
    from sparsebench.harness.suite import read

    planned = plan(read(suite, data), pick(device), only)
    if as_json:
        _print_json(planned)
        return
    out.print(escape(planned["title"]), style="bold")
    counts = f"{planned['problems']} problems, {planned['cases']} cases"
    estimate = timedelta(seconds=planned["estimate_s"])
    out.print(f"{counts}, {planned['supported']} of them supported on {planned['device']}")
    out.print(f"about {estimate} (h:mm:ss) once compiled")
    for entry in planned["unsupported"]:
        line = f"{entry['cases']:>5}  {entry['contender']}: {entry['reason']}"
        out.print(escape(line), soft_wrap=True, highlight=False)


@app.command()
def run(
    suite: Annotated[str | None, typer.Argument(help="A suite's name, or a file.yaml.")] = None,
    device: Device = None,
    data: Data = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="Run directory; default: runs/...")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with a run that was stopped.")] = None,
    only: Only = "",
    timeout: Timeout = 120.0,
    replicates: Replicates = 1,
    as_json: Json = False,
) -> None:
    """Measure a suite, write its report, and print the answer."""
    from sparsebench.harness.answer import answer, answer_json
    from sparsebench.harness.device import pick
    from sparsebench.harness.measure import Flags, measure
    from sparsebench.harness.suite import read
    from sparsebench.reports.build import build
    from sparsebench.results import store

    if (suite is None) == (resume is None):
        raise typer.BadParameter("expected a suite, or --resume RUN alone")
    if resume:
        before = store.read(resume).state["flags"]
        suite, only, replicates = str(resume / "suite.yaml"), before["only"], before["replicates"]
        data = data or (Path(before["data"]) if before["data"] else None)
        device = device or before["device"]
    flags = Flags(str(pick(device)), data, timeout, replicates, only)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a scheduler's stop is a Ctrl-C
    try:
        with _progress() as show:
            path = measure(read(str(suite), data), flags, to, resume, show)
    except KeyboardInterrupt as stop:
        err.print("interrupted; what was measured is kept, and run --resume goes on")
        raise typer.Exit(INTERRUPTED) from stop
    measured = store.read(path)
    page = path / "report.html"
    build(measured, page)
    counts = Counter(row.status.value for row in measured.rows)
    if as_json:
        _print_json(
            {"run": str(path), "report": str(page), "cases": counts, **answer_json(measured)}
        )
    else:
        _wide().print(answer(measured))
        out.print("cases: " + ", ".join(f"{n} {status}" for status, n in counts.items()))
        out.print(f"report: {page}", soft_wrap=True, highlight=False)
    if counts.keys() - {"ok", "unsupported"}:
        raise typer.Exit(SOME_FAILED)


@app.command()
def report(
    path: RunPath,
    to: Annotated[
        Path | None, typer.Option("--out", help="HTML file; default: in the run.")
    ] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows as CSV.")] = None,
    parquet: Annotated[Path | None, typer.Option(help="Also write the rows as Parquet.")] = None,
) -> None:
    """Write a run's report: one HTML file that opens offline."""
    from sparsebench.reports.build import build
    from sparsebench.results import store
    from sparsebench.results.frame import frame, to_csv, to_parquet

    measured = store.read(path)
    to = to or path / "report.html"
    build(measured, to)
    if csv:
        to_csv(frame(measured.rows), csv)
    if parquet:
        to_parquet(frame(measured.rows), parquet)
    out.print(str(to), soft_wrap=True, highlight=False)


@app.command()
def compare(first: RunPath, second: RunPath, as_json: Json = False) -> None:
    """Set two runs side by side: by ratios to the local baseline, and absolute."""
    from sparsebench.harness.answer import comparison
    from sparsebench.results import store
    from sparsebench.results.compare import compare as compared

    found = compared(store.read(first), store.read(second))
    if as_json:
        _print_json(json.loads(found.cases.to_json(orient="records")))
    else:
        _wide().print(comparison(found))


def _wide() -> Console:
    return Console(width=max(out.width, WIDE))


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
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


def _print_json(data: Any) -> None:
    sys.stdout.write(json.dumps(data, indent=1) + "\n")
