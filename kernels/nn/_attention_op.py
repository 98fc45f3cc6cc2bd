"""The torch operators of block-sparse attention, and their gradients.

    O, LSE      = attend(q, k, v, mask)                 block_sparse_attention
    dQ, dK, dV  = gradients(q, k, v, O, LSE, dO, mask)  block_sparse_attention_backward

q and O are [batch, S_q, H, D], k and v [batch, S_kv, H_kv, D], and LSE [batch * H, S_q] in fp32.
The operators are opaque to torch.compile and torch.export. They take a mask as sizes and tensors:

    offsets, columns, ...   those of formats/block_mask.py
    elements                [batch, lists, S_q, S_kv]: the operator lists the blocks (_elements.py)
    none                    every element is allowed

Engines, in the order in which they are tried:

    Hopper, 16 bits
      forward    attention_wgmma, attention_triton
      backward   attention_wgmma_backward, attention_triton_backward
    GPU from compute capability 8.0, and TRITON_INTERPRET=1
      forward    attention_triton
      backward   attention_triton_backward
    any of these, up to 16 queries of a sequence
      forward    attention_split, attention_triton
    any of these, a list for each query and fewer than 16 heads
      first      attention_gathered, attention_gathered_backward
    CPU          torch, with every element of the mask: a reference for small masks

All of them give the same bits each time. Calls of one plan must run one after the other on the
device, as they do on one stream, because some kernels keep counters. Plans are an attribute of the
tensor `columns`, and are made again if torch counts a write to a tensor of the mask. Eager calls
that repeat are recorded, and run without Python, backward included (front.py).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from triton import knobs

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import is_capturing
from sparsebench.kernels._common.front import (
    BackwardProduct,
    Conditions,
    Derivative,
    Front,
    Guard,
    Recordings,
    Signature,
    record,
)
from sparsebench.kernels._common.operator import Engine, Operator
from sparsebench.kernels._common.stamp import by_stamp, stamp_of
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import (
    ALIGNMENT,
    aligned,
    device_guard,
    is_current,
    is_traced,
)
from sparsebench.kernels._kernel import NAMES, refuse
from sparsebench.kernels.attention import _call as of_attention
from sparsebench.kernels.attention import (
    attention_gathered,
    attention_gathered_backward,
    attention_split,
    attention_triton,
    attention_triton_backward,
    attention_wgmma,
    attention_wgmma_backward,
)
from sparsebench.kernels.attention._call import AttentionCall
from sparsebench.kernels.attention._in_torch import IN_TORCH
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import MOST_DEPTH, AttentionShape, unsupported
from sparsebench.kernels.attention._shared_plans import Sizes, shared_plans_of
from sparsebench.kernels.nn._elements import (
    mask_of_elements,
    refused_rows,
    stamp_of_elements,
    whole_mask,
)

# Heads of a list that fill a tile of one query: 3.07 ms at 16k tokens, 64/4 heads; gathered, 5.13.
WHOLE_TILE = 16
ENGINES = (
    *(attention_split.KERNEL, attention_triton.KERNEL, attention_triton_backward.KERNEL),
    *(attention_wgmma.KERNEL, attention_wgmma_backward.KERNEL),
    *(attention_gathered.KERNEL, attention_gathered_backward.KERNEL),
)


def operator_of(mask: BlockMask) -> Operator:
    return of_attention.operator_of(mask, ENGINES, partial(likeliest, mask))


def likeliest(mask: BlockMask, call: AttentionCall) -> Sequence[Engine]:
    """Return the engines that may run a call, the likeliest first. Raises Unsupported."""
    device = mask.columns.device
    if device.type == "cpu" and not knobs.runtime.interpret:
        return [IN_TORCH[call.op]]
    refuse(unsupported(call.problem, device))
    of_queries = attention_gathered.KERNEL
    if call.op == "attention_backward":
        of_queries = attention_gathered_backward.KERNEL
        engines = [attention_wgmma_backward.KERNEL, attention_triton_backward.KERNEL]
    elif call.shape.q_tokens <= attention_split.MOST_QUERIES:
        return [attention_split.KERNEL, attention_triton.KERNEL]
    else:
        engines = [attention_wgmma.KERNEL, attention_triton.KERNEL]
    engines = engines[1:] if engines[0].unsupported(call.problem, device) else engines
    shared = shared_heads(mask, call.shape.heads, call.shape.kv_heads)
    return [of_queries, *engines] if call.shape.block[0] == 1 and shared < WHOLE_TILE else engines


ATTRIBUTE = "_sparsebench_attention"  # attribute of the tensor `columns`
OPERANDS = "q", "k", "v", "o", "lse", "do"
SIGNATURE = Signature(
    arguments=("q", "k", "v"),
    results=("o", "lse"),
    backward=(BackwardProduct(OPERANDS, ("q", "k", "v")),),
    exact=True,
)
SELECTED = Signature(
    arguments=("q", "k", "v", "columns"),
    results=("o", "lse"),
    backward=(BackwardProduct(("q", "k", "v", "columns", "o", "lse", "do"), ("q", "k", "v")),),
    exact=True,
)
RECORDINGS = "_sparsebench_recordings"  # of a mask or of SharedPlans: recorded calls by scale
SCALES = 16  # of a mask; the oldest makes room


def plans_of(mask: BlockMask) -> Operator:
    """Return the plans of a mask as it is now. Raises Unsupported for an inference tensor."""
    make, bits = partial(operator_of, mask), id(mask.bits)
    plans: Operator = by_stamp(mask, "attention", ATTRIBUTE, make, mask.columns, bits)
    return plans


def _call(
    op: Literal["attention", "attention_backward"],
    q: Tensor,
    k: Tensor,
    block: tuple[int, int],
    scale: float,
) -> AttentionCall:
    batch, s_q, heads, d = q.shape
    sizes = batch, s_q, k.shape[1], heads, k.shape[2], d, block
    return AttentionCall(op, AttentionShape(*sizes, NAMES[q.dtype]), scale)


def _run(
    call: AttentionCall, mask: BlockMask | Tensor, operands: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Run the planned kernel on rows of tokens; the first call plans it.

    mask  or its elements, on a GPU
    """
    flat = [aligned(x.flatten(0, 1).flatten(1) if x.dim() == 4 else x) for x in operands]
    with device_guard(flat[0].device):
        backward = call.op == "attention_backward"
        if isinstance(mask, Tensor):
            x = mask if mask.stride(3) == 1 and not mask.data_ptr() % ALIGNMENT else aligned(mask)
            plans = shared_plans_of(Sizes.of_elements(x, call.shape.block), operator_of)
            plans.load(x, transposed=backward, stamp=stamp_of_elements(mask))
            operator = plans.operator
        elif mask.keep and mask.columns.is_cuda:
            plans = shared_plans_of(Sizes.of(mask), operator_of)
            plans.load(aligned(mask.columns), transposed=backward, bits=mask.bits)
            operator = plans.operator
        elif call not in (operator := _operator(mask)).plans and is_capturing(flat[0]):
            expected = "call it once before capturing a CUDA graph"  # to list a mask waits
            raise RuntimeError(f"{call} is not planned: {expected}")
        selected = operator.select(call, lambda product: lambda: product.run(*flat))
        run: Any = selected.product.run  # of several results
        results: Sequence[Tensor] = run(*flat)
    return results


