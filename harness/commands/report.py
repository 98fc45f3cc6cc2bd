"""`sparsebench report`: the page, the answer and the tables of a finished run."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_json, stdout, warn_of_changes, wide
from sparsebench.harness.commands._options import (
    Json,
    Markdown,
    RunPath,
    out_file,
    require_one_output,
)


def report(
    path: RunPath,
    out: Annotated[Path | None, out_file("HTML file to write. Default: in the run.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Also write the rows as CSV.")] = None,
    markdown: Markdown = False,
    as_json: Json = False,
) -> None:
    """Write a run's report (one HTML file), and print its answer."""
    require_one_output(as_json, markdown)
    from sparsebench._writing import require_apart
    from sparsebench.reports.build import build
    from sparsebench.reports.terminal import RunAnswer, answer_json, answer_markdown, count_statuses
    from sparsebench.results.run import store
    from sparsebench.results.tables.analysis import analyse
    from sparsebench.results.tables.frame import to_csv

    measured = store.read(path)
    warn_of_changes([path])
    out = out or path / "report.html"
    others = (file for file in path.rglob("*") if file.name != "report.html")
    require_apart([out, csv], others)
    analysis = analyse(measured)
    build(analysis, out)
    if csv:
        to_csv(analysis.rows, csv)
    if as_json:
        head = {"run": str(path), "report": str(out), "cases": count_statuses(analysis)}
        print_json({**head, **answer_json(analysis)})
    elif markdown:
        stdout.write(answer_markdown(analysis))
    else:
        wide().print(RunAnswer(analysis))
        stdout.say(f"report: {out}")
