"""`sparsebench doctor`: whether this machine is fit to measure."""

import typer

from sparsebench.harness.commands._console import UNFIT, print_json, wide
from sparsebench.harness.commands._options import Device, Json


def doctor(device: Device = None, as_json: Json = False) -> None:
    """Check whether this machine is fit for benchmarks.

    The command suggests remedies and changes nothing.
    """
    from sparsebench.harness.doctor.examination import examine, table
    from sparsebench.harness.doctor.findings import conclusion, unfit
    from sparsebench.harness.machine.device import pick

    findings = examine(pick(device))
    if as_json:
        print_json({"fit": not unfit(findings), "findings": findings})
    else:
        wide().print(table(findings))
        wide().print(conclusion(findings))
    if unfit(findings):
        raise typer.Exit(UNFIT)
