"""Gated feed-forward layer with 2:4 hybrid weights on Hopper: two products, and act in between.

    gate and up, one matrix      0            G | U = X @ [gate, up].T      spense_wgmma
    +---------------------+
    | gate, sparse rows   |      front        H = act(G) * U                _hidden.py
    | up, sparse rows     |
    +---------------------+      2 front      Y = H @ Wd.T                  spense_wgmma
    | gate, dense rows    |
    |                     |      front + half
    | up, dense rows      |
    +---------------------+      2 half

`half` is the rows of gate in whole tiles of 64; what is beyond them is zero. Where gate has no
dense rows, or no sparse ones, `front` is 0. G, U and H are rounded to the dtype, as three dense
products round theirs; act(G) is not. H costs a read of G and U and a write of its own.

    fp8   X and H are rounded to e4m3 (_hidden.py), each in a launch that is timed, G and U to bf16
          before they are scaled; down scales its sums in fp32
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.spense import ROWS, Spense
from sparsebench.kernels import spense_wgmma
from sparsebench.kernels._hidden import hidden, quantised, scale_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Unsupported
from sparsebench.kernels._tuned import Tuned
from sparsebench.kernels.spense_wgmma import Scales


def joined(gate: Spense, up: Spense) -> Spense:
    """Return gate and up [n, k] as one matrix, in the order drawn above; Unsupported if it cannot.

    Both are split by rows, at the same one.
    """
    parts = [(w.shape, w.sparse_shape, w.dtype) for w in (gate, up)]
    (n, k), (rows, columns), _ = parts[0]
    if parts[0] != parts[1] or columns < k:
        found = " and ".join(f"{list(inner)} sparse of {list(whole)}" for whole, inner, _ in parts)
        raise Unsupported(f"expected gate and up split at the same row, found {found}")
    half = whole_tiles(n)
    sparse_rows = 2 * rows if rows < n else 2 * half
    tiles = torch.cat((gate.sparse, up.sparse)), torch.cat((gate.dense, up.dense))
    return Spense((2 * half, k), gate.dtype, (sparse_rows, k), *tiles)


def parted(rows: Tensor, n: int, front: int) -> tuple[Tensor, Tensor]:
    """Return gate's and up's [n, ...] of rows [2 half, ...] in the order of `joined`."""
    end = front + len(rows) // 2
    gate = torch.cat((rows[:front], rows[2 * front : end]))
    up = torch.cat((rows[front : 2 * front], rows[end:]))
    return gate[:n], up[:n]


def whole_tiles(n: int) -> int:
    """Return `half` of n hidden units."""
    return -(-n // ROWS) * ROWS


def front_of(n: int, sparse_rows: int) -> int:
    """Return `front` of a gate of n rows."""
    return sparse_rows if sparse_rows < n else 0


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Settle both products, each alone, as spense_wgmma.py does with `tuned`."""
    wg, wu, wd = (_spense(operands.weights, name) for name in ("wg", "wu", "wd"))
    problem, x, (n, k) = operands.problem, operands.activations["x"], wg.shape
    first = [quantised(x)] if problem["dtype"] == "fp8" else []
    x = first[0]() if first else x
    gate_up = _product(operands, "gate_up", joined(wg, wu), x, Scales(), tuned)
    products = gate_up()
    assert isinstance(products, Tensor)
    how = problem["activation"], x.dtype, scale_of(problem, k)
    between = hidden(products, n, front_of(n, wg.sparse_shape[0]), *how)
    of_y = torch.full((k,), scale_of(problem, n), device=x.device) if first else None
    down = _product(operands, "down", wd, between(), Scales(of_y), tuned)

    before: list[Callable[[], object]] = [*first, gate_up, between]

    def run() -> Tensor:
        for step in before:
            step()
        y = down()
        assert isinstance(y, Tensor)
        return y

    return Launch(run, {"gate_up": gate_up.choice, "down": down.choice}, gate_up.code)


def _product(
    operands: Operands, name: str, w: Spense, x: Tensor, scales: Scales, tuned: Tuned
) -> Launch:
    settled = operands.settled and operands.settled[name]
    own: dict[str, Any] = {"weights": {"w": w}, "activations": {"x": x}, "settled": settled}
    return spense_wgmma.prepare(replace(operands, **own), scales, tuned=tuned)


def _spense(weights: Mapping[str, Format], name: str) -> Spense:
    weight = weights[name]
    assert isinstance(weight, Spense)
    return weight


KERNEL = Kernel("ffn", "spense", "cuda", prepare, spense_wgmma.supports)
