"""FLOPs of the layers' operators, for torch.utils.flop_counter: two for each multiply-add.

block-sparse      stored blocks only
sparse gated MLP  the gate is dense; up, down and all of backward count every slot as filled, since
                  only the device knows how many are
Spense            stored elements of W: half of the 2:4 part and all of the rest
bitmap            every element of W, because only the device knows how many are stored
experts           stored elements of W, as if every expert had equally many and as many tokens
"""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from sparsebench.kernels.nn import _spense_op as _spense_op
from sparsebench.kernels.nn import bitmap as bitmap
from sparsebench.kernels.nn import experts as experts
from sparsebench.kernels.nn._bsr_autograd import linear as linear
from sparsebench.kernels.twell._autograd import gated_mlp as gated_mlp

OPS = torch.ops.sparsebench  # the imports above define them
Shape = tuple[int, ...]


@register_flop_formula([OPS.block_sparse_linear, OPS.block_sparse_dgrad])
def _(a: Shape, values: Shape, *_: Any, **__: Any) -> int:
    return 2 * a[0] * prod(values)


@register_flop_formula(OPS.block_sparse_wgrad)
def _(dy: Shape, x: Shape, offsets: Shape, columns: Shape, r: int, c: int, **_: Any) -> int:
    return 2 * dy[0] * columns[0] * r * c


@register_flop_formula(OPS.sparse_gated_mlp)
def _(x: Shape, wg: Shape, wu: Shape, wd_t: Shape, squared: bool, slots: int, **_: Any) -> int:
    (m, k), n = x, wg[0]
    return 2 * m * k * (n + 2 * slots)


@register_flop_formula(OPS.sparse_gated_mlp_backward)
def _(dy: Shape, dnorms: Shape, x: Shape, *args: Any, **_: Any) -> int:
    packed: list[Shape] = args[3]  # after the three weights
    slots = packed[1][0]  # of all tokens: dH, two products for dX, three for dW
    return 2 * 6 * slots * x[1]


@register_flop_formula(OPS.spense_linear)
def _(x: Shape, sparse: Shape, dense: Shape, *layout: Any, **_: Any) -> int:
    n, k, rows, columns = layout[:4]
    return int(2 * x[0] * (n * k - rows * columns // 2))


@register_flop_formula(OPS.spense_dgrad)
def _(dy: Shape, x: Shape | None, sparse: Shape, dense: Shape, *layout: Any, **_: Any) -> int:
    n, k, rows, columns = layout[:4]
    again = 0 if x is None else n * k - rows * columns // 2  # G and U
    return int(2 * dy[0] * (n * k + again))


@register_flop_formula([OPS.bitmap_linear, OPS.bitmap_dgrad])
def _(a: Shape, records: Shape, offsets: Shape, n: int, k: int, **_: Any) -> int:
    return 2 * a[0] * n * k


@register_flop_formula(OPS.sparse_experts)
def _(x: Shape, ids: Shape, weights: Shape, gate_up: Any, down: Any, *sizes: Any, **_: Any) -> int:
    h, (experts, units, columns, *_rest) = x[1], sizes
    if columns:
        stored = 2 * units * (h - columns[0] // 2) + h * (units - columns[1] // 2)
    else:
        stored = (prod(gate_up[0]) + prod(down[0])) / experts
    return int(2 * prod(ids) * stored)
