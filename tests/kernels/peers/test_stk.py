"""STK as a peer: unsupported cases and calls; dense products replace STK here."""

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers import stk
from sparsebench.results.record import Problem

CUDA = torch.device("cuda")
SIZES = {"m": 128, "n": 384, "k": 256, "dtype": "fp16"}


class Matrix:
    """The used part of STK's matrix: three arrays, and a flag for the transposed view."""

    def __init__(
        self, size: Any, data: Tensor, rows: Tensor, columns: Tensor, offsets: Tensor
    ) -> None:
        assert rows.dtype == columns.dtype == torch.int16
        self.size, self.data, self.offsets = tuple(size), data, offsets
        self.rows, self.columns = rows, columns
        self.flipped = False

    def t(self) -> "Matrix":
        result = Matrix(self.size, self.data, self.rows, self.columns, self.offsets)
        result.flipped = not self.flipped
        return result

    def dense(self) -> Tensor:
        dense = Bsr(self.size, self.offsets, self.columns.int(), self.data).to_dense()
        return dense.t() if self.flipped else dense


def sdd(dy_transposed: Tensor, x: Tensor, topology: Matrix) -> SimpleNamespace:
    like = Bsr(topology.size, topology.offsets, topology.columns.int(), topology.data)
    return SimpleNamespace(data=like.sample(dy_transposed @ x).values)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    module, ops = ModuleType("stk"), ModuleType("stk.ops")
    module.Matrix, module.ops = Matrix, ops  # type: ignore[attr-defined]
    ops.dds = lambda x, w: x @ w.dense()  # type: ignore[attr-defined]
    ops.sdd = sdd  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "stk", module)
    monkeypatch.setitem(sys.modules, "stk.ops", ops)
    monkeypatch.setattr(stk, "version", lambda name: "0.7.1")


def operands_of(op: str, m: int = 128) -> Operands:
    torch.manual_seed(0)
    mask = torch.tensor([[1, 0], [0, 0], [1, 1]]).repeat_interleave(128, 0)
    w = torch.randn(384, 256) * mask.repeat_interleave(128, 1)
    drawn = {"x": torch.randn(m, 256), "dy": torch.randn(m, 384)}
    names = {"linear": ["x"], "linear_dgrad": ["dy"], "linear_wgrad": ["dy", "x"]}[op]
    packed = Bsr.from_dense(w, block=128)
    result = Operands(
        Problem(op, {**SIZES, "m": m}),
        {"w": packed},
        {name: drawn[name] for name in names},
        load_op(op).definition,
    )
    return replace(result, weights={}, pattern=packed) if op == "linear_wgrad" else result


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(("m", "padding"), [(128, {}), (100, {"tokens": 128})])
@pytest.mark.parametrize("op", ["linear", "linear_dgrad"])
def test_the_product_has_the_tokens_of_x(op, m, padding) -> None:
    operands = operands_of(op, m=m)
    launch = load_kernel({"linear": "stk", "linear_dgrad": "stk_dgrad"}[op]).prepare(operands)
    result = launch()
    w = operands.weights["w"].to_dense()
    expected = operands.definition(w, *operands.activations.values())
    assert isinstance(result, Tensor)
    assert result.is_contiguous()
    assert torch.allclose(result, expected, atol=1e-4)
    assert launch.choice == {"layout": "dds", **padding}


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("m", "padding"), [(128, {}), (100, {"tokens": 128}), (33, {"tokens": 64})]
)
def test_the_weight_gradient_is_packed_like_the_weight(m: int, padding: dict[str, int]) -> None:
    operands = operands_of("linear_wgrad", m=m)
    pattern = operands.pattern
    launch = load_kernel("stk_wgrad").prepare(operands)
    result = launch()
    assert launch.choice == {"layout": "view", **padding}
    assert isinstance(result, Bsr)
    assert isinstance(pattern, Bsr)
    expected = pattern.sample(operands.definition(*operands.activations.values()))
    assert torch.allclose(result.values, expected.values, atol=1e-4)
    assert result.columns is pattern.columns


def test_without_the_package_the_reason_says_how_to_install_it(monkeypatch) -> None:
    def absent(name: str) -> str:
        raise stk.PackageNotFoundError(name)

    monkeypatch.setattr(stk, "version", absent)
    reason = "needs STK: pip install stanford-stk"
    assert stk.unavailable() == reason == stk.unsupported(Problem("linear", SIZES), CUDA)
