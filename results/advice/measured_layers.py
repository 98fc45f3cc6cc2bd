"""The measured layers, whole models and losses that an advice rests on (pruning.py).

    runs, models' JSON ──> evidence ──> results/published/advice.json ──> packaged()

`python -m sparsebench.reports.published` writes that file from the bundles. A wheel has the file,
but not the bundles. Each layer is the fastest case of its kind of sparsity in a contest:
kernel time with a cold cache. If several runs measured a problem, the one with the most processes
counts.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any, Final, Literal

import pandas as pd

from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ACTIVE,
    ANYWHERE,
    BLOCKS,
    FOUR_BITS,
    FP8,
    QUANTIZED,
    SIX_EIGHT,
    SMALL_BLOCKS,
    TWO_FOUR,
    TWO_FOUR_BITS,
    TWO_FOUR_FP8,
    Estimator,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.ceilings import Ceilings
from sparsebench.results.files import read_model
from sparsebench.results.model_files import SPARSITY_SCHEMA, L1Trainings, Pruning, read_pruning
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.run.provenance import device_name, on_gpu
from sparsebench.results.statistics.ratio import ratio_over
from sparsebench.results.tables.analysis import Analysis
from sparsebench.results.tables.contests import with_gains
from sparsebench.results.tables.frame import fields, records

SCHEMA: Final = "sparsebench/advice@2"
NOT_AT_BEST = {"calls", "spense-calls"}  # suites that leave out the fastest kernels on purpose
SIDES, LEVELS = {"64": BLOCKS, "32": SMALL_BLOCKS}, (0.5, 0.95)
PRUNED = {"unstructured": ANYWHERE, "64x64": BLOCKS, "32x32": SMALL_BLOCKS}
PRUNED |= {kind: kind for kind in (TWO_FOUR, SIX_EIGHT, *QUANTIZED)}  # of the pattern of a Pruning
UNPRUNED = {ACTIVATIONS, FP8, FOUR_BITS}
BITS_OF = {"int4": FOUR_BITS, "int4_two_four": TWO_FOUR_BITS}  # the kind of a format
KEPT = {"iid", "recorded"}  # distributions of active units over tokens
DTYPES = ["bf16", "fp16", "fp8", "int8"]
TRAINED = "training"
BITS = re.compile(r"[-.]q(\d+)_\w+$", re.IGNORECASE)  # the precision in the name of a .gguf file


@dataclass(frozen=True)
class ModelStep:
    """A decoding step of a whole model that was measured."""

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
    """The rise of a model's held-out loss in nats per `unit`, by a method of `prune` or TRAINED."""

    way: str
    sparsity: float
    model: str
    method: str
    rise: float
    unit: Literal["token", "byte"]
    held_out: int
    source: str

    def is_of(self, name: str) -> bool:
        """Return whether the loss was measured on the model of this name, in any precision."""
        return BITS.sub("", self.model).lower() == name.lower()

    @property
    def subject(self) -> str:
        """Name the model in plain words: `gemma-3-270m (from a 4-bit file)`."""
        return BITS.sub(r" (from a \1-bit file)", self.model)


@dataclass(frozen=True)
class Recovery:
    """What a training in which zeros stay zeros left of the rise of a loss by pruning.

    pruned     before it; dense: the loss before pruning
    rise       after it, in the same unit; low, high: its 95 % interval
    text       what it trained on, for some minutes on a device
    """

    pruned: Loss
    dense: float
    rise: float
    low: float
    high: float
    minutes: float
    text: str
    device: str


@dataclass(frozen=True)
class Evidence:
    """Everything that was measured; its fields are those of advice.json."""

    gpus: Sequence[Gpu]
    measured: Sequence[Measured]
    steps: Sequence[ModelStep]
    losses: Sequence[Loss] = ()
    recoveries: Sequence[Recovery] = ()
    schema: Literal["sparsebench/advice@2"] = SCHEMA

    @cached_property
    def layers(self) -> Estimator:
        """Return the estimator that rests on the measured layers."""
        return Estimator({gpu.name: gpu for gpu in self.gpus}, self.measured)

    def __add__(self, other: "Evidence") -> "Evidence":
        """Return both together; the GPUs of `other` replace those of the same name."""
        return Evidence(
            [*{gpu.name: gpu for gpu in (*self.gpus, *other.gpus)}.values()],
            [*self.measured, *other.measured],
            [*self.steps, *other.steps],
            [*self.losses, *other.losses],
            [*self.recoveries, *other.recoveries],
        )

    @property
    def text(self) -> str:
        """Return advice.json, with a line for each record."""
        return text_by_record(self)


