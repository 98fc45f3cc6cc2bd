"""Calls whose mask changes: their parts stand beside the whole, in the report and the terminal."""

from typing import Any

import pytest

from sparsebench.harness.catalog import load_op
from sparsebench.reports.build import build
from sparsebench.reports.figures import parts as figure
from sparsebench.reports.findings import finding_of, headlines
from sparsebench.reports.grids import sentences
from sparsebench.reports.parts import parts
from sparsebench.reports.terminal import RunAnswer, answer_markdown
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.contests import with_gains
from sparsebench.results.tables.grid import findings, views
from sparsebench.results.tables.parts import parts_of
from tests.results.made_up import stored
from tests.tools.reports import printed

DENSE = Contender("dense", "sdpa_cudnn", baseline=True)
POOLED = Contender("block_mask", "attention_selected", options={"selects": "pooled"})
FLEX = Contender("block_mask", "flex_attention", options={"plans": "lists"})
ALONE = Contender("block_mask", "attention_wgmma")
FIELDS = {"m": 4096, "heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": "bf16", "block": 64}
SEARCH = [  # of a search: two choices, and one of them is kept
    {"of": "down", "choice": {}, "median_us": 70.0, "kept": True},
    {"of": "down", "choice": {"warps": 8}, "median_us": 80.0},
    {"choice": {"rows": 64}, "median_us": 100.0, "kept": True},
]
PARTS = {
    "attention_selected": {"lists": 7.0, "attention": 300.0, "select": 11.0, "score": 82.0},
    "flex_attention": {"plan": 333.0, "attention": 450.0},
}
WHOLE_US = [(DENSE, 3300.0), (ALONE, 305.0), (POOLED, 400.0), (FLEX, 800.0)]


def analysis(sparsity: tuple[float, ...] = (0.9,), **changes: Any) -> Analysis:
    """Return a run of three processes, in which the parts of process p take p % longer."""
    op = load_op("attention")
    rows = []
    for level in sparsity:
        about = {**FIELDS, "pattern": "top_k_blocks", "sparsity": level}
        problem = Problem("attention", {**op.defaults, **about}, defaults=op.defaults)
        for process in range(3):
            for contender, us in WHOLE_US:
                alone = [
                    {"of": name, "choice": {}, "median_us": part_us * (1 + process / 100)}
                    for name, part_us in PARTS.get(contender.kernel, {}).items()
                ]
                given = {"samples_us": (us,), "candidates": (*SEARCH, *alone), **changes}
                given["choice"] = {k: v for k, v in contender.options.items() if k == "selects"}
                rows.append(Row(Case(problem, contender), Status.OK, process, **given))
    return analyse(stored(rows))


def test_a_call_that_selects_its_blocks_is_a_row_of_its_own() -> None:
    (view,) = views(with_gains(analysis().cases))
    kernels = {
        row: each.best["kernel"] for row, of in view.grid.rows.items() for each in of.values()
    }
    assert kernels == {
        "blocks of 64": "attention_wgmma",
        "selected blocks of 64": "attention_selected",
    }
    (finding,) = sentences(findings(view.grid))
    gains = [each.best["gain"] for each in findings(view.grid)]
    assert gains == pytest.approx([3300 / 305, 3300 / 400])
    assert "blocks of 64 and selected blocks of 64 at 90 %" in finding


def test_a_part_is_the_median_over_processes_and_a_search_is_no_part() -> None:
    shown = analysis()
    found = parts_of(shown.run.rows)
    assert len(found) == len(PARTS)
    selected = next(times for times in found.values() if "score" in times)
    assert selected == {name: 1.01 * us for name, us in PARTS["attention_selected"].items()}


def test_the_parts_of_a_call_stand_beside_its_whole_time() -> None:
    (table,) = parts(analysis())
    names = ["problem", "contender", "whole", "score", "select", "lists", "plan", "attention"]
    assert table.columns == [*names, "the rest"]
    cells = {str(line[1]): line[2:] for line in table.lines}
    selected, flex = cells["attention_selected selects=pooled"], cells["flex_attention plans=lists"]
    assert selected == ["400 µs", "82.8 µs", "11.1 µs", "7.07 µs", "–", "303 µs", "24 %"]
    assert flex == ["800 µs", "–", "–", "–", "336 µs", "454 µs", "43 %"]


def test_the_report_and_the_terminal_show_the_parts() -> None:
    shown = analysis()
    assert "303 µs" in figure.draw(shown)
    assert "303 µs" in build(shown, only="parts")
    assert "303 µs" in answer_markdown(shown)
    assert "303 µs" in printed(RunAnswer(shown), 160)


def test_a_headline_selects_its_blocks_and_has_the_call_that_is_given_them_beside_it() -> None:
    shown = analysis()
    (finding,) = headlines(shown)
    assert finding.contender == "attention_selected selects=pooled"
    assert "11× if the call is given its blocks: attention_wgmma 305 µs" in finding.details
    assert not [text for text in finding.details if text.startswith("0.")]  # no lead over it
    (given,) = shown.timed[shown.timed.kernel == "attention_wgmma"].to_dict("records")
    expected = "8.2× if the call also selects its blocks: attention_selected selects=pooled 400 µs"
    assert expected in finding_of(given, shown.timed).details


def test_a_part_that_failed_has_no_time() -> None:
    failed = ({"of": "plan", "choice": {}, "failed": "out of memory"},)
    (table,) = parts(analysis(candidates=failed))
    assert table.columns[3:] == ["plan", "the rest"]
    assert {tuple(line[3:]) for line in table.lines} == {("–", "–")}


def test_the_terminal_leaves_calls_to_the_report() -> None:
    levels = tuple(round(0.5 + n / 100, 2) for n in range(20))
    assert len(parts(analysis(levels))[0].lines) == 2 * len(levels)
    assert "16 more in the report" in answer_markdown(analysis(levels))


def test_another_run_has_no_parts() -> None:
    assert parts(analysis(candidates=())) == []
    assert figure.draw(analysis(candidates=())) == ""
