"""A SparseGatedMLP with exact gates, the same function by dense layers, and their comparison."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, relu

from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops._op import with_fields
from sparsebench.kernels._kernel import NAMES
from sparsebench.kernels.nn import SparseGatedMLP
from sparsebench.results.record import Problem

OP = load_op("ffn_step")
CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def draw(
    m: int,
    n: int,
    k: int,
    slots: int,
    *,
    rarity: float = 1.0,
    activation: str = "relu",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[SparseGatedMLP, Tensor]:
    """Return a layer and X; a unit is active if a normal deviate is above `rarity`.

    Gates are sums of few-bit integers divided by a power of two. Rounding changes no sign, so every
    implementation has the same active units. With m > 3, one token has all units active, one none.
    """
    options: dict[str, Any] = {"dtype": torch.float64}
    x, gate = (torch.randint(-2, 3, size).to(**options) for size in ((m, k), (n, k)))
    x[:, 0], gate[:, 0] = 1, -round(rarity * 2 * k**0.5)
    if m > 3:
        x[1, 0], x[2, 0] = -(most := -(-6 // abs(rarity))), most
    up, down = (torch.randn(size, **options) * k**-0.5 for size in ((n, k), (k, n)))
    weights = (w.to(device, dtype) for w in (gate / 2 ** round(k**0.5).bit_length(), up, down))
    mlp = SparseGatedMLP.from_dense(*weights, activation=activation, slots=slots)
    return mlp, x.to(device, dtype)


def step(mlp: Any, x: Tensor, share: float = 0.5) -> tuple[Tensor, ...]:
    """Return Y, L1, and the gradients of X, gate, up and down for a loss with L1 times `share`."""
    x = x.detach().requires_grad_()
    y, l1 = mlp(x, l1=True)
    loss = (y * gradient_of(y)).double().sum() + share * l1.double()
    return y.detach(), l1.detach(), *torch.autograd.grad(loss, [x, *mlp.parameters()])


def gradient_of(y: Tensor) -> Tensor:
    """Return a dY that is exact in any dtype."""
    at = torch.arange(y.numel(), device=y.device)
    return ((at * 7919 % 17 - 8) / 8).to(y.dtype).view(y.shape)


class Dense(nn.Module):
    """The same function as a SparseGatedMLP, by dense layers."""

    def __init__(self, mlp: SparseGatedMLP, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = (copy.deepcopy(w) for w in (mlp.gate, mlp.up, mlp.down))
        self.squared = mlp.activation == "relu2"
        self.to(dtype)

    def forward(self, x: Tensor, *, l1: bool = False) -> Any:
        act = relu(self.gate(x))
        h = (act.square() if self.squared else act) * self.up(x)
        y = self.down(h)
        return (y, h.float().abs().sum(-1).mean()) if l1 else y


def dense_step(mlp: SparseGatedMLP, x: Tensor, share: float = 0.5) -> tuple[Tensor, ...]:
    return step(Dense(mlp, torch.float64), x.double(), share)


def assert_near(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], eps: float) -> None:
    assert len(results) == len(expected)
    for number, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert (a.double() - b.double()).norm() <= eps * b.double().norm(), number


def expected_of(mlp: SparseGatedMLP, x: Tensor) -> Expected:
    """Return Y and all gradients for a loss without L1, as the op ffn_step stacks them."""
    (m, k), n = x.shape, mlp.hidden_features
    sizes = {"m": m, "n": n, "k": k, "activation": mlp.activation}
    problem = Problem("ffn_step", sizes | {"dtype": NAMES[x.dtype]})
    weights = {"wg": mlp.gate.weight, "wu": mlp.up.weight, "wd": mlp.down.weight}
    tensors = {**weights, "x": x, "dy": gradient_of(x)}
    exact = {name: t.detach().double() for name, t in tensors.items()}
    right, spread = (with_fields(f, problem)(**exact) for f in (OP.definition, OP.spread))
    return Expected(right, spread, x.dtype, max(m, n, k), parts=OP.parts(problem), rounded=True)


def assert_correct(mlp: SparseGatedMLP, x: Tensor) -> tuple[Tensor, ...]:
    """Compare Y and all gradients as the harness does, and those with L1; return the latter."""
    y, _, *gradients = step(mlp, x, 0)
    reason = check(torch.cat((y, *gradients)), expected_of(mlp, x)).reason
    assert reason is None, reason
    results, right = step(mlp, x), dense_step(mlp, x)
    assert (results[1] - right[1]).abs() <= torch.finfo(x.dtype).eps * right[1] + 1e-6
    assert_near(results, right, 1e-5 if x.dtype == torch.float32 else 2e-2)
    return results


def units_on(mlp: SparseGatedMLP, x: Tensor) -> int:
    """Return the average number of active units per token, rounded up."""
    on = int((linear(x.double(), mlp.gate.weight.double()) > 0).sum())
    return -(-on // max(1, len(x)))


# m, n, k, slots, rarity: a last group with few rows, fewer units than a word, partial pieces, k
# below, at and above what a program sums; enough slots and too few.
CASES = [
    (5, 24, 16, 24, 0.3),
    (37, 72, 40, 30, 1.0),
    (37, 72, 40, 2, 1.0),
    (150, 136, 72, 20, 1.5),
    (150, 136, 72, 3, 1.5),
    (33, 520, 264, 60, 2.0),
    (20, 264, 520, 1, 2.5),
    (1, 8, 8, 8, 0.0),
    (40, 40, 24, 40, -5.0),
    (9, 64, 32, 1, 9.0),
]


def assert_nan_as_in_dense(mlp: SparseGatedMLP, x: Tensor) -> None:
    """Check that NaN spreads from active units, and only to where dense layers have it."""
    results = step(mlp, x)
    y, l1, dx, *_ = results
    for a, b in zip(results, dense_step(mlp, x), strict=True):
        assert not (a.isnan() & ~b.isnan()).any()
    bad = x.isnan().any(1)
    assert y[bad].isnan().all()
    assert dx[bad].isnan().all()
    assert y[~bad].isfinite().all()
    assert l1.isnan()
