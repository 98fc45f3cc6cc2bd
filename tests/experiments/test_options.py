"""Every script of experiments ends with one line if an option is wrong."""

import subprocess
import sys

import pytest

from tests.tools.paths import ROOT

MODEL, OUT = "model.gguf", "missing/out.json"


@pytest.mark.parametrize(
    ("script", "options"),
    [
        ("recover_model", [MODEL, "--out", OUT]),
        ("quantize_model", [MODEL, "--out", OUT]),
        ("selection_quality", [MODEL, "--out", OUT]),
        ("serve_vllm", ["--loads", "8:4"]),
    ],
)
def test_a_wrong_option_gets_one_line(script, options, tmp_path, monkeypatch) -> None:
    command = [sys.executable, str(ROOT / "experiments" / f"{script}.py"), *options]
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)  # scripts import each other
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 1
    assert [line[:7] for line in done.stderr.splitlines()] == ["error: "]
