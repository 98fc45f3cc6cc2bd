"""The calls of a block mask, and the engines that run them in suites.

    attention            O, LSE      = softmax(scale Q K.T) V            of q, k and v
    attention_backward   dQ, dK, dV  = gradients of O                    of q, k, v, o, lse and do

All operands are dense and token-major: q, o and do [batch * S_q, H * D], k and v [batch * S_kv,
H_kv * D], and lse fp32 [batch * H, S_q]. A plan depends on the mask and the sizes. Gradients are
new tensors, or `out` holds them one below the other, as rows of D elements.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.choices import density_of
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.operator import Engine, NoConfig, Operator, OperatorCall
from sparsebench.kernels._common.product import MOST_CONFIGS, Product
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.attention._lists import (
    MaskLists,
    lists_of,
    shared_heads,
    transposed_lists_of,
)
from sparsebench.kernels.attention._shapes import AttentionShape
from sparsebench.results.record import Problem

Op = Literal["attention", "attention_backward"]


class AttentionCall(NamedTuple):
    """Sizes of q, k and v, and the factor of the scores. With the mask, they determine the plan."""

    op: Op
    shape: AttentionShape
    scale: float

    @property
    def problem(self) -> Problem:
        """Return what `unsupported` of an engine reads."""
        fields: dict[str, Any] = {
            "m": self.shape.q_tokens,
            "block": self.shape.block,
            "dtype": self.shape.dtype,
            "head_dim": self.shape.head_dim,
            "scale": self.scale,
        }
        return Problem(self.op, fields)

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of q, k and v."""
        return DTYPES[self.shape.dtype]

    def gradients(self, q: Tensor, out: Tensor | None) -> list[Tensor]:
        """Return memory for dQ, dK and dV as rows of D elements, new or in `out`."""
        shape, depth = self.shape, self.shape.head_dim
        q_rows = shape.batch * shape.q_tokens * shape.heads
        kv_rows = shape.batch * shape.kv_tokens * shape.kv_heads
        heights = [q_rows, kv_rows, kv_rows]
        if out is not None:
            return [*out.split(heights)]
        return [q.new_empty(height, depth) for height in heights]


@dataclass(eq=False)
class ListedMask:
    """A mask and the lists that kernels derive from it, each once, for all their plans."""

    mask: BlockMask

    @cached_property
    def lists(self) -> MaskLists:
        """Return the lists of key blocks."""
        return lists_of(self.mask)

    @cached_property
    def _transposed(self) -> dict[int, MaskLists]:
        return {}

    def transposed(self, kv_heads: int) -> MaskLists:
        """Return the lists of query blocks."""
        if kv_heads not in self._transposed:
            self._transposed[kv_heads] = transposed_lists_of(self.mask, kv_heads)
        return self._transposed[kv_heads]

    def shared(self, shape: AttentionShape) -> int:
        """Return how many query heads in turn have one list and one key head."""
        return shared_heads(self.mask, shape.heads, shape.kv_heads)


def operator_of(
    mask: BlockMask,
    engines: tuple[Engine, ...],
    likeliest: Callable[[AttentionCall], Sequence[Engine]] | None = None,
) -> Operator:
    """Return the plans of a mask."""
    listed = ListedMask(mask)

    def problem(call: AttentionCall) -> dict[str, Any]:
        shape = call.shape
        heads = {"heads": shape.heads, "kv_heads": shape.kv_heads, "head_dim": shape.head_dim}
        kinds = {"causal": mask.causal, "bits": mask.bits is not None, "lists": mask.lists}
        sizes = {"batch": shape.batch, "m": shape.batch * shape.q_tokens}
        sizes |= {"n": shape.heads * shape.head_dim, "k": shape.kv_tokens}
        layout = {
            "dtype": shape.dtype,
            "block": list(mask.block),
        }  # a list, as lines of JSON have it
        rows = mask.shape[0] * mask.block[0]
        density = density_of(rows, shape.kv_tokens, mask.block, len(mask.columns))
        return {"op": call.op, **heads, **kinds, **sizes, **layout, "density": density}

    return Operator(engines, lambda call: listed, problem, mask.columns.device, likeliest)


def attention_engine(
    name: str,
    op: Op,
    choices: Callable[[ListedMask, AttentionCall], Sequence[Any]],
    plan: Callable[..., Product],
    unsupported: Callable[[Problem, torch.device], str | None],
    config: type = NoConfig,
) -> Engine:
    """Return an engine of this format; at most MOST_CONFIGS of its choices are timed."""

    given = name, op, "block_mask", config, choices, plan, unsupported
    return gpu_engine(*given, bind, most=MOST_CONFIGS)


def bind(operands: Operands, engines: tuple[Engine, ...]) -> OperatorCall:
    """Return the call of a suite's operands. By default the scores' factor is head_dim ** -0.5."""
    problem, mask, a = operands.problem, operands.weights["mask"], operands.activations
    assert isinstance(mask, BlockMask)
    heads, head_dim, scale = problem["heads"], problem["head_dim"], problem["scale"]
    sizes = heads, a["k"].shape[1] // head_dim, head_dim
    shape = AttentionShape(mask.batch, *mask.tokens, *sizes, mask.block, problem["dtype"])
    factor = head_dim**-0.5 if scale is None else float(scale)
    operator = operator_of(mask, engines)
    if problem.op == "attention":
        call = AttentionCall("attention", shape, factor)
        return OperatorCall(operator, call, (a["q"], a["k"], a["v"]), result=lambda both: both[0])
    call = AttentionCall("attention_backward", shape, factor)
    tensors = tuple(a[name] for name in ("q", "k", "v", "o", "lse", "do"))
    rows = (a["q"].numel() + 2 * a["k"].numel()) // head_dim
    out = a["q"].new_empty(rows, head_dim)
    return OperatorCall(operator, call, tensors, result=lambda parts: out, out=out)
