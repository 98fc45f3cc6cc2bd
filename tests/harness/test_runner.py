"""The parent process: workers that fail, runs that stop and resume, and lines of progress."""

import json
import os
import shutil
import signal
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.contest_state import configuration
from sparsebench.harness.plan.selection import planned_contests, references
from sparsebench.harness.plan.suite import Contest, Suite, read
from sparsebench.harness.run import measure as measuring
from sparsebench.harness.run import worker_process
from sparsebench.harness.run.history import History
from sparsebench.harness.run.measure import RunOptions, measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.runner import Runner
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from tests.simulated.in_process import in_this_process
from tests.tools import worker_timeouts
from tests.tools.command_line import sparsebench
from tests.tools.marks import exhaustive
from tests.tools.suites import ON_CPU, linear

FIELDS = {"m": 16, "n": 32, "k": 64, "dtype": "fp32", "pattern": "blocks", "block": 8}
PROBLEM = Problem("linear", {**FIELDS, "sparsity": 0.5})
BASELINE = Contender("dense", "torch_dense", baseline=True)
ONE = Flags("cpu", replicates=1)

SUITE = linear(
    "m: [4, 8, 16], n: 32, k: 64, dtype: fp32, pattern: blocks, block: 8, sparsity: 0.5",
    "{format: csr, kernel: scipy_csr}",
    baselines=(ON_CPU,),
    title="small",
)


def rows(*names: str) -> list[Row]:
    """Run one contest of the baseline and some faulty kernels in a worker process."""
    contenders = (BASELINE, *(Contender("dense", f"faulty:{name}") for name in names))
    hanging = {Case(PROBLEM, c).id for c in contenders if c.kernel == "faulty:hangs"}
    with pytest.MonkeyPatch.context() as patch:
        worker_timeouts.only_with(hanging, patch)
        return measured_rows(Runner("cpu", None, timeout_s=2), contenders)


def measured_rows(runner: Runner, contenders: tuple[Contender, ...]) -> list[Row]:
    try:
        (measured,) = runner.run([Contest(PROBLEM, contenders)])
    finally:
        runner.kill()
    assert [row.case.contender for row in measured.rows] == list(contenders)
    return measured.rows


def test_several_faults_in_one_contest_each_cost_one_row() -> None:
    measured = rows("raises", "crashes", "exhausts", "chatters")
    statuses = [row.status.value for row in measured]
    assert statuses == ["ok", "failed", "failed", "out_of_memory", "ok"]
    right, _, crashed, *_ = measured
    assert right.attempt == 0
    assert right.samples_us
    assert "signal 11" in crashed.detail
    assert "about to read address 0" in crashed.detail


def test_later_processes_know_what_was_right_and_references_search_once() -> None:
    tiles = [{"tile": tile} for tile in (1, 2)]
    of_suite = Contest(PROBLEM, (BASELINE, Contender("csr", "scipy_csr")))
    of_run = references("cuda")[0]
    history = History(share=False, share_references=True)
    for contest in (of_suite, of_run):
        cases = [Case(contest.problem, contender) for contender in contest.contenders]
        right, wrong = (
            Row(case, status, reference=contest.reference, choice=tiles[0], candidates=tuple(tiles))
            for case, status in zip(cases, (Status.OK, Status.WRONG), strict=True)
        )
        history.remember([right, wrong])
        history.remember([replace(right, replicate=1, choice=tiles[1], candidates=())])
        options = history.options(contest)
        known = {cases[0].id: sorted(configuration(replace(right, choice=t)) for t in tiles)}
        assert options["checked"] == known
        assert bool(options["pinned"]) is contest.reference
        assert (options["timed"] == {cases[0].id: tuple(tiles)}) is not contest.reference
    another = History(share=False)
    another.remember([right], same_run=False)
    assert not another.checked


@pytest.mark.exhaustive
def test_a_crash_while_taking_turns_finds_its_owner() -> None:
    right, late = rows("crashes_later")
    assert (right.status, right.attempt) == (Status.OK, 0)
    assert late.status is Status.FAILED
    assert "exit code 7" in late.detail


def test_a_contest_without_a_known_offender_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    script = 'for _ in range(2): print(\'{"identity": "x"}\', flush=True); input()'
    monkeypatch.setattr(worker_process, "COMMAND", (sys.executable, "-c", script))
    (row,) = rows()
    assert row.status is Status.FAILED
    assert "exit code 0" in row.detail


@pytest.mark.parametrize("dies", [False, exhaustive(True)])
def test_a_spare_process_imports_early_and_begins_when_needed(dies: bool) -> None:
    runner = Runner("cpu", None, 60, processes=2)
    try:
        (next_one,) = runner.spares
        assert not next_one.about
        if dies:
            os.kill(next_one.pid, signal.SIGKILL)
        runner.next_process()
        (measured,) = runner.run([Contest(PROBLEM, (BASELINE,))])
        assert measured.rows[0].status is Status.OK
        assert (runner.pid == next_one.pid) is not dies
        assert not runner.spares
    finally:
        runner.kill()


@pytest.fixture
def suite(tmp_path: Path) -> Suite:
    path = tmp_path / "small.yaml"
    path.write_text(SUITE)
    return read(str(path))


