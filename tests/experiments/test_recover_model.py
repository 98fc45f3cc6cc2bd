"""The script experiments/recover_model.py: zeros stay, the loss comes back, and texts differ."""

import math
from pathlib import Path

import pytest
import recover_model
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.layer import Pruner
from sparsebench.results.model_files import read_pruning
from tests.harness.tiny_models import tiny, tokenizer


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a tiny model, which trains on a few files: to cut all of them takes 10 s."""
    texts = recover_model.training_text()[:20]
    monkeypatch.setattr(recover_model, "training_text", lambda: texts)
    tiny("llama", tie_word_embeddings=True).save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    return tmp_path


def test_zeros_stay_and_what_was_lost_comes_back(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(recover_model, "STEP", 1024)
    loaded, dense = (models.load(folder, torch.device("cpu")) for _ in range(2))
    rows = models.cut(loaded, ["The quick brown fox. " * 500], 128)
    assert (rows[:, 0] == loaded.tokenizer.bos_token_id).all()
    models.prune_model(loaded, Pruner("wanda", 0.0), rows[:8], rows[8:16])
    mlps = [weight for mlp in loaded.mlps.values() for weight in mlp.parameters()]
    zeros, embedding = [weight == 0 for weight in mlps], loaded.model.get_input_embeddings().weight
    start = embedding.clone()
    distances = [float(recover_model.distance(loaded.model, dense.model, rows))]
    assert recover_model.train(loaded, dense.model, rows, 0.05, 1e-3) % 1024 == 0
    distances.append(float(recover_model.distance(loaded.model, dense.model, rows)))
    least = float(recover_model.distance(dense.model, dense.model, rows))
    assert distances[1] - least < 0.8 * (distances[0] - least)
    assert all(torch.equal(weight == 0, zero) for weight, zero in zip(mlps, zeros, strict=True))
    assert torch.equal(embedding, start)
    assert not any(weight.requires_grad for weight in loaded.model.parameters())


def test_a_file_has_the_loss_before_and_after_training(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "recovered.json"
    options = {"minutes": 1e-3, "tokens": 12288, "dense": "0.5", "device": "cpu"}
    recover_model.main(folder, out, **options)  # type: ignore[arg-type]
    report = read_pruning(out)
    assert [each.method for each in report.outcomes] == ["wanda", "spensegpt"]
    for each in report.outcomes:
        assert each.recovery
        assert report.loss
        assert each.recovery.low <= each.recovery.loss - report.loss <= each.recovery.high


@pytest.mark.parametrize("option", ["minutes", "rate"])
@pytest.mark.parametrize("number", [0, -1, math.nan, math.inf])
def test_numbers_that_train_nothing_are_refused_before_the_work(
    option: str, number: float, tmp_path: Path
) -> None:
    with pytest.raises(SuiteError, match=f"--{option}: expected a number above 0"):
        recover_model.main(tmp_path / "none", tmp_path / "out.json", **{option: number})
    assert not [*tmp_path.iterdir()]


def test_the_shortest_training_has_a_step_so_that_its_file_can_be_read(
    folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "recovered.json"
    options = {"minutes": 1e-9, "tokens": 12288, "dense": "0.5", "method": "wanda"}
    recover_model.main(folder, out, device="cpu", **options)  # type: ignore[arg-type]
    (outcome,) = read_pruning(out).outcomes
    assert outcome.recovery
    assert outcome.recovery.tokens > 0


def test_no_paragraph_of_the_language_reference_is_in_the_text() -> None:
    texts = recover_model.training_text()
    assert 5e6 < sum(map(len, texts)) < 5e7
    text = " ".join(" ".join(texts).split())
    paragraphs = [" ".join(part.split()) for part in models.python_reference().split("\n\n")]
    long = [part for part in paragraphs if len(part) > 200]
    common = [part for part in long if part[:100] in text]
    assert len(common) < 0.01 * len(long), common
