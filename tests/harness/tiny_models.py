"""Tiny language models of Hugging Face with random weights, a tokenizer, and their GGUF file."""

from pathlib import Path
from typing import Any

import pytest

transformers = pytest.importorskip("transformers", reason="needs the extra `models`")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from tokenizers import Tokenizer, decoders, models, pre_tokenizers  # noqa: E402

SIZES = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "bos_token_id": 2,
    "eos_token_id": 1,
}


def tiny(kind: str = "llama", **fields: Any) -> Any:
    """Return a model in evaluation mode, in fp32 unless `dtype` is given."""
    torch.manual_seed(0)
    dtype = fields.pop("dtype", torch.float32)
    config = transformers.LlamaConfig if kind == "llama" else transformers.Gemma3TextConfig
    own = {} if kind == "llama" else {"sliding_window": 64}  # GGUF has the other defaults
    sizes = config(**SIZES | own | fields)
    model = transformers.AutoModelForCausalLM.from_config(sizes, dtype=dtype)
    if kind != "llama":
        for name, weight in model.named_parameters():
            if "norm" in name:
                torch.nn.init.normal_(weight, std=0.1)
    return model.eval()


def tokenizer() -> Any:
    """Return a tokenizer with one token for each byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = {"<pad>": 0, "</s>": 1, "<s>": 2} | {c: i for i, c in enumerate(letters, 3)}
    inner = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    special = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def generated(model: Any) -> torch.Tensor:
    """Return the tokens that a model goes on with, always the likeliest one."""
    ids = torch.arange(3, 11, device=model.device)[None]
    options = {"attention_mask": torch.ones_like(ids), "do_sample": False}
    tokens: torch.Tensor = model.generate(ids, max_new_tokens=8, min_new_tokens=8, **options)
    return tokens


def write_gguf(path: Path, model: Any, architecture: str = "gemma3") -> None:
    """Write a tiny Gemma 3 as llama.cpp names its parts; pieces are bytes and letters."""
    gguf = pytest.importorskip("gguf", reason="needs the extra `models`")
    config, state = model.config, model.state_dict()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_sliding_window(config.sliding_window)
    writer.add_rope_freq_base(1e6)
    writer.add_vocab_size(300)
    letters = [chr(97 + i) for i in range(26)] + list("▁\n.,*:=-()'\"")
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", *(f"<0x{i:02X}>" for i in range(256)), *letters]
    pieces += [f"<unused{i}>" for i in range(300 - len(pieces))]
    kinds = [3, 3, 3, 2] + [6] * 256 + [1] * len(letters)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(pieces)
    writer.add_token_scores([0.0] * 300)
    writer.add_token_types(kinds + [5] * (300 - len(kinds)))
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_pad_token_id(0)
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    for number in range(config.num_hidden_layers):
        theirs = f"model.layers.{number}"
        names |= {f"blk.{number}.{name}": f"{theirs}.{part}" for name, part in parts.items()}
    for name, theirs in names.items():
        weight = state[f"{theirs}.weight"].float() + float("norm" in name)  # GGUF adds the 1
        writer.add_tensor(f"{name}.weight", np.ascontiguousarray(weight.numpy()))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
