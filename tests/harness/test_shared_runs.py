"""A plan on several GPUs: shared out, stopped, resumed, and merged into one run."""

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.machine.cpu_placement import read_list, shared_out
from sparsebench.harness.plan.selection import planned_contests
from sparsebench.harness.plan.suite import Suite, read
from sparsebench.harness.run.measure import RunOptions, Stopped
from sparsebench.harness.run.plan_part import PlanPart
from sparsebench.harness.run.run_json import Flags
from sparsebench.harness.run.validation import validate
from sparsebench.harness.shared_runs import cluster_jobs
from sparsebench.harness.shared_runs import shared_folder as folders
from sparsebench.harness.shared_runs.merging import merge
from sparsebench.harness.shared_runs.run_paths import is_shared
from sparsebench.harness.shared_runs.shared_folder import Plan, finish, work
from sparsebench.harness.shared_runs.sharing import resume, share
from sparsebench.reports.build import figures
from sparsebench.results import files
from sparsebench.results.record import Case, Row
from sparsebench.results.run import bundle, store
from tests.simulated.in_process import stopping
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.suites import BSR, linear

pytestmark = pytest.mark.usefixtures("no_figures")
SUITE = linear("n: 4096, k: 4096, m: [16, 64], sparsity: [0.5, 0.7, 0.9]", BSR, title="On several")


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Suite:
    path = tmp_path_factory.mktemp("cluster") / "several.yaml"
    path.write_text(SUITE)
    return read(str(path))


@pytest.fixture(scope="module")
def gpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Return two simulated GPUs."""
    folder = tmp_path_factory.mktemp("gpus")
    for number in (1, 2):
        (folder / f"{number}.yaml").write_text(f"seed: {number}")
    return [f"sim:{folder}/{number}.yaml" for number in (1, 2)]


@pytest.fixture(scope="module")
def merged(suite: Suite, gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run with two processes on each of two GPUs."""
    out = tmp_path_factory.mktemp("merged") / "run"
    return share(suite, on(gpus, replicates=2), out)


