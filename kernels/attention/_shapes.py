"""The sizes of an attention problem as its kernels need them, and how they read its operands."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any, Literal

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import triton as launching
from sparsebench.kernels._common.triton import (
    SM_BYTES,
    SMALLEST_TILE,
    BoundKernel,
    Path,
    whole_tile,
)
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.attention._lists import MaskLists
from sparsebench.results.record import Problem

LOG2_E = 1.4426950408889634  # the kernels' exponentials are to the base 2
FP32 = [(32, 32, 8, 2), (16, 32, 4, 2)]  # larger tiles take Triton 10 s to compile, and spill
SMALLEST = (16, 16, 4, 1)
MOST_DEPTH = 256  # head dimension: K and V of more do not fit the shared memory of one SM


@dataclass(frozen=True)
class AttentionShape:
    """Sizes of an attention: `batch` sequences of q_tokens and kv_tokens, and its heads."""

    batch: int
    q_tokens: int
    kv_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    block: tuple[int, int]
    dtype: str

    @property
    def depth(self) -> int:
        """Return the head dimension of a tile, a power of two."""
        return int(triton.next_power_of_2(max(16, self.head_dim)))

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def tile_side(self) -> int:
        """Return the smallest power of two that holds the queries of a block."""
        return int(triton.next_power_of_2(min(self.block[0], self.q_tokens)))


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the Triton kernels cannot run the problem here, or None."""
    if reason := launching.unsupported(problem, device):
        return reason
    if problem["head_dim"] > MOST_DEPTH:
        return f"head_dim: expected at most {MOST_DEPTH}, found {problem['head_dim']}"
    scale = problem["scale"]
    return None if scale is None or scale > 0 else f"scale: expected more than 0, found {scale}"


def by_head(matrix: Tensor, shape: AttentionShape) -> Tensor:
    """Return a token-major matrix [batch * tokens, heads * D] as [batch, tokens, heads, D]."""
    return matrix.view(shape.batch, -1, matrix.shape[1] // shape.head_dim, shape.head_dim)


def head_box(heads: Tensor, shape: AttentionShape, rows: tuple[int, int], path: str) -> Any:
    """Return the argument for a matrix by head: boxes of (tokens, heads), or the tensor.

    TMA fills what lies outside of a sequence or a head with zeros.
    """
    if path != "tma":
        return heads
    return TensorDescriptor.from_tensor(heads, [1, *rows, shape.depth])


@dataclass(frozen=True)
class Config:
    """One way to run a kernel: the tile of a program, and how it walks a list.

    tokens, pack  of dK and dV: queries of a step, and 1; of others: queries and heads of a tile
    keys          keys of a step; of dK and dV: of a tile
    path          by which heads are read; "wgmma": by the kernel of _gathered_wgmma.py
    splits        programs that share a list, with the rows in order; 0: one, the longest list first
    """

    tokens: int
    pack: int
    keys: int
    stages: int
    warps: int
    path: Path | Literal["wgmma"]
    splits: int = 0


def query_tiles(shape: AttentionShape, config: Config) -> int:
    """Return the number of tiles of queries; none exceeds a block."""
    blocks = ceil(shape.q_tokens / shape.block[0])
    tiles = ceil(min(shape.block[0], shape.q_tokens) / config.tokens)
    return shape.batch * (shape.heads // config.pack) * blocks * tiles


Tile = tuple[int, int, int, int]  # rows, columns of a step, warps and stages


def tiles_that_fit(
    shape: AttentionShape, side: int, large: list[Tile], flat: list[Tile]
) -> list[Tile]:
    """Return the tiles for rows of `side` tokens whose operands fit one SM; one at least.

    large, flat  tiles of 64 rows and more, and of fewer; those of FP32 take their place

    Tiles of 64 rows also cut wider blocks, because they are often faster; smaller ones never are.
    """
    height = min(128, whole_tile(side))
    if shape.itemsize == 4:
        near = [tile for tile in FP32 if tile[0] <= height]
    else:
        near = [tile for tile in (*large, *flat) if min(height, 64) <= tile[0] <= height]
    row = 2 * shape.depth * shape.itemsize
    return [t for t in near if (t[0] + t[1] * t[3]) * row <= SM_BYTES] or [SMALLEST]


def query_config(shape: AttentionShape, shared: int, tile: Tile, path: Path) -> Config:
    """Return how a tile of queries is run: tl.dot needs 16 rows.

    TMA loads no step of several blocks.
    """
    rows, keys, warps, stages = tile
    side = min(rows, shape.tile_side)
    pack = min(shared, rows // side)
    way = path if shape.block[1] % keys == 0 else "pointers"
    return Config(max(side, SMALLEST_TILE // pack), pack, keys, stages, warps, way)


def bound_kernel(
    kernel: Any,
    programs: int,
    tensors: Sequence[Any],
    walked: tuple[MaskLists, BlockMask, AttentionShape, float],
    config: Config,
    out: Tensor,
    *,
    masked: bool,
    before: BoundKernel | None = None,
    **constants: int,
) -> BoundKernel:
    """Return a kernel with its arguments, and the constants that all kernels have.

    tensors  arguments in front of the lists
    masked   whether any step needs a mask
    """
    lists, mask, shape, scale = walked
    arrays = lists.offsets, lists.columns, lists.fulls, lists.order, lists.slots, mask.bits
    args = *tensors, *arrays, *mask.tokens, shape.heads, shape.kv_heads, mask.lists, scale
    constants |= {"D": shape.head_dim, "DEPTH": shape.depth, "CAUSAL": mask.causal}
    constants |= {"Q_SIDE": shape.block[0], "KV_SIDE": shape.block[1], "MASKED": masked}
    constants |= {"TOKENS": config.tokens, "PACK": config.pack, "KEYS": config.keys}
    constants |= {"STAGES": config.stages, "TMA": config.path == "tma", "num_warps": config.warps}
    return BoundKernel(kernel, (programs,), args, constants, out, before)
