"""The command that holds runs against each other: compare."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness._cli import GATE_FAILED, Json, err, out, print_json, wide


def compare(
    paths: Annotated[list[Path], typer.Argument(help="Two run directories or more.")],
    page: Annotated[Path | None, typer.Option("--html", help="Also write a page.")] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print Markdown, for a pull request.")
    ] = False,
    fail_on: Annotated[
        str, typer.Option(help="slower:3% ends with exit code 1 if a case is slower by more.")
    ] = "",
    as_json: Json = False,
) -> None:
    """Hold runs against the first one. Ratios to the local baseline come before times."""
    from sparsebench.reports import comparison
    from sparsebench.results import store
    from sparsebench.results.changes import failing, threshold
    from sparsebench.results.formatting import are

    limit = threshold(fail_on) if fail_on else None
    found = comparison.compared([store.read(path) for path in paths])
    if page:
        page.write_text(comparison.html(found), "utf-8")
    if as_json:
        print_json(comparison.to_json(found))
    elif markdown:
        out.write(comparison.markdown(found))
    else:
        wide().print(found)
    if limit is None:
        return
    bad = {name: len(failing(own, limit)) for name, own in found.others.items()}
    for name, count in bad.items():
        slower = f"slower than in A by more than {100 * limit:g} %, or broken"
        said = f"{name}: {are(count, 'case')} {slower}"
        err.print(said, soft_wrap=True, highlight=False)
    if any(bad.values()):
        raise typer.Exit(GATE_FAILED)
