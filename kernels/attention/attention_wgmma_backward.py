"""Gradients of block-sparse attention in CUDA C++ for Hopper: dQ, dK and dV, one below the other.

attention_wgmma_backward.cu has three kernels:

    prepare_queries   delta = sum(dO O) of each query; LSE for exp2; dQ's sums in fp32 set to zero
    differentiate     dK and dV of a tile of keys, over the transposed lists; adds to dQ's sums
    finish_queries    dQ = scale times its sums, in the dtype of Q

The sums of dQ come in the order in which CTAs finish, so two calls may differ in the last bits
(attention_triton_backward has the same bits each time). It supports blocks of a multiple of 64
queries and 64 keys, head_dim 64 and 128, fp16 and bf16.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from struct import pack

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Tuned, choose
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.attention._shapes import (
    LOG2_E,
    Shape,
    mask_of,
    scale_of,
    shape_of,
    table_sizes,
)
from sparsebench.kernels.attention._wgmma_tiles import key_tiles, tensor_map
from sparsebench.kernels.attention.attention_wgmma import ALIGNMENT, WARPGROUP, unsupported

ROWS = 64  # queries of a step
MOST_BYTES = 224 * 1024  # of shared memory, for all but ALIGNMENT and notes
OF_CTA, OF_WARP = 256, 8  # threads of prepare_queries, and its queries
PREPARE = cuda.Layout(*"PPPPPP", "28s", "i")  # o, do, lse, LSE for exp2, delta, dQ's sums, Sizes
DIFFERENTIATE = cuda.Layout("512s", "64s", "16s", "28s4x", *"PPP")  # Maps, Lists, Stats, Sizes, dQ
FINISH = cuda.Layout(*"PP", "28s")  # dQ's sums, dQ, Sizes


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    rows   of keys in a tile: 64 for each warpgroup
    tiles  that a CTA works on at the same time
    """

    rows: int
    tiles: int


@dataclass(frozen=True)
class Gradients:
    """The three kernels and their arguments: each call computes `out`, in the same buffer."""

    kernels: tuple[tuple[cuda.Loaded, cuda.Arguments], ...]
    tensors: tuple[Tensor, ...]
    out: Tensor

    def __call__(self) -> Tensor:
        """Enqueue the kernels on torch's current stream. Raises RuntimeError."""
        for loaded, args in self.kernels:
            loaded.enqueue(args)
        return self.out

    @property
    def code(self) -> str:
        """Return the digest of the machine code."""
        return self.kernels[0][0].code


def configurations(shape: Shape) -> list[Config]:
    """Return what is worth trying, the default first. Raises Unsupported."""
    if shape.block[0] % ROWS or shape.block[1] % ROWS:
        raise Unsupported(
            f"expected blocks of a multiple of 64 queries and keys, found {list(shape.block)}"
        )
    return [Config(128, 1), Config(64, 2)] if shape.block[1] % 128 == 0 else [Config(64, 2)]


def ds_bytes(config: Config, head_dim: int) -> int:
    """Return the shared memory of dS, and of dQ's sums in fp32 for each warpgroup.

    Two warpgroups that share dS alternate two buffers.
    """
    buffers = 2 if config.rows == 128 and head_dim == 128 else 1
    return config.rows * ROWS * 2 * buffers + config.rows // 64 * ROWS * 64 * 4


