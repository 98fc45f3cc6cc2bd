"""What an outsider computes from the rows alone is what the pages show, and nothing else is."""

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from sparsebench.reports.published._summary import modelled, widened
from sparsebench.results import model_files
from sparsebench.results.model_files import (
    MlpTiming,
    ModelTimings,
    PatternTraining,
    PatternTrainings,
)
from sparsebench.results.store import write_json
from tests import outsider
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED, ROOT, TESTS

PAGE = PUBLISHED / "README.md"
CLAIMS, RUN = ("cusparse-slower", "openai-2017-cublas"), PUBLISHED / "nvidia-h200/sparsity-4096"


def test_every_figure_of_the_pages_is_in_the_rows() -> None:
    found = subprocess.run(
        [sys.executable, TESTS / "outsider.py", ROOT], capture_output=True, text=True, check=False
    )
    assert found.stdout == "every figure is found\n", found.stderr
    assert found.returncode == 0


def test_it_imports_nothing_of_the_project() -> None:
    imported = re.findall(r"^(?:from|import) (\w+)", (TESTS / "outsider.py").read_text(), re.M)
    assert {*imported} - {*sys.stdlib_module_names} == {"numpy", "pandas"}


def next_digit(number: str) -> str:
    """Return a number whose last digit is another one."""
    return number[:-1] + str((int(number[-1]) + 1) % 10)


def changing(group: int) -> Callable[[re.Match[str]], str]:
    """Return what writes a match with another last digit in one of its groups."""

    def change(found: re.Match[str]) -> str:
        start, end = (place - found.start() for place in found.span(group))
        return found[0][:start] + next_digit(found[group]) + found[0][end:]

    return change


CELL, LEAD = r"([\d.]+) \[([\d.]+), ([\d.]+)\]", r"\| 16 \| (\d+) \| (\d+) \| ([\d.]+) \|"
CHANGED = {
    "a figure": (CELL, changing(1)),
    "the end of an interval": (CELL, changing(3)),
    "two rows": (r"\| 16 \| `bsr_small`", lambda found: "| 32 | `bsr_small`"),
    "another kernel": (r"\| 128 \| `bsr_wgmma`", lambda found: "| 128 | `stk`"),
    "a mean": (LEAD, changing(3)),
    "a count": (LEAD, changing(2)),
    "a peer of the headline": (r"`\w+` ([\d.]+) \| NVIDIA", changing(1)),
    "a speed-up of the headline": (CELL + r" \| dense", changing(2)),
    "a card of the list": (r"([0-9a-f]{7}\d) \| \d+ \|", changing(1)),
    "a share of the list": (r"(\d+) of \d+ \|", changing(1)),
    "a slow peer of the list": (r"\d, to ([\d.]+) \|", changing(1)),
    "a table that nobody reads of the list": (r"\| run \| suite ", lambda found: "| what | suite "),
}
PARTS = {"headline": "## Headline", "list": "## Runs"}


@pytest.mark.parametrize("what", CHANGED)
def test_what_is_changed_on_a_page_is_found_out(what: str) -> None:
    pattern, change = CHANGED[what]
    page = PAGE.read_text("utf-8")
    start = page.index(PARTS.get(what.split()[-1], "**4096 tokens.**"))
    part = page[start : page.index("\n## ", start + 1)] + "\n"
    changed, count = re.subn(pattern, change, part, count=1)
    assert count == 1
    assert outsider.checked(part) == []
    assert 1 <= len(outsider.checked(changed)) <= 6  # of a line, at most


def of_files(folder: Path) -> str:
    """Write trainings of three seeds and a whole model below a folder; return their tables."""
    made = []
    for seed in range(3):
        wide = PatternTraining("dense", 1, 0.0, 512, 400, seed, 1.0 + 0.01 * seed, 90.0, 900, 1.0)
        narrow = replace(wide, width=256, parameters=10_000_000, loss=1.1, step_us=30.0 + seed)
        sparse = replace(wide, pattern="uniform", block=32, sparsity=0.797, parameters=9_000_000)
        rings = replace(sparse, pattern="small_world", block=64, loss=1.2 + 0.02 * seed)
        made += [wide, narrow, sparse, rings]
    told = {"steps": 200, "batch": 16, "seeds": 3}
    trained = PatternTrainings(
        model_files.WIDTHS_SCHEMA, "A text", "0" * 64, 9, 9, "NVIDIA H200", told, made
    )
    ways = [
        MlpTiming("forward", "plain", 64, [11e3, 10e3, 12e3], 2**30, 3.0, 0.0),
        MlpTiming("forward", "ffn_sparse way=sparse", 64, [7500.0], 2**29, None, 0.0),
        MlpTiming("forward", "losing", 64, detail="wrong: 3 values lost in 2 layers"),
    ]
    model = {"layers": 2, "width": 64, "hidden": 128, "active": 3}
    whole = ModelTimings(
        model_files.WHOLE_SCHEMA, "NVIDIA H200", "bf16", model, 3.2, ways, [3.0, 3.4]
    )
    texts = []
    for name, found, written in (("training", trained, widened), ("whole", whole, modelled)):
        (folder / name).mkdir()
        write_json(folder / name / "a.json", asdict(found))
        texts.append(written(folder / name / "a.json"))
    return "\n\n".join(texts) + "\n"


