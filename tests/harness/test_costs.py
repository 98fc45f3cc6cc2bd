"""Estimates from a made-up run whose seconds are exact."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sparsebench.harness.costs.estimates import affordable, preview
from sparsebench.harness.costs.measured_times import AGAIN, ENERGY_S, MeasuredTimes, times
from sparsebench.harness.new_gpu.choices import coarse
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Suite, expand, read
from sparsebench.results.record import Case, Row, Status
from sparsebench.results.run.provenance import Choices
from sparsebench.results.run.store import Run
from tests.tools.suites import linear

SUITE = linear(  # two dense products, two sparsities each
    "m: [16, 32], n: 64, k: 64, block: 16, sparsity: [0.5, 0.75]",
    "{format: bsr, kernel: bsr_wgmma, params: {block: $block}}",
)
DENSE_S, SPARSE_S = (4, 1, 4, 1), (9, 2, 2, 2)  # the search of each product; a compilation


@pytest.fixture
def suite() -> Suite:
    return expand("suite.yaml", SUITE, None)


def run(suite: Suite) -> Run:
    """Return one process over the suite, in which preparing the contests took these seconds."""
    rows = [
        Row(
            Case(contest.problem, contender),
            Status.OK,
            prepare_s=dense_s if contender.baseline else sparse_s,
            candidates=[{"of": None}] if contender.baseline else [],
        )
        for contest, dense_s, sparse_s in zip(suite.contests, DENSE_S, SPARSE_S, strict=True)
        for contender in contest.contenders
    ]
    spent = {"start": 3.0, "ceilings": 5.0, "prepare": 25.0, "check": 4.0, "timing": 1.0}
    state: dict[str, Any] = {"seconds": 38.0, "spent_s": spent, "contests": {"done": 4, "of": 4}}
    return Run(Path(), {}, "", {}, state | {"flags": {"replicates": 1}}, rows, [])


@pytest.fixture
def measured(suite: Suite) -> MeasuredTimes:
    return times([run(suite)])


def test_the_time_of_a_run_is_split_by_its_causes(measured: MeasuredTimes) -> None:
    assert (measured.start_s, measured.ceilings_s) == (3.0, 5.0)
    assert measured.contest_and_row_s(0.0) == (1.0, 1 / 8)
    dense, sparse = measured.first["cublas"], measured.first["bsr_wgmma"]
    assert (dense.case_s(0.0), dense.case_s(0.0, repeated=True), dense.once_s) == (4, 1, 0)
    assert (sparse.case_s(0.0), sparse.once_s) == (2, 7)


def test_a_process_that_compiled_anew_does_not_count_for_every_process(suite: Suite) -> None:
    first = run(suite)
    quick = [replace(row, replicate=n, prepare_s=2.0) for row in first.rows for n in (1, 2, 3)]
    on_another_host = [replace(row, replicate=4) for row in first.rows]
    state = first.state | {"flags": {"replicates": 5}, "choices": Choices.AMONG}
    estimate = times([replace(first, rows=[*first.rows, *quick, *on_another_host], state=state)])
    assert estimate.searching["bsr_wgmma"].once_s == 0


def test_later_processes_are_estimated_from_the_first_one(measured: MeasuredTimes) -> None:
    assert measured.searching["cublas"].case_s(0.0) == 1, "a product is searched once"
    assert measured.searching["bsr_wgmma"].case_s(0.0) == pytest.approx(2 * AGAIN)


def candidates(suite: Suite) -> dict[str, list[str]]:
    return {c.problem.id: [Case(c.problem, c.contenders[0]).id] for c in suite.contests}


def test_problems_are_taken_in_order_while_all_processes_have_time(suite, measured) -> None:
    problems = candidates(suite)
    last = 0
    for left_s in range(0, 200, 4):
        fitting = [*affordable(suite, measured, problems, left_s, 2)]
        assert fitting == [name for name in problems if name in fitting]
        assert len(fitting) >= last
        last = len(fitting)
    assert affordable(suite, measured, problems, 0, 2) == {}
    assert last == len(problems)


def test_a_problem_that_is_too_dear_leaves_room_for_the_next(suite, measured) -> None:
    first, same_product, other_product, _ = candidates(suite).items()
    ids = "|".join(case for _, cases in (first, same_product) for case in cases)
    left_s = preview(suite, measured, f"case={ids}", 2)["estimate_s"]
    fitting = affordable(suite, measured, dict([first, other_product, same_product]), left_s, 2)
    assert [*fitting] == [first[0], same_product[0]]


def test_energy_takes_a_window_for_each_contender_and_process(suite, measured) -> None:
    without, with_energy = (
        preview(suite, measured, replicates=2, energy=energy)["estimate_s"]
        for energy in (False, True)
    )
    contests = [each for each in planned_contests(suite, "cuda") if not each.reference]
    windows = sum(len(contest.contenders) for contest in contests)
    assert with_energy - without == pytest.approx(2 * windows * ENERGY_S, abs=1)


def test_a_coarse_look_sees_every_shape_at_its_deciding_level_first() -> None:
    problems = [contest.problem for contest in read("core").contests]
    ranks = coarse(problems)
    first = [each for each in problems if ranks[each.id] == 0]
    names = "pattern", "dtype", "m", "n", "k"
    shapes = {(p.op, *(p[name] for name in names)) for p in problems}
    assert len(first) == len(shapes)
    assert {p["sparsity"] for p in first if p["pattern"] == "blocks"} == {0.9}
    assert len(problems) > 2 * len(first)
