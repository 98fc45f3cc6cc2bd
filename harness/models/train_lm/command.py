"""What `sparsebench train-lm` does: one decoder a coefficient, what each came to, and a file.

    sparsity.safetensors    of the middle layer, in bf16, for every coefficient:
      l1_2e-05.wg .wu       [hidden, width]      as trained
      l1_2e-05.wd           [width, hidden]
      l1_2e-05.x            [tokens, width]      what the MLP is given on held-out contexts

A suite takes them as they are: `source: {file: sparsity.safetensors, tensor: "l1_*"}` (suite.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.models.train_lm.model import Decoder
from sparsebench.harness.models.train_lm.text import evenly, standard_library
from sparsebench.harness.models.train_lm.train import Settings, mlp_inputs, train
from sparsebench.results.model_files import SPARSITY_SCHEMA, L1Training, L1Trainings

SAMPLE = 4096  # tokens of x in the file, at most


def parse_coefficients(written: str) -> list[float]:
    """Return the numbers of a list with commas, such as `0,1e-4`; SuiteError where one is not."""
    expected = "expected coefficients of 0 or more, each once, such as 0,1e-4"
    try:
        numbers = [float(number) for number in written.split(",")]
    except ValueError as error:
        raise SuiteError(f"l1: {expected}; found {written!r}") from error
    if len(set(numbers)) != len(numbers) or not all(0 <= n < float("inf") for n in numbers):
        raise SuiteError(f"l1: {expected}; found {written!r}")
    return numbers


def train_all(
    coefficients: Sequence[float],
    settings: Settings,
    device: torch.device,
    *,
    to: Path | None = None,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> L1Trainings:
    """Train a decoder with each coefficient; write the middle layer of each to a file if asked.

    Raises SuiteError where a file cannot be written, or a training diverged.
    """
    if to and not to.parent.is_dir():
        raise SuiteError(f"{to}: expected a folder to write into; found no {to.parent}")
    text, sizes = standard_library(), settings.sizes
    unseen = evenly(text.unseen, settings.held_out, sizes.context)
    trained: list[L1Training] = []
    tensors: dict[str, Tensor] = {}
    for number, l1 in enumerate(coefficients):
        total = len(coefficients) * settings.steps
        shown = partial(_show, show, number * settings.steps, total, f"l1 {l1:g}")
        model, outcome = train(text, l1, settings, device, shown)
        trained.append(outcome)
        tensors |= _named(f"l1_{l1:g}", model, unseen[: SAMPLE // sizes.context, :-1])
    if to:
        _write(to, tensors)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    seen, counted = len(text.seen), unseen[:, 1:].numel()
    what = text.name, text.sha256, seen, counted, name, asdict(settings)
    return L1Trainings(SPARSITY_SCHEMA, *what, trained)


def table(report: L1Trainings) -> Table:
    """Return the outcomes for a terminal: means over layers, and units on by layer."""
    shown = Table(box=None, title_justify="left", title_style="bold")
    sizes = report.settings["sizes"]
    units = f"{sizes['hidden']} units in each of {sizes['layers']} layers"
    shown.title = f"{report.text}, {report.held_out} bytes held out; {units}"
    names = "l1", "loss (nats)", "zeros", "on", "first token", "rest", "most", "dead", "seconds"
    for name in names:
        shown.add_column(name, justify="right")
    shown.add_column("on, by layer")
    for one in report.trained:
        first = sum(layer.first[0] for layer in one.layers) / len(one.layers)
        means = f"{one.mean('active'):.1f}", f"{first:.1f}", f"{one.mean('rest'):.1f}"
        most = max(layer.most for layer in one.layers)
        dead = one.mean("dead") / sizes["hidden"]
        rest = f"{most}", f"{dead:.1%}", f"{one.seconds:.0f}"
        by_layer = " ".join(f"{layer.active:.0f}" for layer in one.layers)
        zeros = f"{one.mean('zeros'):.2%}"
        shown.add_row(f"{one.l1:g}", f"{one.loss:.4f}", zeros, *means, *rest, by_layer)
    return shown


def _show(
    show: Callable[[int, int, str], None], before: int, total: int, what: str, step: int
) -> None:
    show(before + step, total, what)


def _named(group: str, model: Decoder, tokens: Tensor) -> dict[str, Tensor]:
    """Return the middle layer's weights, and what it is given for the tokens."""
    number = len(model.layers) // 2
    layer = model.layers[number]
    found = {name: getattr(layer, name).detach().bfloat16() for name in ("wg", "wu", "wd")}
    found["x"] = mlp_inputs(model, tokens, number)
    return {f"{group}.{name}": tensor.cpu() for name, tensor in found.items()}


def _write(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        save_file(tensors, path)
    except (OSError, SafetensorError) as error:
        raise SuiteError(f"{path}: expected a file that can be written; found {error}") from error
