"""The example notebook runs from its first cell to its last."""

from pathlib import Path

import pytest

import sparsebench
from sparsebench.results.run import bundle
from tests.tools.paths import ROOT

nbformat = pytest.importorskip("nbformat", reason="needs nbformat, of the extra `dev`")
nbclient = pytest.importorskip("nbclient", reason="needs nbclient, of the extra `dev`")

NOTEBOOK = ROOT / "harness" / "notebook.ipynb"


def test_the_notebook_shows_what_each_cell_gives_and_its_code_compiles() -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert len(notebook.cells) == 10
    for cell in notebook.cells[1:]:
        assert cell.outputs, cell.source
        compile(cell.source, NOTEBOOK.name, "exec")
    assert "NVIDIA H200, finished" in str(notebook)  # a published run: it ran without a GPU
    assert not bundle.HOME.search(NOTEBOOK.read_text())


@pytest.mark.exhaustive
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    (tmp_path / "harness").mkdir()
    (tmp_path / "results").symlink_to(ROOT / "results")
    resources = {"metadata": {"path": str(tmp_path / "harness")}}
    nbclient.NotebookClient(
        notebook, kernel_name="python3", timeout=600, resources=resources
    ).execute()
    shown = [
        output["data"]
        for cell in notebook.cells
        for output in cell.get("outputs", ())
        if output["output_type"] == "execute_result"
    ]
    text = " ".join(data["text/plain"] for data in shown)
    assert sparsebench.__version__ in text
    assert "finished; cases: " in text
    assert "BlockSparseLinear" in text
    assert sum("<iframe" in data.get("text/html", "") for data in shown) == 2
