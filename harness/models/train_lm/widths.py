"""What `sparsebench train-lm --pattern` does: each sparse decoder beside two that are dense.

    sparse                pattern x block x sparsity, at the width asked for
    dense, equal width    the same sizes
    dense, equal parameters    the narrowest with as many parameters; MLP and heads in proportion

for every seed, all in one process, a model at a time. A seed is the same bytes in the same order
for all models. A step is one CUDA graph (kernels/nn/captured_step.py), dense and sparse alike; its
time is the median over windows of WINDOW steps, each waited for. The file is written after each
training: what was measured is kept where a later one fails.
"""

import gc
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import fmean, median

import torch
from rich.table import Table
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsebench.errors import SuiteError
from sparsebench.harness.models.train_lm.blocks import (
    PATTERNS,
    USUAL,
    Blocks,
    decoder,
    fan_ins,
    sparsity_of,
)
from sparsebench.harness.models.train_lm.model import BYTES, Decoder, Sizes
from sparsebench.harness.models.train_lm.text import Text, contexts, evenly, standard_library
from sparsebench.harness.models.train_lm.train import Settings, products, rate
from sparsebench.kernels.nn.captured_step import CapturedStep
from sparsebench.results.model_files import DENSE, WIDTHS_SCHEMA, PatternTraining, PatternTrainings
from sparsebench.results.store import write_json

WINDOW = 25  # steps between two looks at the clock


def models(sizes: Sizes, asked: Sequence[Blocks]) -> list[tuple[Sizes, Blocks | None]]:
    """Return the decoders to train: dense, then each sparse one and its dense equal."""
    found: list[tuple[Sizes, Blocks | None]] = [(sizes, None)]
    for blocks in asked:
        stored = parameters(decoder(sizes, blocks, 0))
        for one in ((sizes, blocks), (narrowed(sizes, stored), None)):
            if one not in found:
                found.append(one)
    return found


def parameters(model: nn.Module) -> int:
    """Count what is stored."""
    return sum(parameter.numel() for parameter in model.parameters())


def narrowed(sizes: Sizes, wanted: int) -> Sizes:
    """Return the narrowest dense sizes of this shape with at least so many parameters."""
    step = sizes.width // sizes.heads
    per_unit = sizes.hidden / sizes.width
    for heads in range(1, sizes.heads + 1):
        width = heads * step
        own = replace(sizes, width=width, hidden=round(per_unit * width), heads=heads)
        layer = 4 * width**2 + 3 * width * own.hidden + 2 * width
        if own.layers * layer + (2 * BYTES + 1) * width >= wanted:
            return own
    return sizes


def parse(patterns: str, blocks: str, sparsities: str) -> list[Blocks]:
    """Return every combination of three lists with commas. Raises SuiteError."""
    names = patterns.split(",")
    if unknown := [name for name in names if name not in PATTERNS]:
        raise SuiteError(f"pattern: expected some of {', '.join(PATTERNS)}; found {unknown[0]!r}")
    sides = [*_numbers("block", blocks, lambda n: n >= 1 and n == int(n))]
    parts = [*_numbers("sparsity", sparsities, lambda n: 0 < n < 1)]
    made = product(names, map(int, sides), parts)
    return [Blocks(name, side, part) for name, side, part in made]  # type: ignore[arg-type]


def _numbers(what: str, written: str, fits: Callable[[float], bool]) -> Iterator[float]:
    for each in written.split(","):
        try:
            number = float(each)
        except ValueError:
            number = math.nan
        if not fits(number):
            raise SuiteError(f"{what}: expected numbers with commas; found {written!r}")
        yield number


