"""VSA, video sparse attention: cubes of 4 x 4 x 4 tokens, and a coarse branch beside the kept ones.

    q_c, k_c, v_c = means of cubes, fp32, rounded to the dtype of q        A = scale · q_c k_c.T
    O = gate · softmax(A) v_c  +  attention(q, k, v, over the `keep` cubes of the highest A)

    video [T, H, W]     token (t, y, x)  ──>  cube (t/4, y/4, x/4), and place (t%4, y%4, x%4) in it

A cube is a block of 64 tokens. With `video`, tokens are those of a video row by row, and are
brought into the order of cubes and back, which moves q, k, v and O once more. A model that orders
its tokens once, by `in_cubes`, leaves `video` out if its sides are multiples of 4. Other videos are
padded to whole cubes: means are those of the real tokens, and bits of the mask leave out the rest.
Each head has a list, and no block is kept whatever its score. Not causal. Gradients flow through
both branches, and none through the choice. A NaN in a token reaches every query by the coarse one.
Source: arXiv 2505.13389, and video_sparse_attn in fastvideo_kernel/ops.py of hao-ai-lab/FastVideo,
which also rounds A, its softmax and the coarse output to bf16.
"""

from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import Unsupported
from sparsebench.kernels.attention._selecting import means
from sparsebench.kernels.attention.methods._method import Method, Scored

SIDE = 4
CUBE = SIDE**3


def score(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    block: int,
    causal: bool,
    bias: Tensor | None = None,
    video: Sequence[int] | None = None,
    gate: Tensor | float | None = None,
) -> Scored:
    """Return a list for each head, and a `finish` that adds the coarse branch.

    video  frames, rows and columns of tokens; None if tokens are whole cubes, one after the other
    gate   factor of the coarse branch: a number, or broadcast to q, in the caller's order of
           tokens; 1 by default
    """
    _require(q, k, block, causal, video, gate)
    keys, real, shape = None, None, q.shape
    if video is not None:
        q, k, v = (in_cubes(x, video) for x in (q, k, v))
        if any(side % SIDE for side in video):
            keys = in_cubes(q.new_ones(1, prod(video), 1), video).view(-1) != 0
            real = keys.view(-1, CUBE).sum(1)[:, None]
    pooled = [_rounded_means(x, real) for x in (q, k, v)]
    group = q.shape[2] // k.shape[2]
    q_c, k_c, v_c = pooled[0], *(x.repeat_interleave(group, 1) for x in pooled[1:])
    logits = (q_c @ k_c.mT) * scale
    coarse = (logits.softmax(-1) @ v_c).to(q.dtype).transpose(1, 2)  # [batch, cubes, heads, D]

    def finish(o: Tensor) -> Tensor:
        cubes, part = o.unflatten(1, (-1, CUBE)), coarse[:, :, None]
        if isinstance(gate, Tensor):
            rows = gate.to(o.dtype).expand(shape)
            rows = rows if video is None else in_cubes(rows, video)
            whole = torch.addcmul(cubes, rows.unflatten(1, (-1, CUBE)), part)
        else:
            whole = torch.add(cubes, part, alpha=1 if gate is None else gate)
        flat = whole.flatten(1, 2)
        return flat if video is None else in_rows(flat, video)

    scores = logits.detach()
    return Scored(scores if bias is None else scores + bias, q, k, v, finish, keys)


def _rounded_means(x: Tensor, real: Tensor | None) -> Tensor:
    """Return means of cubes [batch, heads, cubes, D] of x, in which padding is 0.

    real  tokens of each cube [cubes, 1], if some have fewer than 64
    """
    whole = means(x, CUBE, x.shape[2])
    rounded: Tensor = (whole if real is None else whole * CUBE / real).to(x.dtype).float()
    return rounded


def in_cubes(x: Tensor, video: Sequence[int]) -> Tensor:
    """Return x [batch, tokens, ...] of a video, row by row, with the tokens of a cube in turn.

    Sides that are no multiples of 4 are padded with zeros.
    """
    t, y, w = (-(-side // SIDE) for side in video)
    rest, whole = x.shape[2:], x.reshape(x.shape[0], *video, -1)
    if any(side % SIDE for side in video):
        whole = pad(whole, [0, 0, *(n for side in video[::-1] for n in (0, -side % SIDE))])
    cubes = whole.reshape(x.shape[0], t, SIDE, y, SIDE, w, SIDE, -1)
    return cubes.permute(0, 1, 3, 5, 2, 4, 6, 7).reshape(x.shape[0], -1, *rest)


def in_rows(x: Tensor, video: Sequence[int]) -> Tensor:
    """Return the inverse of `in_cubes`, without padding."""
    t, y, w = (-(-side // SIDE) for side in video)
    cubes = x.reshape(x.shape[0], t, y, w, SIDE, SIDE, SIDE, -1)
    whole = cubes.permute(0, 1, 4, 2, 5, 3, 6, 7).reshape(x.shape[0], t * SIDE, y * SIDE, -1)
    frames, rows, columns = video
    whole = whole.unflatten(3, (w * SIDE, -1))[:, :frames, :rows, :columns]
    real: Tensor = whole.reshape(x.shape[0], prod(video), *x.shape[2:])
    return real


def _require(
    q: Tensor,
    k: Tensor,
    block: int,
    causal: bool,
    video: Sequence[int] | None,
    gate: Tensor | float | None,
) -> None:
    """Raise Unsupported with one line unless these tokens are cubes, and the gate fits them."""
    tokens = q.shape[1], k.shape[1]
    if causal or block != CUBE:
        expected = f"blocks of {CUBE} that are not causal"
        raise Unsupported(f"vsa: expected {expected}, found {block}, causal={causal}")
    if video is None and any(count % CUBE for count in tokens):
        expected = f"queries and keys in multiples of {CUBE}, or their video"
        raise Unsupported(f"vsa: expected {expected}, found {tokens[0]} and {tokens[1]}")
    if video is not None:
        whole = len(video) == 3 and all(isinstance(side, int) and side > 0 for side in video)
        if not whole or {prod(video)} != {*tokens}:
            expected = f"3 sides whose product is the number of tokens, {tokens[0]}"
            raise Unsupported(f"vsa: video: expected {expected}; found {[*video]}")
    if isinstance(gate, Tensor):
        sides = zip(gate.shape[::-1], q.shape[::-1], strict=False)
        fits = gate.dim() <= q.dim() and all(side in (1, whole) for side, whole in sides)
        if not fits or gate.device != q.device:
            expected = f"a number, or a tensor broadcast to {list(q.shape)} on {q.device}"
            actual = f"{list(gate.shape)} on {gate.device}"
            raise Unsupported(f"vsa: gate: expected {expected}, found {actual}")


METHOD = Method(score, block=CUBE, first=0, last=0)
