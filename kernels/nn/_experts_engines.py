"""The engines of a mixture's experts (experts.py), and the plans that layers share.

    2:4       GPU of compute capability 9.0              experts_wgmma: fp16, bf16
              its dX                                     torch's grouped product: bf16
    blocks    GPU of compute capability 8.0 and newer    experts_triton: fp16, bf16
              dX                                         experts_triton, of the transposed experts
              dW                                         experts_triton_wgrad
              CPU                                        dense products in torch, as a reference

Both also compute act(G) * U. W has all experts one below the other. Layers of equal sizes share
their plans, because a plan does not depend on the values of W, nor on where blocks are. Only dW
does: its plans and the order of transposed blocks are kept with the index (_bsr_pattern.py).

dX of 2:4 experts writes W out as a dense matrix, multiplies and frees it, as _spense_op.py does:
tensor cores need 2:4 along the axis that is summed over, and here that is n.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
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
from sparsebench.kernels.bsr import experts_triton, experts_triton_wgrad
from sparsebench.kernels.bsr.experts_triton import BlockExpertsCall, turned
from sparsebench.kernels.nn._bsr_pattern import PlannedPattern, pattern_of
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.spense._written_out import written_out
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
    activation  if set, W is gate and up, in blocks one above the other and in 2:4 in turn
                (spense_ffn.py); returns H [rows, n / 2]

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
    return experts_triton.call_of(w, experts, rows, w.values.dtype, activation)


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
    kernel = experts_wgmma.KERNEL if isinstance(call, ExpertsCall) else experts_triton.KERNEL
    engine = engine_of(call, device, kernel, _IN_TORCH)
    return Operator((engine,), lambda call: w, problem, device)


def engine_of(call: Call, device: torch.device, kernel: Engine, reference: Engine) -> Engine:
    """Return the kernel, or on a CPU the reference, if it runs a call. Raises Unsupported."""
    if device.type == "cpu":
        return reference
    if call.dtype not in ON_A_GPU:
        raise Unsupported(f"expected experts in fp16 or bf16 on a GPU, found {call.dtype}")
    refuse(kernel.unsupported(Problem("experts", {"dtype": NAMES[call.dtype]}), device))
    return kernel


# ---- gradients ----


def input_gradient(w: Weight, experts: int, dy: Tensor, ends: Tensor) -> Tensor:
    """Return dX [rows, k] of dY [rows, n]; rows after the last end may have any value.

    Raises Unsupported.
    """
    if isinstance(w, Bsr):
        key = "turned experts", experts, w.shape, w.block
        pattern = pattern_of(w.offsets, w.columns)
        order, offsets, columns = pattern.made_once(key, partial(turned, w, experts))
        values = w.values[order].transpose(1, 2).contiguous()
        shape = experts * w.shape[1], w.shape[0] // experts
        return multiply(Bsr(shape, offsets, columns, values), experts, dy, ends)
    n, k = w.shape[0] // experts, w.shape[1]
    if dy.is_cuda:
        if w.dtype != torch.bfloat16:  # torch loops over experts, and waits for the ends
            raise Unsupported(f"expected bf16 for a gradient of 2:4 experts, found {w.dtype}")
        dx: Tensor = torch._grouped_mm(dy, written_out(w).view(experts, n, k), offs=ends[0])
        return dx
    dx = dy.new_zeros(len(dy), k)
    for number, (first, end) in enumerate(_spans(ends)):
        dx[first:end] = dy[first:end] @ expert_of(w, number, experts)
    return dx


def weight_gradient(w: Bsr, experts: int, dy: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """Return dW [blocks, r, c] of dY [rows, n] and X [rows, k]. Raises Unsupported."""
    if not len(w.columns):
        return w.values.new_empty(w.values.shape)
    call = experts_triton.call_of(w, experts, len(x), x.dtype)
    pattern = pattern_of(w.offsets, w.columns)
    key = "gradient of experts", call._replace(m=0), w.shape
    operator = pattern.made_once(key, partial(_gradient_operator, w.shape, pattern, call))
    dw = OperatorCall(operator, call, (dy, x, ends))
    values = dw.run(dw.select(None).product)()
    assert isinstance(values, Tensor)
    return values


def _gradient_operator(
    shape: tuple[int, int], pattern: PlannedPattern, call: BlockExpertsCall
) -> Operator:
    offsets, columns = pattern.offsets, pattern.columns
    blocks = columns.new_empty((1, 1, 1)).expand(len(columns), *call.block)  # never read
    w = Bsr(shape, offsets, columns, blocks)
    engine = engine_of(call, pattern.device, experts_triton_wgrad.KERNEL, _GRADIENT_IN_TORCH)
    problem = partial(experts_triton.problem_of, op="bsr.experts_wgrad")
    return Operator((engine,), lambda call: w, problem, pattern.device)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    """Return the first row and the last one + 1 of each expert. Waits for the device."""
    stops: list[int] = ends.flatten().tolist()
    return list(zip([0, *stops], stops, strict=False))


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
    activation, columns = call.activation, None
    if isinstance(call, ExpertsCall):
        columns = call.sparse_shape[1]

    def of_expert(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight.T
        if activation is None:
            return y
        gate, up = y.T.chunk(2) if columns is None else parted(y.T)
        return (ACTIVATIONS[activation](gate) * up).T

    def run(x: Tensor, ends: Tensor, *tensors: Tensor, out: Tensor | None = None) -> Tensor:
        weight = weight_of(tensors, w.shape, call.dtype, columns)
        y = x.new_zeros(len(x), call.shape[0] // (1 if activation is None else 2))
        with torch.autocast("cpu", enabled=False):
            for number, (first, end) in enumerate(_spans(ends)):
                if end > first:
                    y[first:end] = of_expert(x[first:end], expert_of(weight, number, call.experts))
        return y if out is None else out.copy_(y)

    return Product(run)


def _gradient_in_torch(w: Bsr, call: BlockExpertsCall, config: NoConfig) -> Product:
    """Plan a dense product in torch for each expert, of which the blocks are kept."""

    def run(dy: Tensor, x: Tensor, ends: Tensor, out: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            dw = torch.cat([dy[first:end].T @ x[first:end] for first, end in _spans(ends)])
        values = w.sample(dw).values
        return values if out is None else out.copy_(values)

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
_GRADIENT_IN_TORCH = Engine(
    op="experts_wgrad",
    consumes="bsr",
    device="cpu",
    name="torch",
    choices=_one_choice,
    plan=_gradient_in_torch,
    bind=experts_triton_wgrad.bind,
)
