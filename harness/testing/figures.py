"""The contract of a figure: it draws a sweep, and a run in which nothing has a time.

The run is simulated: a dense and two sparse contenders at four levels, in two processes.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

from markupsafe import Markup

from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.plan.suite import expand
from sparsebench.harness.sim import simulated_contest
from sparsebench.harness.sim.gpu_model import Spec
from sparsebench.harness.testing.contract import Check, checker, expect
from sparsebench.reports.build import frames_of, load_figure
from sparsebench.reports.figures._figure import Frames
from sparsebench.results.record import Row, Status
from sparsebench.results.store import Run

SUITE = """
schema: sparsebench/suite@1
title: Simulated
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
    about: dict[str, Callable[[], object]] = {
        "has a title, a place and a drawing function": partial(load_figure, name),
        "draws a sweep": partial(_draws, name, False),
        "draws a run in which nothing has a time": partial(_draws, name, True),
    }
    return [Check(f"{name} {sentence}", holds) for sentence, holds in about.items()]


check_figure = checker(figure_checks)


def _draws(name: str, refused: bool) -> None:
    drawn = load_figure(name).draw(_frames(refused))
    message = f"expected Markup, found {type(drawn).__name__}"
    expect(isinstance(drawn, Markup), f"{message}: text of a run must never become HTML")
    expect("<script" not in drawn, "expected no script: a report must run none")


@cache
def _frames(refused: bool) -> Frames:
    suite, spec = expand("simulated", SUITE), Spec()
    rows: list[Row] = []
    for replicate in range(2):
        options = ContestOptions(replicate=replicate)
        for c in suite.contests:
            rows += simulated_contest.run(
                spec, c.problem, c.contenders, options, lambda case, stage: None
            )
    if refused:
        none = partial(replace, status=Status.UNSUPPORTED, detail="not here", samples_us=())
        rows = [none(row) for row in rows]
    gpu = {"name": "simulated", "uuid": spec.identity, "l2_bytes": spec.l2_bytes}
    text = {"title": "Simulated"}
    run = Run(Path("simulated"), text, SUITE, {"gpu": gpu}, {"flags": {}}, rows, [])
    return frames_of(run)
