"""Train block-sparse decoders and compare each with two dense ones (train-lm --pattern).

    sparse                     every pattern, block and sparsity, at the requested width
    dense, equal width         the same sizes
    dense, equal parameters    the narrowest with at least as many; MLP and heads in proportion
    dense, other widths        those requested; one may take as long a step as a sparse model

All models train one after the other in one process, for every seed. With one seed, all models see
the same bytes in the same order (training.py). The time of a step is the median over windows of
WINDOW steps, with a synchronization after each window. The file is written after each training, so
that a failure keeps earlier results.
"""

import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch
from rich.table import Table
from torch import nn

from sparsebench.errors import SuiteError
from sparsebench.harness.models.reporting import allocated_bytes, numbers, require_writable, sheet
from sparsebench.harness.models.train_lm.blocks import (
    PATTERNS,
    Blocks,
    decoder,
    fan_ins,
    sparsity_of,
)
from sparsebench.harness.models.train_lm.model import BYTES, Sizes
from sparsebench.harness.models.train_lm.text import Text, samples, standard_library
from sparsebench.harness.models.train_lm.training import Settings, Show, count, steps
from sparsebench.results.model_files import DENSE, WIDTHS_SCHEMA, PatternTraining, PatternTrainings
from sparsebench.results.run.store import write_json

WINDOW = 25  # steps per timing
EQUAL = "width", "parameters", "time"


def models(
    sizes: Sizes, plan: Sequence[Blocks], widths: Sequence[int] = ()
) -> list[tuple[Sizes, Blocks | None]]:
    """Return the decoders to train: the dense ones, then each sparse one and its dense match."""
    decoders: list[tuple[Sizes, Blocks | None]] = [(sizes, None)]
    decoders += [(of_width(sizes, width), None) for width in widths]
    for blocks in plan:
        stored = parameters(decoder(sizes, blocks, 0))
        decoders += [(sizes, blocks), (narrowest_sizes(sizes, stored), None)]
    return list(dict.fromkeys(decoders))


def parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def of_width(sizes: Sizes, width: int) -> Sizes:
    """Return sizes of another width, with MLPs and heads in proportion. Raises SuiteError."""
    head = sizes.width // sizes.heads
    if width % head or width < head:
        raise SuiteError(f"dense: expected widths that are multiples of {head}; found {width}")
    hidden = round(sizes.hidden / sizes.width * width)
    return replace(sizes, width=width, hidden=hidden, heads=width // head)


def narrowest_sizes(sizes: Sizes, minimum: int) -> Sizes:
    """Return the narrowest dense sizes of this shape with at least `minimum` parameters."""
    step = sizes.width // sizes.heads
    for width in range(step, sizes.width + 1, step):
        narrow = of_width(sizes, width)
        layer = 4 * width**2 + 3 * width * narrow.hidden + 2 * width
        if sizes.layers * layer + (2 * BYTES + 1) * width >= minimum:
            return narrow
    return sizes


def parse(patterns: str, blocks: str, sparsities: str) -> list[Blocks]:
    """Return every combination of three comma-separated lists. Raises SuiteError."""
    names = patterns.split(",")
    if unknown := [name for name in names if name not in PATTERNS]:
        raise SuiteError(f"pattern: expected some of {', '.join(PATTERNS)}; found {unknown[0]!r}")
    sides = map(int, numbers("block", blocks, "positive integers, such as 32,64", _is_size))
    parts = numbers(
        "sparsity", sparsities, "fractions between 0 and 1, such as 0.8,0.9", lambda n: 0 < n < 1
    )
    combinations = product(names, sides, parts)
    return [Blocks(*combination) for combination in combinations]  # type: ignore[arg-type]


def parse_widths(text: str) -> list[int]:
    """Return the numbers of a comma-separated list, which may be empty. Raises SuiteError."""
    expected = "positive integers, such as 192,256"
    return [int(width) for width in numbers("dense", text, expected, _is_size)] if text else []


def _is_size(number: float) -> bool:
    return number >= 1 and number.is_integer()


def train_widths(
    plan: Sequence[Blocks],
    settings: Settings,
    seeds: int,
    device: torch.device,
    *,
    dense: Sequence[int] = (),
    data: Path | None = None,
    to: Path | None = None,
    show: Show = lambda done, total, what: None,
) -> PatternTrainings:
    """Train every model with every seed. Raises SuiteError.

    dense  further widths of dense models
    data   a file of samples (text.py), each of which is one context; else the standard library
    """
    require_writable(to)
    text = samples(data) if data else standard_library()
    if data:
        settings = replace(settings, sizes=replace(settings.sizes, context=text.row - 1))
    decoders = models(settings.sizes, plan, dense)
    conditions = {**asdict(settings), "models": len(decoders), "seeds": seeds}
    source = *settings.source(text, device), conditions
    trained: list[PatternTraining] = []
    for seed, (sizes, blocks) in product(range(settings.seed, settings.seed + seeds), decoders):
        what = f"{blocks.pattern} {blocks.block} {blocks.sparsity:g}" if blocks else DENSE
        show(len(trained), seeds * len(decoders), f"{what} {sizes.width}, seed {seed}")
        trained.append(train(text, blocks, replace(settings, sizes=sizes, seed=seed), device))
        if to:
            write_json(to, asdict(PatternTrainings(WIDTHS_SCHEMA, *source, trained)))
    return PatternTrainings(WIDTHS_SCHEMA, *source, trained)


def train(
    text: Text, blocks: Blocks | None, settings: Settings, device: torch.device
) -> PatternTraining:
    """Train one model. Raises SuiteError if the training diverged."""
    start, before = time.perf_counter(), allocated_bytes(device)
    model = decoder(settings.sizes, blocks, settings.seed, device)
    windows, began = [], time.perf_counter()
    for number in steps(model, text, settings, fan_ins=fan_ins(model)):
        if number % WINDOW == WINDOW - 1 or number == settings.steps - 1:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            now = time.perf_counter()
            windows.append((now - began) / (number % WINDOW + 1))
            began = now
    loss, _ = count(model, settings.unseen(text), settings, str(blocks or DENSE))
    on_gpu = device.type == "cuda"
    return PatternTraining(
        pattern=blocks.pattern if blocks else DENSE,
        block=blocks.block if blocks else 1,
        sparsity=round(sparsity_of(model, settings.sizes), 6),
        width=settings.sizes.width,
        parameters=parameters(model),
        seed=settings.seed,
        loss=loss,
        step_us=1e6 * median(windows[1:] or windows),  # the first includes the capture
        peak_bytes=max(0, torch.cuda.max_memory_allocated(device) - before) if on_gpu else 0,
        seconds=time.perf_counter() - start,
    )


def table(report: PatternTrainings) -> Table:
    """Return each model's means over seeds, and how its loss differs from the dense matches."""
    title = f"{report.text}, {report.held_out} bytes held out, on {report.device}"
    names = "weights", "block", "sparsity", "width", "parameters", "loss (nats)", "± range / 2"
    to_names = *(f"to equal {quantity}" for quantity in EQUAL), "ms a step", "GiB"
    rows = sheet(title, (), (*names, *to_names))
    for model in dict.fromkeys(training.model for training in report.trained):
        group = [training for training in report.trained if training.model == model]
        losses = [training.loss for training in group]
        to_dense = []
        for equal in EQUAL:
            pairs = [(one, report.dense_match(one, equal)) for one in group]
            gains = [one.loss - dense.loss for one, dense in pairs if dense and dense is not one]
            to_dense.append(f"{fmean(gains):+.4f}" if gains else "")
        first = group[0]
        rows.add_row(
            *(first.pattern, str(first.block), f"{first.sparsity:.1%}", str(first.width)),
            *(f"{first.parameters / 1e6:.2f} M", f"{fmean(losses):.4f}"),
            *(f"{(max(losses) - min(losses)) / 2:.4f}", *to_dense),
            f"{median(one.step_us for one in group) / 1e3:.2f}",
            f"{max(one.peak_bytes for one in group) / 2**30:.2f}",
        )
    return rows
