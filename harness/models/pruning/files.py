"""Prune the weights in a file or model by several pruners, and measure the errors.

    weights.safetensors   tensors by name      + activations.safetensors   one matrix [tokens, k]
    directory, .gguf      every gated MLP      + text                      default: Python's own

The last quarter of the activations is held out. The output file has the pruned tensors with
unchanged names, and `permutation`. Its metadata has the method, the pattern, the region and the
number of dense features, which are the last of each tensor. For a model, the output is a directory
(checkpoint.py).
"""

import platform
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from rich.table import Table
from torch import Tensor

from sparsebench._writing import require_apart
from sparsebench.errors import SuiteError
from sparsebench.harness.inputs import sources
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.layer import (
    GatedMLP,
    Pruner,
    linear_errors,
    mlp_errors,
    prune_linear,
    prune_mlp,
)
from sparsebench.harness.models.reporting import numbers, require_writable, save_tensors, sheet
from sparsebench.results.files import fault
from sparsebench.results.formatting import amount
from sparsebench.results.model_files import PRUNING_SCHEMA, Pruning, PruningOutcome

HELD_OUT = 0.25
PERMUTATION = "permutation"  # name of the tensor in the output that is not a weight


def parse_pruners(
    methods: str, fractions: str, regions: str, patterns: str = "2:4"
) -> list[Pruner]:
    """Return all combinations of lists such as `wanda,spensegpt`, `0,0.5` and `last`."""
    shares = numbers(
        "dense", fractions, "fractions from 0 to 1, such as 0.5,0", lambda n: 0 <= n <= 1
    )
    lists = methods.split(","), shares, regions.split(","), patterns.split(",")
    return [Pruner(*values) for values in product(*lists)]


def prune_file(
    weights: Path,
    pruners: Sequence[Pruner],
    device: torch.device,
    *,
    names: Sequence[str] = (),
    calibration: Path | None = None,
    activation: str = "silu",
    split: str = "columns",
    tokens: int = 8 * models.CONTEXT,
    to: Path | None = None,
) -> Pruning:
    """Prune the tensors `names` of a .safetensors file, or every gated MLP of a model.

    weights  a .safetensors file, or a model: the directory of a checkpoint, or a .gguf file
    to       a file to write, or a new directory for a model

    Raises SuiteError if a file, name, size, value or option is invalid.
    """
    if to and len(pruners) != 1:
        raise SuiteError(f"out: expected one recipe per file, found {len(pruners)}")
    require_writable(to)
    require_apart([to], [weights, calibration])
    if weights.suffix == ".gguf" or weights.is_dir():
        if to and to.exists():
            raise SuiteError(f"{to}: expected a new directory to write, found an existing one")
        if names:
            raise SuiteError(f"{weights}: expected no tensor names for a model, found {names}")
        return _model(weights, calibration, pruners, device, tokens, to)
    if weights.suffix != ".safetensors":
        expected = "a .safetensors or .gguf file, or the directory of a model"
        actual = "another file" if weights.exists() else "none"
        raise SuiteError(f"{weights}: expected {expected}; found {actual}")
    if calibration is None or len(names) not in (1, 3) or len(set(names)) != len(names):
        expected = "--tensors with three tensors (gate,up,down) or one, and --calibration"
        actual = f"{','.join(names) or 'no tensors'} and {calibration or 'no calibration'}"
        raise SuiteError(f"{weights}: expected {expected}; found {actual}")
    if to and PERMUTATION in names:
        expected = f"tensors with other names, because {to} also holds the {PERMUTATION}"
        raise SuiteError(f"{weights}: expected {expected}; found {PERMUTATION!r}")
    loaded = [sources.load_weights(weights, name).to(device) for name in names]
    x = _activations(calibration).to(device)
    held_out = int(len(x) * HELD_OUT)
    if not held_out:
        raise SuiteError(f"{calibration}: expected at least 4 tokens, found {len(x)}")
    seen, unseen = x[:-held_out], x[-held_out:]
    first, *rest = loaded
    mlp = GatedMLP(first, rest[0], rest[1], activation) if rest else None

    outcomes = []
    for pruner in pruners:
        if mlp:
            pruned = prune_mlp(mlp, seen, pruner)
            errors = mlp_errors(mlp, pruned, unseen)
        else:
            pruned = prune_linear(first, seen, pruner, split)
            errors = linear_errors(first, pruned, unseen, split)
        outcomes.append(_outcome(pruner, pruned.dense / len(pruned.permutation), [errors]))
        if to:
            tensors = dict(zip(names, pruned.weights, strict=True))
            metadata = {"method": pruner.method, "pattern": pruner.pattern, "region": pruner.region}
            metadata["dense"] = str(pruned.dense)
            save_tensors(tensors | {PERMUTATION: pruned.permutation}, to, metadata)
    origin = f"{weights.name}:{','.join(names)}", sources.sha256(weights), calibration.name
    return Pruning(PRUNING_SCHEMA, *origin, len(seen), held_out, None, outcomes)


