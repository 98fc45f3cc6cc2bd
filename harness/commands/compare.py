"""`sparsebench compare`: runs beside the first one, and a gate for CI."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench._writing import write_file
from sparsebench.harness.commands._console import GATE_FAILED, print_json, stderr, stdout, wide
from sparsebench.harness.commands._options import Json, Markdown


def compare(
    paths: Annotated[list[Path], typer.Argument(help="Two or more run directories.")],
    page: Annotated[Path | None, typer.Option("--html", help="Also write an HTML page.")] = None,
    markdown: Markdown = False,
    fail_on: Annotated[
        str, typer.Option(help="slower:3% exits with 1 if a case is slower by more.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Compare runs, using the first one given as the reference.

    Speedups over the local baseline come before times.
    """
    from sparsebench.reports import comparison
    from sparsebench.results import store
    from sparsebench.results.changes import failing, threshold
    from sparsebench.results.formatting import are

    limit = threshold(fail_on) if fail_on else None
    compared = comparison.compared([store.read(path) for path in paths])
    if page:
        write_file(page, comparison.html(compared))
    if as_json:
        print_json(comparison.to_json(compared))
    elif markdown:
        stdout.write(comparison.markdown(compared))
    else:
        wide().print(compared)
    if limit is None:
        return
    slower = {name: len(failing(run, limit)) for name, run in compared.others.items()}
    for name, count in slower.items():
        cases = are(count, "case")
        stderr.say(f"{name}: {cases} slower than in A by more than {100 * limit:g} %, or broken")
    if any(slower.values()):
        raise typer.Exit(GATE_FAILED)
