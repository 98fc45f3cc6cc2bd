"""The public API: runs from Python, what they show, and what importing costs."""

import json
import re
import subprocess
import sys
from base64 import b64encode
from html import unescape
from pathlib import Path
from typing import Any

import pytest

import sparsebench
from sparsebench.errors import ResultError, SuiteError
from sparsebench.formats.bsr import Bsr
from sparsebench.harness import api
from tests.tools.paths import ROOT, TESTS

SUITE: dict[str, Any] = {
    "title": "blocks of 16",
    "problems": [
        {
            **{"op": "linear", "m": [16, 64], "n": 512, "k": 512, "dtype": "bf16"},
            **{"pattern": "blocks", "block": 16, "sparsity": [0.5, 0.9]},
        }
    ],
    "contenders": [{"format": "bsr", "kernel": "bsr_small", "params": {"block": "$block"}}],
    "baselines": [{"format": "dense", "kernel": "cublas"}],
}


def in_python(code: str) -> str:
    """Run Python in a new process, in which torch cannot be imported."""
    command = [sys.executable, "-P", TESTS / "tools" / "run_without_torch.py", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> sparsebench.Run:
    out = tmp_path_factory.mktemp("api") / "run"
    return sparsebench.run(SUITE, device="sim", replicates=1, out=out, progress=False)


def test_a_suite_from_python_is_a_run_like_any_other(measured: sparsebench.Run) -> None:
    assert measured.status == "finished"
    assert measured.path.name == "run"
    assert (measured.path / "manifest.json").exists()
    assert re.fullmatch(r"Run\('.*/run', simulated .*, finished; cases: 8 ok.*\)", repr(measured))
    again = sparsebench.load(measured.path)
    assert repr(again) == repr(measured)
    cases = measured.summary()
    assert set(cases.kernel) == {"cublas", "bsr_small"}
    assert {"m", "sparsity", "median_us", "speedup", "speedup_low", "outcome"} <= set(cases)
    assert len(measured.frame()) == len(cases[cases.status == "ok"])


def test_a_change_to_a_table_does_not_reach_the_run(measured: sparsebench.Run) -> None:
    cases = measured.summary()
    cases["speedup"] = 1e9
    assert (measured.summary().speedup.dropna() < 1e9).all()


def test_a_notebook_shows_the_answer_with_its_badges(measured: sparsebench.Run) -> None:
    shown = measured._repr_html_()
    page = unescape(re.findall(r'srcdoc="([^"]*)"', shown)[0])
    assert "simulated H200" in page
    assert '<base href="about:srcdoc">' in page  # a link to a place on it stays inside
    assert "Which format wins" in page
    assert 'id="answer"' in page
    assert 'id="cases"' not in page
    assert "simulated H200" in measured.answer()


def test_a_plot_is_one_figure_of_the_report(measured: sparsebench.Run, tmp_path: Path) -> None:
    assert next(iter(measured.plots)) == "answer"
    assert measured.plots["roofline"] == "Roofline"
    plot = measured.plot("answer")
    assert plot.save(tmp_path / "plot.html").read_text("utf-8") == plot.html
    assert "<svg" in plot.html
    assert "simulated H200" in plot.html
    assert 'href="rows.jsonl"' not in plot.html  # a page without a place has no files beside it
    with pytest.raises(ResultError, match=r"plot: expected one of answer.*found 'answe'.*answer"):
        measured.plot("answe")
    pages = (ROOT / "README.md").read_text() + (api.__doc__ or "")
    assert {*re.findall(r'run\.plot\("(\w+)"\)', pages)} == {"answer"}


def test_a_plot_is_a_picture_where_no_page_is_shown(measured, tmp_path: Path) -> None:
    plot = measured.plot("answer")
    picture = plot._repr_png_()
    assert picture
    assert picture.startswith(b"\x89PNG")
    assert plot.save(tmp_path / "plot.png").read_bytes() == picture
    shown = plot._repr_html_()
    image, frame = shown.index("<img "), shown.index("<iframe ")
    assert image < frame
    assert b64encode(picture).decode() in shown
    assert "previousElementSibling.hidden = true" in shown[frame:]
    assert measured._repr_markdown_() == measured.answer()


def test_a_figure_without_a_drawing_has_no_picture(measured, tmp_path: Path) -> None:
    table = measured.plot("cases")
    assert table._repr_png_() is None
    assert "<img " not in table._repr_html_()
    with pytest.raises(ResultError, match="expected a figure with a drawing, found the table"):
        table.save(tmp_path / "cases.png")
    assert not list(tmp_path.iterdir())


def test_a_report_is_written_to_the_requested_path(measured, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("sparsebench.reports.build.figures", list)
    assert measured.report(tmp_path / "page.html").read_text("utf-8").startswith("<!doctype html>")
    assert measured.report() == measured.path / "report.html"


def test_bad_input_is_one_line_and_no_run(tmp_path: Path) -> None:
    out = tmp_path / "run"
    with pytest.raises(SuiteError, match=r"^python: problems\.0|^python: problems\[0\]"):
        sparsebench.run({**SUITE, "problems": [{"op": "linear"}]}, device="sim", out=out)
    with pytest.raises(SuiteError, match="expected texts, numbers, lists and mappings"):
        sparsebench.run({**SUITE, "title": object()}, device="sim", out=out)
    with pytest.raises(SuiteError, match=r"found 'quik'.*quick"):
        sparsebench.run("quik", device="sim", out=out)
    with pytest.raises(ResultError, match="expected the directory of a run, found none"):
        sparsebench.load(out)
    assert not out.exists()


COMPUTING = {"torch", "numpy", "pandas", "scipy", "matplotlib", "triton"}


def test_importing_sparsebench_imports_nothing_else() -> None:
    code = (
        "import sys; before = {*sys.modules}; import sparsebench; print(*{*sys.modules} - before)"
    )
    imported = {name.partition(".")[0] for name in in_python(code).split()}
    assert not imported & {*COMPUTING, "typer", "rich", "yaml"}


def test_listing_imports_no_library_that_computes() -> None:
    code = "import sys; from sparsebench.harness.commands._app import main; "
    code += "sys.argv = ['sparsebench', 'list', '--json']; main(); print(*sys.modules)"
    listed, modules = in_python(code).rsplit("\n", 2)[:2]
    assert not {name.partition(".")[0] for name in modules.split()} & COMPUTING
    names = json.loads(listed)
    assert {"linear", "ffn"} <= names["ops"].keys()
    assert {"dense", "csr", "bsr"} <= names["formats"].keys()
    assert {"bsr_triton", "cublas", "cusparse_csr"} <= names["kernels"].keys()
    assert {"quick", "sparsity"} <= names["suites"].keys()


@pytest.mark.parametrize(
    "arguments",
    ["run quik", "run --resume none", "status none", "tune quik", "publish none --out x"],
)
def test_a_name_without_a_suite_or_run_is_refused_before_imports_of_seconds(arguments) -> None:
    words = ["sparsebench", *arguments.split()]
    code = "import sys; from sparsebench.harness.commands._app import main; "
    code += f"sys.argv = {words}; print(main(), *sys.modules)"
    exit_code, *modules = in_python(code).split()
    assert exit_code == "2"
    assert not {name.partition(".")[0] for name in modules} & COMPUTING


def test_runs_are_read_without_torch(measured: sparsebench.Run, tmp_path: Path) -> None:
    """Only the plan of a run needs the kernels, and validate says that it was not checked."""
    run = str(measured.path)
    commands = [["list"], ["report", run, "--out", str(tmp_path / "page.html")]]
    commands += [["compare", run, run], ["validate", run]]
    code = "import sys, sparsebench\nfrom sparsebench.harness.commands._app import main\n"
    for command in commands:
        code += f"sys.argv = {['sparsebench', *command]!r}; print('ended with', main())\n"
    code += f"run = sparsebench.load({run!r})\n"
    code += "print(run, len(run.summary()), run.plot('answer'), run._repr_html_()[:5])"
    output = in_python(code)
    assert re.findall(r"ended with (\d)", output) == ["0", "0", "0", "5"]
    assert re.search(r"plan: not checked.*No module named 'torch'", output)
    assert re.search(r"finished; cases: 8 ok\) \d+ Plot\('answer', .*\) <div>", output)


def test_public_names_are_there_when_they_are_used() -> None:
    first = {name: sparsebench.__getattr__(name) for name in sparsebench.__all__}
    assert first["matmul"] is sparsebench.kernels.nn.matmul.matmul
    assert first["formats"].bsr.Bsr is Bsr
    assert first["nn"].BlockSparseLinear
    assert first["errors"].Unsupported
    assert sparsebench.__version__
    shown = [name for name in dir(sparsebench) if not name.startswith("__")]
    assert sorted(shown) == sorted(sparsebench.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'matmull'"):
        _ = sparsebench.matmull  # type: ignore[attr-defined]
