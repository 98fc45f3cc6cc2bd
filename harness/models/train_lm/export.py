"""Write a trained decoder as a Hugging Face model, whose layers `prune` and sparsify_ know.

    model/config.json ...      LlamaForCausalLM with MLPs gated by ReLU; token i is the byte i
    model/held_out.txt         the held-out text, on which `prune --calibration` measures the loss

The decoder (model.py) computes what Llama does, with other names:

    qkv [3k, k] ──> q_proj, k_proj, v_proj [k, k]       wg, wu, wd ──> gate_proj, up_proj, down_proj
"""

import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from sparsebench._writing import write_file
from sparsebench.errors import SuiteError
from sparsebench.harness.models.reporting import transformers_for
from sparsebench.harness.models.train_lm.model import BASE, BYTES, EPSILON, Decoder, Sizes
from sparsebench.harness.models.train_lm.text import Text

HELD_OUT = "held_out.txt"
NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "output": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "out": "self_attn.o_proj.weight",
    "wg": "mlp.gate_proj.weight",
    "wu": "mlp.up_proj.weight",
    "wd": "mlp.down_proj.weight",
}


def require(to: Path, models: int) -> None:
    """Raise SuiteError unless one model can be written to a new folder."""
    if models != 1:
        raise SuiteError(f"{to}: expected one coefficient for a folder, found {models}")
    if to.exists():
        raise SuiteError(f"{to}: expected a new folder to write, found an existing one")
    transformers_for(to)


def save(model: Decoder, sizes: Sizes, text: Text, to: Path) -> None:
    """Write the model, its tokenizer and the held-out text. Raises SuiteError."""
    transformers = transformers_for(to)
    config = transformers.LlamaConfig(
        vocab_size=BYTES,
        hidden_size=sizes.width,
        intermediate_size=sizes.hidden,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        max_position_embeddings=sizes.context,
        hidden_act="relu",
        rms_norm_eps=EPSILON,
        rope_parameters={"rope_type": "default", "rope_theta": BASE},
        bos_token_id=None,
        eos_token_id=None,
    )
    llama = transformers.LlamaForCausalLM(config)
    llama.load_state_dict(dict(_rename(model.state_dict())))
    try:
        llama.save_pretrained(to)
        tokenizer().save_pretrained(to)
        words = text.unseen.numpy().tobytes().decode(errors="replace")
        write_file(to / HELD_OUT, words)
    except OSError as error:
        raise SuiteError(f"{to}: expected a writable folder; found {error}") from error


def tokenizer() -> Any:
    """Return a tokenizer for which the token of each byte is the byte itself."""
    tokenizers = import_module("tokenizers")
    printable = [*range(33, 127), *range(161, 173), *range(174, BYTES)]
    others = (byte for byte in range(BYTES) if byte not in printable)
    letters = {byte: chr(byte) for byte in printable}  # as GPT-2's bytes_to_unicode
    letters |= {byte: chr(BYTES + number) for number, byte in enumerate(others)}
    vocabulary = {letter: byte for byte, letter in letters.items()}
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[]))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(
        add_prefix_space=False, use_regex=False
    )
    inner.decoder = tokenizers.decoders.ByteLevel()
    fast = import_module("transformers").PreTrainedTokenizerFast
    return fast(tokenizer_object=inner)


def _rename(state: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in state.items():
        prefix, _, part = name.rpartition(".")
        layer = re.sub(r"^layers", "model.layers", f"{prefix}." if prefix else "")
        if part == "qkv":
            for letter, third in zip("qkv", tensor.chunk(3), strict=True):
                yield f"{layer}self_attn.{letter}_proj.weight", third
        else:
            yield layer + NAMES[part], tensor
