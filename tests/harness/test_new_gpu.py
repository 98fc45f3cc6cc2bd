"""A survey of a device: on the simulated one, in seconds, with processes as fast as they come."""

from pathlib import Path

import pytest
import torch

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness._cli_survey import budget_s
from sparsebench.harness.new_gpu import survey as surveys
from sparsebench.harness.new_gpu.deciding import deciding
from sparsebench.harness.new_gpu.probe import probe
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import Progress, measure
from sparsebench.harness.run.state import Flags
from sparsebench.results import bundle, store
from sparsebench.results.analysis import analyse

SUITE = """
schema: sparsebench/suite@1
title: Small core
problems:
  - {op: linear, shape: [{n: 4096, k: 4096}], m: [64, 4096], dtype: bf16, pattern: blocks,
     block: 64, sparsity: [0.3, 0.5, 0.9]}
contenders:
  - {format: bsr, kernel: bsr_triton, params: {block: $block}}
  - {format: csr, kernel: cusparse_csr}
baselines:
  - {format: dense, kernel: cublas}
"""


def silent(step: str) -> Progress:
    return lambda done, total, problem: None


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two processes decide, about a suite of six problems; the page takes no time."""
    file = tmp_path / "core.yaml"
    file.write_text(SUITE)
    for name, value in (("SUITE", str(file)), ("PROCESSES", 2), ("PAGE_S", 0.0)):
        monkeypatch.setattr(surveys, name, value)
    return tmp_path / "survey"


def test_a_survey_screens_and_then_measures_anew_what_decides(small: Path) -> None:
    found = surveys.survey("sim", 60.0, small, silent)
    assert not found.left, found.left
    screen, decide = store.read(small / "screen"), store.read(small / "decide")
    assert {row.replicate for row in screen.rows} == {0}
    assert {row.replicate for row in decide.rows} == {0, 1}
    for run in (screen, decide):
        bundle.verify(run.path)
    asked = {row.case.id for row in screen.rows}
    assert {row.case.id for row in decide.rows} <= asked
    assert surveys.opened(small) == found


def test_a_survey_whose_time_is_up_goes_on_when_resumed(small: Path) -> None:
    stopped = surveys.survey("sim", 0.0, small, silent)
    assert "decide" in stopped.left
    done = surveys.resume(small, 60.0, silent)
    assert not done.left, done.left
    assert store.read(small / "screen").state["status"] == "finished"


def test_a_run_stops_before_its_moment_and_can_be_resumed(tmp_path: Path) -> None:
    file = tmp_path / "core.yaml"
    file.write_text(SUITE)
    flags, out = Flags("sim", None, replicates=1), tmp_path / "run"
    measure(read(str(file)), flags, out, None, until=0.0)
    stopped = store.read(out)
    assert stopped.state["status"] == "interrupted"
    assert not stopped.rows
    measure(read(str(file)), flags, None, out)
    assert store.read(out).state["status"] == "finished"


def test_what_decides_starts_with_the_best_of_each_shape(tmp_path: Path) -> None:
    file = tmp_path / "core.yaml"
    file.write_text(SUITE)
    run = store.read(measure(read(str(file)), Flags("sim", replicates=1), tmp_path / "run", None))
    found = list(deciding(analyse(run).cases))
    problems = {row.case.problem.id: row.case.problem for row in run.rows}
    assert len(found) == len(problems)
    assert {problems[name]["sparsity"] for name in found[:2]} == {0.9}
    assert {problems[name]["m"] for name in found[:2]} == {64, 4096}


def test_every_kernel_of_the_suites_is_asked_whether_it_runs_here() -> None:
    found = {each.kernel: each for each in probe(torch.device("cpu"))}
    assert found["torch_dense"].supported
    assert (found["bsr_small"].supported, found["bsr_small"].reason) == (
        0,
        "runs on cuda, not on cpu",
    )


@pytest.mark.parametrize(("text", "seconds"), [("90s", 90), ("10m", 600), ("1.5h", 5400)])
def test_a_budget_is_a_number_with_its_unit(text: str, seconds: float) -> None:
    assert budget_s(text) == seconds


@pytest.mark.parametrize("text", ["10", "5s", "ten minutes", "-3m", ""])
def test_a_budget_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(SuiteError, match=r"--budget: expected 60s or more, as 90s, 10m or 2h"):
        budget_s(text)


def test_a_folder_that_is_no_survey_is_refused(tmp_path: Path, small: Path) -> None:
    with pytest.raises(ResultError, match=r"survey\.json: expected a survey"):
        surveys.opened(tmp_path)
    small.mkdir()
    with pytest.raises(SuiteError, match="expected a new directory, found one; --resume goes on"):
        surveys.survey("sim", 60.0, small, silent)
