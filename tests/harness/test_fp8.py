"""fp8 layers on the CPU: draw and prune operands, multiply, and compare with the right answer."""

import pytest
import torch

from sparsebench.formats._format import is_stored
from sparsebench.harness.bench import contest
from sparsebench.harness.inputs.bits import UNIT
from sparsebench.results.record import Contender, Problem, Status, Value
from tests.harness.test_operands import built
from tests.tools.devices import CPU

E4M3 = torch.float8_e4m3fn
FIELDS = {"m": 16, "n": 256, "k": 512, "dtype": "fp8", "pattern": "two_four", "sparsity": 0.5}


def problem(**fields: Value) -> Problem:
    return Problem("linear", {**FIELDS, "block": 1, **fields})


def test_the_smallest_number_drawn_is_the_smallest_of_e4m3() -> None:
    numbers = torch.tensor([4097.0, -4097.0, 1019.0 * 8191.0]).mul(UNIT)
    assert numbers.to(E4M3).float().tolist() == [2.0**-9, -(2.0**-9), 4.0]


@pytest.mark.parametrize("k", [512, 25600])
def test_no_weight_that_is_kept_is_zero(k: int) -> None:
    result = built(problem(m=1, n=16, k=k))
    w = result.weights["w"]
    assert w.dtype == result.activations["x"].dtype == E4M3
    assert result.nnz["w"] == 16 * k // 2
    assert result.sparsity == 0.5
    assert (is_stored(w).view(-1, 4).sum(1) == 2).all()
    assert torch.equal(is_stored(w), w.float() != 0)
    assert built(problem()).digest == "e5362e8ff9832c16"  # these bits never change


@pytest.mark.parametrize("pattern", ["spense_rows", "spense_columns"])
def test_a_contest_is_right_on_a_cpu(pattern: str) -> None:
    spec = problem(pattern=pattern, sparsity=0.25)
    contenders = [
        Contender("dense", "torch_dense", baseline=True),
        Contender("dense", "reference"),
        Contender("csr", "reference"),
        Contender("bsr", "reference", {"block": 32}),
    ]
    rows, _ = contest.run(spec, contenders, CPU, None)
    assert [(row.status, row.detail) for row in rows] == [(Status.OK, "")] * 4
    count = 3 * 256 * 512 // 4
    assert {row.nnz for row in rows} == {count}
    assert {row.fewest_bytes for row in rows} == {count + 16 * 512 + 2 * 16 * 256}
    assert {row.dense_bytes for row in rows} == {256 * 512}
