"""results/comparison/compare.py: two runs, joined by case."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from sparsebench.errors import ResultError
from sparsebench.results.comparison.compare import Comparison
from sparsebench.results.comparison.compare import compare as join
from sparsebench.results.comparison.sides import side
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run.store import Run

DENSE = Contender("dense", "cublas", baseline=True)
BSR = Contender("bsr", "bsr_triton")


def rows(sparsity: float, dense_us: float, bsr_us: float, digest: str = "d1") -> list[Row]:
    problem = Problem("linear", {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "sparsity": sparsity})
    return [
        Row(Case(problem, contender), Status.OK, digest=digest, samples_us=(us,))
        for contender, us in [(DENSE, dense_us), (BSR, bsr_us)]
    ]


def processes(count: int, bsr_us: float) -> list[Row]:
    """Return rows of `count` processes, with an A/A pair, which gives the noise floor."""
    twin = replace(DENSE, baseline=False, twin=True)
    pair = [replace(r, case=Case(r.case.problem, twin)) for r in rows(0.9, 10, 10)[:1]]
    every = [*rows(0.9, 10, bsr_us), *pair]
    return [replace(row, replicate=i) for i in range(count) for row in every]


def run(gpu: str, rows: list[Row]) -> Run:
    return Run(Path(gpu), {}, "", {"gpu": {"name": gpu}}, {"status": "finished"}, rows)


def compare(a: Run, b: Run) -> Comparison:
    return join(side(a), side(b))


def test_times_and_speed_ups_are_compared_case_by_case() -> None:
    result = compare(run("A", rows(0.9, 10, 5)), run("B", rows(0.9, 20, 5)))
    dense, bsr = (line for _, line in result.cases.iterrows())
    assert (dense.time_b_over_a, dense.speedup_b_over_a) == pytest.approx((2, 1))
    assert (bsr.time_b_over_a, bsr.speedup_b_over_a) == pytest.approx((1, 2))
    assert (bsr.median_us_a, bsr.median_us_b, bsr.speedup_a, bsr.speedup_b) == (5, 5, 2, 4)


def test_what_only_one_run_has_is_said() -> None:
    a, b = rows(0.9, 10, 5) + rows(0.5, 10, 9), rows(0.9, 10, 5)[:1] + rows(0.7, 10, 7)
    result = compare(run("A", a), run("B", b))
    assert len(result.cases) == 1
    assert list(result.only_a.sparsity) == [0.5, 0.5, 0.9]
    assert list(result.only_b.sparsity) == [0.7, 0.7]


def test_runs_without_a_common_case_are_refused() -> None:
    with pytest.raises(ResultError, match="none in common"):
        compare(run("A", rows(0.9, 10, 5)), run("B", rows(0.5, 10, 5)))


def test_equal_problems_with_unequal_operands_are_refused() -> None:
    with pytest.raises(ResultError, match="expected operands d1, found d2"):
        compare(run("A", rows(0.9, 10, 5)), run("B", rows(0.9, 10, 5, digest="d2")))


def test_speed_ups_over_different_baselines_are_not_compared() -> None:
    other = replace(DENSE, kernel="reference")
    b = rows(0.9, 10, 5)
    b[0] = replace(b[0], case=replace(b[0].case, contender=other))
    result = compare(run("A", rows(0.9, 10, 5)), run("B", b))
    assert list(result.cases.label) == ["bsr/bsr_triton"]
    assert result.cases.time_b_over_a[0] == 1
    assert np.isnan(result.cases.speedup_b_over_a[0])


def test_a_case_that_failed_in_one_run_keeps_its_line() -> None:
    b = rows(0.9, 10, 5)
    b[1] = replace(b[1], status=Status.TIMEOUT, samples_us=())
    result = compare(run("A", rows(0.9, 10, 5)), run("B", b))
    assert (result.cases.status_a[1], result.cases.status_b[1]) == ("ok", "timeout")
    assert np.isnan(result.cases.time_b_over_a[1])


@pytest.mark.parametrize(
    ("a_us", "b_us", "outcomes", "agree"),
    [
        (5.0, 8.0, ("faster", "faster"), True),  # by how much is another question
        (5.0, 20.0, ("faster", "slower"), False),
        (10.0, 10.01, ("equal", "equal"), True),
    ],
)
def test_verdicts_agree_when_their_outcomes_are_the_same(a_us, b_us, outcomes, agree) -> None:
    cases = compare(run("A", processes(8, a_us)), run("B", processes(8, b_us))).cases
    line = cases[cases.label == "bsr/bsr_triton"].iloc[0]
    assert (line.outcome_a, line.outcome_b) == outcomes
    assert line.agree == agree


@pytest.mark.parametrize(
    ("us", "tolerance"), [(5, 0.08), (10, 0.07), (50, 0.07), (500, 0.05)], ids=str
)
def test_looks_agree_within_the_tolerance_of_the_length_of_call(us, tolerance) -> None:
    a = rows(0.9, 2 * us, us)
    for beyond in (0.99, 1.01):
        b = rows(0.9, 2 * us, us / (1 + beyond * tolerance * np.sqrt(2)))
        result = compare(run("A", a), run("B", b)).cases.iloc[1]
        assert result.tolerance == pytest.approx(tolerance * np.sqrt(2))
        assert result.agree == result.close == (beyond < 1)


def test_a_noisy_machine_has_a_wider_tolerance() -> None:
    noisy = [
        replace(row, samples_us=(11.0,)) if row.case.contender.twin else row
        for row in processes(3, 10.0)
    ]
    result = compare(run("A", noisy), run("B", processes(3, 10.0))).cases
    assert result.tolerance[1] == pytest.approx(1.31 * 0.1 * np.sqrt(2 / 3))


def test_there_is_nothing_to_agree_on_without_a_common_comparison() -> None:
    cases = compare(run("A", processes(8, 5)), run("B", processes(8, 5))).cases
    assert list(cases.agree.isna()) == [True, False]  # baseline, contender; no twins
    b = rows(0.9, 10, 5)
    b[1] = replace(b[1], status=Status.UNSUPPORTED, samples_us=())
    assert compare(run("A", rows(0.9, 10, 5)), run("B", b)).cases.agree.isna().all()
    b[1] = replace(b[1], status=Status.WRONG)
    assert list(compare(run("A", rows(0.9, 10, 5)), run("B", b)).cases.agree[1:]) == [False]
