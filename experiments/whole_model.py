"""Time a whole decoder with few active hidden units, with each implementation of its MLPs.

    whole_model.py --energy 30 --out whole.json

The defaults are the model of 2 billion parameters of the TwELL paper, and as many active units.
Forward passes alternate between the kernels; training steps do not, because each fills the memory.

Each implementation is first compared with the plain model: a pass by the logits of CHECKED tokens,
a step by its loss and the gradients of the first layer. It has no times if its error exceeds
MAX_ERROR or if it loses values. A failure is a line of the file, and the others continue. The file
is written after each implementation.

Energy is the median over pieces of about PIECE_S, in TURNS, so that the board is equally warm for
all. A step's peak memory includes the weights.
"""

import gc
import json
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Annotated, Any

import torch
import typer
from sparse_decoder import COMPILED, PLAIN, SPARSE, Call, Forward, Model, Shape, Weights
from torch import Tensor

from sparsebench.errors import SparsebenchError, SuiteError, Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import one_line, synchronize
from sparsebench.harness.bench.energy import energy, require_meter
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.machine.device import identity, pick
from sparsebench.harness.models.reporting import require_writable
from sparsebench.kernels._kernel import DTYPES, Launch, Operands, unsupported
from sparsebench.results.model_files import FORWARD, STEP, WHOLE_SCHEMA, MlpTiming, ModelTimings
from sparsebench.results.record import Problem
from sparsebench.results.run.store import write_json

KERNELS = "cublas,torch_compile,ffn_sparse way=sparse,ffn_twell"
ROUNDS = 5  # after two calls that check the result and the memory
CHECKED, MAX_ERROR = 512, 0.05  # relative; bf16 has an error of 0.01 after 38 layers
PIECE_S, TURNS = 3.0, 2
STEPS = PLAIN, SPARSE, COMPILED
FAILURES = Unsupported, RuntimeError, OSError, ValueError  # of a kernel or its build


def launch(label: str, run: Forward) -> Launch:
    """Prepare a kernel such as `ffn_sparse way=sparse` of the op `ffn`. Raises Unsupported."""
    name, *options = label.split()
    op, kernel, z = load_op("ffn"), load_kernel(name), run.z
    dtype = next(name for name, dtype in DTYPES.items() if dtype == z.dtype)
    sizes = {"m": len(z), "n": run.shape.hidden, "k": run.shape.width}
    fields = {**op.defaults, **sizes, "dtype": dtype, "activation": "relu"}
    problem = Problem("ffn", fields, 0, defaults=op.defaults)
    if reason := unsupported(kernel, problem, z.device):
        raise Unsupported(reason)
    named = zip(("wg", "wu", "wd"), run.weights.mlp, strict=True)
    stored = {name: Dense.from_dense(weight) for name, weight in named}
    operands = Operands(problem, stored, {"x": z}, op.definition_at(problem))
    return kernel.prepare(operands, **dict(option.split("=", 1) for option in options))


def checked_pass(
    timing: MlpTiming, run: Forward, expected: Tensor, kernel: Launch | None
) -> MlpTiming:
    """Add the error, and the reason if the result is wrong; lost values count over all layers."""
    lost: list[int] = []

    def call() -> Any:
        y = kernel.run() if kernel else run.plain()
        lost.append(kernel.lost() if kernel and kernel.lost else 0)
        return y

    timing = judged(timing, [last(run(call))], [expected])
    if any(lost):
        detail = f"wrong: {sum(lost)} values lost in {sum(map(bool, lost))} layers"
        timing = replace(timing, detail=detail)
    return timing


def judged(timing: MlpTiming, actual: Sequence[Tensor], expected: Sequence[Tensor]) -> MlpTiming:
    """Add the largest relative error and, if it is too large, the reason."""
    pairs = zip(actual, expected, strict=True)
    errors = [float((value - right).norm() / right.norm()) for value, right in pairs]
    error = math.nan if any(map(math.isnan, errors)) else max(errors)
    wrong = "" if error <= MAX_ERROR else f"wrong: a relative error of {error:.2g}"
    return replace(timing, error=error if math.isfinite(error) else None, detail=wrong)


def last(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1)[-CHECKED:].float().clone()


class Measurement:
    """The timings of a model so far, and the file that is written after each."""

    def __init__(self, facts: dict[str, Any], units: Sequence[float], to: Path | None) -> None:
        self.facts, self.units, self.to = facts, units, to
        self.timings: dict[tuple[str, str], MlpTiming] = {}

    @property
    def report(self) -> ModelTimings:
        return ModelTimings(
            schema=WHOLE_SCHEMA,
            **self.facts,
            active=fmean(self.units),
            ways=[*self.timings.values()],
            active_by_layer=self.units,
        )

    def add(self, timing: MlpTiming) -> None:
        self.timings[timing.what, timing.mlp] = timing
        if self.to:
            write_json(self.to, asdict(self.report))
        print(timing, file=sys.stderr, flush=True)


