"""Plug-ins of other packages: formats, kernels, ops, patterns, suites and figures."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from sparsebench._discovery import load, modules
from sparsebench.errors import SuiteError
from sparsebench.harness import catalog
from sparsebench.harness.machine.code import code_sha256, plugins
from sparsebench.reports.build import load_figure
from sparsebench.results.run.provenance import flat
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.paths import TESTS

PACKAGE = TESTS / "thirdparty"
pytestmark = pytest.mark.usefixtures("no_figures")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Install the package into a separate folder."""
    target = tmp_path_factory.mktemp("site")
    source = tmp_path_factory.mktemp("source") / "package"
    subprocess.run(["cp", "-r", PACKAGE, source], check=True)
    pip = [sys.executable, "-P", "-m", "pip", "install", "--quiet", "--no-deps", "--target", target]
    subprocess.run([*pip, "--no-build-isolation", source], check=True, stderr=subprocess.DEVNULL)
    return target


def forget() -> None:
    """Clear the caches of names, and unload the package."""
    modules.cache_clear()
    catalog._declarations.clear()
    for name in [name for name in sys.modules if name.startswith("sparsebench_example")]:
        del sys.modules[name]


@contextmanager
def seen(site: Path) -> Iterator[Path]:
    """Install the package into this process and its workers."""
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        patch.syspath_prepend(site)
        forget()
        yield site
    forget()


