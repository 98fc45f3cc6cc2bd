"""`sparsebench reproduce`: measure a finished run again and compare."""

import typer

from sparsebench.harness.commands._console import GATE_FAILED, measuring, print_json, stdout, wide
from sparsebench.harness.commands._options import Data, Device, Json, Out, RunPath
from sparsebench.harness.commands._sharing import Devices, Sharing


def reproduce(
    path: RunPath,
    device: Device = None,
    data: Data = None,
    out: Out = None,
    devices: Devices = "",
    as_json: Json = False,
) -> None:
    """Measure a run again on this machine: do the results agree?"""
    from sparsebench.harness.run.measure import RunOptions
    from sparsebench.harness.run.repeat import Setup
    from sparsebench.harness.run.repeat import reproduce as measure_again
    from sparsebench.reports.build import build
    from sparsebench.reports.comparison import compare_sides, reproduction, to_json
    from sparsebench.results.comparison.sides import side
    from sparsebench.results.run import store
    from sparsebench.results.tables.analysis import analyse

    with measuring() as show:
        sharing = Sharing(devices)
        first, options = sharing.first(device), RunOptions(progress=show)
        fresh = measure_again(path, Setup(first, data, out, options, sharing.measure))
    again = store.read(fresh)
    build(analyse(again), fresh / "report.html")
    compared = compare_sides([side(store.read(path), name="there"), side(again, name="here")])
    result = reproduction(compared.others[0])
    if as_json:
        cases = to_json(compared)["changes"]["here"]["cases"]
        print_json({"run": str(fresh), **result, "cases": cases})
    else:
        wide().print(compared)
        stdout.say(result["sentence"])
    if not result["reproduced"]:
        raise typer.Exit(GATE_FAILED)