@pytest.fixture(scope="module")
def halves(suite: Suite, gpus: list[str], tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Return two pieces of a plan, each of its own GPU and with half of the contests."""
    folder, plan = tmp_path_factory.mktemp("halves") / "run.parts", on(gpus, replicates=1)
    folders.create(folder, plan, suite.text)
    for place, contest in enumerate(plan.contests(suite)):
        (folder / "reserved" / contest.problem.id).symlink_to(str(place % 2 + 1))
    for number in plan.numbers:
        work(folder, plan, suite, number)
    return [folder / "1" / "1", folder / "2" / "1"]


def on(devices: list[str], replicates: int) -> Plan:
    return Plan("several", Flags(devices[0], replicates=replicates), tuple(devices))


def key(row: Row) -> tuple[object, ...]:
    return row.case.id, row.replicate, row.scope, row.cache


def expected(suite: Suite, replicates: int) -> set[tuple[object, ...]]:
    """Return the keys of all rows of a plan."""
    contests = [c for c in planned_contests(suite, "sim") if not c.reference]
    cases = [Case(contest.problem, k).id for contest in contests for k in contest.contenders]
    return {(case, number, "kernel", "cold") for number in range(replicates) for case in cases}


def test_two_gpus_share_a_plan_and_the_merged_run_validates(suite: Suite, merged: Path) -> None:
    run = store.read(merged)
    assert Counter(map(key, run.rows)) == Counter(expected(suite, 2))
    assert {row.device for row in [*run.rows, *run.reference]} == {"sim-1", "sim-2"}
    contests: dict[str, set[str]] = {}
    for row in run.rows:
        contests.setdefault(row.case.problem.id, set()).add(row.device)
    assert {len(on) for on in contests.values()} == {1}
    assert all(line.checked for line in validate(merged))
    assert {device["uuid"] for device in run.environment["devices"]} == {"sim-1", "sim-2"}
    assert [shard["host"] for shard in run.state["shards"]] == [1, 1]


def test_the_report_gives_the_number_of_gpus(merged, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sparsebench.reports.build.figures", figures)
    done = sparsebench("report", merged, "--out", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert done.stdout.startswith("2 × simulated H200")
    assert "2 × simulated H200, on 1 host" in page
    assert "no interval spans two devices" in page


def test_a_stopped_plan_is_resumed(suite, gpus, merged, tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        share(suite, on(gpus, replicates=1), out, RunOptions(progress=stopping(5)))
    assert not out.exists()
    begun = [row for run in out.with_name("run.parts").glob("*/1") for row in store.rows(run)]
    assert begun
    again = sparsebench("status", out)
    assert "problems not begun" in again.stdout
    assert is_shared(out)
    output("run", "--resume", out)
    assert not is_shared(out)
    run = store.read(out)
    assert Counter(map(key, run.rows)) == Counter(expected(suite, 1))
    samples = {(key(row), row.device): row.samples_us for row in begun if not row.reference}
    assert samples.items() <= {(key(row), row.device): row.samples_us for row in run.rows}.items()


@pytest.mark.parametrize("deleted", ["2", "2/1", "2/suite.yaml", "reserved"])
def test_a_plan_is_resumed_after_a_part_was_deleted(deleted, suite, gpus, tmp_path) -> None:
    out = tmp_path / "run"
    with pytest.raises(Stopped):
        share(suite, on(gpus, replicates=1), out, RunOptions(progress=stopping(5)))
    path = out.with_name("run.parts") / deleted
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    if deleted == "reserved":
        shutil.rmtree(path.parent / "1" / "1", ignore_errors=True)
        shutil.rmtree(path.parent / "2" / "1", ignore_errors=True)
    resume(out)
    assert Counter(map(key, store.read(out).rows)) == Counter(expected(suite, 1))


def test_a_deleted_suite_is_one_line_before_any_job(suite, gpus, tmp_path) -> None:
    folders.create(tmp_path / "run.parts", on(gpus, replicates=1), suite.text)
    (tmp_path / "run.parts" / "suite.yaml").unlink()
    assert "suite.yaml" in refusal("run", "--resume", tmp_path / "run")


@pytest.mark.exhaustive
def test_a_part_resumed_on_another_gpu_is_marked_in_the_report(suite, gpus, tmp_path) -> None:
    folder, plan = tmp_path / "run.parts", on(gpus[:1], replicates=2)
    folders.create(folder, plan, suite.text)
    with pytest.raises(Stopped):
        work(folder, plan, suite, 1, RunOptions(progress=stopping(14)))
    moved = replace(plan, devices=(gpus[1],))
    work(folder, moved, suite, 1)
    out = finish(folder, moved, suite)
    sparsebench("report", out)
    assert "have processes on more than one device" in (out / "report.html").read_text()


def changed(change: Callable[[Path], object]) -> Callable[[list[Path], Path], list[Path]]:
    """Return a function that copies the second of two pieces, changes it and seals it again."""

    def make(halves: list[Path], folder: Path) -> list[Path]:
        copy = folder / "copy"
        shutil.copytree(halves[1], copy)
        change(copy)
        bundle.seal_files(copy, sorted(bundle.REQUIRED))
        return [halves[0], copy]

    return make


def edited(name: str, old: str, new: str) -> Callable[[Path], object]:
    return lambda run: (run / name).write_text((run / name).read_text().replace(old, new))


def other_code(run: Path) -> None:
    data = json.loads((run / "environment.json").read_text())
    (run / "environment.json").write_text(json.dumps(data | {"code_sha256": "0" * 64}))


WRONG = {
    "a contest twice": (lambda halves, _: [*halves, halves[0]], "expected problem .* once"),
    "another kind": (changed(edited("environment.json", "H200", "B200")), "expected gpu.name"),
    "other code": (changed(other_code), "expected code_sha256"),
    "other packages": (changed(edited("lock.txt", "numpy==", "numpy==9.")), "expected numpy=="),
}


@pytest.mark.parametrize("what", WRONG)
def test_pieces_that_do_not_fit_are_an_error_and_nothing_is_written(what, suite, halves, tmp_path):
    make, message = WRONG[what]
    pieces = make(halves, tmp_path)
    with pytest.raises(ResultError, match=message):
        merge(pieces, tmp_path / "run", suite)
    assert {path.name for path in tmp_path.iterdir()} <= {"copy"}


def test_more_rows_than_can_be_read_are_not_merged(suite, halves, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "ROWS_BYTES", (halves[0] / "rows.jsonl").stat().st_size + 1000)
    with pytest.raises(ResultError, match=r"at most .* bytes of rows .*--only makes two runs"):
        merge(halves, tmp_path / "run", suite)
    assert not [*tmp_path.iterdir()]


def test_parts_claim_different_problems_and_a_late_part_finds_none(suite, tmp_path) -> None:
    folder, contests = tmp_path / "run.parts", planned_contests(suite, "sim")
    folders.create(folder, Plan(suite.name, Flags("sim"), ("sim",) * 3), suite.text)
    first, second = PlanPart(folder, 1, "here"), PlanPart(folder, 2, "here")
    turns = [part.take(contests, 0) for part in (first, second)]
    taken = [next(turn).problem.id for _ in range(3) for turn in turns]
    assert len(set(taken)) == len(taken) == 6
    taken += [contest.problem.id for contest in turns[1]]
    late = PlanPart(folder, 3, "here")
    assert not late.reserve(contests)
    assert not [*late.take(contests, 0), *late.take(contests, 1)]
    again = PlanPart(folder, 1, "here")  # a restarted job finds its claims
    assert sorted(c.problem.id for c in again.take(contests, 1)) == sorted(taken[:6:2])


def test_cores_are_near_their_gpu_and_not_shared() -> None:
    cores = [frozenset({n, n + 8}) for n in range(8)]  # two hyperthreads each
    left, right = set(range(4)) | set(range(8, 12)), set(range(4, 8)) | set(range(12, 16))
    result = shared_out([left, left, right], cores)
    assert result == [{0, 2, 8, 10}, {1, 3, 9, 11}, right]
    assert shared_out([{0}, {0}], [frozenset({0})]) == [{0}, {0}]
    assert read_list("0-2,8,10-11\n") == {0, 1, 2, 8, 10, 11}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--devices", "sim,sim"], "expected each device once, found sim twice"),
        (["--devices", "sim", "--device", "sim"], "expected --device or --devices, found both"),
        (["--devices", "sim", "--slurm", "time=1"], "expected --devices or --slurm, found both"),
        (["--slurm", "partition=x"], "expected --shards N together with"),
        (["--slurm", "partition", "--shards", 2], "expected NAME=VALUE"),
        (["--submit", "local"], "no such option: run --submit; use --devices"),
        (["--slurm", "time=1", "--shards", 99, "--device", "sim"], "at most 11 parts"),
        (["--shard", "1/2"], "no such option: run --shard; --devices, --slurm and"),
    ],
)
def test_contradicting_options_are_refused(options, message, suite, tmp_path) -> None:
    file, out = tmp_path / "several.yaml", tmp_path / "run"
    file.write_text(SUITE)
    assert message in refusal("run", file, *options, "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["several.yaml"]


def test_a_missing_cluster_is_an_error_and_leaves_nothing(suite, tmp_path, monkeypatch) -> None:
    pytest.importorskip("submitit")
    monkeypatch.setenv("PATH", str(tmp_path))
    plan = Plan(suite.name, Flags("cuda:0"), ("cuda:0",) * 2, "slurm", {}, cluster_jobs.job_name())
    with pytest.raises(SuiteError, match="--slurm: expected a cluster and options of it"):
        share(suite, plan, tmp_path / "run")
    monkeypatch.setitem(sys.modules, "submitit", None)
    with pytest.raises(SuiteError, match="--slurm: expected submitit, found none"):
        share(suite, plan, tmp_path / "run")
    assert not [*tmp_path.iterdir()]


def test_a_folder_of_another_plan_is_not_resumed(suite, gpus, tmp_path) -> None:
    plan = Plan(suite.name, Flags(gpus[0]), tuple(gpus))
    folders.create(tmp_path / "run.parts", plan, suite.text)
    assert folders.read(tmp_path / "run.parts")[0] == plan
    with pytest.raises(SuiteError, match="expected the plan that is measured there"):
        share(suite, replace(plan, flags=replace(plan.flags, replicates=1)), tmp_path / "run")
