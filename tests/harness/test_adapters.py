"""LoRA on every recipe: trained, saved and resumed by transformers' Trainer, and merged."""

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from sparsebench.errors import FormatError
from sparsebench.nn import (
    BlockSparse,
    SparseActivations,
    SpenseGatedMLP,
    TwoFour,
    Unstructured,
    sparsify_,
)
from tests.harness.tiny_models import tiny, transformers

peft = pytest.importorskip("peft", reason="needs the package peft")

BF16 = torch.bfloat16
IDS = torch.arange(3, 23)[None]
RECIPES = [BlockSparse(16, 0.5), TwoFour(), TwoFour(0.5), Unstructured()]
pytestmark = pytest.mark.filterwarnings("ignore")


def sparse(recipe: Any) -> Any:
    large = {"hidden_size": 256, "head_dim": 64} if recipe == TwoFour(0.5) else {}
    return sparsify_(tiny(dtype=BF16, num_key_value_heads=4, **large), recipe)


def lora(targets: Any = "all-linear") -> Any:
    """Return a configuration whose adapters change the output from the start."""
    return peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)


def adapted(recipe: Any) -> Any:
    """Return a sparse model with adapters, and the same as a model of peft."""
    model = sparse(recipe)
    return model, peft.get_peft_model(model, lora())


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(IDS).logits.float()
    return result


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_adapters_stay_on_dense_layers_and_are_merged_there(recipe, tmp_path):
    inner, model = adapted(recipe)
    bare = logits(sparse(recipe))
    before = logits(model)
    inner.dequantize()
    after = logits(model)
    assert error(after, before) < 0.01 < error(bare, before)
    model.save_pretrained(tmp_path)
    base = sparse(recipe)
    base.dequantize()
    assert torch.equal(logits(peft.PeftModel.from_pretrained(base, tmp_path)), after)
    merged = model.merge_and_unload()
    assert error(logits(merged), after) < 0.03
    merged.save_pretrained(tmp_path / "merged")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert error(logits(again), after) < 0.03
    assert {type(m) for m in again.modules() if isinstance(m, nn.Linear)} == {nn.Linear}


@pytest.mark.parametrize("targets", [r".*\.(gate_up|down)", ["mlp.down", "q_proj"]])
def test_adapters_of_dense_layers_are_found_again(targets, tmp_path):
    inner = sparse(TwoFour())
    inner.add_adapter(lora(targets))
    inner.dequantize()
    inner.save_pretrained(tmp_path)
    base = sparse(TwoFour())
    base.dequantize()
    base.load_adapter(tmp_path)
    assert torch.equal(logits(base), logits(inner))


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_adapters_are_saved_beside_and_with_a_sparse_model(recipe, tmp_path):
    model = sparse(recipe)
    model.add_adapter(lora())
    model.save_pretrained(tmp_path)  # adapters alone
    fresh = sparse(recipe)
    fresh.load_adapter(tmp_path)
    assert torch.equal(logits(fresh), logits(model))
    inner, wrapped = adapted(recipe)
    wrapped.save_pretrained(tmp_path / "peft")
    loaded = peft.PeftModel.from_pretrained(sparse(recipe), tmp_path / "peft")
    assert torch.equal(logits(loaded), logits(wrapped))
    inner.save_pretrained(tmp_path / "base")  # every tensor


def test_adapters_of_another_kind_on_a_whole_mlp_are_refused_before_any_change():
    model = sparse(TwoFour())
    model.add_adapter(peft.LoHaConfig(r=4, target_modules="all-linear"))
    with pytest.raises(FormatError, match=r"layers.0.mlp: gate_up: expected plain LoRA .* unload"):
        model.dequantize()
    assert isinstance(model.model.layers[0].mlp, SpenseGatedMLP)


def test_adapters_on_a_layer_that_trains_its_own_weights_are_not_lost():
    model = sparsify_(tiny(hidden_act="relu"), SparseActivations())
    model.add_adapter(lora(["gate"]))
    with pytest.raises(FormatError, match=r"mlp: gate: expected plain LoRA or no adapter"):
        model.dequantize()


def test_adapted_mlps_plan_numbers_of_tokens():
    model = sparse(TwoFour())
    model.add_adapter(lora())
    mlp = model.model.layers[0].mlp
    assert mlp.plan([1, 8]) is mlp


# ---- Trainer ----


def train(model: Any, folder: Path, steps: int, *, resume: bool = False) -> dict[str, Any]:
    """Train for a number of steps, with a checkpoint after each two; return trained tensors."""
    rows = [{"input_ids": IDS[0] + i, "labels": IDS[0] + i} for i in range(4)]
    options = {"max_steps": steps, "save_steps": 2, "learning_rate": 1e-2, "report_to": []}
    options |= {"per_device_train_batch_size": 2, "use_cpu": True, "disable_tqdm": True}
    arguments = transformers.TrainingArguments(str(folder), lr_scheduler_type="constant", **options)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return {n: copy.deepcopy(p.detach()) for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_trainer_resumes_adapters_from_its_checkpoint(recipe, tmp_path):
    def model() -> Any:  # Trainer does not resume adapters of `add_adapter`, also of a dense model
        base = sparse(recipe)
        torch.manual_seed(0)
        return peft.get_peft_model(base, lora())

    first = {n: p.detach().clone() for n, p in model().named_parameters() if p.requires_grad}
    with warnings.catch_warnings(action="ignore"):
        whole = train(model(), tmp_path / "whole", 4)
        train(model(), tmp_path / "parts", 2)
        resumed = train(model(), tmp_path / "parts", 4, resume=True)
    assert all("lora" in name for name in whole)
    assert not any(torch.equal(whole[name], first[name]) for name in whole)
    torch.testing.assert_close(resumed, whole)


def test_trainer_saves_adapters_of_a_model(tmp_path):
    model = sparse(TwoFour())
    model.add_adapter(lora())
    train(model, tmp_path, 2)
    fresh = sparse(TwoFour())
    fresh.load_adapter(tmp_path / "checkpoint-2")
    assert torch.equal(logits(fresh), logits(model))


@pytest.mark.parametrize(
    ("recipe", "act"), [(BlockSparse(16, 0.5), "silu"), (SparseActivations(), "relu")], ids=str
)
def test_trainer_resumes_weights_that_train(recipe, act, tmp_path):
    def model() -> Any:
        return sparsify_(tiny(hidden_act=act), recipe)

    whole = train(model(), tmp_path / "whole", 4)
    train(model(), tmp_path / "parts", 2)
    torch.testing.assert_close(train(model(), tmp_path / "parts", 4, resume=True), whole)