def table(report: Pruning) -> Table:
    """Return the outcomes for a terminal, with errors in percent."""
    title = f"{report.calibration} tokens to calibrate on, {report.held_out} held out"
    if report.mlps and report.layers:
        pruned = f"{amount(report.mlps, 'gated MLP')} pruned"
        title = f"{pruned} in a model of {amount(report.layers, 'layer')}; {title}"
    parts, losses = report.outcomes[0].errors, ["loss (nats)"] * (report.loss is not None)
    columns = ["dense", "sparsity", *parts, *losses]
    rows = sheet(title, ("method", "pattern", "region"), columns)
    if report.loss is not None:
        rows.add_row("none", "", "", "1", "0.0%", *[""] * len(parts), f"{report.loss:.3f}")
    for outcome in report.outcomes:
        errors = [f"{error:.2%}" for error in outcome.errors.values()]
        loss = [] if outcome.loss is None else [f"{outcome.loss:.3f}"]
        fractions = f"{outcome.dense:.3g}", f"{outcome.sparsity:.1%}"
        rows.add_row(outcome.method, outcome.pattern, outcome.region, *fractions, *errors, *loss)
    return rows


def _model(
    weights: Path,
    text: Path | None,
    pruners: Sequence[Pruner],
    device: torch.device,
    tokens: int,
    to: Path | None,
) -> Pruning:
    if text is None:
        origin = f"Python {platform.python_version()}'s language reference"
        words = models.python_reference()
    else:
        origin, words = text.name, _read_text(text)
    loaded = models.load(weights, device)
    mlps = loaded.mlps
    seen, unseen = models.contexts(loaded, words, tokens, origin)
    with models.usable(weights):
        before = models.loss_of(loaded.model, unseen)

    outcomes = []
    for pruner in pruners:
        with models.restore_weights(loaded) if len(pruners) > 1 else nullcontext():
            pruned = models.prune_model(loaded, pruner, seen, unseen)
        dense = pruned.dense / pruned.features
        outcomes.append(_outcome(pruner, dense, pruned.errors, pruned.loss))
        if to:
            models.save(loaded, pruner, to)
    source = weights.name, models.digest(weights), origin
    counts = seen.numel(), unseen.numel()
    return Pruning(
        *(PRUNING_SCHEMA, *source, *counts, before, outcomes),
        unit=loaded.unit,
        mlps=len(mlps),
        layers=loaded.layers,
    )


def _outcome(
    pruner: Pruner, dense: float, errors: Sequence[Mapping[str, float]], loss: float | None = None
) -> PruningOutcome:
    """Return the outcome of a pruner: the dense fraction, and the means of the layers' errors."""
    pattern = pruner.mask_pattern
    means = {name: fmean(layer[name] for layer in errors) for name in errors[0]}
    fractions = dense, (1 - dense) * pattern.sparsity
    return PruningOutcome(pruner.method, pruner.region, *fractions, means, loss, pattern.name)


def _activations(path: Path) -> Tensor:
    names = sources.tensor_names(path)
    if len(names) != 1:
        raise SuiteError(f"{path}: expected one matrix [tokens, k], found {len(names)}")
    return sources.load_weights(path, names[0])


def _read_text(path: Path) -> str:
    sources.require_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: expected UTF-8 text; found {fault(error)}") from error
