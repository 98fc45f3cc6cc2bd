"""Dense feed-forward layers of several products, each by its fastest way (cublas.py).

mlp        H = act(X @ Wu.T)            relu is the product's own epilogue, where cuBLASLt is called
           Y = H @ Wd.T                 directly; other activations are one more pass over H

ffn_step   G | U = X @ [Wg, Wu].T       one product of 2 n features
           dH = dY @ Wd
           H, dG | dU                   one Triton kernel: G, U and dH read once
           Y = H @ Wd.T
           dX = dG | dU @ [Wg, Wu]      one product over 2 n units
           dWg, dWu = (dG | dU).T @ X   one product
           dWd.T = H.T @ dY

That is six products where the definition of ffn_step has nine, and each result is written where the
output has it. As in the definition, what is between products is rounded to the problem's dtype, but
for products of element-wise steps, which stay in fp32.
"""

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from sparsebench.kernels._common.search import part_of, told_of
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels._kernel import Launch, Operands, Output
from sparsebench.kernels.dense.cublas import Product, fastest_way

TOKENS, FEATURES = 16, 128  # of a program


def in_turn(*steps: Callable[[], Output]) -> Callable[[], Output]:
    """Return a call of each step, which returns what the last one does."""

    def run() -> Output:
        for step in steps[:-1]:
            step()
        return steps[-1]()

    return run


def mlp(operands: Operands) -> Launch:
    """Choose the fastest way of both products. Raises Unsupported."""
    x, pinned = operands.activations["x"], operands.pinned or {}
    wu, wd = (operands.weights[name].to_dense() for name in ("wu", "wd"))
    activation = operands.problem["activation"]
    h, y = x.new_empty(len(x), len(wu)), torch.empty_like(x)
    first = Product(x, wu.t(), h, relu=activation != "silu")
    up = fastest_way(first, pinned.get("up"), timed=part_of("up", operands.timed))
    after: dict[str, Callable[[], Tensor]] = {
        "silu": lambda: silu(h, inplace=True),
        "relu2": lambda: h.square_(),
    }
    hidden: list[Callable[[], Output]] = [up]
    hidden += [after[activation]] if activation in after else []
    in_turn(*hidden)()  # what the second product is timed on
    second = Product(h, wd.t(), y)
    down = fastest_way(second, pinned.get("down"), timed=part_of("down", operands.timed))
    told = [*told_of("up", up), *told_of("down", down)]
    choice = {"up": up.choice, "down": down.choice}
    return Launch(in_turn(*hidden, down), choice, candidates=told)


def ffn_step(operands: Operands) -> Launch:
    """Choose the fastest way of the six products. Raises Unsupported."""
    x, dy, pinned = operands.activations["x"], operands.activations["dy"], operands.pinned or {}
    wg, wu, wd = (operands.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    (m, k), n, both = x.shape, len(wg), torch.cat((wg, wu))
    products, gradients = x.new_empty(m, 2 * n), x.new_empty(m, 2 * n)
    dh, h, out = x.new_empty(m, n), x.new_empty(m, n), x.new_empty(2 * m + 3 * n, k)
    y, dx, dw, dwd = out.split((m, m, 2 * n, n))
    between = backward(products, dh, h, gradients, operands.problem["activation"] == "relu2")
    steps: dict[str, Product | BoundKernel] = {
        "gate_up": Product(x, both.t(), products),
        "dh": Product(dy, wd, dh),
        "between": between,
        "y": Product(h, wd.t(), y),
        "dx": Product(gradients, both, dx),
        "dw": Product(gradients.t(), x, dw, weight=False),
        "dwd": Product(h.t(), dy, dwd, weight=False),
    }
    launches: list[Callable[[], object]] = []
    choice, told = {}, []
    for name, step in steps.items():
        if isinstance(step, Product):
            chosen = fastest_way(step, pinned.get(name), timed=part_of(name, operands.timed))
            choice[name] = chosen.choice
            told += told_of(name, chosen)
            launches.append(chosen)
        else:
            launches.append(step)
        launches[-1]()  # what the next product is timed on

    def run() -> Tensor:
        for launch in launches:
            launch()
        return out

    return Launch(run, choice, between.code, told)


LAYERS = {"mlp": mlp, "ffn_step": ffn_step}


def backward(
    products: Tensor, dh: Tensor, h: Tensor, gradients: Tensor, squared: bool
) -> BoundKernel:
    """Return the kernel of H [m, n] and dG | dU [m, 2 n] from G | U and dH [m, n], all contiguous.

    H = act(G) * U, dG = dH * U * act'(G), dU = dH * act(G); act is relu, or relu2 if `squared`.
    """
    m, n = h.shape
    tokens = min(TOKENS, triton.next_power_of_2(m))
    grid = (triton.cdiv(m, tokens) * triton.cdiv(n, FEATURES),)
    constants = {"TOKENS": tokens, "FEATURES": FEATURES, "SQUARED": squared}
    return BoundKernel(_backward, grid, (products, dh, h, gradients, m, n), constants, gradients)


@triton.jit  # type: ignore[untyped-decorator]
def _backward(  # type: ignore[no-untyped-def]
    products,
    dh,
    h,
    gradients,
    m,
    n,
    TOKENS: tl.constexpr,
    FEATURES: tl.constexpr,
    SQUARED: tl.constexpr,
):
    tiles = tl.cdiv(n, FEATURES)
    token = tl.program_id(0) // tiles * TOKENS + tl.arange(0, TOKENS)
    feature = tl.program_id(0) % tiles * FEATURES + tl.arange(0, FEATURES)
    inside = (token < m)[:, None] & (feature < n)[None, :]
    row, column = token.to(tl.int64)[:, None], feature[None, :]
    one, two = row * n + column, row * (2 * n) + column

    gate = tl.load(products + two, inside, 0.0).to(tl.float32)
    up = tl.load(products + two + n, inside, 0.0).to(tl.float32)
    of_h = tl.load(dh + one, inside, 0.0).to(tl.float32)

    act = tl.where(gate <= 0, 0.0, gate)  # NaN stays
    slope = 2 * act
    of_gate = tl.where(gate <= 0, 0.0, of_h * up)
    if SQUARED:
        of_gate = of_h * up * slope
        act = act * act
    tl.store(h + one, (act * up).to(h.dtype.element_ty), inside)
    tl.store(gradients + two, of_gate.to(gradients.dtype.element_ty), inside)
    tl.store(gradients + two + n, (of_h * act).to(gradients.dtype.element_ty), inside)
