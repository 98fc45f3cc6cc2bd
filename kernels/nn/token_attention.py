"""Attention whose blocks each query selects for itself: NSA and MoBA.

    o = sparsebench.nsa_attention(q, k, v, g_cmp, g_slc, g_swa, keep=16, block=64, window=512)
    o = sparsebench.moba_attention(q, k, v, keep=3, block=512)

Both are causal, and the last query is at the last key. A list is a row of a BlockMask with blocks
of one query, so `attention` computes the branch of the selected blocks (attention_gathered.py). The
scores are those of kernels/attention/_nsa.py and _moba.py. Nothing waits for the device but the
first two calls of new sizes, so a captured graph selects other blocks in each replay. If there are
no more blocks than a query keeps, nothing is selected: that is causal attention with one list.

Gradients flow through attention, the means and the gates, but not through the selection. Where they
are wanted, NSA's compressed branch is `attention` to the means, over a mask of complete blocks.
"""

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._blocks import pack_bits
from sparsebench.formats._format import require, require_whole
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.transforms import has_mode
from sparsebench.kernels.attention import _moba, _nsa
from sparsebench.kernels.attention._gated_sum import gated_sum
from sparsebench.kernels.attention._selecting import means
from sparsebench.kernels.nn._attention_op import require_operands
from sparsebench.kernels.nn._whole_calls import whole_call
from sparsebench.kernels.nn.attention import attention, cast, factor_of

SIDE = 64  # queries and keys of a block of the masks that do not change
WIDE = 128  # of the mask of all keys before a query
MOST_MASKS = 16  # kept of each kind: of windows, of complete blocks, and causal ones


def nsa_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g_cmp: Tensor,
    g_slc: Tensor,
    g_swa: Tensor | None = None,
    *,
    keep: int = 16,
    block: int = 64,
    window: int = 512,
    scale: float | None = None,
) -> Tensor:
    """Return native sparse attention: three branches, each multiplied by its gate and added up.

    q, k, v, scale  as for `attention`, [batch, tokens, heads, D]
    g_cmp           gate [batch, S, H] of attention to the means of complete blocks
    g_slc           gate of attention to `keep` blocks for each query and KV head: the first one, a
                    query's own, the one before, and those of the largest weight in the first branch
    g_swa           gate of attention to the last `window` keys; without it, no such branch

    Sources and what differs from the paper: kernels/attention/_nsa.py. A row keeps all blocks if
    there are fewer than `keep`, which is 3 or more. The selection has no gradient. A compiled call
    takes neither gradients of q, k and v nor a window. Calls of the same sizes share the mask of
    the window, so they must not overlap on the device, nor must calls that keep all blocks. Raises
    Unsupported, FormatError.
    """
    gates = [g_cmp, g_slc, *(() if g_swa is None else (g_swa,))]
    numbers = {"keep": keep, "block": block, "window": window, "scale": scale}
    return whole_call(_add_branches, *cast(q, k, v), *gates, **numbers)


def _add_branches(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *gates: Tensor,
    keep: int,
    block: int,
    window: int,
    scale: float | None,
) -> Tensor:
    """Return `nsa_attention` of operands that autocast leaves as they are."""
    _require("nsa_attention", q, k, v, keep, block)
    for gate in gates:
        fits = gate.shape == q.shape[:3] and gate.is_floating_point() and gate.device == q.device
        if not fits:
            expected = f"gates of floats {list(q.shape[:3])} on {q.device}"
            actual = f"{gate.dtype} {list(gate.shape)} on {gate.device}"
            raise Unsupported(f"nsa_attention: expected {expected}, found {actual}")
    factor = factor_of(q, scale)
    compressed, scores = _nsa.compress(q.detach(), k.detach(), v.detach(), block, factor)
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v)):
        compressed = _compressed(q, k, v, block, factor)
    mask = _mask_of(lambda: scores, q, k, keep, block, _nsa.FORCED)
    o = attention(q, k, v, mask, scale=scale)
    if len(gates) == 2:
        return gated_sum([compressed, o], [*gates])
    require_whole("window", window)
    _refuse_in_compiled_code("window", "g_swa")
    reach = min(window, k.shape[1])  # memory grows with it
    mask = _window((q.shape[1], k.shape[1]), q.shape[0], reach, q.device)
    return gated_sum([compressed, o, attention(q, k, v, mask, scale=scale)], [*gates])


def moba_attention(
    q: Tensor, k: Tensor, v: Tensor, *, keep: int = 3, block: int = 512, scale: float | None = None
) -> Tensor:
    """Return mixture of block attention: each query and head attends to `keep` blocks of keys.

    q, k, v, scale  as for `attention`, [batch, tokens, heads, D]
    keep            blocks of a query: its own, and those whose mean key has the largest products
                    with it; all, if there are fewer

    The selection has no gradient. Calls that keep all blocks share a mask, as in `nsa_attention`.
    Raises Unsupported, FormatError.
    """
    return whole_call(_select_by_head, *cast(q, k, v), keep=keep, block=block, scale=scale)


