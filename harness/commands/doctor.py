"""`sparsebench doctor`: whether this machine is fit to measure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from sparsebench.harness.commands._console import LEVELS, UNFIT, print_json, wide
from sparsebench.harness.commands._options import Device, Json

if TYPE_CHECKING:
    from sparsebench.harness.doctor.findings import DoctorFinding


def doctor(device: Device = None, as_json: Json = False) -> None:
    """Check whether this machine is fit for benchmarks.

    The command suggests remedies and changes nothing.
    """
    from sparsebench.harness.doctor.examination import examine
    from sparsebench.harness.doctor.findings import conclusion, unfit
    from sparsebench.harness.machine.device import pick

    findings = examine(pick(device))
    if as_json:
        print_json({"fit": not unfit(findings), "findings": findings})
    else:
        wide().print(_table(findings))
        wide().print(conclusion(findings))
    if unfit(findings):
        raise typer.Exit(UNFIT)


def _table(findings: "Sequence[DoctorFinding]") -> Table:
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "check", "found", "what it means, and what to do"):
        shown.add_column(name, overflow="fold")
    for finding in findings:
        advice = " ".join(filter(None, [finding.means, finding.do]))
        level = f"[{LEVELS[finding.level]}]{finding.level}[/]"
        shown.add_row(level, finding.check, escape(finding.found), escape(advice))
    return shown
