"""The time of one pass of a model (a "step" here), and what sparse MLPs gain in it.

    step = layers x (MLP + wqkv + wo + attention + small kernels) + head
    gain = step with dense MLPs / step with sparse ones

Only MLPs are sparse, as `sparsebench prune` makes them. Attention, norms, the KV cache, the
embedding and the head stay dense. Up to DECODED tokens at once are as many sequences that decode,
with `context` tokens in the cache of each. More tokens are prompts of `context` tokens, of which
only the last one passes the head.

The time of the dense rest is assumed to be right within a factor of REST, as it is for the decoding
steps that were measured. A bound needs no GPU: sparse MLPs save no more than their share of the
bytes or of the FLOPs, whichever is larger.
"""

from dataclasses import dataclass
from functools import cached_property
from math import exp, hypot, log

from sparsebench.results.advice.layer_estimates import (
    ACTIVATIONS,
    ACTIVE,
    DENSE,
    START_US,
    Estimate,
    Estimator,
    Gpu,
    Layer,
    Measured,
)
from sparsebench.results.advice.measured_layers import ModelStep
from sparsebench.results.formatting import between, times
from sparsebench.results.model_shapes import ModelShapes
from sparsebench.results.statistics.ratio import FEWEST

DECODED = 256
PASSES, SMALL = 10, 8  # passes of the stream through memory, and small kernels, in each layer
REST = 1.25
MEASURED, LOOK, ESTIMATE, BOUND = "measured", "look", "estimate", "bound"


@dataclass(frozen=True)
class Gain:
    """A speedup and its basis: MEASURED, a LOOK, an ESTIMATE or a BOUND.

    part     of the model that was measured, such as `8 of 32 layers`, from which the speedup of
             the model is extrapolated; "" for all of it
    between  the measured points that it lies between, such as `1.15× at 1 and 1.13× at 16`; ""
             if it was measured itself, or if one of them is an estimate
    runs     the published runs behind it
    """

    value: float
    low: float
    high: float
    basis: str
    part: str = ""
    between: str = ""
    runs: tuple[str, ...] = ()

    @property
    def short(self) -> str:
        """Write it without its interval: `1.15×`."""
        return times(self.value, self.value / 100)

    @property
    def text(self) -> str:
        """Write it: `1.15× [1.14, 1.16]`, a look as `1.15×`, `≈1.2× [1.1, 1.3]`, `at most 1.3×`."""
        if self.basis == BOUND:
            return f"at most {times(self.value)}"
        if self.basis == LOOK:
            return self.short
        return ("≈" if self.basis == ESTIMATE else "") + between(self.value, self.low, self.high)

    @property
    def cell(self) -> str:
        """Write it for a table with its marks: `1.15× (look, extrapolated)`."""
        marks = ["look"] * (self.basis == LOOK) + ["extrapolated"] * bool(self.part)
        marks += ["interpolated"] * bool(self.between)
        return f"{self.text} ({', '.join(marks)})" if marks else self.text

    @property
    def caveat(self) -> str:
        """Say what limits it: `extrapolated from 8 of 32 layers`; "" if nothing does."""
        words = [f"from fewer than {FEWEST} processes"] * (self.basis == LOOK)
        words += [f"extrapolated from {self.part}"] * bool(self.part)
        words += [f"between {self.between} tokens"] * bool(self.between)
        return ", ".join(words)

    @classmethod
    def measured(cls, row: Measured | ModelStep, part: str = "") -> "Gain":
        basis = MEASURED if row.processes >= FEWEST else LOOK
        return cls(row.gain, row.low, row.high, basis, part, runs=(row.run,))


@dataclass(frozen=True)
class StepModel:
    """A step of a model with `tokens` at once, each with `context` tokens before it."""

    model: ModelShapes
    tokens: int
    context: int

    def mlp(self, way: str, sparsity: float = 0.0) -> Layer:
        active = min(ACTIVE, self.model.intermediate) if way == ACTIVATIONS else 0.0
        sizes = self.tokens, self.model.intermediate, self.model.hidden
        return Layer(True, way, *sizes, sparsity=sparsity, active=active)

    def dense_us(self, layers: Estimator, gpu: Gpu) -> float:
        return self.rest_us(layers, gpu) + self.model.layers * layers.dense_us(self.mlp(DENSE), gpu)

    def rest_us(self, layers: Estimator, gpu: Gpu) -> float:
        """Return the time of everything but the MLPs."""
        *products, head = (layers.dense_us(layer, gpu) for layer in self._rest)
        stream = PASSES * self.tokens * self.model.hidden * 2
        moved = (self._cache_bytes + stream) / gpu.gb_per_s / 1e3
        layer_us = sum(products) + moved + self._attention_flops / gpu.rate("bf16") / 1e6
        return self.model.layers * (layer_us + SMALL * START_US) + head

    def estimated(self, layer: Layer, estimate: Estimate, rest_us: float) -> Gain:
        """Return the gain of the whole step from the estimate of its MLPs.

        The errors of the MLPs and of the rest are independent, so the squares of their logarithms
        add up. Such intervals hold all measured steps, predicted from layers of other shapes.
        """
        mlps = self.model.layers * estimate.dense_us
        in_step = estimate.dense_us / estimate.sparse_us

        def gain(of_mlps: float = 1.0, of_rest: float = 1.0) -> float:
            left, rest = mlps / min(in_step * of_mlps, layer.bound), rest_us * of_rest
            return (mlps + rest) / (left + rest)

        value, rests = gain(), (gain(of_rest=REST), gain(of_rest=1 / REST))
        below = hypot(log(value / gain(1 / estimate.widen)), log(value / min(rests)))
        above = hypot(log(gain(estimate.widen) / value), log(max(rests) / value))
        ends = value * exp(-below), min(value * exp(above), layer.bound)
        return Gain(value, *ends, ESTIMATE, runs=tuple(row.run for row in estimate.rows))

    def bound(self, layer: Layer) -> float:
        """Return the largest gain of the step, by bytes or by FLOPs."""
        *products, head = self._rest
        layers, mlp = self.model.layers, self.model.layers * layer.weights
        moved = 2 * sum(each.weights for each in products) + self._cache_bytes
        flops = 2 * sum(each.m * each.weights for each in products) + self._attention_flops
        parts = (
            (2 * mlp, layer.stored, layers * moved + 2 * head.weights),
            (2 * mlp * layer.m, layer.density, layers * flops + 2 * head.m * head.weights),
        )
        return max((dense + rest) / (dense * left + rest) for dense, left, rest in parts)

    @property
    def _decodes(self) -> bool:
        return self.tokens <= DECODED

    @cached_property
    def _rest(self) -> list[Layer]:
        """Return the dense products of a layer beside the MLP, then the head."""
        model, m = self.model, self.tokens
        width, keys = model.heads * model.head_dim, 2 * model.kv_heads * model.head_dim
        last = m if self._decodes else -(-m // self.context)
        sizes = (m, width + keys, model.hidden), (m, model.hidden, width)
        return [Layer(False, DENSE, *each) for each in (*sizes, (last, model.vocab, model.hidden))]

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
