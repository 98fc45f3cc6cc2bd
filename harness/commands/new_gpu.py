"""`sparsebench new-gpu`: survey a GPU that has no published runs."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from sparsebench.errors import SuiteError
from sparsebench.harness.commands._console import measuring, stdout, wide
from sparsebench.harness.commands._options import Device, budget_s, new_run, out_file


def new_gpu(
    device: Device = None,
    budget: Annotated[str, typer.Option(help="Time limit, such as 90s, 10m or 2h.")] = "10m",
    against: Annotated[
        list[Path] | None,
        typer.Option(
            help="Runs from other GPUs to compare with, or folders of such runs. "
            "Default: the published runs."
        ),
    ] = None,
    out: Annotated[Path | None, out_file("Output directory. Default: runs/…")] = None,
) -> None:
    """Survey a GPU in 10 minutes: which sparse formats pay off?"""
    from sparsebench.harness.machine.device import full_name, pick, slug
    from sparsebench.harness.new_gpu import survey as surveys
    from sparsebench.reports.published_runs import published_runs
    from sparsebench.reports.survey_page import STEPS, write

    seconds = budget_s(budget)
    for path in against or []:
        if not path.is_dir():
            raise SuiteError(f"--against {path}: expected a run or a folder of runs, found none")
    others = against or [path for path in [published_runs()] if path.is_dir()]
    with measuring() as show:

        def of_step(step: str) -> Callable[[int, int, str], None]:
            return partial(show, step=step)

        name = full_name(device)
        kind = slug(pick(name)) if name.startswith("cuda") else name.partition(":")[0]
        survey = surveys.survey(name, seconds, out or new_run(f"new-gpu-{kind}"), of_step)
        summary = write(survey.path, others)
    wide().print(summary)
    for step, text in [*survey.notes.items(), *survey.left.items()]:
        stdout.say(f"{STEPS[step]}: {text}")
    if survey.left:
        stdout.say("a longer --budget reaches more")
    stdout.say(f"report: {survey.path / 'report.html'}")
    stdout.say("\n".join(summary.next_steps(survey.path)))
