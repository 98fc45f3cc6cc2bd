"""Tests of pruning: patterns, methods, dense regions, and the command."""

import hashlib
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sparsebench.errors import SparsebenchError, SuiteError
from sparsebench.harness.models.pruning import methods
from sparsebench.harness.models.pruning.files import prune_file
from sparsebench.harness.models.pruning.layer import (
    GatedMLP,
    Pruned,
    Pruner,
    linear_errors,
    mlp_errors,
    prune_linear,
    prune_mlp,
)
from sparsebench.harness.models.pruning.methods import METHODS
from sparsebench.results.model_files import read_pruning
from tests.tools.command_line import output, refusal

K, H, TOKENS = 64, 256, 1024
RECIPES = [
    Pruner(method, dense, which)
    for method in METHODS
    for dense, which in ((0.0, "last"), (0.5, "last"), (0.5, "scored"))
]


@pytest.fixture(scope="module")
def x() -> Tensor:
    """Return correlated inputs of different scales; the second half is held out."""
    draw = torch.Generator().manual_seed(1)
    mixed = torch.randn(K, K, generator=draw) @ torch.diag(torch.logspace(0, -1.5, K))
    scales = torch.logspace(-0.5, 0.5, K)[torch.randperm(K, generator=draw)]
    return torch.randn(2 * TOKENS, K, generator=draw) @ mixed.T * scales


@pytest.fixture(scope="module")
def mlp() -> GatedMLP:
    draw = torch.Generator().manual_seed(2)
    sizes = torch.logspace(-0.3, 0.3, H)[torch.randperm(H, generator=draw), None]
    gate, up, down = (torch.randn(H, K, generator=draw) * sizes / 8 for _ in range(3))
    return GatedMLP(gate, up, down.T.contiguous())


def bits(weight: Tensor) -> Tensor:
    return weight.contiguous().view(torch.int32)


def is_two_four(weight: Tensor) -> bool:
    return bool(((weight != 0).unflatten(-1, (-1, 4)).sum(-1) <= 2).all())


def best_two(scores: list[float]) -> set[int]:
    return set(sorted(range(4), key=lambda i: (-scores[i], i))[:2])


@pytest.mark.parametrize("method", ["magnitude", "wanda"])
def test_masks_match_brute_force(method: str, x: Tensor) -> None:
    weight = torch.randn(6, K, generator=torch.Generator().manual_seed(3))
    weight[0, :4] = 1.0  # among equal scores, the first are kept
    pruned = METHODS[method](weight, x, 32, methods.TWO_FOUR)
    norms = x.norm(dim=0) if method == "wanda" else torch.ones(K)
    for row in range(6):
        for start in range(0, 32, 4):
            scores = [abs(float(weight[row, j] * norms[j])) for j in range(start, start + 4)]
            for i in range(4):
                expected = weight[row, start + i] if i in best_two(scores) else 0
                assert pruned[row, start + i] == expected
    assert torch.equal(pruned[:, 32:], weight[:, 32:])


def by_definition(weight: Tensor, x: Tensor, columns: int) -> Tensor:
    """Prune by the definition of SparseGPT, with H^-1 of the remaining inputs at every column."""
    weight, inverse = weight.double(), (x.double().T @ x.double())
    inverse += 0.01 * inverse.diagonal().mean() * torch.eye(len(inverse))
    inverse = torch.linalg.inv(inverse)
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for i in range(weight.shape[1]):
        if i % 4 == 0 and i < columns:
            ahead, sizes = inverse.clone(), []
            for j in range(i, i + 4):
                sizes.append(ahead[j, j].clone())
                ahead -= torch.outer(ahead[:, j], ahead[j]) / ahead[j, j]
            saliency = weight[:, i : i + 4].square() / torch.stack(sizes)
            mask[:, i : i + 4] = ~methods.TWO_FOUR.mask(saliency)
        error = weight[:, i].where(mask[:, i], 0) / inverse[i, i]
        weight = weight - torch.outer(error, inverse[i])
        inverse = inverse - torch.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return weight.masked_fill(mask, 0)


@pytest.mark.parametrize("columns", [160, 132, 0])
def test_spensegpt_in_blocks_matches_its_definition(columns: int) -> None:
    draw = torch.Generator().manual_seed(4)
    mixed = torch.randn(160, 160, generator=draw) / 8 + torch.eye(160)
    inputs = torch.randn(400, 160, generator=draw) @ mixed
    weight = torch.randn(24, 160, generator=draw)
    pruned = methods.spensegpt(weight, inputs, columns)
    expected = by_definition(weight, inputs, columns).float()
    assert torch.equal(pruned == 0, expected == 0)
    torch.testing.assert_close(pruned, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("text", "sparsity"), [("0.7", 0.7), ("6:8", 0.25), ("16x16:0.75", 0.75)])
