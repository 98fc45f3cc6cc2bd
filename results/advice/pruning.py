"""Is pruning or quantizing a model worth it on a GPU? One answer for the command and the pages.

    for each of KINDS    gain of the MLPs and of the model, weights in GB, quality, and how sure
    verdict              TRY         the fastest kind that costs at most MOST_LOSS nats per token
                                     makes the model at least WORTH times as fast
                         QUANTIZE    the same, and the kind is of dense weights in fewer bits
                         TRAIN       only a kind that costs more does, at most UNUSABLE
                         NO          none does
                         UNMEASURED  no run on this GPU, of a layer like those of the model, or of a
                                 model with experts, is published: upper limits only

A gain is a curve over the tokens at once (curves.py), through published runs of the same model and,
beyond them, estimates (step_model.py, layer_estimates.py). The verdict follows the curve, and not
its interval, so it changes only where the curve crosses WORTH. If a run measured only some of the
layers, the gain of the model is extrapolated from them, and says so.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import exp, isclose, log

from sparsebench._gpus import generation_of, names_device, require_gpu
from sparsebench.errors import ResultError
from sparsebench.results.advice.curves import Curve
from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ACTIVE,
    ANYWHERE,
    BLOCKS,
    FOUR_BITS,
    FP8,
    QUANTIZED,
    SIX_EIGHT,
    TWO_FOUR,
    TWO_FOUR_BITS,
    TWO_FOUR_FP8,
    Gpu,
    Layer,
)
from sparsebench.results.advice.measured_layers import (
    TRAINED,
    Evidence,
    Loss,
    ModelStep,
    Recovery,
)
from sparsebench.results.advice.step_model import BOUND, Gain, StepModel
from sparsebench.results.comparison.sides import short_name
from sparsebench.results.formatting import amount, join_words, number, times
from sparsebench.results.model_shapes import Mixture, ModelShapes
from sparsebench.results.statistics.ratio import FEWEST

CONTEXT = 1024
MOST_TOKENS = 2**20
WORTH, MOST_LOSS, UNUSABLE = 1.05, 0.1, 1.0
MOST_SHOWN = 100  # a rise of the perplexity beyond which its size says nothing
TRY, QUANTIZE, TRAIN, NO, UNMEASURED = "try", "quantize", "train", "no", "unmeasured"
BEGINS = {TRY: "Worth trying", QUANTIZE: "Quantize, do not prune", UNMEASURED: "Not measured"}
WITHOUT_FP8 = {"Volta", "Turing", "Ampere"}
HALF = "half of each MLP 2:4"
KINDS = {  # how a layer is sparse, and its sparsity
    "2:4": (TWO_FOUR, 0.5),
    HALF: (TWO_FOUR, 0.25),
    "6:8": (SIX_EIGHT, 0.25),
    "64 × 64 blocks, 50 % zeros": (BLOCKS, 0.5),
    "64 × 64 blocks, 80 % zeros": (BLOCKS, 0.8),
    "64 × 64 blocks, 90 % zeros": (BLOCKS, 0.9),
    "zeros anywhere, 50 %": (ANYWHERE, 0.5),
    "zeros anywhere, 70 %": (ANYWHERE, 0.7),
    f"sparse activations, {ACTIVE:g} units": (ACTIVATIONS, 0.0),
    "fp8": (FP8, 0.0),
    "half of each MLP 2:4, and fp8": (TWO_FOUR_FP8, 0.25),
    "2:4 and fp8": (TWO_FOUR_FP8, 0.5),
    "weights in 4 bits": (FOUR_BITS, 0.0),
    "2:4 and weights in 4 bits": (TWO_FOUR_BITS, 0.5),
}
LAYERED = {TWO_FOUR, BLOCKS, ANYWHERE}  # kinds that `prune` makes and that have a layer of ours
OF_EXPERTS = {TWO_FOUR, BLOCKS}  # kinds that have a layer for experts
LOADED = LAYERED | {FP8, FOUR_BITS}  # kinds that a model can be loaded with


@dataclass(frozen=True)
class Advice:
    """One of KINDS: gains of the MLPs and of the model, and its weights in GB.

    loss      what it costs, if that was measured, or what fewer zeros cost; of the best method, on
              the model itself or on the other model that lost most
    recovery  what training that model left of it, if that was measured
    runs      the published runs that say so
    """

    kind: str
    layers: Gain
    step: Gain
    gigabytes: float
    loss: Loss | None
    recovery: Recovery | None
    runs: Sequence[str]

    @property
    def nats(self) -> float | None:
        """Return the loss by pruning in nats per token; None if it was not measured."""
        return self.loss.rise if self.loss and self.loss.method != TRAINED else None

    @property
    def usable(self) -> bool:
        """Return whether the model works without training, as far as that was measured."""
        return self.loss is None or (self.nats is not None and self.nats <= UNUSABLE)

    @property
    def quality(self) -> str:
        """Return what it costs in words: `perplexity × 1.40, × 1.10 after 10 min of training`."""
        if self.loss is None or self.nats is None:
            return "trained, not pruned" if self.loss else "not measured"
        fewer = "more than " * (not isclose(self.loss.sparsity, KINDS[self.kind][1]))
        after = ""
        if training := self.recovery:
            minutes = number(training.minutes, 1.0)
            after = f", {_factor(training.rise)} after {minutes} min of training"
        if self.nats > log(MOST_SHOWN):
            return f"perplexity more than × {MOST_SHOWN}{after}"
        return f"perplexity {fewer}{_factor(self.nats)}{after}"


def _factor(nats: float) -> str:
    return f"× {number(exp(nats), exp(nats) / 100)}"


@dataclass(frozen=True)
class Answer:
    """The verdict with its word, and an Advice for each kind.

    gpu   its name; without published rows the requested name, and `dense_us` is None
    best  the kind that the verdict is about, if any
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