def _select_by_head(
    q: Tensor, k: Tensor, v: Tensor, *, keep: int, block: int, scale: float | None
) -> Tensor:
    """Return `moba_attention` of operands that autocast leaves as they are."""
    _require("moba_attention", q, k, v, keep, block)
    score = partial(_moba.score_blocks, q.detach(), k.detach(), block)
    mask = _mask_of(score, q, k, keep, block, _moba.FORCED)
    return attention(q, k, v, mask, scale=scale)


def _require(name: str, q: Tensor, k: Tensor, v: Tensor, keep: int, block: int) -> None:
    """Raise Unsupported or FormatError unless the operands of a call and its numbers fit."""
    require_whole("block", block)
    require_whole("keep", keep)
    if q.dim() != 4 or not q.numel() or not k.numel():
        shapes = f"q {list(q.shape)}, k {list(k.shape)}"
        raise Unsupported(f"{name}: expected [batch, tokens, heads, D], found {shapes}")
    require_operands(q, k, v, (*q.shape[:2], *k.shape[1:2]), 1, q.device)


def _mask_of(
    scores: Callable[[], Tensor],
    q: Tensor,
    k: Tensor,
    keep: int,
    block: int,
    forced: dict[str, int],
) -> BlockMask:
    """Return the mask of the highest scores [batch, lists, S, n], or of all if each is kept."""
    least = sum(forced.values())
    require(keep >= least, f"keep: expected {least} blocks or more, found {keep}")
    tokens, short = (q.shape[1], k.shape[1]), k.shape[1] <= keep * block
    if short and q.device.type != "meta" and not has_mode():  # a mask is read, and kept
        return _causal(tokens, q.shape[0], q.device)
    each = scores()
    options: dict[str, Any] = {"block": [1, block], "tokens": [*tokens], **forced, "causal": True}
    return BlockMask.from_scores(each, min(keep, each.shape[3]), **options)


def _refuse_in_compiled_code(expected: str, found: str) -> None:
    if torch.compiler.is_compiling():
        expected = f"no {expected} in torch.compile"
        raise Unsupported(f"nsa_attention: expected {expected}, found {found}")


def _compressed(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> Tensor:
    """Return O of the compressed branch, with gradients of q, k and v. Raises Unsupported."""
    _refuse_in_compiled_code("gradient", "operands that require one")
    keys, values = (means(x, block, x.shape[2]).to(x.dtype).transpose(1, 2) for x in (k, v))
    mask = _complete_blocks((q.shape[1], k.shape[1]), q.shape[0], block, q.device)
    return attention(q, keys, values, mask, scale=scale)


@lru_cache(MOST_MASKS)
def _complete_blocks(
    tokens: tuple[int, int], batch: int, block: int, device: torch.device
) -> BlockMask:
    """Return the mask of the means of blocks that end at each query or before, for all heads."""
    return make_lasting(lambda: _make_complete_blocks(tokens, batch, block, device), device)


def _make_complete_blocks(
    tokens: tuple[int, int], batch: int, block: int, device: torch.device
) -> BlockMask:
    queries, keys = tokens
    ends = torch.arange(1, -(-keys // block) + 1, device=device) * block
    complete = ends <= torch.arange(1, queries + 1, device=device)[:, None] + keys - queries
    return BlockMask.from_elements(complete.expand(batch, 1, -1, -1), [SIDE, SIDE])


@lru_cache(MOST_MASKS)
def _causal(tokens: tuple[int, int], batch: int, device: torch.device) -> BlockMask:
    """Return the mask of the causal rule, with one list for all heads."""
    cells = [batch * -(-tokens[0] // WIDE), -(-tokens[1] // WIDE)]
    geometry: dict[str, Any] = {"block": WIDE, "tokens": [*tokens], "batch": batch}
    return make_lasting(
        lambda: BlockMask.from_dense(torch.ones(cells, device=device), causal=True, **geometry),
        device,
    )


@lru_cache(MOST_MASKS)
def _window(tokens: tuple[int, int], batch: int, window: int, device: torch.device) -> BlockMask:
    """Return the mask of the last `window` keys of each query, for all heads."""
    return make_lasting(lambda: _make_window(tokens, batch, window, device), device)


def _make_window(
    tokens: tuple[int, int], batch: int, window: int, device: torch.device
) -> BlockMask:
    (queries, keys), side = tokens, SIDE
    inside = torch.arange(side, device=device)
    row = torch.arange(-(-queries // side), device=device)
    last = (((row + 1) * side).clamp(max=queries) - 1 + keys - queries) // side
    column = last[:, None] - torch.arange(-(-window // side) + 2, device=device)
    query = (row[:, None] * side + inside)[:, None, :, None]
    key = (column[..., None] * side + inside)[:, :, None, :]
    behind = query + keys - queries - key
    there = (query < queries) & (key >= 0) & (key < keys)
    allowed = there & (behind >= 0) & (behind < window)
    present = allowed.flatten(2).any(2)
    partial = (there & ~allowed).flatten(2).any(2)[present]
    at = present.nonzero()[:, 0]
    bits = pack_bits(allowed[present][partial])
    first = torch.arange(batch, device=device)[:, None] * len(row)
    arrays = (first + at).flatten(), column[present].repeat(batch), partial.repeat(batch)
    return BlockMask.build(
        tokens, (side, side), *arrays, batch=batch, bits=bits.repeat(batch, 1, 1)
    )
