"""Speedups over dense with unpruned weights, beside those over dense on the same zeros."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sparsebench.reports import findings, grids
from sparsebench.reports.figures import cases as cases_figure
from sparsebench.reports.terminal import trust
from sparsebench.results.claims.cells import cells
from sparsebench.results.comparison.compare import compare
from sparsebench.results.comparison.sides import side
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.contests import is_replaced
from tests.results.claim_examples import claimed
from tests.results.made_up import DENSE

UNPRUNED = replace(DENSE, weights="original")
BSR = Contender("bsr", "bsr_triton", {"block": 64})
TIMES_US = (UNPRUNED, 206.0), (DENSE, 180.0), (BSR, 40.0)


def rows(*times_us: tuple[Contender, float], m: int = 4096, processes: int = 8) -> list[Row]:
    """Return a contest of each process; BSR's times differ by up to 0.7 %."""
    fields = {"m": m, "n": 4096, "k": 4096, "dtype": "bf16", "pattern": "blocks", "block": 64}
    problem = Problem("linear", {**fields, "sparsity": 0.9})
    return [
        Row(
            Case(problem, contender),
            Status.OK,
            process,
            device="GPU-1",
            clock="graph",
            late=0.0,
            digest=f"{m}",
            sparsity=0.9,
            values={"w": "normal", "x": "normal"},
            samples_us=(us * (1 + process / 1000 * (contender == BSR)),) * 4,
        )
        for process in range(processes)
        for contender, us in times_us
    ]


def run(*measured: Row) -> StoredRun:
    state = {"suite": "s", "status": "finished", "flags": {"device": "cuda:0", "only": ""}}
    environment = {"gpu": {"name": "NVIDIA H200", "uuid": "GPU-1"}}
    return StoredRun(Path("a-run"), {"title": "s"}, "", environment, state, [*measured])


def with_unpruned() -> Analysis:
    return analyse(run(*rows(*TIMES_US)))


def on_same_zeros() -> Analysis:
    return analyse(run(*rows((DENSE, 180.0), (BSR, 40.0))))


def case_of(analysis: Analysis, contender: Contender) -> dict[str, Any]:
    timed = analysis.timed
    return dict(timed[timed.label == contender.label].iloc[0])


def test_a_speedup_is_over_the_layer_that_is_replaced() -> None:
    analysis = with_unpruned()
    for row in analysis.rows[analysis.rows.kernel == "bsr_triton"].itertuples():
        assert row.baseline_label == "dense/cublas, unpruned weights"
        assert row.speedup / row.same_zeros == pytest.approx(206 / 180)
    case = case_of(analysis, BSR)
    assert case["speedup"] == case["gain"] == pytest.approx(206 / 40.14, rel=1e-3)
    assert case["same_zeros"] == case["zeros_gain"] == pytest.approx(180 / 40.14, rel=1e-3)
    assert case["zeros_low"] < case["zeros_gain"] < case["zeros_high"]
    assert (case["over"], case["dense_us"]) == ("original", 206.0)
    assert case_of(analysis, DENSE)["gain"] == pytest.approx(206 / 180)


def test_a_run_with_one_baseline_has_one_speedup() -> None:
    case = case_of(on_same_zeros(), BSR)
    assert case["same_zeros"] == case["speedup"] == case["zeros_gain"] == case["gain"]
    assert case["over"] == "pruned"


def test_dense_that_failed_with_unpruned_weights_is_no_baseline() -> None:
    measured = [
        replace(row, status=Status.OUT_OF_MEMORY, samples_us=())
        if row.case.contender == UNPRUNED
        else row
        for row in rows(*TIMES_US)
    ]
    assert case_of(analyse(run(*measured)), BSR)["over"] == "pruned"


def test_the_fastest_dense_contender_is_one_with_unpruned_weights() -> None:
    compiled = Contender("dense", "torch_compile")
    more = (compiled, 170.0), (replace(compiled, weights="original"), 200.0)
    case = case_of(analyse(run(*rows(*TIMES_US, *more))), BSR)
    assert (case["dense_name"], case["dense_us"]) == ("torch_compile, unpruned weights", 200.0)
    assert case["zeros_gain"] == pytest.approx(170 / 40.14, rel=1e-3)


