"""The time of one pass of a model (a "step" here), and what sparse MLPs gain in it.

    step = layers x (MLP + wqkv + wo + attention + small kernels) + head
    gain = step of dense products in 16 bits / step

Only MLPs are sparse, as `sparsebench prune` makes them; fewer bits are those of every product of a
layer. Attention, norms, the KV cache, the embedding and the head stay dense and in 16 bits. Up to
DECODED tokens at once are as many sequences that decode, with `context` tokens in the cache of
each. More tokens are prompts of `context` tokens, of which only the last one passes the head.

The experts that the tokens of a step hit count as one MLP, which has the M units of all of them. It
takes the number of tokens that gives the FLOPs of the experts: the tokens of the step, times the
units that one token passes, over M.

The time of the dense rest is assumed to be right within a factor of REST, as it is for the decoding
steps that were measured. A bound needs no GPU: sparse MLPs save no more than their share of the
bytes or of the FLOPs, whichever is larger.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, hypot, log

from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ACTIVE,
    DENSE,
    QUANTIZED,
    START_US,
    Estimator,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.advice.measured_layers import ModelStep
from sparsebench.results.formatting import amount, between, join_words, times
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.statistics.ratio import FEWEST

DECODED = 256
PASSES, SMALL = 10, 8  # passes of the stream through memory, and small kernels, in each layer
REST = 1.25
MEASURED, LOOK, ESTIMATE, BOUND = "measured", "look", "estimate", "bound"
ROUGH = 3.0  # an interval whose ends are a larger factor apart says little beside its middle


@dataclass(frozen=True)
class Gain:
    """A speedup and its basis: MEASURED, a LOOK, an ESTIMATE or a BOUND.

    part     of the model that was measured, such as `8 of 32 layers`, from which the speedup of
             the model is extrapolated; "" for all of it
    between  the measured points that it lies between, such as `1.15× at 1 and 1.13× at 16`; ""
             if it was measured itself, or if one of them is an estimate
    runs     the published runs behind it
    kernels  those whose rows an estimate rests on
    shapes   how many shapes these rows have; 0 if it is no estimate
    """

    value: float
    low: float
    high: float
    basis: str
    part: str = ""
    between: str = ""
    runs: tuple[str, ...] = ()
    kernels: tuple[str, ...] = ()
    shapes: int = 0

    @property
    def rough(self) -> str:
        """Say what a rough estimate rests on: `torch_int4 in 2 shapes`; "" if it is not rough."""
        if self.basis != ESTIMATE or self.high <= ROUGH * self.low:
            return ""
        return f"{join_words([*self.kernels])} in {amount(self.shapes, 'shape')}"

    @property
    def short(self) -> str:
        """Write it without its interval: `1.15×`."""
        return times(self.value, self.value / 100)

    @property
    def text(self) -> str:
        """Write it: `1.15× [1.14, 1.16]`, a look as `1.15×`, `≈1.2× [1.1, 1.3]`, `at most 1.3×`.

        A rough estimate has no brackets: `≈0.9×`.
        """
        if self.basis == BOUND:
            return f"at most {times(self.value)}"
        if self.basis == LOOK:
            return self.short
        if self.rough:
            return f"≈{times(self.value)}"
        return ("≈" if self.basis == ESTIMATE else "") + between(self.value, self.low, self.high)

    @property
    def cell(self) -> str:
        """Write it for a table with its marks: `1.15× (look, extrapolated)`."""
        marks = ["look"] * (self.basis == LOOK) + ["extrapolated"] * bool(self.part)
        marks += ["interpolated"] * bool(self.between) + ["rough"] * bool(self.rough)
        return f"{self.text} ({', '.join(marks)})" if marks else self.text

    @property
    def caveat(self) -> str:
        """Say what limits it: `extrapolated from 8 of 32 layers`; "" if nothing does."""
        words = [f"from fewer than {FEWEST} processes"] * (self.basis == LOOK)
        words += [f"extrapolated from {self.part}"] * bool(self.part)
        words += [f"between {self.between} tokens"] * bool(self.between)
        words += [f"a rough estimate from {self.rough}"] * bool(self.rough)
        return ", ".join(words)

    @classmethod
    def measured(cls, row: Measured | ModelStep, part: str = "") -> "Gain":
        basis = MEASURED if row.processes >= FEWEST else LOOK
        return cls(row.gain, row.low, row.high, basis, part, runs=(row.run,))

    @classmethod
    def estimated(cls, value: float, low: float, high: float, rows: Sequence[Measured]) -> "Gain":
        runs, kernels = (
            tuple(dict.fromkeys(names))
            for names in zip(*((row.run, row.kernel) for row in rows), strict=True)
        )
        shapes = len({row.layer.shape for row in rows})
        return cls(value, low, high, ESTIMATE, runs=runs, kernels=kernels, shapes=shapes)


@dataclass(frozen=True)
class StepModel:
    """A step of a model with `tokens` at once, each with `context` tokens before it."""

    model: ModelShapes
    tokens: int
    context: int

    def mlp(self, way: str, sparsity: float = 0.0) -> Layer:
        active = min(ACTIVE, self.model.intermediate) if way == ACTIVATIONS else 0.0
        units, of_token = self.model.units_read(self.tokens), self.model.units_of_token
        sizes = round(self.tokens * of_token / units), units, self.model.hidden
        return Layer(True, way, *sizes, sparsity=sparsity, active=active)

    def dense_us(self, layers: Estimator, gpu: Gpu) -> float:
        return self._time_us(layers, gpu, self.products(self.mlp(DENSE)))

    def products(self, mlp: Layer) -> list[tuple[int, Layer]]:
        """Return the products of a step with such MLPs, and how often: the MLP, wqkv, wo, the head.

        Kinds of fewer bits are of all products of a layer; the others of the MLPs alone.
        """
        model, m, way = self.model, self.tokens, QUANTIZED.get(mlp.way, DENSE)
        width, keys = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
        last = m if self._decodes else -(-m // self.context)
        sizes = (m, width + keys, model.hidden), (m, model.hidden, width)
        products = [(model.layers, each) for each in (mlp, *(Layer(False, way, *s) for s in sizes))]
        return [*products, (1, Layer(False, DENSE, last, model.vocab, model.hidden))]

    def _time_us(self, layers: Estimator, gpu: Gpu, products: Iterable[tuple[int, Layer]]) -> float:
        """Return the time of dense products and of everything but products."""
        stream = PASSES * self.tokens * self.model.hidden * 2
        moved = (self._cache_bytes + stream) / gpu.gb_per_s / 1e3
        layer_us = moved + self._attention_flops / gpu.rate("bf16") / 1e6 + SMALL * START_US
        products_us = sum(count * layers.dense_us(each, gpu) for count, each in products)
        return self.model.layers * layer_us + products_us

    def estimated(self, mlp: Layer, layers: Estimator, gpu: Gpu) -> Gain | None:
        """Return the gain of the whole step; None if no measured layer is near its MLPs.

        Another product that no measured layer is near counts as if it kept 16 bits.
        The errors of the changed products and of the rest are independent, so the squares of their
        logarithms add up. Such intervals hold all measured steps, predicted from layers of other
        shapes.
        """
        products = self.products(mlp)
        estimates = {p: layers.estimate(p[1], gpu) for p in products if p[1].way != DENSE}
        near = {each: estimate for each, estimate in estimates.items() if estimate}
        if products[0] not in near:
            return None
        rest = self._time_us(layers, gpu, [each for each in products if each not in near])
        dense = sum(count * estimate.dense_us for (count, _), estimate in near.items())
        in_step = dense / sum(count * e.sparse_us for (count, _), e in near.items())
        bound, widen = max(p.bound for _, p in near), max(e.widen for e in near.values())

        def gain(of_products: float = 1.0, of_rest: float = 1.0) -> float:
            left, others = dense / min(in_step * of_products, bound), rest * of_rest
            return (dense + others) / (left + others)

        value, rests = gain(), (gain(of_rest=REST), gain(of_rest=1 / REST))
        below = hypot(log(value / gain(1 / widen)), log(value / min(rests)))
        above = hypot(log(gain(widen) / value), log(max(rests) / value))
        ends = value * exp(-below), min(value * exp(above), bound)
        return Gain.estimated(value, *ends, [row for each in near.values() for row in each.rows])

    def bound(self, mlp: Layer) -> float:
        """Return the largest gain of the step, by bytes or by FLOPs."""
        products, layers = self.products(mlp), self.model.layers
        moved = [(2 * count * each.weights, each.stored) for count, each in products]
        flops = [(2 * count * each.m * each.weights, each.density) for count, each in products]
        parts = (moved, layers * self._cache_bytes), (flops, layers * self._attention_flops)
        return max(
            (sum(dense for dense, _ in each) + rest)
            / (sum(dense * left for dense, left in each) + rest)
            for each, rest in parts
        )

    @property
    def _decodes(self) -> bool:
        return self.tokens <= DECODED

    @property
    def _cache_bytes(self) -> float:
        """Return the bytes of keys and values that a layer reads or writes."""
        tokens = self.tokens * (self.context if self._decodes else 1)
        return tokens * 2 * self.model.kv_heads * self.model.head_dim * 2

    @property
    def _attention_flops(self) -> float:
        """Return the FLOPs of the products with keys and values in a layer."""
        context = self.context if self._decodes else self.context / 2
        return 4 * self.tokens * context * self.model.heads * self.model.head_dim