def advise(evidence: Evidence, model: ModelShapes, gpu: str, tokens: int) -> Answer:
    """Return the answer for `tokens` at once on a GPU, named by a part of its name.

    Raises ResultError if tokens are not from 1 to MOST_TOKENS, if the name is empty or that of no
    GPU, or if several GPUs match.
    """
    if not 1 <= tokens <= MOST_TOKENS:
        raise ResultError(f"--batch: expected 1 to {MOST_TOKENS} tokens at once, found {tokens}")
    names = [name for name in evidence.layers.gpus if names_device(gpu, name)]
    if len(names) > 1:
        expected = "expected part of one GPU's name"
        raise ResultError(f"--gpu: {expected}, found {gpu!r} in {join_words(names)}")
    if not names:
        require_gpu(gpu, map(short_name, evidence.layers.gpus))
    mixture = isinstance(model, Mixture)
    card = evidence.layers.gpus[names[0]] if names and not mixture else None
    unpublished = "of a model with experts is published"
    if not mixture:
        every = join_words(sorted(evidence.layers.gpus))
        unpublished = f"on {gpu} is published, only runs on {every}"
    step = StepModel(model, tokens, CONTEXT)
    kinds = [
        _advice(evidence, step, card, kind)
        for kind, (way, _) in KINDS.items()
        if way in OF_EXPERTS
        or (not mixture and (QUANTIZED.get(way) != FP8 or card or not _lacks_fp8(gpu)))
    ]
    verdict = _verdict(kinds, model, "" if card else unpublished, tokens)
    dense = model.weights * 2 / 1e9, step.dense_us(evidence.layers, card) if card else None
    return Answer(model, names[0] if names else gpu, tokens, *verdict, kinds, *dense)


def _lacks_fp8(gpu: str) -> bool:
    return generation_of(gpu) in WITHOUT_FP8


