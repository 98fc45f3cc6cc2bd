"""Text is UTF-8 in every locale, and a failed write leaves the file that was there."""

import ast
import os
import resource
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from sparsebench._writing import append_to, replacing, require_apart, write_file
from sparsebench.errors import SparsebenchError
from sparsebench.harness.commands._app import outcome
from sparsebench.results.run import store
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED, ROOT

FOLDERS = (
    "authors/src",
    "formats",
    "harness",
    "kernels",
    "reports",
    "results",
    "suites",
    "src/sparsebench",
)
MODULES = sorted(
    path
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*.py")
    if ".venv" not in path.parts
)
SUITE = """
schema: sparsebench/suite@1
title: größe 行列
problems:
  - {op: linear, n: 64, k: 64, m: 4, dtype: bf16, pattern: blocks, block: 16, sparsity: 0.5}
contenders: [{format: bsr, kernel: bsr_triton, params: {block: $block}}]
baselines: [{format: dense, kernel: cublas}]
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONIOENCODING": "ascii"}


@cache
def calls() -> list[tuple[Path, str, ast.Call]]:
    return [
        (path, getattr(node.func, "attr", getattr(node.func, "id", "")), node)
        for path in MODULES
        for node in ast.walk(ast.parse(path.read_text("utf-8")))
        if isinstance(node, ast.Call)
    ]


def mode_of(call: ast.Call) -> str:
    """Return the mode of an open(): the first text that looks like one."""
    texts = [a.value for a in call.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
    modes = [
        w.value.value
        for w in call.keywords
        if w.arg == "mode" and isinstance(w.value, ast.Constant)
    ]
    return next((str(text) for text in [*modes, *texts] if set(str(text)) <= set("rwxab+t")), "r")


def is_os_open(call: ast.Call) -> bool:
    return ast.unparse(call.func) == "os.open"


def test_every_text_is_read_and_written_in_a_named_encoding() -> None:
    unnamed = []
    for path, name, call in calls():
        words = {word.arg for word in call.keywords}
        named = "encoding" in words
        if name == "read_text":
            missing = not named and not call.args
        elif name in ("open", "fdopen", "NamedTemporaryFile"):
            owner = ast.unparse(call.func).partition(".")[0]
            binary = "b" in mode_of(call) or (name == "NamedTemporaryFile" and not call.args)
            missing = not (named or binary or owner in ("gzip", "tarfile") or is_os_open(call))
        else:
            missing = name in ("run", "Popen", "check_output") and "text" in words
        unnamed += [f"{path}:{call.lineno}"] * missing
    assert not unnamed


def test_every_file_is_written_beside_and_renamed() -> None:
    """Only rows and logs, which grow, are appended to."""
    direct = [
        f"{path}:{call.lineno}"
        for path, name, call in calls()
        if (name == "open" and set(mode_of(call)) & set("wx") and not is_os_open(call))
        or name in ("write_text", "write_bytes")
        if path.name != "_writing.py" and not ast.unparse(call.func).startswith(("fresh.", "tar"))
    ]
    assert not direct


@pytest.mark.exhaustive  # seven seconds of imports; the tests above read every call
def test_a_run_in_ascii_measures_and_can_be_read_again(tmp_path: Path) -> None:
    suite, run = tmp_path / "s.yaml", tmp_path / "run"
    suite.write_text(SUITE, "utf-8")
    command = [sys.executable, "-P", "-m", "sparsebench", "run", suite, "--device", "sim"]
    done = subprocess.run(
        [*command, "--replicates", "1", "--out", run],
        env=os.environ | ASCII | {"PYTHONWARNDEFAULTENCODING": "1"},
        capture_output=True,
        encoding="ascii",
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "gr??e" in done.stdout
    ours = [line for line in done.stderr.splitlines() if "EncodingWarning" in line]
    assert not [line for line in ours if "sparsebench" in line or str(ROOT) in line.split(":")[0]]
    assert store.read(run).suite["title"] == "größe 行列"
    assert "größe 行列" in (run / "report.html").read_text("utf-8")


@pytest.mark.usefixtures("no_figures")
def test_a_full_disk_leaves_the_old_file_and_the_error_names_it(tmp_path: Path) -> None:
    keep = tmp_path / "keep.html"
    keep.write_text("the old report")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        done = sparsebench("report", PUBLISHED / "nvidia-h200" / "quick", "--out", keep)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert done.returncode == 2
    assert str(keep) in done.stderr
    assert keep.read_text() == "the old report"
    assert os.listdir(tmp_path) == ["keep.html"]


def test_a_full_disk_in_a_run_names_the_file(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))
    try:
        append_to(rows, "a" * 60, sync=True)
        with pytest.raises(OSError, match="File too large") as error:
            append_to(rows, "b" * 60)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert outcome(error.value) == (2, f"{rows}: File too large")


def test_no_output_replaces_an_input_or_another_output(tmp_path: Path) -> None:
    run, page, table = tmp_path / "run", tmp_path / "page.html", tmp_path / "table.csv"
    run.mkdir()
    (run / "rows.jsonl").touch()
    require_apart([page, table, None], [*run.rglob("*"), None])
    for outputs in ([page, tmp_path / "run" / ".." / "page.html"], [run / "rows.jsonl"]):
        with pytest.raises(SparsebenchError, match="of its own"):
            require_apart(outputs, run.rglob("*"))


def test_an_error_while_writing_leaves_the_old_file(tmp_path: Path) -> None:
    file = tmp_path / "file"
    write_file(file, "old")

    def stop(fresh: Path) -> None:
        fresh.write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), replacing(file) as fresh:
        stop(fresh)
    assert file.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link_and_a_mode_stays(tmp_path: Path) -> None:
    file, link = tmp_path / "file", tmp_path / "link"
    file.write_text("old")
    file.chmod(0o640)
    link.symlink_to(file)
    write_file(link, "new \ud800")
    assert link.is_symlink()
    assert file.read_text() == r"new \ud800"
    assert file.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("name", ["a/b", ".", "x" * 300])
def test_a_place_that_cannot_be_written_is_named(name: str, tmp_path: Path) -> None:
    with pytest.raises(OSError, match=name.replace(".", str(tmp_path))) as raised:
        write_file(tmp_path / name, "x")
    assert str(raised.value.filename) == str(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_written_to(tmp_path: Path) -> None:
    read, write = os.pipe()
    write_file(Path(f"/dev/fd/{write}"), "text")
    assert os.read(read, 9) == b"text"
