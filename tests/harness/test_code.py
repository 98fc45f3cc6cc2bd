"""Which code measures: its commit, and whether anything beside it can change a number."""

import shutil
import subprocess
from pathlib import Path

import pytest

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


def test_a_folder_without_history_has_no_commit(tmp_path: Path) -> None:
    assert of_checkout(tmp_path) is None
