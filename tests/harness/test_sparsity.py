"""Suites that read recorded layers: the operands of `ffn` come from a file, with its inputs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.operands import operands, other_draw, redraw
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops._active import share_of_any
from sparsebench.harness.plan.suite import read
from sparsebench.results.record import Contender, Problem, Status
from tests.tools.devices import CPU


def suite(folder: Path, tensor: str, fields: str, op: str = "ffn") -> list[Problem]:
    source = f"source: {{file: '*.safetensors', {tensor}}}, " if tensor else ""
    (folder / "suite.yaml").write_text(
        "schema: sparsebench/suite@1\ntitle: t\n"
        f"problems:\n  - {{op: {op}, {source}{fields}}}\n"
        "contenders:\n  - {format: dense, kernel: torch_dense}\n"
    )
    return [contest.problem for contest in read(str(folder / "suite.yaml"), folder).contests]


FIELDS = "m: 16, dtype: fp32, activation: relu"


def group(**changes: Tensor) -> dict[str, Tensor]:
    """Return the tensors of a layer with 24 units and 8 features, and 50 tokens as its input."""
    draw = torch.Generator().manual_seed(5)
    shapes = {"wg": (24, 8), "wu": (24, 8), "wd": (8, 24), "x": (50, 8)}
    drawn = {name: torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    return {f"a.{name}": tensor for name, tensor in (drawn | changes).items()}


def test_operands_come_from_the_file_and_each_draw_takes_other_rows(tmp_path: Path) -> None:
    tensors = group()
    save_file(tensors, tmp_path / "layer.safetensors")
    (problem,) = suite(tmp_path, "tensor: a", FIELDS)
    on = (tensors["a.x"] @ tensors["a.wg"].T > 0).sum(1)
    assert problem["active"] == pytest.approx(float(on.double().mean()), rel=1e-3)
    assert share_of_any(problem) == problem["active"] / 24
    op = load_op("ffn")
    layer = operands(problem, op, CPU, tmp_path)
    for name in op.weights:
        assert torch.equal(layer.weights[name], tensors[f"a.{name}"])
    x, starts = layer.activations["x"], []
    for draw in (0, 1, 2, 0):
        redraw(problem, op, layer.activations, draw, layer.recordings)
        start = int((tensors["a.x"] == x[0]).all(1).nonzero())
        assert torch.equal(x, torch.cat([tensors["a.x"]] * 2)[start : start + 16])
        starts.append(start)
    assert len(set(starts)) == 3
    assert starts[0] == starts[3]


REFUSED: dict[str, tuple[Any, str, str, str]] = {
    "no group": ({}, "tensor: b", FIELDS, "expected a group 'b'"),
    "no x": ({"x": None}, "tensor: a", FIELDS, "expected a group 'a'"),
    "other sizes": ({"wu": torch.ones(20, 8)}, "tensor: a", FIELDS,
                    "expected a.wu with n = 24; found 20"),
    "other features": ({"x": torch.ones(50, 6)}, "tensor: a", FIELDS,
                       "expected a.x with k = 8; found 6"),
    "active too": ({}, "tensor: a", f"{FIELDS}, active: 8", "expected active to be set once"),
    "all off": ({"wg": torch.zeros(24, 8)}, "tensor: a", FIELDS, "active: expected greater than 0"),
    "silu": ({}, "tensor: a", "m: 16, dtype: fp32", "expected .*activation relu or relu2"),
    "no source": ({}, "", f"n: 24, k: 8, {FIELDS}, active: 8, skew: recorded",
                  "skew: expected 'recorded'"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_suite_refuses_operands_that_do_not_fit(case: str, tmp_path: Path) -> None:
    changes, tensor, fields, message = REFUSED[case]
    tensors = {name: t for name, t in group(**changes).items() if t is not None}
    save_file(tensors, tmp_path / "layer.safetensors")
    with pytest.raises(SuiteError, match=message) as refused:
        suite(tmp_path, tensor, fields)
    assert "\n" not in str(refused.value)


def test_problem_takes_at_most_the_recorded_tokens(tmp_path: Path) -> None:
    save_file(group(), tmp_path / "layer.safetensors")
    with pytest.raises(SuiteError, match=r"problems\[0\]\.m: .*found 51"):
        suite(tmp_path, "tensor: a", "m: 51, dtype: fp32, activation: relu")
    (problem,) = suite(tmp_path, "tensor: a", FIELDS)
    more = replace(problem, fields={**problem.fields, "m": 51})
    with pytest.raises(SuiteError, match=r"expected at least 51 tokens of 8 features, found \[50"):
        operands(more, load_op("ffn"), CPU, tmp_path)


def test_next_draw_plays_other_rows_and_needs_two_tokens(tmp_path: Path) -> None:
    fields, op = "m: 1, dtype: fp32, activation: relu", load_op("ffn")
    save_file(group(x=torch.randn(3, 8)), tmp_path / "layer.safetensors")
    (problem,) = suite(tmp_path, "tensor: a", fields)
    layer, last = operands(problem, op, CPU, tmp_path), 0
    for _ in range(50):
        redraw(problem, op, layer.activations, last, layer.recordings)
        before = layer.activations["x"].clone()
        last = other_draw(last, [*layer.recordings.values()])
        redraw(problem, op, layer.activations, last, layer.recordings)
        assert not torch.equal(layer.activations["x"], before)
    save_file(group(x=torch.ones(1, 8)), tmp_path / "layer.safetensors")
    (problem,) = suite(tmp_path, "tensor: a", fields)
    with pytest.raises(SuiteError, match=r"expected at least 2 tokens of 8 features, found \[1, 8"):
        operands(problem, op, CPU, tmp_path)


def test_contest_runs_on_a_recorded_layer(tmp_path: Path) -> None:
    save_file(group(), tmp_path / "layer.safetensors")
    (problem,) = suite(tmp_path, "tensor: a", FIELDS)
    (row,), _ = contest.run(problem, [Contender("dense", "torch_dense")], CPU, tmp_path)
    assert row.status is Status.OK
    assert row.flops == pytest.approx(2 * 16 * 24 * 8 * (1 + 2 * problem["active"] / 24))
    assert row.dense_flops == 2 * 16 * 24 * 8 * 3


def test_packaged_suite_reads_such_files(tmp_path: Path) -> None:
    x = group()["a.x"].repeat(82, 1)[:4096]
    tensors = {name.replace("a.", "l1_0."): t for name, t in group(x=x).items()}
    save_file(tensors, tmp_path / "layer.safetensors")
    problems = [c.problem for c in read("trained", tmp_path).contests]
    assert [p["m"] for p in problems] == [1, 16, 64, 256, 1024, 4096]
