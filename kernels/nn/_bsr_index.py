"""The index of a block-sparse layer: draw it or make it from a pattern, copy and compare it."""

import torch
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats._format import offsets_of, require, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr._wgmma_lists import checked

Index = tuple[Tensor, Tensor]
"""Offsets and columns of a BSR matrix, int32."""


def index_of(pattern: Tensor) -> Index:
    """Return offsets and columns of a pattern, bool [block rows, block columns]."""
    require(
        pattern.dim() == 2 and pattern.dtype == torch.bool,
        f"pattern: expected a bool matrix, found {pattern.dtype} {list(pattern.shape)}",
    )
    rows, columns = pattern.nonzero(as_tuple=True)
    return offsets_of(rows, len(pattern)), columns.to(torch.int32)


def require_index(
    offsets: Tensor, columns: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise FormatError unless this is the index of a BSR matrix [n, k]. Waits for the device."""
    for name, index in (("offsets", offsets), ("columns", columns)):
        if index.dim() != 1 or index.dtype != torch.int32 or not index.is_contiguous():
            layout = f"{index.dtype} {list(index.shape)} with strides {list(index.stride())}"
            raise FormatError(f"{name}: expected a contiguous list of int32, found {layout}")
    checked(Bsr(shape, offsets, columns, columns.new_empty((1, 1, 1)).expand(len(columns), *block)))


def copy_of(offsets: Tensor, columns: Tensor, device: torch.device) -> Index:
    with torch.inference_mode(False):  # torch does not count writes into inference tensors
        return offsets.detach().to(device, copy=True), columns.detach().to(device, copy=True)


def source_of(old: Index, new: Index, width: int) -> Tensor:
    """Return int64 [new blocks]: the position of each block in the old index, or -1."""
    before, after = (rows_of(offsets) * width + columns for offsets, columns in (old, new))
    if not len(before):
        return torch.full_like(after, -1)
    at = torch.searchsorted(before, after).clamp(max=len(before) - 1)
    return at.where(before[at] == after, -1)


def draw_pattern(grid: tuple[int, int], sparsity: float) -> Tensor:
    """Draw a pattern whose block rows all store the same number of blocks, or one more."""
    rows, columns = grid
    least, remainder = divmod(stored_of(sparsity, rows * columns), rows)
    counts = least + (torch.randperm(rows, device="cpu") < remainder).long()
    return torch.rand(grid, device="cpu").argsort(1).argsort(1) < counts[:, None]


def stored_of(sparsity: float, blocks: int) -> int:
    """Return the number of blocks to store."""
    require(0 <= sparsity <= 1, f"sparsity: expected 0 to 1, found {sparsity}")
    return round((1 - sparsity) * blocks)


def grid_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    (n, k), (r, c) = shape, block
    return -(-n // r), -(-k // c)
