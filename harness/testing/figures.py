"""The contract of a figure: it draws a sweep, and a run in which nothing has a time.

The times are made up: a dense and two sparse contenders at four levels, in two processes.
"""

from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from markupsafe import Markup

from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import expand
from sparsebench.harness.testing.contract import Check, checker, expect
from sparsebench.reports.build import load_figure
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run.store import StoredRun
from sparsebench.results.tables.analysis import Analysis, analyse

SUITE = """
schema: sparsebench/suite@1
title: A sweep
problems:
  - {op: linear, m: [16, 64], n: 512, k: 512, dtype: bf16, pattern: blocks, block: 16,
     sparsity: [0.5, 0.75, 0.875, 0.9375]}
contenders:
  - {format: bsr, kernel: bsr_triton, params: {block: $block}}
  - {format: csr, kernel: cusparse_csr}
baselines:
  - {format: dense, kernel: cublas}
"""


def figure_checks(name: str) -> list[Check]:
    """Return the contract of a figure, sentence by sentence. `name` is its entry point's."""
    return [
        Check(f"{name} has a title, a place and a drawing function", partial(load_figure, name)),
        Check(f"{name} draws a sweep", partial(_draws, name, False)),
        Check(f"{name} draws a run in which nothing has a time", partial(_draws, name, True)),
    ]


check_figure = checker(figure_checks)


def _draws(name: str, refused: bool) -> None:
    drawn = load_figure(name).draw(_analysis(refused))
    message = f"expected Markup, found {type(drawn).__name__}"
    expect(isinstance(drawn, Markup), f"{message}: text of a run must never become HTML")
    expect("<script" not in drawn, "expected no script: a report must run none")


@cache
def _analysis(refused: bool) -> Analysis:
    rows = [
        _row(contest.problem, contender, number)
        for number in range(2)
        for contest in expand("sweep", SUITE).contests
        for contender in contest.contenders
    ]
    if refused:
        none = partial(replace, status=Status.UNSUPPORTED, detail="not here", samples_us=())
        rows = [none(row) for row in rows]
    gpu = {"name": "a GPU", "uuid": rows[0].device, "l2_bytes": 2**26}
    run = StoredRun(
        Path("sweep"), {"title": "A sweep"}, SUITE, {"gpu": gpu}, {"flags": {}}, rows, []
    )
    return analyse(run)


def _row(problem: Problem, contender: Contender, process: int) -> Row:
    """Make up the row of a case: a sparse product takes longer per element than a dense one."""
    density = 1 - float(problem["sparsity"])
    share = 1.0 if contender.format == "dense" else density
    work = load_op("linear").work(problem, {"w": round(density * 512 * 512)})
    typical_us = 10 * (share if share == 1 else 2 * share + 0.1 * len(contender.format))
    return Row(
        Case(problem, contender),
        Status.OK,
        process,
        device="GPU-1",
        clock="graph",
        error=1e-3,
        error_of_bound=0.1,
        sparsity=1 - density,
        digest=problem.id,
        bound_us=1.0,
        bound_by="memory",
        stored_bytes=round(share * 2 * 512 * 512),
        dense_bytes=2 * 512 * 512,
        held_bytes=2**20,
        peak_bytes=2**20,
        convert_us=100.0,
        prepare_s=0.5,
        samples_us=tuple(typical_us * (1 + i / 1000) for i in range(process, process + 6)),
        samples_per_block=2,
        late=0.0,
        **work,
    )
