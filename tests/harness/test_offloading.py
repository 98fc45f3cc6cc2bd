"""Sparse models are pickled, sent to other processes, offloaded to a CPU or disk, and exported."""

import copy
import io
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from sparsebench.errors import FormatError
from sparsebench.nn import BlockSparse, SparseActivations, TwoFour, Unstructured, sparsify_
from tests.harness.tiny_models import tiny, transformers

accelerate = pytest.importorskip("accelerate", reason="needs the extra `models`")

BF16 = torch.bfloat16
IDS = torch.arange(3, 11)[None]
RECIPES = [BlockSparse(16, 0.5), TwoFour(), Unstructured(), SparseActivations()]
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: type(r).__name__)


def sparse(recipe: Any) -> Any:
    act = "relu" if isinstance(recipe, SparseActivations) else "silu"
    return sparsify_(tiny(dtype=BF16, attention_bias=True, hidden_act=act), recipe)


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(IDS).logits
    return result


# ---- pickle ----


@every_recipe
def test_a_model_and_its_configuration_are_pickled(recipe, tmp_path):
    sparse(recipe).save_pretrained(tmp_path)
    restored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    for model in (sparse(recipe), restored):
        again = pickle.loads(pickle.dumps(model))
        assert torch.equal(logits(again), logits(model))
        config = pickle.loads(pickle.dumps(model.config))
        assert config.to_dict() == model.config.to_dict()
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        assert torch.equal(logits(torch.load(file, weights_only=False)), logits(model))
        again.save_pretrained(tmp_path)  # it still is one of transformers'


LOADED = """
import pickle, sys, torch
model, tokens, expected = pickle.loads(sys.stdin.buffer.read())
assert torch.equal(model(tokens).logits, expected)
"""


def test_a_process_that_starts_anew_takes_a_model():
    model, tokens = sparse(TwoFour()), torch.arange(8)[None]
    with torch.no_grad():
        sent = pickle.dumps((model, tokens, model(tokens).logits))
    subprocess.run([sys.executable, "-P", "-c", LOADED], input=sent, check=True)


# ---- offloading ----


@pytest.mark.parametrize("buffers", [False, True], ids=["weights", "buffers, too"])
@every_recipe
def test_layers_whose_tensors_are_offloaded_compute_the_same(recipe, buffers, tmp_path):
    model, cpu = sparse(recipe), torch.device("cpu")
    expected = logits(model)
    for offload in (accelerate.cpu_offload, accelerate.disk_offload):
        other = copy.deepcopy(model)
        place: Any = {"offload_dir": str(tmp_path)} if offload is accelerate.disk_offload else {}
        offload(other, execution_device=cpu, offload_buffers=buffers, **place)
        assert torch.equal(logits(other), expected)
        assert torch.equal(logits(other), expected)


def on_disk(folder: Path, disk: Path, **options: Any) -> Any:
    options |= {"device_map": "auto", "max_memory": {"cpu": "100KB"}, "offload_folder": str(disk)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options)


@pytest.mark.parametrize("buffers", [False, True], ids=["weights", "buffers, too"])
@every_recipe
def test_a_checkpoint_is_loaded_to_disk(recipe, buffers, tmp_path):
    sparse(recipe).save_pretrained(tmp_path / "saved")
    expected = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    loaded = on_disk(tmp_path / "saved", tmp_path / "disk", offload_buffers=buffers)
    assert "disk" in loaded.hf_device_map.values()
    assert torch.equal(logits(loaded), logits(expected))
    with pytest.warns(UserWarning, match="offloaded modules"):
        loaded.save_pretrained(tmp_path / "again")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again")
    assert torch.equal(logits(again), logits(expected))


UP = "model.layers.1.mlp.up_proj"
CHANGES: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
    (lambda t: t.pop(f"{UP}.values"), rf"{UP}.values: expected \[32, 16, 16\] in .* found none"),
    (lambda t: t[f"{UP}.columns"].fill_(99), f"{UP}: expected block columns 0 to 3"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_checkpoint_on_disk_is_checked_as_any_other(change, message, tmp_path):
    sparse(BlockSparse(16, 0.5)).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    for buffers in (False, True):
        with pytest.raises(FormatError, match=message):
            on_disk(tmp_path, tmp_path / "disk", offload_buffers=buffers)


# ---- torch.export ----


class Reads(nn.Module):
    """Reads an attribute of the weight, as T5 reads the dtype of `wo`."""

    def __init__(self, attribute: str) -> None:
        super().__init__()
        self.wo, self.attribute = nn.Linear(64, 64), attribute

    def forward(self, x: Tensor) -> Tensor:
        what = getattr(self.wo.weight, self.attribute)
        return self.wo(x).view(-1, what[0]) if self.attribute == "shape" else self.wo(x.to(what))


@pytest.mark.parametrize("attribute", ["dtype", "device", "shape"])
@every_recipe
def test_a_model_that_reads_its_weights_is_exported(recipe, attribute):
    if isinstance(recipe, SparseActivations):
        pytest.skip("it replaces no single layer")
    model = sparsify_(nn.Sequential(Reads(attribute)).bfloat16(), recipe)
    x = torch.randn(4, 64).bfloat16()
    with torch.no_grad():
        for strict in (False, True):
            exported = torch.export.export(model, (x,), strict=strict).module()
            assert torch.equal(exported(x), model(x))
        with FakeTensorMode(allow_non_fake_inputs=True):
            assert model(x).shape == x.shape