def _operator(mask: BlockMask) -> Operator:
    """Return the plans of a mask, or of all masks of its sizes. A CPU plans each selection anew."""
    if not mask.keep:
        return plans_of(mask)
    on_gpu = mask.columns.is_cuda
    return shared_plans_of(Sizes.of(mask), operator_of).operator if on_gpu else operator_of(mask)


def _forward(
    call: AttentionCall, mask: BlockMask | Tensor, q: Tensor, k: Tensor, v: Tensor
) -> list[Tensor]:
    o, lse = _run(call, mask, [q, k, v])
    return [o.view(q.shape), lse]


def _gradients(call: AttentionCall, mask: BlockMask | Tensor, *operands: Tensor) -> list[Tensor]:
    """Return dQ, dK and dV of the OPERANDS."""
    parts = _run(call, mask, operands)
    return [part.view(x.shape) for part, x in zip(parts, operands[:3], strict=True)]


def require_operands(
    q: Tensor, k: Tensor, v: Tensor, sizes: tuple[int, int, int], lists: int, device: torch.device
) -> None:
    """Raise Unsupported with one line unless these operands fit each other and the mask.

    sizes  of the mask: sequences, queries and keys
    """
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        expected = "q [batch, S_q, H, D], and k and v alike [batch, S_kv, H_kv, D]"
        raise Unsupported(f"attention: expected {expected}, found {shapes}")
    batch, s_q, heads, d = q.shape
    if (batch, s_q, k.shape[1]) != sizes or k.shape[0] != batch:
        expected = "{} sequences of {} queries and {} keys as in the mask".format(*sizes)
        raise Unsupported(f"attention: expected {expected}, found {shapes}")
    grouped = 0 not in (heads, k.shape[2]) and heads % k.shape[2] == 0
    if k.shape[3] != d or not grouped or not 0 < d <= MOST_DEPTH:
        expected = f"heads a multiple of key heads, of one size from 1 to {MOST_DEPTH}"
        raise Unsupported(f"attention: expected {expected}, found {shapes}")
    if heads % lists:
        expected = f"heads a multiple of the mask's {lists} lists"
        raise Unsupported(f"attention: expected {expected}, found {heads}")
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 or q.dtype not in NAMES:
        names = ", ".join(sorted(map(str, dtypes)))
        expected = "fp16, bf16 or fp32, the same for q, k and v"
        raise Unsupported(f"attention: expected {expected}, found {names}")
    devices = sorted({str(x.device) for x in (q, k, v)} | {str(device)})
    if len(devices) > 1:
        raise Unsupported(f"attention: expected one device, found {', '.join(devices)}")


