"""results/changes.py and reports/comparison.py: what changed between runs, and how it is shown."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from sparsebench.errors import ResultError
from sparsebench.reports.comparison import compared, html, markdown, to_json
from sparsebench.results.changes import changes, failing, threshold
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.store import Run

DENSE = Contender("dense", "cublas", baseline=True)
BSR = Contender("bsr", "bsr_triton")
LEVELS = (0.5, 0.8, 0.9)
SPREAD = (0.999, 1.0, 1.001)  # of the processes


def run(name: str, gpu: str = "A", dense_us: float = 100.0, **bsr_us: float) -> Run:
    """Return a run with BSR at three levels; `at_90=40` sets a time."""
    times = {f"at_{100 * level:.0f}": (1 - level) * 100 for level in LEVELS} | bsr_us
    rows = []
    for level, us in zip(LEVELS, times.values(), strict=True):
        fields = {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks"}
        problem = Problem("linear", {**fields, "sparsity": level, "block": 16})
        rows += [
            Row(Case(problem, c), Status.OK, i, bound_us=1.0, samples_us=(t * part,), code="sass:1")
            for i, part in enumerate(SPREAD)
            for c, t in ((DENSE, dense_us), (BSR, us * part))
        ]
    return Run(Path(name), {}, "", {"gpu": {"name": gpu}}, {"status": "finished"}, rows)


def words(a: Run, b: Run) -> list[str]:
    own = changes(a, b).contenders
    return [str(word) for word in own.sort_values("level").word]


def with_bsr(made: Run, **row: Any) -> Run:
    rows = [replace(r, **row) if r.case.contender == BSR else r for r in made.rows]
    return replace(made, rows=rows)


def said(*given: Run, width: int = 120) -> str:
    console = Console(width=width)
    with console.capture() as capture:
        console.print(compared(given))
    return capture.get()


def test_cases_are_slower_equal_or_faster_beyond_the_ranges_of_both_runs() -> None:
    assert words(run("a"), run("b", at_50=60, at_90=8)) == ["slower", "equal", "faster"]


def test_a_slower_device_with_the_same_speed_ups_is_equal() -> None:
    slow = run("b", "B", 200.0, at_50=100, at_80=40, at_90=20)
    assert words(run("a"), slow) == ["equal"] * 3
    found = changes(run("a"), slow)
    assert not found.same_device
    assert found.cases[found.cases.is_baseline].word.eq("").all()  # no time against another device


def test_a_baseline_that_moved_is_the_reason() -> None:
    moved = changes(run("a"), run("b", dense_us=150.0))
    assert moved.counts == {"faster": 3}
    assert set(moved.contenders.why) == {"baselines are 0.667 times as fast"}
    assert moved.baseline_mean == pytest.approx(100 / 150)


def test_other_code_and_another_choice_are_reasons() -> None:
    other = with_bsr(run("b", at_90=20), code="sass:2", choice={"tile": 64})
    slower = changes(run("a"), other).contenders.set_index("level").loc[0.9]
    assert slower.why == "other compiled code; another choice"


def test_a_case_that_broke_is_told_with_its_reason_and_fails_the_gate() -> None:
    broken = with_bsr(run("b"), status=Status.WRONG, detail="all zero", samples_us=())
    found = changes(run("a"), broken)
    assert found.counts == {"broken": 3}
    assert set(found.contenders.why) == {"wrong: all zero"}
    assert len(failing(found, 0.5)) == 3


@pytest.mark.parametrize(
    ("limit", "count"), [("slower:3%", 1), ("slower: 30%", None), ("slower:30 %", 0)]
)
def test_the_gate_takes_what_is_slower_by_more(limit: str, count: int | None) -> None:
    if count is None:
        with pytest.raises(ResultError, match="expected slower:P%"):
            threshold(limit)
        return
    found = changes(run("a"), run("b", at_50=60))
    assert len(failing(found, threshold(limit))) == count


def test_any_number_of_runs_are_held_against_the_first() -> None:
    text = said(run("a"), run("b", at_90=20), run("c"), width=200)
    assert "B against A, 3 cases: 1 slower, 2 equal; geometric mean of ratios 0.79" in text
    assert "C against A, 3 cases: 3 equal" in text
    first = next(line for line in text.splitlines() if "bsr_triton" in line)
    assert "90 %" in first  # the largest change
    assert "A, B and C are looks" in text


@pytest.mark.parametrize("width", [60, 80, 120, 200])
def test_a_comparison_fits_the_window_and_names_the_contender(width: int) -> None:
    lines = [line.rstrip() for line in said(run("a"), run("b", at_90=20), width=width).splitlines()]
    assert max(map(len, lines)) <= width
    assert any("bsr_triton" in line and "slower" in line for line in lines)


def test_a_page_and_a_pull_request_have_every_case_as_text() -> None:
    evil = replace(run("b"), path=Path("<script>alert(1)</script>"))
    found = compared([run("a"), evil])
    assert "<script>" not in html(found)
    assert "http" not in html(found)
    assert markdown(found).count("| bsr_triton |") == 3
    assert to_json(found)["changes"]["B"]["equal"] == 3


def test_simulated_and_other_devices_are_said() -> None:
    other = run("b", "B")
    simulated = replace(other, environment={**other.environment, "sim": {"seed": 0}})
    text = " ".join(said(run("a"), simulated).split())
    assert text.index("B is simulated") < text.index("B against A, 3 cases")
    assert "two devices, A and B" in text
    found = compared([run("a"), simulated])
    page = html(found)
    assert page.index(">SIMULATED</span> B is simulated") < page.index("B against A, 3 cases")
    assert "<b>" not in page
    assert markdown(found).startswith("B is simulated")
    assert "<b>B against A, 3 cases" in html(compared([run("a"), other]))


def test_a_page_has_the_fields_of_a_problem_in_one_column() -> None:
    page = html(compared([run("a"), run("b", at_90=20)]))
    heads = re.findall(r"<th [^>]*>(.*?)</th>", page)
    assert heads[heads.index("problem") :][:3] == ["problem", "contender", "× baseline A"]
    assert re.search('data-head="problem">90 %</td>', page)
    assert "<h2>Largest changes first: linear" in page


def test_runs_with_nothing_to_compare_are_refused_in_a_line() -> None:
    refused = Run(
        Path("r"), {}, "", {}, {}, [
            replace(row, status=Status.UNSUPPORTED, detail="no GPU", samples_us=())
            for row in run("a").rows
        ],
    )  # fmt: skip
    with pytest.raises(ResultError, match="expected a case with a time in either"):
        changes(refused, refused)
    other = replace(run("b"), rows=[row for row in run("b").rows if row.case.contender == DENSE])
    with pytest.raises(ResultError, match="a and b: expected a shared case"):
        compared([run("a"), other])
    with pytest.raises(ResultError, match="expected 2 to 26 runs, found 1"):
        compared([run("a")])
