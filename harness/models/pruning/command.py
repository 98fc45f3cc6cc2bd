"""What `sparsebench prune` does: files to weights, recipes to pruned weights, and what they cost.

    weights.safetensors   tensors by name      + activations.safetensors   one matrix [tokens, k]
    directory, .gguf      every gated MLP      + text                      default: Python's own

The last quarter of the activations is held out. The file written has the pruned tensors under their
own names and `permutation`. Its metadata has the method, the region and the number of dense
features, which are the last of each tensor. Of a model, a directory is written (checkpoint.py).
"""

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs import sources
from sparsebench.harness.models.pruning import model as whole
from sparsebench.harness.models.pruning.layer import (
    Recipe,
    linear_errors,
    mlp_errors,
    prune_linear,
    prune_mlp,
)
from sparsebench.harness.models.pruning.mlp import GatedMLP
from sparsebench.results.model_files import PRUNING_SCHEMA, Pruning, PruningOutcome

HELD_OUT = 0.25


@dataclass(frozen=True)
class _Made:
    """Pruned tensors by name, how many of the features are dense, errors by layer, and a loss."""

    tensors: Mapping[str, Tensor]
    dense: int
    features: int
    errors: Sequence[Mapping[str, float]]
    loss: float | None = None


def parse_recipes(
    methods: str, fractions: str, regions: str, patterns: str = "2:4"
) -> list[Recipe]:
    """Return every combination of lists with commas, such as `wanda,spensegpt`, `0,0.5`, `last`."""
    try:
        numbers = [float(fraction) for fraction in fractions.split(",")]
    except ValueError as error:
        raise SuiteError(f"dense: expected fractions such as 0,0.5; found {fractions!r}") from error
    combined = product(methods.split(","), numbers, regions.split(","), patterns.split(","))
    return [Recipe(*each) for each in combined]


def prune_file(
    weights: Path,
    recipes: Sequence[Recipe],
    device: torch.device,
    *,
    names: Sequence[str] = (),
    calibration: Path | None = None,
    activation: str = "silu",
    split: str = "columns",
    tokens: int = 8 * whole.CONTEXT,
    to: Path | None = None,
) -> Pruning:
    """Prune tensors `names` of a .safetensors file, or every gated MLP of a model; write them.

    weights  a .safetensors file; or a model, the directory of a checkpoint or a .gguf file
    to       a file to write; of a model, a new directory

    Raises SuiteError where a file, a name, a size, a value or a flag does not fit.
    """
    if to and len(recipes) != 1:
        raise SuiteError(f"out: expected one recipe for one file, found {len(recipes)}")
    if to and not to.parent.is_dir():
        raise SuiteError(f"{to}: expected a folder to write into; found no {to.parent}")
    for given in filter(None, (weights, calibration)):
        if to and to.exists() and given.exists() and to.samefile(given):
            raise SuiteError(f"{to}: expected another file to write than the input {given}")
    if weights.suffix == ".gguf" or weights.is_dir():
        if to and to.exists():
            raise SuiteError(f"{to}: expected a new directory to write, found one that is there")
        if names:
            raise SuiteError(f"{weights}: expected no tensor names beside a model, found {names}")
        return _model(weights, calibration, recipes, device, tokens, to)
    if calibration is None or len(names) not in (1, 3) or len(set(names)) != len(names):
        expected = "three tensors (gate, up, down) or one, and activations"
        raise SuiteError(f"{weights}: expected {expected}; found {list(names)}, {calibration}")
    loaded = [sources.load_weights(weights, name).to(device) for name in names]
    x = _activations(calibration).to(device)
    held_out = int(len(x) * HELD_OUT)
    if not held_out:
        raise SuiteError(f"{calibration}: expected at least 4 tokens, found {len(x)}")
    seen, unseen = x[:-held_out], x[-held_out:]
    if len(names) == 1:
        make = partial(_linear, names[0], loaded[0], split, seen, unseen)
    else:
        gate, up, down = loaded
        make = partial(_mlp, names, GatedMLP(gate, up, down, activation), seen, unseen)
    what = f"{weights.name}:{','.join(names)}", sources.sha256(weights), calibration.name
    return Pruning(
        PRUNING_SCHEMA, *what, len(seen), held_out, None, _outcomes(make, recipes, to, _write)
    )


