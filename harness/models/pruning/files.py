"""Prune every gated MLP of a model by several pruners, and measure the errors.

directory or .gguf  +  text (default: Python's own)  ─> errors and loss of each pruner
                                                     ─> a directory (checkpoint.py)
"""

import platform
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import product
from pathlib import Path
from statistics import fmean

import torch
from rich.table import Table

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs import sources
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.layer import Pruner
from sparsebench.harness.models.pruning.state import usable
from sparsebench.harness.models.reporting import numbers, require_writable, sheet
from sparsebench.results.files import fault
from sparsebench.results.formatting import amount
from sparsebench.results.model_files import PRUNING_SCHEMA, Pruning, PruningOutcome


def parse_pruners(
    methods: str, fractions: str, regions: str, patterns: str = "2:4"
) -> list[Pruner]:
    """Return all combinations of lists such as `wanda,spensegpt`, `0,0.5` and `last`."""
    shares = numbers(
        "dense", fractions, "fractions from 0 to 1, such as 0.5,0", lambda n: 0 <= n <= 1
    )
    lists = methods.split(","), shares, regions.split(","), patterns.split(",")
    return [Pruner(*values) for values in product(*lists)]


def prune_files(
    weights: Path,
    pruners: Sequence[Pruner],
    device: torch.device,
    *,
    text: Path | None = None,
    tokens: int = 8 * models.CONTEXT,
    to: Path | None = None,
) -> Pruning:
    """Prune every gated MLP of a model: the directory of a checkpoint, or a .gguf file.

    text  to calibrate on; by default Python's language reference
    to    a new directory for the pruned model, if there is one pruner

    Raises SuiteError if a file, size, value or option is invalid.
    """
    if to and len(pruners) != 1:
        raise SuiteError(f"out: expected one recipe per model, found {len(pruners)}")
    require_writable(to)
    if to and to.exists():
        raise SuiteError(f"{to}: expected a new directory to write, found an existing one")
    if weights.suffix != ".gguf" and not weights.is_dir():
        actual = "another file" if weights.exists() else "none"
        raise SuiteError(
            f"{weights}: expected a .gguf file or the directory of a model, found {actual}"
        )
    if text is None:
        origin = f"Python {platform.python_version()}'s language reference"
        words = models.python_reference()
    else:
        origin, words = text.name, _read_text(text)
    loaded = models.load(weights, device)
    mlps, left_dense = loaded.mlps, loaded.left_dense
    seen, unseen = models.contexts(loaded, words, tokens, origin)
    with usable(weights):
        before = models.loss_of(loaded.model, unseen)

    outcomes = []
    for pruner in pruners:
        with models.restore_weights(loaded) if len(pruners) > 1 else nullcontext():
            pruned = models.prune_model(loaded, pruner, seen, unseen)
        outcomes.append(_outcome(pruner, pruned))
        if to:
            models.save(loaded, pruner, to)
    source = weights.name, models.digest(weights), origin
    counts = seen.numel(), unseen.numel()
    return Pruning(
        *(PRUNING_SCHEMA, *source, *counts, before, outcomes),
        unit=loaded.unit,
        mlps=len(mlps),
        layers=loaded.layers,
        left_dense=left_dense,
    )


def table(report: Pruning) -> Table:
    """Return the outcomes for a terminal, with errors in percent."""
    title = f"{report.calibration} tokens to calibrate on, {report.held_out} held out"
    pruned = f"{amount(report.mlps or 0, 'gated MLP')} pruned"
    title = f"{pruned} in a model of {amount(report.layers or 0, 'layer')}; {title}"
    parts = report.outcomes[0].errors
    columns = ["dense", "sparsity", *parts, "loss (nats)"]
    rows = sheet(title, ("method", "pattern", "region"), columns)
    rows.add_row("none", "", "", "1", "0.0%", *[""] * len(parts), f"{report.loss:.3f}")
    for outcome in report.outcomes:
        errors = [f"{error:.2%}" for error in outcome.errors.values()]
        shown = f"{outcome.dense:.3g}", f"{outcome.sparsity:.1%}", *errors, f"{outcome.loss:.3f}"
        rows.add_row(outcome.method, outcome.pattern, outcome.region, *shown)
    return rows


def _outcome(pruner: Pruner, pruned: models.PrunedModel) -> PruningOutcome:
    """Return the outcome of a pruner: the dense fraction, and the means of the layers' errors."""
    pattern, dense = pruner.mask_pattern, pruned.dense / pruned.features
    means = {name: fmean(layer[name] for layer in pruned.errors) for name in pruned.errors[0]}
    fractions = dense, (1 - dense) * pattern.sparsity
    return PruningOutcome(
        pruner.method, pruner.region, *fractions, means, pruned.loss, pattern.name
    )


def _read_text(path: Path) -> str:
    sources.require_regular(path)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SuiteError(f"{path}: expected UTF-8 text; found {fault(error)}") from error
