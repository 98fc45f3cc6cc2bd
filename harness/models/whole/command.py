"""What `sparsebench whole` does: the same model around each kernel of its MLP, in one process.

    units     gains are calibrated in one pass, units that are on counted in the next, in all layers
    forward   all kernels side by side, in turn, ROUNDS times; then their energy, in turn, too
    step      one way after the other: the weights, gradients and state of one fill the memory

The file is written after the forward passes, after their energy, and after each step.

Every way is held against the plain model before it is timed: logits of a forward pass, on CHECKED
tokens; of a step the loss, and gradients of the first layer. What differs by more than FURTHEST is
wrong and has no times, and so is a kernel that lost values in any layer. One that fails has a line
of why, and the others go on.

The energy of a way is the median of pieces of about PIECE_S, of so many seconds of replay in all,
half of them after every other way had its first half: the board is then as warm for the first. Of
forward passes the kernels that are named have one, and the plain model where none is.
"""

import gc
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
from sparsebench.harness.bench.contest_state import bound, one_line, synchronize
from sparsebench.harness.bench.energy import pieces, require_meter_on
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.models.whole.model import (
    Pass,
    Shape,
    Weights,
    calibrate,
    counted,
    drawn,
    forward,
    mlp,
)
from sparsebench.harness.models.whole.step import MLPS, Mlp, step
from sparsebench.kernels._kernel import DTYPES, Launch, Operands, unsupported
from sparsebench.results.formatting import amount
from sparsebench.results.model_files import FORWARD, STEP, WHOLE_SCHEMA, MlpTiming, ModelTimings
from sparsebench.results.record import Problem
from sparsebench.results.store import write_json

PLAIN = "plain"
ROUNDS = 5  # after the two calls that are checked, and looked at for memory
CHECKED = 512  # tokens, the last of them
FURTHEST = 0.05  # relative; bf16 leaves 0.01 after 38 layers
PIECE_S, TURNS = 3.0, 2  # of energy: a piece, and how often each way has its turn
FAILS = Unsupported, RuntimeError, OSError, ValueError  # of a kernel, of the build of one


def measure(
    shape: Shape,
    kernels: Sequence[str],
    device: torch.device,
    *,
    dtype: str = "bf16",
    steps: int = 8,
    window_s: float = 0.0,
    to: Path | None = None,
    show: Callable[[int, int, str], None] = lambda done, total, what: None,
) -> ModelTimings:
    """Measure forward passes, and training steps of `steps` sequences (0: none).

    window_s  of replay, for the energy of each way; 0: none

    Raises SuiteError where a file cannot be written, or energy cannot be measured (NoMeter).
    """
    if to and not to.parent.is_dir():
        raise SuiteError(f"{to}: expected a folder to write into; found no {to.parent}")
    if window_s:
        require_meter_on(device)
    torch.manual_seed(0)
    compiled = device.type == "cuda"
    weights = drawn(shape, device, DTYPES[dtype])
    tokens = torch.randint(shape.vocab, (shape.sequences, shape.context + 1), device=device)
    total = 1 + len(kernels) + (len(MLPS) if steps else 0)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type

    def found(ways: Sequence[MlpTiming], units: Sequence[float]) -> ModelTimings:
        made = ModelTimings(WHOLE_SCHEMA, name, dtype, asdict(shape), fmean(units), ways, units)
        if to:
            write_json(to, asdict(made))
        return made

    ways, units = _forwards(
        *(shape, weights, tokens[:, :-1], kernels, compiled, window_s),
        lambda i, w: show(i, total, w),
        found,
    )
    right: list[Tensor] = []
    for number, kind in enumerate(MLPS if steps else ()):
        show(1 + len(kernels) + number, total, f"step, {kind}")
        own = replace(shape, sequences=steps)
        way, shown = _stepped(own, weights, tokens[:steps], kind, compiled, right, window_s)
        right = right or shown
        ways.append(way)
        found(ways, units)
    return found(ways, units)


