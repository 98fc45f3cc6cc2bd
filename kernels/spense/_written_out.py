"""Unpack a 2:4 hybrid of 16 bits into a dense matrix, in Triton, for the gradient of X.

    program    writes 64 rows x 128 columns of W, from a tile of formats/spense.py
    bytes      1.125 per sparse element or 2 per dense one are read, and 2 are written

`Spense.to_dense` does the same in about thirty launches of torch.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.cuda import TMA_ALIGNMENT as ALIGNMENT
from sparsebench.kernels._common.raw_launch import Raw
from sparsebench.kernels._common.tape import on_tape

ROWS: tl.constexpr = tl.constexpr(64)  # of a tile
COLUMNS: tl.constexpr = tl.constexpr(128)
SPARSE_BYTES: tl.constexpr = tl.constexpr(9216)  # of a tile in 16 bits; codes are the last
VALUE_BYTES: tl.constexpr = tl.constexpr(8192)


def written_out(w: Spense) -> Tensor:
    """Return W [n, k], fp16 or bf16. Enqueues on the current stream, in two launches at most."""
    (n, k), (rows, columns) = w.shape, w.sparse_shape
    out = torch.empty(n, k, dtype=w.dtype, device=w.sparse.device)
    on_tape(out)
    rest = out[:, columns:] if columns < k else out[rows:]
    for tiles, part, is_sparse in ((w.sparse, out[:rows, :columns], True), (w.dense, rest, False)):
        if part.numel():
            on_tape(view=(part, out))
            launch(tiles, part, is_sparse)
    return out


_LAUNCHES: dict[tuple[Any, ...], Raw | None] = {}


def launch(tiles: Tensor, part: Tensor, is_sparse: bool) -> None:
    """Write tiles uint8 [row tiles, column tiles, bytes] into a part of W."""
    addresses = tiles.data_ptr(), tiles.data_ptr(), part.data_ptr()
    aligned = all(address % ALIGNMENT == 0 for address in addresses)
    key = tiles.shape, part.shape, part.stride(0), is_sparse, tiles.device, aligned
    if raw := _LAUNCHES.get(key):
        raw(addresses)
        return
    on_tape(complete=False)
    down, across = tiles.shape[:2]
    matrices = tiles.view(torch.int16), tiles, part.view(torch.int16)
    args, grid = (*matrices, *part.shape, part.stride(0), across), (down * across,)
    compiled = _write[grid](*args, SPARSE=is_sparse)
    if compiled:  # None if interpreted
        _LAUNCHES[key] = Raw.of(compiled, grid, args, {0: 0, 1: 1, 2: 2}, tiles.device)


@triton.jit  # type: ignore[untyped-decorator]
def _write(values, codes, out, rows, columns, stride, across, SPARSE: tl.constexpr):  # type: ignore[no-untyped-def]
    tile = tl.program_id(0).to(tl.int64)
    row = tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    if SPARSE:
        # The code of a group is a nibble at [w, g, c, s, h, j]: row 16 w + 8 h + g of the tile,
        # group 8 s + 4 c + j of the row.
        group = column // 4
        above = (row // 16 * 8 + row % 8) * 2 + group // 4 % 2
        nibble = ((above * 4 + group // 8) * 2 + row // 8 % 2) * 4 + group % 4
        byte = tl.load(codes + tile * SPARSE_BYTES + VALUE_BYTES + nibble // 2).to(tl.int32)
        code = (byte >> (nibble % 2 * 4)) & 15
        first = code % 4 == column % 4
        stored = first | (code // 4 == column % 4)
        element = group * 2 + tl.where(first, 0, 1)
        at = tile * (SPARSE_BYTES // 2) + row * 64
    else:
        stored = row >= 0
        element = column % 64
        at = tile * 8192 + column // 64 * 4096 + row * 64
    swizzled = ((element // 8) ^ (row % 8)) * 8 + element % 8
    value = tl.load(values + at + swizzled, stored, 0)
    row += (tile // across * ROWS).to(tl.int32)
    column += (tile % across * COLUMNS).to(tl.int32)
    inside = (row < rows) & (column < columns)
    tl.store(out + row.to(tl.int64) * stride + column, value, inside)
