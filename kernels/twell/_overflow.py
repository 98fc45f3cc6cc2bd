"""The dense products of a gated MLP for calls with too many active units, decided on the device.

    forward                                    backward

    H   = act(G) * (X @ Wu.T)   over G         G   = X @ Wg.T,  U = X @ Wu.T        once more
    norms, a token's sum of |H|                dWd = (act(G) * U).T @ dY            transposed
    Y   = H @ Wd.T                             dH  = dY @ Wd + dnorms * sign(H)
                                               dG  = dH * U * act'(G), dU = dH * act(G)   over G, U
                                               dWg = dG.T @ X,  dWu = dU.T @ X
                                               dX  = dG @ Wg + dU @ Wu

Every program first reads how many entries the index has (_index.py). If they fit its capacity, the
program returns: the host never waits for the count, and such a launch takes about 2 µs. Otherwise
programs are persistent and take one tile after the other. They load tiles by TMA (before Hopper
through pointers, which Triton makes from the descriptors), as stored or transposed:

    out [i, j]  =  sum over d of  A [i, d] B [j, d]        A stored [i, d] or [d, i], B likewise

The gates that backward computes again may differ from forward's in the last bit, so a unit near
zero may be active in only one of the two. Both are correct roundings of the same gate.
"""

from functools import partial
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats.active_csr import ActiveCsr
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.triton import BoundKernel, box, options
from sparsebench.kernels.twell._gather import act, sign

BAND = 8  # tiles of rows side by side, so that the tiles of A and B that run are in L2
DEPTH_BYTES, STAGES = 128, 3
WIDTH = 1024  # columns of H that are summed at a time
SIZES = "m", "height", "width", "depth", "capacity"  # compiled once for any

Kind = Literal["plain", "gated", "hidden", "slopes", "two_products"]
"""The result of a product:

    plain           out = A B
    gated           out = act(out) * (A B)
    hidden          out = (act(A) * A2) B
    slopes          out, out2 = dG, dU of dH = A B, over G and U
    two_products    out = A B + A2 B2
"""


def forward(
    x: Tensor,
    wu: Tensor,
    wd_t: Tensor,
    g: Tensor,
    y: Tensor,
    norms: Tensor,
    active: ActiveCsr,
    *,
    squared: bool,
    device: torch.device,
) -> list[BoundKernel]:
    """Return the kernels of Y [m, k] and norms [m]; H overwrites g [m, n]; wu, wd_t [n, k]."""
    product = partial(_product, active, squared, device)
    (m, n), programs = g.shape, 4 * multiprocessors(device)
    args = g, norms, active.offsets, m, n, active.capacity
    constants = {"WIDTH": WIDTH, "num_warps": 4}
    return [
        product("gated", x, wu, g),
        BoundKernel(_norms, (programs,), args, constants, norms),
        product("plain", g, wd_t, y, transposed=(False, True)),
    ]


def backward(
    x: Tensor,
    dy: Tensor,
    weights: tuple[Tensor, Tensor, Tensor],
    dnorms: Tensor,
    out: tuple[Tensor, Tensor, Tensor, Tensor],
    active: ActiveCsr,
    *,
    squared: bool,
    device: torch.device,
) -> list[BoundKernel]:
    """Return the kernels that write dX [m, k] and dWg, dWu, dWd.T [n, k] into `out`.

    weights are Wg, Wu and Wd.T. Allocates two matrices [m, n].
    """
    product = partial(_product, active, squared, device)
    (wg, wu, wd_t), (dx, dwg, dwu, dwd_t) = weights, out
    g, u = (x.new_empty(len(x), len(wg)) for _ in range(2))
    both = True, True
    return [
        product("plain", x, wg, g),
        product("plain", x, wu, u),
        product("hidden", g, dy, dwd_t, a2=u, transposed=both),
        product("slopes", dy, wd_t, g, out2=u, norms=dnorms),
        product("plain", g, x, dwg, transposed=both),
        product("plain", u, x, dwu, transposed=both),
        product("two_products", g, wg, dx, a2=u, b2=wu, transposed=(False, True)),
    ]