def test_a_complete_run_is_finished(suite: Suite, tmp_path: Path) -> None:
    path = measure(suite, Flags("cpu", replicates=2), tmp_path / "run", None)
    run = store.read(path)
    assert run.state["status"] == "finished"
    assert run.state["contests"] == {"done": 16, "of": 16}  # five are A/A references
    assert run.suite_text == SUITE
    twins = [row for row in run.rows if row.case.contender.twin]
    assert (len(run.rows), len(twins), len(run.reference)) == (2 * (6 + 2), 2 * 2, 2 * 10)
    assert {row.replicate for row in run.rows} == {0, 1}
    assert run.environment["versions"]["torch"]
    assert {"operands", "convert", "check", "timing"} <= run.state["spent_s"].keys()


def test_no_contest_starts_that_could_end_after_the_deadline(tmp_path, monkeypatch) -> None:
    """Let each contest take 10 s by a made-up clock, so that the first process leaves 4 s."""
    in_this_process(monkeypatch)
    now = [0.0]
    monkeypatch.setattr(measuring, "monotonic", lambda: now[0])
    suite = read("quick")
    count = len(planned_contests(suite, "sim"))

    def tick(done: int, total: int, problem: str) -> None:
        now[0] = 10.0 * done

    flags = Flags("sim", replicates=2)
    path = measure(
        suite, flags, tmp_path / "run", None, RunOptions(progress=tick, until=10.0 * count + 4)
    )
    state = store.read(path).state
    assert (state["status"], state["contests"]["done"]) == ("interrupted", count)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of one process on the CPU."""
    folder = tmp_path_factory.mktemp("measured")
    (folder / "small.yaml").write_text(SUITE)
    return measure(read(str(folder / "small.yaml")), ONE, folder / "run", None)


def test_resume_repeats_unfinished_contests_whole(suite, measured, tmp_path) -> None:
    flags, path = ONE, shutil.copytree(measured, tmp_path / "run")
    rows = store.rows(path)
    order = [(row.case.id, row.reference) for row in rows]
    problems = [row.case.problem.id for row in rows]
    done = problems.index(problems[-1])  # the last contest is cut within its first row
    lines = (path / "rows.jsonl").read_text().splitlines(keepends=True)
    (path / "rows.jsonl").write_text("".join(lines[: done + 1]) + lines[done + 1][:50])
    before = json.loads((path / "run.json").read_text())
    assert measure(suite, flags, None, path) == path
    assert store.rows(path)[:done] == rows[:done]
    assert [(row.case.id, row.reference) for row in store.rows(path)] == order
    state = store.read(path).state
    assert state["contests"] == {"done": 8, "of": 8}
    assert state["started"] == before["started"]
    assert state["seconds"] > before["seconds"]  # of both
    assert all(state["spent_s"][stage] >= before["spent_s"][stage] for stage in before["spent_s"])


def test_resume_refuses_another_suite_code_or_device(suite, measured, tmp_path) -> None:
    flags, path = ONE, shutil.copytree(measured, tmp_path / "run")
    other = Suite(suite.name, suite.title, suite.text + "\n", suite.contests)
    with pytest.raises(SuiteError, match="found another suite"):
        measure(other, flags, None, path)
    with pytest.raises(SuiteError, match="expected replicates 1, found 8"):
        measure(suite, Flags("cpu", replicates=8), None, path)
    environment = json.loads((path / "environment.json").read_text())
    environment["code_sha256"] = "0" * 64
    (path / "environment.json").write_text(json.dumps(environment))
    before = (path / "rows.jsonl").read_bytes()
    with pytest.raises(SuiteError, match="expected code_sha256 0000"):
        measure(suite, flags, None, path)
    assert (path / "rows.jsonl").read_bytes() == before


@pytest.fixture
def long(tmp_path: Path) -> list[str]:
    """Return a command that measures for long, into `run`."""
    path = tmp_path / "long.yaml"
    path.write_text(SUITE.replace("[4, 8, 16]", str(list(range(1, 400)))))
    return ["run", str(path), "--out", str(tmp_path / "run"), "--device", "cpu"]


def assert_interrupted(out: Path) -> None:
    run = store.read(out)
    assert run.state["status"] == "interrupted"
    done = {row.case.problem.id for row in [*run.rows, *run.reference]}
    assert len(done) == run.state["contests"]["done"]


def test_ctrl_c_leaves_a_valid_run(long, tmp_path, monkeypatch) -> None:
    append, stops = store.append, iter([signal.SIGINT])

    def append_and_stop(path: Path, rows: Iterable[Row]) -> None:
        append(path, rows)
        if len(store.read(path).rows) >= 2 and (stop := next(stops, None)):
            os.kill(os.getpid(), stop)

    monkeypatch.setattr(store, "append", append_and_stop)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's `&` ignores it
    try:
        done = sparsebench(*long)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.returncode == 130
    assert "interrupted" in done.stderr
    assert_interrupted(tmp_path / "run")


@pytest.mark.gpu
def test_a_real_illegal_address_is_a_row() -> None:
    problem = Problem("linear", {**PROBLEM.fields, "dtype": "bf16"})
    contenders = (
        Contender("dense", "cublas", baseline=True),
        Contender("dense", "faulty:illegal_address"),
        Contender("dense", "faulty:exhausts"),
    )
    runner = Runner("cuda:0", None, 60)
    try:
        (measured,) = runner.run([Contest(problem, contenders)])
    finally:
        runner.kill()
    assert [row.status.value for row in measured.rows] == ["ok", "failed", "out_of_memory"]
    assert "CUDA error" in measured.rows[1].detail
