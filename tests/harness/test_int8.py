"""int8 layers on the CPU: draw and prune operands, multiply, and compare with exact integers."""

from typing import Any

import pytest
import torch

from sparsebench.errors import FormatError
from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import Spense
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.inputs.bits import UNIT, fill
from sparsebench.harness.ops.linear import definition, spread
from sparsebench.kernels._kernel import sum_scale
from sparsebench.results.record import Contender, Problem, Status, Value
from tests.harness.test_operands import built
from tests.tools.devices import CPU

FIELDS = {"m": 20, "n": 256, "k": 512, "dtype": "int8", "pattern": "six_eight", "sparsity": 0.25}


def problem(**fields: Value) -> Problem:
    return Problem("linear", {**FIELDS, "block": 1, **fields})


def right(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    sums = (x.long() @ w.long().T).double()
    return (sum_scale("int8", x.shape[1]) * sums).round().clamp(-128, 127).to(torch.int8)


def test_elements_fill_the_range_of_int8_without_zero_and_without_its_least_value() -> None:
    fill(x := torch.empty(1 << 20, dtype=torch.int8), 0, "x", scale=UNIT)
    assert -127 <= int(x.amin()) < -110
    assert 110 < int(x.amax()) <= 127
    assert not (x == 0).any()
    assert 26 < float(x.float().std()) < 30
    assert abs(float(x.float().mean())) < 0.1


def test_a_mask_is_what_is_stored() -> None:
    result = built(problem())
    w = result.weights["w"]
    assert w.dtype == result.activations["x"].dtype == torch.int8
    assert result.nnz["w"] == 256 * 512 * 6 // 8
    assert ((w.view(-1, 8) != 0).sum(1) == 6).all()
    assert built(problem()).digest == "aa415ea0a54f8c65"  # these bits never change


@pytest.mark.parametrize("k", [64, 512, 18944])
def test_the_definition_is_the_product_of_int64(k: int) -> None:
    dense = built(problem(n=16, k=k))
    w, x = dense.weights["w"], dense.activations["x"]
    y = definition(w, x, dtype="int8")
    assert torch.equal(y, right(x, w))
    assert 8 < float(y.float().std()) < 40
    assert int((y.abs() == 127).sum()) < 0.01 * y.numel()


def test_an_output_that_saturates_is_right() -> None:
    x, w = (torch.full(shape, 127, dtype=torch.int8) for shape in ((16, 512), (32, 512)))
    w[::2] = -127
    y = definition(w, x, dtype="int8")
    assert y.unique().tolist() == [-128, 127]
    assert verdict(y, x, w) is None


def verdict(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> str | None:
    exact = w.double(), x.double()
    answer, size = (function(*exact, dtype="int8") for function in (definition, spread))
    plain = definition(w, x, dtype="int8")
    return check(y, Expected(answer, size, torch.int8, x.shape[1], plain=plain)).reason


def test_one_step_too_much_in_one_element_is_wrong() -> None:
    dense = built(problem())
    w, x = dense.weights["w"], dense.activations["x"]
    y = right(x, w)
    assert verdict(y, x, w) is None
    y[3, 7] += 1 if y[3, 7] < 127 else -1
    assert "element [3, 7]" in str(verdict(y, x, w))


def test_sums_that_are_truncated_are_wrong() -> None:
    dense = built(problem())
    w, x = dense.weights["w"], dense.activations["x"]
    sums = sum_scale("int8", 512) * (x.long() @ w.long().T).double()
    assert verdict(sums.trunc().clamp(-128, 127).to(torch.int8), x, w)


def test_a_contest_is_right_on_a_cpu_and_other_formats_give_their_reason() -> None:
    contenders = [
        Contender("dense", "torch_dense", baseline=True),
        Contender("dense", "reference"),
        Contender("slide", "reference"),
        Contender("csr", "reference"),
        Contender("bsr", "reference", {"block": 32}),
        Contender("bitmap", "reference"),
    ]
    rows, _ = contest.run(problem(), contenders, CPU, None)
    assert [(row.status, row.detail) for row in rows[:3]] == [(Status.OK, "")] * 3
    assert {row.status for row in rows[3:]} == {Status.UNSUPPORTED}
    assert all("found torch.int8" in row.detail for row in rows[3:])
    count = 256 * 512 * 6 // 8
    assert {row.nnz for row in rows} == {count}
    assert {row.fewest_bytes for row in rows} == {count + 20 * 512 + 20 * 256}
    assert {row.dense_bytes for row in rows} == {256 * 512}


@pytest.mark.parametrize("stored", [Spense, Slide])
def test_the_least_value_of_int8_is_refused(stored: Any) -> None:
    dense = torch.zeros(2, 8, dtype=torch.int8)
    dense[1, 3] = -128
    with pytest.raises(FormatError, match="expected int8 values from -127 to 127, found -128"):
        stored.from_dense(dense)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [16, 1024])
def test_every_library_is_right_in_a_contest_on_a_gpu(m: int) -> None:
    contenders = [
        Contender("dense", "cublas", baseline=True),
        Contender("dense", "cusparselt_dense"),
        Contender("spense", "cusparselt"),
    ]
    spec = problem(m=m, n=1024, k=1536, pattern="two_four", sparsity=0.5)
    rows, _ = contest.run(spec, contenders, torch.device("cuda:0"), None)
    assert [(row.status, row.detail) for row in rows] == [(Status.OK, "")] * len(contenders)
