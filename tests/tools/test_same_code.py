from dataclasses import replace
from typing import Any

import pytest

from sparsebench.errors import Unsupported
from sparsebench.results.record import Row
from sparsebench.results.run import store
from tests.tools.paths import PUBLISHED
from tests.tools.same_code import compare, compare_all, published, report

QUICK = PUBLISHED / "nvidia-h200" / "quick"


def test_one_row_is_taken_for_each_kernel_and_digest() -> None:
    rows = published(QUICK)
    codes = [(row.case.contender.kernel, row.code) for row in rows]
    assert len(codes) == len(set(codes)) > 5
    assert {(row.case.contender.kernel, row.code) for row in store.rows(QUICK) if row.code} == {
        *codes
    }
    kernel = rows[0].case.contender.kernel
    assert {row.case.contender.kernel for row in published(QUICK, kernel)} == {kernel}


def test_a_case_is_prepared_like_that_of_a_run() -> None:
    rows = store.rows(PUBLISHED / "cpu" / "quick-cpu")
    problem = min(rows, key=lambda row: row.dense_flops or float("inf")).case.problem.id
    of_one = [row for row in rows if row.case.problem.id == problem]
    outcomes = compare_all(of_one, "cpu", None)
    assert {outcome for outcome, _ in outcomes} == {"equal"}  # a CPU kernel has no digest


def raises(error: Exception) -> Any:
    def prepare(row: Row, dense: Any) -> str:
        raise error

    return prepare


@pytest.mark.parametrize(
    ("prepare", "expected"),
    [
        (lambda row, dense: row.code, "equal"),
        (lambda row, dense: "sass:0", "different"),
        (raises(Unsupported("no room")), "unsupported"),
        (raises(RuntimeError("no room")), "failed"),
    ],
)
def test_a_row_is_compared_and_no_exception_ends_the_comparison(prepare, expected) -> None:
    row = published(QUICK)[0]
    outcome, line = compare(row, None, prepare)  # type: ignore[arg-type]
    assert outcome == expected
    assert (row.case.contender.kernel in line) == (expected != "equal")


def test_a_removed_kernel_and_a_missing_file_are_counted() -> None:
    row = published(QUICK)[0]
    contender = replace(row.case.contender, kernel="removed_since")
    gone = replace(row, case=replace(row.case, contender=contender))
    assert compare(gone, None)[0] == "removed_since was removed"  # type: ignore[arg-type]
    (csr, *_) = published(PUBLISHED / "nvidia-h200" / "dlmc-csr", "csr_cuda")
    assert compare_all([csr, csr], "cpu", None)[1][0] == "file not found"


def test_differences_and_failures_fail_the_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    assert report([("equal", ""), ("unsupported", "b"), ("file not found", "c")], 2) == 0
    assert "3 codes of 2 kernels: equal 1, different 0, not reproducible here 2" in (
        capsys.readouterr().out
    )
    assert report([("equal", ""), ("different", "a")], 1) == 1
    assert report([("failed", "a")], 1) == 1
