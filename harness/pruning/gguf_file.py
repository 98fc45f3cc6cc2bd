"""Gemma 3 out of a GGUF file: its weights, dequantised to fp32, and its vocabulary.

    token_embd   output_norm   blk.N.attn_{norm,q,k,v,q_norm,k_norm,output}
    blk.N.post_attention_norm   blk.N.ffn_{norm,gate,up,down}   blk.N.post_ffw_norm

GGUF's norms of Gemma have the 1 added that the original weights leave out. The file is read by the
package gguf, an optional one.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.sources import require_regular
from sparsebench.harness.pruning.gemma import GLOBAL_EVERY, LOCAL_BASE, Gemma, Layer
from sparsebench.harness.pruning.mlp import GatedMLP
from sparsebench.harness.pruning.tokenizer import Tokenizer

ARCHITECTURE = "gemma3"
LAYERS = 1000


@dataclass(frozen=True)
class GgufModel:
    """A model, its tokenizer, and the token that every context begins with."""

    model: Gemma
    tokenizer: Tokenizer
    begin: int


def read(path: Path, device: torch.device) -> GgufModel:
    """Read a model; SuiteError where the package is missing or the file is not such a one."""
    require_regular(path)
    try:
        return _read(path, _reader(path), device)
    except SuiteError:
        raise
    except KeyError as missing:
        raise SuiteError(f"{path}: expected {missing} in the file; found none") from missing
    except Exception as error:  # the reader and the quantisations raise a dozen types on garbage
        found = f"{type(error).__name__}: {error}"
        raise SuiteError(f"{path}: expected a model of {ARCHITECTURE}; found {found}") from error


def _read(path: Path, reader: Any, device: torch.device) -> GgufModel:
    fields = {name: field.contents for name, field in reader.fields.items()}
    found = fields["general.architecture"]() if "general.architecture" in fields else None
    if found != ARCHITECTURE:
        raise SuiteError(f"{path}: expected a model of architecture {ARCHITECTURE}, found {found}")
    entries = {entry.name: entry for entry in reader.tensors}

    def weight(name: str) -> Tensor:
        return _dequantised(entries[f"{name}.weight"]).to(device)

    parts = "tokens", "scores", "token_type"
    vocabulary = [fields[f"tokenizer.ggml.{part}"]() for part in parts]
    model = Gemma(weight("token_embd"), _layers(fields, weight), weight("output_norm"))
    begin = int(fields["tokenizer.ggml.bos_token_id"]())
    return GgufModel(model, Tokenizer(*vocabulary), begin)


def _layers(fields: dict[str, Callable[[], Any]], weight: Callable[[str], Tensor]) -> list[Layer]:
    window = int(fields[f"{ARCHITECTURE}.attention.sliding_window"]())
    base = float(fields[f"{ARCHITECTURE}.rope.freq_base"]())
    count = int(fields[f"{ARCHITECTURE}.block_count"]())
    if not 1 <= count <= LAYERS:
        raise ValueError(f"{count} layers, expected 1 to {LAYERS} (LAYERS)")
    return [_layer(weight, number, window, base) for number in range(count)]


def _layer(whole: Callable[[str], Tensor], number: int, window: int, base: float) -> Layer:
    def weight(name: str) -> Tensor:
        return whole(f"blk.{number}.{name}")

    is_global = (number + 1) % GLOBAL_EVERY == 0
    return Layer(
        attention_norm=weight("attn_norm"),
        q=weight("attn_q"),
        k=weight("attn_k"),
        v=weight("attn_v"),
        q_norm=weight("attn_q_norm"),
        k_norm=weight("attn_k_norm"),
        out=weight("attn_output"),
        post_attention_norm=weight("post_attention_norm"),
        mlp_norm=weight("ffn_norm"),
        mlp=GatedMLP(weight("ffn_gate"), weight("ffn_up"), weight("ffn_down"), "gelu_tanh"),
        post_mlp_norm=weight("post_ffw_norm"),
        window=None if is_global else window,
        base=base if is_global else LOCAL_BASE,
    )


def _dequantised(entry: Any) -> Tensor:
    values = import_module("gguf").dequantize(entry.data, entry.tensor_type)
    return torch.from_numpy(np.array(values, dtype=np.float32))  # a copy: the file is mapped


def _reader(path: Path) -> Any:
    try:
        return import_module("gguf").GGUFReader(path)
    except ImportError as error:
        raise SuiteError(
            f"{path}: expected the package gguf (pip install gguf); found none"
        ) from error
    except (OSError, ValueError) as error:
        raise SuiteError(f"{path}: expected a GGUF file; found {error}") from error
