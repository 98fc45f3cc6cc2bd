"""A config.json that tests change."""

import json
from pathlib import Path
from typing import Any

LLAMA = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "hidden_act": "silu",
}


def config(folder: Path, **changes: Any) -> Path:
    """Write a config.json like that of Llama-3-8B; a change to None removes a key."""
    values = {name: value for name, value in {**LLAMA, **changes}.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return folder / "config.json"
