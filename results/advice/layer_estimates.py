"""How long a layer takes on a GPU, from the nearest measured layers; an estimate with an interval.

    time       = overhead + work / efficiency
    overhead   = launch time of the GPU + START_US for each product of the layer
    work       = bytes / bandwidth + FLOPs / rate, against the measured ceilings of the GPU
    efficiency = weighted mean of the logarithms over the NEAREST measured layers of the same kind,
                 in log2 of tokens, weights and density, with a step for another dtype or GPU;
                 one for each shape and number of tokens, because the others share its error
    gain       = dense time / sparse time

The measured layers are a table with a row each. The sum of both parts of the work describes the
published rows better than their maximum: with it the efficiency of BSR at 4096 tokens varies by 1.3
from 50 to 95 % zeros, instead of by 1.8. Bytes are the stored weights, the input, the output and
the hidden activations, each once. With sparse activations every token fetches the rows of its own
units from L2, at UNIT_COST per FLOP: without that, the gain with 113 units was predicted to be
twice the measured one, because the dense gate hides the number of units in the density.

The interval comes from leaving shapes out. Every measured layer is predicted from layers of other
shapes alone. The interval holds CONFIDENCE (90 %) of the errors of its kind, widened by
(S + 1) / (S - 1) for S shapes, because a few shapes say little about the next one. `coverage`
repeats that without each shape and counts how many of its layers fall inside. Layers too far from
every measured one (FARTHEST) have no estimate. Rows of other GPUs count if they have the same
compute capability, and as farther away.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from math import ceil, exp, log
from typing import Any

import numpy as np
from numpy.typing import NDArray

START_US = 1.5  # time of a product beside its launch: dense times then follow the bytes within 10 %
NEAREST = 4
# FLOPs of a dense product that take as long as one of an active unit: L2 supplies 9 to 15 TB/s, and
# tensor cores reach 800 TFLOP/s. From 32 to 72, left-out layers are predicted equally well.
UNIT_COST = 64.0
CONFIDENCE, UNKNOWN = 0.9, 4.0  # UNKNOWN: half the interval, as a factor, if nothing was left out
WEIGHTS = 0.5, 0.5, 1.0  # of the distances in log2 of tokens, weights and density
OTHER_DTYPE, OTHER = 2.0, 1.0  # distance of values of another size; of another GPU, of an MLP
# The largest of these, weighted: 4 times the tokens, 8 times the weights, 2 times the density. The
# last limit leaves out GPUs of another compute capability.
FARTHEST = 1.005, 1.505, 1.01, 9.0
LEAST_TOKENS, MOST_TOKENS = 8, 4096  # beyond these tokens and weights the efficiency stays the same
MOST_WEIGHTS = 2**27
DENSE, TWO_FOUR, SIX_EIGHT = "dense", "2:4", "6:8"
BLOCKS, SMALL_BLOCKS = "blocks", "blocks of 32"
ANYWHERE, ACTIVATIONS = "anywhere", "activations"
FP8, TWO_FOUR_FP8 = "fp8", "2:4 in fp8"
FOUR_BITS, TWO_FOUR_BITS = "4 bits", "2:4 in 4 bits"
QUANTIZED = {FP8: FP8, TWO_FOUR_FP8: FP8, FOUR_BITS: FOUR_BITS, TWO_FOUR_BITS: FOUR_BITS}
"""Kinds of fewer bits, whose gains are over 16 bits, and that of the layer's other products."""
GROUP = 128  # weights that share a scale of 16 bits
ACTIVE = 29.0  # units that are on for a token, as in the published rows
BITMAP_TOKENS = 256  # above these tokens a layer multiplies with a dense copy of the bitmap

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Gpu:
    """The measured ceilings of a GPU; rates by dtype."""

    name: str
    capability: str
    gb_per_s: float
    tflops: Mapping[str, float]
    launch_us: float

    def rate(self, dtype: str) -> float:
        """Return the rate for a dtype in TFLOP/s; without one, the highest."""
        return self.tflops.get(dtype) or max(self.tflops.values())


