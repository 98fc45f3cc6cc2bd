"""Every script of experiments ends with one line if an option is wrong."""

import runpy
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
def test_a_wrong_option_gets_one_line(script, options, tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [script, *options])
    with pytest.raises(SystemExit, match=r"^error: [^\n]*$"):
        runpy.run_path(str(ROOT / "experiments" / f"{script}.py"), run_name="__main__")
    assert capfd.readouterr() == ("", "")