def _forwards(
    shape: Shape,
    weights: Weights,
    tokens: Tensor,
    kernels: Sequence[str],
    compiled: bool,
    window_s: float,
    show: Callable[[int, str], None],
    write: Callable[[Sequence[MlpTiming], Sequence[float]], object],
) -> tuple[list[MlpTiming], list[float]]:
    """Return each way, and the units that are on in each layer; `write` keeps what is there."""
    device = tokens.device
    z = weights.wg.new_empty(tokens.numel(), shape.width)
    run = forward(shape, weights, tokens, z, compiled)
    show(0, "units on")
    calibrate(run, shape, weights, z)
    found, units = counted(run, weights, z)
    logits, common = _last(found), _allocated(device)
    del found
    ready: dict[str, Callable[[], Tensor]] = {}
    ways: dict[str, MlpTiming] = {}
    for number, name in enumerate([PLAIN, *kernels]):
        show(number, f"forward, {name}")
        way, before = MlpTiming(FORWARD, name, tokens.numel()), _allocated(device)
        try:
            launch = None if name == PLAIN else _launch(name, shape, weights, z)
            plain = partial(mlp, z, weights.wg, weights.wu, weights.wd)
            ways[name] = way = _checked(way, run, logits, launch, plain)
        except FAILS as error:
            ways[name] = way = replace(way, detail=_failed(error))
        if not way.detail:
            ready[name] = partial(run, partial(_called, launch) if launch else plain)
            others = before - common  # what the ways before hold
            ways[name] = replace(way, peak_bytes=_peak(ready[name], device) - others)
    times: dict[str, list[float]] = {name: [] for name in ready}
    for _ in range(ROUNDS):
        for name, own in ready.items():
            times[name].append(_timed(own, device))
    ways |= {name: replace(ways[name], times_us=times[name]) for name in ready}
    write([*ways.values()], units)
    joules: dict[str, list[float]] = {name: [] for name in ready if name != PLAIN or not kernels}
    for turn in range(TURNS if window_s else 0):
        for name in joules:
            show(len(kernels), f"energy, {name}, {turn + 1} of {TURNS}")
            joules[name] += _joules(ready[name], device, window_s / TURNS)
    ways |= {name: replace(ways[name], energy_j=median(own)) for name, own in joules.items() if own}
    write([*ways.values()], units)
    return [*ways.values()], units


def _joules(run: Callable[[], Tensor], device: torch.device, window_s: float) -> list[float]:
    """Return the energy of a call, by each of the pieces of a window."""
    count = max(1, round(window_s / PIECE_S))
    return [piece.j_per_call for piece in pieces(run, device, window_s, count)]


def _failed(error: Exception) -> str:
    """Say why a way has no times: what is not here is no failure."""
    told = isinstance(error, Unsupported | torch.OutOfMemoryError)
    return one_line(error) if told else f"failed: {one_line(error)}"


def _launch(label: str, shape: Shape, weights: Weights, z: Tensor) -> Launch:
    """Prepare a kernel of the op `ffn` for Z: `ffn_sparse way=sparse`. Raises Unsupported."""
    name, *options = label.split()
    op, kernel = load_op("ffn"), load_kernel(name)
    dtype = next(each for each, own in DTYPES.items() if own == z.dtype)
    sizes = {"m": len(z), "n": shape.hidden, "k": shape.width}
    fields = {**op.defaults, **sizes, "dtype": dtype, "activation": "relu"}
    problem = Problem("ffn", fields, 0, defaults=op.defaults)
    if reason := unsupported(kernel, problem, z.device):
        raise Unsupported(reason)
    stored = {name: Dense.from_dense(getattr(weights, name)) for name in ("wg", "wu", "wd")}
    given = Operands(problem, stored, {"x": z}, bound(op.definition, problem))
    return kernel.prepare(given, **dict(option.split("=", 1) for option in options))


