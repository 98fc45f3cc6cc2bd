"""Compressed checkpoints of tiny models, written from the description with numpy.packbits."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.harness.tiny_models import tiny, tokenizer, transformers

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TWO_FOUR, BITMASK = "sparse-24-bitmask", "sparse-bitmask"
IDS = torch.arange(3, 35).view(2, 16)
UP = "model.layers.0.mlp.up_proj"


def bits_of(weight: Tensor) -> Tensor:
    """Return the bits of a weight as integers, on which torch computes for every dtype."""
    return weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.itemsize])


def two_four(weight: Tensor) -> Tensor:
    """Keep the 2 largest of 4, and in some groups fewer; write some zeros as -0.0."""
    groups = weight.unflatten(1, (-1, 4))
    rank = groups.abs().argsort(-1, descending=True).argsort(-1)
    largest = groups.where(rank < 2, 0.0)
    largest[::3, ::5] = 0
    largest[1::3, ::5, 1:] = 0
    largest[::2] = largest[::2].where(largest[::2] != 0, -0.0)
    return largest.flatten(1)


def half(weight: Tensor) -> Tensor:
    return weight.where(torch.rand(weight.shape) < 0.5, 0.0)


def pack(name: str, weight: Tensor, form: str, old: bool = False) -> dict[str, Tensor]:
    bits = bits_of(weight)
    if form == TWO_FOUR:  # the two of largest absolute value, as torch ranks them
        order = (bits if weight.itemsize == 1 else weight).view(-1, 4).abs().topk(2, 1).indices
        stored = torch.zeros(order.shape[0], 4, dtype=torch.bool).scatter_(1, order, True)
        stored = stored.view(weight.shape)
        values, shape = bits[stored].view(len(weight), -1), torch.tensor(weight.shape).view(2, 1)
    else:
        stored = (weight.float() if weight.itemsize == 1 else weight) != 0
        values, shape = bits[stored], torch.tensor(weight.shape)
    mask = torch.from_numpy(np.packbits(stored.numpy(), axis=-1, bitorder="little"))
    prefix = f"{name}.weight." if old else f"{name}."
    tensors = {f"{prefix}shape": shape, f"{prefix}bitmask": mask}
    tensors[f"{prefix}compressed"] = values.view(weight.dtype)
    if form == BITMASK:
        counts = stored.sum(-1)
        tensors[f"{prefix}row_offsets"] = counts.cumsum(0) - counts
    return tensors


def write(
    path: Path,
    form: str,
    *,
    scales: str = "",
    old: bool = False,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], Any] = lambda _: None,
    **fields: Any,
) -> Any:
    """Write a checkpoint whose linear layers are sparse; return the dense model of its weights.

    form    sparse-24-bitmask, sparse-bitmask, or dense 2:4
    scales  channel or tensor: the values are fp8
    old     the names before compressed-tensors 0.9
    """
    torch.manual_seed(1)
    model = tiny(**{"dtype": BF16, **fields})
    tensors: dict[str, Tensor] = {}
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
    with torch.no_grad():
        for name, layer in linear.items():
            weight = (half if form == BITMASK else two_four)(layer.weight)
            layer.weight.copy_(weight)
            if scales:
                scale = weight.float().abs().amax(1, keepdim=True) / 448
                scale = scale if scales == "channel" else scale.max().view(1)
                weight = (weight.float() / scale).to(E4M3)
                layer.weight.copy_(weight.float() * scale)
                tensors[f"{name}.weight_scale"] = scale
                tensors[f"{name}.input_scale"] = torch.ones(1)
            tensors |= (
                {f"{name}.weight": weight} if form == "dense" else pack(name, weight, form, old)
            )
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    state = load_file(path / "model.safetensors")
    tensors |= {k: t for k, t in state.items() if k.removesuffix(".weight") not in linear}
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": scales, "symmetric": True}}
    compression = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scales else "dense",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group} if scales else {},
        "sparsity_config": {"format": form, "sparsity_structure": "2:4", "targets": ["Linear"]},
    }
    content = json.loads((path / "config.json").read_text())
    content["compression_config" if old else "quantization_config"] = config or compression
    (path / "config.json").write_text(json.dumps(content))
    return model


def load_model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


def write_experts(path: Path, kind: str, form: str, **fields: Any) -> None:
    """Write a mixture whose weights of layers are 2:4, expert by expert, in a form of `pack`."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    more = {"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes | more | fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    model.save_pretrained(path)
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        linear = "layers" in name and weight.dim() == 2 and name.endswith("weight")
        if not linear or ".gate.weight" in name:
            tensors[name] = weight
        elif form == "dense":
            tensors[name] = two_four(weight)
        else:
            tensors |= pack(name.removesuffix(".weight"), two_four(weight), form)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if form != "dense":
        content = json.loads((path / "config.json").read_text())
        content["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "version": "0.9.0",
            "format": "dense",
            "sparsity_config": {"format": form},
        }
        (path / "config.json").write_text(json.dumps(content))
