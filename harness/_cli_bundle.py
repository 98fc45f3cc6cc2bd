"""The commands that start from a finished run: `validate`, `reproduce`, `confirm`."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from sparsebench.harness._cli import (
    GATE_FAILED,
    UNCHECKED,
    Data,
    Device,
    Json,
    Out,
    RunPath,
    measuring,
    out,
    print_json,
    wide,
)
from sparsebench.harness._cli_cluster import Devices, Ways


def validate(
    path: RunPath,
    data: Data = None,
    plugins: Annotated[
        bool, typer.Option("--allow-plugins", help="Import other packages that the suite names.")
    ] = False,
) -> None:
    """Check a run: its hashes, its rows, and that its plan is complete.

    A warning names a tuned contender that is slower than its default, or than in a run beside it.
    """
    from sparsebench.harness.run.validation import validate as validated
    from sparsebench.results.tuning_doubts import siblings

    lines = list[bool]()
    for line in validated(path, data, siblings(path), plugins=plugins):
        out.print(line.said, soft_wrap=True, highlight=False, markup=False)
        lines.append(line.checked)
    if not all(lines):
        raise typer.Exit(UNCHECKED)


def reproduce(
    path: RunPath,
    device: Device = None,
    data: Data = None,
    to: Out = None,
    devices: Devices = "",
    as_json: Json = False,
) -> None:
    """Run a run's own suite again here, and say what agrees."""
    from sparsebench.harness.run.measure import RunOptions, measure
    from sparsebench.harness.run.repeat import reproduce as reproduced
    from sparsebench.reports.build import build
    from sparsebench.reports.comparison import agreement_sheet
    from sparsebench.results import store
    from sparsebench.results.comparison import agreement

    with measuring() as show:
        ways = Ways(devices)
        engine = ways.measure if ways else measure
        fresh = reproduced(path, ways.first(device), data, to, RunOptions(progress=show), engine)
    again = store.read(fresh)
    build(again, fresh / "report.html")
    found = agreement(store.read(path), again)
    if as_json:
        cases = json.loads(found.found.cases.to_json(orient="records"))
        print_json({"run": str(fresh), **found.counts, "cases": cases})
    else:
        wide().print(agreement_sheet(found.found))
        out.print("\n".join(found.sentences), soft_wrap=True, highlight=False, markup=False)
    if not found.reproduced:
        raise typer.Exit(GATE_FAILED)


def confirm(
    path: RunPath,
    cases: Annotated[int, typer.Option(help="How many cases, fastest first.", min=1)] = 1,
    replicates: Annotated[int, typer.Option(help="Fresh processes.", min=6)] = 8,
    device: Device = None,
    data: Data = None,
    to: Out = None,
    as_json: Json = False,
) -> None:
    """Measure a run's largest speed-ups again, alone. Print the headline of the new run."""
    from sparsebench.harness.machine.device import named
    from sparsebench.harness.run.measure import RunOptions
    from sparsebench.harness.run.repeat import confirm as confirmed
    from sparsebench.harness.run.repeat import headlines
    from sparsebench.reports.build import build
    from sparsebench.results import store
    from sparsebench.results.provenance import choices_of

    with measuring() as show:
        options = RunOptions(progress=show)
        fresh = confirmed(
            path, named(device), data, to, options, cases=cases, replicates=replicates
        )
    again = store.read(fresh)
    build(again, fresh / "report.html")
    found = headlines(again)
    if as_json:
        said = [asdict(headline) for headline in found]
        print_json({"run": str(fresh), "headlines": said, "choices": choices_of(again.state)})
    else:
        sentences = [headline.sentence for headline in found]
        screened = f"Chosen among {again.state['confirms']['screened']} cells of a screening"
        sentences.append(f"{screened}, of which no number is used.")
        sentences.append(choices_of(again.state).sentence)
        out.print("\n".join(sentences), soft_wrap=True, highlight=False, markup=False)
    if not all(headline.confirmed for headline in found):
        raise typer.Exit(GATE_FAILED)