def _called(launch: Launch) -> Tensor:
    out = launch.run()
    assert isinstance(out, Tensor)
    return out


def _checked(
    way: MlpTiming,
    run: Pass,
    right: Tensor,
    launch: Launch | None,
    plain: Callable[[], Tensor],
) -> MlpTiming:
    """Return a way with its error, and why it is wrong; values lost are those of all layers."""
    lost: list[int] = []

    def call() -> Tensor:
        if not launch:
            return plain()
        y = _called(launch)
        lost.append(launch.lost() if launch.lost else 0)
        return y

    found = _last(run(call))
    error = float((found - right).norm() / right.norm())
    layers = amount(sum(map(bool, lost)), "layer")
    wrong = [f"{amount(sum(lost), 'value')} lost in {layers}"] if any(lost) else []
    if not error <= FURTHEST:
        wrong += [f"logits are {error:.2g} from the right ones"]
    known = error if math.isfinite(error) else None
    return replace(way, error=known, detail=f"wrong: {'; '.join(wrong)}" if wrong else "")


def _last(logits: Tensor) -> Tensor:
    return logits.flatten(0, 1)[-CHECKED:].float().clone()


def _stepped(
    shape: Shape,
    weights: Weights,
    tokens: Tensor,
    kind: Mlp,
    compiled: bool,
    right: Sequence[Tensor],
    window_s: float,
) -> tuple[MlpTiming, list[Tensor]]:
    """Measure a training step; return what its first call showed, too. `right` is the plain one."""
    device, way = tokens.device, MlpTiming(STEP, kind, tokens[:, 1:].numel())
    _allocated(device)
    shown: list[Tensor] = []
    try:
        own = step(shape, weights, tokens, kind, compiled)
        shown = own.shown()
        pairs = zip(shown, right or shown, strict=True)
        error = max(float((found - known).norm() / known.norm()) for found, known in pairs)
        if not error <= FURTHEST:
            said = f"wrong: loss or gradients are {error:.2g} from the right ones"
            known = error if math.isfinite(error) else None
            return replace(way, error=known, detail=said), shown
        peak = _peak(own.run, device)
        times = [_timed(own.run, device) for _ in range(ROUNDS)]
        joule = median(_joules(own.run, device, window_s)) if window_s else None
        return replace(way, error=error, peak_bytes=peak, times_us=times, energy_j=joule), shown
    except FAILS as failed:
        return replace(way, detail=_failed(failed)), shown


def _timed(run: Callable[[], Tensor], device: torch.device) -> float:
    synchronize(device)
    began = time.perf_counter()
    run()
    synchronize(device)
    return 1e6 * (time.perf_counter() - began)


def _peak(run: Callable[[], Tensor], device: torch.device) -> int:
    """Return the most bytes on the device in a call, what is there already included."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    run()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _allocated(device: torch.device) -> int:
    """Return the bytes that are held on a GPU, garbage freed."""
    gc.collect()
    if device.type != "cuda":
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(device)


def table(found: ModelTimings) -> Table:
    """Return a line a way; gains are over the fastest dense one of the same kind."""
    shown = Table(box=None, title_justify="left", title_style="bold")
    model = found.model
    sizes = f"{model['layers']} layers of {model['width']} and {model['hidden']}, {found.dtype}"
    shown.title = f"{sizes}, {found.active_units}, {found.device}"
    for name in ("what", "MLP"):
        shown.add_column(name)
    for name in ("tokens", "ms", "tokens a s", "of plain", "GiB", "mJ a token", "error"):
        shown.add_column(name, justify="right")
    shown.add_column("")
    plain = {way.what: way for way in found.ways if way.mlp == PLAIN and way.times_us}
    for way in found.ways:
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
        shown.add_row(way.what, way.mlp, str(way.tokens), *numbers, way.detail)
    return shown