def gain_of(evidence: Evidence, layer: Layer, gpu: Gpu | None) -> Gain:
    """Return the gain of a layer on its curve, or its upper limit."""

    def estimated(tokens: int) -> Gain:
        at = replace(layer, m=tokens)
        if gpu and (other := evidence.layers.estimate(at, gpu)):
            return Gain.estimated(other.gain, other.low, other.high, other.rows)
        return Gain(at.bound, 0.0, at.bound, BOUND)

    if gpu is None:
        return estimated(layer.m)
    alike = gpu.name, layer.way
    rows = [row for row in evidence.measured if (row.gpu, row.layer.way) == alike]
    rows = [row for row in reversed(rows) if replace(row.layer, m=layer.m) == layer]
    return Curve({row.layer.m: Gain.measured(row) for row in rows}, estimated).at(layer.m)


def _advice(evidence: Evidence, step: StepModel, gpu: Gpu | None, kind: str) -> Advice:
    """Return what is known about a kind."""
    way, sparsity = KINDS[kind]
    layer, model = step.mlp(way, sparsity), step.model
    of_layers, of_step = gain_of(evidence, layer, gpu), _step_gain(evidence, step, layer, gpu)
    products = step.products(replace(layer, n=model.units))  # also of experts that no token hits
    changed = [each for each in products if each[1].way != ACTIVATIONS]
    saved = sum(count * each.weights * (1 - each.memory_share) for count, each in changed)
    loss, runs = _loss(evidence, model, way, sparsity), dict.fromkeys(of_step.runs + of_layers.runs)
    about = loss, _recovery(evidence, loss, sparsity), [*runs]
    return Advice(kind, of_layers, of_step, (model.weights - saved) * 2 / 1e9, *about)


def _step_gain(evidence: Evidence, step: StepModel, layer: Layer, gpu: Gpu | None) -> Gain:
    """Return the gain of a whole step on its curve, or its upper limit."""

    def estimated(tokens: int) -> Gain:
        other, at = replace(step, tokens=tokens), replace(layer, m=tokens)
        estimate = other.estimated(at, evidence.layers, gpu) if gpu else None
        return estimate or Gain(other.bound(at), 0.0, other.bound(at), BOUND)

    if gpu is None:
        return Gain(step.bound(layer), 0.0, step.bound(layer), BOUND)
    wholes, layers = _measured_steps(evidence, step, layer, gpu), step.model.layers
    parts = {at: f"{w.model.layers} of {layers} layers" for at, w in wholes.items()}
    measured = {
        at: Gain.measured(whole, parts[at] if whole.model.layers < layers else "")
        for at, whole in wholes.items()
    }
    return Curve(measured, estimated).at(layer.m)


def _measured_steps(
    evidence: Evidence, step_model: StepModel, layer: Layer, gpu: Gpu
) -> dict[int, ModelStep]:
    """Return by tokens the measured steps of such layers whose head has the same share of them.

    All are verdicts, or none is, and have the same depth: the largest. Then their curve is that of
    one model.
    """
    names, model = ("hidden", "intermediate", "heads", "kv_heads", "head_dim"), step_model.model
    steps = [
        step
        for step in evidence.steps
        if (step.gpu, step.context) == (gpu.name, step_model.context)
        and replace(step.layer, m=layer.m) == layer
        and all(getattr(step.model, name) == getattr(model, name) for name in names)
        and step.model.vocab * model.layers == model.vocab * step.model.layers
    ]
    groups: dict[tuple[bool, int], dict[int, ModelStep]] = {}
    for step in sorted(steps, key=lambda step: step.processes):
        group = step.processes >= FEWEST, step.model.layers
        groups.setdefault(group, {})[step.layer.m] = step
    return groups[max(groups)] if groups else {}


def _loss(evidence: Evidence, model: ModelShapes, way: str, sparsity: float) -> Loss | None:
    """Return the loss of a kind, or of the most zeros below it: see Advice.

    Losses on the largest held-out text of a model replace those on smaller ones.
    """
    losses = [
        each
        for each in (*evidence.losses, *(e.pruned for e in evidence.recoveries))
        if each.way == way
        and (each.sparsity < sparsity or isclose(each.sparsity, sparsity))
        and (each.unit == "token" or each.method == TRAINED)
    ]
    losses = [each for each in losses if each.is_of(model.name)] or losses
    most = max((each.sparsity for each in losses), default=0.0)
    by_model: dict[str, Loss] = {}
    losses.sort(key=lambda each: (each.held_out, -each.rise))  # the best is the last
    for each in losses:
        if each.sparsity == most:
            by_model[each.model] = each
    return max(by_model.values(), key=lambda each: each.rise, default=None)


