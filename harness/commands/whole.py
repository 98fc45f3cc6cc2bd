"""`sparsebench whole`: measure a whole model with few active hidden units."""

from pathlib import Path
from typing import Annotated

import typer

from sparsebench.harness.commands._console import print_result, progress_bar
from sparsebench.harness.commands._options import Json, Peers, RealDevice, out_file

VOCAB = 49152


def whole(
    mlp: Annotated[
        str, typer.Option(help="Kernels of the op ffn to compare in the forward pass.")
    ] = "cublas,torch_compile,ffn_sparse way=sparse,ffn_twell",
    layers: Annotated[int, typer.Option(help="Layers of the model.", min=1)] = 38,
    width: Annotated[int, typer.Option(help="Width of the model.", min=8)] = 2048,
    hidden: Annotated[int, typer.Option(help="Hidden units of each gated MLP.", min=2)] = 5632,
    heads: Annotated[int, typer.Option(help="Attention heads.", min=1)] = 32,
    vocab: Annotated[int, typer.Option(help="Size of the vocabulary.", min=2)] = VOCAB,
    sequences: Annotated[int, typer.Option(help="Sequences per forward pass.", min=1)] = 64,
    context: Annotated[int, typer.Option(help="Tokens per sequence.", min=2)] = 2048,
    active: Annotated[float, typer.Option(help="Active units per token.", min=0.001)] = 24.0,
    steps: Annotated[
        int,
        typer.Option(
            "--training", help="Sequences per training step; 0 measures no training step.", min=0
        ),
    ] = 8,
    energy: Annotated[
        float, typer.Option(help="Measure energy for this many seconds; 0 measures none.", min=0)
    ] = 0.0,
    peers: Peers = None,
    device: RealDevice = None,
    out: Annotated[Path | None, out_file("JSON file to write.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a whole model with few active hidden units.

    The command measures a forward pass and a training step. By default, the model is that of the
    TwELL paper with 2 billion parameters and as many active units as the paper reports.
    """
    from sparsebench.harness.catalog import load_kernel
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.whole.measure import measure, table
    from sparsebench.harness.models.whole.model import Shape

    shape = Shape(layers, width, hidden, heads, vocab, sequences, context, active)
    kernels, picked = mlp.split(","), pick(device)
    for label in kernels:  # a misspelt name, before the model is made
        load_kernel(label.partition(" ")[0])
    with progress_bar() as show:
        measured = measure(shape, kernels, picked, steps=steps, window_s=energy, to=out, show=show)
    print_result(measured, table, as_json)