@pytest.fixture(scope="module")
def simulated(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a run of the package's suite."""
    out = tmp_path_factory.mktemp("runs") / "run"
    with seen(site):
        output("run", "diagonals", "--device", "sim", "--replicates", 1, "--out", out)
    return out


@pytest.fixture
def here(site: Path, tmp_path: Path) -> Iterator[Path]:
    """Install a copy of the package that may be changed."""
    ignored = shutil.ignore_patterns("__pycache__")
    with seen(shutil.copytree(site, tmp_path / "site", ignore=ignored)) as copy:
        yield copy


def test_plug_ins_of_an_installed_package_are_listed(here: Path) -> None:
    result = json.loads(sparsebench("list", "--json").stdout)
    assert result["formats"]["diagonal"] == "A matrix of its main diagonal alone."
    assert result["ops"]["linear_relu"].startswith("A linear layer and its activation")
    assert result["kernels"]["diagonal_torch"] == "Diagonal product by broadcasting."
    of_an_object = "Diagonal product by broadcasting, then the activation in place."
    assert result["kernels"]["diagonal_relu"] == of_an_object
    on_diagonal = "The element of each row that is on the main diagonal."
    assert result["patterns"]["main_diagonal"] == on_diagonal
    assert result["figures"]["fastest"] == "The fastest case, in a sentence."
    assert result["suites"]["diagonals"] == "Somebody else's suite"
    claims = sparsebench("claims", "list").stdout
    assert "broadcast-is-faster" in claims
    assert claims.endswith("Verdicts: sparsebench claims report\n")


def test_an_installed_suite_runs_with_its_own_op_pattern_and_figure(here, tmp_path, monkeypatch):
    monkeypatch.setattr("sparsebench.reports.build.figures", lambda: [load_figure("fastest")])
    flags = "--device", "cpu", "--replicates", 1, "--out", tmp_path / "run"
    done = sparsebench("run", "diagonals", *flags, "--json")
    assert json.loads(done.stdout)["cases"] == {"ok": 6}
    page = (tmp_path / "run" / "report.html").read_text()
    assert "Somebody else&#39;s figure" in page
    assert "<p>Fastest: " in page


@pytest.mark.exhaustive
def test_an_installed_package_is_tested_by_its_own_tests(site: Path, tmp_path: Path) -> None:
    tests = shutil.copytree(PACKAGE / "tests", tmp_path / "tests")
    options = "-p", "no:cacheprovider", "-p", "tests.tools.fork_server", "-q", tests
    command = [sys.executable, "-P", "-m", "pytest", *options]
    path = os.pathsep.join([str(site), os.environ["PYTHONPATH"]])
    installed = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=installed, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert "passed" in done.stdout
    assert "skipped" not in done.stdout


def test_a_run_records_its_plug_ins(simulated: Path, here: Path) -> None:
    result = flat(json.loads((simulated / "environment.json").read_text()))
    digest = plugins(["sparsebench_example.diagonal"])["sparsebench_example"]["sha256"]
    assert result["plugins.sparsebench_example.distribution"] == "sparsebench-example"
    assert result["plugins.sparsebench_example.version"] == "1"
    assert result["plugins.sparsebench_example.sha256"] == digest
    assert result["code_sha256"] != code_sha256()


def test_a_package_without_a_distribution_is_identified_by_its_files(tmp_path, monkeypatch) -> None:
    (tmp_path / "shared_name" / "fast").mkdir(parents=True)
    (tmp_path / "shared_name" / "fast" / "__init__.py").write_text("")
    (tmp_path / "one_file.py").write_text("")
    monkeypatch.syspath_prepend(tmp_path)
    result = plugins(["shared_name.fast.kernels", "one_file"])
    versions = {name: facts["version"] for name, facts in result.items()}
    assert versions == {"one_file": None, "shared_name.fast": None}


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
def test_a_run_is_not_resumed_with_another_plug_in(simulated, here, tmp_path, change, line) -> None:
    run = shutil.copytree(simulated, tmp_path / "run")
    change(here)
    assert line in refusal("run", "--resume", run, "--device", "sim")
    assert (run / "rows.jsonl").read_bytes() == (simulated / "rows.jsonl").read_bytes()


def test_a_run_with_another_plug_in_version_is_reported(simulated, here, tmp_path) -> None:
    raise_the_version(here)
    edit_a_file(here)
    out = tmp_path / "again"
    done = sparsebench("reproduce", simulated, "--device", "sim", "--out", out)
    assert "sparsebench_example" in done.stdout, done.stdout


def test_a_run_is_not_reproduced_without_its_plug_in(simulated: Path, tmp_path: Path) -> None:
    out = tmp_path / "again"
    message = refusal("reproduce", simulated, "--device", "sim", "--out", out)
    assert "expected the plug-in sparsebench-example 1, which it was measured with" in message
    assert not out.exists()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("sparsebench_example.diagonal_torch:FAST", "to define FAST, found no such name"),
        ("sparsebench_example.diagonal_torch:", "expected package.module or package.module:NAME"),
        ("diagonal_torch:RELU", "No module named 'diagonal_torch'; is its folder in PYTHONPATH?"),
        (".diagonal", "expected package.module or package.module:NAME"),
        ("sparsebench_example..x", "expected package.module or package.module:NAME"),
    ],
)
def test_a_bad_name_of_an_object_is_refused(here: Path, name: str, line: str) -> None:
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
def test_a_name_that_is_taken_is_refused(added, tmp_path, group, entry, line) -> None:
    added(group, f"{entry} = other_suites")
    out = tmp_path / "run"
    for command in (["list"], ["run", "quick", "--device", "cpu", "--out", out]):
        message = refusal(*command)
        assert line in message
        assert "other_suites" in message
        assert message.endswith("(other 1)")
    assert not out.exists()


@pytest.mark.parametrize(
    ("group", "entry", "token"),
    [
        ("kernels", "a.b = other_suites", "'a.b'"),
        ("kernels", "a b = other_suites", "'a b'"),
        ("kernels", "mine = other-suites", "'other-suites'"),
        ("kernels", "mine = other_suites:", "'other_suites:'"),
        ("suites", "mine = not_there", "'not_there'"),
    ],
)
def test_a_bad_entry_point_is_refused(added, group, entry, token) -> None:
    added(group, entry)
    assert token in refusal("list")


