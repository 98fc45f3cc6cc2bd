"""Tests of train-lm: its text, model, L1 term, unit counts, and suites that read its output."""

import hashlib
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.operands import operands, other_draw, play, redraw
from sparsebench.harness.catalog import load_op
from sparsebench.harness.models import reporting
from sparsebench.harness.models.train_lm.model import Decoder, Sizes
from sparsebench.harness.models.train_lm.text import Text, contexts, evenly, standard_library
from sparsebench.harness.models.train_lm.train import mlp_inputs, train
from sparsebench.harness.models.train_lm.training import FIRST, Settings, count
from sparsebench.harness.ops._active import share_of_any
from sparsebench.harness.plan.suite import read
from sparsebench.results.record import Contender, Problem, Status
from tests.tools.command_line import output, refusal

CPU = torch.device("cpu")
SIZES = Sizes(layers=2, width=32, hidden=96, heads=2, context=32)
SETTINGS = Settings(SIZES, steps=60, batch=8, held_out=48, learning_rate=3e-3)


@pytest.fixture(scope="module")
def text() -> Text:
    return standard_library()


@pytest.fixture(scope="module")
def tokens(text: Text) -> Tensor:
    return evenly(text.unseen, 12, SIZES.context)


# ---- the text ----


def test_every_16th_file_is_held_out_and_the_digest_covers_both_parts(tmp_path: Path) -> None:
    for number in range(33):
        (tmp_path / f"m{number:02}.py").write_text(f"{number:02}\n")
    for name in ("test/a.py", "site-packages/b.py", "encodings/c.py", "_sysconfigdata_d.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("left out")
    text = standard_library(tmp_path)
    seen, unseen = (bytes(part.tolist()) for part in (text.seen, text.unseen))
    assert unseen == b"15\n31\n"
    assert seen == b"".join(b"%02d\n" % number for number in range(33) if number % 16 != 15)
    assert text.sha256 == hashlib.sha256(seen + unseen).hexdigest()


def test_folder_without_sources_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match=r"expected at least 16 source files of Python; found 0"):
        standard_library(tmp_path)


def test_contexts_are_slices_without_overlap() -> None:
    numbers = torch.arange(100, dtype=torch.uint8)
    slices = contexts(numbers, torch.tensor([3, 40]), 4).tolist()
    assert slices == [[3, 4, 5, 6, 7], [40, 41, 42, 43, 44]]
    assert evenly(numbers, 3, 4)[:, 0].tolist() == [0, 30, 60]
    assert evenly(numbers, 99, 4).flatten().tolist() == list(range(100))


# ---- the model ----


