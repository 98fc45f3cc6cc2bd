"""What a survey measures in its budget: by a made-up screening, whose seconds are exact."""

from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.harness.costs.survey_estimates import Costs, coarse, costs
from sparsebench.harness.new_gpu.problem_choice import DECIDED
from sparsebench.harness.plan.selection import references
from sparsebench.harness.plan.suite import read
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.store import Run

DENSE, SPARSE = Contender("dense", "cublas", baseline=True), Contender("bsr", "bsr_wgmma")
SIZES = {"m": 16, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks", "block": 16}


def problem(m: int, sparsity: float) -> Problem:
    return Problem("linear", {**SIZES, "m": m, "sparsity": sparsity})


def rows(asked: Problem, dense_s: float, sparse_s: float) -> list[Row]:
    """Return what preparing a contest took."""
    took = ((DENSE, dense_s), (SPARSE, sparse_s))
    return [Row(Case(asked, who), Status.OK, prepare_s=seconds) for who, seconds in took]


# Of two processes, s: a problem of a kind that is new, searched once, and of one that was met.
START, SEARCHED, MET = 5 + 2 * 3, 2 * (1.25 + 2) + 4 + 1, 2 * (1.25 + 2) + 2 * 1
ASKED = [problem(m, level) for m in (16, 32) for level in (0.5, 0.9)]


@pytest.fixture
def known() -> Costs:
    """Four problems of two kinds: each kind's first dense search takes 4 s, the other 1 s."""
    found = [
        *rows(ASKED[0], 4, 9), *rows(ASKED[1], 1, 2), *rows(ASKED[2], 4, 2), *rows(ASKED[3], 1, 2),
    ]  # fmt: skip
    spent = {"start": 3.0, "ceilings": 5.0, "prepare": 25.0, "timing": 1.0}
    state = {"seconds": 38.0, "spent_s": spent, "contests": {"done": 4, "of": 4}}
    return costs(Run(Path(), {}, "", {}, state, found, []))


def wanted(problems: list[Problem]) -> dict[str, list[str]]:
    return {each.id: [Case(each, SPARSE).id] for each in problems}


def test_what_a_screening_took_is_split_by_its_causes(known: Costs) -> None:
    assert (known.start_s, known.ceilings_s, known.contest_s) == (3.0, 5.0, 1.25)
    assert sorted(known.once_s.values()) == [4, 4]
    assert sorted(known.again_s.values()) == [1, 1]
    assert set(known.case_s.values()) == {2}, "the first row of a kernel also compiled it"


@pytest.mark.parametrize(
    ("left_s", "fits"),
    [
        (START + SEARCHED - 0.1, []),
        (START + SEARCHED, ASKED[:1]),
        (START + SEARCHED + MET, ASKED[:2]),  # the second of a kind has its dense search
        (START + 2 * SEARCHED + 2 * MET, ASKED),
    ],
)
def test_problems_are_taken_while_all_processes_have_time_for_them(
    left_s: float, fits: list[Problem], known: Costs
) -> None:
    assert [*known.affordable(wanted(ASKED), left_s, 2)] == [each.id for each in fits]


def test_a_problem_that_is_too_dear_makes_room_for_those_behind_it(known: Costs) -> None:
    order = [ASKED[0], ASKED[2], ASKED[1]]
    left_s = START + SEARCHED + MET
    found = known.affordable(wanted(order), left_s, 2)
    assert [*found] == [ASKED[0].id, ASKED[1].id]


def test_references_are_of_every_process(known: Costs) -> None:
    asked = [contest.problem for contest in references("cuda")]
    dear = replace(known, references=asked)
    left_s = START + SEARCHED
    assert known.affordable(wanted(ASKED[:1]), left_s, 2)
    assert not dear.affordable(wanted(ASKED[:1]), left_s, 2)


def test_a_coarse_look_sees_every_shape_at_its_deciding_level_first() -> None:
    problems = [contest.problem for contest in read("core").contests]
    ranks = coarse(problems, DECIDED)
    first = [each for each in problems if ranks[each.id] == 0]
    names = "pattern", "dtype", "m", "n", "k"
    shapes = {(p.op, *(p[name] for name in names)) for p in problems}
    assert len(first) == len(shapes)
    assert {p["sparsity"] for p in first if p["pattern"] == "blocks"} == {0.9}
    assert len(problems) > 2 * len(first)
