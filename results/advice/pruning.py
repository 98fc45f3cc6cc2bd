"""Is pruning worth it for a model on a GPU? One answer for the command and the page.

    for each of KINDS    gain of the MLPs and of the model, weights in GB, loss, and how sure
    verdict              TRY         the model is certainly WORTH times as fast, and pruning cost
                                     at most MOST_LOSS nats per token where it was measured
                         TRAIN       as fast, but pruning alone costs more, or an unknown amount
                         NO          no kind is certain to make the model WORTH times as fast
                         UNMEASURED  no run on this GPU is published: upper limits only

A published run of the same model comes before an estimate (step_model.py, layer_estimates.py). If
it measured only some of the layers, the gain of the model is extrapolated from them, and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import isclose
from pathlib import Path
from shlex import quote

from sparsebench._gpus import names_device
from sparsebench.errors import ResultError
from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ACTIVE,
    ANYWHERE,
    BITMAP_TOKENS,
    BLOCKS,
    SIX_EIGHT,
    TWO_FOUR,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.advice.measured_layers import TRAINED, Evidence, Loss, ModelStep
from sparsebench.results.advice.step_model import BOUND, DECODED, ESTIMATE, REST, Gain, StepModel
from sparsebench.results.formatting import amount, join_words, percent, times
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.statistics.ratio import FEWEST

SURVEY = "runs/survey"  # where the commands put the survey of a GPU without published runs
CONTEXT = 1024
MOST_TOKENS = 2**20
WORTH, MOST_LOSS = 1.05, 0.1
TRY, TRAIN, NO, UNMEASURED = "try", "train", "no", "unmeasured"
KINDS = {  # how a layer is sparse, and its sparsity
    "2:4": (TWO_FOUR, 0.5),
    "half of each MLP 2:4": (TWO_FOUR, 0.25),
    "6:8": (SIX_EIGHT, 0.25),
    "64 × 64 blocks, 50 % zeros": (BLOCKS, 0.5),
    "64 × 64 blocks, 80 % zeros": (BLOCKS, 0.8),
    "64 × 64 blocks, 90 % zeros": (BLOCKS, 0.9),
    "zeros anywhere, 50 %": (ANYWHERE, 0.5),
    "zeros anywhere, 70 %": (ANYWHERE, 0.7),
    f"sparse activations, {ACTIVE:g} units": (ACTIVATIONS, 0.0),
}
FORMATS = {TWO_FOUR: "spense", SIX_EIGHT: "slide", BLOCKS: "bsr", ANYWHERE: "bitmap"}


@dataclass(frozen=True)
class Advice:
    """One of KINDS: gains of the MLPs and of the model, and its weights in GB.

    loss  what it costs, if that was measured    sure  how the gains are known, in words
    runs  the published runs that say so
    """

    kind: str
    layers: Gain
    step: Gain
    gigabytes: float
    loss: Loss | None
    sure: str
    runs: Sequence[str]

    @property
    def nats(self) -> float | None:
        """Return the loss by pruning in nats per token; None if it was not measured."""
        return self.loss.rise if self.loss and self.loss.method != TRAINED else None

    @property
    def quality(self) -> str:
        """Return the loss in a few words."""
        if self.nats is not None:
            return f"+{self.nats:.2f} nats"
        return "trained, not pruned" if self.loss else "not measured"


@dataclass(frozen=True)
class Answer:
    """The verdict with its word, and an Advice for each kind.

    gpu    its name; without published rows the requested name, and `dense_us` is None
    best   the kind that the verdict is about, if any
    about  sentences on this model    basis  sentences on how every answer is made
    """

    model: ModelShapes
    gpu: str
    tokens: int
    word: str
    verdict: str
    best: Advice | None
    kinds: Sequence[Advice]
    dense_gigabytes: float
    dense_us: float | None
    about: Sequence[str]
    basis: Sequence[str]


def advise(evidence: Evidence, model: ModelShapes, gpu: str, tokens: int) -> Answer:
    """Return the answer for `tokens` at once on a GPU, named by a part of its name.

    Raises ResultError if tokens are not from 1 to MOST_TOKENS, if the name is empty, or if several
    GPUs match.
    """
    if not gpu.strip():
        raise ResultError("--gpu: expected part of a GPU's name, such as H200; found ''")
    if not 1 <= tokens <= MOST_TOKENS:
        raise ResultError(f"--batch: expected 1 to {MOST_TOKENS} tokens at once, found {tokens}")
    names = [name for name in evidence.layers.gpus if names_device(gpu, name)]
    if len(names) > 1:
        expected = "expected part of one GPU's name"
        raise ResultError(f"--gpu: {expected}, found {gpu!r} in {join_words(names)}")
    card = evidence.layers.gpus[names[0]] if names else None
    step = StepModel(model, tokens, CONTEXT)
    rest_us = step.rest_us(evidence.layers, card) if card else 0.0
    kinds = [_advice(evidence, step, card, rest_us, kind) for kind in KINDS]
    return Answer(
        model,
        card.name if card else gpu,
        tokens,
        *_verdict(kinds, evidence, card, gpu, tokens),
        kinds,
        model.weights * 2 / 1e9,
        step.dense_us(evidence.layers, card) if card else None,
        _about(model, tokens, kinds),
        _basis(evidence, card),
    )


def commands(answer: Answer) -> list[str]:
    """Return the commands that would replace limits and estimates by measurements."""
    model = answer.model
    if answer.dense_us is None:
        name = model.source if Path(model.source).exists() else model.name
        arguments = f"{quote(name)} --gpu {quote(answer.gpu)} --batch {answer.tokens}"
        return [
            f"sparsebench new-gpu --budget 10m --out {SURVEY}",
            f"sparsebench advise {arguments} --run {SURVEY}/screen",
        ]
    sizes = f"m={answer.tokens} n={model.intermediate} k={model.hidden} dtype=bf16"
    return [f"sparsebench try spense_ffn {sizes} pattern=spense_hidden sparsity=0.25"]


def gain_of(evidence: Evidence, layer: Layer, gpu: Gpu | None) -> tuple[Gain, Sequence[Measured]]:
    """Return the gain of a layer and its rows: measured, else estimated, else its upper limit."""
    if gpu:
        for row in evidence.measured:
            if (row.layer, row.gpu) == (layer, gpu.name):
                return Gain.measured(row.gain, row.low, row.high, row.processes), [row]
        if estimate := evidence.layers.estimate(layer, gpu):
            return Gain(estimate.gain, estimate.low, estimate.high, ESTIMATE), estimate.rows
    return Gain(layer.bound, 0.0, layer.bound, BOUND), []


def _advice(
    evidence: Evidence, step: StepModel, gpu: Gpu | None, rest_us: float, kind: str
) -> Advice:
    """Return what is known about a kind: a limit, replaced by an estimate or a measurement."""
    way, sparsity = KINDS[kind]
    layer, model = step.mlp(way, sparsity), step.model
    of_layers, rows = gain_of(evidence, layer, gpu)
    most = step.bound(layer)
    of_step = Gain(most, 0.0, most, BOUND)
    runs, how = [row.run for row in rows], ["upper limit only"]
    if gpu and (estimate := evidence.layers.estimate(layer, gpu)):
        of_step, how = step.estimated(layer, estimate, rest_us), ["estimate"]
    measured = of_layers.basis not in (BOUND, ESTIMATE)
    if measured:
        how = [f"MLP: {_processes(rows[0].processes)}"]
    if gpu and (whole := _measured_step(evidence, step, layer, gpu)):
        depth = f"{whole.model.layers} of {model.layers} layers"
        part = depth if whole.model.layers < model.layers else ""
        of_step = Gain.measured(whole.gain, whole.low, whole.high, whole.processes, part)
        how = [f"{part or 'model'}: {_processes(whole.processes)}", *(how if measured else [])]
        runs = [whole.run, *runs]
    saved = 0.0 if way == ACTIVATIONS else model.layers * layer.weights * (1 - layer.memory_share)
    losses = [
        each
        for each in evidence.losses
        if each.way == way
        and isclose(each.sparsity, sparsity)
        and (each.unit == "token" or each.method == TRAINED)
    ]
    return Advice(
        kind,
        of_layers,
        of_step,
        (model.weights - saved) * 2 / 1e9,
        min(losses, key=lambda each: each.rise, default=None),
        "; ".join(how),
        list(dict.fromkeys(runs)),
    )


def _processes(count: int) -> str:
    word = "measured" if count >= FEWEST else "a look"
    return f"{word}, {amount(count, 'process')}"


def _measured_step(
    evidence: Evidence, step_model: StepModel, layer: Layer, gpu: Gpu
) -> ModelStep | None:
    """Return the deepest measured step of such layers whose head has the same share of it."""
    names, model = ("hidden", "intermediate", "heads", "kv_heads", "head_dim"), step_model.model
    steps = [
        step
        for step in evidence.steps
        if (step.gpu, step.layer, step.context) == (gpu.name, layer, step_model.context)
        and all(getattr(step.model, name) == getattr(model, name) for name in names)
        and step.model.vocab * model.layers == model.vocab * step.model.layers
    ]
    return max(steps, key=lambda step: (step.model.layers, step.processes), default=None)


def _verdict(
    kinds: Sequence[Advice], evidence: Evidence, gpu: Gpu | None, gpu_name: str, tokens: int
) -> tuple[str, str, Advice | None]:
    """Return the word, the first sentence of the answer, and the kind that it is about."""
    pruned = [each for each in kinds if KINDS[each.kind][0] != ACTIVATIONS]
    at = f"with {amount(tokens, 'token')} at once"
    sure = [each for each in pruned if each.step.basis != BOUND and each.step.low >= WORTH]
    cheap = [each for each in sure if each.nats is not None and each.nats <= MOST_LOSS]
    best = max(cheap or sure or pruned, key=lambda each: each.step.value)
    way, sparsity = KINDS[best.kind]
    name = f"{best.kind} (format {FORMATS[way]})"
    if gpu is None and best.step.value >= WORTH:
        most = f"the model can become at most {times(best.step.value)} as fast, with {name}"
        gpus = join_words([*evidence.layers.gpus])
        absent = f"no run on {gpu_name} is published, only runs on {gpus}"
        return UNMEASURED, f"Not measured: {absent}. {at.capitalize()}, {most}.", best
    if not sure:
        why = f"no kind of sparsity is certain to make the model {WORTH:g} times as fast {at}"
        return NO, f"Do not prune: {why}.", None
    at += f" ({best.step.caveat})" if best.step.caveat else ""
    faster = f"the model with {name} is {best.step.text} as fast {at}"
    cost = "its loss by pruning was not measured"
    costs = [
        (level, each.kind, each.loss)
        for each in pruned
        for like, level in [KINDS[each.kind]]
        if like == way and level <= sparsity and each.loss and each.nats is not None
    ]
    if costs:
        _, kind, loss = max(costs, key=lambda each: each[0])
        pruning = "such pruning" if kind == best.kind else f"even pruning to {kind}"
        cost = f"{pruning} cost {loss.model} {loss.rise:.2f} nats per token"
    if cheap:
        return TRY, f"Worth trying: {faster}, and {cost}.", best
    return TRAIN, f"Do not prune without training: {faster}, but {cost}.", best


def _about(model: ModelShapes, tokens: int, kinds: Sequence[Advice]) -> list[str]:
    """Return what is assumed about a model, and whose losses the answer shows."""
    load = f"prompts of {CONTEXT} tokens, of which only the last one passes the head"
    if tokens <= DECODED:
        load = f"{amount(tokens, 'sequence')} with a KV cache of {CONTEXT} tokens each"
    share = percent(round(model.layers * model.mlp / model.weights, 2))
    sentences = [f"The model runs {load}, in one pass. The MLPs hold {share} of the weights."]
    if not model.activation.startswith("relu"):
        sentences += [f"Its MLPs use {model.activation}, so no hidden unit is exactly zero."]
    return [*sentences, *dict.fromkeys(_of_loss(each.loss) for each in kinds if each.loss)]


def _of_loss(loss: Loss) -> str:
    """Say how a loss was measured."""
    if loss.method == TRAINED:
        return (
            "Sparse activations come from training with ReLU and an L1 term, not from pruning: "
            f"the term changed the loss of {loss.model} by {loss.rise:+.2f} nats per {loss.unit}."
        )
    return (
        f"Losses were measured on {loss.model} with pruned MLPs, in nats per {loss.unit} over "
        f"{loss.held_out} held-out {loss.unit}s, with the best method that was measured."
    )


def _basis(evidence: Evidence, gpu: Gpu | None) -> list[str]:
    """Return what all answers on a GPU assume, and what their marks mean."""
    inside, predicted = evidence.layers.coverage if gpu else (0, 0)
    estimated = (
        "An estimate (≈), with its interval in brackets, comes from the bytes and FLOPs of the "
        "nearest measured layers, against the measured ceilings of each GPU; layers of other "
        "GPUs count less. "
        "To test the intervals, each measured layer was estimated from layers of other shapes: "
        f"{inside} of {predicted} intervals held the measured value. "
        f"The time of the dense rest may be wrong by a factor of {REST:g}."
    )
    layers = [row for row in evidence.measured if row.layer.way != ACTIVATIONS]
    unpruned = sum(row.over == "original" for row in layers)
    over = "Gains are over dense on the same zeros: it multiplies the pruned weights, too."
    if unpruned:
        over = (
            f"In {unpruned} of {amount(len(layers), 'layer')} that were measured, those bound by "
            "FLOPs, the gain is over dense with unpruned weights; in the others, over dense on the "
            "same zeros."
        )
    return [
        *([estimated] if gpu else []),
        over,
        "Weights, activations and cache have 16 bits. Only the MLPs are sparse. Attention, norms, "
        "the cache, the embedding and the head stay dense.",
        "Brackets of a measured gain: the 95 % interval over processes, plus variation between "
        "runs. A look has fewer than 6 processes, and no brackets.",
        "An extrapolated gain was measured on a model with fewer of these layers, whose head "
        "takes the same share of the step. It is assumed to hold for all layers.",
        "“At most” is the ratio of bytes or of FLOPs, whichever is larger: no layer that was "
        "measured is similar enough for an estimate.",
        f"With more than {BITMAP_TOKENS} tokens, a layer with zeros anywhere multiplies a "
        "dense copy of its weights, and keeps both.",
    ]
