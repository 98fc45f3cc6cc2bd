"""Block-sparse attention as a function of tensors, and as a layer.

    o = sparsebench.attention(q, k, v, mask)

The mask lists the blocks of keys that each block of queries attends to (formats/block_mask.py). The
first call with a mask and sizes plans its kernels, and may time some (_attention_engines.py); the
plans stay with the mask, so reuse it. Gradients flow to q, k and v. Calls can be compiled and
captured.
"""

from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.nn._attention_op import (
    attend_recorded,
    recordings_of,
    require_operands,
)


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float | None = None
) -> Tensor:
    """Return softmax(scale Q K.T) V over the elements that a mask allows, shaped like q.

    q      [batch, S_q, H, D], or [S_q, H, D] for one sequence; fp16, bf16 or fp32
    k, v   [batch, S_kv, H_kv, D], or [S_kv, H_kv, D]; H is a multiple of H_kv
    mask   for the same sequences and tokens; H is a multiple of its lists
    scale  factor of the scores, above 0; by default D ** -0.5

    The output of a query without an allowed key is 0. A block that no query selects affects no
    result, even if it holds NaN. Raises Unsupported.
    """
    o, _ = _results(q, k, v, mask, scale)
    return o[0] if q.dim() == 3 else o


def attention_and_lse(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return `attention`, and the natural logarithm of each row's sum, fp32 [batch, H, S_q].

    Rows without an allowed key have -inf. The second result has no gradient; [H, S_q] for one
    sequence. Raises Unsupported.
    """
    o, lse = _results(q, k, v, mask, scale)
    lse = lse.view(o.shape[0], o.shape[2], o.shape[1])
    return (o[0], lse[0]) if q.dim() == 3 else (o, lse)


def _results(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None
) -> tuple[Tensor, Tensor]:
    """Return O [batch, S_q, H, D] and the LSE [batch * H, S_q]. Raises Unsupported."""
    q, k, v = (x.unsqueeze(0) if x.dim() == 3 else x for x in (q, k, v))
    if not isinstance(mask, BlockMask):
        raise Unsupported(f"attention: expected a BlockMask, found {type(mask).__name__}")
    given = scale if scale is None else float(scale)
    eager = q.is_cuda and not torch.compiler.is_compiling()
    recordings = recordings_of(mask, given) if eager else None
    if recordings is not None and (fast := recordings.replay(q, k, v)) is not None:
        o, lse = fast
        return o, lse
    require_operands(q, k, v, mask)
    factor = q.shape[3] ** -0.5 if given is None else given
    if not factor > 0:
        raise Unsupported(f"attention: expected a scale above 0, found {scale}")
    return attend_recorded(recordings, q, k, v, mask, factor)


class BlockSparseAttention(nn.Module):
    """Multi-head self-attention whose mask is an argument of each call.

    features  of the input and the output
    heads     query heads, each of features / heads
    kv_heads  key heads, by default as many
    """

    def __init__(
        self,
        features: int,
        heads: int,
        kv_heads: int | None = None,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Make the projections. Raises Unsupported if heads do not divide the features."""
        super().__init__()
        kv_heads = kv_heads or heads
        if heads < 1 or kv_heads < 1 or features % heads or heads % kv_heads:
            expected = "features a multiple of heads, and heads of kv_heads, each at least 1"
            sizes = f"{features}, {heads} and {kv_heads}"
            raise Unsupported(f"BlockSparseAttention: expected {expected}, found {sizes}")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, features // heads
        factory = {"bias": bias, "device": device, "dtype": dtype}
        self.q = nn.Linear(features, features, **factory)
        self.k = nn.Linear(features, kv_heads * self.head_dim, **factory)
        self.v = nn.Linear(features, kv_heads * self.head_dim, **factory)
        self.out = nn.Linear(features, features, **factory)

    def forward(self, x: Tensor, mask: BlockMask) -> Tensor:
        """Return the attention of x [..., tokens, features], shaped like x. Raises Unsupported."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q, self.k, self.v)
        )
        projected: Tensor = self.out(attention(q, k, v, mask).flatten(-2))
        return projected

    def extra_repr(self) -> str:
        """Return the heads."""
        return f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}"
