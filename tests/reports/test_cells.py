"""The search over published cells result what was measured, and says so if a cell is missing."""

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest
import torch

from sparsebench.errors import ResultError
from sparsebench.harness.run import try_kernel
from sparsebench.reports import cells
from sparsebench.reports.site.cards import run_lines
from sparsebench.results.run import store
from sparsebench.results.tables.analysis import analyse
from tests.tools.command_line import output, refusal
from tests.tools.paths import PUBLISHED

MISSING = "2:4 14336x4096 m=64 H100"


@pytest.fixture(scope="module")
def every() -> Sequence[cells.CellRecord]:
    return cells.packaged_cells()


def of_run(*names: str) -> list[dict[str, Any]]:
    parts = []
    for number, name in enumerate(names):
        run = analyse(store.read(PUBLISHED / "nvidia-h200" / name))
        parts.append(run_lines(run, name).assign(verdict=number == 0))
    return cells.cells(pd.concat(parts))


def test_a_cell_has_the_fastest_case_of_its_row_and_the_command_that_measures_it() -> None:
    (cell, *_) = cells.find(of_run("decode"), "blocks block=64 m=1 90 % 14336x4096").cells
    run = analyse(store.read(PUBLISHED / "nvidia-h200" / "decode"))
    alike = run.timed[run.timed.case_id == cell["case"]]
    assert len(alike)
    assert cell["speedup"] in cell["answer"]
    assert cell["winner"].startswith(alike.name.iloc[0])
    assert cell["commands"][0].startswith('sparsebench run decode --only "')


def test_of_two_runs_of_a_problem_the_verdict_counts() -> None:
    every = of_run("sparsity-64-confirmed", "sparsity-64")
    heads = [cell["head"] for cell in every]
    assert len(heads) == len({*heads})
    confirmed = {cell["head"] for cell in of_run("sparsity-64-confirmed")}
    assert all(cell["verdict"] == (cell["head"] in confirmed) for cell in every)


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("64 tokens", ["m=64"]),
        ("14336 × 4096", ["n=14336", "k=4096"]),
        ("14336x4096, 90 %", ["n=14336", "k=4096", "sparsity=0.9"]),
        ("block=16x64 2:4", ["block=16x64", "2:4"]),
        ("n=11008 M=1", ["n=11008", "m=1"]),
    ],
)
def test_a_query_names_sizes_as_people_write_them(query: str, words: list[str]) -> None:
    assert cells.query_words(query) == words


def test_a_cell_that_fits_has_every_word(every: Sequence[cells.CellRecord]) -> None:
    result = cells.find(every, "bsr 4096x4096 m=4096 90% bf16 H200 block=64")
    assert not result.differs
    for cell in result.cells:
        sizes = {"m": "4096", "n": "4096", "k": "4096", "sparsity": "0.9", "block": "64"}
        assert sizes.items() <= cell["fields"].items()
        assert "H200" in cell["head"]
    gains = [cell["gain"] for cell in result.cells if cell["verdict"]]
    assert gains == sorted(gains, reverse=True)


@pytest.mark.parametrize("words", ["H200", "m=1 H200", "fp8 51200x5120 H100", "spense m=64"])
@pytest.mark.parametrize("row", ["2:4", "half 2:4"])
def test_a_format_is_not_another_whose_name_contains_it(every, row: str, words: str) -> None:
    result = cells.find(every, f"{row} {words}")
    assert {cell["row"] for cell in result.cells} == {row}
    if row == "2:4" and result.differs:
        assert " pattern=two_four " in result.command


def test_int4_in_2_4_is_neither_int4_nor_2_4(every: Sequence[cells.CellRecord]) -> None:
    for query in ("2:4 int4", "int4 2:4", "2:4", "int4"):
        rows = {cell["row"] for cell in cells.find(every, f"{query} m=1 H200").cells}
        assert rows == {"2:4 int4" if " " in query else query}


def test_a_query_for_the_pattern_of_a_format_finds_it(every: Sequence[cells.CellRecord]) -> None:
    result = cells.find(every, "2:4 spense_hidden m=64 H200")
    assert not result.differs
    assert {cell["row"] for cell in result.cells} == {"half 2:4"}


def test_the_first_line_says_that_a_cell_is_of_another_format(every) -> None:
    query = "2:4 ffn m=64 H200"
    result = cells.find(every, query)
    assert result.differs == ["format half 2:4 in place of 2:4"]
    assert not result.command  # the cell's trial measures half 2:4
    shown = output("find", *query.split())
    assert result.differs[0] in shown.splitlines()[0]
    assert "sparsebench try" not in shown


def test_a_missing_cell_says_so_and_names_the_nearest_and_the_command(every) -> None:
    result = cells.find(every, MISSING)
    assert result.differs == ["n 11008 in place of 14336"]
    assert "11008 × 4096, 2:4" in result.cells[0]["head"]
    assert " n=14336 k=4096 " in result.command
    assert " m=64 " in result.command
    shown = output("find", *MISSING.split())
    assert shown.startswith("Not measured. The nearest cell has n 11008 in place of 14336.")
    assert result.command in shown


@pytest.mark.parametrize(
    ("query", "token"),
    [
        ("m=64 h1000", "did you mean h100?"),
        ("2:4 m=-64 h100", "m=-64"),
        ("2:4 m=nan h100", "m=nan"),
        ("spense_wgma", "did you mean spense_wgmma?"),
        ("2:4 a100", "new-gpu"),
        ("mi300x", "NVIDIA GPUs"),
        ("foo=3", "'foo=3'"),
        (" ", "found none"),
    ],
)
def test_a_word_that_no_cell_has_gets_one_line(query: str, token: str) -> None:
    assert token in refusal("find", query)


def test_every_trial_is_a_command_that_try_accepts(every: Sequence[cells.CellRecord]) -> None:
    """One of each kernel and op; a kernel of others is not installed here."""
    trials = {}
    for cell in every:
        trial = cell["commands"][-1]
        if trial.startswith("sparsebench try"):
            kernel, *words = trial.split()[2:]
            trials[kernel, words[0]] = words
    assert len(trials) > 30
    for (kernel, _), words in trials.items():
        assert try_kernel.plan(kernel, words, torch.device("cuda")).contenders


def test_a_trial_of_a_model_names_the_format_of_its_cell(every: Sequence[cells.CellRecord]) -> None:
    """Kernels of models run several formats; the first of them is not that of each cell."""
    rows = {"2:4": "spense", "half 2:4": "spense", "blocks of 64": "bsr"}
    trials = [
        (rows[cell["row"]], cell["commands"][-1].split())
        for cell in every
        if " serving_transformers " in cell["commands"][-1] and cell["row"] in rows
    ]
    assert {stored for stored, _ in trials} == {"spense", "bsr"}
    assert all(f"format={stored}" in words for stored, words in trials)


def test_no_text_of_a_cell_can_end_the_script() -> None:
    script = cells.script([{"head": "</script><b>"}])
    assert "<" not in script
    with pytest.raises(ResultError, match="expected a GPU"):
        cells.find([{"fields": {}, "terms": {}, "row": "", "verdict": True, "gain": 0}], "x")
