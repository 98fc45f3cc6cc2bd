"""`sparsebench confirm`: measure the largest speedups of a run again, alone."""

from typing import Annotated

import typer

from sparsebench.harness.commands._console import GATE_FAILED, measuring, print_json, stdout
from sparsebench.harness.commands._options import Data, Device, Json, Out, RunPath
from sparsebench.harness.commands._sharing import Sharing


def confirm(
    path: RunPath,
    cases: Annotated[
        int, typer.Option(help="Number of cases, those with the largest speedups first.", min=1)
    ] = 1,
    replicates: Annotated[int, typer.Option(help="Number of fresh processes.", min=6)] = 8,
    device: Device = None,
    data: Data = None,
    out: Out = None,
    as_json: Json = False,
) -> None:
    """Measure a run's largest speedups again, alone."""
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.run.measure import RunOptions
    from sparsebench.harness.run.repeat import Setup, confirmations
    from sparsebench.harness.run.repeat import confirm as measure_again
    from sparsebench.reports.build import build
    from sparsebench.results.run import store
    from sparsebench.results.run.provenance import choices_of
    from sparsebench.results.tables.analysis import analyse

    with measuring() as show:
        options = RunOptions(progress=show)
        setup = Setup(full_name(device), data, out, options, Sharing().measure)
        fresh = measure_again(path, setup, cases, replicates)
    again = store.read(fresh)
    build(analyse(again), fresh / "report.html")
    lines = confirmations(again)
    if as_json:
        print_json({"run": str(fresh), "headlines": lines, "choices": choices_of(again.state)})
    else:
        for line in lines:
            stdout.say(line.sentence)
        screened = again.state["confirms"]["screened"]
        stdout.say(
            f"A first pass over {screened} cells chose what to confirm; its times are not used."
        )
        stdout.say(choices_of(again.state).sentence)
        stdout.say(f"report: {fresh / 'report.html'}")
    if not all(line.confirmed for line in lines):
        raise typer.Exit(GATE_FAILED)
