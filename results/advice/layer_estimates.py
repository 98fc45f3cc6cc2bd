"""How long a layer takes on a GPU, from the nearest measured layers; an estimate with an interval.

    time       = overhead + work / efficiency
    overhead   = launch time of the GPU + START_US for each product of the layer
    work       = bytes / bandwidth + FLOPs / rate, against the measured ceilings of the GPU
    efficiency = weighted mean of the logarithms over the NEAREST measured layers of the same kind,
                 in log2 of tokens, weights and density, with a step for another dtype or GPU;
                 one for each shape and number of tokens, because the others share its error
    gain       = dense time / sparse time

The sum of both parts of the work describes the published rows better than their maximum: with it
the efficiency of BSR at 4096 tokens varies by 1.3 from 50 to 95 % zeros, instead of by 1.8. Bytes
are the stored weights, the input, the output and the hidden activations, each once. With sparse
activations every token fetches the rows of its own units from L2, at UNIT_COST per FLOP: without
that, the gain with 113 units was predicted to be twice the measured one, because the dense gate
hides the number of units in the density.

The interval comes from leaving shapes out. Every measured layer is predicted from layers of other
shapes alone. The interval holds CONFIDENCE (90 %) of the errors of its kind, widened by
(S + 1) / (S - 1) for S shapes, because a few shapes say little about the next one. `coverage`
repeats that without each shape and counts how many of its layers fall inside. Layers too far from
every measured one (FARTHEST) have no estimate. Rows of other GPUs count if they have the same
compute capability, and as farther away.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import ceil, exp, log, log2

START_US = 1.5  # time of a product beside its launch: dense times then follow the bytes within 10 %
NEAREST = 4
# FLOPs of a dense product that take as long as one of an active unit: L2 supplies 9 to 15 TB/s, and
# tensor cores reach 800 TFLOP/s. From 32 to 72, left-out layers are predicted equally well.
UNIT_COST = 64.0
CONFIDENCE, UNKNOWN = 0.9, 4.0  # UNKNOWN: half the interval, as a factor, if nothing was left out
# For tokens, weights, density, dtype, GPU and kind of layer.
DISTANCE_WEIGHTS = 0.5, 0.5, 1.0, 1.0, 1.0, 1.0
# In log2: 4 times the tokens, 8 times the weights, 2 times the density.
FARTHEST = 2.01, 3.01, 1.01
LEAST_TOKENS, MOST_TOKENS = 8, 4096  # beyond these tokens and weights the efficiency stays the same
MOST_WEIGHTS = 2**27
DENSE, TWO_FOUR, SIX_EIGHT = "dense", "2:4", "6:8"
BLOCKS, SMALL_BLOCKS = "blocks", "blocks of 32"
ANYWHERE, ACTIVATIONS = "anywhere", "activations"
BITMAP_TOKENS = 256  # above these tokens a layer multiplies with a dense copy of the bitmap


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
               activations
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
    def products(self) -> int:
        """Return the number of launches, with gate and up in one."""
        return 2 if self.gated else 1

    @property
    def element(self) -> int:
        """Return the bytes of a value."""
        return 1 if self.dtype in ("fp8", "int8") else 2

    @property
    def uses_copy(self) -> bool:
        """Return whether the layer multiplies with a dense copy, beside the sparse weights."""
        return self.way == ANYWHERE and self.m > BITMAP_TOKENS

    @property
    def memory_share(self) -> float:
        """Return the bytes of the weights in memory over those of dense ones."""
        return 1 + replace(self, m=1).stored if self.uses_copy else self.stored

    @property
    def density(self) -> float:
        """Return the fraction of the multiplications that is left."""
        if self.way == DENSE or self.uses_copy:
            return 1.0
        if self.way == ACTIVATIONS:
            return (1 + 2 * self.active / self.n) / 3  # the gate stays dense
        return 1 - self.sparsity

    @property
    def stored(self) -> float:
        """Return the bytes read of the weights over those of dense ones.

        2:4 adds two bits to each value kept, 6:8 is stored as 2:4 of one and a half times as many
        columns, and a bitmap adds one bit to each value. With sparse activations, rows are read
        that any token needs.
        """
        if self.way == DENSE or self.uses_copy:
            return 1.0
        if self.way == TWO_FOUR:
            share = 0.5 + 0.125 / self.element
            return 1 - 2 * self.sparsity * (1 - share)
        if self.way == SIX_EIGHT:
            return 1.5 * (0.5 + 0.125 / self.element)
        if self.way == ACTIVATIONS:
            return (1 + 2 * (1 - (1 - self.active / self.n) ** self.m)) / 3
        return 1 - self.sparsity + (1 / (8 * self.element) if self.way == ANYWHERE else 0.0)

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

    @cached_property
    def sizes(self) -> tuple[float, float, float]:
        """Return tokens, weights and density, as far as the efficiency depends on them."""
        tokens = min(max(self.m, LEAST_TOKENS), MOST_TOKENS)
        return tokens, min(self.weights, MOST_WEIGHTS), self.density

    def distance(self, other: "Layer", same_gpu: bool) -> tuple[float, ...]:
        """Return how far apart two layers are in each of DISTANCE_WEIGHTS."""
        logs = (abs(log2(a / b)) for a, b in zip(self.sizes, other.sizes, strict=True))
        alike = self.dtype == other.dtype or self.element == other.element == 2
        dtypes = 0.0 if alike else 2.0
        return *logs, dtypes, float(not same_gpu), float(self.gated != other.gated)


@dataclass(frozen=True)
class Measured:
    """A layer that was measured, with the fastest kernel of its kind and the fastest dense one."""

    layer: Layer
    gpu: str
    run: str
    processes: int
    kernel: str
    dense_us: float
    gain: float
    low: float
    high: float

    def efficiency(self, gpu: Gpu, dense: bool = False) -> float:
        time = self.dense_us if dense else self.dense_us / self.gain
        overhead = gpu.launch_us + START_US * self.layer.products
        return self.layer.work_us(gpu, dense) / max(time - overhead, 0.2 * time)


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


Nearest = list[tuple[float, Measured]]


@dataclass(frozen=True)
class Estimator:
    """The measured layers of all GPUs."""

    gpus: Mapping[str, Gpu]
    measured: Sequence[Measured]

    def estimate(self, layer: Layer, gpu: Gpu) -> Estimate | None:
        """Return the estimate of a layer; None if no measured one is near enough."""
        if (prediction := self._predict(layer, gpu)) is None:
            return None
        gain, dense_us, sparse_us, rows = prediction
        widen, most = exp(self.half(layer.way)), layer.bound
        return Estimate(
            min(gain, most),
            min(gain / widen, most),
            min(gain * widen, most),
            widen,
            dense_us,
            sparse_us,
            rows,
        )

    def dense_us(self, layer: Layer, gpu: Gpu) -> float:
        """Return the time of a dense layer without its launch, from the dense rows of any kind."""
        efficiency = self._mean(self._nearest(layer, gpu, self._dense)[:NEAREST], dense=True)
        return START_US * layer.products + layer.work_us(gpu, dense=True) / efficiency

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

    @cached_property
    def _dense(self) -> list[Measured]:
        return [replace(row, layer=replace(row.layer, way=DENSE)) for row in self.measured]

    def _errors(self, rows: Iterable[Measured]) -> list[tuple[Measured, float]]:
        """Return log(measured / predicted) of each layer, predicted from other shapes."""
        errors = []
        for row in rows:
            others = [other for other in self.measured if other.layer.shape != row.layer.shape]
            if prediction := self._predict(row.layer, self.gpus[row.gpu], others):
                errors.append((row, log(row.gain / prediction[0])))
        return errors

    def _predict(
        self, layer: Layer, gpu: Gpu, measured: Sequence[Measured] | None = None
    ) -> tuple[float, float, float, list[Measured]] | None:
        rows = [row for row in measured or self.measured if row.layer.way == layer.way]
        within = self._nearest(layer, gpu, rows, FARTHEST)
        if not within:
            return None
        first = {(row.layer.shape, row.layer.m): (apart, row) for apart, row in reversed(within)}
        near = sorted(first.values(), key=lambda pair: pair[0])[:NEAREST]
        start = START_US * layer.products
        dense = start + layer.work_us(gpu, dense=True) / self._mean(near, dense=True)
        sparse = start + layer.work_us(gpu) / self._mean(near)
        gain = (gpu.launch_us + dense) / (gpu.launch_us + sparse)
        return gain, dense, sparse, [row for _, row in near]

    def _nearest(
        self, layer: Layer, gpu: Gpu, rows: Iterable[Measured], most: Sequence[float] = ()
    ) -> Nearest:
        near: Nearest = []
        for row in rows:
            if self.gpus[row.gpu].capability != gpu.capability:
                continue
            apart = layer.distance(row.layer, gpu.name == row.gpu)
            if all(a <= limit for a, limit in zip(apart, most, strict=False)):
                near.append((sum(w * a for w, a in zip(DISTANCE_WEIGHTS, apart, strict=True)), row))
        return sorted(near, key=lambda pair: pair[0])

    def _mean(self, near: Nearest, dense: bool = False) -> float:
        weights = [1 / (0.25 + distance) for distance, _ in near]
        logs = [log(row.efficiency(self.gpus[row.gpu], dense)) for _, row in near]
        return exp(sum(w * value for w, value in zip(weights, logs, strict=True)) / sum(weights))
