"""Which error is usual: what the bound allows in bf16 and the contest does not."""

from dataclasses import replace
from pathlib import Path

import declare
import inexact
import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.correctness import WRONG, bias
from sparsebench.harness.plan.suite import expand
from sparsebench.results.frame import UNUSUAL, frame
from sparsebench.results.record import Case, Contender, Problem, Row, Status

CPU = torch.device("cpu")
FIELDS = {"m": 64, "n": 96, "k": 2048, "pattern": "unstructured", "sparsity": 0.9, "block": 1}
NAMES = declare.names(inexact)


def rows(dtype: str, *contenders: Contender, **fields: object) -> list[Row]:
    problem = Problem("linear", {**FIELDS, "dtype": dtype, **fields})
    return contest.run(problem, list(contenders), CPU, None)[0]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32", "fp8"])
def test_every_inexact_kernel_is_wrong_or_marked(dtype: str) -> None:
    right = Contender("csr", "scipy_csr") if dtype == "fp32" else Contender("dense", "torch_dense")
    found = rows(dtype, right, *(Contender("dense", name) for name in NAMES))
    marks = frame(found).marks
    assert found[0].status is Status.OK
    assert marks[0] == ""
    for row, mark in zip(found[1:], marks[1:], strict=True):
        exact = dtype == "fp8" and row.case.contender.kernel == "inexact:five_bits"  # e4m3 has 3
        accepted = row.status is Status.OK and mark == ""
        assert accepted == exact, f"{row.case.contender.label}: {row.error} of {row.usual_error}"


@pytest.mark.parametrize("name", ["scaled", "without_small_weights", "five_bits", "sums_in_bf16"])
def test_the_bound_alone_would_let_them_pass_in_bf16(name: str) -> None:
    sizes = {"sparsity": 0.0, "pattern": "dense", "k": 4096}
    (row,) = rows("bf16", Contender("dense", f"inexact:{name}"), **sizes)
    assert row.error is not None
    assert row.error_of_bound is not None
    assert row.error < 7.8e-3  # eps
    assert row.error_of_bound < 1


def test_an_error_above_three_times_the_usual_is_wrong_unless_the_suite_allows_it() -> None:
    rounded = Contender("dense", "inexact:scaled")
    (wrong,) = rows("bf16", rounded)
    assert wrong.status is Status.WRONG
    assert "times the usual" in wrong.detail
    (right,) = rows("bf16", replace(rounded, error={"at_most": 0.01, "why": "a test"}))
    assert right.status is Status.OK
    assert right.samples_us
    assert "error allowed by the suite" in frame([right]).marks[0]
    (still,) = rows("bf16", replace(rounded, error={"at_most": 0.005, "why": "a test"}))
    assert still.status is Status.WRONG


def test_what_is_allowed_takes_the_place_of_the_bound() -> None:
    eight_bits = Contender("dense", "inexact:int8_weights")
    assert rows("fp32", eight_bits)[0].status is Status.WRONG
    allowed = replace(eight_bits, error={"at_most": 0.02, "why": "8 bits"})
    assert rows("fp32", allowed)[0].status is Status.OK


def test_an_error_that_is_allowed_is_no_part_of_a_case_s_identity() -> None:
    problem, plain = Problem("linear", {**FIELDS, "dtype": "bf16"}), Contender("dense", "cublas")
    allowed = replace(plain, error={"at_most": 0.1, "why": "w"})
    assert Case(problem, plain).id == Case(problem, allowed).id


def test_a_small_bias_is_marked_where_the_error_is_not() -> None:
    draw = torch.Generator().manual_seed(3)
    reference = torch.randn(256, 512, generator=draw, dtype=torch.float64)
    errors = reference.bfloat16().double() - reference
    assert abs(bias(errors, reference)) < 1e-5
    assert bias(errors + 1e-3 * reference, reference) == pytest.approx(1e-3, rel=0.1)
    assert bias(errors + 1e-3, reference) == pytest.approx(1e-3, rel=0.1)
    assert bias(errors[:4] + reference[:4], reference[:4]) == 0  # 4 tokens tell none


def test_chance_is_no_bias() -> None:
    """6 standard errors: none in 2,000 outputs of 16 x 32 whose errors share a cause by row."""
    draw = torch.Generator().manual_seed(4)
    reference = torch.randn(2000, 16, 32, generator=draw, dtype=torch.float64)
    shared = 1e-3 * torch.randn(2000, 16, 1, generator=draw, dtype=torch.float64)
    found = [bias(s * r, r) for s, r in zip(shared, reference, strict=True)]
    assert sum(b != 0 for b in found) <= 2


def test_the_limits_are_those_of_the_documents() -> None:
    assert (UNUSUAL, WRONG) == (1.5, 3.0)


SUITE = """schema: sparsebench/suite@1
title: t
problems: [{{op: linear, m: 8, n: 16, k: 16, dtype: bf16}}]
contenders: [{{format: dense, kernel: torch_dense, error: {error}}}]
"""


def test_a_suite_says_which_error_it_allows_and_why() -> None:
    found = expand("s.yaml", SUITE.format(error="{at_most: 0.01, why: 8 bits}"), None)
    (contender,) = found.contests[0].contenders
    assert contender.error == {"at_most": 0.01, "why": "8 bits"}


@pytest.mark.parametrize(
    ("error", "said"),
    [
        ("0.01", "contenders.0.error: expected"),
        ("{at_most: 0.01}", "contenders.0.error.why: expected a value, found none"),
        ("{at_most: 0.0, why: x}", "contenders.0.error.at_most: expected greater than 0"),
        ("{at_most: 1.5, why: x}", "contenders.0.error.at_most: expected less than 1"),
        ("{at_most: .nan, why: x}", "contenders.0.error.at_most: expected"),
        ("{at_most: 0.01, why: ''}", "contenders.0.error.why: "),
        ("{at_most: 0.01, why: ' '}", "contenders.0.error.why: "),
        ("{at_most: 0.01, why: x, at_least: 0}", "contenders.0.error.at_least: unknown key"),
    ],
)
def test_a_malformed_allowance_is_one_line(error: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(SuiteError) as found:
        expand("s.yaml", SUITE.format(error=error), None)
    assert said in str(found.value)
    assert "\n" not in str(found.value)
