"""Names of earlier versions: a run's own suite and rows keep their cases; a user's is refused."""

import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest import run
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import load_format, load_kernel, names, weights_format
from sparsebench.harness.plan.suite import expand
from sparsebench.harness.run.recorded_plan import code_of
from sparsebench.kernels import _removed
from sparsebench.results.record import FORMATS_ONCE_DENSE, Case, Contender, Problem, Status
from sparsebench.results.tables.families import OF_ACTIVATIONS

SUITE = """
schema: sparsebench/suite@1
title: t
problems: [{op: linear, m: 8, n: 64, k: 64, dtype: fp32, pattern: dense}]
contenders: [{format: dense, kernel: cublas_old, options: {tuned: true}}]
"""

PUBLISHED = "b37a94802481976e"  # in results/published/nvidia-h200/ffn
UNITS = """
schema: sparsebench/suite@1
title: t
problems: [{op: ffn, m: 16, n: 64, k: 64, dtype: bf16, activation: relu, active: 4}]
contenders: [{format: dense, kernel: ffn_twell}]
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
    assert not load_kernel("cublas_old").tunes
    with pytest.raises(SuiteError, match="use cublas"):
        expand("mine.yaml", SUITE)


def test_a_run_that_called_twell_dense_has_the_cases_that_it_had() -> None:
    (contest,) = expand("suite.yaml", UNITS, published=True).contests
    assert contest.contenders == (Contender("twell", "ffn_twell"),)
    with pytest.raises(SuiteError, match="expected format twell"):
        expand("mine.yaml", UNITS)
    (today,) = expand("mine.yaml", UNITS.replace("dense, kernel", "twell, kernel")).contests
    assert today == contest


def test_the_id_of_a_published_case_is_what_it_was() -> None:
    problem = {
        "op": "ffn",
        "fields": {
            "m": 16384, "n": 5632, "k": 2048, "dtype": "bf16", "pattern": "dense",
            "sparsity": 0.0, "block": 1, "active": 29.0, "skew": "iid", "activation": "relu",
        },
        "seed": 0,
        "defaults": {
            "pattern": "dense", "sparsity": 0.0, "block": 1, "active": None, "skew": "iid",
            "activation": "silu",
        },
    }  # fmt: skip
    contender = {"format": "dense", "kernel": "ffn_twell"}
    case = Case.from_json({"problem": problem, "contender": contender})
    assert case.contender.format == "twell"
    assert case.id == PUBLISHED
    assert Case(Problem.from_json(problem), Contender("twell", "ffn_twell")).id == PUBLISHED


def test_a_kernel_of_a_distribution_that_is_not_installed_is_an_unsupported_row(
    monkeypatch,
) -> None:
    monkeypatch.setattr(_removed, "AUTHORS", {"cublas_elsewhere"})
    (contest,) = expand("mine.yaml", SUITE.replace("cublas_old", "cublas_elsewhere")).contests
    rows, _ = run(contest.problem, contest.contenders, torch.device("cpu"), None)
    assert [row.status for row in rows] == [Status.UNSUPPORTED]
    assert "pip install ./authors" in rows[0].detail
    assert code_of([contest])["plugins"] == {}
    with pytest.raises(SuiteError, match="did you mean"):
        expand("mine.yaml", SUITE.replace("cublas_old", "cublass"))


IN_THIS_PACKAGE = [(k, f) for k, f in FORMATS_ONCE_DENSE.items() if k not in _removed.AUTHORS]


@pytest.mark.parametrize(("kernel", "stored"), IN_THIS_PACKAGE)
def test_kernels_name_the_format_that_their_rows_are_read_as(kernel: str, stored: str) -> None:
    assert load_kernel(kernel).consumes == stored


def test_contenders_of_activations_have_dense_weights() -> None:
    stored = {name for name in names("formats") if load_format(name).operand == "activations"}
    assert stored == OF_ACTIVATIONS
    assert {weights_format(name) for name in stored} == {Dense}
