"""The torch operators of block-sparse attention, and their gradients.

    O, LSE      = attend(q, k, v, mask)                 block_sparse_attention
    dQ, dK, dV  = gradients(q, k, v, O, LSE, dO, mask)  block_sparse_attention_backward

q and O are [batch, S_q, H, D], k and v [batch, S_kv, H_kv, D], and LSE [batch * H, S_q] in fp32. A
mask is passed as its tensors and sizes (formats/block_mask.py), so the operators are opaque to
torch.compile and torch.export. Plans are an attribute of the tensor `columns`, and are made again
if torch counts a write to a tensor of the mask.
"""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import Operator
from sparsebench.kernels._kernel import NAMES as NAME_OF
from sparsebench.kernels.attention._call import AttentionCall
from sparsebench.kernels.attention._shapes import MOST_DEPTH, Shape
from sparsebench.kernels.nn._attention_engines import operator_of
from sparsebench.kernels.nn._stamp import Stamp, arrays_of, stamp_of

ATTRIBUTE = "_sparsebench_attention"  # attribute of the tensor `columns`
ALIGNMENT = 16  # bytes, for TMA


class Plans(NamedTuple):
    """The plans of a mask, its stamp and `bits` at that time, and its arrays."""

    stamp: tuple[Stamp, int]
    operator: Operator
    arrays: list[Tensor]

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Pickle as an empty object of a type that torch.load accepts."""
        return OrderedDict, ()


def plans_of(mask: BlockMask) -> Operator:
    """Return the plans of a mask as it is now. Raises Unsupported for an inference tensor."""
    stamp = stamp_of(mask, "attention"), id(mask.bits)
    plans = getattr(mask.columns, ATTRIBUTE, None)
    if not isinstance(plans, Plans) or plans.stamp != stamp:
        plans = Plans(stamp, operator_of(mask), arrays_of(mask))
        setattr(mask.columns, ATTRIBUTE, plans)
    return plans.operator


def _run(
    op: Any, mask: BlockMask, operands: list[Tensor], q: Tensor, k: Tensor, scale: float
) -> Any:
    """Run the planned kernel on operands [rows, columns]; the first call plans it."""
    batch, s_q, heads, d = q.shape
    sizes = batch, s_q, k.shape[1], heads, k.shape[2], d, mask.block
    call = AttentionCall(op, Shape(*sizes, NAME_OF[q.dtype]), scale)
    flat = [readable(x) for x in operands]
    operator = plans_of(mask)
    selected = operator.plans.get(call)
    if selected is None:
        selected = operator.select(call, lambda product: lambda: product.run(*flat))
    return selected.product.run(*flat)


def readable(x: Tensor) -> Tensor:
    """Return q, k or v as rows of tokens, or the LSE, in a layout that every kernel reads."""
    flat = x.reshape(x.shape[0] * x.shape[1], -1) if x.dim() == 4 else x
    flat = flat.contiguous()
    return flat.clone() if flat.data_ptr() % ALIGNMENT else flat


def require_operands(q: Tensor, k: Tensor, v: Tensor, mask: BlockMask) -> None:
    """Raise Unsupported with one line unless these operands fit each other and the mask."""
    shapes = f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or k.shape != v.shape:
        expected = "q [batch, S_q, H, D], and k and v alike [batch, S_kv, H_kv, D]"
        raise Unsupported(f"attention: expected {expected}, found {shapes}")
    batch, s_q, heads, d = q.shape
    sizes = mask.batch, *mask.tokens
    if (batch, s_q, k.shape[1]) != sizes or k.shape[0] != batch:
        expected = "{} sequences of {} queries and {} keys as in the mask".format(*sizes)
        raise Unsupported(f"attention: expected {expected}, found {shapes}")
    if k.shape[3] != d or heads % k.shape[2] or d > MOST_DEPTH:
        expected = f"heads a multiple of key heads, of one size up to {MOST_DEPTH}"
        raise Unsupported(f"attention: expected {expected}, found {shapes}")
    if heads % mask.lists:
        expected = f"heads a multiple of the mask's {mask.lists} lists"
        raise Unsupported(f"attention: expected {expected}, found {heads}")
    dtypes = {q.dtype, k.dtype, v.dtype}
    if len(dtypes) > 1 or q.dtype not in NAME_OF:
        names = ", ".join(sorted(map(str, dtypes)))
        raise Unsupported(f"attention: expected one of fp16, bf16 and fp32, found {names}")
    devices = sorted({str(x.device) for x in (q, k, v, mask.columns)})
    if len(devices) > 1:
        raise Unsupported(f"attention: expected one device, found {', '.join(devices)}")


# ---- the operators ----


def _mask(
    offsets: Tensor,
    columns: Tensor,
    bits: Tensor | None,
    slots: Tensor | None,
    sizes: list[int],
) -> BlockMask:
    s_q, s_kv, b_q, b_k, batch, lists, causal = sizes
    return BlockMask(
        shape=(batch * lists * -(-s_q // b_q), -(-s_kv // b_k)),
        tokens=(s_q, s_kv),
        block=(b_q, b_k),
        batch=batch,
        lists=lists,
        causal=bool(causal),
        offsets=offsets,
        columns=columns,
        bits=bits,
        slots=slots,
    )


@torch.library.custom_op("sparsebench::block_sparse_attention", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    columns: Tensor,
    bits: Tensor | None,
    slots: Tensor | None,
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Return O [batch, S_q, H, D] and the LSE [batch * H, S_q]. Raises Unsupported."""
    mask = _mask(offsets, columns, bits, slots, sizes)
    o, lse = _run("attention", mask, [q, k, v], q, k, scale)
    return o.view(q.shape), lse


@torch.library.custom_op("sparsebench::block_sparse_attention_backward", mutates_args=())
def gradients(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    o: Tensor,
    lse: Tensor,
    do: Tensor,
    offsets: Tensor,
    columns: Tensor,
    bits: Tensor | None,
    slots: Tensor | None,
    sizes: list[int],
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dQ, dK and dV, shaped like q, k and v. Raises Unsupported."""
    mask = _mask(offsets, columns, bits, slots, sizes)
    parts = _run("attention_backward", mask, [q, k, v, o, lse, do], q, k, scale)
    dq, dk, dv = (part.view(x.shape) for part, x in zip(parts, (q, k, v), strict=True))
    return dq, dk, dv


@attend.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, s_q, heads, _d = q.shape
    return q.new_empty(q.shape), q.new_empty(batch * heads, s_q, dtype=torch.float32)


@gradients.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, offsets, columns, bits, slots, sizes, scale = inputs
    ctx.save_for_backward(q, k, v, *output, offsets, columns, bits, slots)
    ctx.mark_non_differentiable(output[1])
    ctx.sizes, ctx.scale = sizes, scale


def _backward(ctx: Any, do: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, o, lse, *mask = ctx.saved_tensors
    parts = gradients(q, k, v, o, lse, do, *mask, ctx.sizes, ctx.scale)
    return *parts, None, None, None, None, None, None


attend.register_autograd(_backward, setup_context=_save)