# ---- the operators ----


def _arguments(mask: BlockMask) -> tuple[list[Tensor], list[int]]:
    """Return a mask as the operators take it: its arrays and sizes."""
    arrays = [mask.offsets, mask.columns, *(t for t in (mask.bits, mask.slots) if t is not None)]
    sizes = *mask.tokens, *mask.block, mask.batch, mask.lists
    return arrays, [*sizes, int(mask.causal), int(mask.bits is not None), mask.keep]


def _mask(arrays: list[Tensor], sizes: list[int], device: torch.device) -> BlockMask | Tensor:
    s_q, s_kv, b_q, b_k, batch, lists, causal, has_bits, keep = sizes
    if not arrays:
        return whole_mask((s_q, s_kv), b_q, batch, bool(causal), device)
    if len(arrays) == 1:  # a CPU waits for nothing
        return arrays[0] if device.type == "cuda" else mask_of_elements(arrays[0], b_q)
    offsets, columns, *others = arrays
    shape = batch * lists * -(-s_q // b_q), -(-s_kv // b_k)
    geometry = (s_q, s_kv), (b_q, b_k), batch, lists, bool(causal)
    bits = others[0] if has_bits else None
    slots = others[-1] if len(others) > has_bits else None
    return BlockMask(shape, *geometry, offsets, columns, bits, slots, keep=keep)


def _attend(
    q: Tensor, k: Tensor, v: Tensor, arrays: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor]:
    """Return O [batch, S_q, H, D] and the LSE [batch * H, S_q]. Raises Unsupported."""
    mask = _mask(arrays, sizes, q.device)
    o, lse = _forward(_call("attention", q, k, (sizes[2], sizes[3]), scale), mask, q, k, v)
    if isinstance(mask, Tensor) and (refused := refused_rows(mask, q.shape[2])) is not None:
        o.masked_fill_(refused, torch.nan)
    return o, lse


def _differentiate(
    operands: list[Tensor], arrays: list[Tensor], sizes: list[int], scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV, shaped like q, k and v, of the OPERANDS. Raises Unsupported."""
    mask = _mask(arrays, sizes, operands[0].device)
    block = sizes[2], sizes[3]
    call = _call("attention_backward", operands[0], operands[1], block, scale)
    dq, dk, dv = _gradients(call, mask, *operands)
    return dq, dk, dv


def _attend_sizes(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, s_q, heads, _d = q.shape
    return q.new_empty(q.shape), q.new_empty(batch * heads, s_q, dtype=torch.float32)


def _gradients_sizes(operands: list[Tensor], *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_rest = operands
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, arrays, ctx.sizes, ctx.scale = inputs
    ctx.save_for_backward(q, k, v, *output, *arrays)
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Any, ...]:
    q, k, v, o, lse, *arrays = ctx.saved_tensors
    parts = gradients([q, k, v, o, lse, do], arrays, ctx.sizes, ctx.scale)
    return *parts, [None] * len(arrays), None, None


NAME = "block_sparse_attention"
gradients = torch_operator(f"{NAME}_backward", _differentiate, _gradients_sizes)
attend = torch_operator(NAME, _attend, _attend_sizes, save=_save, backward=_backward)


# ---- calls without Python ----


def recordings_of(mask: BlockMask, scale: float | None) -> Recordings:
    """Return the recorded calls of a mask, or of all of its sizes, with a factor of the scores."""
    holder = shared_plans_of(Sizes.of(mask), operator_of) if mask.keep else mask
    if (by_scale := holder.__dict__.get(RECORDINGS)) is None:
        by_scale = {}
        object.__setattr__(holder, RECORDINGS, by_scale)
    if scale not in by_scale:
        if len(by_scale) >= SCALES:
            by_scale.pop(next(iter(by_scale)))
        by_scale[scale] = Recordings(SELECTED if mask.keep else SIGNATURE)
    recordings: Recordings = by_scale[scale]
    return recordings


def arguments_of(mask: BlockMask, *operands: Tensor) -> tuple[Tensor, ...]:
    """Return what the recordings of a mask read in each call."""
    return (*operands, mask.columns) if mask.keep else operands


def attend_recorded(
    recordings: Recordings | None, q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float
) -> tuple[Tensor, Tensor]:
    """Return `attend`, and record the call if it repeats the call before it.

    recordings  of the mask with this scale; None for calls that are compiled, or on a CPU
    """
    in_python: Callable[[], tuple[Tensor, Tensor]] = partial(
        attend, q, k, v, *_arguments(mask), scale
    )
    if torch.compiler.is_compiling() or is_traced() or recordings is None:
        return in_python()
    if not is_current(q.device) or not q.numel():
        return in_python()
    call = _call("attention", q, k, mask.block, scale)
    arrays = {} if mask.keep else mask.arrays()
    guards = [Guard(None, name, array) for name, array in arrays.items()]

    def planned(*operands: Tensor) -> list[Tensor]:
        return _forward(call, _with_columns(mask, operands[3:]), *operands[:3])

    run = planned if call in _operator(mask).plans else None
    conditions = Conditions(guards, derivative=_derivative(mask, scale))
    arguments = arguments_of(mask, q, k, v)
    results: tuple[Tensor, Tensor] = recordings.call(arguments, conditions, run, in_python)
    return results


def attend_on_tape(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float) -> list[Tensor]:
    """Return `attend` as a part of a whole call (_whole_calls.py)."""
    call = _call("attention", q, k, mask.block, scale)
    launches = call in _operator(mask).plans and not (mask.keep and mask.bits is not None)
    on_tape(owners=() if mask.keep else (mask,), complete=launches)  # torch copies those bits
    return _forward(call, mask, q, k, v)


def _with_columns(mask: BlockMask, columns: Sequence[Tensor]) -> BlockMask:
    """Return the mask, or the one of its sizes that has these columns."""
    return replace(mask, columns=columns[0]) if columns else mask


def _derivative(mask: BlockMask, scale: float) -> Derivative:
    """Return how a recorded call is differentiated."""
    stamp = None if mask.keep else stamp_of(mask, "attention")

    def run(
        front: Front | None, do: Tensor, saved: Sequence[Tensor | None], _: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        if stamp and stamp_of(mask, "attention") != stamp:
            raise RuntimeError("expected the mask as forward read it, found it modified since")
        operands = [*(t for t in saved if t is not None), do]
        columns = operands[3:-3]
        call = _call("attention_backward", operands[0], operands[1], mask.block, scale)
        none = [None] * len(columns)  # columns have no gradient
        if torch.is_grad_enabled() or is_traced():
            rest = [*operands[:3], *operands[-3:]]
            parts = gradients(rest, *_arguments(_with_columns(mask, columns)), scale)
            return [*parts, *none]

        def planned(*operands: Tensor) -> list[Tensor]:
            of = _with_columns(mask, operands[3:-3])
            return _gradients(call, of, *operands[:3], *operands[-3:])

        ready = front if call in _operator(mask).plans else None
        return [*record(ready, 1, [*map(aligned, operands)], planned), *none]

    return run
