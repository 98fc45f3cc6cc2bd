"""Gated feed-forward layer with 2:4 hybrid weights on Hopper: two products, and act in between.

    gate and up, one matrix      0            G | U = X @ [gate, up].T      spense_wgmma
    +---------------------+
    | gate, sparse rows   |      front        H = act(G) * U                Triton, below
    | up, sparse rows     |
    +---------------------+      2 front      Y = H @ Wd.T                  spense_wgmma
    | gate, dense rows    |
    |                     |      front + half
    | up, dense rows      |
    +---------------------+      2 half

`half` is the rows of gate in whole tiles of 64; what is beyond them is zero. Where gate has no
dense rows, or no sparse ones, `front` is 0. G, U and H are rounded to the dtype, as three dense
products round theirs; act(G) is not. H costs a read of G and U and a write of its own.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.spense import ROWS, Spense
from sparsebench.kernels import spense_wgmma
from sparsebench.kernels._cuda import supports_hopper
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Unsupported
from sparsebench.kernels._triton import Program

# Of H that a program writes. `front` is a multiple of FEATURES, as formats/spense.py's ROW_STEP is.
TOKENS, FEATURES = 16, 128


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


def hidden(products: Tensor, n: int, front: int, activation: str) -> Program:
    """Return the program of H [m, n] from products [m, 2 half], contiguous.

    activation  silu, relu, relu2 or gelu_tanh, GELU by its tanh approximation
    """
    (m, width), h = products.shape, products.new_empty(len(products), n)
    tokens = min(TOKENS, triton.next_power_of_2(m))
    grid = (triton.cdiv(m, tokens) * triton.cdiv(n, FEATURES),)
    constants = {"TOKENS": tokens, "FEATURES": FEATURES, "ACTIVATION": activation}
    return Program(_activate, grid, (products, h, m, n, front, width // 2), constants, h)


def prepare(operands: Operands) -> Launch:
    """Settle both products, each alone."""
    wg, wu, wd = (_spense(operands.weights, name) for name in ("wg", "wu", "wd"))
    gate_up = _product(operands, "gate_up", joined(wg, wu), operands.activations["x"])
    products, (n, _) = gate_up(), wg.shape
    assert isinstance(products, Tensor)
    between = hidden(products, n, front_of(n, wg.sparse_shape[0]), operands.problem["activation"])
    down = _product(operands, "down", wd, between())

    def run() -> Tensor:
        gate_up()
        between()
        y = down()
        assert isinstance(y, Tensor)
        return y

    return Launch(run, {"gate_up": gate_up.choice, "down": down.choice}, gate_up.code)


def _product(operands: Operands, name: str, w: Spense, x: Tensor) -> Launch:
    settled = operands.settled and operands.settled[name]
    own: dict[str, Any] = {"weights": {"w": w}, "activations": {"x": x}, "settled": settled}
    return spense_wgmma.prepare(replace(operands, **own))


def _spense(weights: Mapping[str, Format], name: str) -> Spense:
    weight = weights[name]
    assert isinstance(weight, Spense)
    return weight


KERNEL = Kernel("ffn", "spense", "cuda", prepare, supports_hopper)


@triton.jit  # type: ignore[untyped-decorator]
def _activate(  # type: ignore[no-untyped-def]
    products,
    h,
    m,
    n,
    front,
    half,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    tiles = tl.cdiv(n, FEATURES)
    first = tl.program_id(0) % tiles * FEATURES
    token = tl.program_id(0) // tiles * TOKENS + tl.arange(0, TOKENS)
    feature = first + tl.arange(0, FEATURES)
    inside = (token < m)[:, None] & (feature < n)[None, :]
    row = token.to(tl.int64)[:, None]

    at = products + row * (2 * half) + feature[None, :]
    to_gate = tl.where(first < front, 0, front)
    to_up = tl.where(first < front, front, half)
    gate = tl.load(at + to_gate, inside, 0.0).to(tl.float32)
    up = tl.load(at + to_up, inside, 0.0).to(tl.float32)

    if ACTIVATION == "silu":
        gate = gate / (1 + tl.exp(-gate))
    elif ACTIVATION == "gelu_tanh":  # (1 + tanh(z / 2)) / 2 is 1 / (1 + exp(-z))
        z = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)  # 2 sqrt(2 / pi)
        gate = gate / (1 + tl.exp(-z))
    else:
        gate = tl.where(gate <= 0, 0.0, gate)  # NaN stays
        if ACTIVATION == "relu2":
            gate = gate * gate
    tl.store(h + row * n + feature[None, :], (gate * up).to(h.dtype.element_ty), inside)
