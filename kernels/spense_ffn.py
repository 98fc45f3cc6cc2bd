"""Gated feed-forward layer with 2:4 hybrid weights on Hopper, in two launches of spense_wgmma.

    gate and up, one matrix      0
    +---------------------+                   H = act(X @ Wg.T) * (X @ Wu.T)
    | gate, rows 0 to 7   |      8
    | up, rows 0 to 7     |      16           Y = H @ Wd.T
    | gate, rows 8 to 15  |
    | ...                 |      sparse rows end at twice those of gate, then come dense ones
    +---------------------+      2 n

A thread of the kernel has the sums of a unit's gate and of its up, so G and U never leave registers
and H is rounded once. As products of their own, G and U would be written, read, and H written: at
16 bits 10 bytes for each of m n elements, where 2 are written here. At m = 8192 and n = 25600 that
is 1.7 GB less, 0.39 ms at 4.3 TB/s.

`hidden` is the step in between for products G | U [m, 2 half] of other kernels.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.spense import Spense
from sparsebench.kernels import spense_wgmma
from sparsebench.kernels._cuda import supports_hopper
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Unsupported
from sparsebench.kernels._triton import Program

TURN = 8  # rows of gate and of up: of 16 that a warp multiplies, a thread has two, 8 apart
# Of H that a program writes. `front` is a multiple of FEATURES, as formats/spense.py's ROW_STEP is.
TOKENS, FEATURES = 16, 128


def joined(gate: Spense, up: Spense) -> Spense:
    """Return gate and up [n, k] as one matrix, in the order drawn above; Unsupported if it cannot.

    Both are split by rows, at the same one, and n is a multiple of 8.
    """
    parts = [(w.shape, w.sparse_shape, w.dtype) for w in (gate, up)]
    (n, k), (rows, columns), _ = parts[0]
    if parts[0] != parts[1] or columns < k:
        found = " and ".join(f"{list(inner)} sparse of {list(whole)}" for whole, inner, _ in parts)
        raise Unsupported(f"expected gate and up split at the same row, found {found}")
    if n % TURN:
        raise Unsupported(f"expected a multiple of {TURN} hidden units, found {n}")
    both = interleaved(gate.to_dense(), up.to_dense())
    return Spense.from_dense(both, dense_fraction=1 - rows / n, split="rows")


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    """Return [2 n, ...] of gate's and up's [n, ...], n a multiple of 8: 8 of each in turn."""
    return torch.stack([w.unflatten(0, (-1, TURN)) for w in (gate, up)], 1).flatten(0, 2)


def parted(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Undo `interleaved`."""
    gate, up = rows.unflatten(0, (-1, 2, TURN)).unbind(1)
    return gate.flatten(0, 1), up.flatten(0, 1)


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
    x, activation = operands.activations["x"], operands.problem["activation"]
    gate_up = _product(operands, "gate_up", joined(wg, wu), x, activation)
    h = gate_up()
    assert isinstance(h, Tensor)
    down = _product(operands, "down", wd, h)

    def run() -> Tensor:
        gate_up()
        y = down()
        assert isinstance(y, Tensor)
        return y

    return Launch(run, {"gate_up": gate_up.choice, "down": down.choice}, gate_up.code)


def _product(
    operands: Operands, name: str, w: Spense, x: Tensor, activation: str | None = None
) -> Launch:
    settled = operands.settled and operands.settled[name]
    own: dict[str, Any] = {"weights": {"w": w}, "activations": {"x": x}, "settled": settled}
    return spense_wgmma.prepare(replace(operands, **own), activation)


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
