"""Checkpoints that `sparsebench convert` cannot read are one line, and nothing is written."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sparsebench.errors import FormatError, SparsebenchError, SuiteError
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.convert import convert
from tests.harness.checkpoints import BF16, TWO_FOUR, UP, write
from tests.harness.tiny_models import tiny, transformers


@pytest.fixture(autouse=True)
def _without_bars():
    with models.quiet(transformers):
        yield


SHARD = "part-1.safetensors"
INDICES: list[tuple[Callable[[Path, dict[str, str]], Any], str]] = [
    (lambda path, _: (path / SHARD).unlink(), f"index.json: expected {SHARD} beside it"),
    (lambda path, _: (path / "part-0.safetensors").rename(path / SHARD), "part-0.*beside it"),
    (lambda _, places: places.update({"lm_head.weight": "x"}), "expected x beside it, found none"),
    (lambda _, places: places.update({"x": SHARD}), f"{SHARD}: expected x as in the index"),
    (lambda _, places: places.update({"x": None}), "expected files beside it, found None"),
    (lambda _, places: places.clear(), "expected a weight_map of files, found {}"),
    (
        lambda path, _: shutil.copy(path / SHARD, path / "model.safetensors"),
        "expected model.safetensors or its index, found both",
    ),
    (
        lambda path, _: shutil.copy(path / SHARD, path / "part-0.safetensors"),
        f"in one file, found part-0.safetensors and {SHARD}",
    ),
]


@pytest.mark.parametrize(("change", "message"), INDICES, ids=[i[1][:40] for i in INDICES])
def test_shards_that_do_not_fit_the_index_are_one_line(change, message, tmp_path):
    write(tmp_path / "old", TWO_FOUR)
    state = load_file(tmp_path / "old/model.safetensors")
    (tmp_path / "old/model.safetensors").unlink()
    places: dict[str, str] = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in {*places.values()}:
        part = {name: state[name] for name in state if places[name] == file}
        save_file(part, tmp_path / "old" / file)
    change(tmp_path / "old", places)
    index = {"weight_map": places}
    (tmp_path / "old/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SparsebenchError, match=message) as error:
        convert(tmp_path / "old", tmp_path / "new")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_two_tensors_of_one_name_in_the_model_are_refused(tmp_path):
    write(tmp_path / "old", TWO_FOUR, change=lambda t: t.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(FormatError, match=r"found model.norm.weight and norm.weight"):
        convert(tmp_path / "old", tmp_path / "new")


def _config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "sparsity_config": {"format": TWO_FOUR}, **fields}


def _zero_point(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_scale"] = torch.ones(1)
    tensors[f"{UP}.weight_zero_point"] = torch.ones(1)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "hostile",
        {"config": _config(sparsity_config={"format": "os.system:echo"})},
        "sparsity_config.format: expected .*sparse-24-bitmask.*os.system",
    ),
    (
        "close",
        {"config": _config(sparsity_config={"format": "sparse-24-bitmsk"})},
        "did you mean sparse-24-bitmask",
    ),
    ("packed", {"config": _config(format="pack-quantized")}, "format: .*pack-quantized"),
    ("transform", {"config": _config(transform_config={"x": 1})}, "transform_config"),
    ("dense", {"config": _config(sparsity_config={"format": "dense"})}, "for the bitmask of"),
    (
        "group",
        {"config": _config(config_groups={"g": {"format": "nvfp4-pack-quantized"}})},
        "nvfp4",
    ),
    ("missing", {"change": lambda t: t.pop(f"{UP}.shape")}, f"{UP}: expected shape"),
    ("twice", {"change": lambda t: t.update({f"{UP}.weight": torch.ones(2)})}, "and no weight"),
    (
        "sizes",
        {"change": lambda t: t[f"{UP}.shape"].mul_(2)},
        rf"{UP}.weight: expected \[256, 64\], found \[512, 128\]",
    ),
    (
        "bitmask",
        {"change": lambda t: t.update({f"{UP}.bitmask": t[f"{UP}.bitmask"][:, 1:].contiguous()})},
        f"{UP}: bitmask: expected",
    ),
    ("bits", {"change": lambda t: t[f"{UP}.bitmask"].fill_(255)}, f"{UP}: compressed: expected"),
    ("nan", {"change": lambda t: t[f"{UP}.compressed"][0].fill_(torch.nan)}, f"{UP}: .*finite"),
    (
        "infinite",
        {"change": lambda t: t["model.norm.weight"].fill_(torch.inf)},
        "model.norm: weight: expected finite",
    ),
    ("none", {"change": lambda t: t.pop("lm_head.weight")}, "expected lm_head.weight of Llama"),
    (
        "extra",
        {"change": lambda t: t.update({"model.layers.2.mlp.b.weight": torch.ones(8)})},
        "expected a place for model.layers.2.mlp.b.weight in LlamaForCausalLM, found none",
    ),
    ("version", {"config": _config(version="0.15.0")}, r"version: expected 0.14 or older .*0.15"),
    ("later", {"config": _config(version="9")}, r"version: expected 0.14 or older .*'9'"),
    (
        "scale",
        {"change": lambda t: t.update({f"{UP}.weight_scale": torch.ones(2, 2)})},
        f"{UP}: weight_scale",
    ),
    ("zero", {"change": _zero_point}, f"{UP}.weight_zero_point"),
    (
        "int4",
        {"change": lambda t: t.update({f"{UP}.weight_packed": torch.ones(2)})},
        "weight_packed",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_cannot_be_read_is_one_line_and_writes_nothing(options, message, tmp_path):
    write(tmp_path / "old", TWO_FOUR, **options)
    with pytest.raises(SparsebenchError, match=message) as error:
        convert(tmp_path / "old", tmp_path / "new")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_model_without_sparse_weights_is_refused(tmp_path):
    tiny(dtype=BF16).save_pretrained(tmp_path / "old")
    with pytest.raises(SuiteError, match=r"linear layers without 2:4 \(.* in 14 tensors"):
        convert(tmp_path / "old", tmp_path / "new")
    with pytest.raises(SuiteError, match="expected the directory"):
        convert(tmp_path / "none", tmp_path / "new")
