"""Is pruning worth it for a model on a GPU? One answer for the command and the page.

    step, dense = layers x (MLP + wqkv + wo + cache + small kernels) + head
    step, way   = the same with a shorter MLP;  gain = step, dense / step, way

Only MLPs are pruned, as `sparsebench prune` does it. Attention, norms, the KV cache, the embedding
and the head stay dense. Up to DECODED tokens at once are as many sequences, with a cache of CONTEXT
tokens each; more are prompts of CONTEXT tokens, whose last token alone needs the head.

A published run of the same model comes before an estimate (layer_estimates.py). The time of the
rest of a step is taken as right within REST: for the decoding steps that were measured it is. On a
GPU without published rows there are bounds alone: a way saves no more than its share of the bytes
or of the FLOPs of dense weights, whichever is larger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import isclose

from sparsebench.errors import ResultError
from sparsebench.results.formatting import amount, between, listed, times
from sparsebench.results.layer_estimates import (
    ACTIVATIONS,
    ANYWHERE,
    BLOCKS,
    CSR,
    DENSE,
    START_US,
    TWO_FOUR,
    Estimate,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.measured_layers import BITMAP_TOKENS, Evidence, Step
from sparsebench.results.model_shapes import ModelShapes

CONTEXT, DECODED = 1024, 256
MOST_TOKENS = 2**20
PASSES, SMALL = 10, 8  # of the stream through memory, and kernels of a layer, beside its products
REST = 1.25  # factor within which the time of the rest of a step is known
WORTH, DEAR = 1.05, 0.1  # a step must be this much faster; a loss, in nats per token, is too high
ACTIVE = 29.0  # units for a token, as in the published rows
WAYS = {
    "2:4": (TWO_FOUR, 0.5),
    "half of each MLP 2:4": (TWO_FOUR, 0.25),
    "64 × 64 blocks, 50 % zeros": (BLOCKS, 0.5),
    "64 × 64 blocks, 90 % zeros": (BLOCKS, 0.9),
    "zeros anywhere, 50 %": (ANYWHERE, 0.5),
    "zeros anywhere, 70 %": (ANYWHERE, 0.7),
    f"sparse activations, {ACTIVE:g} units": (ACTIVATIONS, 0.0),
}
UNMEASURED = "not measured"


@dataclass(frozen=True)
class Gain:
    """A speedup and how it is known: measured, estimate, or bound (then it is the largest)."""

    value: float
    low: float
    high: float
    basis: str

    @property
    def text(self) -> str:
        """Write it: `1.15× [1.14, 1.16]`, `at most 1.3×`."""
        if self.basis == "bound":
            return f"at most {times(self.value)}"
        return between(self.value, self.low, self.high)


@dataclass(frozen=True)
class Advice:
    """One way: gains of the MLPs and of the whole step, memory in GB, losses, and the runs used."""

    way: str
    layers: Gain
    step: Gain
    gigabytes: float
    quality: str
    loss: float | None
    trained: bool
    sure: str
    runs: Sequence[str]


@dataclass(frozen=True)
class Answer:
    """The verdict, a line for each way, and what is assumed; `gpu` is as asked without rows."""

    model: ModelShapes
    gpu: str
    tokens: int
    verdict: str
    ways: Sequence[Advice]
    dense_gigabytes: float
    dense_us: float | None
    assumed: Sequence[str]


def named_gpu(evidence: Evidence, name: str) -> Gpu | None:
    """Return the GPU with published rows whose name contains a text; None if none does.

    Raises ResultError if several do.
    """
    found = [gpu for gpu in evidence.layers.gpus if name.lower() in gpu.lower()]
    if len(found) > 1:
        raise ResultError(f"--gpu: expected part of one GPU's name, found {name!r} in {listed(found)}")
    return evidence.layers.gpus[found[0]] if found else None


def advise(evidence: Evidence, model: ModelShapes, gpu: str, tokens: int) -> Answer:
    """Return the answer for `tokens` at once on a GPU, named by a part of its name.

    Raises ResultError if tokens are not from 1 to MOST_TOKENS or the name has several matches.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise ResultError(f"--batch: expected 1 to {MOST_TOKENS} tokens at once, found {tokens}")
    card = named_gpu(evidence, gpu)
    step = StepModel(evidence, model, card, tokens)
    ways = [step.advice(name, way, sparsity) for name, (way, sparsity) in WAYS.items()]
    return Answer(
        model,
        card.name if card else gpu,
        tokens,
        _verdict(ways, card, gpu, tokens),
        ways,
        model.weights * 2 / 1e9,
        step.dense_us if card else None,
        _assumed(model, tokens, card, evidence),
    )


