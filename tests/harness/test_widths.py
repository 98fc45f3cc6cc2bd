"""Tests of train-lm --pattern: block-sparse decoders and dense ones of equal width or size."""

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.models.train_lm import blocks, widths
from sparsebench.harness.models.train_lm.blocks import (
    Blocks,
    decoder,
    elements_of,
    fan_in,
    links,
    pattern,
)
from sparsebench.harness.models.train_lm.model import Sizes
from sparsebench.harness.models.train_lm.text import samples
from sparsebench.harness.models.train_lm.training import Settings, adamw, batches
from sparsebench.kernels.nn.linear import BlockSparseLinear
from sparsebench.results.model_files import PatternTraining, PatternTrainings, read_widths
from tests.tools.command_line import refusal, sparsebench

CPU = torch.device("cpu")
SIZES = Sizes(layers=1, width=128, hidden=256, heads=8, context=16)
TINY = Sizes(layers=1, width=64, hidden=64, heads=2, context=16)
SMALL = (
    "--layers 1 --width 64 --hidden 64 --heads 8 --context 16 --batch 64 --steps 2"
    " --block 8 --sparsity 0.625"
)


@pytest.mark.parametrize("name", blocks.PATTERNS)
def test_patterns_are_squares_with_equal_block_counts(name: str) -> None:
    blocks = Blocks(name, 8, 0.8)  # type: ignore[arg-type]
    mask = pattern(48, 16, blocks, torch.Generator().manual_seed(0))
    squares = mask.view(3, 16, 16)
    assert squares.sum((1, 2)).tolist() == [3 * 16] * 3
    assert not torch.equal(squares[0], squares[1])
    across = pattern(16, 32, blocks, torch.Generator().manual_seed(0))
    assert across.sum() == 2 * 3 * 16
    if name == "small_world":
        assert squares.diagonal(dim1=1, dim2=2).all()
        assert torch.equal(squares, squares.mT)
    else:
        assert (squares.sum(2) == 3).all()


@pytest.mark.parametrize(
    ("nodes", "sparsity", "message"),
    [(3, 0.5, "at least 4 .*found 3"), (8, 0.8, "expected 0.625.*found 0.8")],
)
def test_impossible_graphs_are_refused(nodes: int, sparsity: float, message: str) -> None:
    assert links(64, 0.9) == 3
    with pytest.raises(SuiteError, match=message):
        links(nodes, sparsity)


def test_sizes_that_blocks_do_not_divide_are_refused() -> None:
    with pytest.raises(SuiteError, match="the block, 12; found one of 384x128"):
        decoder(SIZES, Blocks("uniform", 12, 0.8), 0)
    odd = replace(SIZES, hidden=192)
    with pytest.raises(SuiteError, match="hidden: expected a multiple of the width"):
        decoder(odd, Blocks("uniform", 8, 0.8), 0)


def test_deviation_and_learning_rate_follow_the_fan_in() -> None:
    model = decoder(SIZES, Blocks("small_world", 8, 0.8), 3, CPU)
    layer = model.layers[0]
    assert isinstance(layer.wg, BlockSparseLinear)
    assert fan_in(layer.wg) == 128 * 3 / 16
    assert fan_in(layer.wd) == 256 * 3 / 16
    expected = 0.02 * (512 / 24) ** 0.5
    assert float(elements_of(layer.wg).detach().std()) == pytest.approx(expected, rel=0.05)
    groups = adamw(model, Settings(SIZES), blocks.fan_ins(model)).param_groups
    rates = sorted({group["lr"] for group in groups})
    assert rates == pytest.approx([1e-3, 1e-3 * 512 / 48, 1e-3 * 512 / 24])


def test_sparse_decoder_matches_its_dense_copy() -> None:
    model = decoder(SIZES, Blocks("uniform", 8, 0.8), 1, CPU)
    twin = decoder(SIZES, None, 1, CPU)
    for layer, dense in zip(model.layers, twin.layers, strict=True):
        for name in blocks.WEIGHTS:
            weight = getattr(layer, name).to_dense().weight
            getattr(dense, name).data.copy_(weight)
    twin.embedding.data.copy_(model.embedding)
    twin.output.data.copy_(model.output)
    tokens = torch.randint(256, (2, 16))
    assert torch.allclose(model(tokens)[0], twin(tokens)[0], atol=1e-5)


def test_dense_match_is_the_narrowest_with_enough_parameters() -> None:
    blocks = Blocks("uniform", 8, 0.8)
    (_, none), (sizes, sparse), (narrow, dense) = widths.models(SIZES, [blocks])
    assert (none, sparse, dense) == (None, blocks, None)
    needed = widths.parameters(decoder(sizes, sparse, 0))
    assert widths.parameters(decoder(narrow, None, 0)) >= needed
    narrower = replace(
        narrow, width=narrow.width - 16, hidden=2 * (narrow.width - 16), heads=narrow.heads - 1
    )
    assert widths.parameters(decoder(narrower, None, 0)) < needed


