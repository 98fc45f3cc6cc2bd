"""Train a decoder for each L1 coefficient, and count its active units over held-out text.

    loss = mean over bytes of -ln p(byte)  +  l1 * L1        AdamW; warm-up, then half a cosine

With equal seeds and settings, all coefficients start from the same weights and see the same bytes
in the same order. On a CPU, equal trainings give equal bits. On a GPU (bf16 products, fp32 weights)
the backward pass of attention sums in any order, so equal trainings agree up to rounding.

    sparsity.safetensors    the middle layer, in bf16, for every coefficient:
      l1_2e-05.wg .wu       [hidden, width]      trained weights
      l1_2e-05.wd           [width, hidden]
      l1_2e-05.x            [tokens, width]      inputs of the MLP on held-out contexts

Suites read such a file: `source: {file: sparsity.safetensors, tensor: "l1_*"}`.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from rich.table import Table
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparsebench._writing import replacing
from sparsebench.errors import SuiteError
from sparsebench.harness.models.train_lm.model import Decoder, Sizes
from sparsebench.harness.models.train_lm.text import Text, contexts, evenly, standard_library
from sparsebench.results.model_files import SPARSITY_SCHEMA, L1Training, L1Trainings, LayerCount

FIRST = 8  # positions of a context that are counted separately
PROGRESS_STEPS = 50
SAMPLE = 4096  # tokens of x in the file, at most

Show = Callable[[int, int, str], None]
"""Called with the completed steps, the total, and a description of the current one."""


@dataclass(frozen=True)
class Settings:
    """How to train; learning rate, betas and decay are the usual ones of small decoders.

    batch     contexts per step
    warmup    fraction of the steps in which the learning rate rises
    held_out  largest number of contexts over which loss and units are counted
    """

    sizes: Sizes = field(default_factory=Sizes)
    steps: int = 3000
    batch: int = 64
    seed: int = 0
    learning_rate: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.95)
    decay: float = 0.1
    clip: float = 1.0
    warmup: float = 0.05
    held_out: int = 1024


def parse_coefficients(text: str) -> list[float]:
    """Parse a list such as `0,1e-4`; raises SuiteError if it is invalid."""
    message = f"l1: expected coefficients of 0 or more, each once, such as 0,1e-4; found {text!r}"
    try:
        numbers = [float(number) for number in text.split(",")]
    except ValueError as error:
        raise SuiteError(message) from error
    if len(set(numbers)) != len(numbers) or not all(0 <= n < float("inf") for n in numbers):
        raise SuiteError(message)
    return numbers


def train_all(
    coefficients: Sequence[float],
    settings: Settings,
    device: torch.device,
    *,
    to: Path | None = None,
    show: Show = lambda done, total, what: None,
) -> L1Trainings:
    """Train a decoder for each coefficient; optionally write the middle layer of each to a file.

    Raises SuiteError if the file cannot be written or a training diverged.
    """
    require_folder(to)
    text, sizes, total = standard_library(), settings.sizes, len(coefficients) * settings.steps
    unseen = evenly(text.unseen, settings.held_out, sizes.context)
    middle = sizes.layers // 2
    trained: list[L1Training] = []
    tensors: dict[str, Tensor] = {}
    for l1 in coefficients:

        def show_step(step: int, l1: float = l1) -> None:
            show(len(trained) * settings.steps + step, total, f"l1 {l1:g}")

        model, outcome = train(text, l1, settings, device, show_step)
        trained.append(outcome)
        layer = {
            name: getattr(model.layers[middle], name).detach().bfloat16()
            for name in ("wg", "wu", "wd")
        }
        layer["x"] = mlp_inputs(model, unseen[: SAMPLE // sizes.context, :-1], middle)
        tensors |= {f"l1_{l1:g}.{name}": tensor.cpu() for name, tensor in layer.items()}
    if to:
        try:
            with replacing(to) as fresh:
                save_file(tensors, fresh)
        except (OSError, SafetensorError) as error:
            raise SuiteError(f"{to}: expected a writable file; found {error}") from error
    seen, counted = len(text.seen), unseen[:, 1:].numel()
    source = text.name, text.sha256, seen, counted, device_name(device), asdict(settings)
    return L1Trainings(SPARSITY_SCHEMA, *source, trained)


def table(report: L1Trainings) -> Table:
    """Return the outcomes for a terminal: means over layers, and active units by layer."""
    rows = Table(box=None, title_justify="left", title_style="bold")
    sizes = report.settings["sizes"]
    units = f"{sizes['hidden']} units in each of {sizes['layers']} layers"
    rows.title = f"{report.text}, {report.held_out} bytes held out; {units}"
    names = "l1", "loss (nats)", "zeros", "on", "first token", "rest", "most", "dead", "seconds"
    for name in names:
        rows.add_column(name, justify="right")
    rows.add_column("on, by layer")
    for training in report.trained:
        layers = training.layers
        rows.add_row(
            *(f"{training.l1:g}", f"{training.loss:.4f}", f"{training.mean('zeros'):.2%}"),
            f"{training.mean('active'):.1f}",
            f"{sum(layer.first[0] for layer in layers) / len(layers):.1f}",
            f"{training.mean('rest'):.1f}",
            str(max(layer.most for layer in layers)),
            f"{training.mean('dead') / sizes['hidden']:.1%}",
            f"{training.seconds:.0f}",
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
    sizes, start = settings.sizes, time.perf_counter()
    model = Decoder(sizes, settings.seed).to(device)
    optimizer = _optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))
    for step, tokens in enumerate(batches(text, settings, device)):
        with products(device):
            logits, term = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + l1 * term).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % PROGRESS_STEPS == 0:
            show(step)
    unseen = evenly(text.unseen, settings.held_out, sizes.context)
    nats, layers = count(model, unseen, settings)
    if not math.isfinite(nats):
        raise SuiteError(f"l1 {l1:g}: expected a finite loss after training, found {nats}")
    return model, L1Training(l1, nats, layers, time.perf_counter() - start)


def batches(text: Text, settings: Settings, device: torch.device) -> Iterator[Tensor]:
    """Yield the contexts [batch, context + 1] of each step; a seed determines their order."""
    seen, context = text.seen.to(device), settings.sizes.context
    shape = settings.steps, settings.batch
    draw = torch.Generator().manual_seed(settings.seed)
    for starts in torch.randint(len(seen) - context, shape, generator=draw).to(device):
        yield contexts(seen, starts, context)


@torch.no_grad()
def count(model: Decoder, tokens: Tensor, settings: Settings) -> tuple[float, list[LayerCount]]:
    """Return the loss in nats per byte of contexts [contexts, context + 1], and unit counts."""
    device, sizes = model.norm.device, settings.sizes
    by_position = torch.zeros(sizes.layers, sizes.context, dtype=torch.int64, device=device)
    by_unit = torch.zeros(sizes.layers, sizes.hidden, dtype=torch.int64, device=device)
    most = torch.zeros(sizes.layers, dtype=torch.int64, device=device)

    def watch(number: int, _: Tensor, gates: Tensor) -> None:
        on = gates > 0
        per_token = on.sum(-1)
        by_position[number] += per_token.sum(0)
        by_unit[number] += on.flatten(0, 1).sum(0)
        most[number] = torch.maximum(most[number], per_token.max())

    losses = torch.zeros((), dtype=torch.float64, device=device)
    for part in tokens.to(device).split(settings.batch):
        with products(device):
            logits, _ = model(part[:, :-1], watch)
        flat = logits.float().flatten(0, 1)
        losses += cross_entropy(flat, part[:, 1:].flatten(), reduction="sum")
    dead = (by_unit == 0).sum(1).tolist()
    counts = [
        LayerCount(
            active=sum(means) / sizes.context,
            zeros=1 - sum(means) / sizes.context / sizes.hidden,
            dead=dead[number],
            most=int(most[number]),
            first=means[:FIRST],
            rest=sum(means[FIRST:]) / (sizes.context - FIRST),
        )
        for number, means in enumerate((by_position.double() / len(tokens)).tolist())
    ]
    return float(losses) / (len(tokens) * sizes.context), counts


@torch.no_grad()
def mlp_inputs(model: Decoder, tokens: Tensor, number: int) -> Tensor:
    """Return a layer's MLP inputs [contexts * tokens, k] for bytes [contexts, tokens]."""
    device, inputs = model.norm.device, []

    def watch(layer: int, z: Tensor, _: Tensor) -> None:
        if layer == number:
            inputs.append(z.flatten(0, 1).bfloat16())

    with products(device):
        model(tokens.to(device), watch)
    return inputs[0]


def products(device: torch.device) -> torch.autocast:
    """Compute products in bf16 on a GPU and in fp32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def rate(step: int, settings: Settings) -> float:
    """Return the learning rate as a fraction: it rises to 1, then falls to a tenth."""
    rising = settings.warmup * settings.steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (settings.steps - rising))


def require_folder(path: Path | None) -> None:
    """Raise SuiteError unless the folder of an output file exists."""
    if path and not path.parent.is_dir():
        raise SuiteError(f"{path}: expected a folder to write into; found no {path.parent}")


def device_name(device: torch.device) -> str:
    """Return the name of the GPU, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _optimizer(model: Decoder, settings: Settings) -> torch.optim.AdamW:
    """Return AdamW, with decay of the matrices but not of the norms' scales."""
    groups = [
        {
            "params": [weight for weight in model.parameters() if weight.dim() == dim],
            "weight_decay": decay,
        }
        for dim, decay in ((2, settings.decay), (1, 0.0))
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)
