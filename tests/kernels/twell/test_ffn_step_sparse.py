"""Test the op ffn_step (definition, tolerance, work) and its kernel."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from sparsebench.errors import Unsupported
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.bench.operands import DenseOperands, operands
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.ops._op import with_fields
from sparsebench.kernels._kernel import DTYPES, Launch, Operands
from sparsebench.results.record import Problem, Value
from tests.kernels.layers import assert_right, operands_for

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
OP = load_op("ffn_step")
NAMES = "Y", "dX", "dWg", "dWu", "dWd.T"


def problem(m: int = 256, n: int = 512, k: int = 128, **more: Value) -> Problem:
    fields: dict[str, Value] = {"m": m, "n": n, "k": k, "dtype": "bf16", "activation": "relu"}
    rest: dict[str, Value] = {"pattern": "dense", "sparsity": 0.0, "block": 1}
    active: dict[str, Value] = {"active": 12.0, "skew": "iid"}
    return Problem("ffn_step", {**fields, **rest, **active, **more})


def exact(drawn: DenseOperands) -> dict[str, Tensor]:
    return {name: t.double() for name, t in {**drawn.weights, **drawn.activations}.items()}


def expected(case: Problem, arguments: Mapping[str, Tensor]) -> Expected:
    reference, spread = (with_fields(f, case)(**arguments) for f in (OP.definition, OP.spread))
    dtype, depth = DTYPES[case["dtype"]], OP.depth(**arguments)
    return Expected(reference, spread, dtype, depth, parts=OP.parts(case), rounded=True)


def launch_of(operands: Operands, **options: Any) -> Launch:
    return load_kernel("ffn_step_sparse").prepare(operands, **options)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_the_definition_equals_autograd(activation):
    case = problem(m=20, n=24, k=16, active=6.0, activation=activation)
    arguments = exact(operands(case, OP, CPU, None))
    results = with_fields(OP.definition, case)(**arguments).split(OP.parts(case))
    dy = arguments.pop("dy")
    leaves = {name: t.requires_grad_() for name, t in arguments.items()}
    act = relu(linear(leaves["x"], leaves["wg"]))
    h = (act if activation == "relu" else act.square()) * linear(leaves["x"], leaves["wu"])
    y = linear(h, leaves["wd"])
    inputs = [leaves[name] for name in ("x", "wg", "wu", "wd")]
    *gradients, dwd = torch.autograd.grad(y, inputs, dy)
    for name, a, b in zip(NAMES, results, (y, *gradients, dwd.t()), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torch_passes_and_an_error_in_any_part_fails(activation, dtype):
    case = problem(activation=activation, dtype=dtype)
    drawn = operands(case, OP, CPU, None)
    correct = expected(case, exact(drawn))
    result = with_fields(OP.definition, case)(**drawn.weights, **drawn.activations)
    assert check(result, correct).reason is None
    row = 0
    for name, size in zip(NAMES, OP.parts(case), strict=True):
        changed = result.clone()
        changed[row : row + size] *= 1.06
        reason = check(changed, correct).reason
        assert (reason or "").startswith(f"from row {row}: "), name
        row += size


def test_only_a_gate_near_zero_may_be_active_or_not():
    case = problem(m=40, n=16, k=16, active=6.0)
    arguments = exact(operands(case, OP, CPU, None))
    factor = arguments["x"][3, 0].clone()
    for gate, passes in ((1e-8, True), (0.1, False)):
        rest = linear(arguments["x"][3, 1:], arguments["wg"][5, 1:])
        arguments["wg"][5, 0] = (gate - rest) / factor
        active = expected(case, arguments)
        arguments["wg"][5, 0] = (-gate - rest) / factor
        inactive = with_fields(OP.definition, case)(**arguments).bfloat16()
        assert (check(inactive, active).reason is None) == passes, gate


def test_the_work_matches_a_hand_computation():
    nnz = {"wg": 512 * 128, "wu": 512 * 128, "wd": 512 * 128}
    dense, few = problem(active=None), problem(active=128.0)
    assert OP.flops(dense, nnz) == 9 * 2 * 256 * 512 * 128
    assert OP.flops(few, nnz) == (1 + 8 / 4) * 2 * 256 * 512 * 128
    assert OP.dense(few).fields["active"] is None
    assert OP.fewest_bytes(dense, nnz, 2) == 2 * (6 * 512 * 128 + 4 * 256 * 128)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_the_kernel_stacks_the_results_of_the_layer(activation):
    operands = operands_for(problem(activation=activation))
    assert_right(launch_of(operands), operands)


def test_zero_slots_are_refused():
    with pytest.raises(Unsupported, match="option slots"):
        launch_of(operands_for(problem()), slots=0)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [88, 8])
@pytest.mark.parametrize("skew", ["iid", "zipf", "correlated"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_the_kernel_is_correct_on_a_gpu(dtype, skew, slots):
    case = problem(m=2048, n=5632, k=2048, active=29.0, skew=skew, dtype=dtype)
    operands = operands_for(case, GPU)
    assert_right(launch_of(operands, slots=slots), operands)
