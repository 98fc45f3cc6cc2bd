"""Block-sparse attention as a function of tensors.

    o = sparsebench.attention(q, k, v, mask)

The mask lists the blocks of keys that each block of queries attends to (formats/block_mask.py). The
first call with a mask and sizes plans its kernels, and may time some (_attention_op.py); the
plans stay with the mask, so reuse it. Gradients flow to q, k and v. Calls can be compiled and
captured.
"""

import torch
from torch import Tensor

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
