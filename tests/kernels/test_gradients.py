"""Gradients of a linear layer: definitions agree with autograd, and peers with definitions."""

from types import SimpleNamespace
from typing import Any

import declare
import pytest
import torch
import wrong_wgrad
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.harness.bench import contest
from sparsebench.harness.catalog import load_op, names
from sparsebench.harness.ops._op import longest_row
from sparsebench.kernels._common.transposed import transposed
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.dense import cublas
from sparsebench.kernels.peers import cublas_masked
from sparsebench.results.record import Contender, Problem, Row, Status
from tests.tools.devices import CPU
from tests.tools.marks import crossed

DGRAD, WGRAD = load_op("linear_dgrad"), load_op("linear_wgrad")
FIELDS = {"m": 256, "n": 64, "k": 96, "pattern": "blocks", "block": 16, "sparsity": 0.5}


def drawn(m: int, n: int, k: int) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    w = torch.randn(n, k) * (torch.rand(n, k) < 0.4)
    return w, torch.randn(m, n), torch.randn(m, k)


def wgrad_of(shape: tuple[int, int, int], block: int) -> Operands:
    w, dy, x = drawn(*shape)
    problem = Problem("linear_wgrad", {**dict(zip("mnk", shape, strict=True)), "dtype": "fp32"})
    pattern = Bsr.from_dense(w, block=block)
    return Operands(problem, {}, {"dy": dy, "x": x}, WGRAD.definition, None, pattern)


def rows(op: str, *contenders: Contender, dtype: str = "fp32", **fields: Any) -> list[Row]:
    problem = Problem(op, {**FIELDS, "dtype": dtype, **fields})
    return contest.run(problem, list(contenders), CPU, None)[0]


def test_the_definitions_are_the_gradients_of_linear() -> None:
    w, dy, x = (t.double() for t in drawn(5, 6, 7))
    w.requires_grad_()
    x.requires_grad_()
    load_op("linear").definition(w, x).backward(dy)
    assert torch.allclose(DGRAD.definition(w.detach(), dy), x.grad, rtol=1e-12)
    assert torch.allclose(WGRAD.definition(dy, x.detach()), w.grad, rtol=1e-12)


@pytest.mark.parametrize("op", ["linear_dgrad", "linear_wgrad"])
def test_the_work_of_a_gradient_by_hand(op: str) -> None:
    problem = Problem(op, {"m": 3, "n": 6, "k": 5})
    assert load_op(op).flops(problem, {"w": 7}) == 2 * 3 * 7
    assert load_op(op).fewest_bytes(problem, {"w": 7}, 2) == 2 * (7 + 3 * 6 + 3 * 5)


def test_the_depth_of_a_sum_is_the_number_of_its_terms() -> None:
    w = torch.tensor([[1.0, 0, 0], [1, 0, 1]])
    assert longest_row(w) == 2  # the second row
    assert DGRAD.depth(w, torch.ones(4, 2)) == 2  # the first column
    assert DGRAD.depth(w[:1], torch.ones(4, 1)) == 1
    assert WGRAD.depth(torch.ones(4, 2), torch.ones(4, 3)) == 4  # the tokens


@pytest.mark.parametrize("name", names("harness.ops"))
def test_the_definition_takes_all_operands_but_a_pattern(name: str) -> None:
    op = load_op(name)
    assert op.pattern == ("w" if name.endswith("_wgrad") else None)
    assert op.arguments == [operand for operand in op.operands if operand != op.pattern]
    assert op.operands.keys() == {*op.weights, *op.activations}


@pytest.mark.parametrize(("form", "params"), [(Csr, {}), (Bsr, {"block": [3, 5]})])
def test_a_transposed_weight_is_the_transpose_in_order(form: Any, params: Any) -> None:
    w, *_ = drawn(1, 13, 11)
    turned = transposed(form.from_dense(w, **params))
    again = form.from_dense(w.t().contiguous(), **{name: b[::-1] for name, b in params.items()})
    for name, array in again.arrays().items():
        assert torch.equal(turned.arrays()[name], array)
    assert turned.shape == (11, 13)


@pytest.mark.parametrize(
    ("dtype", "block"), crossed(["fp32", "bf16", "fp16", "tf32"], [16, [10, 24]])
)
def test_a_contest_of_weight_gradients(dtype: str, block: Any) -> None:
    gradients = rows(
        "linear_wgrad",
        Contender("dense", "torch_dense", baseline=True),
        Contender("bsr", "reference", {"block": block}),
        Contender("csr", "reference"),
        Contender("bsr", "bsr_triton", {"block": 16}),
        dtype=dtype,
    )
    assert [row.status.value for row in gradients] == ["ok", "ok", "ok", "unsupported"]
    assert gradients[-1].detail == "computes linear, not linear_wgrad"
    assert gradients[0].flops == 2 * 256 * 64 * 96 // 2
    assert gradients[0].fewest_bytes == gradients[0].nnz * gradients[1].dense_bytes // (64 * 96) + (
        256 * (64 + 96) * gradients[1].dense_bytes // (64 * 96)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "tf32"])
def test_a_contest_of_input_gradients(dtype: str) -> None:
    gradients = rows(
        "linear_dgrad",
        Contender("dense", "torch_dense", baseline=True),
        Contender("bsr", "scipy_bsr_dgrad", {"block": 16}),
        Contender("csr", "scipy_csr_dgrad"),
        Contender("bsr", "reference", {"block": [10, 24]}),
        dtype=dtype,
    )
    scipy = "ok" if "32" in dtype else "unsupported"
    assert [row.status.value for row in gradients] == ["ok", scipy, scipy, "ok"]


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "tf32"])
def test_every_wrong_weight_gradient_is_rejected(dtype: str) -> None:
    wrong = [Contender("bsr", name, {"block": 16}) for name in declare.names(wrong_wgrad)]
    dense = Contender("dense", "torch_dense")
    right, *rejected = rows("linear_wgrad", dense, *wrong, dtype=dtype, m=2048)
    assert right.status is Status.OK
    for row in rejected:
        assert (row.status, row.samples_us) == (Status.WRONG, ()), row.case.contender.kernel
        assert row.detail


def test_a_format_without_room_for_a_gradient_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Csr, "sample")
    (row,) = rows("linear_wgrad", Contender("csr", "reference"))
    assert row.status is Status.UNSUPPORTED
    assert row.detail.startswith("csr cannot store the values of another matrix")


def test_masked_dense_keeps_the_pinned_library() -> None:
    launch = cublas_masked.prepare(wgrad_of((7, 13, 11), 4))
    assert launch.choice == {"library": "cublas"}


def test_masked_dense_refuses_what_dense_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    problem = Problem("linear_wgrad", {**FIELDS, "dtype": "fp32"})
    assert cublas_masked.KERNEL.unsupported(problem, CPU) == cublas.KERNEL.unsupported(problem, CPU)
    assert cublas_masked.KERNEL.unsupported(problem, CPU) is not None