def test_a_pattern_reaches_its_sparsity_in_whole_groups(method, text, sparsity, mlp, x) -> None:
    pruned = prune_mlp(mlp, x[:TOKENS], Pruner(method, 0.0, "last", text))
    for weight in (torch.cat(pruned.weights[:2]), pruned.weights[2]):
        mask = weight != 0
        assert float(mask.float().mean()) == pytest.approx(1 - sparsity, abs=0.01)
        if text == "6:8":
            assert mask.unflatten(-1, (-1, 8)).sum(-1).unique().tolist() == [6]
        elif text != "0.7":
            blocks = mask.unflatten(0, (-1, 16)).unflatten(-1, (-1, 16)).float().mean((1, 3))
            assert blocks.unique().tolist() == [0, 1]
        elif method != "spensegpt":
            columns = weight.shape[1]
            assert {*mask.sum(1).tolist()} == {columns - round(sparsity * columns)}


@pytest.mark.parametrize(
    "text", ["8:4", "4:4", "0:4", "2:0", "2:4:8", "4x8:0.5", "0x0:0.5", "4x4:1", "0", "1.5", "nan"]
)
def test_unknown_pattern_is_refused(text: str) -> None:
    with pytest.raises(SuiteError, match=r"pattern: expected N:M"):
        Pruner(pattern=text)


@pytest.mark.parametrize(("text", "sizes"), [("6:8", "68"), ("16x16:0.5", "24x64")])
def test_a_pattern_that_does_not_divide_the_weight_is_refused(text: str, sizes: str) -> None:
    weight = torch.randn(24, 68 if text == "6:8" else 64)
    with pytest.raises(SuiteError, match=sizes):
        METHODS["magnitude"](weight, weight, weight.shape[1], methods.PruningPattern.of(text))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_sparse_region_is_2_4_and_the_dense_region_last(recipe, mlp, x) -> None:
    pruned = prune_mlp(mlp, x[:TOKENS], recipe)
    sparse = H - pruned.dense
    assert pruned.dense == recipe.dense * H
    assert torch.equal(pruned.permutation.sort().values, torch.arange(H))
    assert is_two_four(pruned.weights[0][:sparse])
    assert is_two_four(pruned.weights[1][:sparse])
    assert is_two_four(pruned.weights[2][:, :sparse])
    order = pruned.permutation[sparse:]
    assert torch.equal(pruned.weights[0][sparse:], mlp.gate[order])
    assert torch.equal(pruned.weights[1][sparse:], mlp.up[order])
    compensated = recipe.method == "spensegpt" and pruned.dense > 0
    assert torch.equal(pruned.weights[2][:, sparse:], mlp.down[:, order]) == (not compensated)
    for weight in pruned.weights:
        assert torch.equal(bits(weight) == 0, weight == 0)  # no -0.0


@pytest.mark.parametrize("dense", [0.0, 0.5])
def test_spensegpt_beats_wanda_beats_magnitude(dense: float, mlp: GatedMLP, x: Tensor) -> None:
    errors = {
        method: mlp_errors(mlp, prune_mlp(mlp, x[:TOKENS], Pruner(method, dense)), x[TOKENS:])
        for method in METHODS
    }
    output = [errors[method]["output"] for method in ("spensegpt", "wanda", "magnitude")]
    assert 0 < output[0] < output[1] < output[2] < 1


