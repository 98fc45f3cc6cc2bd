"""Write tiny checkpoints with compressed-tensors 0.14 itself, in an environment that has it.

    python compressed_tensors_writer.py FOLDER

writes FOLDER/NAME, a checkpoint, and FOLDER/NAME.safetensors, its dense weights by module.
"""

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.config import BitmaskConfig, Sparse24BitMaskConfig
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 144, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def pruned(weight: torch.Tensor, two_four: bool) -> torch.Tensor:
    """Keep 2 of 4, or half anywhere; write some zeros as -0.0."""
    groups = weight.unflatten(1, (-1, 4))
    rank = groups.abs().argsort(-1, descending=True).argsort(-1)
    mask = rank < 2 if two_four else torch.rand(groups.shape) < 0.5
    return groups.where(mask, torch.tensor([0.0, -0.0, 0.0, 0.0]).to(weight)).flatten(1)


def write(folder: Path, name: str, two_four: bool, fp8: bool) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=False))
    model = model.bfloat16().eval()
    linear = {
        n: m for n, m in model.named_modules() if type(m) is torch.nn.Linear and "layers" in n
    }
    for layer in linear.values():
        layer.weight.data = pruned(layer.weight.data, two_four)
    if fp8:
        args = QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True)
        inputs = QuantizationArgs(
            num_bits=8, type="float", strategy="token", symmetric=True, dynamic=True
        )
        scheme = QuantizationScheme(targets=["Linear"], weights=args, input_activations=inputs)
        config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
        apply_quantization_config(model, config)
        for layer in linear.values():
            layer.weight_scale.data = layer.weight.data.abs().amax(1, keepdim=True) / 448
            layer.quantization_status = QuantizationStatus.FROZEN
    sparsity = (Sparse24BitMaskConfig if two_four else BitmaskConfig)(
        targets=["Linear"], ignore=["lm_head"]
    )
    compressor = ModelCompressor.from_pretrained_model(model, sparsity)
    compressor.compress_model(model)
    model.save_pretrained(folder / name)
    compressor.update_config(str(folder / name))
    compressor.decompress_model(model)
    weights = {n: m.weight.detach().clone() for n, m in linear.items()}
    save_file(weights, folder / f"{name}.safetensors")


if __name__ == "__main__":
    for name, *options in (
        ("sparse-24-bitmask", True, False),
        ("sparse-24-bitmask-fp8", True, True),
        ("sparse-bitmask", False, False),
    ):
        write(Path(sys.argv[1]), name, *options)
