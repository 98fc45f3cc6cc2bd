"""The command for a device that nobody has measured: new-gpu."""

import re
from pathlib import Path
from typing import Annotated

import typer

from sparsebench.errors import SuiteError
from sparsebench.harness._cli import Device, Out, measuring, out

UNITS = {"s": 1, "m": 60, "h": 3600}
LEAST_S = 60.0  # of a budget: the doctor, a process and the page take half of it

Budget = Annotated[str | None, typer.Option(help="Time to take: 90s, 10m, 2h.")]
Against = Annotated[
    list[Path] | None,
    typer.Option(help="Runs of other GPUs, or folders of them; default results/published."),
]
Resume = Annotated[Path | None, typer.Option(help="Go on with what a survey did not reach.")]


def new_gpu(
    device: Device = None,
    budget: Budget = None,
    against: Against = None,
    to: Out = None,
    resume: Resume = None,
) -> None:
    """Survey this GPU: is it fit, what runs, which format wins, and how other GPUs do."""
    from sparsebench.harness.machine.device import named
    from sparsebench.harness.new_gpu import survey as surveys
    from sparsebench.reports.survey import write

    seconds = None if budget is None else budget_s(budget)
    if resume:
        with measuring("new-gpu --resume") as show:
            done = surveys.resume(resume, seconds, lambda step: show)
    else:
        with measuring("new-gpu --resume") as show:
            done = surveys.survey(named(device), seconds or 600.0, to, lambda step: show)
    page = write(done.path, against or [Path("results/published")])
    for step, why in done.left.items():
        out.print(f"left out: {step}: {why}", soft_wrap=True, highlight=False, markup=False)
    if done.left:
        out.print(f"sparsebench new-gpu --resume {done.path} goes on", soft_wrap=True)
    out.print(f"report: {page}", soft_wrap=True, highlight=False)


def budget_s(text: str) -> float:
    """Return the seconds of a budget: 90s, 10m, 1.5h. Raises SuiteError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text.strip())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    if seconds < LEAST_S:
        expected = f"expected {LEAST_S:g}s or more, as 90s, 10m or 2h"
        raise SuiteError(f"--budget: {expected}; found {text!r}")
    return seconds
