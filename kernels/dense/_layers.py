"""Dense feed-forward layers of several products, each by its fastest call (_gemm.py).

ffn        X in e4m3                    in fp8 only, by Triton (_common/elementwise.py)
           G | U = X @ [Wg, Wu].T       one product of 2 n features, or two side by side
           H = act(G) * U               Triton; in fp8, H is e4m3
           Y = H @ Wd.T

mlp        H = act(X @ Wu.T)            if cuBLASLt is called directly, relu is the product's
           Y = H @ Wd.T                 epilogue; other activations are one more pass over H

ffn_step   G | U = X @ [Wg, Wu].T       one product of 2 n features
           dH = dY @ Wd
           H, dG | dU                   one Triton kernel, which reads G, U and dH once
           Y = H @ Wd.T
           dX = dG | dU @ [Wg, Wu]      one product over 2 n units
           dWg, dWu = (dG | dU).T @ X   one product
           dWd.T = H.T @ dY

The definition of ffn_step has nine products; these are six, and each writes its result in place
into the output. Inference servers run ffn like this: X is read by one GEMM, G and U are read once,
and act(G) is never written. As in the definition, values between products are rounded to the
problem's dtype, except for products of element-wise steps, which stay in fp32.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn.functional import silu

from sparsebench.kernels._common.elementwise import hidden, quantised, scale_of
from sparsebench.kernels._common.search import lines_of, part_of, search
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels._kernel import OUTPUTS, Launch, Operands
from sparsebench.kernels.dense._cublaslt import ALIGNMENT
from sparsebench.kernels.dense._gemm import DenseProduct, fastest_way

TOKENS, FEATURES = 16, 128  # tokens and features of a program
PAIRS = ("gate_up",), ("gate", "up")  # the products that compute G | U: one or two


def in_turn(*steps: Callable[[], Any]) -> Callable[[], Any]:
    """Return a call that runs each step and returns the result of the last one."""

    def run() -> Any:
        for step in steps[:-1]:
            step()
        return steps[-1]()

    return run


def ffn(operands: Operands) -> Launch:
    wg, wu, wd = (operands.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    problem, x, (n, k) = operands.problem, operands.activations["x"], wg.shape
    first = [quantised(x)] if problem["dtype"] == "fp8" else []
    x = first[0]() if first else x
    pinned, output = operands.pinned or {}, OUTPUTS[problem["dtype"]]
    timed = operands.timed
    both, y = (x.new_empty(len(x), columns, dtype=output) for columns in (2 * n, k))

    products = {
        "gate_up": lambda: DenseProduct(x, torch.cat((wg, wu)).t(), both),
        "gate": lambda: DenseProduct(x, wg.t(), both[:, :n]),
        "up": lambda: DenseProduct(x, wu.t(), both[:, n:]),
    }
    gate_up = _fastest_pair(products, pinned, timed, x.device)
    gate_up()
    between = hidden(both, problem["activation"], x.dtype, scale_of(problem, k))
    by = DenseProduct(between(), wd.t(), y, scale=scale_of(problem, n))
    down = fastest_way(by, pinned.get("down"), timed=part_of("down", timed))
    return Launch(
        in_turn(*first, gate_up, between, down),
        {**gate_up.choice, "down": down.choice},
        between.code,
        [*gate_up.candidates, *lines_of("down", down)],
    )


def _fastest_pair(
    products: Mapping[str, Callable[[], DenseProduct]],
    pinned: Mapping[str, Any],
    timed: Sequence[Mapping[str, Any]],
    device: torch.device,
) -> Launch:
    """Return the launch of the faster of PAIRS, or of the pinned one; its choice names each.

    Its candidates are those of both pairs.
    """
    pairs = []
    for names in PAIRS:
        if not pinned or names[0] in pinned:
            launches: dict[str, Launch] = {}
            for name in names:
                product, pin = products[name](), pinned.get(name)
                if not pinned and launches and not product.out.data_ptr() % ALIGNMENT:
                    pin = launches["gate"].choice  # up is an equal product: no second search
                before = part_of(name, timed)
                launches[name] = fastest_way(product, pin, timed=before)
            choice = {name: launch.choice for name, launch in launches.items()}
            candidates = [line for name, each in launches.items() for line in lines_of(name, each)]
            pairs.append(Launch(in_turn(*launches.values()), choice, candidates=candidates))
    best = pairs[search(pairs, device).best]
    return replace(best, candidates=[line for pair in pairs for line in pair.candidates])


def mlp(operands: Operands) -> Launch:
    x, pinned = operands.activations["x"], operands.pinned or {}
    wu, wd = (operands.weights[name].to_dense() for name in ("wu", "wd"))
    activation = operands.problem["activation"]
    h, y = x.new_empty(len(x), len(wu)), torch.empty_like(x)
    first = DenseProduct(x, wu.t(), h, relu=activation != "silu")
    up = fastest_way(first, pinned.get("up"), timed=part_of("up", operands.timed))
    after: dict[str, Callable[[], Tensor]] = {
        "silu": lambda: silu(h, inplace=True),
        "relu2": lambda: h.square_(),
    }
    steps: list[Callable[[], Any]] = [up]
    steps += [after[activation]] if activation in after else []
    in_turn(*steps)()  # the second product is timed on these values
    second = DenseProduct(h, wd.t(), y)
    down = fastest_way(second, pinned.get("down"), timed=part_of("down", operands.timed))
    candidates = [*lines_of("up", up), *lines_of("down", down)]
    choice = {"up": up.choice, "down": down.choice}
    return Launch(in_turn(*steps, down), choice, candidates=candidates)


def ffn_step(operands: Operands) -> Launch:
    x, dy, pinned = operands.activations["x"], operands.activations["dy"], operands.pinned or {}
    wg, wu, wd = (operands.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    (m, k), n, both = x.shape, len(wg), torch.cat((wg, wu))
    products, gradients = x.new_empty(m, 2 * n), x.new_empty(m, 2 * n)
    dh, h, out = x.new_empty(m, n), x.new_empty(m, n), x.new_empty(2 * m + 3 * n, k)
    y, dx, dw, dwd = out.split((m, m, 2 * n, n))
    between = backward(products, dh, h, gradients, operands.problem["activation"] == "relu2")
    steps: dict[str, DenseProduct | BoundKernel] = {
        "gate_up": DenseProduct(x, both.t(), products),
        "dh": DenseProduct(dy, wd, dh),
        "between": between,
        "y": DenseProduct(h, wd.t(), y),
        "dx": DenseProduct(gradients, both, dx),
        "dw": DenseProduct(gradients.t(), x, dw, weight=False),
        "dwd": DenseProduct(h.t(), dy, dwd, weight=False),
    }
    launches: list[Callable[[], object]] = []
    choice, candidates = {}, []
    for name, step in steps.items():
        if isinstance(step, DenseProduct):
            chosen = fastest_way(step, pinned.get(name), timed=part_of(name, operands.timed))
            choice[name] = chosen.choice
            candidates += lines_of(name, chosen)
            launches.append(chosen)
        else:
            launches.append(step)
        launches[-1]()  # the next product is timed on these values

    def run() -> Tensor:
        for launch in launches:
            launch()
        return out

    return Launch(run, choice, between.code, candidates)


PREPARE = {"ffn": ffn, "mlp": mlp, "ffn_step": ffn_step}
"""The function that prepares each op."""


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
