"""Train a decoder with one L1 coefficient, and count the units that are on over held-out text.

    loss = mean over bytes of -ln p(byte)  +  l1 * L1        AdamW; warm-up, then half a cosine

Seed and settings equal, all coefficients start from the same weights and see the same bytes in the
same order. On a CPU equal trainings give equal bits. On a GPU (bf16 products, fp32 weights) sums in
the attention's backward pass come in any order, and equal trainings are equal to rounding.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from sparsebench.errors import SuiteError
from sparsebench.harness.models.train_lm.model import Decoder, Sizes
from sparsebench.harness.models.train_lm.text import Text, contexts, evenly
from sparsebench.results.model_files import L1Training, LayerCount

FIRST = 8  # places of a context that are counted one by one
SHOWN = 50  # steps between two signs of progress


@dataclass(frozen=True)
class Settings:
    """How to train; learning rate, betas and decay are the usual ones of small decoders.

    batch     contexts a step;  warmup  the part of the steps in which the learning rate rises
    held_out  contexts, at most, that loss and units are counted over
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


def train(
    text: Text,
    l1: float,
    settings: Settings,
    device: torch.device,
    show: Callable[[int], None] = lambda step: None,
) -> tuple[Decoder, L1Training]:
    """Return the trained model and what it came to. Raises SuiteError where training diverged."""
    sizes, start = settings.sizes, time.perf_counter()
    model = Decoder(sizes, settings.seed).to(device)
    optimizer = _optimizer(model, settings)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: rate(step, settings))
    seen = text.seen.to(device)
    draw = torch.Generator().manual_seed(settings.seed)
    last = len(seen) - sizes.context
    starts = torch.randint(last, (settings.steps, settings.batch), generator=draw).to(device)
    for step in range(settings.steps):
        tokens = contexts(seen, starts[step], sizes.context)
        with products(device):
            logits, term = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        (loss + l1 * term).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % SHOWN == 0:
            show(step)
    unseen = evenly(text.unseen, settings.held_out, sizes.context)
    nats, layers = count(model, unseen, settings)
    if not math.isfinite(nats):
        raise SuiteError(f"l1 {l1:g}: expected a finite loss after training, found {nats}")
    return model, L1Training(l1, nats, layers, time.perf_counter() - start)


@torch.no_grad()
def count(model: Decoder, tokens: Tensor, settings: Settings) -> tuple[float, list[LayerCount]]:
    """Return the mean loss in nats a byte of contexts [contexts, context + 1], and the units on."""
    device = model.norm.device
    sizes, contexts_in_all = settings.sizes, len(tokens)
    by_place = torch.zeros(sizes.layers, sizes.context, dtype=torch.int64, device=device)
    by_unit = torch.zeros(sizes.layers, sizes.hidden, dtype=torch.int64, device=device)
    most = torch.zeros(sizes.layers, dtype=torch.int64, device=device)

    def watch(number: int, _: Tensor, gates: Tensor) -> None:
        on = gates > 0
        a_token = on.sum(-1)
        by_place[number] += a_token.sum(0)
        by_unit[number] += on.flatten(0, 1).sum(0)
        most[number] = torch.maximum(most[number], a_token.max())

    losses = torch.zeros((), dtype=torch.float64, device=device)
    for part in tokens.to(device).split(settings.batch):
        with products(device):
            logits, _ = model(part[:, :-1], watch)
        flat = logits.float().flatten(0, 1)
        losses += cross_entropy(flat, part[:, 1:].flatten(), reduction="sum")
    places = (by_place.double() / contexts_in_all).tolist()
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
        for number, means in enumerate(places)
    ]
    return float(losses) / (contexts_in_all * sizes.context), counts


@torch.no_grad()
def mlp_inputs(model: Decoder, tokens: Tensor, number: int) -> Tensor:
    """Return what a layer's MLP is given for bytes [contexts, tokens]: [contexts * tokens, k]."""
    device, given = model.norm.device, []

    def watch(layer: int, z: Tensor, _: Tensor) -> None:
        if layer == number:
            given.append(z.flatten(0, 1).bfloat16())

    with products(device):
        model(tokens.to(device), watch)
    return given[0]


def products(device: torch.device) -> torch.autocast:
    """Compute products in bf16 on a GPU, in fp32 on a CPU."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")


def _optimizer(model: Decoder, settings: Settings) -> torch.optim.AdamW:
    """Decay matrices alone, not the scales of norms."""
    matrices = [weight for weight in model.parameters() if weight.dim() == 2]
    scales = [weight for weight in model.parameters() if weight.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.decay},
        {"params": scales, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas)


def rate(step: int, settings: Settings) -> float:
    """Return the part of the learning rate: up to 1 while it rises, then down to a tenth."""
    rising = settings.warmup * settings.steps
    if step < rising:
        return (step + 1) / (rising + 1)
    return 0.55 + 0.45 * math.cos(math.pi * (step - rising) / (settings.steps - rising))
