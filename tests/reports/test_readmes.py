"""The examples of results/README.md and reports/README.md run, and print what the pages show."""

import re
from dataclasses import fields
from typing import Any

from sparsebench.results.record import Row
from sparsebench.results.run import store
from sparsebench.results.tables.analysis import analyse
from tests.tools.paths import PUBLISHED, ROOT


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_the_example_with_pandas_prints_the_table_below_it(monkeypatch, capsys) -> None:
    monkeypatch.chdir(ROOT)
    (example,) = blocks("results/README.md", "python")
    exec(example, {})
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = (ROOT / "results/README.md").read_text().partition(example)[2]
    assert "\n".join(printed) in shown


def test_every_field_of_a_row_is_in_the_table() -> None:
    text = (ROOT / "results/README.md").read_text()
    assert [f.name for f in fields(Row) if f"`{f.name}`" not in text] == []


def test_the_example_of_a_figure_draws() -> None:
    run = store.read(PUBLISHED / "nvidia-h200" / "ffn-step")
    (example,) = blocks("reports/README.md", "python")
    module: dict[str, Any] = {}
    exec(example, module)
    analysis = analyse(run)
    drawn = module["draw"](analysis)
    assert "Measured on NVIDIA H200." in drawn
    assert len(analysis.timed) > 10
    assert all(label in drawn for label in analysis.timed.label)