def table(report: Pruning) -> Table:
    """Return the outcomes for a terminal, errors in per cent."""
    shown = Table(box=None, title_justify="left", title_style="bold")
    shown.title = f"{report.calibration} tokens to calibrate on, {report.held_out} held out"
    columns = ["method", "pattern", "region", "dense", "sparsity", *report.outcomes[0].errors]
    for name in columns + ["loss (nats)"] * (report.loss is not None):
        shown.add_column(
            name, justify="left" if name in ("method", "pattern", "region") else "right"
        )
    if report.loss is not None:
        blank = [""] * (len(columns) - 5)
        shown.add_row("none", "", "", "1", "0.0%", *blank, f"{report.loss:.3f}")
    for outcome in report.outcomes:
        errors = [f"{error:.2%}" for error in outcome.errors.values()]
        loss = [] if outcome.loss is None else [f"{outcome.loss:.3f}"]
        fractions = f"{outcome.dense:.3g}", f"{outcome.sparsity:.1%}"
        shown.add_row(outcome.method, outcome.pattern, outcome.region, *fractions, *errors, *loss)
    return shown


def _model(
    weights: Path,
    text: Path | None,
    recipes: Sequence[Recipe],
    device: torch.device,
    tokens: int,
    to: Path | None,
) -> Pruning:
    if text is None:
        origin = f"Python {platform.python_version()}'s language reference"
        words = whole.python_reference()
    else:
        origin, words = text.name, _text(text)
    loaded = whole.load(weights, device)
    with whole.usable(weights):
        seen, unseen = whole.contexts(loaded, words, tokens // whole.CONTEXT)
        before = whole.loss_of(loaded.model, unseen)

    def make(recipe: Recipe) -> _Made:
        with whole.restored(loaded) if len(recipes) > 1 else nullcontext():
            pruned = whole.prune_model(loaded, recipe, seen, unseen)
        return _Made({}, pruned.dense, pruned.features, pruned.errors, pruned.loss)

    def write(_: _Made, recipe: Recipe, to: Path) -> None:
        whole.save(loaded, recipe, to)

    what = weights.name, whole.digest(weights), origin
    sizes = seen.numel(), unseen.numel()
    return Pruning(PRUNING_SCHEMA, *what, *sizes, before, _outcomes(make, recipes, to, write))


def _mlp(names: Sequence[str], mlp: GatedMLP, seen: Tensor, unseen: Tensor, how: Recipe) -> _Made:
    pruned = prune_mlp(mlp, seen, how)
    weights = pruned.mlp.gate, pruned.mlp.up, pruned.mlp.down
    tensors = dict(zip(names, weights, strict=True)) | {"permutation": pruned.permutation}
    errors = mlp_errors(mlp, pruned, unseen)
    return _Made(tensors, pruned.dense, len(pruned.permutation), [errors])


def _linear(
    name: str, weight: Tensor, split: str, seen: Tensor, unseen: Tensor, how: Recipe
) -> _Made:
    pruned = prune_linear(weight, seen, how, split)
    tensors = {name: pruned.weight, "permutation": pruned.permutation}
    errors = linear_errors(weight, pruned, unseen)
    return _Made(tensors, pruned.dense, len(pruned.permutation), [errors])


def _outcomes(
    make: Callable[[Recipe], _Made],
    recipes: Sequence[Recipe],
    to: Path | None,
    write: Callable[[_Made, Recipe, Path], None],
) -> list[PruningOutcome]:
    outcomes = []
    for recipe in recipes:
        made = make(recipe)
        dense = made.dense / made.features
        errors = {name: fmean(layer[name] for layer in made.errors) for name in made.errors[0]}
        where = recipe.where
        shares = dense, (1 - dense) * where.sparsity
        found = PruningOutcome(recipe.method, recipe.region, *shares, errors, made.loss, where.name)
        outcomes.append(found)
        if to:
            write(made, recipe, to)
    return outcomes


def _activations(path: Path) -> Tensor:
    names = sources.tensor_names(path)
    if len(names) != 1:
        raise SuiteError(f"{path}: expected one matrix [tokens, k], found {len(names)}")
    return sources.load_weights(path, names[0])


def _text(path: Path) -> str:
    sources.require_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: expected a text in UTF-8; found {error}") from error


def _write(made: _Made, recipe: Recipe, path: Path) -> None:
    tensors = {name: tensor.cpu() for name, tensor in made.tensors.items()}
    notes = {"method": recipe.method, "pattern": recipe.pattern, "region": recipe.region}
    notes |= {"dense": str(made.dense)}
    fresh = path.with_name(f"{path.name}.new")
    try:
        save_file(tensors, fresh, notes)
        fresh.replace(path)
    except (OSError, SafetensorError) as error:
        fresh.unlink(missing_ok=True)
        raise SuiteError(f"{path}: expected a file that can be written; found {error}") from error
