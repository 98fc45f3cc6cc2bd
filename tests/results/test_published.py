"""What is published can be read, says where it comes from, and is about the bits we draw today."""

from pathlib import Path

import pytest
import torch
from places import PUBLISHED, ROOT

from sparsebench.harness.bench import operands
from sparsebench.harness.catalog import load_op
from sparsebench.reports.picture import picture
from sparsebench.results import bundle, store
from sparsebench.results.inspection import inspect
from sparsebench.results.record import Problem
from sparsebench.results.summary import summarised

RUNS = sorted(path.parent for path in PUBLISHED.rglob("run.json"))


@pytest.mark.parametrize("path", RUNS, ids=lambda p: str(p.relative_to(PUBLISHED)))
def test_a_published_run_is_whole_and_names_its_commit(path: Path) -> None:
    bundle.verify(path)
    run = store.read(path)
    assert list(inspect(run))
    assert run.state["contests"]["done"] == run.state["contests"]["of"]
    assert len(run.rows) == sum(run.state["cases"].values())
    assert len(run.environment["commit"]) == 40
    site = ROOT / "reports" / "site" / path.relative_to(PUBLISHED)
    assert site.with_suffix(".html").exists()


def test_the_figure_of_the_readme_is_drawn_from_a_published_run(tmp_path: Path) -> None:
    run = store.read(PUBLISHED / "nvidia-h200" / "sparsity-4096")
    picture(summarised(run), tmp_path / "speedup.svg")
    assert "blocks of 128" in (tmp_path / "speedup.svg").read_text()


@pytest.mark.parametrize(
    "path", [p for p in RUNS if p.name == "quick"], ids=lambda p: p.parent.name
)
def test_a_cpu_draws_the_bits_that_the_gpu_drew(path: Path) -> None:
    digests: dict[str, tuple[Problem, str]] = {}
    for row in store.read(path).rows:
        if row.digest:
            digests[row.case.problem.id] = row.case.problem, row.digest
    assert len(digests) > 20
    for problem, digest in digests.values():
        drawn = operands.operands(problem, load_op(problem.op), torch.device("cpu"), None)
        assert drawn.digest == digest
