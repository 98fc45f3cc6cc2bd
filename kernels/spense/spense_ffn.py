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

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.elementwise import quantised, scale_of
from sparsebench.kernels._common.scales import Scales
from sparsebench.kernels._common.search import lines_of
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._operands import weight_of

TURN = 8  # rows of gate, then of up; a thread has two of its warp's 16 rows, 8 apart


def joined(gate: Spense, up: Spense) -> Spense:
    """Return gate and up [n, k] as one matrix [2 n, k], interleaved as drawn above.

    Raises Unsupported unless both are split at the same row and n is a multiple of 8.
    """
    parts = [(w.shape, w.sparse_shape, w.dtype) for w in (gate, up)]
    (n, k), (rows, columns), _ = parts[0]
    if parts[0] != parts[1] or columns < k:
        actual = " and ".join(f"{list(inner)} sparse of {list(whole)}" for whole, inner, _ in parts)
        raise Unsupported(f"expected gate and up split at the same row, found {actual}")
    if n % TURN:
        raise Unsupported(f"expected a multiple of {TURN} hidden units, found {n}")
    both = interleaved(gate.to_dense(), up.to_dense())
    return Spense.from_dense(both, dense_fraction=1 - rows / n, split="rows")


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return [2 n, ...]: 8 rows of gate [n, ...], then 8 of up, and so on; n a multiple of 8."""
    return torch.stack([w.unflatten(0, (-1, TURN)) for w in (gate, up)], 1).flatten(0, 2)


def parted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `interleaved`."""
    gate, up = rows.unflatten(0, (-1, 2, TURN)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Choose a configuration for each of the two launches; `tuned` is that of spense_wgmma."""
    wg, wu, wd = (weight_of(operands.weights, name) for name in ("wg", "wu", "wd"))
    problem, x, (n, k) = operands.problem, operands.activations["x"], wg.shape
    first = [quantised(x)] if problem["dtype"] == "fp8" else []
    x = first[0]() if first else x
    of_h = torch.full((2 * n,), scale_of(problem, k), device=x.device) if first else None
    of_y = torch.full((k,), scale_of(problem, n), device=x.device) if first else None
    both, activation = joined(wg, wu), problem["activation"]
    gate_up = _product(operands, "gate_up", both, x, activation, Scales(of_h), tuned)
    h = gate_up()
    assert isinstance(h, Tensor)
    down = _product(operands, "down", wd, h, None, Scales(of_y), tuned)
    before: list[Callable[[], object]] = [*first, gate_up]

    def run() -> Tensor:
        for step in before:
            step()
        y = down()
        assert isinstance(y, Tensor)
        return y

    choice = {"gate_up": gate_up.choice, "down": down.choice}
    candidates = [*lines_of("gate and up", gate_up), *lines_of("down", down)]
    return Launch(run, choice, gate_up.code, candidates)


def _product(
    operands: Operands,
    name: str,
    w: Spense,
    x: Tensor,
    activation: str | None,
    scales: Scales,
    tuned: Tuned,
) -> Launch:
    pinned = operands.pinned and operands.pinned[name]
    product: dict[str, Any] = {"weights": {"w": w}, "activations": {"x": x}, "pinned": pinned}
    return spense_wgmma.prepare(replace(operands, **product), activation, scales, tuned=tuned)


KERNEL = Kernel("ffn", "spense", "cuda", prepare, spense_wgmma.unsupported)