def measure(
    shape: Shape,
    kernels: Sequence[str],
    device: torch.device,
    *,
    dtype: str = "bf16",
    steps: int = 8,
    window_s: float = 0.0,
    to: Path | None = None,
) -> ModelTimings:
    """Measure forward passes, and training steps of `steps` sequences (0 for none).

    window_s  seconds of replay to measure the energy of each implementation; 0 for none

    Raises NoMeter if energy cannot be measured.
    """
    if window_s:
        require_meter(identity(device))
    torch.manual_seed(0)
    weights = Weights.draw(shape, device, DTYPES[dtype])
    tokens = torch.randint(shape.vocab, (shape.sequences, shape.context + 1), device=device)
    run = Forward(shape, weights, tokens[:, :-1])
    run.calibrate()
    logits, units = run.count_units()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    measurement = Measurement({"device": name, "dtype": dtype, "model": asdict(shape)}, units, to)
    time_forward(run, last(logits), kernels, window_s, measurement)
    del logits, run
    expected: list[Tensor] = []
    for kind in STEPS if steps else ():
        part = tokens[:steps]
        timing, result = time_step(shape, weights, part, kind, expected, window_s)
        expected = expected or result
        measurement.add(timing)
    return measurement.report


def time_forward(
    run: Forward,
    expected: Tensor,
    kernels: Sequence[str],
    window_s: float,
    measurement: Measurement,
) -> None:
    """Time a pass with each kernel, and its energy; the plain model has none beside kernels."""
    device, ready = run.tokens.device, dict[str, Call]()
    common = allocated_bytes(device)
    timings: dict[str, MlpTiming] = {}
    for name in (PLAIN, *kernels):
        timing, others = MlpTiming(FORWARD, name, run.tokens.numel()), allocated_bytes(device)
        try:
            kernel = None if name == PLAIN else launch(name, run)
            timing = checked_pass(timing, run, expected, kernel)
        except FAILURES as error:
            timing = replace(timing, detail=reason(error))
        if not timing.detail:
            ready[name] = partial(run, kernel.run if kernel else run.plain)
            timing = replace(timing, peak_bytes=peak(ready[name], device) - (others - common))
        timings[name] = timing
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, call in ready.items():
            times[name].append(time_us(call, device))
    joules: dict[str, list[float]] = {name: [] for name in ready if name != PLAIN or not kernels}
    for name, timing in timings.items():
        measurement.add(replace(timing, times_us=times.get(name, ())))
    for name in [*joules] * TURNS if window_s else ():
        joules[name] += energies(ready[name], device, window_s / TURNS)
        timing = measurement.timings[FORWARD, name]
        measurement.add(replace(timing, energy_j=median(joules[name])))


def time_step(
    shape: Shape,
    weights: Weights,
    tokens: Tensor,
    kind: str,
    expected: Sequence[Tensor],
    window_s: float,
) -> tuple[MlpTiming, list[Tensor]]:
    """Time a training step; also return its loss and gradients. `expected` are the plain step's."""
    device, result = tokens.device, list[Tensor]()
    timing = MlpTiming(STEP, kind, tokens[:, 1:].numel())
    allocated_bytes(device)  # frees the previous model
    try:
        model = Model(shape, weights, kind, tokens.is_cuda)
        result = model.loss_and_gradients(tokens)
        timing = judged(timing, result, expected or result)
        if timing.detail:
            return timing, result
        step = partial(model.step, tokens)
        most = peak(step, device)
        times = [time_us(step, device) for _ in range(ROUNDS)]
        joule = median(energies(step, device, window_s)) if window_s else None
    except FAILURES as error:
        return replace(timing, detail=reason(error)), result
    return replace(timing, peak_bytes=most, times_us=times, energy_j=joule), result


def reason(error: Exception) -> str:
    """Return why an implementation has no times; lack of support or memory is no failure."""
    expected = isinstance(error, Unsupported | torch.OutOfMemoryError)
    return one_line(error) if expected else f"failed: {one_line(error)}"


def energies(run: Call, device: torch.device, window_s: float) -> list[float]:
    count = max(1, round(window_s / PIECE_S))
    return [energy(run, device, window_s / count).j_per_call for _ in range(count)]


def time_us(run: Call, device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return 1e6 * (time.perf_counter() - began)


def allocated_bytes(device: torch.device) -> int:
    """Collect garbage, and return the bytes allocated on a GPU; 0 on a CPU."""
    if device.type != "cuda":
        return 0
    gc.collect()
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def peak(run: Call, device: torch.device) -> int:
    """Return the peak memory of a call in bytes, including what is already allocated."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def main(
    mlp: Annotated[str, typer.Option(help="Kernels of the op ffn to compare.")] = KERNELS,
    layers: int = 38,
    width: int = 2048,
    hidden: int = 5632,
    heads: int = 32,
    vocab: int = 49152,
    sequences: int = 64,
    context: int = 2048,
    active: Annotated[float, typer.Option(help="Active units per token.")] = 24.0,
    training: Annotated[int, typer.Option(help="Sequences per training step; 0: none.")] = 8,
    energy: Annotated[float, typer.Option(help="Seconds to measure energy; 0: none.")] = 0.0,
    device: str | None = None,
    out: Path | None = None,
) -> None:
    """Time a whole decoder with few active hidden units, with each implementation of its MLPs."""
    require_writable(out)
    if width % (2 * heads):
        raise SuiteError(f"--heads: expected a divisor of half the width; found {heads}")
    kernels = mlp.split(",")
    for label in kernels:  # a misspelt name, before the model is made
        load_kernel(label.partition(" ")[0])
    shape = Shape(layers, width, hidden, heads, vocab, sequences, context, active)
    report = measure(shape, kernels, pick(device), steps=training, window_s=energy, to=out)
    print(json.dumps(asdict(report), indent=1))


if __name__ == "__main__":
    try:
        typer.run(main)
    except SparsebenchError as error:
        sys.exit(f"error: {error}")
