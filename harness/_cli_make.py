"""The commands that make weights and activations to measure: prune and train-lm."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness._cli import Device, Json, print_json, progress_bar, wide

L1 = "0,1e-4,1e-3,1e-2,3e-2"  # of train-lm: from none to where most units are off


def prune(
    weights: Annotated[
        Path, typer.Argument(help="A .safetensors file; a Hugging Face directory, or a .gguf file.")
    ],
    tensors: Annotated[
        str, typer.Option(help="Of a .safetensors file: 'gate,up,down', or one linear layer.")
    ] = "",
    calibration: Annotated[
        Path | None,
        typer.Option(help="Activations [tokens, k], .safetensors; for a model a text file."),
    ] = None,
    method: Annotated[str, typer.Option(help="magnitude, wanda or spensegpt.")] = "spensegpt",
    dense: Annotated[str, typer.Option(help="Fraction of features that stays dense.")] = "0.5",
    region: Annotated[str, typer.Option(help="Which features: last or scored.")] = "scored",
    activation: Annotated[str, typer.Option(help="Of an MLP: silu, gelu_tanh, relu.")] = "silu",
    split: Annotated[str, typer.Option(help="Of a linear layer: rows or columns.")] = "columns",
    tokens: Annotated[int, typer.Option(help="Of a text, to calibrate on.", min=1024)] = 8192,
    device: Device = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="A .safetensors file, or of a model a directory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prune weights to 2:4 beside a dense region. "a,b" for method, dense or region tries both."""
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.pruning.command import parse_recipes, prune_file, table

    found = prune_file(
        weights,
        parse_recipes(method, dense, region),
        pick(device),
        names=[name for name in tensors.split(",") if name],
        calibration=calibration,
        activation=activation,
        split=split,
        tokens=tokens,
        to=to,
    )
    if as_json:
        print_json(found.to_json())
    else:
        wide().print(table(found))


def train_lm(
    l1: Annotated[str, typer.Option(help="Coefficients of the L1 term, each a training.")] = L1,
    steps: Annotated[int, typer.Option(help="Of each training.", min=1)] = 3000,
    seed: Annotated[int, typer.Option(help="Of weights and of the bytes' order.", min=0)] = 0,
    layers: Annotated[int, typer.Option(help="Of the decoder.", min=1)] = 6,
    width: Annotated[int, typer.Option(help="Of the decoder.", min=2)] = 512,
    hidden: Annotated[int, typer.Option(help="Units of each gated MLP.", min=1)] = 2048,
    heads: Annotated[int, typer.Option(help="Of the attention.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Bytes of a context.", min=16, max=8192)] = 256,
    batch: Annotated[int, typer.Option(help="Contexts a step.", min=1)] = 64,
    device: Device = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="A .safetensors file: an MLP and its inputs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Train small gated-ReLU language models, and count units on. The text is Python's own source.

    With and without an L1 term on hidden units: what sparsity it brings, and what it costs in loss.
    """
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.train_lm.command import parse_coefficients, table, train_all
    from sparsebench.harness.train_lm.model import Sizes
    from sparsebench.harness.train_lm.train import Settings

    sizes = Sizes(layers, width, hidden, heads, context)
    settings = Settings(sizes, steps, batch, seed)
    coefficients, picked = parse_coefficients(l1), pick(device)
    with progress_bar() as show:
        found = train_all(coefficients, settings, picked, to=to, show=show)
    if as_json:
        print_json(found.to_json())
    else:
        wide().print(table(found))
