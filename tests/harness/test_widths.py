"""train-lm --pattern: block-sparse decoders beside dense ones of equal width and parameters."""

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.models.train_lm import blocks, widths
from sparsebench.harness.models.train_lm.blocks import (
    Blocks,
    decoder,
    fan_in,
    links,
    pattern,
    stored,
)
from sparsebench.harness.models.train_lm.model import Sizes
from sparsebench.kernels.nn.linear import BlockSparseLinear
from sparsebench.results.model_files import PatternTraining, PatternTrainings, read_widths
from tests.tools.command_line import sparsebench

CPU = torch.device("cpu")
SIZES = Sizes(layers=1, width=128, hidden=256, heads=8, context=16)
SMALL = "--layers 1 --width 128 --hidden 256 --heads 8 --context 16 --batch 64 --steps 3 --block 8"


@pytest.mark.parametrize("name", blocks.PATTERNS)
def test_weights_are_squares_of_equally_many_blocks(name: str) -> None:
    asked = Blocks(name, 8, 0.8)  # type: ignore[arg-type]
    found = pattern(48, 16, asked, torch.Generator().manual_seed(0))
    squares = found.view(3, 16, 16)
    assert squares.sum((1, 2)).tolist() == [3 * 16] * 3
    assert not torch.equal(squares[0], squares[1])
    across = pattern(16, 32, asked, torch.Generator().manual_seed(0))
    assert across.sum() == 2 * 3 * 16
    if name == "small_world":
        assert squares.diagonal(dim1=1, dim2=2).all()
        assert torch.equal(squares, squares.mT)
    else:
        assert (squares.sum(2) == 3).all()


@pytest.mark.parametrize(
    ("nodes", "sparsity", "said"),
    [
        (3, 0.5, "expected at least 4 of them in a row; found 3"),
        (8, 0.8, "expected 0.625, the nearest of 8 blocks in a row; found 0.8"),
    ],
)
def test_a_graph_that_cannot_be_is_refused(nodes: int, sparsity: float, said: str) -> None:
    assert links(64, 0.9) == 3
    with pytest.raises(SuiteError, match=said):
        links(nodes, sparsity)


def test_a_weight_that_is_no_blocks_is_refused() -> None:
    with pytest.raises(SuiteError, match="expected a multiple of the block, 12; found 384 and 128"):
        decoder(SIZES, Blocks("uniform", 12, 0.8), 0)
    odd = replace(SIZES, hidden=192)
    with pytest.raises(SuiteError, match="hidden: expected a multiple of the width"):
        decoder(odd, Blocks("uniform", 8, 0.8), 0)


def test_weights_start_and_learn_by_their_fan_in() -> None:
    model = decoder(SIZES, Blocks("small_world", 8, 0.8), 3, CPU)
    layer = model.layers[0]
    assert isinstance(layer.wg, BlockSparseLinear)
    assert fan_in(layer.wg) == 128 * 3 / 16
    assert fan_in(layer.wd) == 256 * 3 / 16
    expected = 0.02 * (512 / 24) ** 0.5
    assert float(stored(layer.wg).detach().std()) == pytest.approx(expected, rel=0.05)
    groups = widths._optimizer(model, widths.Settings(SIZES), CPU).param_groups
    rates = sorted({group["lr"] for group in groups})
    assert rates == pytest.approx([1e-3, 1e-3 * 512 / 48, 1e-3 * 512 / 24])


def test_a_sparse_decoder_computes_what_its_dense_twin_does() -> None:
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


def test_dense_equals_are_as_narrow_as_parameters_allow() -> None:
    asked = Blocks("uniform", 8, 0.8)
    (_, none), (sizes, own), (narrow, dense) = widths.models(SIZES, [asked])
    assert (none, own, dense) == (None, asked, None)
    wanted = widths.parameters(decoder(sizes, own, 0))
    assert widths.parameters(decoder(narrow, None, 0)) >= wanted
    narrower = replace(
        narrow, width=narrow.width - 16, hidden=2 * (narrow.width - 16), heads=narrow.heads - 1
    )
    assert widths.parameters(decoder(narrower, None, 0)) < wanted


