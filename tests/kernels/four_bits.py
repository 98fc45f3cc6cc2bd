"""Problems whose weights have 4 bits, and a check of a kernel that multiplies them on a GPU."""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.harness.bench.operands import operands
from sparsebench.harness.catalog import load_format, load_op
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem
from tests.kernels.layers import problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OP = load_op("linear")


def problem(**fields: Any) -> Problem:
    sizes = {"m": 4, "n": 256, "k": 384, "dtype": "fp16", "weight_bits": 4}
    two_four = {"pattern": "two_four", "sparsity": 0.5}
    return problem_of("linear", **{**sizes, **two_four, **fields})


def weight(**fields: Any) -> Tensor:
    return operands(problem(**fields), OP, CPU, None).weights["w"]


def assert_products_are_right(peer: ModuleType, dtype: str, m: int) -> None:
    """Multiply twice, by other activations; skip what cannot run here."""
    four_bits = problem(m=m, n=512, k=1024, dtype=dtype)
    if reason := peer.KERNEL.unsupported(four_bits, CUDA):
        pytest.skip(reason)
    inputs = operands(four_bits, OP, CUDA, None)
    w, x = inputs.weights["w"], inputs.activations["x"]
    stored = load_format(peer.KERNEL.consumes).from_dense(w)
    launch = peer.prepare(Operands(four_bits, {"w": stored}, {"x": x}, OP.definition))
    for _ in range(2):
        expected = x.double() @ w.double().T
        y = launch()
        assert isinstance(y, Tensor)
        assert (y.double() - expected).norm() <= 4e-3 * expected.norm()
        x.normal_()
    assert launch.choice["weight_bits"] == 4
