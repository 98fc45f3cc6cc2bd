"""Names of problems and fields are words for readers, the same on every page."""

from typing import Any

import pandas as pd
import pytest

from sparsebench.results.model_shapes import read_shapes
from sparsebench.results.problem_names import field_text, problem_name

LLAMA = read_shapes("Llama-3-8B")
SIZES = ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("causal", False, "not causal"),
        ("causal", "True", "causal"),
        ("kv_heads", 8.0, "8 KV heads"),
        ("lists", "kv_heads", "a list for each KV head"),
        ("pattern", "dense", ""),
        ("pattern", "sliding_window", "sliding window"),
        ("pattern", "top_k_blocks", "the k best blocks of keys"),
        ("pattern", "two_four_blocks", "2:4 in the best blocks"),
        ("pattern", "spense_hidden", "half 2:4"),
        ("block", "16x64", "16 × 64 blocks"),
        ("vocab", 151936.0, "vocabulary 151936"),
        ("sparsity", 0.9688, "96.88 %"),
        ("video", [21, 30, 52], "video 21 × 30 × 52"),
        ("anything", 3, "anything 3"),
    ],
)
def test_a_field_is_written_for_readers(name: str, value: Any, text: str) -> None:
    assert field_text(name, value) == text


def test_a_problem_is_named_by_its_fields_without_usual_and_missing_ones() -> None:
    fields = {"block": "64", "op": "linear", "k": 512, "n": 4096.0, "sparsity": 0.9, "m": 64}
    fields |= {"pattern": "blocks", "scope": "kernel", "active": pd.NA, "skew": None}
    assert problem_name(fields, fields) == "linear, m 64, 4096 × 512, 90 %, 64 × 64 blocks"
    assert problem_name(fields, ["n", "block"]) == "n 4096, 64 × 64 blocks"
    assert (
        problem_name({"m": 1, "sparsity": 0.0, "block": "1"}, ["m", "sparsity", "block"]) == "m 1"
    )


def test_the_name_of_a_model_stands_for_its_sizes() -> None:
    model = {name: getattr(LLAMA, name) for name in SIZES}
    fields = {"op": "decoder", "m": 16, **model, "layers": 8, "context": 1024}
    text = "decoder, m 16, 8 of 32 layers of Llama-3-8B, context 1024"
    assert problem_name(fields, fields) == text
    assert problem_name(fields, ["layers", "vocab"]) == "8 of 32 layers of Llama-3-8B"
    attention = {"op": "attention", "heads": 32, "kv_heads": 8, "hidden": pd.NA}
    assert problem_name(attention, attention) == "attention, 32 heads, 8 KV heads"
