"""The layer of sparse inputs: right in the interpreter, and its redrawn inputs."""

import pytest
import torch

from sparsebench.harness.bench.operands import operands as drawn
from sparsebench.harness.bench.operands import redraw
from sparsebench.harness.catalog import load_op
from sparsebench.kernels.twell import linear_few
from sparsebench.kernels.twell.linear_few import ActiveCall, Config
from sparsebench.results.record import Problem
from tests.kernels.layers import assert_right, operands_for, problem_of

CPU, OP = torch.device("cpu"), load_op("linear_active")


def problem(m: int, n: int, k: int, active: float | None, dtype: str = "fp16") -> Problem:
    return problem_of("linear_active", m=m, n=n, k=k, dtype=dtype, active=active)


def test_a_draw_has_about_as_many_active_inputs_and_each_draw_others() -> None:
    case = problem(4, 8, 4096, 1024)
    inputs = drawn(case, OP, CPU, None)
    x = inputs.activations["x"]
    first = x != 0
    assert 3 * 1024 < first.sum() < 5 * 1024
    redraw(case, OP, inputs.activations, 1, {}, inputs.weights)
    assert 3 * 1024 < (x != 0).sum() < 5 * 1024
    assert (first != (x != 0)).any()
    with pytest.raises(ValueError, match="active"):
        OP.fields(**problem(1, 8, 16, 17).fields)


def test_fewer_inputs_are_less_work_and_tokens_share_columns_by_chance() -> None:
    one, four = problem(1, 64, 128, 64), problem(4, 64, 128, 64)
    nnz = {"w": 64 * 128}
    assert OP.flops(four, nnz) == 4 * OP.flops(one, nnz) == 4 * 2 * 64 * 64
    assert OP.fewest_bytes(one, nnz, 2) == 2 * (64 * 64 + 128 + 64)
    assert OP.fewest_bytes(four, nnz, 2) == 2 * (64 * 128 * 15 // 16 + 4 * (128 + 64))


@pytest.mark.interpreted
@pytest.mark.parametrize("config", [Config(64, 16, 1, 2), Config(64, 32, 4, 4)])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 70, 100), (3, 128, 65), (4, 40, 130)])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_product_is_right(config: Config, m: int, n: int, k: int, dtype: str) -> None:
    case = problem(m, n, k, k / 3, dtype)
    operands = operands_for(case)
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    call = ActiveCall(m, n, k, x.dtype)
    product = linear_few.plan(CPU, call, config)
    for draw in range(1, 3):
        y, expected = product.run(x, w.T.contiguous()), OP.definition(w.double(), x.double())
        assert torch.allclose(y.double(), expected, rtol=2e-3, atol=2e-3)
        redraw(case, OP, operands.activations, draw, {}, {"w": w})


@pytest.mark.interpreted
def test_a_suite_runs_the_first_configuration() -> None:
    operands = operands_for(problem(2, 40, 96, 32, "fp16"))
    assert_right(linear_few.KERNEL.prepare(operands, tuned=False), operands)


def test_configurations_are_possible_for_any_size() -> None:
    for m, n, k in ((1, 1, 1), (4, 64, 16), (1, 4096, 4096), (3, 28672, 8192)):
        configs = linear_few.choices(CPU, ActiveCall(m, n, k, torch.bfloat16))
        assert configs
        assert all(c.parts * c.depth <= max(k, 16) for c in configs)
    assert linear_few.unsupported(problem(5, 8, 8, None), CPU)