def train_widths(
    asked: Sequence[Blocks],
    settings: Settings,
    seeds: int,
    device: torch.device,
    *,
    to: Path | None = None,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> PatternTrainings:
    """Train every model with every seed. Raises SuiteError."""
    if to and not to.parent.is_dir():
        raise SuiteError(f"{to}: expected a folder to write into; found no {to.parent}")
    text = standard_library()
    planned = models(settings.sizes, asked)
    unseen = evenly(text.unseen, settings.held_out, settings.sizes.context)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    told = {**asdict(settings), "models": len(planned), "seeds": seeds}
    about = text.name, text.sha256, len(text.seen), unseen[:, 1:].numel(), name, told
    trained: list[PatternTraining] = []
    for seed, (sizes, blocks) in product(range(settings.seed, settings.seed + seeds), planned):
        what = f"{blocks.pattern} {blocks.block} {blocks.sparsity:g}" if blocks else DENSE
        show(len(trained), seeds * len(planned), f"{what} {sizes.width}, seed {seed}")
        own = replace(settings, sizes=sizes, seed=seed)
        trained.append(train(text, unseen, blocks, own, device))
        if to:
            write_json(to, asdict(PatternTrainings(WIDTHS_SCHEMA, *about, trained)))
    return PatternTrainings(WIDTHS_SCHEMA, *about, trained)


def train(
    text: Text, unseen: Tensor, blocks: Blocks | None, settings: Settings, device: torch.device
) -> PatternTraining:
    """Train one model. Raises SuiteError where training diverged."""
    start, context = time.perf_counter(), settings.sizes.context
    before = _allocated(device)
    model = decoder(settings.sizes, blocks, settings.seed, device)
    stored, sparsity = parameters(model), sparsity_of(model, settings.sizes)
    optimizer = _optimizer(model, settings, device)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))
    step = CapturedStep(model, optimizer, _loss)
    seen, draw = text.seen.to(device), torch.Generator().manual_seed(settings.seed)
    shape = settings.steps, settings.batch
    starts = torch.randint(len(seen) - context, shape, generator=draw).to(device)
    windows, began = [], time.perf_counter()
    for number in range(settings.steps):
        step(contexts(seen, starts[number], context))
        schedule.step()
        if number % WINDOW == WINDOW - 1 or number == settings.steps - 1:
            _wait(device)
            now = time.perf_counter()
            windows.append((now - began) / (number % WINDOW + 1))
            began = now
    loss, peak = _held_out(model, unseen, settings), _peak(device) - before
    if not math.isfinite(loss):
        raise SuiteError(f"{blocks}: expected a finite loss after training, found {loss}")
    del step, optimizer, schedule, model
    gc.collect()
    return PatternTraining(
        blocks.pattern if blocks else DENSE,
        blocks.block if blocks else 1,
        round(sparsity, 6),
        settings.sizes.width,
        stored,
        settings.seed,
        loss,
        1e6 * median(windows[1:] or windows),  # the first has the capture
        max(0, peak),
        time.perf_counter() - start,
    )


def table(found: PatternTrainings) -> Table:
    """Return each model's means over seeds, and its loss beside the dense ones'."""
    shown = Table(box=None, title_justify="left", title_style="bold")
    shown.title = f"{found.text}, {found.held_out} bytes held out, on {found.device}"
    names = "weights", "block", "sparsity", "width", "parameters", "loss (nats)", "± range / 2"
    for name in (*names, "to equal width", "to equal parameters", "ms a step", "GiB"):
        shown.add_column(name, justify="right")
    for model in dict.fromkeys(one.model for one in found.trained):
        own = [one for one in found.trained if one.model == model]
        losses = [one.loss for one in own]
        to_dense = []
        for equal in ("width", "parameters"):
            pairs = [(one, found.dense_match(one, equal)) for one in own]
            gains = [one.loss - dense.loss for one, dense in pairs if dense and dense is not one]
            to_dense.append(f"{fmean(gains):+.4f}" if gains else "")
        shown.add_row(
            *(own[0].pattern, str(own[0].block), f"{own[0].sparsity:.1%}", str(own[0].width)),
            *(f"{own[0].parameters / 1e6:.2f} M", f"{fmean(losses):.4f}"),
            *(f"{(max(losses) - min(losses)) / 2:.4f}", *to_dense),
            f"{median(one.step_us for one in own) / 1e3:.2f}",
            f"{max(one.peak_bytes for one in own) / 2**30:.2f}",
        )
    return shown


def _loss(model: nn.Module, tokens: Tensor) -> Tensor:
    with products(tokens.device):
        logits, _ = model(tokens[:, :-1])
    return cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


@torch.no_grad()
def _held_out(model: Decoder, unseen: Tensor, settings: Settings) -> float:
    """Return the mean loss in nats a byte of contexts [contexts, context + 1]."""
    parts = unseen.to(model.norm.device).split(settings.batch)
    return float(sum(_loss(model, part).double() * len(part) for part in parts)) / len(unseen)


def _optimizer(model: Decoder, settings: Settings, device: torch.device) -> torch.optim.Optimizer:
    """Return AdamW with a rate for each fan-in; norms do not decay; clips before each step."""
    known = fan_ins(model)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        part = USUAL / known[parameter] if parameter in known else 1.0
        decay = settings.decay if parameter.dim() > 1 else 0.0
        groups.setdefault((part, decay), []).append(parameter)
    on_gpu = device.type == "cuda"

    def of(part: float) -> float | Tensor:
        own = settings.learning_rate * part
        return torch.tensor(own, device=device) if on_gpu else own

    listed = [
        {"params": own, "lr": of(part), "weight_decay": decay}
        for (part, decay), own in groups.items()
    ]
    made = torch.optim.AdamW(listed, betas=settings.betas, fused=on_gpu, capturable=on_gpu)
    owned = [*model.parameters()]

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(owned, settings.clip)

    made.register_step_pre_hook(clip)
    return made


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _allocated(device: torch.device) -> int:
    """Return the bytes on the device, and begin to look for the most."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
