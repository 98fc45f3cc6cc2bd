"""`sparsebench compare`: runs or GPUs side by side, and a gate for CI."""

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sparsebench._completion import complete
from sparsebench._writing import require_apart, write_file
from sparsebench.harness.commands._console import (
    GATE_FAILED,
    print_json,
    progress_bar,
    stderr,
    stdout,
    warn_of_changes,
    wide,
)
from sparsebench.harness.commands._options import Json, Markdown, require_one_output

RUNS = Path("runs")


def compare(
    names: Annotated[
        list[str],
        typer.Argument(help="Runs, or GPUs such as H100.", autocompletion=complete("gpu")),
    ],
    among: Annotated[
        list[Path] | None,
        typer.Option(
            "--among",
            help="Folders with the runs that names refer to. Default: the published ones, runs.",
        ),
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="Also write an HTML page.")] = None,
    markdown: Markdown = False,
    every_cell: Annotated[
        bool, typer.Option("--cells", help="Also show every case of two GPUs.")
    ] = False,
    fail_on: Annotated[
        str | None,
        typer.Option(
            help="slower:3% exits with 1 if a kernel became more than 3 % slower, or has no case."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs or GPUs with the first.

    For two GPUs, a table has the times of decoding, prefill, attention and training, and the gains
    of sparsity there. For two runs, it has every case: how the times and the speedups differ, and
    the cause: our kernel, its configuration, a library's version, the baseline or the card.
    """
    require_one_output(as_json, markdown)
    from sparsebench.reports import comparison
    from sparsebench.reports.published_runs import published_runs
    from sparsebench.results.comparison.changes import gate_failures, threshold
    from sparsebench.results.comparison.sides import find
    from sparsebench.results.formatting import are

    limit = None if fail_on is None else threshold(fail_on)
    by_workload = limit is None and not (page or as_json or markdown)
    by_gpu, runs = [], []
    if by_workload and not (among or next(RUNS.rglob("run.json"), None)):
        by_gpu = comparison.published_gpus(names)
    if every_cell or not by_gpu:
        with progress_bar() as show:
            sides = find(names, among or (published_runs(), RUNS), partial(show, step="read"))
        runs = [run.path for side in sides for run in side.runs]
        warn_of_changes(runs)
        by_gpu = by_gpu or (comparison.gpus(sides) if by_workload else [])
    for two in by_gpu:
        wide().print(two.table)
        wide().print(two.sentence, style="bold", highlight=False)
    if by_gpu and not every_cell:
        stdout.say("Every case: --cells")
        return
    compared = comparison.compare_sides(sides)
    require_apart([page], [file for path in runs for file in path.rglob("*")])
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
    failed = {other.b.name: gate_failures(other, limit) for other in compared.others}
    for name, cases in failed.items():
        allowed = f"more than {100 * limit:g} % slower than in {compared.sides[0].name}, or broken"
        stderr.say(f"{name}: {are(len(cases), 'case')} {allowed}")
        for line in cases.to_dict("records"):
            cause = ": ".join(filter(None, [line["cause"], line["why"]]))
            stderr.say(f"  {line['label']}: {cause or 'another kind of GPU'}")
    lost = {other.b.name: other.missing[0] for other in compared.others if other.missing[0]}
    for name, count in lost.items():
        stderr.say(f"{name}: {are(count, 'case')} missing that {compared.sides[0].name} has")
    if lost or any(map(len, failed.values())):
        raise typer.Exit(GATE_FAILED)
