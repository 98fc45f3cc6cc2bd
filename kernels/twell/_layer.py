"""The operands of a feed-forward layer for the kernels that skip inactive units.

    op ffn    Y = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T      gate Wg, up Wu
    op mlp    Y = act(X @ Wu.T) @ Wd.T                     gate Wu, no up

A unit's rows of gate, up and Wd.T have k contiguous values each: these kernels read whole rows.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem

MOST_K = 4096  # limited by the registers for X and for the sums of Y
ALIGNMENT = 16  # bytes, of an asynchronous copy


@dataclass(frozen=True)
class Layer:
    """x and y [m, k]; gate, up and wd_t [n, k]; all contiguous, fp16 or bf16.

    `up` is None in a layer without a gate. `squared` means that act is relu2, not relu. `y` is the
    output buffer.
    """

    x: Tensor
    gate: Tensor
    up: Tensor | None
    wd_t: Tensor
    y: Tensor
    squared: bool

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return m, n and k."""
        return len(self.x), len(self.gate), self.x.shape[1]


@dataclass(frozen=True)
class Plan:
    """What a gated layer is planned for: up to `tokens` of X, and weights [n, k]."""

    tokens: int
    n: int
    k: int
    squared: bool
    dtype: torch.dtype
    device: torch.device


def layer_of(operands: Operands) -> Layer:
    """Return the layer, with a copy of Wd.T. Raises Unsupported."""
    x = operands.activations["x"]
    values = {}
    for name, weight in operands.weights.items():
        assert isinstance(weight, Dense)
        values[name] = weight.values
    for name, matrix in {"x": x, **values}.items():
        if not matrix.is_contiguous() or matrix.data_ptr() % ALIGNMENT:
            actual = f"strides {list(matrix.stride())} at {matrix.data_ptr() % ALIGNMENT} modulo 16"
            raise Unsupported(f"{name}: expected a contiguous matrix at 16 bytes, found {actual}")
    wd_t, gated = values["wd"].t().contiguous(), operands.problem.op == "ffn"
    gate, up = (values["wg"], values["wu"]) if gated else (values["wu"], None)
    squared = operands.problem["activation"] == "relu2"
    return Layer(x, gate, up, wd_t, torch.empty_like(x), squared)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why none of these kernels can run the problem on the device, or None."""
    activation, n, k = problem["activation"], problem["n"], problem["k"]
    if activation not in ("relu", "relu2"):
        return f"expected activation relu or relu2, found {activation}"
    if n % 8 or k % 8:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    if k > MOST_K:
        return f"expected k up to {MOST_K}, found {k}"
    return unsupported_on_hopper(problem, device)
