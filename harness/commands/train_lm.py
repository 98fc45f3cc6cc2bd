"""`sparsebench train-lm`: train small language models with sparse activations or weights."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_result, progress_bar
from sparsebench.harness.commands._options import Json, RealDevice, out_file

L1 = "0,1e-4,1e-3,1e-2,3e-2"  # from no penalty to one that makes most units inactive


def train_lm(
    l1: Annotated[str, typer.Option(help="Coefficients of the L1 term, one model each.")] = L1,
    steps: Annotated[int, typer.Option(help="Training steps per model.", min=1)] = 3000,
    seed: Annotated[int, typer.Option(help="Seed of the weights and the data order.", min=0)] = 0,
    layers: Annotated[int, typer.Option(help="Layers of the decoder.", min=1)] = 6,
    width: Annotated[int, typer.Option(help="Width of the decoder.", min=2)] = 512,
    hidden: Annotated[int, typer.Option(help="Hidden units of each gated MLP.", min=1)] = 2048,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 8,
    context: Annotated[int, typer.Option(help="Bytes per context.", min=16, max=8192)] = 256,
    batch: Annotated[int, typer.Option(help="Contexts per training step.", min=1)] = 64,
    pattern: Annotated[
        str, typer.Option(help="Train block-sparse models: small_world,uniform.")
    ] = "",
    block: Annotated[str, typer.Option(help="Block sizes for --pattern.")] = "32,64",
    sparsity: Annotated[str, typer.Option(help="Sparsities for --pattern.")] = "0.8,0.9",
    seeds: Annotated[
        int, typer.Option(help="Models per setting of --pattern, each with its own seed.", min=1)
    ] = 3,
    dense: Annotated[
        str, typer.Option(help="Further widths of dense models to compare, for --pattern.")
    ] = "",
    data: Annotated[
        Path | None,
        typer.Option(
            help="For --pattern: a .npy file, uint8 [samples, bytes], to learn instead of text."
        ),
    ] = None,
    device: RealDevice = None,
    out: Annotated[
        Path | None,
        out_file(
            "A .safetensors file for an MLP and its inputs, or a new folder for the model "
            "(one --l1); JSON with --pattern."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train small language models and count their active units.

    The models have gated ReLU MLPs and learn Python's own source, byte by byte. For each L1
    coefficient, the table has the sparsity and the loss of the trained model. With --pattern, the
    command compares block-sparse models with dense ones of the same width, of the same number of
    parameters, and, if one of the --dense widths fits, of the same time per training step.
    """
    from sparsebench.errors import SuiteError
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.train_lm import train, widths
    from sparsebench.harness.models.train_lm.model import Sizes
    from sparsebench.harness.models.train_lm.training import Settings

    if not pattern and (data or dense):
        alone = "--data" if data else "--dense"
        raise SuiteError(f"{alone}: expected --pattern beside it, found none")
    settings = Settings(Sizes(layers, width, hidden, heads, context), steps, batch, seed)
    picked = pick(device)
    if pattern:
        plan, more = widths.parse(pattern, block, sparsity), widths.parse_widths(dense)
        with progress_bar() as show:
            compared = widths.train_widths(
                plan, settings, seeds, picked, dense=more, data=data, to=out, show=show
            )
        print_result(compared, widths.table, as_json)
    else:
        coefficients = train.parse_coefficients(l1)
        with progress_bar() as show:
            trained = train.train_all(coefficients, settings, picked, to=out, show=show)
        print_result(trained, train.table, as_json)
