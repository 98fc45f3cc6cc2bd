"""The commands prune and train-lm make weights and activations.

The command whole measures a model.
"""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsebench.harness._cli import Device, Json, Peers, print_json, progress_bar, wide

if TYPE_CHECKING:
    import torch

    from sparsebench.harness.models.train_lm.train import Settings

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
    pattern: Annotated[
        str, typer.Option(help="Of the others: 2:4, or a fraction pruned anywhere, as 0.5.")
    ] = "2:4",
    activation: Annotated[str, typer.Option(help="Of an MLP: silu, gelu_tanh, relu.")] = "silu",
    split: Annotated[str, typer.Option(help="Of a linear layer: rows or columns.")] = "columns",
    tokens: Annotated[int, typer.Option(help="Of a text, to calibrate on.", min=1024)] = 8192,
    device: Device = None,
    to: Annotated[
        Path | None, typer.Option("--out", help="A .safetensors file, or of a model a directory.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Prune weights to 2:4, or anywhere, beside a dense region. "a,b" in an option tries both."""
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.pruning.command import parse_recipes, prune_file, table

    found = prune_file(
        weights,
        parse_recipes(method, dense, region, pattern),
        pick(device),
        names=[name for name in tensors.split(",") if name],
        calibration=calibration,
        activation=activation,
        split=split,
        tokens=tokens,
        to=to,
    )
    if as_json:
        print_json(asdict(found))
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
    pattern: Annotated[
        str, typer.Option(help="Train block-sparse weights instead: small_world,uniform.")
    ] = "",
    block: Annotated[str, typer.Option(help="Sides of their blocks.")] = "32,64",
    sparsity: Annotated[str, typer.Option(help="Parts of the weights left out.")] = "0.8,0.9",
    seeds: Annotated[int, typer.Option(help="Of each block-sparse model.", min=1)] = 3,
    device: Device = None,
    to: Annotated[
        Path | None,
        typer.Option(
            "--out", help="A .safetensors file: an MLP and its inputs; with --pattern, the JSON."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Train small gated-ReLU language models, and count units on. The text is Python's own source.

    With and without an L1 term on hidden units: what sparsity it brings, and what it costs in loss.
    With --pattern block-sparse models beside dense ones of equal width, and of equal parameters.
    """
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.train_lm.command import parse_coefficients, table, train_all
    from sparsebench.harness.models.train_lm.model import Sizes
    from sparsebench.harness.models.train_lm.train import Settings

    sizes = Sizes(layers, width, hidden, heads, context)
    settings = Settings(sizes, steps, batch, seed)
    if pattern:
        _train_widths(settings, (pattern, block, sparsity), seeds, pick(device), to, as_json)
        return
    coefficients, picked = parse_coefficients(l1), pick(device)
    with progress_bar() as show:
        found = train_all(coefficients, settings, picked, to=to, show=show)
    if as_json:
        print_json(asdict(found))
    else:
        wide().print(table(found))


def _train_widths(
    settings: "Settings",
    asked: tuple[str, str, str],
    seeds: int,
    device: "torch.device",
    to: Path | None,
    as_json: bool,
) -> None:
    from sparsebench.harness.models.train_lm.widths import parse, table, train_widths

    with progress_bar() as show:
        found = train_widths(parse(*asked), settings, seeds, device, to=to, show=show)
    if as_json:
        print_json(asdict(found))
    else:
        wide().print(table(found))


def whole(
    mlp: Annotated[
        str,
        typer.Option(help="Kernels of the op ffn, with options, for the MLPs of a forward pass."),
    ] = "cublas_ffn,torch_compile,ffn_sparse way=sparse,ffn_twell",
    layers: Annotated[int, typer.Option(help="Of the model.", min=1)] = 38,
    width: Annotated[int, typer.Option(help="Of the model.", min=8)] = 2048,
    hidden: Annotated[int, typer.Option(help="Units of each gated MLP.", min=2)] = 5632,
    heads: Annotated[int, typer.Option(help="Of the attention.", min=1)] = 32,
    vocab: Annotated[int, typer.Option(help="Of the embedding, which is the head too.", min=2)] = (
        49152
    ),
    sequences: Annotated[int, typer.Option(help="Of a forward pass.", min=1)] = 64,
    context: Annotated[int, typer.Option(help="Tokens of a sequence.", min=2)] = 2048,
    active: Annotated[float, typer.Option(help="Units that are on for a token.", min=0.001)] = 24.0,
    steps: Annotated[
        int, typer.Option("--training", help="Sequences of a training step; 0: none.", min=0)
    ] = 8,
    energy: Annotated[
        float, typer.Option(help="Seconds of replay for the energy of each; 0: none.", min=0)
    ] = 0.0,
    peers: Peers = None,
    device: Device = None,
    to: Annotated[Path | None, typer.Option("--out", help="A file for the JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Measure a whole model with few hidden units on: a forward pass and a training step.

    As it comes, the model of 2 billion parameters of TwELL's authors, at the units on they report.
    """
    from sparsebench.harness.machine.device import pick
    from sparsebench.harness.models.whole.command import measure, table
    from sparsebench.harness.models.whole.model import Shape

    shape = Shape(layers, width, hidden, heads, vocab, sequences, context, active)
    with progress_bar() as show:
        found = measure(
            shape, mlp.split(","), pick(device), steps=steps, window_s=energy, to=to, show=show
        )
    if as_json:
        print_json(asdict(found))
    else:
        wide().print(table(found))
