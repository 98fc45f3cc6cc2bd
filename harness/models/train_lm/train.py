"""Train a decoder for each L1 coefficient, and count its active units over held-out text.

All coefficients start from the same weights and see the same bytes in the same order (training.py).

    sparsity.safetensors    the middle layer, in bf16, for every coefficient:
      l1_2e-05.wg .wu       [hidden, width]      trained weights
      l1_2e-05.wd           [width, hidden]
      l1_2e-05.x            [tokens, width]      inputs of the MLP on held-out contexts

Suites read such a file: `source: {file: sparsity.safetensors, tensor: "l1_*"}`. With one
coefficient, the model itself can be written (export.py).
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from math import inf
from pathlib import Path
from statistics import fmean

import torch
from rich.table import Table
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.models.reporting import numbers, require_writable, save_tensors, sheet
from sparsebench.harness.models.train_lm import export
from sparsebench.harness.models.train_lm.model import Decoder
from sparsebench.harness.models.train_lm.text import Text, standard_library
from sparsebench.harness.models.train_lm.training import Settings, Show, count, products, steps
from sparsebench.results.model_files import SPARSITY_SCHEMA, L1Training, L1Trainings

PROGRESS_STEPS = 50
SAMPLE = 4096  # tokens of x in the file, at most


def parse_coefficients(text: str) -> list[float]:
    """Parse a list such as `0,1e-4`; raises SuiteError if it is invalid."""
    coefficients = numbers(
        "l1", text, "numbers of at least 0, such as 0,1e-4", lambda n: 0 <= n < inf
    )
    if len({f"{n:g}" for n in coefficients}) != len(coefficients):  # as tensors are called
        raise SuiteError(f"l1: expected each coefficient once; found {text!r}")
    return coefficients


def train_all(
    coefficients: Sequence[float],
    settings: Settings,
    device: torch.device,
    *,
    to: Path | None = None,
    show: Show = lambda done, total, what: None,
) -> L1Trainings:
    """Train a decoder for each coefficient; write the middle layer of each, or the one model.

    to  a .safetensors file for the layers, or a new folder for the model

    Raises SuiteError if the file cannot be written or a training diverged.
    """
    require_writable(to)
    folder = to if to and not to.suffix else None
    if folder:
        export.require(folder, len(coefficients))
    text, total = standard_library(), len(coefficients) * settings.steps
    sizes, middle = settings.sizes, settings.sizes.layers // 2
    sample = settings.unseen(text)[: SAMPLE // sizes.context, :-1]
    trained: list[L1Training] = []
    tensors: dict[str, Tensor] = {}
    for l1 in coefficients:

        def show_step(step: int, l1: float = l1) -> None:
            show(len(trained) * settings.steps + step, total, f"l1 {l1:g}")

        model, outcome = train(text, l1, settings, device, show_step)
        trained.append(outcome)
        layer = model.layers[middle]
        weights = {name: getattr(layer, name).detach() for name in ("wg", "wu", "wd")}
        weights["x"] = mlp_inputs(model, sample, middle)
        tensors |= {f"l1_{l1:g}.{name}": tensor.bfloat16() for name, tensor in weights.items()}
    if folder:
        export.save(model, sizes, text, folder)
    elif to:
        save_tensors(tensors, to)
    source = *settings.source(text, device), asdict(settings)
    return L1Trainings(SPARSITY_SCHEMA, *source, trained)


def table(report: L1Trainings) -> Table:
    """Return the outcomes for a terminal: means over layers, and active units by layer."""
    sizes = report.settings["sizes"]
    units = f"{sizes['hidden']} units in each of {sizes['layers']} layers"
    names = "l1", "loss (nats)", "zeros", "on", "first token", "rest", "most", "dead", "seconds"
    title = f"{report.text}, {report.held_out} bytes held out; {units}"
    rows = sheet(title, (), names, ("on, by layer",))
    for training in report.trained:
        layers = training.layers
        rows.add_row(
            *(f"{training.l1:g}", f"{training.loss:.4f}", f"{training.mean('zeros'):.2%}"),
            *(f"{training.mean('active'):.1f}", f"{fmean(layer.first[0] for layer in layers):.1f}"),
            *(f"{training.mean('rest'):.1f}", str(max(layer.most for layer in layers))),
            *(f"{training.mean('dead') / sizes['hidden']:.1%}", f"{training.seconds:.0f}"),
            " ".join(f"{layer.active:.0f}" for layer in layers),
        )
    return rows


def train(
    text: Text,
    l1: float,
    settings: Settings,
    device: torch.device,
    show: Callable[[int], None] = lambda step: None,
) -> tuple[Decoder, L1Training]:
    """Return the trained model and its outcome. Raises SuiteError if the training diverged."""
    start, model = time.perf_counter(), Decoder(settings.sizes, settings.seed).to(device)
    for step in steps(model, text, settings, l1):
        if step % PROGRESS_STEPS == 0:
            show(step)
    nats, layers = count(model, settings.unseen(text), settings, f"l1 {l1:g}")
    return model, L1Training(l1, nats, layers, time.perf_counter() - start)


@torch.no_grad()
def mlp_inputs(model: Decoder, tokens: Tensor, number: int) -> Tensor:
    """Return a layer's MLP inputs [contexts * tokens, k] for bytes [contexts, tokens]."""
    device, inputs = model.norm.device, dict[int, Tensor]()
    with products(device):
        model(tokens.to(device), lambda layer, z, _: inputs.update({layer: z}))
    return inputs[number].flatten(0, 1).bfloat16()
