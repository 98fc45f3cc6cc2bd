"""`pytest SUITE.yaml` in sessions of their own, as somebody else's: a warning is an error."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.tools.suites import CUBLAS, ON_CPU, linear

BAD_KERNELS = "wrong:zeros", "wrong:turns_wrong", "faulty:raises", "breaks.kernel"
SUITE = linear(
    "m: [4, 8], n: 64, k: 512, dtype: fp32, pattern: blocks, block: 16, sparsity: 0.5",
    "{format: bsr, kernel: scipy_bsr, params: {block: [16, 32]}}",
    CUBLAS,
    *(f"{{format: dense, kernel: {name}}}" for name in BAD_KERNELS),
    baselines=(ON_CPU,),
)
ONE = linear(
    "m: 4, n: 32, k: 32, dtype: fp32, pattern: blocks, block: 16, sparsity: 0.5",
    "{format: dense, kernel: KERNEL}",
    baselines=(ON_CPU,),
)
BAD = {  # what is replaced in ONE, and what the error says
    "no schema": ("schema: sparsebench/suite@1", "", "the line schema: sparsebench/suite@1"),
    "version": ("suite@1", "suite@9", "schema: expected 'sparsebench/suite@1'; found"),
    "op": ("op: linear", "op: linar", "linear?"),
    "kernel": ("KERNEL", "cubals", "cublas?"),
}
PROBLEM = "linear-dtype:fp32-pattern:blocks-sparsity:0.5-block:16-m:4-n:64-k:512"
BREAKS = """
from pathlib import Path
from sparsebench.kernels._kernel import Kernel, Launch

def prepare(operands):
    Path(__file__).with_name("took_part").touch()
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    calls = [1] * 80
    return Launch(lambda: x @ w.T * calls.pop())

KERNEL = Kernel(op="linear", consumes="dense", device="any", prepare=prepare)
"""
LIGHT = """
import sys

def test_light():
    ours = {name for name in sys.modules if name.startswith("sparsebench")}
    assert "torch" not in sys.modules
    plugin = "sparsebench.harness.testing.pytest_plugin"
    assert ours == {"sparsebench", "sparsebench.harness", "sparsebench.harness.testing", plugin}
"""


def run(folder: Path, *arguments: str, device: str = "cpu") -> tuple[int, str]:
    """Return the exit code of a session in the folder, and what it said."""
    paths = os.pathsep.join([str(folder), os.environ["PYTHONPATH"]])
    # In a worker of pytest-xdist there are no benchmarks.
    alone = {name: v for name, v in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    options = ["-W", "error", "--sparsebench-device", device, *arguments]
    if arguments[0].startswith("suite.yaml"):
        options += ["-p", "tests.tools.fork_server"]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", *options],
        cwd=folder,
        env={**alone, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def with_suite(folder: Path) -> Path:
    """Write SUITE and its kernel that breaks into a folder, and return it."""
    (folder / "suite.yaml").write_text(SUITE)
    (folder / "breaks").mkdir()
    (folder / "breaks" / "kernel.py").write_text(BREAKS)
    return folder


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Return what a session over SUITE and the suites of BAD said, and its JSON."""
    folder = with_suite(tmp_path_factory.mktemp("session"))
    for name, (right, wrong, _) in BAD.items():
        (folder / f"{name}.yaml").write_text(ONE.replace(right, wrong, 1))
    suites = ["suite.yaml", *(f"{name}.yaml" for name in BAD)]
    options = ["--continue-on-collection-errors", "--benchmark-only", "-rs"]
    _, output = run(folder, *suites, *options, "--benchmark-json=out.json")
    return output, json.loads((folder / "out.json").read_text())


def test_cases_are_benchmarks_grouped_by_problem(session: tuple[str, dict[str, Any]]) -> None:
    _, benchmarks = session
    names = ["dense/torch_dense", "bsr/scipy_bsr", "bsr/scipy_bsr-block:32"]
    assert [bench["name"] for bench in benchmarks["benchmarks"]] == 2 * names
    groups = [bench["group"] for bench in benchmarks["benchmarks"]]
    assert groups == 3 * [PROBLEM] + 3 * [PROBLEM.replace("m:4", "m:8")]
    assert benchmarks["benchmarks"][1]["params"]["kernel"] == "scipy_bsr"


def test_the_timer_is_device_time(session: tuple[str, dict[str, Any]]) -> None:
    for bench in session[1]["benchmarks"]:
        samples = bench["stats"]["data"]
        assert bench["options"]["timer"] == "device_time"
        assert len(samples) == bench["stats"]["rounds"] >= 5
        assert min(samples) > 0
        assert sum(samples) < 20
        assert samples == pytest.approx([round(s, 9) for s in samples])  # rows hold nanoseconds