def _product(
    active: ActiveCsr,
    squared: bool,
    device: torch.device,
    kind: Kind,
    a: Tensor,
    b: Tensor,
    out: Tensor,
    *,
    a2: Tensor | None = None,
    b2: Tensor | None = None,
    out2: Tensor | None = None,
    norms: Tensor | None = None,
    transposed: tuple[bool, bool] = (False, False),
) -> BoundKernel:
    """Return the kernel of a product; `transposed` says if A and B are stored transposed."""
    depth = DEPTH_BYTES // a.element_size()
    rows, columns, warps = tile_of(device, a.element_size(), kind)
    a_box, b_box = (
        (depth, side) if across else (side, depth)
        for side, across in zip((rows, columns), transposed, strict=True)
    )
    tile = rows, columns
    operands = (a, a_box), (b, b_box), (a2, a_box), (b2, b_box), (out, tile), (out2, tile)
    boxes = (None if t is None else box(t, *shape, "tma") for t, shape in operands)
    total = a.shape[0] if transposed[0] else a.shape[1]
    sizes = len(active.offsets) - 1, *out.shape, total, active.capacity
    flags = {"KIND": kind, "A_T": transposed[0], "B_T": transposed[1], "SQUARED": squared}
    sides = {"ROWS": rows, "COLUMNS": columns, "DEPTH": depth, "BAND": BAND, "STAGES": STAGES}
    constants = {**sides, **flags, **options(warps, "pointers")}
    grid = (2 * multiprocessors(device),)  # two per SM: one stores while the other multiplies
    return BoundKernel(_multiply, grid, (*boxes, norms, active.offsets, *sizes), constants, out)


def tile_of(device: torch.device, itemsize: int, kind: Kind) -> tuple[int, int, int]:
    """Return rows, columns and warps of the largest tile that does not spill."""
    if before_hopper(device) or itemsize == 4:
        return 64, 64, 8
    return (128, 64, 8) if kind == "slopes" else (128, 128, 8)


def before_hopper(device: torch.device) -> bool:
    """Return whether the device has no TMA, so that tiles are loaded through pointers."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) < (9, 0)


@triton.jit(do_not_specialize=("m", "capacity"))  # type: ignore[untyped-decorator]
def _norms(h, norms, offsets, m, n, capacity, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    if tl.load(offsets + m) > capacity:
        lanes = tl.arange(0, WIDTH)
        for token in range(tl.program_id(0), m, tl.num_programs(0)):
            total = tl.zeros((WIDTH,), tl.float32)
            for first in range(0, n, WIDTH):
                row = tl.load(h + token * n + first + lanes, lanes < n - first, 0.0)
                total += tl.abs(row.to(tl.float32))
            tl.store(norms + token, tl.sum(total, 0))


@triton.jit(do_not_specialize=SIZES)  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    a,
    b,
    a2,
    b2,
    out,
    out2,
    norms,
    offsets,
    m,
    height,
    width,
    depth,
    capacity,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    A_T: tl.constexpr,
    B_T: tl.constexpr,
    SQUARED: tl.constexpr,
):
    if tl.load(offsets + m) > capacity:
        row_tiles, column_tiles = tl.cdiv(height, ROWS), tl.cdiv(width, COLUMNS)
        # One stage: the store reuses the operands' shared memory, so that two programs fit an SM.
        tiles, programs = row_tiles * column_tiles, tl.num_programs(0)
        for tile in tl.range(tl.program_id(0), tiles, programs, num_stages=1):
            band = tile // (BAND * column_tiles)
            high = tl.minimum(BAND, row_tiles - band * BAND)
            inner = tile - band * BAND * column_tiles
            row = (band * BAND + inner % high) * ROWS
            column = inner // high * COLUMNS

            total = tl.zeros((ROWS, COLUMNS), tl.float32)
            for d in tl.range(0, depth, DEPTH, num_stages=STAGES):
                left = a.load([d, row]) if A_T else a.load([row, d])
                if KIND == "hidden":
                    ups = a2.load([d, row]).to(tl.float32)
                    left = (act(left.to(tl.float32), SQUARED) * ups).to(left.dtype)
                right = b.load([d, column]) if B_T else b.load([column, d])
                left = left.T if A_T else left
                right = right if B_T else right.T
                total = tl.dot(left, right, total, input_precision="ieee")
            if KIND == "two_products":
                for d in tl.range(0, depth, DEPTH, num_stages=STAGES):
                    left, right = a2.load([row, d]), b2.load([d, column])
                    total = tl.dot(left, right, total, input_precision="ieee")

            if KIND == "gated":
                gate = out.load([row, column]).to(tl.float32)
                total = act(gate, SQUARED) * total.to(out.dtype).to(tl.float32)
                total = tl.where(gate <= 0, 0.0, total)  # zero if inactive, whatever U is
            if KIND == "slopes":
                gate = out.load([row, column]).to(tl.float32)
                ups = out2.load([row, column]).to(tl.float32)
                rows = row + tl.arange(0, ROWS)
                weight = tl.load(norms + rows, rows < height, 0.0)[:, None]
                hidden = (act(gate, SQUARED) * ups).to(out.dtype).to(tl.float32)
                total += tl.where(weight == 0, 0.0, weight * sign(hidden))
                du = tl.where(gate <= 0, 0.0, total * act(gate, SQUARED))
                out2.store([row, column], du.to(out.dtype))
                slope = 2 * gate if SQUARED else 1.0
                total = tl.where(gate <= 0, 0.0, total * ups * slope)
            out.store([row, column], total.to(out.dtype))
