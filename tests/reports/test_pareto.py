"""Error against speedup: errors from a file that `prune --json` printed, times from a run."""

import json
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pandas as pd
import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.commands import _console
from sparsebench.harness.plan.suite import read as read_suite
from sparsebench.harness.run.measure import measure
from sparsebench.harness.run.run_json import Flags
from sparsebench.reports import build as building
from sparsebench.reports.figures.pareto import front
from sparsebench.results.model_files import PRUNING_SCHEMA, Pruning, read_pruning
from sparsebench.results.run import store
from sparsebench.results.run.store import Run
from tests.simulated.in_process import in_this_process
from tests.tools.command_line import sparsebench
from tests.tools.reports import report_of

SUITE = """
schema: sparsebench/suite@1
title: Simulated
problems:
  - op: linear
    shape: {n: 5120, k: 25600}
    m: [16, 4096]
    dtype: [bf16, fp8]
    pattern: spense_columns
    sparsity: [0, 0.25, 0.5]
contenders:
  - format: spense
    kernel: spense_wgmma
    params: {dense_fraction: $dense_fraction, split: $split}
baselines:
  - {format: dense, kernel: cublas}
"""


def outcome(method: str, dense: float, error: float) -> dict[str, Any]:
    return {
        "method": method,
        "region": "scored",
        "dense": dense,
        "sparsity": (1 - dense) / 2,
        "errors": {"output": error},
        "loss": 2.5 + error,
    }


def document(**changed: object) -> dict[str, Any]:
    outcomes = [outcome("wanda", 1 - error, error / 2) for error in (0.0, 0.5, 1.0)]
    outcomes += [outcome("magnitude", 1 - error, error) for error in (0.0, 0.5, 1.0)]
    names = {"weights": "<model>.gguf", "sha256": "a5fd", "tokens_from": "a book"}
    numbers = {"calibration": 4096, "held_out": 2048, "loss": 2.5}
    return {"schema": PRUNING_SCHEMA, **names, **numbers, "outcomes": outcomes, **changed}


def read(folder: Path, written: object) -> Pruning:
    path = folder / "errors.json"
    path.write_text(json.dumps(written))
    return read_pruning(path)


@pytest.fixture(autouse=True)
def _no_other_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw this figure only, because a whole report takes seconds."""
    this = [figure for figure in building.figures() if figure.name == "pareto"]
    monkeypatch.setattr(building, "figures", lambda: this)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("pareto")
    (folder / "suite.yaml").write_text(SUITE)
    flags = Flags("sim", replicates=1)
    suite = read_suite(str(folder / "suite.yaml"))
    with pytest.MonkeyPatch.context() as patch:
        in_this_process(patch)
        return store.read(measure(suite, flags, folder / "run", None))


def section(page: str) -> str:
    """Return the figure's part of a page, "" where it has none."""
    _, _, after = page.partition('<section id="pareto">')
    return after.partition("</section>")[0]


def test_speed_and_pruning_errors_share_one_panel_per_shape(run: Run, tmp_path: Path) -> None:
    part = section(report_of(run, pruning=read(tmp_path, document())))
    assert part.count("<figure>") == 4
    for words in [
        "m 16 · bf16",
        "m 4096 · fp8",
        "spense/spense_wgmma over dense/cublas",
        "wanda, scored",
        "&lt;model&gt;.gguf",
        "4,096 tokens",
        "2,048 tokens held out of a book",
        "SHA-256 a5fd",
    ]:
        assert words in part
    assert all(part.count(f'text-anchor="end">{label}</text>') == 4 for label in ("50", "100"))


def test_a_fraction_without_error_is_named_and_not_drawn(run: Run, tmp_path: Path) -> None:
    assert section(report_of(run)) == ""
    half = document(outcomes=[outcome("wanda", 0.502, 0.2), outcome("wanda", 0.875, 0.1)])
    part = section(report_of(run, pruning=read(tmp_path, half)))
    assert "errors at 0 %, 100 % dense" in part
    assert part.count("<figure>") == 4
    none = document(outcomes=[outcome("wanda", 0.25, 0.2)])
    part = section(report_of(run, pruning=read(tmp_path, none)))
    assert "errors at 0 %, 50 %, 100 % dense" in part
    assert "<figure>" not in part


def test_a_run_of_one_dense_fraction_has_no_such_figure(run: Run, tmp_path: Path) -> None:
    rows = [row for row in run.rows if row.case.problem["sparsity"] == 0.25]
    part = section(report_of(replace(run, rows=rows), pruning=read(tmp_path, document())))
    assert "this run has 50 %" in part
    assert "<svg" not in part


def test_no_point_beats_the_front_which_includes_the_dense_baseline() -> None:
    points = pd.DataFrame(
        {"speedup": [1.5, 1.3, 1.3, 1.2, 0.9, 1.4], "error": [0.3, 0.1, 0.2, 0.15, 0.0, 0.3]}
    )
    assert front(points).to_numpy().tolist() == [[1.0, 0.0], [1.3, 0.1], [1.5, 0.3]]
    free = pd.DataFrame({"speedup": [1.1], "error": [0.0]})
    assert front(free).to_numpy().tolist() == [[1.1, 0.0]]


@pytest.mark.parametrize(
    ("written", "message"),
    [
        (document(schema="sparsebench/pruning@2"), "schema: .*pruning@1.*found '.*pruning@2'"),
        (document(outcomes=[]), "outcomes: .*at least one value"),
        (document(extra=1), "extra: unknown key"),
        ({"schema": PRUNING_SCHEMA}, "weights: expected a value"),
        (document(outcomes=[outcome("wanda", 1.5, 0.1)]), "outcomes.0.dense: .*found 1.5"),
        (document(outcomes=[outcome("wanda", 0.5, -0.1)]), "errors.output: .*found -0.1"),
        (document(outcomes=[outcome("wanda", 0.5, float("nan"))]), "output: .*finite.*found nan"),
        (
            document(outcomes=[outcome("wanda", 0.5, 0.1) | {"errors": {"gate": 0.1}}]),
            "outcomes.0: expected an error of the 'output'; found gate",
        ),
        ([1, 2], "expected sparsebench/pruning@1"),
    ],
)
def test_an_invalid_errors_file_is_refused_in_one_line(written, message, tmp_path) -> None:
    with pytest.raises(ResultError, match=message) as raised:
        read(tmp_path, written)
    assert str(raised.value).startswith(f"{tmp_path / 'errors.json'}: ")
    assert "\n" not in str(raised.value)


def test_the_command_reads_errors_and_refuses_in_one_line(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "page.html"

    def report(errors: Path) -> CompletedProcess[str]:
        return sparsebench("report", run.path, "--errors", errors, "--out", page)

    good = tmp_path / "good.json"
    good.write_text(json.dumps(document()))
    assert report(good).returncode == 0
    assert "<figure>" in section(page.read_text())
    for text in ["not JSON", "{}"]:
        (tmp_path / "bad.json").write_text(text)
        done = report(tmp_path / "bad.json")
        assert done.returncode == _console.BAD_INPUT
        [line] = done.stderr.splitlines()
        assert "bad.json: expected sparsebench/pruning@1" in line
    done = report(tmp_path / "none.json")
    assert done.returncode == _console.BAD_INPUT
    assert "expected a readable file" in done.stderr