def test_the_command_writes_what_is_read(tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    given = f"{SMALL} --sparsity 0.8 --seeds 2 --pattern small_world,uniform --device cpu"
    done = sparsebench("train-lm", *given.split(), "--out", file)
    assert "to equal parameters" in done.stdout
    found = read_widths(file)
    assert len(found.trained) == 2 * 4
    sparse = [one for one in found.trained if one.pattern == "small_world"]
    for one in sparse:
        wide, narrow = found.dense_match(one, "width"), found.dense_match(one, "parameters")
        assert wide
        assert narrow
        assert (wide.width, wide.seed) == (128, one.seed)
        assert one.parameters <= narrow.parameters < wide.parameters
    assert sparse[0].sparsity == pytest.approx(13 / 16, abs=1e-6)


def test_the_command_prints_json(tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    given = f"{SMALL} --sparsity 0.8 --seeds 1 --pattern uniform --device cpu"
    done = sparsebench("train-lm", *given.split(), "--out", file, "--json")
    assert json.loads(done.stdout) == asdict(read_widths(file))


def test_learning_makes_the_loss_smaller() -> None:
    text = widths.standard_library()
    unseen = widths.evenly(text.unseen, 8, 16)
    settings = widths.Settings(SIZES, steps=1, batch=8)
    asked = Blocks("small_world", 8, 0.8)
    begun = widths.train(text, unseen, asked, settings, CPU)
    trained = widths.train(text, unseen, asked, replace(settings, steps=60), CPU)
    assert trained.loss < begun.loss - 0.5
    again = widths.train(text, unseen, asked, replace(settings, steps=60), CPU)
    assert again.loss == trained.loss


def one(**changed: object) -> PatternTraining:
    facts = {
        **{"pattern": "dense", "block": 1, "sparsity": 0.0, "width": 64, "parameters": 100},
        **{"seed": 0, "loss": 1.0, "step_us": 2.0, "peak_bytes": 0, "seconds": 1.0},
    }
    return PatternTraining(**{**facts, **changed})  # type: ignore[arg-type]


def test_dense_is_never_given_less() -> None:
    dense = [one(), one(width=32, parameters=30), one(width=40, parameters=45), one(seed=1)]
    sparse = one(pattern="uniform", block=8, sparsity=0.6, parameters=40)
    about = "sparsebench/widths@1", "a text", "0", 1, 1, "cpu", {}
    found = PatternTrainings(*about, [*dense, sparse])  # type: ignore[arg-type]
    beside = found.dense_match(sparse, "parameters")
    assert beside
    assert beside.width == 40
    assert found.dense_match(replace(sparse, parameters=101), "parameters") is None
    assert found.dense_match(replace(sparse, seed=2), "width") is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"loss": -1}, "trained: 0: loss: Input should be greater than 0; found '-1'"),
        ({"more": 1}, "trained: 0: more: "),
    ],
)
def test_a_file_that_is_wrong_is_one_line(
    change: dict[str, object], said: str, tmp_path: Path
) -> None:
    about = "sparsebench/widths@1", "a text", "0", 1, 1, "cpu", {}
    data = asdict(PatternTrainings(*about, [one()]))  # type: ignore[arg-type]
    data["trained"][0] |= change
    file = tmp_path / "a.json"
    file.write_text(json.dumps(data))
    with pytest.raises(ResultError) as refused:
        read_widths(file)
    assert said in str(refused.value)
    assert str(file) in str(refused.value)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--pattern rings", "pattern: expected some of small_world, uniform; found 'rings'"),
        ("--pattern uniform --sparsity 1", "sparsity: expected numbers with commas; found '1'"),
    ],
)
def test_bad_input_is_one_line(arguments: str, said: str) -> None:
    done = sparsebench("train-lm", *SMALL.split(), *arguments.split())
    assert done.returncode == 2
    assert said in done.stderr + done.stdout
