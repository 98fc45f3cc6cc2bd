"""Error against speedup: errors from a file that `prune --json` printed, times from a run."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from sparsebench.errors import ResultError
from sparsebench.harness.commands import _console
from sparsebench.reports.build import frames_of
from sparsebench.reports.figures import pareto
from sparsebench.results.model_files import PRUNING_SCHEMA, Pruning, read_pruning
from sparsebench.results.run import store
from tests.tools.command_line import sparsebench
from tests.tools.paths import PUBLISHED

RUN = PUBLISHED / "nvidia-h200" / "spense-pareto"  # 2 contenders, 0 to 100 % dense


def outcome(method: str, dense: float, error: float) -> dict[str, Any]:
    sizes = {"region": "scored", "dense": dense, "sparsity": (1 - dense) / 2}
    return {"method": method, **sizes, "errors": {"output": error}, "loss": 2.5 + error}


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


def drawn(pruning: Pruning | None) -> str:
    return str(pareto.draw(frames_of(store.read(RUN), pruning)))


def test_speed_and_pruning_errors_share_a_panel_per_contender(tmp_path: Path) -> None:
    part = drawn(read(tmp_path, document()))
    assert part.count("<figure>") == 2
    for words in [
        "spense/spense_wgmma over dense/cublas",
        ">wanda, scored</text>",
        ">magnitude, scored</text>",
        "&lt;model&gt;.gguf (SHA-256 a5fd)",
        "4,096 tokens",
        "2,048 tokens held out of a book",
        "not drawn: errors at 12.5 %, 25 %, 75 % dense",
    ]:
        assert words in part
    assert all(part.count(f'text-anchor="end">{label}</text>') == 2 for label in ("50", "100"))


def test_a_fraction_without_error_is_named_and_not_drawn(tmp_path: Path) -> None:
    assert drawn(None) == ""
    half = document(outcomes=[outcome("wanda", 0.502, 0.2), outcome("wanda", 0.9, 0.1)])
    part = drawn(read(tmp_path, half))
    assert "errors at 0 %, 12.5 %, 25 %, 75 %, 100 % dense" in part
    assert part.count("<figure>") == 2
    assert "<figure>" not in drawn(read(tmp_path, document(outcomes=[outcome("wanda", 0.9, 0.2)])))


def test_a_run_without_dense_fractions_has_no_errors(tmp_path: Path) -> None:
    quick = frames_of(store.read(RUN.with_name("quick")), read(tmp_path, document()))
    assert "this run has none" in pareto.draw(quick)


def test_no_point_beats_the_front_which_includes_the_dense_baseline() -> None:
    points = pd.DataFrame(
        {"speedup": [1.5, 1.3, 1.3, 1.2, 0.9, 1.4], "error": [0.3, 0.1, 0.2, 0.15, 0.0, 0.3]}
    )
    assert pareto.front(points).to_numpy().tolist() == [[1.0, 0.0], [1.3, 0.1], [1.5, 0.3]]
    free = pd.DataFrame({"speedup": [1.1], "error": [0.0]})
    assert pareto.front(free).to_numpy().tolist() == [[1.1, 0.0]]


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


def test_the_command_reads_errors_and_refuses_in_one_line(tmp_path: Path) -> None:
    page, good = tmp_path / "page.html", tmp_path / "good.json"
    good.write_text(json.dumps(document()))
    (tmp_path / "bad.json").write_text("not JSON")
    done = sparsebench("report", RUN, "--errors", good, "--out", page)
    assert done.returncode == 0
    assert "wanda, scored" in page.read_text()
    for name, message in (("bad", "expected sparsebench/pruning@1"), ("no", "a readable file")):
        path = tmp_path / f"{name}.json"
        done = sparsebench("report", RUN, "--errors", path, "--out", page)
        assert done.returncode == _console.BAD_INPUT
        [line] = done.stderr.splitlines()
        assert f"{name}.json: " in line
        assert message in line
