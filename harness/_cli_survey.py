"""The commands for a device that nobody has measured: doctor and new-gpu."""

from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer

from sparsebench.errors import SuiteError
from sparsebench.harness._cli import (
    UNFIT,
    Device,
    Json,
    Out,
    measuring,
    out,
    print_json,
    wide,
)
from sparsebench.harness._cli_cluster import Devices, Ways

RESUME = "new-gpu --resume"
PUBLISHED = Path("results/published")
BUDGET_S = 600.0
LEAST_S = 60.0  # of a budget: the doctor, a process and the page take half of it

Budget = Annotated[str | None, typer.Option(help="Time to take: 90s, 10m (the default), 2h.")]
Against = Annotated[
    list[Path] | None,
    typer.Option(help="Runs of other GPUs, or folders of them; default results/published."),
]
Resume = Annotated[Path | None, typer.Option(help="Go on with what a survey did not reach.")]


def doctor(device: Device = None, as_json: Json = False) -> None:
    """Say whether this machine is fit to measure. Say what to do where not; change nothing."""
    from sparsebench.harness.doctor.examination import examine, table
    from sparsebench.harness.doctor.findings import unfit
    from sparsebench.harness.machine.device import pick

    found = examine(pick(device))
    if as_json:
        print_json({"fit": not unfit(found), "findings": [asdict(finding) for finding in found]})
    else:
        wide().print(table(found))
    if unfit(found):
        raise typer.Exit(UNFIT)


def new_gpu(
    device: Device = None,
    budget: Budget = None,
    against: Against = None,
    to: Out = None,
    resume: Resume = None,
    devices: Devices = "",
) -> None:
    """Survey a device: is it fit, what runs, which format wins, and how do other GPUs do."""
    from sparsebench.harness.new_gpu import survey as surveys
    from sparsebench.reports.survey import write

    seconds = None if budget is None else budget_s(budget)
    others = _others(against)
    with measuring(RESUME) as show:
        if resume:
            done = surveys.resume(resume, seconds, lambda step: show)
        else:
            ways = Ways(devices)
            name = ways.first(device)
            path, several = to or _new_path(name), ways.named if ways else []
            done = surveys.survey(name, seconds or BUDGET_S, path, lambda step: show, several)
        page = write(done.path, others)
    for step, why in [*done.notes.items(), *done.left.items()]:
        out.print(f"{step}: {why}", soft_wrap=True, highlight=False, markup=False)
    if done.left:
        out.print(f"sparsebench {RESUME} {done.path} goes on", soft_wrap=True, highlight=False)
    out.print(f"report: {page}", soft_wrap=True, highlight=False)


def _others(against: list[Path] | None) -> list[Path]:
    """Return the folders of other GPUs' runs; one that was named and is not there is an error."""
    for path in against or []:
        if not path.is_dir():
            raise SuiteError(f"--against {path}: expected a run or a folder of runs, found none")
    return against or [path for path in [PUBLISHED] if path.is_dir()]


def _new_path(device: str) -> Path:
    """Return runs/<time>-new-gpu-<device>."""
    from sparsebench.harness.machine.device import pick, simulated, slug

    short = "sim" if simulated(device) else slug(pick(device))
    return Path("runs") / f"{datetime.now(UTC):%Y%m%d-%H%M%S}-new-gpu-{short}"


def budget_s(text: str) -> float:
    """Return the seconds of a budget: 90s, 10m, 1.5h. Raises SuiteError."""
    from sparsebench.harness.plan.duration import seconds

    return seconds("--budget", text, LEAST_S)
