"""Tests of pruning: patterns, methods, dense regions, and the command."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning import methods
from sparsebench.harness.models.pruning.layer import (
    GatedMLP,
    Pruned,
    Pruner,
    mlp_errors,
    prune_mlp,
)
from sparsebench.harness.models.pruning.methods import METHODS
from tests.tools.command_line import refusal

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


def test_invalid_inputs_and_options_are_refused(mlp: GatedMLP, x: Tensor) -> None:
    odd = GatedMLP(mlp.gate[:250], mlp.up[:250], mlp.down[:, :250])
    with_nan = mlp.gate.clone()
    with_nan[3, 5] = float("nan")
    bad = replace(mlp, gate=with_nan)
    refused = [
        (lambda: prune_mlp(bad, x, Pruner()), "gate: expected finite values, found 1 that are not"),
        (lambda: prune_mlp(odd, x, Pruner()), "multiple of 4 features, found 250"),
        (lambda: prune_mlp(mlp, x / 0, Pruner()), "expected finite values, found"),
        (lambda: prune_mlp(mlp, x[:63], Pruner()), "at least 64 calibration tokens.*found 63"),
        (lambda: prune_mlp(mlp, x * 0, Pruner()), "found only zeros"),
        (lambda: Pruner("sparsegpt"), "method: expected .*did you mean spensegpt"),
        (lambda: Pruner(region="first"), "region: expected one of last, scored; found 'first'"),
        (lambda: Pruner(dense=1.5), "dense: expected a fraction of 0 to 1, found 1.5"),
        (lambda: prune_mlp(mlp, x, Pruner("wanda", pattern="0.999")), "of every 64 to stay"),
    ]
    for attempt, message in refused:
        with pytest.raises(SuiteError, match=message):
            attempt()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--dense", "0,1", "--out", "y"], "expected one recipe"),
        (["--method", "wand"], "did you mean wanda?"),
        (["--out", "/nowhere/y"], "expected a folder to write into"),
        (["--tensors", "g,u,d"], "no such option: prune --tensors; `prune` takes a model"),
        ([], "expected a .gguf file or the directory of a model, found another file"),
    ],
)
def test_command_refuses_bad_input_in_one_line(more, message, tmp_path) -> None:
    (tmp_path / "w.safetensors").touch()
    assert message in refusal("prune", tmp_path / "w.safetensors", *more, "--device", "cpu")


@pytest.mark.parametrize("method", ["magnitude", "wanda", "spensegpt"])
@pytest.mark.parametrize("size", [1e-30, 1e30])
def test_tiny_and_huge_values_are_pruned_like_others(method: str, size: float, x: Tensor) -> None:
    weight, power = torch.randn(32, 64), 2.0 ** round(math.log2(size))
    usual = METHODS[method](weight, x, 48, methods.TWO_FOUR)
    for scaled in (
        METHODS[method](weight * power, x, 48, methods.TWO_FOUR),
        METHODS[method](weight, x * power, 48, methods.TWO_FOUR),
    ):
        assert torch.equal(scaled != 0, usual != 0)


def test_hidden_units_that_pruning_turned_off_are_no_error_of_down() -> None:
    gate, x = -torch.ones(8, 8), torch.ones(4, 8)
    mlp = GatedMLP(gate, torch.ones(8, 8), torch.ones(8, 8), "relu")
    live = GatedMLP(gate.abs(), mlp.up, mlp.down, "relu")
    errors = mlp_errors(live, Pruned(mlp.weights, torch.arange(8), 0), x)
    assert (errors["down"], errors["output"]) == (0, 1)
