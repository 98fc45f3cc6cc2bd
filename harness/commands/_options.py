"""Option types that several commands share."""

import os
from collections.abc import Collection
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from sparsebench._completion import complete

LEAST_BUDGET_S = 60.0  # least budget; the doctor, one process and the page take half of it


def _set_peers(folder: Path | None) -> Path | None:
    """Tell this process and its children where the checkouts of peers are."""
    if folder:
        os.environ["SPARSEBENCH_PEERS"] = str(folder)
    return folder


def require_run(run: Path) -> Path:
    """Raise ResultError if a run is missing, before a command imports torch for seconds."""
    from sparsebench.results.run.bundle import require_directory

    require_directory(run)
    return run


def every_run(paths: list[Path] | None) -> list[Path]:
    """Return run directories with those of surveys. Raises ResultError if one is missing."""
    from sparsebench.results.run.bundle import runs_of

    return [run for path in paths or () for run in runs_of(path)]


def require_suite(suite: str | None) -> str | None:
    """Raise SuiteError if no suite has a name, before a command imports torch for seconds."""
    from sparsebench.harness.plan.document import document

    if suite is not None:
        document("suites", "suite", suite)
    return suite


def out_file(text: str) -> Any:
    """Return the option --out of a command, with its help."""
    return typer.Option("--out", help=text)


def new_run(name: str) -> Path:
    """Return the folder of a run that starts now."""
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{name}"


_suite = typer.Argument(
    metavar="SUITE",
    help="A suite's name, or a file.yaml.",
    callback=require_suite,
    autocompletion=complete("suite"),
)
SuiteName = Annotated[str, _suite]
AnySuite = Annotated[str | None, _suite]
RunPath = Annotated[Path, typer.Argument(help="A run directory.", callback=require_run)]
RunPaths = Annotated[
    list[Path],
    typer.Argument(help="Run directories, or folders of `new-gpu`.", callback=every_run),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="Print Markdown.")]
Out = Annotated[Path | None, out_file("Run directory to write. Default: runs/…")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda or cuda:N. Default: the first GPU, or the CPU if there is none."),
]
Data = Annotated[
    Path | None,
    typer.Option(
        help="Folder with the source files that a suite names.", exists=True, file_okay=False
    ),
]
Peers = Annotated[
    Path | None,
    typer.Option(
        help="Folder with checkouts of other authors' kernels, for peers that need them.",
        callback=_set_peers,
        exists=True,
        file_okay=False,
        resolve_path=True,
    ),
]
Only = Annotated[str, typer.Option(help="Select cases, such as 'block=64 sparsity=0.8|0.9'.")]
Timeout = Annotated[
    float,
    typer.Option(
        help="Stop a contender that gives no answer for this many seconds.", min=0.1, max=86400
    ),
]
Replicates = Annotated[
    int,
    typer.Option(
        help="Fresh processes: 3 for a look; 8 for a verdict, with intervals.", min=1, max=1000
    ),
]
Energy = Annotated[
    bool,
    typer.Option(
        help="Also measure energy and time per call half loaded and back to back, 8 s a case."
    ),
]
Debug = Annotated[bool, typer.Option("--debug", help="Print the traceback of every failure.")]
Repeat = Annotated[
    int,
    typer.Option(
        help="Check each case, then call it N times for a profiler, without timing; 0: time it.",
        min=0,
    ),
]
Plugins = Annotated[
    bool, typer.Option("--allow-plugins", help="Allow suites that import other packages.")
]
Budget = Annotated[str | None, typer.Option(help="Time limit: 90s, 10m or 2h. Default: none.")]


def budget_s(text: str) -> float:
    """Return the seconds of a budget such as 90s, 10m or 1.5h. Raises SuiteError."""
    from sparsebench.harness.plan.limits import seconds

    return seconds("--budget", text, LEAST_BUDGET_S)


def refuse_beside_resume(context: typer.Context, names: Collection[str]) -> None:
    """Raise BadParameter if options were given that a resumed run takes from its directory."""
    extra = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source and source.name == "COMMANDLINE":
            extra.append(option.opts[0])
    if extra:
        expected = "expected --resume RUN, which keeps the flags of the run"
        raise typer.BadParameter(f"{expected}; found {' '.join(extra)} beside it")


def require_one_output(as_json: bool, markdown: bool) -> None:
    """Raise BadParameter if a command should print both JSON and Markdown."""
    if as_json and markdown:
        raise typer.BadParameter("expected --json or --markdown, found both")
