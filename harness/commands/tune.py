"""`sparsebench tune`: search configurations for this GPU."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import SOME_FAILED, measuring, stdout
from sparsebench.harness.commands._options import Data, Device, Only, SuiteName, out_file


def tune(
    suite: SuiteName = "sparsity",
    device: Device = None,
    minutes: Annotated[
        float, typer.Option(help="Approximate time limit in minutes.", min=0.1, max=1440)
    ] = 10.0,
    only: Only = "",
    out: Annotated[Path | None, out_file("Folder of choices to add to. Default: your own.")] = None,
    data: Data = None,
) -> None:
    """Search for the fastest kernels and configurations on this GPU.

    Layers and `matmul` take what the command finds, without a search of their own.
    """
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.plan.suite import read
    from sparsebench.harness.run.tuning import tune as search

    with measuring("tune") as show:
        tuned = search(read(suite, data), full_name(device), minutes, only, out, data, show)
    for line in tuned.lines:
        stdout.say(line)
    if tuned.failures:
        raise typer.Exit(SOME_FAILED)
