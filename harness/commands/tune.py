"""`sparsebench tune`: search configurations for this GPU, for a suite or for a model."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench._completion import complete
from sparsebench.errors import SuiteError
from sparsebench.harness.commands._console import SOME_FAILED, measuring, stdout
from sparsebench.harness.commands._options import Data, Device, Only, out_file, require_suite


def tune(
    what: Annotated[
        str,
        typer.Argument(
            metavar="SUITE|MODEL",
            help="A suite, or the folder of a sparse model.",
            autocompletion=complete("suite"),
        ),
    ] = "sparsity",
    device: Device = None,
    minutes: Annotated[
        float, typer.Option(help="Approximate time limit in minutes.", min=0.1, max=1440)
    ] = 10.0,
    only: Only = "",
    out: Annotated[Path | None, out_file("Folder of choices to add to. Default: your own.")] = None,
    data: Data = None,
    tokens: Annotated[
        str | None, typer.Option(help="Tokens of a model's calls: 1-512 (the default) or 1,16,64.")
    ] = None,
) -> None:
    """Search for the fastest kernels and configurations on this GPU.

    Layers and `matmul` take what the command finds, because calls never search. For a model, the
    choices are written beside its weights, and `from_pretrained` takes them from there.
    """
    if (folder := Path(what)).is_dir():
        _tune_model(folder, tokens, device, minutes, only, out, data)
        return
    if tokens is not None:
        raise SuiteError(f"--tokens: expected the folder of a model, found the suite {what}")
    require_suite(what)
    from sparsebench.harness.machine.device import full_name
    from sparsebench.harness.plan.suite import read
    from sparsebench.harness.run.tuning import tune as search

    with measuring("tune") as show:
        tuned = search(read(what, data), full_name(device), minutes, only, out, data, show)
    for line in tuned.lines:
        stdout.say(line)
    if tuned.failures:
        raise typer.Exit(SOME_FAILED)


def _tune_model(
    folder: Path,
    tokens: str | None,
    device: str | None,
    minutes: float,
    only: str,
    out: Path | None,
    data: Path | None,
) -> None:
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.pruning.ahead import counts_of, tune

    if only or data:
        raise SuiteError(f"--only, --data: expected a suite, found the folder {folder}")
    counts, gpu = counts_of(tokens or "1-512"), pick(device)
    if gpu.type != "cuda":
        raise SuiteError(f"--device {gpu}: expected an NVIDIA GPU to tune for")
    with measuring("tune") as show:
        lines = tune(folder, counts, gpu, minutes, out, show)
    for line in lines:
        stdout.say(line)
