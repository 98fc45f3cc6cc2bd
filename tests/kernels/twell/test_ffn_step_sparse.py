"""The op ffn_step: its definition, what its check lets pass, its work; and its kernel."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear, relu

from sparsebench.errors import Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import bound
from sparsebench.harness.bench.correctness import Expected, Verdict, check
from sparsebench.harness.bench.operands import DenseOperands, operands
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.harness.plan.suite import read
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.results.record import Problem, Value

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


def expected(asked: Problem, arguments: Mapping[str, Tensor]) -> Expected:
    reference, spread = (bound(f, asked)(**arguments) for f in (OP.definition, OP.spread))
    dtype, depth = DTYPES[asked["dtype"]], OP.depth(**arguments)
    return Expected(reference, spread, dtype, depth, parts=OP.parts(asked))


def judged(asked: Problem, device: torch.device, **options: Any) -> Verdict:
    """Hold the kernel's output for operands of the problem against the definition."""
    drawn = operands(asked, OP, device, None)
    weights = {name: Dense.from_dense(w) for name, w in drawn.weights.items()}
    given = Operands(asked, weights, drawn.activations, OP.definition)
    launch = load_kernel("ffn_step_sparse").prepare(given, **options)
    launch().fill_(float("nan"))
    return check(launch(), expected(asked, exact(drawn)))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_the_definition_is_what_autograd_gives(activation):
    asked = problem(m=20, n=24, k=16, active=6.0, activation=activation)
    given = exact(operands(asked, OP, CPU, None))
    found = bound(OP.definition, asked)(**given).split(OP.parts(asked))
    dy = given.pop("dy")
    leaves = {name: t.requires_grad_() for name, t in given.items()}
    act = relu(linear(leaves["x"], leaves["wg"]))
    h = (act if activation == "relu" else act.square()) * linear(leaves["x"], leaves["wu"])
    y = linear(h, leaves["wd"])
    wanted = [leaves[name] for name in ("x", "wg", "wu", "wd")]
    *of, of_wd = torch.autograd.grad(y, wanted, dy)
    for name, a, b in zip(NAMES, found, (y, *of, of_wd.t()), strict=True):
        torch.testing.assert_close(a, b, msg=name)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_torch_itself_is_right_and_each_part_for_itself(activation, dtype):
    asked = problem(activation=activation, dtype=dtype)
    drawn = operands(asked, OP, CPU, None)
    right = expected(asked, exact(drawn))
    found = bound(OP.definition, asked)(**drawn.weights, **drawn.activations)
    assert check(found, right).reason is None
    row = 0
    for name, size in zip(NAMES, OP.parts(asked), strict=True):
        spoilt = found.clone()
        spoilt[row : row + size] *= 1.06
        reason = check(spoilt, right).reason
        assert (reason or "").startswith(f"from row {row}: "), name
        row += size


def test_a_gate_at_zero_may_be_on_or_off_and_one_apart_may_not():
    asked = problem(m=40, n=16, k=16, active=6.0)
    given = exact(operands(asked, OP, CPU, None))
    by = given["x"][3, 0].clone()
    for gate, may in ((1e-8, True), (0.1, False)):
        rest = linear(given["x"][3, 1:], given["wg"][5, 1:])
        given["wg"][5, 0] = (gate - rest) / by
        on = expected(asked, given)
        given["wg"][5, 0] = (-gate - rest) / by
        off = bound(OP.definition, asked)(**given).bfloat16()
        assert (check(off, on).reason is None) == may, gate


def test_the_work_by_hand():
    nnz = {"wg": 512 * 128, "wu": 512 * 128, "wd": 512 * 128}
    dense, few = problem(active=None), problem(active=128.0)
    assert OP.flops(dense, nnz) == 9 * 2 * 256 * 512 * 128
    assert OP.flops(few, nnz) == (1 + 8 / 4) * 2 * 256 * 512 * 128
    assert OP.dense(few).fields["active"] is None
    assert OP.fewest_bytes(dense, nnz, 2) == 2 * (6 * 512 * 128 + 4 * 256 * 128)


@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_the_kernel_puts_the_layers_results_below_each_other(activation):
    assert judged(problem(activation=activation), CPU).reason is None


def test_room_for_no_unit_is_refused():
    with pytest.raises(Unsupported, match="option slots: expected 1 to 512, the hidden units"):
        judged(problem(), CPU, slots=0)


def test_the_suite_asks_for_what_the_kernel_can():
    kernel = load_kernel("ffn_step_sparse")
    for contest in read("ffn-step").contests:
        reason = kernel.unsupported(contest.problem, CPU)
        assert reason is not None
        assert reason.startswith("needs an NVIDIA GPU")


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [88, 8])
@pytest.mark.parametrize("skew", ["iid", "zipf", "correlated"])
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_gpu_is_right(dtype, skew, slots):
    asked = problem(m=2048, n=5632, k=2048, active=29.0, skew=skew, dtype=dtype)
    verdict = judged(asked, GPU, slots=slots)
    assert verdict.reason is None, verdict


@pytest.mark.gpu
def test_libraries_are_right_on_a_gpu():
    asked = problem(m=2048, n=5632, k=2048, active=29.0)
    drawn = operands(asked, OP, GPU, None)
    found = bound(OP.definition, asked)(**drawn.weights, **drawn.activations)
    assert check(found, expected(asked, exact(drawn))).reason is None