@pytest.mark.parametrize("seeds", [1, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_command_writes_a_readable_file(seeds: int, tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    options = f"{SMALL} --seeds {seeds} --pattern small_world,uniform --device cpu --json"
    done = sparsebench("train-lm", *options.split(), "--out", file)
    report = read_widths(file)
    assert json.loads(done.stdout) == asdict(report)
    assert len(report.trained) == seeds * 4
    assert len(widths.table(report).rows) == 4
    sparse = [row for row in report.trained if row.pattern == "small_world"]
    for row in sparse:
        wide, narrow = (report.dense_match(row, equal) for equal in ("width", "parameters"))
        assert wide
        assert narrow
        assert (wide.width, wide.seed) == (64, row.seed)
        assert row.parameters <= narrow.parameters < wide.parameters
    assert sparse[0].sparsity == pytest.approx(5 / 8, abs=1e-6)


def test_training_lowers_the_loss_and_is_deterministic() -> None:
    text = widths.standard_library()
    settings = Settings(TINY, steps=20, batch=4, learning_rate=3e-3, held_out=8)
    blocks = Blocks("small_world", 16, 0.25)
    start = widths.train(text, blocks, replace(settings, steps=1), CPU)
    first, second = (widths.train(text, blocks, settings, CPU) for _ in range(2))
    assert first.loss < start.loss - 0.5
    assert second.loss == first.loss


def training(**changed: object) -> PatternTraining:
    facts = {
        **{"pattern": "dense", "block": 1, "sparsity": 0.0, "width": 64, "parameters": 100},
        **{"seed": 0, "loss": 1.0, "step_us": 2.0, "peak_bytes": 0, "seconds": 1.0},
    }
    return PatternTraining(**{**facts, **changed})  # type: ignore[arg-type]


def report_of(*trained: PatternTraining) -> PatternTrainings:
    return PatternTrainings("sparsebench/widths@1", "a text", "0", 1, 1, "cpu", {}, [*trained])


def test_dense_match_never_has_fewer_parameters() -> None:
    dense = [training(seed=seed) for seed in (0, 1)]
    dense += [training(width=32, parameters=30), training(width=40, parameters=45)]
    sparse = training(pattern="uniform", block=8, sparsity=0.6, parameters=40)
    report = report_of(*dense, sparse)
    match = report.dense_match(sparse, "parameters")
    assert match
    assert match.width == 40
    assert report.dense_match(replace(sparse, parameters=101), "parameters") is None
    assert report.dense_match(replace(sparse, seed=2), "width") is None


@pytest.mark.parametrize(
    ("step_us", "width"), [(2.0, 64), (1.9, 64), (1.5, None), (1.0, 40), (0.95, 40), (2.1, None)]
)
def test_dense_match_of_equal_time_is_never_faster(step_us: float, width: int | None) -> None:
    dense = [training(), training(width=40, step_us=1.0), training(width=32, step_us=0.5)]
    sparse = training(pattern="uniform", block=8, sparsity=0.6, step_us=step_us)
    match = report_of(*dense, sparse).dense_match(sparse, "time")
    assert (match and match.width) == width


def test_samples_are_whole_contexts_and_every_16th_is_held_out(tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.uint8)[:, None] + np.zeros(20, dtype=np.uint8)
    np.save(tmp_path / "digits.npy", rows)
    report = widths.train_widths(
        [], Settings(TINY, 1, 4, held_out=8), 1, CPU, dense=[32], data=tmp_path / "digits.npy"
    )
    assert (report.text, report.bytes, report.held_out) == ("digits", 38 * 20, 2 * 19)
    assert [one.width for one in report.trained] == [TINY.width, 32]
    text = samples(tmp_path / "digits.npy")
    settings = Settings(replace(TINY, context=19), 3, 4)
    for tokens in batches(text, settings, CPU):
        assert (tokens == tokens[:, :1]).all()
        assert not {15, 31} & {*tokens.flatten().tolist()}


@pytest.mark.parametrize(
    "rows", [np.zeros((40, 20)), np.zeros(40, np.uint8), np.zeros((8, 20), np.uint8), b"text"]
)
def test_a_file_that_holds_no_samples_is_refused(rows: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.npy"
    file.write_bytes(rows) if isinstance(rows, bytes) else np.save(file, rows)
    with pytest.raises(SuiteError, match=r"a\.npy: expected uint8 \[samples, bytes\]"):
        samples(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"loss": -1}, "trained.0.loss: "), ({"more": 1}, "trained.0.more: ")],
)
def test_invalid_file_is_refused(change: dict[str, object], message: str, tmp_path: Path) -> None:
    data = asdict(report_of(training()))
    data["trained"][0] |= change
    file = tmp_path / "a.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ResultError) as refused:
        read_widths(file)
    assert message in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--pattern rings", "found 'rings'"),
        ("--pattern uniform --sparsity 1", "sparsity: expected"),
        ("--pattern uniform --dense 63", "dense: expected"),
        ("--pattern uniform --data nowhere.npy", "found none"),
        ("--pattern uniform --data pyproject.toml", "not .npy"),
        ("--data nowhere.npy", "--data: expected --pattern"),
        ("--dense 64", "--dense: expected --pattern"),
    ],
)
def test_command_refuses_bad_input(arguments: str, message: str) -> None:
    assert message in refusal("train-lm", *SMALL.split(), *arguments.split())