def slots_of(config: Config, head_dim: int) -> int:
    """Return the slots of the ring of Q and dO: what the shared memory has room for, at most 8."""
    row = head_dim * 2
    fixed = 2 * config.rows * row + ds_bytes(config, head_dim)
    return min(8, (MOST_BYTES // config.tiles - fixed) // (ROWS * row + 8 * ROWS))


def shared_bytes(config: Config, head_dim: int) -> int:
    """Return the shared memory of a CTA."""
    slots, row = slots_of(config, head_dim), head_dim * 2
    tile = 2 * config.rows * row + ds_bytes(config, head_dim) + slots * (ROWS * row + 8 * ROWS)
    return ALIGNMENT + config.tiles * tile


def padded(queries: int) -> int:
    """Return the rows of a head's sums: whole steps, and one step without a query."""
    return (-(-queries // ROWS) + 1) * ROWS


def constants_of(config: Config, shape: Shape, mask: BlockMask) -> cuda.Constants:
    """Return the macros of attention_wgmma_backward.cu."""
    return (
        *(("HEAD_DIM", shape.head_dim), ("BLOCK_Q", shape.block[0]), ("BLOCK_K", shape.block[1])),
        *(("GROUPS", config.tiles), ("CONSUMERS", config.rows // 64)),
        ("SLOTS", slots_of(config, shape.head_dim)),
        *(("CAUSAL", int(mask.causal)), ("BITS", int(mask.bits is not None))),
        ("FP16", int(shape.dtype == "fp16")),
    )


def launch(
    operands: Sequence[Tensor],
    mask: BlockMask,
    shape: Shape,
    scale: float,
    config: Config,
    out: Tensor | None = None,
) -> Gradients:
    """Return the kernels of dQ, dK and dV, one below the other as rows of D elements.

    operands  q, k, v, o, lse and do: dense, lse fp32 [batch * H, S_q], the others token-major

    Raises Unsupported.
    """
    q, k, v, o, lse, do = operands
    device, rows = q.device, padded(shape.q_tokens)
    heads, depth = shape.batch * shape.heads, shape.head_dim
    q_rows, kv_rows = (x.numel() // depth for x in (q, k))
    out = q.new_empty(q_rows + 2 * kv_rows, depth) if out is None else out
    dq, dk, dv = out.split([q_rows, kv_rows, kv_rows])
    tiles, transpose = key_tiles(mask, shape, config.rows), mask.transpose()
    counters = torch.zeros(2, dtype=torch.int32, device=device)
    sums = torch.empty(heads, rows, depth, device=device)
    lse_2, delta = torch.empty(2, heads, rows, device=device)
    box = config.rows
    maps = b"".join(tensor_map(x, shape.batch, ROWS) for x in (q, do))
    maps += b"".join(tensor_map(x, shape.batch, box) for x in (k, v))
    bits = () if mask.bits is None or transpose.slots is None else (transpose.slots, mask.bits)
    index = tiles, transpose.offsets, transpose.rows
    pointers = [x.data_ptr() for x in (*index, *bits)] + [0] * (2 - len(bits))
    lists = pack(
        "PPPPPPiii4x", *pointers, counters.data_ptr(), len(tiles), mask.lists, mask.kv_blocks
    )
    counts = shape.q_tokens, shape.kv_tokens, shape.heads, shape.kv_heads, rows
    sizes = pack("iiiiiff", *counts, scale, scale * LOG2_E)
    stats = pack("PP", lse_2.data_ptr(), delta.data_ptr())
    constants, size = constants_of(config, shape, mask), shared_bytes(config, depth)
    processors = torch.cuda.get_device_properties(device).multi_processor_count

    def kernel(
        function: str, args: cuda.Arguments, grid: int, threads: int, shared: int = 0
    ) -> tuple[cuda.Loaded, cuda.Arguments]:
        name = "attention_wgmma_backward"
        loaded = cuda.load(name, function, constants, shared, device)
        return cuda.Loaded(*loaded, device.index, grid, threads, shared), args

    addresses = [x.data_ptr() for x in (o, do, lse, lse_2, delta, sums)]
    kernels = (
        kernel(
            "prepare_queries",
            PREPARE(*addresses, sizes, heads),
            -(-heads * rows // OF_WARP),
            OF_CTA,
        ),
        kernel(
            "differentiate",
            DIFFERENTIATE(maps, lists, stats, sizes, *(x.data_ptr() for x in (sums, dk, dv))),
            min(processors, -(-len(tiles) // config.tiles)),
            WARPGROUP * (config.tiles * config.rows // 64 + 1),
            size,
        ),
        kernel(
            "finish_queries",
            FINISH(sums.data_ptr(), dq.data_ptr(), sizes),
            heads * rows // ROWS,
            WARPGROUP,
        ),
    )
    return Gradients(kernels, (*operands, *index, *bits, counters, sums, lse_2, delta), out)


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Transpose the lists; take a table's configuration, or compile and time up to two."""
    problem, mask = operands.problem, mask_of(operands)
    tensors = [operands.activations[name] for name in ("q", "k", "v", "o", "lse", "do")]
    shape = shape_of(*tensors[:2], mask, problem["heads"], problem["dtype"])
    sizes, searched = table_sizes(shape, mask), configurations(shape)
    configs, by = choose("attention_wgmma_backward", Config, operands, sizes, tuned, searched)
    constants = [constants_of(config, shape, mask) for config in configs]
    cuda.compile_ahead("attention_wgmma_backward", constants)
    scale = scale_of(problem)
    candidates = [launch(tensors, mask, shape, scale, config) for config in configs]
    return fastest_launch(configs, candidates, by, tensors[0].device)


KERNEL = Kernel("attention_backward", "block_mask", "cuda", prepare, unsupported, tunes=True)
