"""fp8 layers on the CPU: draw and prune operands, multiply, and compare with the right answer."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sparsebench.errors import SuiteError
from sparsebench.formats._format import is_stored
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.operands import DenseOperands, operands
from sparsebench.harness.catalog import load_op
from sparsebench.harness.inputs import sources
from sparsebench.harness.inputs.bits import UNIT
from sparsebench.results.record import Contender, Problem, Source, Status, Value

CPU = torch.device("cpu")
E4M3 = torch.float8_e4m3fn
FIELDS = {"m": 16, "n": 256, "k": 512, "dtype": "fp8", "pattern": "two_four", "sparsity": 0.5}


def problem(source: Source | None = None, **fields: Value) -> Problem:
    return Problem("linear", {**FIELDS, "block": 1, **fields}, 0, source)


def built(spec: Problem, data: Path | None = None) -> DenseOperands:
    return operands(spec, load_op("linear"), CPU, data)


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


def test_weights_of_a_file_are_refused_and_its_pattern_is_not(tmp_path: Path) -> None:
    save_file({"layer": torch.ones(256, 512, dtype=torch.bfloat16)}, tmp_path / "m.safetensors")
    source = Source("m.safetensors", sources.sha256(tmp_path / "m.safetensors"), "layer")
    with pytest.raises(SuiteError, match=r"16 or 32 bits for weights from a file, found fp8"):
        built(problem(source), tmp_path)
    (tmp_path / "p.smtx").write_text("2, 4, 3\n0 2 3\n0 3 1\n")
    source = Source("p.smtx", sources.sha256(tmp_path / "p.smtx"))
    result = built(problem(source, n=2, k=4, pattern="file", sparsity=0.625), tmp_path)
    assert (result.weights["w"].float() != 0).tolist() == [[1, 0, 0, 1], [0, 1, 0, 0]]


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


@pytest.mark.gpu
def test_fp8_has_the_same_bits_on_a_gpu() -> None:
    result = operands(problem(), load_op("linear"), torch.device("cuda:0"), None)
    assert result.digest == built(problem()).digest
