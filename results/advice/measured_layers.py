"""The measured layers, whole models and losses that an advice rests on (pruning.py).

    runs, models' JSON ──> evidence ──> results/published/advice.json ──> packaged()

`python -m sparsebench.reports.published` writes that file from the bundles. A wheel has the file,
but not the bundles. Each layer is the fastest case of its kind of sparsity in a contest:
kernel time with a cold cache. If several runs measured a problem, the one with the most processes
counts.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final, Literal

import pandas as pd

from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ANYWHERE,
    BLOCKS,
    SIX_EIGHT,
    SMALL_BLOCKS,
    TWO_FOUR,
    Estimator,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.files import read_model
from sparsebench.results.formatting import percent
from sparsebench.results.model_files import (
    DENSE,
    FORWARD,
    L1Training,
    L1Trainings,
    ModelTimings,
    PatternTrainings,
    Pruning,
)
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.run.provenance import device_name, on_gpu
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import with_gains
from sparsebench.results.tables.frame import records

SCHEMA: Final = "sparsebench/advice@1"
NOT_AT_BEST = {"calls", "spense-calls"}  # suites that leave out the fastest kernels on purpose
SIDES, LEVELS = {"64": BLOCKS, "32": SMALL_BLOCKS}, (0.5, 0.95)
PRUNED = {  # the kind of sparsity of each pattern that `prune` knows
    "2:4": TWO_FOUR,
    "6:8": SIX_EIGHT,
    "unstructured": ANYWHERE,
    "64x64": BLOCKS,
    "32x32": SMALL_BLOCKS,
}
KEPT = {"iid", "recorded"}  # distributions of active units over tokens
PLAIN = ("plain", "torch_compile", "cublas_ffn")  # dense MLPs in the timings of a whole model
LOST = (
    "Losses were measured on {model} with pruned MLPs, in nats per token over {tokens} held-out "
    "tokens, with the best method that was measured."
)
TRAINED = "training"


@dataclass(frozen=True)
class Step:
    """A whole model that was measured: a decoding step, or a forward pass of `m` tokens."""

    model: ModelShapes
    layer: Layer
    context: int
    gpu: str
    run: str
    processes: int
    gain: float
    low: float
    high: float


@dataclass(frozen=True)
class Loss:
    """The loss of a kind of sparsity in a `model`, with a sentence on how it was measured.

    `loss` is the rise in nats per token by pruning; None if the model was trained sparse.
    """

    way: str
    sparsity: float
    loss: float | None
    model: str
    text: str
    source: str


@dataclass(frozen=True)
class Cost:
    """The rise of a model's held-out loss in nats per `unit`, by a method of `prune` or TRAINED."""

    way: str
    sparsity: float
    model: str
    method: str
    rise: float
    unit: Literal["token", "byte"]
    held_out: int
    source: str


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured; its fields are those of advice.json."""

    gpus: Sequence[Gpu]
    measured: Sequence[Measured]
    steps: Sequence[Step]
    losses: Sequence[Loss] = ()
    costs: Sequence[Cost] = ()
    schema: Literal["sparsebench/advice@1"] = SCHEMA

    @cached_property
    def layers(self) -> Estimator:
        """Return the estimator that rests on the measured layers."""
        return Estimator({gpu.name: gpu for gpu in self.gpus}, self.measured)

    def __add__(self, other: "Evidence") -> "Evidence":
        """Return both together; the GPUs of `other` replace those of the same name."""
        gpus = [*{gpu.name: gpu for gpu in (*self.gpus, *other.gpus)}.values()]
        return Evidence(
            gpus,
            [*self.measured, *other.measured],
            [*self.steps, *other.steps],
            [*self.losses, *other.losses],
            [*self.costs, *other.costs],
        )


def packaged_evidence() -> Evidence:
    file = files("sparsebench.results") / "published" / "advice.json"
    return read_model(Path(str(file)), Evidence, SCHEMA)


def of_runs(runs: Iterable[tuple[Analysis, str]]) -> Evidence:
    """Return the layers and steps of runs on GPUs, each with its name."""
    best: dict[tuple[Any, ...], Measured | Step] = {}
    ceilings: dict[str, list[Mapping[str, Any]]] = {}
    for analysis, name in sorted(runs, key=_most_processes, reverse=True):
        facts = analysis.run.environment
        if not on_gpu(facts) or "sim" in facts or not facts.get("ceilings"):
            continue
        ceilings.setdefault(device_name(facts), []).append(facts)
        if analysis.run.state["suite"] not in NOT_AT_BEST:
            for key, measured in _of_run(analysis, name):
                best.setdefault((measured.gpu, *key), measured)
    gpus = [_gpu(name, environments) for name, environments in ceilings.items()]
    layers = [each for each in best.values() if isinstance(each, Measured)]
    return Evidence(gpus, layers, [each for each in best.values() if isinstance(each, Step)])


def of_pruning(pruning: Pruning, source: str) -> list[Loss]:
    """Return the losses of each pattern by its best method; none for a model of bytes."""
    best: dict[tuple[str, float], float] = {}
    costs = costs_of_pruning(pruning, source) if pruning.unit == "token" else []
    for cost in costs:
        key = cost.way, cost.sparsity
        best[key] = min(best.get(key, cost.rise), cost.rise)
    model = _model(pruning)
    text = LOST.format(model=model, tokens=pruning.held_out)
    return [Loss(*key, rise, model, text, source) for key, rise in best.items()]


def costs_of_pruning(pruning: Pruning, source: str) -> list[Cost]:
    """Return the rise of the loss by each method and pattern."""
    about = pruning.unit, pruning.held_out, source
    return [
        Cost(
            PRUNED[outcome.pattern],
            round(outcome.sparsity, 4),
            _model(pruning),
            outcome.method,
            round(outcome.loss - (pruning.loss or 0.0), 4),
            *about,
        )
        for outcome in pruning.outcomes
        if outcome.loss is not None and outcome.sparsity and outcome.pattern in PRUNED
    ]


def _model(pruning: Pruning) -> str:
    return pruning.weights.removesuffix(".gguf")


def of_trainings(trainings: PatternTrainings, source: str) -> list[Loss]:
    """Return the loss of the models with the most zeros beside dense ones of the same width.

    Trainings on samples, or without blocks of 64, say nothing about the kind BLOCKS.
    """
    sparse = [one for one in trainings.trained if one.pattern != DENSE and one.block == 64]
    if trainings.data != "text" or not sparse:
        return []
    most = max(one.sparsity for one in sparse)
    chosen = [one for one in sparse if one.sparsity == most]
    dense = [other.loss for one in chosen if (other := trainings.dense_match(one, "width"))]
    text = (
        f"Blocks were trained from scratch, with {percent(round(most, 2))} zeros and for "
        f"{trainings.settings['steps']} steps only: {fmean(one.loss for one in chosen):.2f} nats "
        f"per byte, {fmean(dense):.2f} if dense. Pruning to blocks without training costs far more."
    )
    return [Loss(BLOCKS, 0.9, None, "a small model", text, source)]


def of_l1(trainings: L1Trainings, active: float, source: str) -> Loss:
    """Return the loss of the training whose mean number of active units is nearest to `active`."""
    dense, near = _l1_pair(trainings, active)
    text = (
        "Sparse activations come from training with ReLU and an L1 term, not from pruning: a small "
        f"model reached {near.loss:.2f} nats per byte with {near.mean('active'):.0f} active units "
        f"a layer, and {dense.loss:.2f} without the term."
    )
    return Loss(ACTIVATIONS, 0.0, None, "a small model", text, source)


def cost_of_l1(trainings: L1Trainings, active: float, source: str) -> Cost:
    """Return the rise of the loss by training with an L1 term, as in `of_l1`.

    The name of the model is that of the folder to which results/published/pruning/README.md writes
    the model without a term.
    """
    dense, near = _l1_pair(trainings, active)
    sizes = trainings.settings["sizes"]
    model = f"python-stdlib-{sizes['layers']}x{sizes['width']}"
    rise = round(near.loss - dense.loss, 4)
    return Cost(ACTIVATIONS, 0.0, model, TRAINED, rise, "byte", trainings.held_out, source)


def _l1_pair(trainings: L1Trainings, active: float) -> tuple[L1Training, L1Training]:
    """Return the training without a term, and the one nearest to a number of active units."""
    dense = min(trainings.trained, key=lambda one: one.l1)
    return dense, min(trainings.trained, key=lambda one: abs(one.mean("active") - active))


def of_whole(timings: ModelTimings, run: str) -> list[Step]:
    """Return the gain of a forward pass with sparse activations over the fastest dense one."""
    forward = [way for way in timings.ways if way.what == FORWARD and way.times_us]
    dense = min((way for way in forward if way.mlp in PLAIN), key=lambda way: way.time_us)
    sparse = min((way for way in forward if way.mlp not in PLAIN), key=lambda way: way.time_us)
    sizes = timings.model
    heads = int(sizes["heads"])
    model = ModelShapes(
        run.rpartition("/")[2],
        int(sizes["width"]),
        int(sizes["hidden"]),
        int(sizes["layers"]),
        heads,
        heads,
        int(sizes["width"]) // heads,
        int(sizes["vocab"]),
        activation="relu",
    )
    layer = Layer(
        True, ACTIVATIONS, dense.tokens, model.intermediate, model.hidden, active=timings.active
    )
    ends = min(dense.times_us) / max(sparse.times_us), max(dense.times_us) / min(sparse.times_us)
    gain = dense.time_us / sparse.time_us
    return [Step(model, layer, int(sizes["context"]), timings.device, run, 1, gain, *ends)]


def _most_processes(item: tuple[Analysis, str]) -> tuple[int, str]:
    state = item[0].run.state
    return int(state["flags"]["replicates"]), str(state["started"])


def _gpu(name: str, environments: Sequence[Mapping[str, Any]]) -> Gpu:
    """Return the ceilings of a GPU: medians over its runs."""
    measured = [Ceilings.from_json(environment["ceilings"]) for environment in environments]
    rates: dict[str, list[float]] = {}
    for each in measured:
        for dtype, rate in each.matrix_tflops.items():
            rates.setdefault(dtype, []).append(rate)
    tflops = {dtype: median(values) for dtype, values in sorted(rates.items())}
    capability = str(environments[0]["gpu"]["compute_capability"])
    gb_per_s = median(each.bandwidth for each in measured)
    return Gpu(name, capability, gb_per_s, tflops, median(each.launch_us for each in measured))


def _of_run(analysis: Analysis, name: str) -> Iterable[tuple[tuple[str, str], Measured | Step]]:
    cases = analysis.cases
    usual = (cases.scope == "kernel") & (cases.cache == "cold") & cases.dtype.isin(DTYPES)
    timed = with_gains(cases[usual & cases.op.isin(["linear", "ffn", "decoder"])])
    if timed.empty:
        return
    timed = timed[(timed.side != "dense") & timed.gain.notna()].sort_values("gain", ascending=False)
    seen = set()
    for line in records(timed):
        way = _way({str(column): value for column, value in line.items()})
        if not way or (line["problem_id"], way) in seen:
            continue
        seen.add((line["problem_id"], way))
        low, high = (line[end] if pd.notna(line[end]) else line["gain"] for end in ("low", "high"))
        gains = [round(float(value), 4) for value in (line["gain"], low, high)]
        about = analysis.device, name, int(line["processes"])
        key = str(line["problem_id"]), way
        if line["op"] == "decoder":
            yield key, _step(line, way, about, gains)
        else:
            layer = _layer(line, way, line["op"] == "ffn", int(line["n"]), int(line["k"]))
            dense_us = round(float(line["gain"] * line["median_us"]), 3)
            yield key, Measured(layer, *about, str(line["kernel"]), dense_us, *gains)


DTYPES = ["bf16", "fp16", "fp8", "int8"]


def _way(line: Mapping[str, Any]) -> str:
    """Return the kind of sparsity of a case; "" for a kind that no advice is about."""
    kind, pattern, op = line["kind"], line["pattern"], line["op"]
    if kind == "spense":
        return TWO_FOUR
    if kind == "slide":
        return SIX_EIGHT if pattern == "six_eight" else ""
    if kind == "bsr" and pattern == "blocks" and LEVELS[0] <= line["level"] <= LEVELS[1]:
        return SIDES.get(str(line["block"]), "")
    if kind == "bitmap" and line["level"] >= LEVELS[0]:
        return ANYWHERE
    if kind in ("cvse", "twell") and pattern == "dense" and op == "ffn" and line["skew"] in KEPT:
        return ACTIVATIONS
    return ""


def _layer(line: Mapping[Any, Any], way: str, gated: bool, n: int, k: int) -> Layer:
    sparsity = 0.0 if way == ACTIVATIONS else round(float(line["level"]), 4)
    active = float(line["active"]) if way == ACTIVATIONS else 0.0
    return Layer(gated, way, int(line["m"]), n, k, str(line["dtype"]), sparsity, active)


def _step(
    line: Mapping[Any, Any], way: str, about: tuple[str, str, int], gains: list[float]
) -> Step:
    names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")
    model = ModelShapes(about[1].rpartition("/")[2], *(int(line[name]) for name in names))
    layer = _layer(line, way, True, model.intermediate, model.hidden)
    return Step(model, layer, int(line["context"]), *about, *gains)
