"""What users get for the experts of a mixture: SparseExperts, alone or in a decoding step."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.gated_layer import launch_of_experts, launch_of_layer
from sparsebench.kernels._common.operator import Earlier
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.bsr.experts_ffn_triton import gate_above_up
from sparsebench.kernels.dense._decoder import DecoderPart, copy_of, experts_part
from sparsebench.kernels.nn._experts_engines import Weight
from sparsebench.kernels.nn._experts_engines import bound as bound_experts
from sparsebench.kernels.nn.block_sparse_mlp import layer_of
from sparsebench.kernels.nn.experts import SparseExperts
from sparsebench.kernels.nn.spense import SpenseLinear
from sparsebench.kernels.spense.spense_ffn import joined


class PackedMixture(NamedTuple):
    """A layer, and its weights as products read them."""

    layer: SparseExperts
    gate_up: Weight
    down: Weight


def mixture_of(operands: Operands) -> PackedMixture:
    """Return the frozen layer of a suite's weights, in memory of its own. Raises Unsupported."""
    problem, count = operands.problem, operands.problem["experts"]
    wg, wu, wd = (operands.weights[name] for name in ("wg", "wu", "wd"))
    both: Weight
    try:
        if isinstance(wg, Spense) and isinstance(wu, Spense) and isinstance(wd, Spense):
            both, wd = joined(wg, wu, split="columns"), copy_of(wd)
            layers: Any = SpenseLinear.from_spense(both), SpenseLinear.from_spense(wd)
        elif isinstance(wd, Bsr):
            both = gate_above_up(wg, wu, count)
            layers = layer_of(both), layer_of(wd)
        else:
            raise Unsupported(f"expected experts in spense or bsr, found {type(wd).__name__}")
        about = {"experts": count, "top_k": problem["top_k"]}
        layer = SparseExperts(*layers, **about, activation=problem["activation"]).freeze()
    except FormatError as error:
        raise Unsupported(str(error)) from error
    return PackedMixture(layer, both, wd)


def launch_of_mixture(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return a call of SparseExperts, whose products are planned on the rows of the operands."""
    return _planned(mixture_of(operands), operands, earlier)


def _planned(mixture: PackedMixture, operands: Operands, earlier: Earlier | None) -> Launch:
    layer, both, wd = mixture
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    call = partial(layer, x, ids, shares)
    if not x.is_cuda:
        return launch_of_layer(call, {})
    gate_up = partial(bound_experts, both, layer.experts, activation=layer.activation)
    down = partial(bound_experts, wd, layer.experts)
    return replace(launch_of_experts(operands, earlier, gate_up, down), run=call)


def mixture_part(
    operands: Operands, earlier: Earlier | None, inputs: Sequence[Tensor]
) -> DecoderPart:
    """Build the experts of a decoding step; all layers share the plans of the first."""
    mixtures = [mixture_of(operands) for _ in inputs]
    ids, shares = (operands.activations[name] for name in ("ids", "shares"))
    m = len(inputs[0])
    activations = {"x": inputs[0], "ids": ids[:m], "shares": shares[:m]}
    launch = _planned(mixtures[0], replace(operands, activations=activations), earlier)
    layers = [mixture.layer for mixture in mixtures]
    part = experts_part(operands, inputs, layers, launch.choice, launch.candidates)
    return replace(part, code=launch.code)
