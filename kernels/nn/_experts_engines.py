"""The engines of a mixture's experts (experts.py), and the plans that layers share.

    2:4       GPU of compute capability 9.0              experts_wgmma: fp16, bf16, also act(G) * U
    blocks    GPU of compute capability 8.0 and newer    experts_triton: fp16, bf16
              CPU                                        dense products in torch, as a reference

W has all experts one below the other. Layers of equal sizes share their plans, because a plan does
not depend on the values of W, nor on where blocks are.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import ROWS, Spense, tile_shapes
from sparsebench.kernels._common.operator import (
    Engine,
    NoConfig,
    Operator,
    OperatorCall,
)
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._kernel import NAMES, refuse
from sparsebench.kernels.bsr import experts_triton
from sparsebench.kernels.bsr.experts_triton import BlockExpertsCall
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.spense.experts_wgmma import ExpertsCall
from sparsebench.kernels.spense.spense_ffn import parted
from sparsebench.results.record import Problem

Weight = Spense | Bsr
Call = ExpertsCall | BlockExpertsCall
ON_A_GPU = torch.float16, torch.bfloat16


def multiply(
    w: Weight, experts: int, x: Tensor, ends: Tensor, activation: str | None = None
) -> Tensor:
    """Return Y [rows, n] of the rows X [rows, k] of experts, at least one.

    ends        int32 [1, experts], where the rows of each expert end
    activation  of 2:4 weights: if set, W is gate and up (spense_ffn.py); returns H [rows, n / 2]

    Raises Unsupported.
    """
    call = bound(w, experts, x, ends, activation)
    y = call.run(call.select(None).product)()
    assert isinstance(y, Tensor)
    return y


def bound(
    w: Weight, experts: int, x: Tensor, ends: Tensor, activation: str | None = None
) -> OperatorCall:
    """Return the call that `multiply` makes. Raises Unsupported."""
    call, weight = call_of(w, experts, len(x), activation), tensors_of(w)
    operator = operator_of(call._replace(m=0), x.device)
    return OperatorCall(operator, call, (x, ends), lambda product: weight)


def tensors_of(w: Weight) -> tuple[Tensor, ...]:
    """Return what products read of a weight, in their order."""
    if isinstance(w, Spense):
        return w.sparse, w.dense
    return w.values, w.columns, w.offsets


def weight_of(
    tensors: Sequence[Tensor], shape: tuple[int, int], dtype: torch.dtype, columns: int | None
) -> Weight:
    """Undo `tensors_of`, for a weight with so many sparse columns; None for blocks."""
    if columns is not None:
        sparse, dense = tensors
        return Spense(shape, dtype, (shape[0], columns), sparse, dense)
    values, of_blocks, offsets = tensors
    return Bsr(shape, offsets, of_blocks, values)


def call_of(w: Weight, experts: int, rows: int, activation: str | None = None) -> Call:
    """Return the call that plans a product of rows with experts."""
    if isinstance(w, Spense):
        return experts_wgmma.call_of(w, experts, rows, activation)
    return experts_triton.call_of(w, experts, rows, w.values.dtype)


@lru_cache(256)
def operator_of(call: Call, device: torch.device) -> Operator:
    """Return the plans of all weights of a layout, that of a call of no rows. Raises Unsupported.

    The plans read no element of the weight, so it has none.
    """
    shape = call.experts * call.shape[0], call.shape[1]
    problem: Callable[[Any], dict[str, Any]]
    if isinstance(call, ExpertsCall):
        problem, columns = experts_wgmma.problem_of, call.sparse_shape[1]
        byte = torch.empty((), dtype=torch.uint8, device=device)
        shapes = tile_shapes(shape, call.sparse_shape, call.dtype.itemsize)
        tensors = [byte.expand(each) for each in shapes]
    else:
        problem, columns = experts_triton.problem_of, None
        value = torch.empty((), dtype=call.dtype, device=device)
        index = torch.empty((), dtype=torch.int32, device=device)
        counts = call.stored, shape[0] // call.block[0] + 1
        tensors = [value.expand(call.stored, *call.block), *map(index.expand, counts)]
    w = weight_of(tensors, shape, call.dtype, columns)
    return Operator((engine_of(call, device),), lambda call: w, problem, device)


def engine_of(call: Call, device: torch.device) -> Engine:
    """Return the engine that runs a call on a device. Raises Unsupported."""
    if device.type == "cpu":
        return _IN_TORCH
    kernel = experts_wgmma.KERNEL if isinstance(call, ExpertsCall) else experts_triton.KERNEL
    if call.dtype not in ON_A_GPU:
        raise Unsupported(f"expected experts in fp16 or bf16 on a GPU, found {call.dtype}")
    refuse(kernel.unsupported(Problem("experts", {"dtype": NAMES[call.dtype]}), device))
    return kernel


def expert_of(w: Weight, number: int, experts: int) -> Tensor:
    """Return the weight [n, k] of one expert, as a dense matrix."""
    n, k = w.shape[0] // experts, w.shape[1]
    if isinstance(w, Spense):
        tiles = slice(number * n // ROWS, (number + 1) * n // ROWS)
        layout = (n, k), w.dtype, (n, w.sparse_shape[1])
        return Spense(*layout, w.sparse[tiles], w.dense[tiles]).to_dense()
    rows = n // w.block[0]
    offsets = w.offsets[number * rows : (number + 1) * rows + 1]
    stored = slice(int(offsets[0]), int(offsets[-1]))
    return Bsr((n, k), offsets - offsets[0], w.columns[stored], w.values[stored]).to_dense()


# ---- the reference on a CPU ----


def _in_torch(w: Weight, call: Call, config: NoConfig) -> Product:
    """Plan a dense product in torch for each expert that has rows."""
    activation, columns = None, None
    if isinstance(call, ExpertsCall):
        activation, columns = call.activation, call.sparse_shape[1]

    def of_expert(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.T
        if activation is None:
            return y
        gate, up = parted(y.T)
        return (ACTIVATIONS[activation](gate) * up).T

    def run(x: Tensor, ends: Tensor, *tensors: Tensor, out: Tensor | None = None) -> Tensor:
        weight = weight_of(tensors, w.shape, call.dtype, columns)
        y = x.new_zeros(len(x), call.shape[0] // (1 if activation is None else 2))
        first = 0
        with torch.autocast("cpu", enabled=False):
            for number, end in enumerate(ends.flatten().tolist()):
                if end > first:
                    y[first:end] = of_expert(x[first:end], expert_of(weight, number, call.experts))
                first = end
        return y if out is None else out.copy_(y)

    return Product(run)


def _one_choice(w: Any, call: Call) -> Sequence[NoConfig]:
    return [NoConfig()]


_IN_TORCH = Engine(
    op="experts",
    consumes="spense",
    device="cpu",
    name="torch",
    choices=_one_choice,
    plan=_in_torch,
    bind=experts_wgmma.bind,
)
