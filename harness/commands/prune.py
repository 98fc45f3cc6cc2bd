"""`sparsebench prune`: prune weights and measure the error."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_json, wide
from sparsebench.harness.commands._options import Device, Json, out_file


def prune(
    weights: Annotated[
        Path, typer.Argument(help="A .safetensors or .gguf file, or a model's folder.")
    ],
    tensors: Annotated[
        str, typer.Option(help="Tensors of a .safetensors file: 'gate,up,down', or one layer.")
    ] = "",
    calibration: Annotated[
        Path | None, typer.Option(help="Activations as .safetensors; for a model, a text file.")
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
    activation: Annotated[str, typer.Option(help="silu, gelu_tanh or relu, for an MLP.")] = "silu",
    split: Annotated[
        str,
        typer.Option(
            help="Side that the dense region splits, for a linear layer: rows or columns."
        ),
    ] = "columns",
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.", min=1024)] = 8192,
    device: Device = None,
    out: Annotated[Path | None, out_file("A .safetensors file, or a model's new folder.")] = None,
    as_json: Json = False,
) -> None:
    """Prune a model or a weight, and measure the loss or the error.

    One region of each MLP stays dense. An option with a list such as "a,b" tries each value.
    """
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.pruning.files import parse_pruners, prune_file, table

    pruned = prune_file(
        weights,
        parse_pruners(method, dense, region, pattern),
        pick(device),
        names=[name for name in tensors.split(",") if name],
        calibration=calibration,
        activation=activation,
        split=split,
        tokens=tokens,
        to=out,
    )
    if as_json:
        print_json(pruned)
    else:
        wide().print(table(pruned))
