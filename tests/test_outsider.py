"""What an outsider computes from the rows alone is what the pages show, and nothing else is."""

import re
import subprocess
import sys
from pathlib import Path

import outsider
import pytest
from command import sparsebench
from places import PUBLISHED, ROOT, TESTS

PAGE = PUBLISHED / "README.md"


def test_every_figure_of_the_pages_is_in_the_rows() -> None:
    found = subprocess.run(
        [sys.executable, TESTS / "outsider.py", ROOT], capture_output=True, text=True, check=False
    )
    assert found.stdout == "every figure is found\n", found.stderr
    assert found.returncode == 0


def test_it_imports_nothing_of_the_project() -> None:
    imported = re.findall(r"^(?:from|import) (\w+)", (TESTS / "outsider.py").read_text(), re.M)
    assert {*imported} - {*sys.stdlib_module_names} == {"numpy", "pandas"}


CHANGED = {
    "a figure": ("1.178 [1.175, 1.183]", "1.179 [1.175, 1.183]"),
    "the end of an interval": ("2.76 [2.75, 2.76]", "2.76 [2.75, 2.78]"),
    "a number of processes": (" (7 processes)", ""),
    "two rows": ("| 16 | `bsr_small` | 0.755", "| 32 | `bsr_small` | 0.755"),
    "another kernel": ("| 128 | `bsr_wgmma` | 1.696", "| 128 | `stk` | 1.696"),
    "a mean": ("| 16 | 6 | 5 | 1.64 |", "| 16 | 6 | 5 | 1.65 |"),
    "a count": ("| 16 | 6 | 5 | 1.64 |", "| 16 | 6 | 6 | 1.64 |"),
    "a peer of the headline": ("`stk` 3.55", "`stk` 3.56"),
    "a speed-up of the headline": ("5.58 [5.54, 5.60] | dense", "5.58 [5.53, 5.60] | dense"),
}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_changed_on_a_page_is_found_out(what: str) -> None:
    old, new = CHANGED[what]
    page = PAGE.read_text("utf-8")
    of = {"headline": "## Headline", "processes": "**`bsr_triton`, before"}
    titles = (title for word, title in of.items() if word in what)
    start = page.index(next(titles, "**4096 tokens.**"))
    part = page[start : page.index("\n## ", start + 1)] + "\n"
    assert old in part
    assert outsider.checked(part) == []
    assert 1 <= len(outsider.checked(part.replace(old, new, 1))) <= 6  # of a line, at most


@pytest.mark.exhaustive
def test_every_figure_of_a_sites_index_is_in_the_rows(tmp_path: Path) -> None:
    shown = [PUBLISHED / "nvidia-h200" / name for name in ("quick", "spense-two-four")]
    done = sparsebench("publish", *shown, "--to", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text("utf-8")
    assert page.count('class="cell"') > 10
    assert [*outsider.index(page)] == []
    cells = re.findall(r"spense_wgmma, (1\.\d+)×", page)
    wrong = page.replace(f"spense_wgmma, {cells[0]}×", "spense_wgmma, 1.01×")
    assert [*outsider.index(wrong)]
