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
from dataclasses import dataclass
from functools import cached_property
from math import isclose

from sparsebench.errors import ResultError
from sparsebench.results.formatting import amount, between, listed, percent, times
from sparsebench.results.layer_estimates import (
    ACTIVATIONS,
    ANYWHERE,
    BLOCKS,
    CSR,
    DENSE,
    START_US,
    TWO_FOUR,
    Estimate,
    Estimator,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.measured_layers import BITMAP_TOKENS, Evidence, Loss, Step
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.statistics import FEWEST

CONTEXT, DECODED = 1024, 256
MOST_TOKENS = 2**20
PASSES, SMALL = 10, 8  # of the stream through memory, and kernels of a layer, beside its products
REST = 1.25  # factor within which the time of the rest of a step is known
WORTH, DEAR = 1.05, 0.1  # a step must be this much faster; a loss, in nats per token, is too high
ACTIVE = 29.0  # units for a token, as in the published rows
TRY, TRAIN, NO, UNMEASURED = "try", "train", "no", "unmeasured"
MEASURED, ESTIMATE, BOUND = "measured", "estimate", "bound"
WAYS = {
    "2:4": (TWO_FOUR, 0.5),
    "half of each MLP 2:4": (TWO_FOUR, 0.25),
    "64 × 64 blocks, 50 % zeros": (BLOCKS, 0.5),
    "64 × 64 blocks, 90 % zeros": (BLOCKS, 0.9),
    "zeros anywhere, 50 %": (ANYWHERE, 0.5),
    "zeros anywhere, 70 %": (ANYWHERE, 0.7),
    f"sparse activations, {ACTIVE:g} units": (ACTIVATIONS, 0.0),
}


@dataclass(frozen=True)
class Gain:
    """A speedup and how it is known: by MEASURED runs, by an ESTIMATE, or by a BOUND alone."""

    value: float
    low: float
    high: float
    basis: str

    @property
    def text(self) -> str:
        """Write it: `1.15× [1.14, 1.16]`, `≈1.2× [1.1, 1.3]`, `at most 1.3×`."""
        if self.basis == BOUND:
            return f"at most {times(self.value)}"
        mark = "≈" if self.basis == ESTIMATE else ""
        return mark + between(self.value, self.low, self.high)


@dataclass(frozen=True)
class Advice:
    """One way: gains of the MLPs and of the whole step, and the weights of the model in GB.

    loss      what it costs, if that was measured
    sure      how both gains are known, in words
    runs      the published runs that say so
    """

    way: str
    layers: Gain
    step: Gain
    gigabytes: float
    loss: Loss | None
    sure: str
    runs: Sequence[str]

    @property
    def quality(self) -> str:
        """Return the loss in a few words."""
        if self.loss is None:
            return "not measured"
        return "trained, not pruned" if self.loss.loss is None else f"+{self.loss.loss:.2f} nats"


@dataclass(frozen=True)
class Answer:
    """The verdict, a line for each way, and what is assumed.

    word      TRY, TRAIN, NO or UNMEASURED; `best` is the way that the verdict is about, if any
    gpu       its name; without published rows the one that was asked for, and `dense_us` is None
    """

    model: ModelShapes
    gpu: str
    tokens: int
    word: str
    verdict: str
    best: Advice | None
    ways: Sequence[Advice]
    dense_gigabytes: float
    dense_us: float | None
    notes: Sequence[str]


def named_gpu(evidence: Evidence, name: str) -> Gpu | None:
    """Return the GPU with published rows whose name contains a text; None if none does.

    Raises ResultError if several do.
    """
    found = [gpu for gpu in evidence.layers.gpus if name.lower() in gpu.lower()]
    if len(found) > 1:
        raise ResultError(
            f"--gpu: expected part of one GPU's name, found {name!r} in {listed(found)}"
        )
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
        *_verdict(ways, card, gpu, tokens),
        ways,
        model.weights * 2 / 1e9,
        step.dense_us if card else None,
        _notes(model, tokens, card, evidence, ways),
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
            Layer(
                False, DENSE, self.tokens, width + 2 * model.kv_heads * model.head_dim, model.hidden
            ),
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

    @cached_property
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
        mlp_us = self.evidence.layers.dense_us(self.layer(DENSE, 0.0), self.gpu)
        return self.rest_us + self.model.layers * mlp_us

    def layer(self, way: str, sparsity: float) -> Layer:
        """Return an MLP of the model."""
        active = min(ACTIVE, self.model.intermediate) if way == ACTIVATIONS else 0.0
        sizes = self.tokens, self.model.intermediate, self.model.hidden
        return Layer(True, way, *sizes, sparsity=sparsity, active=active)

    def advice(self, name: str, way: str, sparsity: float) -> Advice:
        """Return everything that is known of a way."""
        layer = self.layer(
            CSR if way == ANYWHERE and self.tokens > BITMAP_TOKENS else way, sparsity
        )
        near = self.evidence.layers.estimate(layer, self.gpu) if self.gpu else None
        same = self.measured_layer(layer)
        layers, step = self.bounds(layer)
        runs: list[Measured | Step] = []
        if near and self.gpu:
            layers, runs = Gain(near.gain, near.low, near.high, ESTIMATE), [*near.rows]
            step = self.estimated_step(layer, near)
        if same:
            layers, runs = Gain(same.gain, same.low, same.high, MEASURED), [same]
        if whole := self.measured_step(layer):
            step, runs = Gain(whole.gain, whole.low, whole.high, MEASURED), [whole, *runs]
        stored = layer.stored if way != ACTIVATIONS else 1.0
        saved = self.model.layers * self.model.mlp * (1 - stored)
        return Advice(
            name,
            layers,
            step,
            (self.model.weights - saved) * 2 / 1e9,
            next(
                (
                    loss
                    for loss in self.evidence.losses
                    if loss.way == way and isclose(loss.sparsity, sparsity)
                ),
                None,
            ),
            _sure(step, whole, same, self.model),
            list(dict.fromkeys(row.run for row in runs)),
        )

    def estimated_step(self, layer: Layer, near: Estimate) -> Gain:
        """Return the gain of the whole step from that of its MLPs."""
        mlps = self.model.layers * near.dense_us
        inside = near.dense_us / near.sparse_us
        gained = (min(inside * factor, layer.bound) for factor in (1, 1 / near.widen, near.widen))
        shorter = [mlps / gain for gain in gained]
        rests = [self.rest_us * factor for factor in (1, REST, 1 / REST)]
        gains = [(mlps + rest) / (left + rest) for rest in rests for left in shorter]
        return Gain(gains[0], min(gains), max(gains), ESTIMATE)

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
        return Gain(mlp, 0.0, mlp, BOUND), Gain(step, 0.0, step, BOUND)

    def measured_layer(self, layer: Layer) -> Measured | None:
        """Return the measurement of exactly this MLP on this GPU."""
        same = (row for row in self.evidence.layers.measured if row.layer == layer)
        return next((row for row in same if self.gpu and row.gpu == self.gpu.name), None)

    def measured_step(self, layer: Layer) -> Step | None:
        """Return the deepest step of such layers on this GPU whose head has the same share."""
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


def _sure(step: Gain, whole: Step | None, same: Measured | None, model: ModelShapes) -> str:
    if step.basis == BOUND:
        return "bound alone"
    parts = []
    if whole:
        depth = f"{whole.model.layers} of {model.layers} layers, "
        parts += [_how("step", depth if whole.model.layers < model.layers else "", whole.processes)]
    if same:
        parts += [_how("MLP", "", same.processes)]
    return "; ".join(parts) or "estimate"


def _how(what: str, depth: str, processes: int) -> str:
    word = "measured" if processes >= FEWEST else "a look"
    return f"{what}: {word} ({depth}{amount(processes, 'process')})"


def _verdict(
    ways: Sequence[Advice], gpu: Gpu | None, asked: str, tokens: int
) -> tuple[str, str, Advice | None]:
    """Return the word, the first sentence of the answer, and the way that it is about."""
    pruned = [way for way in ways if not way.way.startswith("sparse activations")]
    at = f"with {amount(tokens, 'token')} at once"
    sure = [way for way in pruned if way.step.basis != BOUND and way.step.low >= WORTH]
    cheap = [
        way for way in sure if way.loss and way.loss.loss is not None and way.loss.loss <= DEAR
    ]
    best = max(cheap or sure or pruned, key=lambda way: way.step.value)
    if gpu is None and best.step.value >= WORTH:
        most = f"a step can become at most {times(best.step.value)} as fast ({best.way})"
        sentence = f"Not measured: no run on {asked} is published. {at.capitalize()}, {most}."
        return UNMEASURED, sentence, best
    if not sure:
        sentence = f"Do not prune: {at}, no way is sure to make a step {WORTH:g} times as fast."
        return NO, sentence, None
    faster = f"a step with {best.way} is {best.step.text} as fast {at}"
    loss = best.loss.loss if best.loss else None
    if best.loss is None or loss is None:
        cost = "its loss by pruning was not measured"
    else:
        cost = f"such pruning cost {best.loss.model} {loss:.2f} nats per token"
    if cheap:
        return TRY, f"Worth trying: {faster}, and {cost}.", best
    return TRAIN, f"Do not prune without training: {faster}, but {cost}.", best


def _notes(
    model: ModelShapes, tokens: int, gpu: Gpu | None, evidence: Evidence, ways: Sequence[Advice]
) -> list[str]:
    if tokens <= DECODED:
        load = f"{amount(tokens, 'sequence')} with {CONTEXT} tokens in the KV cache of each"
    else:
        load = f"prompts of {CONTEXT} tokens; their last tokens alone pass the head"
    share = percent(round(model.layers * model.mlp / model.weights, 2))
    notes = [
        f"A step: {load}. Weights, activations and the cache have 16 bits.",
        "Only the MLPs are sparse. Attention, norms, the cache, the embedding and the head stay "
        f"dense: the MLPs hold {share} of the weights.",
    ]
    if gpu:
        inside, predicted = evidence.layers.coverage
        notes += [
            "An estimate comes from the bytes and FLOPs of the nearest measured layers, against "
            f"the measured ceilings of each GPU. Such intervals held {inside} of {predicted} "
            "measured layers whose shapes were left out. The dense part of a step is taken as "
            f"known within a factor of {REST:g}.",
        ]
    if any(BOUND in (way.layers.basis, way.step.basis) for way in ways):
        notes += ["A bound is the larger ratio of bytes or of FLOPs; no measured layer is near."]
    notes += dict.fromkeys(way.loss.text for way in ways if way.loss)
    if not model.activation.startswith("relu"):
        notes += [f"The MLPs of this model have {model.activation}, which turns no unit off."]
    return notes


def commands(answer: Answer) -> Iterable[str]:
    """Yield the commands that would replace bounds and estimates by measurements."""
    if answer.dense_us is None:
        yield "sparsebench new-gpu --budget 10m"
        yield f"sparsebench advise {answer.model.name} --gpu GPU --batch {answer.tokens} --run RUN"
    model = answer.model
    sizes = f"m={answer.tokens} n={model.intermediate} k={model.hidden} dtype=bf16"
    yield f"sparsebench try spense_ffn {sizes} pattern=spense_hidden sparsity=0.25"


def left_out(evidence: Evidence) -> list[tuple[Step, Gain]]:
    """Return each step that was measured, and its estimate from layers of other shapes alone."""
    predicted = []
    for step in evidence.steps:
        sizes = {step.layer.n, step.layer.k, 2 * step.layer.n}
        rows = [row for row in evidence.layers.measured if not {row.layer.n, row.layer.k} <= sizes]
        unseen = Evidence(Estimator(evidence.layers.gpus, rows), [], [])
        gpu = evidence.layers.gpus[step.gpu]
        model = StepModel(unseen, step.model, gpu, step.layer.m, step.context)
        if near := unseen.layers.estimate(step.layer, gpu):
            predicted.append((step, model.estimated_step(step.layer, near)))
    return predicted