@dataclass(frozen=True)
class StepModel:
    """A step of a model with `tokens` at once on a GPU; without one there are only bounds."""

    evidence: Evidence
    model: ModelShapes
    gpu: Gpu | None
    tokens: int
    context: int = CONTEXT

    @property
    def decodes(self) -> bool:
        """Return whether every token is a sequence of its own."""
        return self.tokens <= DECODED

    @property
    def rest(self) -> list[Layer]:
        """Return the dense products of a layer beside the MLP, and the head."""
        model, width = self.model, self.model.heads * self.model.head_dim
        last = self.tokens if self.decodes else -(-self.tokens // self.context)
        return [
            Layer(False, DENSE, self.tokens, width + 2 * model.kv_heads * model.head_dim, model.hidden),
            Layer(False, DENSE, self.tokens, model.hidden, width),
            Layer(False, DENSE, last, model.vocab, model.hidden),
        ]

    @property
    def cache_bytes(self) -> float:
        """Return the bytes of keys and values that a layer reads or writes."""
        tokens = self.tokens * (self.context if self.decodes else 1)
        return tokens * 2 * self.model.kv_heads * self.model.head_dim * 2

    @property
    def attention_flops(self) -> float:
        """Return the FLOPs of the products with keys and values in a layer."""
        seen = self.context if self.decodes else self.context / 2
        return 4 * self.tokens * seen * self.model.heads * self.model.head_dim

    @property
    def rest_us(self) -> float:
        """Return the time of everything but the MLPs."""
        assert self.gpu
        *products, head = (self.evidence.layers.dense_us(layer, self.gpu) for layer in self.rest)
        stream = PASSES * self.tokens * self.model.hidden * 2
        moved = (self.cache_bytes + stream) / self.gpu.gb_per_s / 1e3
        each = sum(products) + moved + self.attention_flops / self.gpu.rate("bf16") / 1e6
        return self.model.layers * (each + SMALL * START_US) + head

    @property
    def dense_us(self) -> float:
        """Return the time of the dense step."""
        assert self.gpu
        mlp = self.layer(DENSE, 0.0)
        return self.rest_us + self.model.layers * self.evidence.layers.dense_us(mlp, self.gpu)

    def layer(self, way: str, sparsity: float) -> Layer:
        """Return an MLP of the model."""
        active = min(ACTIVE, self.model.intermediate) if way == ACTIVATIONS else 0.0
        sizes = self.tokens, self.model.intermediate, self.model.hidden
        return Layer(True, way, *sizes, sparsity=sparsity, active=active)

    def advice(self, name: str, way: str, sparsity: float) -> Advice:
        """Return everything that is known of a way."""
        layer = self.layer(CSR if way == ANYWHERE and self.tokens > BITMAP_TOKENS else way, sparsity)
        near = self.evidence.layers.estimate(layer, self.gpu) if self.gpu else None
        same = self.measured_layer(layer)
        layers, step = self.bounds(layer)
        runs: list[Measured | Step] = []
        if near and self.gpu:
            layers, runs = Gain(near.gain, near.low, near.high, "estimate"), [*near.rows]
            step = self.estimated_step(near)
        if same:
            layers, runs = Gain(same.gain, same.low, same.high, "measured"), [same]
        if whole := self.measured_step(layer):
            step, runs = Gain(whole.gain, whole.low, whole.high, "measured"), [whole, *runs]
        stored = layer.stored if way != ACTIVATIONS else 1.0
        saved = self.model.layers * self.model.mlp * (1 - stored)
        losses = [
            loss
            for loss in self.evidence.losses
            if loss.way == way and isclose(loss.sparsity, sparsity)
        ]
        return Advice(
            name,
            layers,
            step,
            (self.model.weights - saved) * 2 / 1e9,
            losses[0].text if losses else UNMEASURED,
            losses[0].loss if losses else None,
            way == ACTIVATIONS,
            _sure(layers, step, whole, same, self.model),
            list(dict.fromkeys(row.run for row in runs)),
        )

    def estimated_step(self, near: Estimate) -> Gain:
        """Return the gain of the whole step from that of its MLPs."""
        dense = self.model.layers * near.dense_us
        widen = near.high / near.gain
        sparse = [self.model.layers * near.sparse_us * factor for factor in (1, widen, 1 / widen)]
        gains = [
            [(dense + rest) / (mlp + rest) for mlp in sparse]
            for rest in (self.rest_us, self.rest_us * REST, self.rest_us / REST)
        ]
        ends = [gain for row in gains for gain in row]
        return Gain(gains[0][0], min(ends), max(ends), "estimate")

    def bounds(self, layer: Layer) -> tuple[Gain, Gain]:
        """Return the largest gain of the MLPs and of the step, by bytes or by FLOPs."""
        layers, rest = self.model.layers, self.rest
        counts = [layers, layers, 1]
        other = [sum(c * each.weights for c, each in zip(counts, rest, strict=True)) * 2.0]
        other += [sum(2 * c * e.m * e.weights for c, e in zip(counts, rest, strict=True))]
        other = [
            part + layers * extra
            for part, extra in zip(other, (self.cache_bytes, self.attention_flops), strict=True)
        ]
        dense = [layers * layer.weights * 2.0, layers * layer.weights * 2.0 * self.tokens]
        left = [dense[0] * layer.stored, dense[1] * layer.density]
        mlp = max(a / b for a, b in zip(dense, left, strict=True))
        sums = zip(dense, left, other, strict=True)
        step = max((a + c) / (b + c) for a, b, c in sums)
        return Gain(mlp, 0.0, mlp, "bound"), Gain(step, 0.0, step, "bound")

    def measured_layer(self, layer: Layer) -> Measured | None:
        """Return the measurement of exactly this MLP on this GPU."""
        same = (row for row in self.evidence.layers.measured if row.layer == layer)
        return next((row for row in same if self.gpu and row.gpu == self.gpu.name), None)

    def measured_step(self, layer: Layer) -> Step | None:
        """Return the step of this model on this GPU with the most layers; fewer keep their shares."""
        names = "hidden", "intermediate", "heads", "kv_heads", "head_dim"
        steps = [
            step
            for step in self.evidence.steps
            if self.gpu
            and step.gpu == self.gpu.name
            and step.layer == layer
            and step.context == self.context
            and all(getattr(step.model, name) == getattr(self.model, name) for name in names)
            and step.model.vocab * self.model.layers == self.model.vocab * step.model.layers
        ]
        return max(steps, key=lambda step: (step.model.layers, step.processes), default=None)


def _sure(
    layers: Gain, step: Gain, whole: Step | None, same: Measured | None, model: ModelShapes
) -> str:
    if step.basis == "bound":
        return "bound alone"
    of_step = "step estimated"
    if whole:
        depth = f", {whole.model.layers} of {model.layers} layers"
        few = depth if whole.model.layers < model.layers else ""
        of_step = f"step measured ({amount(whole.processes, 'process')}{few})"
    of_layers = f"MLP {layers.basis}d" if layers.basis == "estimate" else "MLP measured"
    if same:
        of_layers += f" ({amount(same.processes, 'process')})"
    return f"{of_step}; {of_layers}"


def _verdict(ways: Sequence[Advice], gpu: Gpu | None, asked: str, tokens: int) -> str:
    """Return the first sentence of the answer."""
    pruned = [way for way in ways if not way.trained]
    at = f"with {amount(tokens, 'token')} at once"
    if gpu is None:
        best = max(pruned, key=lambda way: way.step.value)
        if best.step.value < WORTH:
            return f"Do not prune: {at}, no way can make a step {WORTH:g} times as fast."
        return (
            f"Unknown: no run on {asked} is published. {at.capitalize()}, a step can gain at most "
            f"{times(best.step.value)} ({best.way})."
        )
    sure = [way for way in pruned if way.step.basis != "bound" and way.step.low >= WORTH]
    cheap = [way for way in sure if way.loss is not None and way.loss <= DEAR]
    if cheap:
        best = max(cheap, key=lambda way: way.step.value)
        return (
            f"Prune, if your model bears it as the one that was measured did: {best.way} makes a "
            f"step {best.step.text} as fast {at}, for {best.quality}."
        )
    if sure:
        best = max(sure, key=lambda way: way.step.value)
        cost = "its loss was not measured" if best.loss is None else f"it costs {best.quality}"
        return (
            f"Do not prune without training again: {best.way} makes a step {best.step.text} as "
            f"fast {at}, but {cost}."
        )
    return f"Do not prune: {at}, no way is sure to make a step {WORTH:g} times as fast."


def _assumed(
    model: ModelShapes, tokens: int, gpu: Gpu | None, evidence: Evidence
) -> list[str]:
    if tokens <= DECODED:
        load = f"{amount(tokens, 'sequence')} with {CONTEXT} tokens in the KV cache of each"
    else:
        load = f"prompts of {CONTEXT} tokens; their last tokens alone pass the head"
    lines = [
        f"A step: {load}. Weights, activations and the cache have 16 bits.",
        "Only the MLPs are sparse. Attention, norms, the cache, the embedding and the head stay "
        f"dense: the MLPs hold {model.layers * model.mlp / model.weights:.0%} of the weights.",
    ]
    if gpu:
        inside, predicted = evidence.layers.coverage()
        lines += [
            "An estimate comes from the bytes and FLOPs of the nearest measured layers, against "
            f"the measured ceilings of each GPU; its interval held {inside} of {predicted} "
            "measured layers when their shape was left out.",
            f"The dense part of a step is taken as known within a factor of {REST:g}.",
        ]
    else:
        lines += ["A bound is the larger ratio of bytes or of FLOPs; no kernel was measured there."]
    if not model.activation.startswith("relu"):
        lines += [f"Sparse activations need ReLU; this model has {model.activation}."]
    return lines


def commands(answer: Answer) -> Iterable[str]:
    """Yield the commands that would replace bounds and estimates by measurements."""
    if answer.dense_us is None:
        yield "sparsebench new-gpu --budget 10m"
        yield f"sparsebench advise {answer.model.name} --gpu GPU --batch {answer.tokens} --run RUN"
    model = answer.model
    sizes = f"m={answer.tokens} n={model.intermediate} k={model.hidden} dtype=bf16"
    yield f"sparsebench try spense_ffn {sizes} pattern=spense_hidden sparsity=0.25"


def without_model(evidence: Evidence, model: ModelShapes) -> Evidence:
    """Return evidence that has seen neither the model nor a layer of its shapes."""
    sizes = {model.hidden, model.intermediate, 2 * model.intermediate}
    layers = evidence.layers.without(lambda row: {row.layer.n, row.layer.k} <= sizes)
    names = "hidden", "intermediate"
    steps = [
        step
        for step in evidence.steps
        if any(getattr(step.model, name) != getattr(model, name) for name in names)
    ]
    return replace(evidence, layers=layers, steps=steps)
