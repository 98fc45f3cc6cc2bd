"""The training of one decoder: data order, loss, optimizer, schedule, and the held-out counts.

    loss = mean over bytes of -ln p(byte)  +  l1 * L1        AdamW; warm-up, then half a cosine

Equal seeds and settings give the same bytes in the same order. On a CPU, equal trainings give equal
bits. On a GPU (bf16 products, fp32 weights) the backward pass of attention sums in any order, so
equal trainings agree up to rounding. There, a step is one CUDA graph (kernels/nn/captured_step.py).
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from sparsebench.errors import SuiteError
from sparsebench.harness.models.reporting import device_name
from sparsebench.harness.models.train_lm.model import Decoder, Sizes
from sparsebench.harness.models.train_lm.text import Text, contexts, evenly
from sparsebench.kernels.nn.captured_step import CapturedStep
from sparsebench.results.model_files import LayerCount

FIRST = 8  # positions of a context that are counted separately
BASE_WIDTH = 512  # fan-in at which the learning rate is that of the settings

Show = Callable[[int, int, str], None]
"""Called with the completed steps, the total, and a description of the current one."""

FanIns = Mapping[nn.Parameter, float]
"""The fan-in of weights whose learning rate is scaled by BASE_WIDTH / fan-in."""


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

    def unseen(self, text: Text) -> Tensor:
        """Return the held-out contexts [contexts, context + 1] of a text."""
        return evenly(text.unseen, self.held_out, self.sizes.context)

    def source(self, text: Text, device: torch.device) -> tuple[str, str, int, int, str]:
        """Return name, digest, training and held-out bytes of a text, and the device's name."""
        counts = len(text.seen), self.unseen(text)[:, 1:].numel()
        return text.name, text.sha256, *counts, device_name(device)


def steps(
    model: Decoder,
    text: Text,
    settings: Settings,
    l1: float = 0.0,
    fan_ins: FanIns = MappingProxyType({}),
) -> Iterator[int]:
    """Train a model, and yield the number of each step after it was taken."""
    device = model.norm.device
    optimizer = adamw(model, settings, fan_ins)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))

    def loss(model: nn.Module, tokens: Tensor) -> Tensor:
        with products(device):
            logits, term = model(tokens[:, :-1])
        nats = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        return torch.add(nats, term, alpha=l1)

    step = CapturedStep(model, optimizer, loss)
    for number, tokens in enumerate(batches(text, settings, device)):
        step(tokens)
        schedule.step()
        yield number


def batches(text: Text, settings: Settings, device: torch.device) -> Iterator[Tensor]:
    """Yield the contexts [batch, context + 1] of each step; a seed determines their order."""
    seen, context = text.seen.to(device), settings.sizes.context
    shape = settings.steps, settings.batch
    draw = torch.Generator().manual_seed(settings.seed)
    places = (len(seen) - context - 1) // text.row + 1
    for starts in torch.randint(places, shape, generator=draw).to(device):
        yield contexts(seen, starts * text.row, context)


def adamw(model: Decoder, settings: Settings, fan_ins: FanIns) -> torch.optim.Optimizer:
    """Return AdamW that clips gradients, scales rates by fan-in, and does not decay norms."""
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in model.parameters():
        scale = BASE_WIDTH / fan_ins[parameter] if parameter in fan_ins else 1.0
        decay = settings.decay if parameter.dim() > 1 else 0.0
        groups.setdefault((scale, decay), []).append(parameter)
    device, on_gpu = model.norm.device, model.norm.is_cuda

    def learning_rate(scale: float) -> float | Tensor:
        value = settings.learning_rate * scale
        return torch.tensor(value, device=device) if on_gpu else value  # a graph reads a tensor

    options = [
        {"params": parameters, "lr": learning_rate(scale), "weight_decay": decay}
        for (scale, decay), parameters in groups.items()
    ]
    optimizer = torch.optim.AdamW(options, betas=settings.betas, fused=on_gpu, capturable=on_gpu)
    weights = [*model.parameters()]

    def clip(*_: object) -> None:
        torch.nn.utils.clip_grad_norm_(weights, settings.clip)

    optimizer.register_step_pre_hook(clip)
    return optimizer


def rate(step: int, settings: Settings) -> float:
    """Return the learning rate as a fraction: it rises to 1, then falls to a tenth."""
    rising = settings.warmup * settings.steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (settings.steps - rising))


@torch.no_grad()
def count(
    model: Decoder, tokens: Tensor, settings: Settings, what: str = "train-lm"
) -> tuple[float, list[LayerCount]]:
    """Return the loss in nats per byte of contexts [contexts, context + 1], and unit counts.

    Raises SuiteError, which names `what` was trained, if the training diverged.
    """
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
    nats = float(losses) / (len(tokens) * sizes.context)
    if not math.isfinite(nats):
        raise SuiteError(f"{what}: expected a finite loss after training, found {nats}")
    dead = (by_unit == 0).sum(1).tolist()
    return nats, [
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


def products(device: torch.device) -> torch.autocast:
    """Compute products in bf16 on a GPU and in fp32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