def test_attention_is_causal(tokens: Tensor) -> None:
    model, inputs = Decoder(SIZES, 0), tokens[:2, :-1].clone()
    before, _ = model(inputs)
    inputs[:, 20] ^= 1
    after, _ = model(inputs)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_l1_term_sums_over_units_and_averages_layers_and_tokens(tokens: Tensor) -> None:
    model, sums = Decoder(SIZES, 0), []

    def watch(number: int, z: Tensor, gates: Tensor) -> None:
        layer = model.layers[number]
        g = linear(z, layer.wg)
        assert torch.equal(gates, g.clamp(min=0))
        pairs = [(c, t) for c in range(2) for t in range(5)]
        h = [g[place].clamp(min=0) * (layer.wu @ z[place]) for place in pairs]
        sums.append(sum(float(units.abs().sum()) for units in h) / len(pairs))

    with torch.no_grad():
        _, term = model(tokens[:2, :5], watch)
    assert float(term) == pytest.approx(sum(sums) / SIZES.layers, rel=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_seed_determines_the_initial_weights(seed: int) -> None:
    first, second = Decoder(SIZES, 0), Decoder(SIZES, seed)
    assert torch.equal(first.output, second.output) == (seed == 0)


def test_counts_match_the_gates(tokens: Tensor) -> None:
    model, on = Decoder(SIZES, 3), {}
    with torch.no_grad():
        model.layers[1].wg[:5] = 0  # five dead units
        logits, _ = model(tokens[:, :-1], lambda n, _, gates: on.update({n: gates > 0}))
    loss, layers = count(model, tokens, replace(SETTINGS, batch=5))
    assert loss == pytest.approx(
        float(cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
    )
    for number, layer in enumerate(layers):
        sums = on[number].sum(-1).double()
        assert layer.active == pytest.approx(float(sums.mean()))
        assert layer.zeros == pytest.approx(1 - float(on[number].double().mean()))
        assert layer.dead == int((~on[number].flatten(0, 1).any(0)).sum())
        assert layer.most == int(sums.max())
        assert layer.first == pytest.approx(sums.mean(0)[:FIRST].tolist())
        assert layer.rest == pytest.approx(float(sums[:, FIRST:].mean()))
    assert layers[1].dead >= 5
    z = mlp_inputs(model, tokens[:, :-1], 1)
    assert z.shape == (12 * SIZES.context, SIZES.width)
    recomputed = linear(z.float(), model.layers[1].wg) > 0
    assert (recomputed == on[1].flatten(0, 1)).float().mean() > 0.99  # z is stored in bf16


# ---- the training ----


def test_training_lowers_the_loss_and_l1_turns_units_off(text: Text) -> None:
    untrained, _ = count(Decoder(SIZES, 0), evenly(text.unseen, 48, SIZES.context), SETTINGS)
    assert untrained == pytest.approx(math.log(256), abs=0.1)
    _, plain = train(text, 0.0, SETTINGS, CPU)
    _, sparse = train(text, 3e-2, SETTINGS, CPU)
    assert plain.loss < 3.5
    assert sparse.loss < plain.loss + 0.2
    assert sparse.mean("zeros") > plain.mean("zeros") + 0.1


def test_training_is_deterministic_on_the_cpu(text: Text) -> None:
    short = replace(SETTINGS, steps=5)
    (model, first), (other, second) = (train(text, 1e-3, short, CPU) for _ in range(2))
    assert replace(first, seconds=0) == replace(second, seconds=0)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


def test_diverged_training_is_reported(text: Text) -> None:
    wild = replace(SETTINGS, steps=3, learning_rate=math.inf)
    with pytest.raises(SuiteError, match=r"l1 0: .*nan"):
        train(text, 0.0, wild, CPU)


# ---- the command, and suites that read its output ----


TINY = {"layers": 2, "width": 32, "hidden": 96, "heads": 2, "context": 32, "batch": 8}
SMALL = ["--device=cpu", *(f"--{name}={size}" for name, size in TINY.items())]


def test_suite_reads_the_output_of_the_command(tmp_path: Path) -> None:
    out = tmp_path / "lm.safetensors"
    options = *SMALL, "--steps", 2, "--l1", "0,1e-3", "--out", out, "--json"
    report = json.loads(output("train-lm", *options))
    assert report["schema"] == "sparsebench/sparsity@1"
    assert [one["l1"] for one in report["trained"]] == [0, 1e-3]
    assert [len(one["layers"]) for one in report["trained"]] == [2, 2]
    assert report["settings"]["sizes"]["hidden"] == 96
    assert report["held_out"] == 1024 * 32
    first, second = suite(tmp_path, "tensor: 'l1_*'", "m: 64, dtype: bf16, activation: relu")
    assert [first.source.tensor, second.source.tensor] == ["l1_0", "l1_0.001"]
    assert (first["n"], first["k"], first["skew"]) == (96, 32, "recorded")
    stored = load_file(out)
    assert stored["l1_0.x"].shape == (4096, 32)
    assert first["active"] == pytest.approx(report["trained"][0]["layers"][1]["active"], rel=0.03)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--l1 0,few", "l1: expected"),
        ("--l1 -1", "found '-1'"),
        ("--l1 nan", "found 'nan'"),
        ("--l1 1e-3,0.001", "found '1e-3,0.001'"),
        ("--l1 1e-3,1.0000001e-3", "once"),
        ("--width 36 --heads 4", "found 36"),
        ("--out nowhere/x.safetensors", "nowhere"),
        ("--out .", "found a directory"),
    ],
)
def test_command_refuses_bad_input_in_one_line(arguments: str, message: str) -> None:
    assert message in refusal("train-lm", "--device", "cpu", *arguments.split())


def test_a_read_only_folder_is_refused_before_the_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(SuiteError, match="expected a folder to write into; found one that is read"):
        reporting.require_writable(tmp_path / "x.safetensors")


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
    recording = torch.arange(3.0)[:, None]
    x, last = torch.empty(1, 1), 0
    for _ in range(50):
        draw = other_draw(last, [recording])
        play(recording, x, last)
        before = float(x)
        play(recording, x, draw)
        assert float(x) != before
        last = draw
    save_file(group(x=torch.ones(1, 8)), tmp_path / "layer.safetensors")
    (problem,) = suite(tmp_path, "tensor: a", "m: 1, dtype: fp32, activation: relu")
    with pytest.raises(SuiteError, match=r"expected at least 2 tokens of 8 features, found \[1, 8"):
        operands(problem, load_op("ffn"), CPU, tmp_path)


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


@pytest.mark.gpu
def test_gpu_trains_like_the_cpu(text: Text) -> None:
    _, on_cpu = train(text, 3e-2, SETTINGS, CPU)
    model, on_gpu = train(text, 3e-2, SETTINGS, torch.device("cuda:0"))
    assert on_gpu.loss == pytest.approx(on_cpu.loss, abs=0.1)
    assert on_gpu.mean("zeros") == pytest.approx(on_cpu.mean("zeros"), abs=0.1)
    assert model.norm.is_cuda