def test_twins_of_both_dense_contenders_make_their_own_pairs() -> None:
    twins = [(replace(c, baseline=False, twin=True), us) for c, us in TIMES_US[:2]]
    analysis = analyse(run(*rows(*TIMES_US, *twins)))
    assert len(analysis.noise.pairs) == 2
    assert [*analysis.noise.pairs.ratio] == [pytest.approx(1.0)] * 2


def test_sentences_say_which_dense_weights_they_are_over() -> None:
    (old,), (new,) = (findings.first_views(run) for run in (on_same_zeros(), with_unpruned()))
    assert grids.against(old.lines) == "over dense on the same zeros (cublas, 180 µs)"
    assert grids.against(new.lines) == "over dense with unpruned weights (cublas, 206 µs)"
    text = " ".join(findings.findings(with_unpruned()))
    (summary,) = re.findall(r"\((4\.(?:48|5)× over the same zeros)\)", text)
    assert f"as fast as cublas, unpruned weights (206 µs), {summary}: " in text
    assert "same zeros" not in " ".join(findings.findings(on_same_zeros()))


def test_contests_without_unpruned_weights_are_named_beside_the_others() -> None:
    both = analyse(run(*rows(*TIMES_US), *rows((DENSE, 20.0), (BSR, 10.0), m=16)))
    weights = " with unpruned weights, or on the same zeros in contests without them"
    assert grids.weights(both.timed) == weights
    assert grids.against(both.timed).startswith(f"over dense{weights} (cublas")


def test_dense_attention_multiplies_no_zeros() -> None:
    lines = on_same_zeros().timed
    assert grids.weights(lines.assign(kind="block_mask")) == ""
    assert grids.weights(lines.assign(op="linear_wgrad")) == ""


def test_every_case_has_both_speedups_and_the_distribution_of_its_values() -> None:
    new, old = (str(cases_figure.draw(each)) for each in (with_unpruned(), on_same_zeros()))
    assert "over the same zeros" in new
    assert "over the same zeros" not in old
    assert "values w, x normal" in old


def test_a_gain_over_unpruned_weights_may_exceed_what_zeros_save() -> None:
    """At 90 %, zeros save a factor of 10; unpruned weights take 7 % longer, which is more."""
    above = "above 1 / (1 - sparsity)"
    near = analyse(run(*rows((UNPRUNED, 103.0), (DENSE, 96.0), (BSR, 10.0))))
    assert not any(above in line for line in trust(near))
    beyond = analyse(run(*rows((UNPRUNED, 113.0), (DENSE, 106.0), (BSR, 10.0))))
    assert any(above in line for line in trust(beyond))


def test_dense_on_zeros_is_no_rival_of_the_layer_that_is_replaced() -> None:
    timed = with_unpruned().timed
    assert [*timed[is_replaced(timed)].label] == ["dense/cublas"]


def test_a_claim_is_about_the_layer_that_is_replaced() -> None:
    (test,) = claimed().tests
    analysis = with_unpruned()
    (cell,) = cells(test, {*analysis.cases.problem_id}, analysis)
    assert cell.baseline == "dense/cublas, unpruned weights"
    assert cell.value == pytest.approx(206 / 40.14, rel=1e-3)


def test_a_run_is_compared_with_an_older_one_on_the_same_zeros() -> None:
    old, new = side(on_same_zeros().run), side(with_unpruned().run)
    lines = compare(old, new)
    bsr: pd.Series = lines[lines.kernel == "bsr_triton"].iloc[0]
    assert bsr.by_speedup
    assert bsr.ratio == pytest.approx(1.0)
    assert {*lines.label} == {"dense/cublas", "bsr/bsr_triton"}
    again = compare(new, new)
    assert "dense/cublas, unpruned weights" in {*again.baseline_label_a}
