"""The script experiments/train_lm.py on tiny models: what it writes is what the readers expect."""

import json
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("transformers", reason="needs the extra `models`")

import byte_decoder
import torch
import train_lm
from byte_decoder import Blocks, Sizes, decoder, pattern
from safetensors.torch import load_file

from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.plan.suite import read
from sparsebench.results.files import read_model
from sparsebench.results.model_files import SPARSITY_SCHEMA, L1Trainings, read_widths

SIZES = {"layers": 2, "width": 64, "hidden": 128, "heads": 4, "context": 32}
TINY = {**SIZES, "batch": 4, "steps": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def _few_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_decoder, "HELD_OUT", 8)


def test_sparse_models_stand_beside_dense_ones(tmp_path: Path) -> None:
    file = tmp_path / "widths.json"
    options = {"pattern": "small_world", "block": "8", "sparsity": "0.6", "seeds": 1}
    train_lm.main(**TINY, **options, dense="32", out=file)
    report = read_widths(file)
    [sparse] = [one for one in report.trained if one.pattern != "dense"]
    wide, narrow = (report.dense_match(sparse, equal) for equal in ("width", "parameters"))
    assert wide
    assert narrow
    assert (wide.width, sparse.width, sparse.sparsity) == (64, 64, 5 / 8)
    assert sparse.parameters <= narrow.parameters < wide.parameters
    assert 32 in [one.width for one in report.trained]
    assert (report.data, report.held_out) == ("text", 8 * 32)
    assert report.settings["sizes"] == SIZES


def test_samples_are_whole_contexts_and_every_16th_is_held_out(tmp_path: Path) -> None:
    rows = np.arange(40, dtype=np.uint8)[:, None] + np.zeros(20, dtype=np.uint8)
    np.save(tmp_path / "digits.npy", rows)
    text = byte_decoder.samples(tmp_path / "digits.npy")
    assert (text.name, len(text.seen), text.row) == ("digits", 38 * 20, 20)
    assert {*text.held_out(19).flatten().tolist()} == {15, 31}
    np.save(tmp_path / "digits.npy", rows.astype(float))
    with pytest.raises(SuiteError, match=r"digits\.npy: expected uint8 .*; found float64"):
        byte_decoder.samples(tmp_path / "digits.npy")


def test_a_suite_reads_the_middle_mlps_and_their_inputs(tmp_path: Path, capsys) -> None:
    out = tmp_path / "lm.safetensors"
    train_lm.main(**TINY, l1="0,1e-3", out=out)
    printed = tmp_path / "printed.json"
    printed.write_text(capsys.readouterr().out)
    report = read_model(printed, L1Trainings, SPARSITY_SCHEMA)
    assert [one.l1 for one in report.trained] == [0, 1e-3]
    layer = report.trained[0].layers[1]
    assert layer.zeros == pytest.approx(1 - layer.active / 128)
    stored = load_file(out)
    on = torch.nn.functional.linear(*(stored[f"l1_0.{n}"].float() for n in ("x", "wg"))) > 0
    assert float(on.sum(1).float().mean()) == pytest.approx(layer.active, rel=0.05)
    (tmp_path / "suite.yaml").write_text(
        "schema: sparsebench/suite@1\ntitle: t\nproblems:\n  - {op: ffn, source: "
        "{file: '*.safetensors', tensor: 'l1_*'}, m: 64, dtype: bf16, activation: relu}\n"
        "contenders:\n  - {format: dense, kernel: torch_dense}\n"
    )
    problems = [each.problem for each in read(str(tmp_path / "suite.yaml"), tmp_path).contests]
    assert [problem.source.tensor for problem in problems] == ["l1_0", "l1_0.001"]


def test_prune_reads_the_model_of_a_folder(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "small"
    with models.quiet(models.transformers_for(folder)):
        train_lm.main(**TINY, l1="0", out=folder)
    [trained] = json.loads(capsys.readouterr().out)["trained"]
    loaded = models.load(folder, torch.device("cpu"))
    assert loaded.unit == "byte"
    tokens = byte_decoder.standard_library().held_out(32)
    losses = [models.loss_of(loaded.model, row[None]) for row in tokens]
    assert sum(losses) / len(losses) == pytest.approx(trained["loss"], rel=1e-5)
    words = "def f(x):\n    return 'é'"
    assert loaded.tokenizer(words)["input_ids"] == [*words.encode()]


def test_more_l1_turns_units_off_and_equal_seeds_give_equal_weights() -> None:
    settings = {"sizes": SIZES, "steps": 60, "batch": 8}
    text, cpu = byte_decoder.standard_library(), torch.device("cpu")
    layers = []
    for l1 in (0.0, 3e-2):
        model = decoder(Sizes(**SIZES), None, 0, cpu)
        outcome, counts = byte_decoder.train(model, text, settings, 0, l1)
        assert outcome["loss"] < 4.5
        layers.append(counts)
    assert layers[1][0].zeros > layers[0][0].zeros
    assert all(
        torch.equal(a, b)
        for a, b in zip(
            decoder(Sizes(**SIZES), None, 3, cpu).parameters(),
            decoder(Sizes(**SIZES), None, 3, cpu).parameters(),
            strict=True,
        )
    )


@pytest.mark.parametrize("kind", byte_decoder.PATTERNS)
def test_a_pattern_has_as_many_blocks_as_the_nearest_ring(kind: str) -> None:
    draw = torch.Generator().manual_seed(0)
    mask = pattern(64, 128, Blocks(kind, 8, 0.6), draw)
    assert mask.shape == (8, 16)
    assert int(mask.sum()) == 2 * 8 * 3
    for blocks, message in (
        (Blocks(kind, 8, 0.95), r"--sparsity: expected 0.625"),
        (Blocks(kind, 24, 0.6), "multiples of the block, 24"),
    ):
        with pytest.raises(SuiteError, match=message):
            pattern(64, 128, blocks, draw)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": "rings"}, "--pattern: expected small_world or uniform; found rings"),
        ({"pattern": "uniform", "dense": "63"}, "--dense: expected multiples of 16; found 63"),
        ({"dense": "64"}, "--dense: expected --pattern"),
        ({"l1": "0,few"}, "--l1: expected numbers"),
        ({"width": 36}, "--width: expected a multiple of 8"),
        ({"out": Path()}, "found a directory"),
        ({"l1": "0,1", "out": Path("folder")}, "expected one coefficient for a folder; found 2"),
    ],
)
def test_bad_input_is_a_line(options, message) -> None:
    with pytest.raises(SuiteError, match=message):
        train_lm.main(**{**TINY, **options})
