"""Dense products, in Triton, of the groups of tokens that ffn_sparse.cu leaves to them.

    left   int32 [3]        three counts: groups that are left; programs that have finished; groups
                            that ffn_sparse.cu has taken beyond the first of each CTA
    heavy  int32 [groups]   the numbers of the groups left, in any order; a group has GROUP tokens

                          FEATURES
            group 7    +-----------+
    TOKENS  group 2    |   tile    |        H[t] = act(G[t]) * (X[t] @ Wu.T)    over G, in place
            group 31   |           |        Y[t] = H[t] @ Wd.T
            ...        +-----------+

The host does not know how many groups are left, so each call launches both products, one program
per SM. They start early (PTX, griddepcontrol), and end at once if no group is left. Otherwise
programs are persistent and take one tile after the other. Tiles of X are loaded row by row through
pointers, or by TMA if all groups are left.

The sums of a row do not depend on its neighbours, so the order of `heavy` does not change any bit.
The last program of the last product sets all counts to zero for the next call. Without a gate, H is
act(G), and there is one product.
"""

from functools import lru_cache
from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.triton import SMALLEST_TILE, BoundKernel, Template, box, options
from sparsebench.kernels.twell._call import TwellCall
from sparsebench.kernels.twell._gather import act

GROUP = 8  # tokens
BAND = 8  # tiles of tokens side by side, so that the tiles of X and W that run are in L2
DEPTH, STAGES = 64, 4
PLANS = 256  # cached, one per layer and number of tokens

Kind = Literal["gated", "plain", "activated"]
"""The result of a product:

    gated        out = act(out) * (X W.T)
    plain        out = X W
    activated    out = act(X) W
"""


