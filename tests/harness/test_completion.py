"""A shell completes names, also where there is no torch yet to wait for."""

import subprocess
import sys
from pathlib import Path

import pytest

from sparsebench._completion import complete
from tests.tools.command_line import sparsebench


@pytest.mark.parametrize(
    ("kind", "begun", "names"),
    [
        ("suite", "decoder", ["decoder", "decoder-8b"]),
        ("kernel", "bsr_wgm", ["bsr_wgmma", "bsr_wgmma_dgrad"]),
        ("model", "llama", ["Llama-3-8B"]),
        ("gpu", "h", ["H100", "H200"]),
        ("gpu", "toaster", []),
    ],
)
def test_a_name_is_completed(kind: str, begun: str, names: list[str]) -> None:
    assert [name for name in complete(kind)(begun) if "/" not in name][: len(names)] == names


def test_a_path_is_completed_beside_names(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").touch()
    assert complete("suite")(f"{tmp_path}/m") == [f"{tmp_path}/mine.yaml"]


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("sparsebench run decoder-", "decoder-8b"),
        ("sparsebench try bsr_wgr", "bsr_wgrad"),
        ("sparsebench advise Qwen3-3", "Qwen3-32B"),
        ("sparsebench advise Qwen3-8B --gpu H2", "H200"),
        ("sparsebench compare H1", "H100"),
    ],
)
def test_bash_gets_names(words: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_SPARSEBENCH_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", words)
    monkeypatch.setenv("COMP_CWORD", str(len(words.split()) - 1))
    assert name in sparsebench().stdout.split()


def test_completion_loads_neither_torch_nor_pandas() -> None:
    code = (
        "import sys; from sparsebench._completion import NAMES\n"
        "assert all([*names()] for names in NAMES.values())\n"
        "print({'torch', 'pandas'} & {*sys.modules})"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, check=True)
    assert done.stdout.strip() == b"set()"