def text_by_record(data: Any) -> str:
    """Return a dataclass of lists as JSON: its `schema`, and a line for each record of a list."""
    lists = asdict(data)
    parts = ['{"schema": ' + json.dumps(lists.pop("schema"))]
    for name, rows in lists.items():
        parts.append(f"{json.dumps(name)}: [\n" + ",\n".join(map(json.dumps, rows)) + "\n]")
    return ",\n".join(parts) + "}\n"


def packaged_evidence() -> Evidence:
    file = files("sparsebench.results") / "published" / "advice.json"
    return read_model(Path(str(file)), Evidence, SCHEMA)


def collect_evidence(runs: Iterable[tuple[Analysis, str]], root: Path) -> Evidence:
    """Return the evidence of published runs, and the losses in the files of their folder."""
    evidence = of_runs(runs)
    for file in sorted(root.glob("pruning/*.json")):
        evidence += of_pruning(read_pruning(file), file.relative_to(root).as_posix())
    for file in sorted(root.glob("sparsity/*.json")):
        trainings = read_model(file, L1Trainings, SPARSITY_SCHEMA)
        evidence += Evidence([], [], [], [of_l1(trainings, file.relative_to(root).as_posix())])
    return evidence


def of_runs(runs: Iterable[tuple[Analysis, str]]) -> Evidence:
    """Return the layers and steps of runs on GPUs, each with its name."""
    best: dict[tuple[str, ...], Measured | ModelStep] = {}
    ceilings: dict[str, list[Mapping[str, Any]]] = {}
    for analysis, name in sorted(runs, key=_most_processes, reverse=True):
        facts = analysis.run.environment
        if not on_gpu(facts) or not facts.get("ceilings"):
            continue
        ceilings.setdefault(device_name(facts), []).append(facts)
        if analysis.run.state["suite"] not in NOT_AT_BEST:
            for key, measured in _of_run(analysis, name):
                best.setdefault((measured.gpu, *key), measured)
    return Evidence(
        [_gpu(name, environments) for name, environments in ceilings.items()],
        [each for each in best.values() if isinstance(each, Measured)],
        [each for each in best.values() if isinstance(each, ModelStep)],
    )


def of_pruning(pruning: Pruning, source: str) -> Evidence:
    """Return the rise of the loss by each method and pattern, or what a training left of it."""
    model, about = pruning.weights.removesuffix(".gguf"), (pruning.unit, pruning.held_out, source)
    losses, recoveries, dense = list[Loss](), list[Recovery](), pruning.loss or 0.0
    for each in pruning.outcomes:
        way, sparsity = PRUNED.get(each.pattern), round(each.sparsity, 4)
        if each.loss is None or not way or not (sparsity or way in QUANTIZED):
            continue
        loss = Loss(way, sparsity, model, each.method, round(each.loss - dense, 4), *about)
        if training := each.recovery:
            rises = training.loss - dense, training.low, training.high
            value, low, high = (round(rise, 4) for rise in rises)
            minutes = round(training.seconds / 60, 2)
            where = training.text, training.device
            recoveries.append(Recovery(loss, round(dense, 4), value, low, high, minutes, *where))
        else:
            losses.append(loss)
    return Evidence([], [], [], losses, recoveries)


def of_l1(trainings: L1Trainings, source: str) -> Loss:
    """Return the rise of the loss by the training whose mean of active units is nearest to ACTIVE.

    The name of the model is that of the folder to which results/published/pruning/README.md writes
    the model without a term.
    """
    dense = min(trainings.trained, key=lambda one: one.l1)
    near = min(trainings.trained, key=lambda one: abs(one.mean("active") - ACTIVE))
    sizes = trainings.settings["sizes"]
    model = f"python-stdlib-{sizes['layers']}x{sizes['width']}"
    rise = round(near.loss - dense.loss, 4)
    return Loss(ACTIVATIONS, 0.0, model, TRAINED, rise, "byte", trainings.held_out, source)


