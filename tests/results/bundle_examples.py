"""A small sealed run whose rows are made up, and the error of a damaged one."""

from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.validation import validate
from sparsebench.results.record import Row
from sparsebench.results.run import bundle, store
from tests.tools.rows import right_rows
from tests.tools.suites import ON_CPU, linear

SUITE = linear(
    "m: [4, 8], n: 32, k: 64, dtype: fp32, pattern: blocks, block: 8, sparsity: 0.5",
    "{format: csr, kernel: scipy_csr}",
    baselines=(ON_CPU,),
    title="small",
)
FLAGS = {"device": "cpu", "data": None, "timeout_s": 60.0, "replicates": 2, "only": ""}
STATE = {"suite": "small", "status": "finished", "flags": FLAGS}
CPU = {"cpu": {"name": "a CPU"}, "gpu": None}


def rows(suite: Path, data: Path | None = None, only: str = "") -> list[Row]:
    """Return what a run of the suite in two processes gives: A/A pairs, then the suite's rows."""
    suite_plan = replace(read(str(suite), data), name="small")
    return right_rows(planned_contests(suite_plan, "cpu", only))


def sealed(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    store.create(path, SUITE, CPU, STATE)
    store.append(path, rows(path / "suite.yaml"))
    bundle.seal(path)
    return path


def complaint(path: Path) -> str:
    """Return the error of a damaged bundle without its path."""
    with pytest.raises(ResultError) as error:
        list(validate(path))
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def lines(path: Path, data: Path | None = None) -> list[str]:
    return [line.text for line in validate(path, data)]
