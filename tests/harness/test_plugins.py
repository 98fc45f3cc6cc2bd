"""Other people's formats, kernels, ops, patterns, suites and figures: installed, run, drawn."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from markupsafe import Markup

from sparsebench._discovery import load, modules
from sparsebench.errors import SuiteError
from sparsebench.harness.machine.code import code_sha256, plugins
from sparsebench.reports.build import Figure, _drawn, load_figure
from sparsebench.results.provenance import flat
from tests.tools.command_line import sparsebench as command_line
from tests.tools.paths import TESTS

PACKAGE = TESTS / "thirdparty"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", PACKAGE, source], check=True)
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, "--no-build-isolation", source], check=True, stderr=subprocess.DEVNULL)
    return target


@pytest.fixture(scope="module")
def installed(site: Path) -> dict[str, str]:
    """Return the environment that sees the package."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ["PYTHONPATH"]])}


@pytest.fixture(scope="module")
def simulated(installed: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the package's suite."""
    out = tmp_path_factory.mktemp("runs") / "run"
    sparsebench(
        installed, "run", "diagonals", "--device", "sim", "--replicates", "1", "--out", str(out)
    )
    return out


def forget() -> None:
    """Let go of what was found and imported."""
    modules.cache_clear()
    for name in [name for name in sys.modules if name.startswith("sparsebench_example")]:
        del sys.modules[name]


@pytest.fixture
def here(site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Install the package into this process and its workers, as a copy that may be changed."""
    copy = tmp_path / "site"
    shutil.copytree(site, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(copy), os.environ["PYTHONPATH"]]))
    monkeypatch.syspath_prepend(copy)
    forget()
    yield copy
    forget()


def sparsebench(environment: dict[str, str], *arguments: str) -> str:
    command = [sys.executable, "-P", "-m", "sparsebench", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_plug_ins_of_an_installed_package_are_listed(installed: dict[str, str]) -> None:
    found = json.loads(sparsebench(installed, "list", "--json"))
    assert found["formats"]["diagonal"] == "A matrix of its main diagonal alone."
    assert found["ops"]["linear_relu"].startswith("A linear layer and its activation")
    assert found["kernels"]["diagonal_torch"] == "Diagonal product by broadcasting."
    of_an_object = "Diagonal product by broadcasting, then the activation in place."
    assert found["kernels"]["diagonal_relu"] == of_an_object
    on_diagonal = "The element of each row that is on the main diagonal."
    assert found["patterns"]["main_diagonal"] == on_diagonal
    assert found["figures"]["fastest"] == "The fastest case, in a sentence."
    assert found["suites"]["diagonals"] == "Somebody else's suite"


def test_an_installed_suite_runs_with_its_own_op_pattern_and_figure(
    installed: dict[str, str], tmp_path: Path
) -> None:
    flags = "--device", "cpu", "--replicates", "1", "--out", str(tmp_path / "run")
    said = sparsebench(installed, "run", "diagonals", *flags, "--json")
    assert json.loads(said)["cases"] == {"ok": 6}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Somebody else&#39;s figure" in page
    assert "<p>Fastest: " in page


def test_an_installed_package_is_tested_by_its_own_tests(
    installed: dict[str, str], tmp_path: Path
) -> None:
    tests = shutil.copytree(PACKAGE / "tests", tmp_path / "tests")
    command = [sys.executable, "-P", "-m", "pytest", "-p", "no:cacheprovider", "-q", tests]
    done = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_run_says_which_plug_ins_it_used(simulated: Path, here: Path) -> None:
    found = flat(json.loads((simulated / "environment.json").read_text()))
    digest = plugins(["sparsebench_example.diagonal"])["sparsebench_example"]["sha256"]
    assert found["plugins.sparsebench_example.distribution"] == "sparsebench-example"
    assert found["plugins.sparsebench_example.version"] == "1"
    assert found["plugins.sparsebench_example.sha256"] == digest
    assert found["code_sha256"] != code_sha256()


def test_a_run_of_ours_alone_has_no_plug_in() -> None:
    assert plugins(["sparsebench.formats.bsr"]) == {}
    assert code_sha256({}) == code_sha256()


def test_a_digest_is_of_every_file_of_the_package(here: Path) -> None:
    modules = ["sparsebench_example.diagonal"]
    before = plugins(modules)
    (here / "sparsebench_example" / "kernel.cu").write_text("// built when it is imported")
    changed = plugins(modules)
    assert changed != before
    assert code_sha256(changed) != code_sha256(before)
    (here / "sparsebench_example" / "__pycache__").mkdir()
    (here / "sparsebench_example" / "__pycache__" / "diagonal.pyc").write_bytes(b"compiled")
    assert plugins(modules) == changed


def test_a_package_without_a_distribution_is_identified_by_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shared_name" / "fast").mkdir(parents=True)
    (tmp_path / "shared_name" / "fast" / "__init__.py").write_text("")
    (tmp_path / "one_file.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    found = plugins(["shared_name.fast.kernels", "one_file"])
    assert {name: facts["version"] for name, facts in found.items()} == {
        "one_file": None,
        "shared_name.fast": None,
    }


def raise_the_version(site: Path) -> None:
    (metadata,) = site.glob("*.dist-info/METADATA")
    metadata.write_text(metadata.read_text().replace("Version: 1", "Version: 2"))


def edit_a_file(site: Path) -> None:
    with (site / "sparsebench_example" / "main_diagonal.py").open("a") as file:
        file.write("# faster now\n")


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (raise_the_version, "expected plugins.sparsebench_example.version 1, found 2"),
        (edit_a_file, "expected plugins.sparsebench_example.sha256 "),
    ],
)
def test_a_run_does_not_go_on_with_another_plug_in(
    simulated: Path, here: Path, tmp_path: Path, change: Callable[[Path], None], line: str
) -> None:
    run = shutil.copytree(simulated, tmp_path / "run")
    change(here)
    done = command_line("run", "--resume", run, "--device", "sim")
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert line in said
    assert (run / "rows.jsonl").read_bytes() == (simulated / "rows.jsonl").read_bytes()


def test_a_run_with_another_plug_in_version_is_reported(
    simulated: Path, here: Path, tmp_path: Path
) -> None:
    raise_the_version(here)
    edit_a_file(here)
    out = tmp_path / "again"
    done = command_line("reproduce", simulated, "--device", "sim", "--out", out)
    assert "sparsebench_example 1 (" in done.stdout


def test_a_run_is_not_measured_again_without_its_plug_in(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    done = command_line("reproduce", simulated, "--device", "sim", "--out", out)
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert "expected the plug-in sparsebench-example 1, which it was measured with" in said
    assert not out.exists()


def test_an_object_of_a_module_is_found_by_its_name(here: Path) -> None:
    by_entry = load("kernels", "diagonal_relu")
    assert by_entry is load("kernels", "sparsebench_example.diagonal_torch:RELU")
    assert by_entry is not load("kernels", "diagonal_torch")
    assert by_entry.op == "linear_relu"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sparsebench_example.diagonal_torch:FAST", "to define FAST, found no such name"),
        ("sparsebench_example.diagonal_torch:", "expected package.module or package.module:NAME"),
        ("diagonal_torch:RELU", "expected to import diagonal_torch, found: No module named"),
        (".diagonal", "expected package.module or package.module:NAME"),
        ("sparsebench_example..x", "expected package.module or package.module:NAME"),
    ],
)
def test_a_bad_entry_point_is_one_line(here: Path, name: str, line: str) -> None:
    with pytest.raises(SuiteError, match=f"^{name}: .*{line}"):
        load("kernels", name)


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
        ("kernels", "scipy_csr", "scipy_csr: expected one module of this name"),
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
        assert said.endswith("(other 1)")
    assert not out.exists()


@pytest.mark.parametrize(
    ("entry", "line"),
    [
        ("a.b = other_suites", "expected a name of letters, digits, _ and -; found 'a.b'"),
        ("a b = other_suites", "expected a name of letters, digits, _ and -; found 'a b'"),
        ("mine = other-suites", "expected package.module or package.module:NAME; found 'other-s"),
        ("mine = other_suites:", "expected package.module or package.module:NAME; found 'other_s"),
    ],
)
def test_an_entry_point_that_cannot_be_meant_is_one_line(
    added: Callable[[str, str], None], entry: str, line: str
) -> None:
    added("kernels", entry)
    done = command_line("list")
    (said,) = done.stderr.strip().splitlines()
    assert done.returncode == 2
    assert "of sparsebench.kernels (other 1): " in said
    assert line in said


@pytest.mark.parametrize(
    ("code", "line"),
    [
        ("TITLE = 'a figure'", "expected a text TITLE, an integer ORDER and a function draw"),
        ("TITLE, ORDER, draw = 1, 2, 3", "expected a text TITLE, an integer ORDER and a function"),
        ("", "expected drawn to define TITLE, found no such name"),
    ],
)
def test_a_figure_that_lacks_a_part_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, line: str
) -> None:
    (tmp_path / "drawn.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "drawn", raising=False)
    monkeypatch.setattr("sparsebench._discovery.modules", lambda folder: {"mine": "drawn"})
    with pytest.raises(SuiteError, match=f"^mine: {line}"):
        load_figure("mine")


def test_a_figure_of_a_plug_in_that_fails_is_named(here: Path) -> None:
    def draw(frames: object) -> Markup:
        raise KeyError(frames)

    line = r"^figure fastest \(sparsebench_example.fastest\): KeyError: None$"
    with pytest.raises(SuiteError, match=line):
        _drawn(Figure("fastest", "Fastest", 0, draw), None)


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
        (
            "from sparsebench.kernels._kernel import Kernel\n"
            "KERNEL = Kernel('linear', 'dense', 'any', None)",
            "expected prepare to be a function, found None",
        ),
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


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ("op: 'broken:FIELDS'", "expected fields of a class of Fields, found <class 'dict'>"),
        ("op: linear, pattern: 'broken:NONE'", "expected a Rule of a weight, found None"),
        (
            "op: linear, pattern: 'broken:RAISES'",
            "the plug-in broken: ZeroDivisionError: integer division or modulo by zero",
        ),
        (
            "op: linear, pattern: 'broken:JSON'",
            "the plug-in broken: TypeError: ",
        ),
    ],
)
def test_an_error_of_a_plug_in_is_not_called_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fields: str, line: str
) -> None:
    (tmp_path / "broken.py").write_text(
        "import json\n"
        "from dataclasses import replace\n"
        "from sparsebench.harness.ops import linear\n"
        "from sparsebench.harness.patterns._pattern import Pattern\n"
        "FIELDS = replace(linear.OP, fields=dict)\n"
        "NONE = Pattern(lambda weight: None)\n"
        "RAISES = Pattern(lambda weight: weight.n // 0)\n"
        "JSON = Pattern(lambda weight: json.dumps(weight))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "schema: sparsebench/suite@1\ntitle: t\n"
        f"problems: [{{{fields}, m: 4, n: 8, k: 8, dtype: fp32, sparsity: 0.5}}]\n"
        "contenders: [{format: dense, kernel: torch_dense}]\n"
    )
    done = command_line("check", suite, "--device", "cpu")
    assert done.returncode == 2
    assert line in done.stderr
    assert done.stderr.count("\n") == 1
