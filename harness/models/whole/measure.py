"""Time one model with each implementation of its MLPs, in one process (`sparsebench whole`).

    units     one pass calibrates the gains; the next counts active units in all layers
    forward   all kernels alternate for ROUNDS; then energy, alternating too
    step      one implementation after the other, because each fills the memory

The file is written after the forward passes, after their energy, and after each step.

Before timing, every implementation is compared with the plain model: a forward pass by the logits
of CHECKED tokens, a step by its loss and the gradients of the first layer. If the relative error
exceeds MAX_ERROR, or if a kernel loses values in any layer, the result is wrong and has no times. A
failure is reported in one line, and the others continue.

Energy is the median over pieces of about PIECE_S. It is measured in TURNS, and all implementations
have their first turn before any has its second, so that the board is equally warm for all. The
forward pass of the plain model has its energy measured only if no kernel is named.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from statistics import fmean, median

import torch
from rich.table import Table
from torch import Tensor

from sparsebench.errors import SuiteError, Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import one_line, synchronize
from sparsebench.harness.bench.energy import pieces, require_meter
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.machine.device import identity
from sparsebench.harness.models.reporting import (
    allocated_bytes,
    device_name,
    require_writable,
    sheet,
)
from sparsebench.harness.models.train_lm.training import Show
from sparsebench.harness.models.whole.model import (
    Pass,
    Shape,
    Weights,
    calibrate,
    count_units,
    draw_weights,
    forward,
    mlp,
)
from sparsebench.harness.models.whole.step import MLPS, Step, step
from sparsebench.kernels._kernel import DTYPES, Launch, Operands, unsupported
from sparsebench.results.formatting import amount
from sparsebench.results.model_files import FORWARD, STEP, WHOLE_SCHEMA, MlpTiming, ModelTimings
from sparsebench.results.record import Problem
from sparsebench.results.run.store import write_json

PLAIN = "plain"
ROUNDS = 5  # after two calls that check the result and the memory
CHECKED = 512  # number of last tokens whose logits are compared
MAX_ERROR = 0.05  # relative; bf16 has an error of 0.01 after 38 layers
PIECE_S, TURNS = 3.0, 2
FAILURES = Unsupported, RuntimeError, OSError, ValueError  # errors of a kernel or its build


def measure(
    shape: Shape,
    kernels: Sequence[str],
    device: torch.device,
    *,
    dtype: str = "bf16",
    steps: int = 8,
    window_s: float = 0.0,
    to: Path | None = None,
    show: Show = lambda done, total, what: None,
) -> ModelTimings:
    """Measure forward passes, and training steps of `steps` sequences (0 for none).

    window_s  seconds of replay to measure the energy of each implementation; 0 for none

    Raises SuiteError if the heads do not divide the width or the file cannot be written, or NoMeter
    if energy cannot be measured.
    """
    require_writable(to)
    if shape.width % shape.heads:
        divisor = f"a divisor of the width, {shape.width}"
        raise SuiteError(f"--heads: expected {divisor}; found {shape.heads}")
    if window_s:
        require_meter(identity(device))
    torch.manual_seed(0)
    compiled = device.type == "cuda"
    weights = draw_weights(shape, device, DTYPES[dtype])
    tokens = torch.randint(shape.vocab, (shape.sequences, shape.context + 1), device=device)
    total = 1 + len(kernels) + (len(MLPS) if steps else 0)

    def save(timings: Sequence[MlpTiming], units: Sequence[float]) -> ModelTimings:
        model = device_name(device), dtype, asdict(shape), fmean(units)
        report = ModelTimings(WHOLE_SCHEMA, *model, timings, units)
        if to:
            write_json(to, asdict(report))
        return report

    timings, units = _time_forward(
        shape,
        weights,
        tokens[:, :-1],
        kernels,
        compiled=compiled,
        window_s=window_s,
        show=lambda number, what: show(number, total, what),
        save=save,
    )
    expected: list[Tensor] = []
    for number, kind in enumerate(MLPS if steps else ()):
        show(1 + len(kernels) + number, total, f"step, {kind}")
        part = replace(shape, sequences=steps)
        make = partial(step, part, weights, tokens[:steps], kind, compiled)
        timing = MlpTiming(STEP, kind, tokens[:steps, 1:].numel())
        timing, result = _time_step(timing, make, expected, device, window_s)
        expected = expected or result
        timings.append(timing)
        save(timings, units)
    return save(timings, units)


def _time_forward(
    shape: Shape,
    weights: Weights,
    tokens: Tensor,
    kernels: Sequence[str],
    *,
    compiled: bool,
    window_s: float,
    show: Callable[[int, str], None],
    save: Callable[[Sequence[MlpTiming], Sequence[float]], object],
) -> tuple[list[MlpTiming], list[float]]:
    """Return the timing of each implementation, and the active units in each layer."""
    device = tokens.device
    z = weights.wg.new_empty(tokens.numel(), shape.width)
    run = forward(shape, weights, tokens, z, compiled)
    show(0, "active units")
    calibrate(run, shape, weights, z)
    logits, units = count_units(run, weights, z)
    expected, common = _last(logits), allocated_bytes(device)
    del logits
    ready: dict[str, Callable[[], Tensor]] = {}
    timings: dict[str, MlpTiming] = {}
    for number, name in enumerate([PLAIN, *kernels]):
        show(number, f"forward, {name}")
        timing, before = MlpTiming(FORWARD, name, tokens.numel()), allocated_bytes(device)
        try:
            launch = None if name == PLAIN else _launch(name, shape, weights, z)
            plain = partial(mlp, z, *weights.mlp)
            timing = _check(timing, run, expected, launch, plain)
        except FAILURES as error:
            timing = replace(timing, detail=_reason(error))
        if not timing.detail:
            ready[name] = partial(run, partial(_call, launch) if launch else plain)
            others = before - common  # memory of the implementations before this one
            timing = replace(timing, peak_bytes=_peak(ready[name], device) - others)
        timings[name] = timing
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, call in ready.items():
            times[name].append(_time(call, device))
    timings |= {name: replace(timings[name], times_us=times[name]) for name in ready}
    save([*timings.values()], units)
    joules: dict[str, list[float]] = {name: [] for name in ready if name != PLAIN or not kernels}
    for turn in range(TURNS if window_s else 0):
        for name, energies in joules.items():
            show(len(kernels), f"energy, {name}, {turn + 1} of {TURNS}")
            energies += _joules(ready[name], device, window_s / TURNS)
    for name, energies in joules.items():
        if energies:
            timings[name] = replace(timings[name], energy_j=median(energies))
    save([*timings.values()], units)
    return [*timings.values()], units


def _joules(run: Callable[[], Tensor], device: torch.device, window_s: float) -> list[float]:
    count = max(1, round(window_s / PIECE_S))
    return [piece.j_per_call for piece in pieces(run, device, window_s, count)]


def _reason(error: Exception) -> str:
    """Return why an implementation has no times; lack of support or memory is no failure."""
    expected = isinstance(error, Unsupported | torch.OutOfMemoryError)
    return one_line(error) if expected else f"failed: {one_line(error)}"


def _launch(label: str, shape: Shape, weights: Weights, z: Tensor) -> Launch:
    """Prepare a kernel such as `ffn_sparse way=sparse` of the op `ffn`. Raises Unsupported."""
    name, *options = label.split()
    op, kernel = load_op("ffn"), load_kernel(name)
    dtype = next(name for name, dtype in DTYPES.items() if dtype == z.dtype)
    sizes = {"m": len(z), "n": shape.hidden, "k": shape.width}
    fields = {**op.defaults, **sizes, "dtype": dtype, "activation": "relu"}
    problem = Problem("ffn", fields, 0, defaults=op.defaults)
    if reason := unsupported(kernel, problem, z.device):
        raise Unsupported(reason)
    stored = {name: Dense.from_dense(getattr(weights, name)) for name in ("wg", "wu", "wd")}
    operands = Operands(problem, stored, {"x": z}, op.definition_at(problem))
    return kernel.prepare(operands, **dict(option.split("=", 1) for option in options))


def _call(launch: Launch) -> Tensor:
    out = launch.run()
    assert isinstance(out, Tensor)
    return out


def _check(
    timing: MlpTiming,
    run: Pass,
    expected: Tensor,
    launch: Launch | None,
    plain: Callable[[], Tensor],
) -> MlpTiming:
    """Add the error, and the reason if the result is wrong; lost values count over all layers."""
    lost: list[int] = []

    def call() -> Tensor:
        if not launch:
            return plain()
        y = _call(launch)
        lost.append(launch.lost() if launch.lost else 0)
        return y

    error = float((_last(run(call)) - expected).norm() / expected.norm())
    layers = amount(sum(map(bool, lost)), "layer")
    wrong = [f"{amount(sum(lost), 'value')} lost in {layers}"] if any(lost) else []
    if not error <= MAX_ERROR:
        wrong += [f"logits have a relative error of {error:.2g}"]
    finite = error if math.isfinite(error) else None
    return replace(timing, error=finite, detail=f"wrong: {'; '.join(wrong)}" if wrong else "")


def _last(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1)[-CHECKED:].float().clone()


def _time_step(
    timing: MlpTiming,
    make: Callable[[], Step],
    expected: Sequence[Tensor],
    device: torch.device,
    window_s: float,
) -> tuple[MlpTiming, list[Tensor]]:
    """Time a training step; also return its loss and gradients. `expected` are the plain step's."""
    allocated_bytes(device)  # frees the previous model
    result: list[Tensor] = []
    try:
        training = make()
        result = training.loss_and_gradients()
        pairs = zip(result, expected or result, strict=True)
        error = max(float((actual - right).norm() / right.norm()) for actual, right in pairs)
        if not error <= MAX_ERROR:
            detail = f"wrong: the loss or a gradient has a relative error of {error:.2g}"
            finite = error if math.isfinite(error) else None
            return replace(timing, error=finite, detail=detail), result
        peak = _peak(training.run, device)
        times = [_time(training.run, device) for _ in range(ROUNDS)]
        joule = median(_joules(training.run, device, window_s)) if window_s else None
    except FAILURES as failure:
        return replace(timing, detail=_reason(failure)), result
    return replace(timing, error=error, peak_bytes=peak, times_us=times, energy_j=joule), result


