"""`sparsebench prune`: prune a model and measure the loss."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_json, stdout, wide
from sparsebench.harness.commands._options import Device, Json, out_file


def prune(
    weights: Annotated[
        Path, typer.Argument(help="A model: a Hugging Face folder, or a .gguf file.")
    ],
    calibration: Annotated[
        Path | None, typer.Option(help="A text file. Default: Python's language reference.")
    ] = None,
    method: Annotated[str, typer.Option(help="magnitude, wanda or spensegpt.")] = "spensegpt",
    dense: Annotated[str, typer.Option(help="Fraction of features that stays dense.")] = "0.5",
    region: Annotated[
        str,
        typer.Option(
            help="Features that stay dense: the last, or those with the highest scores (scored)."
        ),
    ] = "scored",
    pattern: Annotated[
        str, typer.Option(help="Pattern of the other features: 2:4, 6:8, 0.5 or 64x64:0.8.")
    ] = "2:4",
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.", min=1024)] = 8192,
    device: Device = None,
    out: Annotated[Path | None, out_file("A new folder for the model.")] = None,
    as_json: Json = False,
) -> None:
    """Prune the MLPs of a model, and measure the loss.

    One region of each MLP stays dense. An option with a list such as "a,b" tries each value.
    """
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.pruning.files import parse_pruners, prune_files, table
    from sparsebench.harness.models.pruning.left_dense import sentence

    pruners = parse_pruners(method, dense, region, pattern)
    pruned = prune_files(weights, pruners, pick(device), text=calibration, tokens=tokens, to=out)
    if as_json:
        print_json(pruned)
    else:
        wide().print(table(pruned))
        stdout.say(f"leaves dense: {sentence(pruned.left_dense or {})}")