def test_scores_sum_three_normalised_parts(mlp: GatedMLP, x: Tensor) -> None:
    pruned = prune_mlp(mlp, x, Pruner("wanda", 0.5, "scored"))
    norms, hidden = x.norm(dim=0), mlp.hidden(x).norm(dim=0)
    scores = torch.zeros(H)
    for part in (
        [float((mlp.gate[i].abs() * norms).mean()) for i in range(H)],
        [float((mlp.up[i].abs() * norms).mean()) for i in range(H)],
        [float((mlp.down[:, i].abs() * hidden[i]).mean()) for i in range(H)],
    ):
        scores += torch.tensor(part) / (sum(part) / H)
    assert set(pruned.permutation[H // 2 :].tolist()) == set(scores.topk(H // 2).indices.tolist())
    assert (pruned.permutation[: H // 2].diff() > 0).all()


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("split", ["rows", "columns"])
def test_linear_layer_is_split_by_rows_or_columns(split, recipe, mlp, x) -> None:
    weight = mlp.gate if split == "rows" else torch.randn(48, K)
    pruned = prune_linear(weight, x[:TOKENS], recipe, split)
    features = H if split == "rows" else K
    sparse = features - pruned.dense
    assert pruned.dense == recipe.dense * features
    assert sorted(pruned.permutation.tolist()) == list(range(features))
    (w,) = pruned.weights
    region = w[:sparse] if split == "rows" else w[:, :sparse]
    assert is_two_four(region)
    assert 0 < linear_errors(weight, pruned, x[TOKENS:], split)["output"] < 1


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_kept_and_minus_zero_becomes_zero(method: str, mlp: GatedMLP, x: Tensor) -> None:
    gate = mlp.gate.clone()
    gate[:, 0] = -0.0
    pruned = prune_mlp(replace(mlp, gate=gate).to(torch.bfloat16), x.bfloat16(), Pruner(method))
    for weight in pruned.weights:
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight.view(torch.int16) == 0, weight == 0)


def test_inputs_that_are_always_zero_are_pruned_first(x: Tensor) -> None:
    dead = x.clone()
    dead[:, 1] = 0
    pruned = methods.spensegpt(torch.ones(8, K), dead, K)
    assert pruned.isfinite().all()
    assert (pruned[:, 1] == 0).all()


def test_invalid_weights_inputs_and_options_are_refused(mlp: GatedMLP, x: Tensor) -> None:
    with_nan = mlp.gate.clone()
    with_nan[3, 5] = float("nan")
    odd = GatedMLP(mlp.gate[:250], mlp.up[:250], mlp.down[:, :250])
    refused = [
        (lambda: replace(mlp, gate=with_nan), "gate: expected finite values, found 1 that are not"),
        (lambda: replace(mlp, up=mlp.up[:128]), r"up: expected \[256, 64\], found .* \[128, 64\]"),
        (lambda: replace(mlp, gate=mlp.gate.int()), "gate: expected a floating-point matrix"),
        (lambda: replace(mlp, activation="gelu"), "did you mean"),
        (lambda: prune_mlp(odd, x, Pruner()), "multiple of 4 features, found 250"),
        (lambda: prune_mlp(mlp, x[:, :60], Pruner()), r"expected \[tokens, 64\], found"),
        (lambda: prune_mlp(mlp, x[:0], Pruner("wanda")), r"expected \[tokens, 64\], found"),
        (lambda: prune_mlp(mlp, x[:63], Pruner()), "at least 64 calibration tokens.*found 63"),
        (lambda: prune_mlp(mlp, x * 0, Pruner()), "found only zeros"),
        (lambda: prune_linear(mlp.gate, x, Pruner(), "tiles"), "split: expected one of rows, col"),
        (lambda: Pruner("sparsegpt"), "method: expected .*did you mean spensegpt"),
        (lambda: Pruner(region="first"), "region: expected one of last, scored; found 'first'"),
        (lambda: Pruner(dense=1.5), "dense: expected a fraction of 0 to 1, found 1.5"),
        (lambda: prune_mlp(mlp, x, Pruner("wanda", pattern="0.999")), "of every 64 to stay"),
    ]
    for attempt, message in refused:
        with pytest.raises(SuiteError, match=message):
            attempt()


@pytest.fixture
def files(tmp_path: Path, mlp: GatedMLP, x: Tensor) -> tuple[Path, Path]:
    weights, activations = tmp_path / "weights.safetensors", tmp_path / "x.safetensors"
    save_file({"g": mlp.gate, "u": mlp.up, "d": mlp.down}, weights)
    save_file({"x": x}, activations)
    return weights, activations


def test_command_prunes_an_mlp_of_a_file(files, tmp_path, mlp, x) -> None:
    weights, activations = files
    options = weights, "--tensors", "g,u,d", "--calibration", activations, "--device", "cpu"
    out = tmp_path / "pruned.safetensors"
    printed = output("prune", *options, "--out", out, "--json")
    report = json.loads(printed)
    assert (report["calibration"], report["held_out"], report["loss"]) == (1536, 512, None)
    (tmp_path / "errors.json").write_text(printed)
    saved = read_pruning(tmp_path / "errors.json")
    assert asdict(saved) == report
    assert (saved.weights, saved.tokens_from) == ("weights.safetensors:g,u,d", "x.safetensors")
    assert saved.sha256 == hashlib.sha256(weights.read_bytes()).hexdigest()
    expected = prune_mlp(mlp, x[:1536], Pruner())
    with safe_open(out, framework="pt") as file:
        metadata = {"method": "spensegpt", "pattern": "2:4", "region": "scored", "dense": "128"}
        assert file.metadata() == metadata
        assert torch.equal(file.get_tensor("g"), expected.weights[0])
        assert torch.equal(file.get_tensor("d"), expected.weights[2])
        assert torch.equal(file.get_tensor("permutation"), expected.permutation)
    lists = "--method", "magnitude,wanda", "--dense", "0,0.5", "--pattern", "2:4,0.7"
    outcomes = json.loads(output("prune", *options, *lists, "--json"))["outcomes"]
    assert len({(o["method"], o["pattern"], o["sparsity"]) for o in outcomes}) == 8
    assert len(output("prune", *options, *lists[:2]).splitlines()) == 4


def test_command_prunes_a_linear_layer(files: tuple[Path, Path], tmp_path: Path) -> None:
    weights, activations = files
    out = tmp_path / "pruned.safetensors"
    options = "--tensors", "g", "--calibration", activations, "--split", "rows", "--device", "cpu"
    assert "output" in output("prune", weights, *options, "--method", "wanda", "--out", out)
    with safe_open(out, framework="pt") as file:
        assert is_two_four(file.get_tensor("g")[:128])


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tensors", "g,u"], "expected --tensors with three"),
        (["--tensors", "g,u,e"], "expected a tensor 'e'"),
        (["--tensors", "g,u,d", "--dense", "0,1", "--out", "y"], "expected one recipe"),
        (["--tensors", "g,u,d", "--method", "wand"], "did you mean wanda?"),
        (["--tensors", "g,u,d", "--out", "/nowhere/y"], "expected a folder to write into"),
    ],
)
def test_command_refuses_bad_input_in_one_line(files, more, message) -> None:
    weights, activations = files
    more = [*more, "--calibration", str(activations), "--device", "cpu"]
    assert message in refusal("prune", weights, *more)


@pytest.mark.parametrize("method", ["magnitude", "wanda", "spensegpt"])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_values_are_pruned_like_others(method: str, size: float, x: Tensor) -> None:
    weight, recipe = torch.randn(32, 64), Pruner(method, 0.25)
    usual = prune_linear(weight, x, recipe, "rows")
    power = 2.0 ** round(math.log2(size))
    for scaled in (
        prune_linear(weight * power, x, recipe, "rows"),
        prune_linear(weight, x * power, recipe, "rows"),
    ):
        assert torch.equal(scaled.weights[0] != 0, usual.weights[0] != 0)
    right = linear_errors(weight, usual, x, "rows")["output"]
    tiny = prune_linear(weight * power, x, recipe, "rows")
    assert linear_errors(weight * power, tiny, x, "rows")["output"] == pytest.approx(
        right, rel=1e-4
    )


def refuse(weights: Path, name: str, calibration: Path, to: Path, message: str) -> None:
    with pytest.raises(SparsebenchError, match=message):
        prune_file(
            weights, [Pruner()], torch.device("cpu"), names=[name], calibration=calibration, to=to
        )


def test_a_tensor_named_permutation_is_refused_before_work(tmp_path: Path) -> None:
    weights, calibration = tmp_path / "w.safetensors", tmp_path / "x.safetensors"
    save_file({"permutation": torch.randn(32, 64)}, weights)
    save_file({"x": torch.randn(128, 64)}, calibration)
    refuse(weights, "permutation", calibration, tmp_path / "out.safetensors", "permutation")
    assert not (tmp_path / "out.safetensors").exists()


def test_prune_never_overwrites_its_input(files: tuple[Path, Path], tmp_path: Path) -> None:
    weights, calibration = files
    before = weights.read_bytes()
    (tmp_path / "linked.safetensors").symlink_to(weights)
    for out in (weights, tmp_path / "linked.safetensors", calibration):
        refuse(weights, "u", calibration, out, "expected an output file of its own")
    assert weights.read_bytes() == before


def test_hidden_units_that_pruning_turned_off_are_no_error_of_down() -> None:
    gate, x = -torch.ones(8, 8), torch.ones(4, 8)
    mlp = GatedMLP(gate, torch.ones(8, 8), torch.ones(8, 8), "relu")
    live = GatedMLP(gate.abs(), mlp.up, mlp.down, "relu")
    errors = mlp_errors(live, Pruned(mlp.weights, torch.arange(8), 0), x)
    assert (errors["down"], errors["output"]) == (0, 1)
