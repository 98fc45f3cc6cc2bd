"""BlockSparseGatedMLP: results and gradients of three layers, and what does not fit together."""

from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.kernels.nn.block_sparse_mlp import ACTIVATIONS
from sparsebench.nn import BlockSparseGatedMLP, BlockSparseLinear
from tests.compiling.nvcc import hopper

H, K = 96, 64


def linear(n: int, k: int, **options: Any) -> BlockSparseLinear:
    return BlockSparseLinear(k, n, **{"block": 16, "sparsity": 0.5, "bias": False, **options})


def layers(**options: Any) -> tuple[BlockSparseLinear, BlockSparseLinear, BlockSparseLinear]:
    return linear(H, K, **options), linear(H, K, **options), linear(K, H, **options)


def separately(gate: Any, up: Any, down: Any, x: Tensor, activation: str) -> Tensor:
    y: Tensor = down(ACTIVATIONS[activation](gate(x)) * up(x))
    return y


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(7,), (2, 3), (), (0,)])
def test_results_and_gradients_equal_those_of_three_layers(activation: str, shape: Any) -> None:
    gate, up, down = layers()
    mlp = BlockSparseGatedMLP.from_layers(gate, up, down, activation=activation)
    x, other = (torch.randn(*shape, K).requires_grad_() for _ in range(2))
    with torch.no_grad():
        other.copy_(x)
    y, expected = mlp(x), separately(gate, up, down, other, activation)
    torch.testing.assert_close(y, expected)
    weights = torch.randn_like(y)
    dx, both = torch.autograd.grad((y * weights).sum(), [x, mlp.gate_up.values])
    of_three = [other, gate.values, up.values]
    dx_expected, *parts = torch.autograd.grad((expected * weights).sum(), of_three)
    torch.testing.assert_close(dx, dx_expected)
    torch.testing.assert_close(both, torch.cat(parts))
    with torch.no_grad():
        assert torch.equal(mlp(x), y)
    assert torch.equal(mlp.freeze().plan([5])(x), y)


@pytest.mark.parametrize(
    ("gate", "up", "options", "message"),
    [
        (linear(H, K), linear(H, K, block=32), {}, "up: expected"),
        (linear(H, K, bias=True), linear(H, K), {}, "gate: expected no bias"),
        (linear(90, K), linear(90, K), {}, "gate: expected a multiple of 16 rows, found 90"),
        (linear(80, K), linear(80, K), {}, "gate_up: expected"),
        (linear(H, K), linear(H, K), {"activation": "tanh"}, "found 'tanh'"),
    ],
)
def test_layers_that_do_not_fit_together_are_refused(gate, up, options, message) -> None:
    with pytest.raises(FormatError, match=message):
        BlockSparseGatedMLP.from_layers(gate, up, linear(K, H), **options)


@hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_call_without_a_gradient_is_right_on_a_gpu(activation: str) -> None:
    mlp = BlockSparseGatedMLP.from_layers(
        *layers(device="cuda", dtype=torch.bfloat16), activation=activation
    )
    x = torch.randn(3, 40, K, device="cuda").bfloat16()
    expected = mlp(x).detach()  # with torch's activation
    with torch.no_grad():
        torch.testing.assert_close(mlp(x), expected, rtol=2e-2, atol=2e-2)
