"""A call that reads times of its own gives rows of further scopes, from the same samples."""

from pathlib import Path

import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.bench.sampling import MIN_SAMPLES, distinct_measures
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import expand
from sparsebench.results.record import Contender, Problem, Status

SUITE = """
schema: sparsebench/suite@1
title: Readings
problems:
  - {op: serving, hidden: 64, heads: 4, kv_heads: 2, head_dim: 16, intermediate: 64, vocab: 64,
     layers: 1, of_layers: 1, concurrency: 1, requests: 1, dtype: bf16}
contenders: [{format: dense, kernel: serving_transformers}]
"""
MEASURES = ("op", "cold"), ("steps", "cold"), ("cold", "cold")


def test_rows_of_readings_follow_from_the_samples_of_a_call() -> None:
    pytest.importorskip("transformers", reason="needs the extra `models`")
    (planned,) = expand("readings", SUITE + "scopes: [op, steps, cold]").contests
    contender = Contender("dense", "serving_transformers", baseline=True)
    options = ContestOptions(measures=MEASURES)
    rows, _ = contest.run(planned.problem, [contender], torch.device("cpu"), None, options)
    assert {row.status for row in rows} == {Status.OK}
    call, steps, cold = rows
    assert [row.scope for row in rows] == ["kernel", "steps", "cold"]  # a CPU has one scope
    assert len(call.samples_us) == len(steps.samples_us) >= MIN_SAMPLES
    assert all(part < whole for part, whole in zip(steps.samples_us, call.samples_us, strict=True))
    assert len(cold.samples_us) == 1


def test_a_kernel_that_reads_nothing_says_so() -> None:
    (planned,) = expand("readings", SUITE + "scopes: [op, steps, cold]").contests
    contender = Contender("dense", "torch_dense", baseline=True)
    options = ContestOptions(measures=MEASURES)
    rows, _ = contest.run(planned.problem, [contender], torch.device("cpu"), None, options)
    assert [row.status for row in rows] == [Status.OK, *[Status.UNSUPPORTED] * 2]


def test_an_op_without_readings_has_no_such_rows() -> None:
    assert distinct_measures(MEASURES, "cuda") == (("op", "cold"),)
    readings = load_op("serving").readings
    assert distinct_measures(MEASURES, "cuda", readings) == MEASURES
    problem = Problem("linear", {"m": 4, "n": 8, "k": 8, "dtype": "fp32", "pattern": "dense"})
    fields = {**load_op("linear").defaults, **problem.fields}
    rows, _ = contest.run(
        Problem("linear", fields),
        [Contender("dense", "torch_dense", baseline=True)],
        torch.device("cpu"),
        Path(),
        ContestOptions(measures=MEASURES),
    )
    assert [row.scope for row in rows] == ["kernel"]


@pytest.mark.parametrize("scopes", ["[op, step]", "[steps]", "[op, late]"])
def test_an_unknown_scope_is_refused(scopes: str) -> None:
    with pytest.raises(SuiteError, match="scopes"):
        expand("readings", f"{SUITE}scopes: {scopes}")