@dataclass(frozen=True)
class Layer:
    """A product Y[m, n] = X[m, k] W.T, or a gated MLP of k inputs and n hidden units.

    way        its kind of sparsity: 2:4, 6:8, blocks (64 × 64), blocks of 32, anywhere (a bitmap),
               activations; or one of QUANTIZED
    dtype      of the weights; for QUANTIZED, of the dense layer that they replace
    sparsity   fraction of zeros in the weights; half of it for an MLP that is half 2:4
    active     hidden units on for a token, for `activations`
    """

    gated: bool
    way: str
    m: int
    n: int
    k: int
    dtype: str = "bf16"
    sparsity: float = 0.0
    active: float = 0.0

    @property
    def shape(self) -> tuple[bool, int, int]:
        return self.gated, self.n, self.k

    @property
    def weights(self) -> int:
        """Return the number of weights, zeros included."""
        return self.n * self.k * (3 if self.gated else 1)

    @property
    def overhead_us(self) -> float:
        """Return the time of its products beside one launch; gate and up are one product."""
        return START_US * (2 if self.gated else 1)

    @property
    def element(self) -> int:
        """Return the bytes of a value."""
        return 1 if self.dtype in ("fp8", "int8") else 2

    @property
    def density(self) -> float:
        """Return the fraction of the multiplications that is left; one in fp8 counts half."""
        if self.way == ACTIVATIONS:
            return (1 + 2 * self.active / self.n) / 3  # the gate stays dense
        left = 1.0 if self._is_dense else 1 - self.sparsity
        return left / 2 if QUANTIZED.get(self.way) == FP8 else left

    @property
    def stored(self) -> float:
        """Return the bytes read of the weights over those of dense ones."""
        return 1.0 if self._is_dense else self._packed(self.m)

    @property
    def memory_share(self) -> float:
        """Return the bytes of the weights in memory over those of dense ones.

        A dense copy lies beside the sparse weights.
        """
        return self._packed(1) + (self._is_dense and self.way != DENSE)

    @property
    def bound(self) -> float:
        """Return the largest gain: sparse weights are read and multiplied no faster than dense."""
        return max(1 / self.stored, 1 / self.density)

    def work_us(self, gpu: Gpu, dense: bool = False) -> float:
        stored, density = (1.0, 1.0) if dense else (self.stored, self.density)
        outputs = self.k if self.gated else self.n
        hidden = 2 * self.n if self.gated and (dense or self.way != ACTIVATIONS) else 0
        moved = self.weights * stored * self.element
        moved += self.m * ((self.k + outputs) * self.element + 2 * hidden)
        flops = 2 * self.m * self.weights * density
        if self.way == ACTIVATIONS and not dense:
            flops += (UNIT_COST - 1) * 4 * self.m * self.active * self.k
        return moved / gpu.gb_per_s / 1e3 + flops / gpu.rate(self.dtype) / 1e6

    @property
    def _is_dense(self) -> bool:
        return self.way == DENSE or (self.way == ANYWHERE and self.m > BITMAP_TOKENS)

    def _packed(self, m: int) -> float:
        """Return the bytes of the packed weights that `m` tokens read, over those of dense ones.

        2:4 adds two bits to each value kept, 6:8 is stored as 2:4 of one and a half times as many
        columns, and a bitmap adds one bit to each value. With sparse activations, rows are read
        that any token needs. Dense weights that QUANTIZED replace have 16 bits.
        """
        two_four = 0.5 + 0.125 / self.element
        match self.way:
            case "2:4":
                return 1 - 2 * self.sparsity * (1 - two_four)
            case "fp8" | "2:4 in fp8":
                return (8 - 6 * self.sparsity) / 16
            case "4 bits" | "2:4 in 4 bits":
                return (4 - 2 * self.sparsity + 16 / GROUP) / 16
            case "6:8":
                return 1.5 * two_four
            case "activations":
                return (1 + 2 * (1 - (1 - self.active / self.n) ** m)) / 3
            case "anywhere":
                return 1 - self.sparsity + 1 / (8 * self.element)
        return 1 - self.sparsity


