"""Tiny models of Qwen3 with random weights, for the tests of the vLLM plug-in."""

from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def qwen3(*, experts: bool = False) -> Any:
    """Return a model in bf16; one with experts has a gated MLP in its first layer."""
    torch.manual_seed(0)
    if experts:
        config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, mlp_only_layers=[0])
        return transformers.Qwen3MoeForCausalLM(config).bfloat16().eval()
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES)).bfloat16().eval()