def test_extra_info_has_the_facts_of_the_case(session: tuple[str, dict[str, Any]]) -> None:
    dense, sparse, _ = (bench["extra_info"] for bench in session[1]["benchmarks"][:3])
    assert sparse["problem"]["m"] == 4
    assert (sparse["sparsity"], sparse["nnz"]) == (0.5, 64 * 512 // 2)
    assert dense["stored_bytes"] == dense["dense_bytes"] == 4 * 64 * 512 > sparse["stored_bytes"]
    assert 0 < sparse["error"] < 1e-5
    assert dense["digest"] == sparse["digest"]
    assert (dense["baseline"], sparse["clock"], sparse["gpu"]) == (True, "host", None)


def test_an_unsupported_case_is_skipped_with_its_reason(session: tuple[str, Any]) -> None:
    skips = [line for line in session[0].splitlines() if line.startswith("SKIPPED")]
    assert len(skips) == 1
    assert skips[0].startswith("SKIPPED [2]")
    assert skips[0].endswith("runs on cuda, not on cpu")


def test_a_wrong_output_or_a_break_while_timing_fails_in_one_line_and_has_no_time(
    session: tuple[str, Any],
) -> None:
    output, _ = session
    assert "8 failed, 6 passed, 2 skipped" in output
    assert output.count("\nwrong: before timing: relative error 1.00e+00") == 2
    assert output.count("\nwrong: before timing: relative error 5.00e-01") == 2
    assert output.count("\nfailed: prepare: RuntimeError: no such instruction") == 2
    assert output.count("IndexError: pop from empty list\n") == 2
    assert "Traceback" not in output


@pytest.mark.exhaustive
def test_a_case_is_chosen_by_its_id_or_as_in_run_and_compared_with_before(tmp_path: Path) -> None:
    with_suite(tmp_path)
    case = f"suite.yaml::{PROBLEM}::bsr/scipy_bsr"
    assert run(tmp_path, case, "--benchmark-save=before")[0] == 0
    assert not (tmp_path / "breaks" / "took_part").exists()  # deselected
    only = "--sparsebench-only", "kernel=scipy_bsr m=4"
    code, output = run(tmp_path, "suite.yaml", *only, "-k", "bsr", "--benchmark-compare")
    assert (code, "2 passed, 1 deselected" in output) == (0, True)  # the baseline
    assert "bsr/scipy_bsr (NOW)" in output
    assert "bsr/scipy_bsr (0001_before)" in output


def test_a_bad_suite_is_one_line(session: tuple[str, Any]) -> None:
    output, _ = session
    for name, (_, _, expected) in BAD.items():
        lines = [line for line in output.splitlines() if f"{name}.yaml: " in line]
        assert len(lines) == 1
        assert expected in lines[0]


@pytest.mark.exhaustive
def test_a_missing_pytest_benchmark_is_reported(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(ONE.replace("KERNEL", "cublas"))
    code, output = run(tmp_path, "suite.yaml", "-p", "no:benchmark")
    assert (code, "expected pytest-benchmark to run it, found none" in output) == (2, True)


def test_other_sessions_are_left_alone_and_import_nothing(tmp_path: Path) -> None:
    (tmp_path / "suite.yaml").write_text(SUITE)  # in the folder, but not named
    (tmp_path / "compose.yaml").write_text("services: {}\n")
    (tmp_path / "test_light.py").write_text(LIGHT)
    code, output = run(tmp_path, ".")
    assert (code, "1 passed" in output) == (0, True)
    assert "collected 0 items" in run(tmp_path, "compose.yaml")[1]


@pytest.mark.gpu
def test_scopes_and_caches_are_cases_of_their_own_on_a_gpu(tmp_path: Path) -> None:
    measures = "scopes: [kernel, op]\ncaches: [cold, hot]\n"
    (tmp_path / "suite.yaml").write_text(ONE.replace("KERNEL", "cublas").strip() + "\n" + measures)
    code, output = run(
        tmp_path, "suite.yaml", "-k", "cublas", "--benchmark-json=out.json", device="cuda"
    )
    assert code == 0, output
    benchmarks = json.loads((tmp_path / "out.json").read_text())["benchmarks"]
    names = [bench["name"].removeprefix("dense/cublas") for bench in benchmarks]
    assert names == ["", "-kernel-hot", "-op-cold", "-op-hot"]
    assert [bench["extra_info"]["clock"] for bench in benchmarks] == ["graph"] * 2 + ["events"] * 2
    assert len({bench["group"] for bench in benchmarks}) == 4
    assert benchmarks[0]["extra_info"]["gpu"]