@lru_cache(PLANS)
def template_of(call: TwellCall, device: torch.device, height: int = GROUP) -> Template:
    """Return the products of call.m tokens, which take the operands of `products`, as a template.

    Without a gate there is no wu among them. A group of ffn_sparse.cu has `height` tokens.
    """
    (m, n, k), int32 = call[:3], torch.int32
    shapes = {"x": (m, k), "g": (m, n), "wu": (n, k), "wd_t": (n, k), "y": (m, k)}
    tensors = {name: torch.empty(s, dtype=call.dtype, device="meta") for name, s in shapes.items()}
    counts = {"left": 3, "heavy": -(-m // height)}
    tensors |= {name: torch.empty(s, dtype=int32, device="meta") for name, s in counts.items()}
    if not call.gated:
        del tensors["wu"]
    programs = products(**tensors, squared=call.squared, device=device, height=height)
    return Template(programs, [*tensors.values()], [tensors["y"]])


def products(
    x: Tensor,
    g: Tensor,
    wd_t: Tensor,
    y: Tensor,
    left: Tensor,
    heavy: Tensor,
    *,
    squared: bool,
    device: torch.device,
    wu: Tensor | None = None,
    height: int = GROUP,
) -> list[BoundKernel]:
    """Return the kernels of H, which overwrites the gates g [m, n], and of Y; relu2 if `squared`.

    `device` is where they run, also if the tensors have no data (meta).
    wu and wd_t [n, k]. Without wu, H is act(g), which the product of Y computes as it loads g.
    """
    early, programs = device.type != "cpu", multiprocessors(device)

    def product(kind: Kind, x: Tensor, w: Tensor, out: Tensor) -> BoundKernel:
        (m, k), n = x.shape, out.shape[1]
        tokens = min(128, max(SMALLEST_TILE, triton.next_power_of_2(m)))
        features = 128 if m > 1024 else 64 if m > 64 else 32
        warps = 8 if features == 128 else 4
        sides = {"TOKENS": tokens, "FEATURES": features, "DEPTH": DEPTH}
        sides |= {"GROUP": height, "BAND": BAND}
        flags = {"STAGES": STAGES, "KIND": kind, "SQUARED": squared, "EARLY": early}
        sides_of_w = (features, DEPTH) if kind == "gated" else (DEPTH, features)  # wu, or wd_t
        boxes = box(x, tokens, DEPTH, "tma"), box(w, *sides_of_w, "tma")
        args = (x, *boxes, out, heavy, left, m, n, k)
        constants = {**sides, **flags, **options(warps, "pointers"), "launch_pdl": early}
        return BoundKernel(_multiply, (programs,), args, constants, out)

    if wu is None:
        return [product("activated", g, wd_t, y)]
    return [product("gated", x, wu, g), product("plain", g, wd_t, y)]


@triton.jit  # type: ignore[untyped-decorator]
def _add(x, w, total, KIND: tl.constexpr, SQUARED: tl.constexpr):  # type: ignore[no-untyped-def]
    # act(X) is the second operand. As the first, in registers, Triton 3.6 overwrites it before it
    # is read if loads are pipelined.
    if KIND == "activated":
        total = tl.dot(w.T, act(x.to(tl.float32), SQUARED).to(x.dtype).T, total)
    elif KIND == "plain":
        total = tl.dot(x, w, total)
    else:
        total = tl.dot(x, w.T, total)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _load(w, feature, depth, KIND: tl.constexpr):  # type: ignore[no-untyped-def]
    if KIND == "gated":
        return w.load([feature, depth])
    else:  # noqa: RET505 (Triton needs both branches)  the transpose of Wd
        return w.load([depth, feature])


@triton.jit  # type: ignore[untyped-decorator]
def _multiply(  # type: ignore[no-untyped-def]
    x,
    boxes,
    w,
    out,
    heavy,
    left,
    m,
    n,
    k,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
    BAND: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    SQUARED: tl.constexpr,
    EARLY: tl.constexpr,
):
    if EARLY:  # launched before the previous kernel has ended
        gdc_launch_dependents()
        gdc_wait()
    count = tl.load(left)
    if count > 0:
        features = tl.arange(0, FEATURES)
        lanes = tl.arange(0, DEPTH)
        whole = count * GROUP >= m  # all groups are left: X by TMA
        token_tiles = tl.cdiv(count * GROUP, TOKENS)
        feature_tiles = tl.cdiv(n, FEATURES)
        for tile in range(tl.program_id(0), token_tiles * feature_tiles, tl.num_programs(0)):
            band = tile // (BAND * feature_tiles)
            height = tl.minimum(BAND, token_tiles - band * BAND)
            inner = tile - band * BAND * feature_tiles
            feature = inner // height * FEATURES
            token = (band * BAND + inner % height) * TOKENS
            slots = token + tl.arange(0, TOKENS)
            place = slots // GROUP
            rows = tl.load(heavy + place, place < count, 0) * GROUP + slots % GROUP
            rows = tl.where(whole, slots, rows)
            there = ((place < count) & (rows < m))[:, None]
            rows = rows.to(tl.int64)[:, None]

            if KIND == "activated":
                total = tl.zeros((FEATURES, TOKENS), tl.float32)
            else:
                total = tl.zeros((TOKENS, FEATURES), tl.float32)
            if whole:
                for depth in tl.range(0, k, DEPTH, num_stages=STAGES):
                    x_tile = boxes.load([token, depth])
                    w_tile = _load(w, feature, depth, KIND)
                    total = _add(x_tile, w_tile, total, KIND, SQUARED)
            else:
                for depth in tl.range(0, k, DEPTH, num_stages=STAGES):
                    inside = (lanes < k - depth)[None, :]
                    x_tile = tl.load(x + rows * k + (depth + lanes)[None, :], there & inside, 0.0)
                    w_tile = _load(w, feature, depth, KIND)
                    total = _add(x_tile, w_tile, total, KIND, SQUARED)

            if KIND == "activated":
                total = total.T
            out_at = out + rows * n + (feature + features)[None, :]
            mask = there & (features < n - feature)[None, :]
            if KIND == "gated":
                total *= act(tl.load(out_at, mask, 0.0).to(tl.float32), SQUARED)
            tl.store(out_at, total.to(out.dtype.element_ty), mask)
        if KIND == "plain" or KIND == "activated":
            tl.debug_barrier()  # all warps have read the count: it may change now
            through = tl.atomic_add(left + 1, 1)
            if through == tl.num_programs(0) - 1:
                tl.store(left, 0)
                tl.store(left + 1, 0)
    if (KIND == "plain" or KIND == "activated") and tl.program_id(0) == 0:
        tl.store(left + 2, 0)
