"""reports/terminal.py: what a run ends with on a terminal."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console, Group

from sparsebench.reports.terminal import answer, answer_json, comparison
from sparsebench.results.analysis import analyse
from sparsebench.results.compare import compare
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.store import Run

DENSE = Contender("dense", "cublas", baseline=True)
TWIN = replace(DENSE, baseline=False, twin=True)
BSR = Contender("bsr", "bsr_triton")
NOISE = [0.001, -0.001, 0.002, -0.002, 0.003, -0.003, 0.004, -0.004]  # of the log, by process


def run(processes: int, bsr_us: float, noise: float = 1) -> Run:
    """Return a run of one problem, with an A/A pair whose halves differ by the noise alone."""
    problem = Problem("linear", {"m": 1, "n": 64, "k": 64, "dtype": "bf16", "sparsity": 0.9})
    rows = [
        Row(Case(problem, c), Status.OK, p, bound_by="memory", samples_us=(us * np.exp(d),))
        for p, d in enumerate(NOISE[:processes])
        for c, us, d in [(DENSE, 100, 0), (TWIN, 100, d), (BSR, bsr_us, noise * d)]
    ]
    return Run(Path("one"), {}, "", {}, {"status": "finished"}, rows)


def said(shown: Run | Group) -> str:
    console = Console(width=160)
    with console.capture() as capture:
        console.print(answer(analyse(shown)) if isinstance(shown, Run) else shown)
    return " ".join(capture.get().split())  # a narrow table wraps its title


@pytest.mark.parametrize(
    ("bsr_us", "noise", "outcome"),
    [
        (50.0, 1, "1.994 to 2.006 faster"),
        (99.4, 5, "inconclusive (+18 more processes)"),
        (99.9, 1, "no difference"),
    ],
)
def test_an_outcome_stands_beside_its_interval(bsr_us: float, noise: float, outcome: str) -> None:
    text = said(run(8, bsr_us, noise))
    assert "interval: 95 % over 8 processes" in text
    assert outcome in text
    assert "Noise floor of one process: above 100 µs 0.5 %" in text
    assert "This run is reliable: 0 of 1 A/A pairs" in text
    assert "a look" not in text


def test_three_processes_give_a_look_and_it_is_said_once() -> None:
    text = said(run(3, 50.0))
    assert "interval: range over 3 processes" in text
    assert text.count("a look, not a verdict: --replicates 8 gives one") == 1
    assert "1.996 to 2.002 - Break-even" in text


def test_a_dense_kernel_that_a_portfolio_chose_is_named_as_the_fastest() -> None:
    best = Contender("dense", "ffn_sparse", options={"way": "best"})
    choice = {"way": "dense", "by": "cublas_ffn", "dense": {}}
    made = run(8, 50.0)
    rows = [
        replace(r, case=replace(r.case, contender=best), choice=choice)
        if r.case.contender == BSR
        else r
        for r in made.rows
    ]
    text = said(replace(made, rows=rows))
    assert "dense/cublas_ffn (chosen by dense/ffn_sparse way=best)" in text
    assert "not reached" in text  # the portfolio's break-even


def test_a_script_is_told_the_same() -> None:
    found = answer_json(analyse(run(8, 50.0)))
    assert found["noise_floor"] == {"above 100 µs": 0.005}
    assert found["reliability"] == "reliable"
    assert [(line["label"], line["outcome"]) for line in found["winners"]] == [
        ("bsr/bsr_triton", "faster")
    ]


def test_two_runs_are_set_side_by_side_with_their_outcomes() -> None:
    text = said(comparison(compare(run(8, 50.0), run(8, 200.0))))
    assert "faster slower" in text
    assert "0 of 1 comparable cases agree" in text
