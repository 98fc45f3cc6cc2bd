"""results/comparison/compare.py: two runs, joined by case."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sparsebench.errors import ResultError
from sparsebench.results.comparison.changes import changes
from sparsebench.results.comparison.compare import compare as join
from sparsebench.results.comparison.sides import side
from sparsebench.results.record import Case, Problem, Row, Status
from sparsebench.results.run.store import StoredRun
from tests.results.made_up import BSR, DENSE, TWIN, stored


def rows(sparsity: float, dense_us: float, bsr_us: float, digest: str = "d1") -> list[Row]:
    problem = Problem("linear", {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "sparsity": sparsity})
    return [
        Row(Case(problem, contender), Status.OK, digest=digest, samples_us=(us,))
        for contender, us in [(DENSE, dense_us), (BSR, bsr_us)]
    ]


def processes(count: int, bsr_us: float) -> list[Row]:
    """Return rows of `count` processes, with an A/A pair, which gives the noise floor."""
    pair = [replace(r, case=Case(r.case.problem, TWIN)) for r in rows(0.9, 10, 10)[:1]]
    every = [*rows(0.9, 10, bsr_us), *pair]
    return [replace(row, replicate=i) for i in range(count) for row in every]


def run(gpu: str, rows: list[Row]) -> StoredRun:
    return stored(rows, gpu, {"gpu": {"name": gpu}})


def compare(a: StoredRun, b: StoredRun) -> pd.DataFrame:
    return join(side(a), side(b))


def test_times_and_speed_ups_are_compared_case_by_case() -> None:
    result = compare(run("A", rows(0.9, 10, 5)), run("B", rows(0.9, 20, 5)))
    dense, bsr = (line for _, line in result.iterrows())
    assert dense.time == pytest.approx(1 / 2)
    assert (bsr.time, bsr.ratio) == pytest.approx((1, 2))
    assert (bsr.median_us_a, bsr.median_us_b, bsr.speedup_a, bsr.speedup_b) == (5, 5, 2, 4)


def test_what_only_one_run_has_is_counted() -> None:
    a, b = rows(0.9, 10, 5) + rows(0.5, 10, 9), rows(0.9, 10, 5)[:1] + rows(0.7, 10, 7)
    result = changes(side(run("A", a)), side(run("B", b)))
    assert len(result.cases) == 1
    assert result.missing == (3, 2)


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
    assert list(result.label) == ["bsr/bsr_triton"]
    assert result.time[0] == 1
    assert np.isnan(result.ratio[0])


def test_a_case_that_failed_in_one_run_keeps_its_line() -> None:
    b = rows(0.9, 10, 5)
    b[1] = replace(b[1], status=Status.TIMEOUT, samples_us=())
    result = compare(run("A", rows(0.9, 10, 5)), run("B", b))
    assert (result.status_a[1], result.status_b[1]) == ("ok", "timeout")
    assert np.isnan(result.time[1])


@pytest.mark.parametrize(
    ("us", "tolerance"), [(5, 0.08), (10, 0.07), (50, 0.07), (500, 0.05)], ids=str
)
def test_looks_settle_what_exceeds_the_tolerance_of_the_length_of_call(us, tolerance) -> None:
    a = rows(0.9, 2 * us, us)
    for beyond in (0.99, 1.01):
        half = np.log1p(tolerance * np.sqrt(2))
        b = rows(0.9, 2 * us, us / np.exp(beyond * half))
        result = compare(run("A", a), run("B", b)).iloc[1]
        assert result.tolerance == pytest.approx(tolerance * np.sqrt(2))
        assert (result.gain == "faster") == (beyond > 1)


def test_a_noisy_machine_has_a_wider_tolerance() -> None:
    noisy = [
        replace(row, samples_us=(11.0,)) if row.case.contender.twin else row
        for row in processes(3, 10.0)
    ]
    result = compare(run("A", noisy), run("B", processes(3, 10.0)))
    assert result.tolerance[1] == pytest.approx(1.31 * 0.1 * np.sqrt(2 / 3))
