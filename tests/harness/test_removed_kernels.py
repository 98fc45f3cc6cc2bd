"""Suites that name removed kernels: a run's own still expands, a user's is refused."""

import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import load_kernel
from sparsebench.harness.plan.suite import expand
from sparsebench.kernels import _removed
from sparsebench.results.record import Case, Contender

SUITE = """
schema: sparsebench/suite@1
title: t
problems: [{op: linear, m: 8, n: 64, k: 64, dtype: fp32, pattern: dense}]
contenders: [{format: dense, kernel: cublas_old, options: {tuned: true}}]
"""


@pytest.fixture(autouse=True)
def _table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_removed, "REMOVED", {"cublas_old": "use cublas"})


def test_the_suite_of_a_run_expands_to_the_same_case() -> None:
    (contest,) = expand("suite.yaml", SUITE, published=True).contests
    (contender,) = contest.contenders
    assert contender == Contender("dense", "cublas_old", options={"tuned": True})
    assert len(Case(contest.problem, contender).id) == 16
    reason = unsupported(contest.problem, contender, torch.device("cpu"))
    assert reason is not None
    assert "use cublas" in reason


def test_the_suite_of_a_user_is_refused() -> None:
    with pytest.raises(SuiteError, match="use cublas"):
        expand("mine.yaml", SUITE)


def test_a_removed_kernel_tunes_nothing() -> None:
    assert not load_kernel("cublas_old").tunes
