"""Host code must not become slow unnoticed: each bound is about five times the usual time.

Measured on two cores of a shared server: 0.17 s to expand a suite, 0.9 s for frame and summary,
2.4 s for a report, 0.07 s to append 192 rows. The fastest of several rounds has to meet its bound.
A round counts the processor time of this process, so other work on the machine does not matter.
"""

from collections.abc import Callable
from pathlib import Path
from time import process_time
from typing import Any

import numpy as np
import pytest

from sparsebench.harness.bench.sampling import BLOCKS, SAMPLES_PER_BLOCK
from sparsebench.harness.plan.suite import Suite, read
from sparsebench.reports.build import build
from sparsebench.results import store
from sparsebench.results.analysis import analyse
from sparsebench.results.record import Case, Row, Status

pytestmark = pytest.mark.benchmark(timer=process_time)

WORK = {"sparsity": 0.5, "nnz": 1, "flops": 2.0, "dense_flops": 4.0, "fewest_bytes": 1}
BYTES = {"stored_bytes": 1, "dense_bytes": 2}


@pytest.fixture(scope="module")
def suite() -> Suite:
    return read("sparsity")


def run(suite: Suite, contests: int, replicates: int) -> store.Run:
    """Return a run of the suite's first contests: 384 samples a case, within 2 % of 100 µs."""
    draw = np.random.default_rng(0)
    samples = BLOCKS * SAMPLES_PER_BLOCK
    rows = [
        Row(
            Case(contest.problem, contender),
            Status.OK,
            replicate=replicate,
            samples_us=tuple((100 * np.exp(draw.normal(0, 0.02, samples))).tolist()),
            samples_per_block=SAMPLES_PER_BLOCK,
            **WORK,
            **BYTES,
        )
        for replicate in range(replicates)
        for contest in suite.contests[:contests]
        for contender in contest.contenders
    ]
    return store.Run(Path("run"), {"title": suite.title}, suite.text, {"cpu": {}}, {}, rows)


def within(
    bound_s: float, benchmark: Any, function: Callable[..., object], *args: object, rounds: int = 3
) -> None:
    benchmark.pedantic(function, args, rounds=rounds)
    if benchmark.stats:  # none under --benchmark-disable and in a process of pytest-xdist
        assert benchmark.stats["min"] < bound_s


def test_expanding_a_suite_of_hundreds_of_cases(benchmark: Any) -> None:
    within(1.0, benchmark, read, "sparsity")


def test_frame_and_summary_of_a_million_samples(benchmark: Any, suite: Suite) -> None:
    whole = run(suite, 96, replicates=3)
    assert sum(len(row.samples_us) for row in whole.rows) > 9e5
    within(5.0, benchmark, analyse, whole, rounds=2)


def test_a_report_of_24_problems(benchmark: Any, suite: Suite) -> None:
    within(12.0, benchmark, build, run(suite, 24, replicates=3), rounds=1)


def test_appending_hundreds_of_rows(benchmark: Any, suite: Suite, tmp_path: Path) -> None:
    state = {"suite": suite.name, "status": "running", "flags": {}}
    store.create(tmp_path / "run", suite.text, {}, state)
    within(0.6, benchmark, store.append, tmp_path / "run", run(suite, 24, replicates=1).rows)
