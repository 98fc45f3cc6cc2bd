"""FLOPs of the layers' operators, for torch.utils.flop_counter: two for each multiply-add.

block-sparse      stored blocks only
sparse gated MLP  the gate is dense; up, down and all of backward count every slot as filled, since
                  only the device knows how many are
Spense            stored elements of W: half of the 2:4 part and all of the rest
bitmap            every element of W, because only the device knows how many are stored
experts           stored elements of W, as if every expert had equally many and as many tokens;
                  dX of 2:4 counts all elements, because it multiplies W written out
"""

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from sparsebench.kernels.nn import _experts_op as _experts_op
from sparsebench.kernels.nn import _spense_op as _spense_op
from sparsebench.kernels.nn import bitmap as bitmap
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
    return int(2 * prod(ids) * sum(_stored_of_expert(gate_up, down, *sizes)))


@register_flop_formula(OPS.sparse_experts_gradients)
def _(dy: Shape, x: Shape, ids: Shape, weights: Shape, *operands: Any, **_: Any) -> int:
    gate_up, down, experts, units, features, columns, _activation, needed = operands
    stored = _stored_of_expert(gate_up, down, experts, units, features, columns)
    written = stored if columns is None else (2 * units * features, units * features)
    for_x, _for_shares, for_gate_up, for_down = needed
    products = stored[0] + written[1]  # G and U again, and V
    products += for_x * written[0] + for_gate_up * stored[0] + for_down * stored[1]
    return int(2 * prod(ids) * products)


def _stored_of_expert(
    gate_up: Any, down: Any, experts: int, units: int, features: int, columns: Any, *_: Any
) -> tuple[float, float]:
    """Return the stored elements of gate_up and of down of an expert."""
    if columns is None:
        return prod(gate_up[0]) / experts, prod(down[0]) / experts
    both = 2 * units * (features - columns[0] // 2), features * (units - columns[1] // 2)
    return float(both[0]), float(both[1])
