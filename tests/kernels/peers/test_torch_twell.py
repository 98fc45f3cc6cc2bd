"""torch_twell: a gated layer with few active units on the CPU."""

import pytest
import torch

from sparsebench.formats.dense import Dense
from sparsebench.harness.ops import ffn
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers.torch_twell import KERNEL
from sparsebench.results.record import Problem


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("n", [7, 300])  # the second has tiles of more units than slots
def test_the_layer_equals_the_definition(activation: str, n: int) -> None:
    torch.manual_seed(0)
    sizes = {"wg": (n, 12), "wu": (n, 12), "wd": (12, n)}
    weights = {name: torch.randn(size) for name, size in sizes.items()}
    x = torch.randn(5, 12)
    problem = Problem("ffn", {"m": 5, "n": n, "k": 12, "dtype": "fp32", "activation": activation})
    stored = {name: Dense.from_dense(weight) for name, weight in weights.items()}
    launch = KERNEL.prepare(Operands(problem, stored, {"x": x}, ffn.definition))
    expected = ffn.definition(**weights, x=x, activation=activation)
    torch.testing.assert_close(launch(), expected, rtol=1e-4, atol=1e-3)