def _time(run: Callable[[], Tensor], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return 1e6 * (time.perf_counter() - began)


def _peak(run: Callable[[], Tensor], device: torch.device) -> int:
    """Return the peak memory of a call in bytes, including what is already allocated."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def table(report: ModelTimings) -> Table:
    """Return a row per implementation; speedups are over the plain MLP."""
    model = report.model
    sizes = f"{model['layers']} layers of {model['width']} and {model['hidden']}, {report.dtype}"
    names = "tokens", "ms", "tokens/s", "speedup", "GiB", "mJ per token", "error"
    title = f"{sizes}, {report.active_units}, {report.device}"
    rows = sheet(title, ("what", "MLP"), names, ("",))
    plain = {way.what: way for way in report.ways if way.mlp == PLAIN and way.times_us}
    for way in report.ways:
        numbers = [""] * 6
        if way.times_us:
            base = plain.get(way.what)
            joule = 1e3 * way.energy_j / way.tokens if way.energy_j else None
            numbers = [
                *(f"{way.time_us / 1e3:.1f}", f"{1e6 * way.tokens / way.time_us:.0f}"),
                f"{base.time_us / way.time_us:.3f}" if base else "",
                f"{way.peak_bytes / 2**30:.1f}",
                f"{joule:.2f}" if joule else "",
                f"{way.error:.2g}",
            ]
        rows.add_row(way.what, way.mlp, str(way.tokens), *numbers, way.detail)
    return rows
