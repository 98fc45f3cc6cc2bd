"""Which code measures: its commit, and whether anything beside it can change a number."""

import shutil
import subprocess
from pathlib import Path

import pytest

from sparsebench.harness.doctor.findings import no_commit
from sparsebench.harness.machine import code
from sparsebench.harness.machine.code import of_checkout

pytestmark = pytest.mark.skipif(not shutil.which("git"), reason="needs git")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a checkout of two tracked files."""
    for name in ("kernels/mine.py", "README.md", ".gitignore"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("*.pyc\n")
    who = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (["init"], ["add", "."], [*who, "commit", "--message", "All"]):
        subprocess.run(["git", "-C", tmp_path, *command], check=True, capture_output=True)
    return tmp_path


def dirty(tree: Path) -> bool:
    digests = of_checkout(tree)
    assert digests
    assert len(digests["commit"]) == 40
    return bool(digests["dirty"])


@pytest.mark.parametrize(
    ("written", "is_dirty"),
    [
        ("kernels/mine.py", True),
        ("README.md", True),
        ("kernels/theirs.py", True),
        ("formats/theirs.py", True),
        ("kernels/mine.pyc", False),
        ("mine/rows.jsonl", False),
        ("results/published/a-gpu/mine/rows.jsonl", False),
    ],
)
def test_changes_that_make_a_checkout_dirty(tree: Path, written: str, is_dirty: bool) -> None:
    assert not dirty(tree)
    (tree / written).parent.mkdir(parents=True, exist_ok=True)
    (tree / written).write_text("changed\n")
    assert dirty(tree) == is_dirty


@pytest.mark.parametrize(
    "name",
    ["GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE", "GIT_OBJECT_DIRECTORY", "GIT_COMMON_DIR"],
)
def test_a_variable_of_git_names_no_other_repository(name, tree, tmp_path, monkeypatch) -> None:
    right = of_checkout(tree)
    other = tmp_path / "other"
    subprocess.run(["git", "init", "--quiet", other], check=True)
    monkeypatch.setenv(name, str(other / ".git"))
    assert of_checkout(tree) == right
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")  # a broken setting of the caller
    assert of_checkout(tree) == right


def test_a_checkout_that_git_refuses_is_noted(monkeypatch) -> None:
    monkeypatch.setattr(code, "_root", lambda: Path(__file__).parent)
    assert not code.is_refused({"commit": None})
    monkeypatch.setattr(code, "_root", lambda: Path(__file__).parents[2])
    is_checkout = (Path(__file__).parents[2] / ".git").exists()
    assert code.is_refused({"commit": None}) == is_checkout
    assert not code.is_refused({"commit": "c0ffee"})
    assert "safe.directory" in no_commit().do


def test_a_folder_without_history_has_no_commit(tmp_path: Path) -> None:
    assert of_checkout(tmp_path) is None
