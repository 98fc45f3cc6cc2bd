"""Where attention_wgmma_backward.cu stores dS, from which attention_wgmma_stored.cu computes dQ.

dS has 2 bytes for each element of the blocks of a head, so the heads are worked on in sections,
whose dS takes SECTION_BYTES at most, or a KV head. Three buffers take turns:

    launch   weigh_rows | dK, dV 0 | dK, dV 1 | dQ 0 | dK, dV 2 | dQ 1 | ... | dQ n - 2 | dQ n - 1
    buffer                   0          1         0        2        1

A launch begins when all CTAs of its predecessor have started and the launch before that has ended
(programmatic dependent launch). So its first CTAs run on the SMs that the end of its predecessor
leaves idle. Whatever a launch reads or writes over is two launches old at least; only the first
dK, dV, and dQ of a single section, wait for their predecessors.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels.attention._call import AttentionCall
from sparsebench.kernels.attention._shapes import AttentionShape
from sparsebench.kernels.attention._wgmma_tiles import head_map, lists_of_heads, query_tiles

BUFFERS = 3  # of dS
SECTION_BYTES, HEAD_BYTES = (1 << 30) // BUFFERS, 1 << 30  # most for dS of a section, a KV head
SIDE = 64  # queries and keys that are stored together
SM_BYTES = 228 * 1024  # shared memory of an SM; of each CTA's, the system has 1 KB
SOURCE, THREADS = "attention_wgmma_stored", 256


class Step(NamedTuple):
    """A launch: dQ of a section if `is_product`, else its dK, dV and dS.

    waits  for its predecessor
    """

    section: int
    is_product: bool
    waits: bool


def steps_of(sections: int) -> list[Step]:
    """Return the launches in their order."""
    steps = [Step(0, False, True)]
    for section in range(1, sections):
        steps += Step(section, False, False), Step(section - 1, True, False)
    return [*steps, Step(sections - 1, True, sections == 1)]


def is_likelier(mask: BlockMask, shape: AttentionShape, workers: int) -> bool:
    """Return whether storing dS is expected to be faster than computing it twice.

    workers  tiles of keys that are worked on at the same time

    A section ends with its longest tile, and a block of keys that all queries attend to has a long
    one in each section. With such a block (an attention sink), 16k tokens, 32/8 heads and 10 % of
    the causal blocks, storing took 3.3 ms and computing twice 2.0 on an H200. In units of D
    operations of a block, dK and dV take 8, dQ of a stored dS 2, and dQ that computes it again 6.
    """
    counts = mask.transposed.offsets.diff().view(-1, mask.kv_blocks).float()
    head = torch.arange(shape.batch * shape.heads, device=counts.device)
    of_heads = counts[lists_of_heads(mask, shape, head)]
    blocks = of_heads.view(-1, shape.heads // shape.kv_heads, mask.kv_blocks).sum(1)
    of_block = 2 * mask.block[0] * mask.block[1]  # bytes
    together = max(1, int(SECTION_BYTES // (of_block * max(1.0, float(blocks.sum(1).max())))))
    each = float(blocks.sum()) / workers
    longest = [
        max(float(part.max()), float(part.sum()) / workers) for part in blocks.split(together)
    ]
    return 8 * sum(longest) + 2 * each <= 8 * max(float(blocks.max()), each) + 6 * each


class Stored(NamedTuple):
    """Sections of heads, and where the blocks of a head are stored.

    blocks   most blocks of a section
    places   int32 [blocks]: of the blocks of the transposed lists in mask.columns
    shifts   int32 [batch * heads]: where a head's block is stored, less its place
    keys     tiles of keys of each section
    queries  tiles of queries of each section
    """

    blocks: int
    places: Tensor
    shifts: Tensor
    keys: list[Tensor]
    queries: list[Tensor]


def stored_of(
    mask: BlockMask, shape: AttentionShape, keys: Tensor, places: Tensor | None
) -> Stored:
    """Return the sections of a mask and of its tiles of keys; waits for the GPU.

    places  of the blocks of the transposed lists in mask.columns

    Raises Unsupported if dS of one KV head takes more than HEAD_BYTES.
    """
    if places is None:
        raise Unsupported(f"expected blocks of a multiple of 64, found {list(mask.block)}")
    of_block = 2 * mask.block[0] * mask.block[1]  # bytes
    most, most_of_head = SECTION_BYTES // of_block, HEAD_BYTES // of_block
    head = torch.arange(shape.batch * shape.heads, device=keys.device)
    starts, lists = mask.offsets[:: mask.q_blocks], lists_of_heads(mask, shape, head)
    group = shape.heads // shape.kv_heads
    counts = starts.diff()[lists].view(-1, group)  # blocks of the heads of a KV head
    number, used, blocks, numbers, before = 0, 0, 0, [], []
    for count in counts.sum(1).tolist():
        if count > most_of_head:
            raise Unsupported(f"expected at most {most_of_head} blocks of a KV head, found {count}")
        if used and used + count > most:
            number, used = number + 1, 0
        numbers.append(number)
        before.append(used)
        used += count
        blocks = max(blocks, used)
    section, first = torch.tensor([numbers, before], device=keys.device)
    shifts = (first[:, None] + counts.cumsum(1) - counts).flatten() - starts[lists]
    rows = SIDE * warpgroups_of(shape)
    queries = query_tiles(mask, shape, rows, rows)
    sections = section[keys[:, 1].long()], section[queries[:, 3].long() // group]
    split = [
        [tiles[of_tile == n] for n in range(number + 1)]
        for tiles, of_tile in zip((keys, queries), sections, strict=True)
    ]
    return Stored(blocks, places, shifts.to(torch.int32), *split)


def warpgroups_of(shape: AttentionShape) -> int:
    """Return the warpgroups of a CTA, which share K: 64 queries each."""
    return 2 if shape.block[0] % (2 * SIDE) == 0 else 1


def constants_of(shape: AttentionShape) -> cuda.Constants:
    """Return the macros of attention_wgmma_stored.cu, with as many slots as fit."""
    warpgroups = warpgroups_of(shape)
    ctas = 4 - warpgroups
    slots = min(4, (SM_BYTES // ctas - 2304) // _slot_bytes(shape))
    return (
        *(("HEAD_DIM", shape.head_dim), ("BLOCK_Q", shape.block[0]), ("BLOCK_K", shape.block[1])),
        *(("WARPGROUPS", warpgroups), ("SLOTS", slots), ("CTAS", ctas)),
        ("FP16", int(shape.dtype == "fp16")),
    )


def shared_bytes(shape: AttentionShape) -> int:
    """Return the shared memory of a CTA: the slots, aligned."""
    return 1024 + dict(constants_of(shape))["SLOTS"] * _slot_bytes(shape)


def _slot_bytes(shape: AttentionShape) -> int:
    """Return the bytes of 64 keys of K, and of dS of each warpgroup."""
    return 2 * SIDE * (shape.head_dim + SIDE * warpgroups_of(shape))


def weigh_rows(
    call: AttentionCall, device: torch.device, lse_2: Tensor, delta: Tensor
) -> tuple[cuda.Loaded, Callable[..., cuda.Arguments]]:
    """Return the launch that writes delta and the LSE for exp2, [batch * H, padded rows].

    Its arguments are of the addresses of o, do and lse.
    """
    shape = call.shape
    rows = shape.batch * shape.q_tokens * shape.heads
    kernel = cuda.load(SOURCE, "weigh_rows", constants_of(shape), 0, device)
    grid = -(-rows * shape.head_dim // (8 * THREADS))  # a thread has 8 elements
    numbers = lse_2.shape[1], shape.q_tokens, shape.heads, rows
    written = lse_2.data_ptr(), delta.data_ptr()

    def arguments(o: int, do: int, lse: int) -> cuda.Arguments:
        return kernel.arguments(o, do, lse, *written, *numbers)

    return kernel.on(grid, THREADS), arguments


def multiply_stored(
    call: AttentionCall, mask: BlockMask, stored: Stored, step: Step
) -> tuple[cuda.Loaded, Callable[..., cuda.Arguments]]:
    """Return the launch that computes dQ of a section from its dS.

    Its arguments are of the addresses of k, dS and dQ.
    """
    shape, device = call.shape, mask.columns.device
    tiles, bytes_of_cta = stored.queries[step.section], shared_bytes(shape)
    kernel = cuda.load(SOURCE, "multiply_stored", constants_of(shape), bytes_of_cta, device)
    lists = [x.data_ptr() for x in (tiles, mask.columns, stored.shifts)]
    counts = shape.q_tokens, shape.kv_tokens, shape.heads, shape.kv_heads
    of_k = shape.kv_heads * shape.head_dim, shape.kv_tokens, shape.batch

    def arguments(k: int, scores: int, dq: int) -> cuda.Arguments:
        k_map = head_map(k, call.dtype, of_k, SIDE)
        return kernel.arguments(k_map, *lists, scores, dq, *counts, call.scale, step.waits)

    threads = 128 * warpgroups_of(shape)
    return kernel.on(len(tiles), threads, early=True), arguments