@dataclass(frozen=True)
class Measured:
    """A layer that was measured, with the fastest kernel of its kind and the fastest dense one.

    `over` names the weights that the dense one multiplies, `original` or `pruned`.
    """

    layer: Layer
    gpu: str
    run: str
    processes: int
    kernel: str
    dense_us: float
    gain: float
    low: float
    high: float
    over: str = field(default="pruned", kw_only=True)


@dataclass(frozen=True)
class Estimate:
    """A gain with its interval, the times inside a step, without launches, and the rows used.

    The interval reaches from gain / widen to gain x widen, but not beyond the bound.
    """

    gain: float
    low: float
    high: float
    widen: float
    dense_us: float
    sparse_us: float
    rows: Sequence[Measured]


@dataclass(frozen=True)
class Estimator:
    """The table of the measured layers of all GPUs."""

    gpus: Mapping[str, Gpu]
    measured: Sequence[Measured]

    def estimate(self, layer: Layer, gpu: Gpu) -> Estimate | None:
        """Return the estimate of a layer; None if no measured one is near enough."""
        if (prediction := self._predict(layer, gpu)) is None:
            return None
        gain, dense_us, sparse_us, near = prediction
        widen = exp(self.half(layer.way))
        value, low, high = (min(end, layer.bound) for end in (gain, gain / widen, gain * widen))
        rows = [self.measured[row] for row in near]
        return Estimate(value, low, high, widen, dense_us, sparse_us, rows)

    def dense_us(self, layer: Layer, gpu: Gpu) -> float:
        """Return the time of a dense layer without its launch, from the dense rows of any kind."""
        apart = self._apart(layer, gpu)[:, [0, 1, 3]].sum(axis=1)
        near = np.argsort(apart, kind="stable")[:NEAREST].tolist()
        return self._time_us(layer, gpu, near, apart, dense=True)

    @cached_property
    def half(self) -> Callable[[str], float]:
        """Return half the interval of the gains of a kind, as the logarithm of a factor."""
        return cache(self._half)

    def _half(self, way: str) -> float:
        errors = self._errors([row for row in self.measured if row.layer.way == way])
        shapes = len({row.layer.shape for row, _ in errors})
        if shapes < 2:
            errors, shapes = self._errors(self.measured), 2
        if not errors:
            return log(UNKNOWN)
        sizes = sorted(abs(error) for _, error in errors)
        rank = min(len(sizes), ceil((len(sizes) + 1) * CONFIDENCE))
        return sizes[rank - 1] * (shapes + 1) / (shapes - 1)

    @cached_property
    def coverage(self) -> tuple[int, int]:
        """Return how many left-out layers fall into their intervals, and how many there are."""
        inside = []
        for shape in {row.layer.shape for row in self.measured}:
            rest = Estimator(self.gpus, [row for row in self.measured if row.layer.shape != shape])
            for row in self.measured:
                estimate = row.layer.shape == shape and rest.estimate(row.layer, self.gpus[row.gpu])
                inside += [estimate.low <= row.gain <= estimate.high] if estimate else []
        return sum(inside), len(inside)

    def _errors(self, rows: Iterable[Measured]) -> list[tuple[Measured, float]]:
        """Return log(measured / predicted) of each layer, predicted from other shapes."""
        predicted = ((row, self._predict(row.layer, self.gpus[row.gpu], True)) for row in rows)
        return [(row, log(row.gain / found[0])) for row, found in predicted if found]

    def _predict(
        self, layer: Layer, gpu: Gpu, other_shapes: bool = False
    ) -> tuple[float, float, float, list[int]] | None:
        """Return the gain, both times inside a step, and the places of the nearest rows."""
        apart, columns = self._apart(layer, gpu), self._columns
        total = apart.sum(axis=1)
        usable = (columns["way"] == layer.way) & (apart <= FARTHEST).all(axis=1)
        if other_shapes:
            usable &= (columns["shape"] != layer.shape).any(axis=1)
        first: dict[tuple[Any, ...], int] = {}
        for row in np.flatnonzero(usable)[np.argsort(total[usable], kind="stable")].tolist():
            first.setdefault((self.measured[row].layer.shape, self.measured[row].layer.m), row)
        near = sorted(first.values(), key=lambda row: (total[row], -row))[:NEAREST]
        if not near:
            return None
        dense = self._time_us(layer, gpu, near, total, dense=True)
        sparse = self._time_us(layer, gpu, near, total)
        return (gpu.launch_us + dense) / (gpu.launch_us + sparse), dense, sparse, near

    def _time_us(
        self, layer: Layer, gpu: Gpu, near: list[int], apart: Floats, dense: bool = False
    ) -> float:
        """Return the time of a layer at the mean efficiency of some rows, without its launch."""
        efficiencies = self._columns["dense" if dense else "sparse"][near]
        mean = np.average(efficiencies, weights=1 / (0.25 + apart[near]))
        return layer.overhead_us + layer.work_us(gpu, dense) / exp(mean)

    def _apart(self, layer: Layer, gpu: Gpu) -> Floats:
        """Return the weighted distances [rows, 4] of a layer.

        They are those in log2 of tokens, weights and density, and the sum of the others.
        """
        columns = self._columns
        sizes = np.abs(columns["sizes"] - _sizes(layer)) * WEIGHTS
        others = OTHER_DTYPE * (columns["dtype"] != _dtype(layer))
        others += OTHER * (columns["gpu"] != gpu.name) + OTHER * (columns["gated"] != layer.gated)
        others[columns["capability"] != gpu.capability] = np.inf
        return np.column_stack([sizes, others])

    @cached_property
    def _columns(self) -> dict[str, NDArray[Any]]:
        """Return the table: sizes and logarithms of efficiencies, and what tells rows apart."""
        layers = [row.layer for row in self.measured]
        return {
            "sizes": np.array([*map(_sizes, layers)]).reshape(-1, 3),
            "way": np.array([layer.way for layer in layers]),
            "shape": np.array([layer.shape for layer in layers]).reshape(-1, 3),
            "gated": np.array([layer.gated for layer in layers]),
            "dtype": np.array([*map(_dtype, layers)]),
            "gpu": np.array([row.gpu for row in self.measured]),
            "capability": np.array([self.gpus[row.gpu].capability for row in self.measured]),
            "dense": np.array([self._log_efficiency(row, True) for row in self.measured]),
            "sparse": np.array([self._log_efficiency(row, False) for row in self.measured]),
        }

    def _log_efficiency(self, row: Measured, dense: bool) -> float:
        time, gpu = row.dense_us if dense else row.dense_us / row.gain, self.gpus[row.gpu]
        overhead = gpu.launch_us + row.layer.overhead_us
        return log(row.layer.work_us(gpu, dense) / max(time - overhead, 0.2 * time))


def _sizes(layer: Layer) -> Floats:
    """Return log2 of tokens, weights and density, as far as the efficiency depends on them."""
    tokens = min(max(layer.m, LEAST_TOKENS), MOST_TOKENS)
    sizes: Floats = np.log2([tokens, min(layer.weights, MOST_WEIGHTS), layer.density])
    return sizes


def _dtype(layer: Layer) -> str:
    """Return what tells apart dtypes whose layers differ: those of 16 bits are alike."""
    return "16 bits" if layer.element == 2 else layer.dtype
