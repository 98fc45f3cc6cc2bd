"""Blocks of a grid of queries and keys: their number, their areas, and their bits."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import require


def areas(
    tokens: tuple[int, int], block: tuple[int, int], causal: bool, device: torch.device
) -> Tensor:
    """Return the allowed elements of each block of one list, int64 [q_blocks, kv_blocks]."""
    (s_q, s_kv), (b_q, b_k) = tokens, block
    q_blocks, kv_blocks = blocks_of(tokens, block)
    starts = torch.arange(kv_blocks, device=device) * b_k
    width = (s_kv - starts).clamp(max=b_k)
    first = torch.arange(q_blocks, device=device)[:, None] * b_q
    if not causal:
        return (s_q - first).clamp(max=b_q) * width
    area = torch.zeros(q_blocks, kv_blocks, dtype=torch.int64, device=device)
    for row in range(b_q):
        q = first + row
        visible = (q + s_kv - s_q + 1 - starts).clamp(min=0).minimum(width)
        area += visible * (q < s_q)
    return area


def pack_bits(elements: Tensor) -> Tensor:
    """Return bool [blocks, b_q, b_k] as uint8 [blocks, b_q, ceil(b_k / 8)], lowest bit first."""
    eights = pad(elements, (0, -elements.shape[-1] % 8)).unflatten(-1, (-1, 8))
    bits: Tensor = (eights.byte() << torch.arange(8, device=elements.device)).sum(-1)
    return bits.to(torch.uint8)


def unpack_bits(bits: Tensor, b_k: int) -> Tensor:
    """Return the inverse of `pack_bits`."""
    shifts = torch.arange(8, device=bits.device)
    eights: Tensor = ((bits[..., None] >> shifts) & 1).bool()
    return eights.flatten(-2)[..., :b_k]


def blocks_of(tokens: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    return -(-tokens[0] // block[0]), -(-tokens[1] // block[1])


def token_counts(tokens: object) -> tuple[int, int]:
    """Return S_q and S_kv. Raises FormatError."""
    if isinstance(tokens, list | tuple) and len(tokens) == 2:
        s_q, s_kv = tokens
        if all(type(size) is int and size > 0 for size in (s_q, s_kv)):
            return s_q, s_kv
    require(False, f"tokens: expected [queries, keys], each at least 1; found {tokens!r}")
    raise AssertionError


def in_blocks(elements: Tensor, block: tuple[int, int]) -> Tensor:
    """Return [batch, lists, q_blocks, kv_blocks, b_q, b_k], padded with False."""
    (b_q, b_k), (batch, lists, s_q, s_kv) = block, elements.shape
    padded = pad(elements, (0, -s_kv % b_k, 0, -s_q % b_q))
    return padded.view(batch, lists, -1, b_q, padded.shape[3] // b_k, b_k).transpose(3, 4)
