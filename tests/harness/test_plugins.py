"""Other people's formats, kernels, patterns, suites and figures: installed, measured, drawn."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from command import sparsebench as command_line
from places import TESTS

from sparsebench._discovery import modules

PACKAGE = TESTS / "thirdparty"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Install the package into a folder of its own; return the environment that sees it."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", PACKAGE, source], check=True)
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, "--no-build-isolation", source], check=True, stderr=subprocess.DEVNULL)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), os.environ["PYTHONPATH"]])}


def sparsebench(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "sparsebench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_what_an_installed_package_adds_is_listed(installed: dict[str, str]) -> None:
    found = json.loads(sparsebench(installed, "list", "--json"))
    assert found["formats"]["diagonal"] == "A matrix of its main diagonal alone."
    assert found["kernels"]["diagonal_torch"] == "Diagonal product by broadcasting."
    on_diagonal = "The element of each row that is on the main diagonal."
    assert found["patterns"]["main_diagonal"] == on_diagonal
    assert found["figures"]["fastest"] == "The fastest case, in a sentence."
    assert found["suites"]["diagonals"] == "Somebody else's suite"


def test_an_installed_suite_runs_with_its_own_pattern_and_figure(
    installed: dict[str, str], tmp_path: Path
) -> None:
    flags = "--device", "cpu", "--replicates", "1", "--out", str(tmp_path / "run")
    said = sparsebench(installed, "run", "diagonals", *flags, "--json")
    assert json.loads(said)["cases"] == {"ok": 3}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Somebody else&#39;s figure" in page
    assert "<p>Fastest: " in page


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str, str], None]]:
    """Install a package with one entry point, into this process."""

    def add(group: str, entry: str) -> None:
        info = tmp_path / "other-1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Name: other\nVersion: 1\n")
        (info / "entry_points.txt").write_text(f"[sparsebench.{group}]\n{entry}\n")
        package = tmp_path / "other_suites"
        package.mkdir()
        (package / "__init__.py").write_text("")
        (package / "quick.yaml").write_text("title: not the one\n")
        monkeypatch.syspath_prepend(tmp_path)
        modules.cache_clear()

    yield add
    modules.cache_clear()


@pytest.mark.parametrize(
    ("group", "entry", "line"),
    [
        ("ops", "linear", "linear: expected one module of this name"),
        ("patterns", "blocks", "blocks: expected one module of this name"),
        ("formats", "bsr", "bsr: expected one module of this name"),
        ("kernels", "bsr_triton", "bsr_triton: expected one module of this name"),
        ("figures", "cases", "cases: expected one module of this name"),
        ("suites", "mine", "quick: expected one suite of this name"),
    ],
)
def test_a_name_that_is_taken_is_one_line(
    added: Callable[[str, str], None], tmp_path: Path, group: str, entry: str, line: str
) -> None:
    added(group, f"{entry} = other_suites")
    out = tmp_path / "run"
    for command in (["list"], ["run", "quick", "--device", "cpu", "--out", out]):
        done = command_line(*command)
        (said,) = done.stderr.strip().splitlines()
        assert done.returncode == 2
        assert line in said
        assert "other_suites" in said
    assert not out.exists()


def test_suites_of_a_package_that_is_not_there_are_one_line(
    added: Callable[[str, str], None],
) -> None:
    added("suites", "mine = not_there")
    done = command_line("list")
    assert done.returncode == 2
    assert "suites: expected a package not_there, found: No module named 'not_there'" in done.stderr


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("raise SystemExit(0)", "found SystemExit: 0"),
        ("import not_there", "found: No module named 'not_there'"),
        ("1 / 0", "found ZeroDivisionError: division by zero"),
        ("def", "found SyntaxError: invalid syntax"),
        ("KERNEL = 5", "expected KERNEL to be a Kernel, found 5"),
        ("", "expected broken.kernel to define KERNEL, found no such name"),
    ],
)
def test_a_plug_in_that_cannot_be_imported_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, found: str
) -> None:
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "kernel.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("broken", "broken.kernel"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "schema: sparsebench/suite@1\ntitle: t\n"
        "problems: [{op: linear, m: 4, n: 8, k: 8, dtype: fp32}]\n"
        "contenders: [{format: dense, kernel: broken.kernel}]\n"
    )
    done = command_line("check", suite, "--device", "cpu")
    assert done.returncode == 2
    assert found in done.stderr
    assert done.stderr.count("\n") == 1