def _most_processes(item: tuple[Analysis, str]) -> tuple[int, str]:
    state = item[0].run.state
    return int(state["flags"]["replicates"]), str(state["started"])


def _gpu(name: str, environments: Sequence[Mapping[str, Any]]) -> Gpu:
    """Return the ceilings of a GPU: medians over its runs."""
    measured = [Ceilings.from_json(environment["ceilings"]) for environment in environments]
    rates = pd.DataFrame([each.matrix_tflops for each in measured]).median().sort_index()
    return Gpu(
        name,
        str(environments[0]["gpu"]["compute_capability"]),
        median(each.bandwidth for each in measured),
        {str(dtype): float(rate) for dtype, rate in rates.items()},
        median(each.launch_us for each in measured),
    )


def _of_run(
    analysis: Analysis, name: str
) -> Iterator[tuple[tuple[str, str], Measured | ModelStep]]:
    """Yield the problem and the kind of each measured layer or step, and the measurement."""
    cases = analysis.cases
    usual = (cases.scope == "kernel") & (cases.cache == "cold") & cases.dtype.isin(DTYPES)
    timed = with_gains(cases[usual & cases.op.isin(["linear", "ffn", "decoder"])])
    if timed.empty:
        return
    sparse = timed[(timed.side != "dense") & timed.gain.notna()]
    lines = [*(line | {"way": _way(line)} for line in records(sparse)), *_in_fp8(timed)]
    best = {
        (str(line["problem_id"]), line["way"]): line
        for line in sorted(lines, key=lambda line: float(line["gain"]))
    }
    for key, line in best.items():
        if not (way := line["way"]):
            continue
        ends = [line[end] if pd.notna(line[end]) else line["gain"] for end in ("low", "high")]
        gains = [round(float(value), 4) for value in (line["gain"], *ends)]
        about = analysis.device, name, int(line["processes"])
        named = ("m", "intermediate", "hidden") if line["op"] == "decoder" else ("m", "n", "k")
        m, n, k = (int(line[size]) for size in named)
        sparsity = 0.0 if way in UNPRUNED else round(float(line["level"]), 4)
        active = float(line["active"]) if way == ACTIVATIONS else 0.0
        gated, dtype = line["op"] != "linear", str(line["dtype"])
        layer = Layer(gated, way, m, n, k, dtype, sparsity, active)
        if line["op"] == "decoder":
            names = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")
            shapes = ModelShapes(name.rpartition("/")[2], *(int(line[size]) for size in names))
            yield key, ModelStep(shapes, layer, int(line["context"]), *about, *gains)
        else:
            dense_us = round(float(line["gain"] * line["median_us"]), 3)
            kernel, over = str(line["kernel"]), str(line["over"])
            yield key, Measured(layer, *about, kernel, dense_us, *gains, over=over)


def _in_fp8(timed: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Yield the 2:4 and the fastest dense cases in fp8 whose problem was also timed in 16 bits.

    Gains are over the fastest dense case in 16 bits: process by process, in another contest.
    """
    dense = (timed.name == timed.dense_name) & (timed.weights == timed.over)
    names = [name for name in ("op", *fields(timed)) if name != "dtype"]
    problems = pd.Series(pd.factorize(pd.MultiIndex.from_frame(timed[names]))[0], timed.index)
    wide = dense & timed.dtype.isin(["bf16", "fp16"])
    bases = dict(zip(problems[wide], records(timed[wide]), strict=True))
    fp8 = (timed.dtype == "fp8") & problems.isin(bases) & (dense | (timed.kind == "spense"))
    for problem, line in zip(problems[fp8], records(timed[fp8]), strict=True):
        base, way = bases[problem], FP8 if line["side"] == "dense" else TWO_FOUR_FP8
        if ratio := ratio_over(line["blocks"], base["blocks"], line["between"]):
            over = {"way": way, "gain": ratio.value, "dtype": base["dtype"], "over": base["over"]}
            yield line | asdict(ratio) | over


def _way(line: Mapping[str, Any]) -> str:
    """Return the kind of sparsity of a case; "" for a kind that no advice is about."""
    kind, pattern, op = line["kind"], line["pattern"], line["op"]
    if kind in BITS_OF:
        return BITS_OF[kind]
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
