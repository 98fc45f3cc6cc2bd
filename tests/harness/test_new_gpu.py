"""A survey of a simulated GPU."""

import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path

import pytest

from sparsebench.errors import SuiteError
from sparsebench.harness.commands._app import main
from sparsebench.harness.commands._options import budget_s
from sparsebench.harness.new_gpu import survey as surveys
from sparsebench.harness.new_gpu.choices import coarse, deciding, probe
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.measure import Progress, RunOptions, measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.validation import validate
from sparsebench.reports import survey_page
from sparsebench.reports.survey_page import write
from sparsebench.results.run import bundle, store
from sparsebench.results.run.provenance import Choices
from sparsebench.results.run.store import StoredRun
from sparsebench.results.statistics.ratio import FEWEST
from sparsebench.results.tables.analysis import analyse
from tests.simulated.timed import timed
from tests.tools.marks import exhaustive
from tests.tools.suites import BSR, CSR, linear

pytestmark = pytest.mark.usefixtures("in_one_process")

SUITE = linear("n: 4096, k: 4096, m: [64, 4096], sparsity: [0.3, 0.5, 0.9]", BSR, CSR)


def silent(step: str) -> Progress:
    return lambda done, total, problem: None


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder for a survey of six problems, which two processes decide."""
    file = tmp_path / "core.yaml"
    file.write_text(SUITE)
    for name, value in (("SUITE", str(file)), ("FEWEST", 2), ("PAGE_S", 0.0)):
        monkeypatch.setattr(surveys, name, value)
    monkeypatch.setattr(surveys, "probe", lambda device: [])
    return tmp_path / "survey"


def test_a_survey_screens_and_measures_the_deciding_cases_again(small: Path) -> None:
    outcome = surveys.survey("sim", 60.0, small, silent)
    assert not outcome.left, outcome.left
    screen, decide = store.read(small / "screen"), store.read(small / "decide")
    assert {row.replicate for row in screen.rows} == {0}
    assert {row.replicate for row in decide.rows} == {0, 1}
    for run in (screen, decide):
        bundle.verify(run.path)
    cases = {row.case.id for row in screen.rows}
    assert {row.case.id for row in decide.rows} <= cases


def test_a_survey_without_time_says_so(small: Path) -> None:
    with pytest.raises(SuiteError, match="expected time for one problem"):
        surveys.survey("sim", 0.0, small, silent)
    assert not write(small, []).grid.rows
    page = (small / "report.html").read_text()
    assert "Nothing was measured" in page
    assert "Nothing is compared" in page


@pytest.mark.parametrize(
    ("budget_s", "fewest", "share"), [(180.0, 4, 0.85), exhaustive((420.0, 27, 0.9))]
)
def test_a_survey_uses_its_budget_and_settles_the_problems_that_decide(
    tmp_path, monkeypatch, budget_s, fewest, share
) -> None:
    """The clock takes as long as an H100 does for starts, searches, checks and samples.

    Of 480 s, the doctor and the compilation take 60 s there.
    """
    clock, left_s = timed(monkeypatch), budget_s - surveys.PAGE_S
    result = surveys.survey("sim:h100", budget_s, tmp_path / "survey", silent)
    runs = [store.read(path) for path in sorted(result.path.glob("decide*"))]
    assert share * left_s <= clock() <= left_s
    assert {run.state["choices"] for run in runs} == {Choices.EARLIER}
    problems = {p for run in runs for p in complete(run)}
    assert len(problems) >= fewest
    cases = {row.case.id: row.case for run in runs for row in run.rows}.values()
    sparse = [c for c in cases if c.contender.format != "dense" and not c.contender.twin]
    assert max(Counter(case.problem.id for case in sparse).values()) == 1
    assert result.left  # so only winners were measured again


def complete(run: StoredRun) -> list[str]:
    """Return the problems that every process of a run measured."""
    processes = Counter(
        problem for problem, _ in {(r.case.problem.id, r.replicate) for r in run.rows}
    )
    return [problem for problem, count in processes.items() if count >= FEWEST]


def test_later_processes_repeat_what_the_first_one_reached(small, monkeypatch) -> None:
    """The clock advances a second per contest: of 16 s, the first process has 8."""
    seconds = count()
    monkeypatch.setattr("sparsebench.harness.run.measure.monotonic", lambda: next(seconds))
    options = RunOptions(until=16.0, even=True)
    run = store.read(measure(read(surveys.SUITE), Flags("sim", replicates=2), small, None, options))
    reached = [{r.case.problem.id for r in run.rows if r.replicate == n} for n in (0, 1)]
    assert reached[1] <= reached[0]
    assert run.state["status"] == "interrupted"


def test_a_run_that_its_budget_ended_is_valid_and_has_one_set_of_cases(small, monkeypatch) -> None:
    """The third process has time for fewer contests than the first, which loses the others."""
    seconds = count()
    monkeypatch.setattr("sparsebench.harness.run.measure.monotonic", lambda: next(seconds))
    options, flags = RunOptions(until=26.0, even=True), Flags("sim", replicates=4)
    path = measure(read(surveys.SUITE), flags, small, None, options)
    before = {row.replicate: row for row in store.rows(path)}
    surveys.keep_equal_processes(path)
    run = store.read(path)
    assert run.state["ended_by"] == "budget"
    assert len(before) == run.state["flags"]["replicates"]
    assert run.state["contests"]["done"] < run.state["contests"]["of"]
    lines = [line.text for line in validate(path)]
    assert "of the problems that its budget allowed" in lines[-1]


def test_a_budget_below_one_process_is_refused_in_one_line(tmp_path, monkeypatch, capfd) -> None:
    timed(monkeypatch)
    options = "--device", "sim", "--budget", "60s", "--out", str(tmp_path / "survey")
    monkeypatch.setattr(surveys, "PAGE_S", 50.0)
    assert _sparsebench(monkeypatch, *options) == 2
    (line,) = capfd.readouterr().err.strip().splitlines()[-1:]
    assert line.startswith("error: --budget 60s: expected time for one problem, ")


def test_deciding_problems_start_with_the_best_of_each_shape(tmp_path: Path) -> None:
    file = tmp_path / "core.yaml"
    file.write_text(SUITE)
    run = store.read(measure(read(str(file)), Flags("sim", replicates=1), tmp_path / "run", None))
    deciders = list(deciding(analyse(run).cases, [c.problem for c in read(str(file)).contests]))
    problems = {row.case.problem.id: row.case.problem for row in run.rows}
    assert len(deciders) == len(problems)
    assert {problems[name]["sparsity"] for name in deciders[:2]} == {0.9}
    assert {problems[name]["m"] for name in deciders[:2]} == {64, 4096}


def test_a_coarse_look_sees_every_shape_at_its_deciding_level_first() -> None:
    problems = [contest.problem for contest in read("core").contests]
    ranks = coarse(problems)
    first = [each for each in problems if ranks[each.id] == 0]
    names = "pattern", "dtype", "m", "n", "k"
    shapes = {(p.op, *(p[name] for name in names)) for p in problems}
    assert len(first) == len(shapes)
    assert {p["sparsity"] for p in first if p["pattern"] == "blocks"} == {0.9}
    assert len(problems) > 2 * len(first)


def test_every_kernel_of_the_suites_is_probed() -> None:
    probes = {each.kernel: each for each in probe("cpu")}
    assert probes["torch_dense"].supported
    assert not probes["bsr_small"].supported
    assert probes["bsr_small"].reason == "runs on cuda, not on cpu"


def test_a_budget_is_a_number_with_a_unit() -> None:
    assert [budget_s(text) for text in ("90s", "10m", "1.5h")] == [90, 600, 5400]
    for text in ("10", "5s", "ten minutes", "-3m", ""):
        with pytest.raises(SuiteError, match="--budget: expected 60s or more"):
            budget_s(text)


def test_an_interrupted_survey_is_kept(small, monkeypatch, capfd) -> None:
    def stop(*arguments: object, **named: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as stopping:
        stopping.setattr(surveys, "measure", stop)
        assert _sparsebench(monkeypatch, "--device", "sim", "--out", str(small)) == 130
    assert "interrupted" in capfd.readouterr().err
    assert '"doctor"' in (small / "survey.json").read_text()


@pytest.mark.parametrize(
    "pool", [lambda *_: ThreadPoolExecutor(1), exhaustive(survey_page.ProcessPoolExecutor)]
)
def test_the_page_has_the_answer_and_other_devices(pool, small, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("sparsebench.reports.build.figures", list)
    monkeypatch.setattr(survey_page, "ProcessPoolExecutor", pool)
    other = measure(read(surveys.SUITE), Flags("sim", replicates=1), tmp_path / "other", None)
    options = ["--device", "sim", "--budget", "60s", "--out", str(small), "--against", str(other)]
    assert _sparsebench(monkeypatch, *options) == 0
    page, printed = (small / "report.html").read_text(), capfd.readouterr().out
    for words in ("LOOK: 2 processes", "beside simulated H200", "is sparsity worth"):
        assert words in page
    assert "decide/report.html#case-" in page
    assert "&#34;" not in page.partition("<main>")[2]
    assert str(small) not in page
    assert "simulated H200: is sparsity worth it?" in printed
    assert "BSR, 90 %" in printed
    assert "http" not in page.replace("http://www.w3.org", "")
    assert (small / "screen/report.html").exists()
    assert (small / "decide/report.html").exists()
    for command in ("publish", "contribute"):
        assert f"sparsebench {command} {small}" in printed


def test_missing_runs_of_other_gpus_are_an_error(small, monkeypatch, capfd) -> None:
    assert _sparsebench(monkeypatch, "--device", "sim", "--against", "no/such", "--out", "x") == 2
    assert "--against no/such: expected a run or a folder of runs" in capfd.readouterr().err


def _sparsebench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["sparsebench", "new-gpu", *arguments])
    return main()


def test_a_survey_needs_a_new_directory(small: Path) -> None:
    small.mkdir()
    with pytest.raises(SuiteError, match="expected a new directory"):
        surveys.survey("sim", 60.0, small, silent)