PATTERN = "from sparsebench.harness.patterns._pattern import Pattern\n"
KERNEL = "from sparsebench.kernels._kernel import Kernel\n"
BROKEN_KERNELS = {
    "raise SystemExit(0)": "found SystemExit: 0",
    "import not_there": "found: No module named 'not_there'",
    "1 / 0": "found ZeroDivisionError: division by zero",
    "def": "found SyntaxError: invalid syntax",
    "": "expected broken to define KERNEL, found no such name",
    "KERNEL = 5": "expected KERNEL to be a Kernel, found 5",
    f"{KERNEL}KERNEL = Kernel('linear', 'dense', 'any', None)": "expected prepare to be a function",
}
BROKEN_PATTERNS = {
    "lambda weight: None": "expected a Rule of a weight, found None",
    "lambda weight: weight.n // 0": "found ZeroDivisionError: integer division",
    "__import__('json').dumps": "broken:RULE: expected a Rule of a weight, found TypeError: ",
    "'rule'": "broken:RULE: expected a Rule of a weight, found TypeError: 'str' object is not",
}
OF_RULE = "op: linear, pattern: 'broken:RULE', sparsity: 0.5"
OF_OP = (
    "from dataclasses import replace\nfrom sparsebench.harness.ops import linear\n"
    "OP = replace(linear.OP, fields=dict)\n"
)


@pytest.mark.parametrize(
    ("code", "problem", "kernel", "line"),
    [
        *((code, "op: linear", "broken:KERNEL", line) for code, line in BROKEN_KERNELS.items()),
        *(
            (f"{PATTERN}RULE = Pattern({rule})", OF_RULE, "", line)
            for rule, line in BROKEN_PATTERNS.items()
        ),
        (OF_OP, "op: 'broken:OP'", "", "expected fields of a class of Fields, found <class 'dict'"),
    ],
)
def test_an_error_in_a_plug_in_is_one_line(
    code, problem, kernel, line, tmp_path, monkeypatch
) -> None:
    (tmp_path / "broken.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "broken", raising=False)
    suite = tmp_path / "s.yaml"
    suite.write_text(
        "schema: sparsebench/suite@1\ntitle: t\nproblems:\n"
        f"  - {{{problem}, m: 4, n: 8, k: 8, dtype: fp32}}\n"
        f"contenders: [{{format: dense, kernel: '{kernel or 'torch_dense'}'}}]\n"
    )
    assert line in refusal("check", suite, "--device", "cpu")


RIVAL = f"{KERNEL}KERNEL = Kernel('linear', 'dense', 'any', print)\n"
FORGER = (
    "import json\nright = json.dumps\n"
    "forged = {'device': 'cuda', 'at_most': {'fp32': 1.0}, 'why': 'because'}\n"
    "json.dumps = lambda said: right({n: {**each, **forged} for n, each in said.items()})\n"
)


def test_a_package_declares_nothing_for_another_and_allows_itself_no_error(
    tmp_path, monkeypatch
) -> None:
    (tmp_path / "forger.py").write_text(RIVAL + FORGER)
    (tmp_path / "rival.py").write_text(RIVAL)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalog, "_declarations", {})
    catalog.declare_all([("kernels", "forger:KERNEL"), ("kernels", "rival:KERNEL")])
    forger, rival = (catalog.declaration_of("kernels", f"{n}:KERNEL") for n in ("forger", "rival"))
    assert (forger.device, rival.device) == ("cuda", "any")
    assert forger.error("fp32") is None


@pytest.mark.parametrize(
    ("answer", "line"),
    [
        ("{}", "malformed:KERNEL: expected a declaration, found None"),
        ("[" * 10**5, "expected an answer in JSON"),
        ('{"kernels malformed:KERNEL": {"op": 1, "options": []}}', "expected a declaration"),
        ('{"kernels malformed:KERNEL": {"op": "linear"}}', "expected a declaration"),
    ],
    ids=["none", "nested", "a number", "no options"],
)
def test_a_malformed_declaration_is_refused(answer, line, tmp_path, monkeypatch) -> None:
    forged = f"import json\njson.dumps = lambda said: {answer!r}\n"
    (tmp_path / "malformed.py").write_text(RIVAL + forged)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(catalog, "_declarations", {})
    with pytest.raises(SuiteError) as error:
        catalog.declaration_of("kernels", "malformed:KERNEL")
    assert line in str(error.value)


def test_validate_names_the_flag_that_allows_plug_ins(simulated: Path, here: Path) -> None:
    done = sparsebench("validate", simulated)
    assert "--allow-plugins" in done.stdout + done.stderr