def _recovery(evidence: Evidence, loss: Loss | None, sparsity: float) -> Recovery | None:
    """Return the best of the longest trainings, one of each method, after such pruning."""
    trained = [
        each
        for each in evidence.recoveries
        if loss
        and (each.pruned.model, each.pruned.way) == (loss.model, loss.way)
        and isclose(each.pruned.sparsity, sparsity)
    ]
    trained.sort(key=lambda each: each.minutes)
    longest = {each.pruned.method: each for each in trained}
    return min(longest.values(), key=lambda each: each.rise, default=None)


def _verdict(
    kinds: Sequence[Advice], model: ModelShapes, unpublished: str, tokens: int
) -> tuple[str, str, Advice | None]:
    """Return the word, the sentence of the answer, and the kind that it is about.

    unpublished  which run is not published, if none is; else ""
    """

    def fastest(some: Sequence[Advice]) -> Advice | None:
        return max(some, key=lambda each: each.step.value, default=None)

    at = f"for {amount(tokens, 'token')} at once"
    usable = [each for each in kinds if each.usable and KINDS[each.kind][0] in LOADED]
    quiet = [each for each in usable if each.nats is not None and each.nats <= MOST_LOSS]
    limit = fastest(quiet or usable)
    most = ""
    if limit:
        most = f" {model.name} is at most {times(limit.step.value)} as fast with {limit.kind} {at}."
    if unpublished:
        return UNMEASURED, f"{BEGINS[UNMEASURED]}: no run {unpublished}.{most}", limit
    estimated = [each for each in usable if each.step.basis != BOUND]
    cheap = fastest(
        [each for each in estimated if each.nats is not None and each.nats <= MOST_LOSS]
    )
    if cheap and cheap.step.value >= WORTH:
        word = TRY if KINDS[cheap.kind][0] in LAYERED else QUANTIZE
        return (
            word,
            f"{BEGINS[word]}: {_faster(cheap, model, at)}{_cost(cheap, model, TRY)}.",
            cheap,
        )
    best = fastest([each for each in estimated if KINDS[each.kind][0] in LAYERED])
    if best and best.step.value >= WORTH:
        text = f"{_faster(best, model, at)}{_cost(best, model, TRAIN)}"
        return TRAIN, f"Do not prune without training: {text}.", best
    if not (cheap or best) and limit and limit.step.value >= WORTH:
        why = f"no measured layer of a kind that keeps quality is like those of {model.name}"
        return UNMEASURED, f"{BEGINS[UNMEASURED]}: {why}.{most}", limit
    most = f"; the fastest, {best.kind}, makes it {best.step.text} as fast" if best else ""
    why = f"no kind that keeps its quality is known to make {model.name} {WORTH:g} times as fast"
    return NO, f"Do not prune: {why} {at}{most}.", None


def _faster(best: Advice, model: ModelShapes, at: str) -> str:
    limits = [best.step.caveat] * bool(best.step.caveat)
    limits += ["its interval includes no gain"] * (best.step.low < 1)
    aside = f" ({'; '.join(limits)})" if limits else ""
    return f"{model.name} is {best.step.text} as fast with {best.kind}, {at}{aside}"


def _cost(best: Advice, model: ModelShapes, word: str) -> str:
    """Write the quality of the model, or that of the model whose quality was measured."""
    if best.loss is None or best.nats is None:
        return ", but its loss by pruning was not measured"
    start = ", and" if word == TRY else ", but"
    if not best.loss.is_of(model.name):
        start = "; its quality was not measured, and"
    return f"{start} on {best.loss.subject} {best.quality.replace('perplexity', 'perplexity rose')}"
