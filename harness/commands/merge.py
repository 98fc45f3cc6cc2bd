"""`sparsebench merge`: join the parts of one plan."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import stdout, wide
from sparsebench.harness.commands._options import Data, Plugins, RunPaths


def merge(
    paths: RunPaths,
    out: Annotated[Path, typer.Option("--out", help="Run directory to write.")],
    data: Data = None,
    replicates: Annotated[
        int | None,
        typer.Option(help="Keep only the first N processes of a run that ended early."),
    ] = None,
    plugins: Plugins = False,
) -> None:
    """Merge the parts of one plan into a single run."""
    from sparsebench.harness.shared_runs.merging import merge as join
    from sparsebench.results.run import store

    run = store.read(join(paths, out, data, plugins=plugins, replicates=replicates))
    # No error of the merge has to wait for the imports of a report.
    from sparsebench.reports.build import build
    from sparsebench.reports.terminal import RunAnswer
    from sparsebench.results.tables.analysis import analyse

    analysis = analyse(run)
    build(analysis, out / "report.html")
    wide().print(RunAnswer(analysis))
    stdout.say(f"report: {out / 'report.html'}")
