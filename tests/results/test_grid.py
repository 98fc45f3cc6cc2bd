"""results/tables/grid.py: which rows beat dense, in which columns, and by how much."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sparsebench.results.badges import Badge, badges
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.grid import EVERY, Finding, View, findings, grid
from tests.results.made_up import DENSE, WOBBLE, stored
from tests.tools.paths import PUBLISHED

OURS, PEER = Contender("bsr", "bsr_wgmma"), Contender("bsr", "torch_bsr")
PLACE: dict[str, Any] = {"m": 16, "n": 4096, "k": 4096, "dtype": "bf16", "pattern": "blocks"}
HALF = {"pattern": "spense_hidden", "block": 1}


def rows(processes: int, us: list[tuple[Contender, float]], **fields: Any) -> list[Row]:
    problem = Problem("linear", PLACE | {"sparsity": 0.9, "block": 64} | fields)
    return [
        Row(Case(problem, contender), Status.OK, p, samples_us=(time * np.exp(effect),))
        for p, d in enumerate(WOBBLE[:processes])
        for contender, time in us
        for effect in [0.0 if contender == DENSE else d]
    ]


def analysed(measured: list[Row]) -> Analysis:
    return analyse(stored(measured))


def view(measured: list[Row]) -> View:
    return analysed(measured).views[0]


def swept(ratios: dict[float, float], **fields: Any) -> list[Row]:
    """Return a run in which ours is so many times as fast as dense at each level."""
    return [
        row
        for level, ratio in ratios.items()
        for row in rows(8, [(DENSE, 100.0), (OURS, 100.0 / ratio)], sparsity=level, **fields)
    ]


def shown(measured: list[Row]) -> dict[str, tuple[str, str]]:
    """Return the outcome and the group of each row of the first view."""
    every = findings(view(measured).grid)
    return {finding.contender: (str(finding.outcome), finding.group) for finding in every}


def test_a_cell_holds_the_fastest_case_with_its_interval_and_its_baseline() -> None:
    drawn = view(rows(8, [(DENSE, 100.0), (OURS, 20.0), (PEER, 50.0)])).grid
    (cell,) = drawn.rows["blocks of 64"].values()
    (case,) = cell.cases
    assert case["name"] == "bsr_wgmma"
    ends = [case[name] for name in ("gain", "low", "high")]
    assert ends == pytest.approx([5, 4.985, 5.015], rel=1e-3)
    assert (case["dense_name"], case["dense_us"]) == ("cublas", 100)


@pytest.mark.parametrize(
    ("ratios", "outcome", "group"),
    [
        ({0.5: 0.7, 0.75: 1.4}, "faster", "at 75 % sparsity"),
        ({0.5: 0.5, 0.75: 1.0001, 0.875: 2.0}, "faster", "at 87.5 % sparsity"),
        ({0.5: 1.5, 0.75: 0.8, 0.9: 3.0}, "faster", "at 50 % and 90 % sparsity"),
        ({0.5: 1.5, 0.75: 2.0}, "faster", "from 50 % to 75 % sparsity"),
        ({0.5: 0.5, 0.9: 0.8}, "slower", "from 50 % to 90 % sparsity"),
        ({0.5: 0.9999, 0.9: 1.0001}, "equal", "from 50 % to 90 % sparsity"),
        ({0.5: 0.5, 0.9: 1.0001}, "not settled", ""),
        ({0.9: 4.0}, "faster", "at 90 % sparsity"),
    ],
)
def test_a_row_is_faster_where_all_its_cases_are(ratios, outcome, group) -> None:
    assert shown(swept(ratios)) == {"blocks of 64": (outcome, group)}


def test_a_finding_is_of_the_largest_gain_where_it_holds() -> None:
    (finding,) = findings(view(swept({0.5: 0.7, 0.75: 1.4, 0.9: 1.2})).grid)
    assert finding.best["gain"] == pytest.approx(1.4, rel=0.01)
    data = finding.to_json()
    assert data["outcome"] == "faster"
    assert (data["baseline"], data["case"]) == ("cublas", finding.best["case_id"])


def test_a_row_that_is_faster_for_some_problems_of_a_column_says_no_column() -> None:
    measured = swept({0.5: 0.7, 0.9: 2.0}) + swept({0.5: 0.5, 0.9: 0.8}, n=64)
    first, *others = analysed(measured).views
    assert first.choice == {"shape": EVERY}
    assert [len(cell.cases) for cell in first.grid.rows["blocks of 64"].values()] == [2, 2]
    (finding,) = findings(first.grid)
    assert (finding.outcome, finding.group) == (Outcome.FASTER, "")
    assert {each.choice["shape"] for each in others} == {"64 × 4096", "4096 × 4096"}


def test_blocks_are_rows_and_the_largest_gain_comes_first() -> None:
    blocks = ((16, 0.5), (32, 1.2), (64, 1.4))
    measured = [r for b, gain in blocks for r in swept({0.5: gain, 0.9: 4 * gain}, block=b)]
    assert [*shown(measured)] == ["blocks of 64", "blocks of 32", "blocks of 16"]
    assert shown(measured)["blocks of 16"] == ("faster", "at 90 % sparsity")


def test_the_columns_are_tokens_if_no_level_is_swept() -> None:
    times = [(DENSE, 100.0), (Contender("spense", "spense_wgmma"), 50.0)]
    measured = [r for m in (1, 16) for r in rows(8, times, m=m, sparsity=0.25, **HALF)]
    assert view(measured).x == "m"
    assert shown(measured) == {"half 2:4": ("faster", "from m 1 to 16")}


@pytest.mark.parametrize(("spread", "outcome"), [(1.0, "equal"), (20.0, "not settled")])
def test_a_gain_within_the_noise_is_no_win(spread: float, outcome: str) -> None:
    wide = [
        replace(row, samples_us=(row.samples_us[0] * np.exp((spread - 1) * WOBBLE[row.replicate]),))
        if row.case.contender != DENSE
        else row
        for row in swept({0.5: 1.0005})
    ]
    assert shown(wide) == {"blocks of 64": (outcome, "at 50 % sparsity")}


def test_gains_are_over_the_fastest_dense_contender_and_no_win_of_a_portfolio_s_dense_choice():
    portfolio = Contender("cvse", "ffn_sparse", options={"way": "best"})
    compiled = Contender("dense", "torch_compile")
    measured = rows(8, [(DENSE, 100.0), (compiled, 80.0), (portfolio, 79.0), (OURS, 40.0)])
    measured = [
        replace(row, choice={"chosen": "dense, ffn_dense_triton"})
        if row.case.contender == portfolio
        else row
        for row in measured
    ]
    (case,) = view(measured).grid.cases
    assert (case["name"], case["dense_name"]) == ("bsr_wgmma", "ffn_dense_triton")
    assert case["gain"] == pytest.approx(79 / 40, rel=0.01)


def test_the_best_of_each_side_is_a_row_of_another_grid() -> None:
    measured = view(rows(8, [(DENSE, 100.0), (OURS, 20.0), (PEER, 50.0)]))
    assert [*grid(measured.lines, "level", row="side").rows] == ["ours", "peer"]


@pytest.mark.parametrize("name", ["announced", "blocks", "decoder"])
def test_every_problem_of_a_run_is_in_a_view(name: str) -> None:
    analysis = analyse(store.read(PUBLISHED / "nvidia-h200" / name))
    sparse = analysis.timed[analysis.timed.side != "dense"]
    cases = {case["problem_id"] for each in analysis.views for case in each.grid.cases}
    assert cases == {*sparse.problem_id}


def test_each_dtype_has_its_own_view_and_bf16_comes_first() -> None:
    single = swept({0.5: 1.2, 0.8: 1.6, 0.9: 2.0}, dtype="fp32")
    views = analysed(single + swept({0.5: 0.5, 0.9: 0.8})).views
    assert [each.choice for each in views] == [{"dtype": "bf16"}, {"dtype": "fp32"}]


def test_a_case_without_a_dense_time_has_no_outcome() -> None:
    (finding,) = findings(view(rows(8, [(OURS, 100.0)])).grid)
    assert finding.outcome is Outcome.NOT_MEASURED
    assert finding.to_json()["gain"] is None
    assert findings(view(rows(8, [(DENSE, 100.0)])).grid) == list[Finding]()


def test_units_that_are_off_are_the_level_of_sparse_activations() -> None:
    views = analyse(store.read(PUBLISHED / "nvidia-h200" / "ffn-step")).views
    assert {each.grid.units for each in views} == {" of units off"}


def test_badges_say_what_a_run_can_say() -> None:
    for processes, badge in ((8, Badge.VERDICT), (3, Badge.LOOK)):
        analysis = analysed(rows(processes, [(DENSE, 100.0), (OURS, 50.0)]))
        assert [label.badge for label in badges(analysis)] == [badge]
    none = analysed([])
    assert [label.badge for label in badges(none)] == [Badge.EMPTY]
    assert none.views == []
