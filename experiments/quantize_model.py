"""Quantize a model, alone and after pruning, and measure the loss.

    quantize_model.py gemma-3-270m-q4_k_m.gguf --tokens 4096 --out quantized.json

    weights in 4 bits   GPTQ: groups of GROUP weights of a row share a scale, and the rounding error
                        of a column is compensated in all later columns
    fp8                 weights and inputs are rounded to e4m3, each tensor with one scale

Every product of a layer is quantized, each after those before it. The embedding and the head keep
16 bits. Before that, SpenseGPT prunes the MLPs or half of each; zeros stay zeros. The file is that
of `sparsebench prune --json`, and its patterns are `fp8`, `4 bits`, `2:4 in fp8` and
`2:4 in 4 bits`. An error is that of the outputs of the products on held-out inputs.
Source: Frantar et al., arXiv 2210.17323, algorithm 1.
"""

import platform
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor, nn

from sparsebench.errors import SparsebenchError
from sparsebench.harness.machine.device import pick
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.layer import Pruner
from sparsebench.harness.models.reporting import require_writable
from sparsebench.results.model_files import OUTPUT, PRUNING_SCHEMA, Pruning, PruningOutcome
from sparsebench.results.run.store import write_json

GROUP, DAMPING = 128, 0.01
SCALES = 24  # candidates of the scale of a group, from 0.5 to 1 of the one that clips nothing
FP8, FOUR_BITS = "fp8", "4 bits"
DENSE = None, 0.5, 0.0  # fractions of each MLP that stay dense; None: all weights are as they were

Quantize = Callable[[Tensor, Tensor], Tensor]


def to_fp8(tensor: Tensor) -> Tensor:
    """Round to e4m3 with one scale."""
    scale = tensor.abs().max().float() / torch.finfo(torch.float8_e4m3fn).max
    rounded = (tensor / scale).to(torch.float8_e4m3fn).to(torch.float32)
    return (rounded * scale).to(tensor.dtype)


def to_four_bits(weight: Tensor, x: Tensor) -> Tensor:
    """Round a weight [n, k] to 4 bits by GPTQ from inputs x [tokens, k]."""
    columns, inputs = weight.T.float().contiguous(), x.float()  # [k, n]: a column is contiguous
    nonzero, hessian = columns != 0, (inputs.T @ inputs).double()
    hessian.diagonal().add_(DAMPING * hessian.diagonal().mean())
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(hessian))
    upper = torch.linalg.cholesky(inverse, upper=True).float()
    for start in range(0, len(columns), GROUP):
        group, end = columns[start : start + GROUP], start + GROUP
        scale, errors = _scales(group), torch.zeros_like(group)
        for i, column in enumerate(group):
            rounded = _rounded(column, scale) * nonzero[start + i]
            errors[i] = (column - rounded) / upper[start + i, start + i]
            column.copy_(rounded)
            group[i + 1 :].addr_(upper[start + i, start + i + 1 : end], errors[i], alpha=-1)
        columns[end:] -= upper[start:end, end:].T @ errors
    return columns.T.to(weight.dtype)


def _rounded(values: Tensor, scale: Tensor) -> Tensor:
    return (values / scale).round().clamp(-8, 7) * scale


def _scales(group: Tensor) -> Tensor:
    """Return the scale [n] of a group [GROUP, n] with the least squared error among SCALES."""
    most = (group.abs().amax(0) / 7).clamp_min(torch.finfo(torch.float32).tiny)
    shares = torch.linspace(0.5, 1, SCALES, device=group.device)
    scales = most * shares[:, None]  # [SCALES, n]
    errors = torch.stack([(_rounded(group, s) - group).square().sum(0) for s in scales])
    return scales.gather(0, errors.argmin(0)[None])[0]


@torch.no_grad()
def quantize(
    loaded: models.LoadedModel, bits: str, calibration: Tensor, held_out: Tensor
) -> tuple[float, float]:
    """Quantize a model in place, and return the mean error of its products and its loss."""
    count, errors = calibration.numel(), []
    head = loaded.model.get_output_embeddings()
    products = [
        module
        for module in loaded.model.modules()
        if isinstance(module, nn.Linear) and module is not head
    ]

    def replace(module: nn.Linear, inputs: tuple[Tensor, ...]) -> None:
        x = inputs[0].flatten(0, -2)
        before = x[count:] @ module.weight.T
        four = bits == FOUR_BITS
        module.weight.copy_(
            to_four_bits(module.weight, x[:count]) if four else to_fp8(module.weight)
        )
        after = (x[count:] if four else to_fp8(x[count:])) @ module.weight.T
        errors.append(float((after - before).norm() / before.norm()))

    def round_inputs(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (to_fp8(inputs[0]), *inputs[1:])

    with ExitStack() as hooks:
        for module in products:
            hooks.callback(module.register_forward_pre_hook(replace).remove)
        loaded.model.base_model(torch.cat((calibration, held_out)), use_cache=False)
    with ExitStack() as hooks:
        for module in products if bits == FP8 else ():
            hooks.callback(module.register_forward_pre_hook(round_inputs).remove)
        return fmean(errors), models.loss_of(loaded.model, held_out)


def main(
    weights: Annotated[Path, typer.Argument(help="A Hugging Face folder, or a .gguf file.")],
    out: Annotated[Path, typer.Option(help="The JSON file.")],
    calibration: Annotated[Path | None, typer.Option(help="A text file.")] = None,
    tokens: Annotated[int, typer.Option(help="Tokens to calibrate on.", min=1024)] = 8192,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.")] = None,
) -> None:
    """Quantize every product of a model's layers, alone and after pruning."""
    require_writable(out)
    loaded = models.load(weights, pick(device))
    text = calibration.read_text("utf-8") if calibration else models.python_reference()
    origin = f"Python {platform.python_version()}'s language reference"
    origin = calibration.name if calibration else origin
    seen, unseen = models.contexts(loaded, text, tokens, origin)
    loss, start = models.loss_of(loaded.model, unseen), _copy(loaded.model)
    outcomes = []
    for dense in DENSE:
        for bits in (FP8, FOUR_BITS):
            loaded.model.load_state_dict(start)
            if dense is not None:
                models.prune_model(loaded, Pruner(dense=dense), seen, unseen)
            error, after = quantize(loaded, bits, seen, unseen)
            name, sparsity = (bits, 0.0) if dense is None else (f"2:4 in {bits}", (1 - dense) / 2)
            share = 1.0 if dense is None else dense
            outcome = PruningOutcome(
                "quantized", "scored", share, sparsity, {OUTPUT: error}, after, name
            )
            outcomes.append(outcome)
            print(f"{name}, {sparsity:.0%} zeros: loss {after:.4f}, {after - loss:+.4f}")
    facts = weights.name, models.digest(weights), origin, seen.numel(), unseen.numel()
    write_json(out, asdict(Pruning(PRUNING_SCHEMA, *facts, loss, outcomes, unit=loaded.unit)))


def _copy(model: Any) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


if __name__ == "__main__":
    try:
        typer.run(main)
    except SparsebenchError as error:
        sys.exit(f"error: {error}")