FIGURES = {
    "a loss saved": ("8.18 [7.27, 9.09]", "8.18 [7.28, 9.09]"),
    "a step": ("-9.09] | 0.34", "-9.09] | 0.35"),
    "a loss": ("| 1.2200 |", "| 1.2300 |"),
    "a line that is gone": ("| uniform | 32 |", "| uniform | 16 |"),
    "a time": ("| 11 | 5818 |", "| 12 | 5818 |"),
    "an energy": ("| 46.88 |", "| 46.89 |"),
}


def test_figures_of_files_are_found_and_changed_ones_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = of_files(tmp_path)
    monkeypatch.setattr(outsider, "HOME", tmp_path)
    assert outsider.checked(page) == []
    for what, (old, new) in FIGURES.items():
        assert old in page, (what, page)
        assert outsider.checked(page.replace(old, new, 1)), what


COSTS = {
    "the loss of a pruned model": ("| 12.4 % | 2.698 |", "| 12.4 % | 2.699 |"),
    "the error of a pruned model": ("| 16.5 % | 2.864 |", "| 16.6 % | 2.864 |"),
    "the units of a trained model": ("| 19.4 | 535 |", "| 19.5 | 535 |"),
    "the zeros of a layer": ("(97.87)", "(97.88)"),
}


@pytest.mark.parametrize("what", COSTS)
def test_what_is_changed_in_a_record_of_models_is_found_out(what: str) -> None:
    old, new = COSTS[what]
    page = PAGE.read_text("utf-8")
    part = page[page.index("## What pruning costs") :]
    assert old in part
    assert outsider.checked(part) == []
    assert len(outsider.checked(part.replace(old, new, 1))) == 1


def test_the_cells_of_claims_are_in_the_rows(tmp_path: Path) -> None:
    done = sparsebench("claims", "report", *CLAIMS, "--from", RUN, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    for name in CLAIMS:
        page = (tmp_path / "claims" / f"{name}.html").read_text("utf-8")
        assert [*outsider.claimed(page)] == []
        wrong, count = re.subn(r'<td class="num">([\d.]+)×', changing(1), page, count=1)
        assert count == 1
        assert len([*outsider.claimed(wrong)]) == 1


GRID = {  # of a site's index, in the words of its cells
    "a break-even": r'title="[^"]+ against dense: [^":]+: [a-z ]+([\d.]+) %',
    "a speed-up": r'title="[^"]+ at [^"]+?: \w[^",;]*, ([\d.]+)×',
    "the end of an interval": r'title="[^"]+ at [^"]+?: \w[^",;]*, [\d.]+× \[[\d.]+, ([\d.]+)\]',
}


@pytest.mark.exhaustive
def test_every_figure_of_a_sites_index_is_in_the_rows(tmp_path: Path) -> None:
    names = "quick", "sparsity-4096", "spense-two-four"
    shown = [PUBLISHED / "nvidia-h200" / name for name in names]
    done = sparsebench("publish", *shown, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text("utf-8")
    assert page.count('class="cell"') > 10
    assert [*outsider.index(page)] == []
    for what, pattern in GRID.items():
        wrong, count = re.subn(pattern, changing(1), page, count=1)
        assert count == 1, what
        assert len([*outsider.index(wrong)]) == 1, what
    for name in ("formats/bsr.html", "kernels/bsr_small.html", "kernels/ffn_sparse.html"):
        grid = (tmp_path / name).read_text("utf-8")
        assert [*outsider.grids(grid)] == []
        wrong, count = re.subn(GRID["a speed-up"], changing(1), grid, count=1)
        assert (count, len([*outsider.grids(wrong)])) == (1, 1), name
    for file in tmp_path.glob("runs/*/index.html"):
        assert [*outsider.answer(file)] == []
        text = file.read_text("utf-8")
        wrong, count = re.subn(r"([\d.]+)× \[", changing(1), text, count=1)
        file.write_text(wrong, "utf-8")
        assert (count, len([*outsider.answer(file)])) == (1, 1), file
