"""Which kernels of others a run names as not compared."""

import pytest

from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.untimed_peers import sentence

CASES = {
    "its package is missing": ("fastvideo", Status.UNSUPPORTED, "needs x: pip install x", True),
    "it fails": ("cudnn_block_sparse", Status.FAILED, "prepare: ImportError: no module", True),
    "the problem does not suit it": ("stk", Status.UNSUPPORTED, "expected 128, found 32", False),
    "another device": ("scipy_csr", Status.UNSUPPORTED, "runs on cpu, not on cuda", False),
    "one of ours": ("bsr_wgmma", Status.UNSUPPORTED, "needs cupy: pip install cupy", False),
    "wrong": ("torch_bsr", Status.WRONG, "relative error of 0.5", False),
}


def row(kernel: str, status: Status = Status.OK, detail: str = "") -> Row:
    case = Case(Problem("linear", {}), Contender("bsr", kernel))
    return Row(case, status, detail=detail)


@pytest.mark.parametrize("what", CASES)
def test_a_kernel_of_others_that_could_not_run_on_the_machine_is_named(what: str) -> None:
    kernel, status, detail, is_named = CASES[what]
    rows = [row(kernel, status, detail), row("cublas")]
    assert (kernel in sentence(rows)) == is_named
    assert sentence([*rows, row(kernel)]) == ""
