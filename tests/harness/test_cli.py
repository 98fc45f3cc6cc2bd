"""Every command, end to end, on the CPU."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sparsebench.harness.commands import _console
from sparsebench.reports.build import load_figure
from sparsebench.results.run import bundle
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.marks import exhaustive
from tests.tools.suites import BSR, BSR_ON_CPU, CUBLAS, ON_CPU, linear

pytestmark = pytest.mark.usefixtures("no_figures")
PROBLEM = "m: 8, n: 64, k: 64, dtype: fp32, block: 16"
CUSPARSE = "{format: bsr, kernel: cusparse_bsr, params: {block: $block}}"
SUITE = linear(
    f"{PROBLEM}, sparsity: [0.5, 0.75]",
    *(BSR_ON_CPU, CUSPARSE),
    baselines=(CUBLAS, ON_CPU),
    title="Small & quick",
)
GPU_ONLY = linear(PROBLEM, BSR, baselines=(ON_CPU, CUBLAS))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cli")
    (folder / "small.yaml").write_text(SUITE)
    done = sparsebench(
        "run", folder / "small.yaml", "--device", "cpu", "--replicates", 1, "--out", folder / "run"
    )
    assert done.returncode == 0, done.stderr
    assert "scipy_bsr" in done.stdout
    assert "as fast as" in done.stdout
    assert "runs on cuda, not on cpu: cublas, cusparse_bsr" in " ".join(done.stdout.split())
    assert "\n7/7 · 0:00 left" in done.stderr  # progress in a pipe
    assert "cases: 4 unsupported, 4 ok" in done.stdout
    assert f"report: {folder / 'run' / 'report.html'}" in done.stdout
    return folder / "run"


def test_check_counts_cases_and_writes_nothing(run: Path) -> None:
    before = sorted(run.parent.iterdir())
    done = sparsebench("check", run / "suite.yaml", "--device", "cpu", "--json")
    result = json.loads(done.stdout)
    assert (result["problems"], result["cases"], result["supported"]) == (2, 8, 4)
    reasons = {entry["contender"]: entry["reason"] for entry in result["unsupported"]}
    assert reasons["dense/cublas"] == "runs on cuda, not on cpu"
    assert sorted(run.parent.iterdir()) == before
    assert (
        "2 problems, 8 cases" in sparsebench("check", run / "suite.yaml", "--device", "cpu").stdout
    )


@pytest.mark.parametrize(
    "arguments", [["--help"], ["list"], ["list", "--json"], exhaustive(["run", "small.yaml"])]
)
def test_a_closed_pipe_changes_neither_the_report_nor_the_exit_code(arguments, tmp_path) -> None:
    measured = tmp_path / "run"
    if arguments[0] == "run":
        (tmp_path / "small.yaml").write_text(SUITE)
        arguments = [*arguments, "--device", "sim", "--replicates", "1", "--out", str(measured)]
    command = [sys.executable, "-P", "-m", "sparsebench", *arguments]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path
    ) as done:
        assert done.stdout
        assert done.stderr
        done.stdout.close()
        message = done.stderr.read()
    assert done.returncode == 0, message
    if arguments[0] == "run":
        assert (measured / "report.html").is_file()
    else:
        assert message == ""


def test_a_usage_error_for_a_closed_pipe_keeps_its_exit_code() -> None:
    command = [sys.executable, "-P", "-m", "sparsebench", "adivse"]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as done:
        assert done.stderr
        done.stderr.close()
    assert done.returncode == _console.BAD_INPUT


def test_an_error_is_printed_where_the_width_is_unknown() -> None:
    command = [sys.executable, "-P", "-m", "sparsebench", "validate", "nowhere"]
    environment = {**os.environ, "COLUMNS": "0"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == "error: nowhere: expected the directory of a run, found none\n"


def test_tables_in_a_pipe_are_as_wide_as_columns_says() -> None:
    command = [sys.executable, "-P", "-m", "sparsebench", "compare", "H100", "H200"]
    for columns, widest in (("60", 60), (None, 120)):
        environment = {n: v for n, v in os.environ.items() if n != "COLUMNS"}
        environment |= {"COLUMNS": columns} if columns else {}
        shown = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        assert max(map(len, shown.stdout.splitlines())) == widest


def test_compare_sets_runs_side_by_side(run: Path, tmp_path: Path) -> None:
    result = json.loads(sparsebench("compare", run, run, "--json").stdout)["changes"]["B"]
    assert len(result["cases"]) == 8
    assert {case["time"] for case in result["cases"]} == {1.0, None}
    page = tmp_path / "page.html"
    gate = sparsebench("compare", run, run, run, "--html", page, "--fail-on", "slower:3%")
    assert gate.returncode == 0, gate.stderr
    assert "C: 0 cases are more than 3 % slower than in A" in gate.stderr
    assert "scipy_bsr" in gate.stdout
    assert "scipy_bsr" in page.read_text()
    assert "| A | B | time |" in sparsebench("compare", run, run, "--markdown").stdout


def test_slower_cases_fail_the_gate(run: Path, tmp_path: Path) -> None:
    slower = shutil.copytree(run, tmp_path / "slower")
    lines = [json.loads(line) for line in (run / "rows.jsonl").read_text().splitlines()]
    for row in lines[1:]:
        if row["case"]["contender"]["kernel"] == "scipy_bsr":
            row["samples_us"] = [1000 * us for us in row["samples_us"]]
    (slower / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    done = sparsebench("compare", run, slower, "--fail-on", "slower:50%")
    assert done.returncode == 1, done.stderr
    assert "slower: 2 cases are more than 50 % slower" in done.stderr


def test_a_case_that_is_missing_fails_the_gate(run: Path, tmp_path: Path) -> None:
    fewer = shutil.copytree(run, tmp_path / "fewer")
    rows = (run / "rows.jsonl").read_text().splitlines(keepends=True)
    rows.remove(next(row for row in rows if '"kernel":"scipy_bsr"' in row))
    (fewer / "rows.jsonl").write_text("".join(rows))
    done = sparsebench("compare", run, fewer, "--fail-on", "slower:50%")
    assert done.returncode == 1, done.stderr
    assert "fewer: 1 case is missing that run has" in done.stderr


def test_an_empty_gate_is_refused(run: Path) -> None:
    assert "--fail-on: expected slower:P%" in refusal("compare", run, run, "--fail-on", "")


def lines_of(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], *calls: tuple[int, int]
) -> list[str]:
    """Return the progress lines of calls with done and total, 20 s apart."""
    moments = iter(range(0, 20 * len(calls) + 1, 20))
    monkeypatch.setattr(_console.time, "monotonic", lambda: next(moments))
    show = _console.progress_lines()
    for done, total in calls:
        show(done, total, "")
    return capfd.readouterr().err.splitlines()


def test_the_time_left_is_estimated_from_this_commands_progress(monkeypatch, capfd) -> None:
    resumed = lines_of(monkeypatch, capfd, (90, 100), (91, 100), (92, 100))
    assert resumed == ["90/100", "91/100 · 3:00 left", "92/100 · 2:40 left"]
    two_runs = lines_of(monkeypatch, capfd, (0, 2), (1, 2), (2, 2), (0, 4), (1, 4))
    assert two_runs == ["0/2", "1/2 · 0:20 left", "2/2 · 0:00 left", "0/4", "1/4 · 1:00 left"]


def test_no_time_left_is_shown_when_two_devices_take_turns(monkeypatch, capfd) -> None:
    for other in ((1, 9), (2, 9)), ((1, 5), (2, 5)):
        turns = (3, 5), other[0], (4, 5), other[1], (5, 5)
        lines = lines_of(monkeypatch, capfd, *turns)
        assert len(lines) == len(turns)
        assert not any("left" in line for line in lines)


@pytest.mark.parametrize("flag", ["--version", "-h", "--help"])
def test_the_usual_flags_print_version_and_help(flag: str) -> None:
    shown = output(flag)
    assert "sparsebench 0." in shown or "Usage: sparsebench" in shown
    ends = shown.replace("[ARGS]...", "").splitlines()
    assert not [line for line in ends if line.rstrip().endswith("...")]  # nothing is cut off


def test_a_suite_that_compares_nothing_here_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "gpu_only.yaml"
    file.write_text(GPU_ONLY)
    message = "only baselines are supported"
    assert message in sparsebench("check", file, "--device", "cpu").stdout
    assert message not in sparsebench("check", file, "--device", "sim").stdout
    run = tmp_path / "run"
    line = refusal("run", file, "--device", "cpu", "--replicates", 1, "--out", run)
    assert "only baselines" in line
    assert not run.exists()


def test_report_warns_in_one_line_about_a_changed_run(run: Path, tmp_path: Path) -> None:
    shown = "--out", tmp_path / "report.html"
    assert sparsebench("report", run, *shown).stderr == ""
    torn = shutil.copytree(run, tmp_path / "torn")
    (torn / "rows.jsonl").write_text((run / "rows.jsonl").read_text()[:-20])
    bare = shutil.copytree(run, tmp_path / "bare")
    (bare / "manifest.json").unlink()
    for changed, message in (
        (torn, "rows.jsonl: expected SHA-256"),
        (bare, "expected manifest.json"),
    ):
        done = sparsebench("report", changed, *shown)
        assert done.returncode == 0
        assert done.stderr.startswith("warning: ")
        assert message in done.stderr
        assert done.stderr.count("\n") == 1
        compared = sparsebench("compare", run, changed)
        assert (compared.returncode, compared.stderr) == (0, done.stderr)
        judged = sparsebench("claims", "report", "blocks-of-ten", "--from", changed)
        assert judged.stderr == done.stderr
    stopped = json.loads((bare / "run.json").read_text()) | {"status": "running"}
    (bare / "run.json").write_text(json.dumps(stopped))
    assert sparsebench("report", bare, *shown).stderr == ""  # a run under way has no seal yet


def test_report_exports_csv(run: Path, tmp_path: Path) -> None:
    answer = json.loads(output("report", run, "--out", tmp_path / "r.html", "--json"))
    assert answer["report"] == str(tmp_path / "r.html")
    assert sum(answer["cases"].values()) == 8
    shown = output("report", run, "--out", tmp_path / "r.html", "--csv", tmp_path / "r.csv")
    assert "as fast as" in shown  # the answer again
    assert "hardware limit" not in shown  # a CPU has none
    header, *lines = (tmp_path / "r.csv").read_text().splitlines()
    assert "median_us" in header
    assert len(lines) == 8 + 4  # twins in one problem


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--replicates", 3], "found --replicates beside it"),
        (["--only", "m=8", "--energy"], "found --only --energy beside"),
        (["--slurm", "time=1", "--shards", 2], "found --slurm --shards beside it"),
        (["--out", "runs", "--only", "m=8"], "found --out --only beside it"),
        (
            ["--timeout", 9, "--device", "cpu"],
            "nowhere: expected the directory of a run, found none; ",
        ),
        ([], "the command that began it begins again"),
    ],
)
def test_a_resumed_run_refuses_flags_that_it_recorded(flags: list[object], message: str) -> None:
    assert message in refusal("run", "--resume", "nowhere", *flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "quik"], "did you mean quick?"),
        (["runn", "quick"], "did you mean run?"),
        (["train-lm", "--l1", "0"], "no such command: train-lm; it is a script of the repository"),
        (["whole"], "experiments/whole_model.py"),
        (["compare", "H100", "H200", "--among", "suites"], "of the runs below suites"),
        (["run", "quick", "--device", "cuda:7"], "expected an NVIDIA GPU for 'cuda:7'"),
        (["run", "quick", "--device", "tpu"], "expected cpu, cuda or cuda:N"),
        (["run", "quick", "--device", "cpu", "--only", "block=7"], "expected at least one case"),
        (["run"], "expected a suite, or --resume RUN alone"),
        (["campaign", "status", "--to", "runs"], "no such option: --to; use --out"),
        (["check", "quick", "--gpu", "x"], "no such option: check --gpu; the time left is shown"),
        (["run", "quick", "--timeout", "soon"], "--timeout"),
        (["run", "dlmc"], "expected --data DIR"),
        (["report", "whole"], "whole: expected the directory of a run"),
        (["compare", "nowhere", "nowhere"], "nowhere: expected the path of a run"),
        (["compare", "a", "b", "--json", "--markdown"], "expected --json or --markdown"),
        (["run", "quick", "--json", "--markdown"], "expected --json or --markdown"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(arguments, message, tmp_path) -> None:
    out = ["--out", tmp_path / "run"] if arguments[0] == "run" else []
    assert message in refusal(*arguments, *out)
    assert not list(tmp_path.iterdir())


def test_a_broken_run_beside_a_good_one_costs_it_nothing(run: Path, tmp_path: Path) -> None:
    """A broken run in a folder is left out with a warning; one that is named ends the command."""
    for name in ("good", "bad"):
        shutil.copytree(run, tmp_path / name)
    rows = tmp_path / "bad" / "rows.jsonl"
    rows.write_text(rows.read_text().replace('"nnz":', f'"nnz":{10**400},"nnz":', 1))
    bundle.seal(tmp_path / "bad")
    assert sparsebench("validate", tmp_path / "good").returncode == 0
    for command in ("validate", "report"):
        assert "line 2: expected a row" in refusal(command, tmp_path / "bad")
    assert "line 2: expected a row" in refusal("compare", tmp_path / "good", tmp_path / "bad")
    (tmp_path / "bad" / "run.json").write_text("{")
    named = "compare", tmp_path / "good", "x", "--among", tmp_path
    assert "or a GPU" in sparsebench(*named).stderr
    assert "left out: " in sparsebench(*named).stderr


def test_a_report_that_cannot_be_written_is_one_line(run: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for to in (tmp_path / "file" / "page.html", tmp_path / "no" / "page.html", tmp_path):
        refusal("report", run, "--out", to)
    line = refusal("run", run / "suite.yaml", "--device", "cpu", "--out", tmp_path / "file/x")
    assert "expected a folder to write into" in line


@pytest.mark.parametrize("command", ["validate", "report"])
def test_a_link_to_itself_is_no_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    line = refusal(command, tmp_path / "loop")
    assert line.endswith("loop: expected the directory of a run, found none")


def test_a_selection_of_a_suite_is_a_valid_run(run: Path, tmp_path: Path) -> None:
    out, part = tmp_path / "part", "sparsity=0.5 kernel=scipy_bsr"
    flags = "--device", "sim", "--replicates", 1, "--only", part
    done = sparsebench("run", run / "suite.yaml", *flags, "--out", out, "--json")
    result = json.loads(done.stdout)
    assert (result["run"], result["cases"], len(result["headlines"])) == (str(out), {"ok": 3}, 1)
    assert "expected a new directory" in refusal("run", run / "suite.yaml", *flags, "--out", out)
    assert f"with --only '{part}'" in output("validate", out)


def test_a_wrong_case_exits_with_3_and_is_in_the_report(run, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sparsebench.reports.build.figures", lambda: [load_figure("remarks")])
    suite = tmp_path / "wrong.yaml"
    suite.write_text(
        SUITE.replace(
            "bsr, kernel: cusparse_bsr, params: {block: $block}", "dense, kernel: wrong:zeros"
        )
    )
    flags = "--device", "cpu", "--replicates", 1, "--out", tmp_path / "run"
    done = sparsebench("run", suite, *flags)
    assert done.returncode == 3, done.stderr
    assert "2 wrong" in done.stdout
    assert "all zero" in (tmp_path / "run" / "report.html").read_text()
