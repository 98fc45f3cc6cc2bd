"""Gated feed-forward layer with 2:4 hybrid weights on Hopper, in two launches of spense_wgmma.

    gate and up, one matrix      0
    +---------------------+                   H = act(X @ Wg.T) * (X @ Wu.T)
    | gate, rows 0 to 7   |      8
    | up, rows 0 to 7     |      16           Y = H @ Wd.T
    | gate, rows 8 to 15  |
    | ...                 |      sparse rows end at twice those of gate, then come dense ones
    +---------------------+      2 n

A thread of the kernel has the accumulators of both gate and up of a unit, so G and U never leave
registers, and H is rounded once. Separate products would write G and U, read them, and write H: 10
bytes for each of m n elements in 16 bits. Here only H is written, 2 bytes. At m = 8192 and
n = 25600 that saves 1.7 GB, or 0.39 ms at 4.3 TB/s.

    fp8   A separate launch rounds X to e4m3 (_common/elementwise.py); it is timed, too.
          Accumulators are scaled in fp32, before act and before Y is rounded.
"""

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.elementwise import quantised, scale_of
from sparsebench.kernels._common.gated_layer import launch_of_layer
from sparsebench.kernels._common.operator import Earlier
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._call import bound, weight_of

PRODUCT = spense_wgmma.KERNEL
TURN = 8  # rows of gate, then of up; a thread has two of its warp's 16 rows, 8 apart


def joined(gate: Spense, up: Spense, *, split: str = "rows") -> Spense:
    """Return gate and up [n, k] as one matrix [2 n, k], interleaved as drawn above.

    Raises Unsupported unless n is a multiple of 8, and both are split at the same row or column.
    """
    layouts = [(w.shape, w.sparse_shape, w.dtype) for w in (gate, up)]
    (n, k), (rows, columns), _ = layouts[0]
    fits = columns >= k if split == "rows" else rows in (0, n)
    if layouts[0] != layouts[1] or not fits:
        actual = " and ".join(
            f"{list(inner)} sparse of {list(whole)}" for whole, inner, _ in layouts
        )
        raise Unsupported(f"expected gate and up split at the same {split[:-1]}, found {actual}")
    if n % TURN:
        raise Unsupported(f"expected a multiple of {TURN} hidden units, found {n}")
    both = interleaved(gate.to_dense(), up.to_dense())
    sparse = rows / n if split == "rows" else columns / k if rows else 0
    return Spense.from_dense(both, dense_fraction=1 - sparse, split=split)


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return [2 n, ...]: 8 rows of gate [n, ...], then 8 of up, and so on; n a multiple of 8."""
    return torch.stack([w.unflatten(0, (-1, TURN)) for w in (gate, up)], 1).flatten(0, 2)


def parted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `interleaved`."""
    gate, up = rows.unflatten(0, (-1, 2, TURN)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def prepare(operands: Operands) -> Launch:
    """Plan both products, each with a search of its own. Raises Unsupported."""
    wg, wu, wd = (weight_of(operands.weights, name) for name in ("wg", "wu", "wd"))
    problem, x, (n, k) = operands.problem, operands.activations["x"], wg.shape
    of_h = of_y = rounding = None
    if problem["dtype"] == "fp8":
        rounding = quantised(x)
        x = rounding()
        of_h = torch.full((2 * n,), scale_of(problem, k), device=x.device)
        of_y = torch.full((k,), scale_of(problem, n), device=x.device)
    parts = (operands.pinned or {}).items()  # those of 0.3 do not name the kernel
    pinned = {name: {"kernel": PRODUCT.name, **choice} for name, choice in parts}
    earlier = Earlier(pinned, operands.timed)
    both, activation = joined(wg, wu), problem["activation"]
    first = bound(both, x, (PRODUCT,), of_h, activation=activation)
    gate_up = first.select(earlier.part("gate_up"))
    hidden = first.run(gate_up.product)
    h = hidden()
    assert isinstance(h, Tensor)
    down = bound(wd, h, (PRODUCT,), of_y).select(earlier.part("down"))

    def run() -> Tensor:
        if rounding is not None:
            rounding()
        y: Tensor = down.product.run(hidden(), wd.sparse, wd.dense, of_y)
        return y

    return launch_of_layer(run, {"gate_up": gate_up, "down": down})


KERNEL = Kernel("ffn", "spense", "cuda", prepare, spense_wgmma.unsupported)
