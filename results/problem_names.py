"""Names of problems and their fields for readers: on pages, in the terminal and in claims.

dtype bf16, m 64, n 4096, k 512, sparsity 0.9, block 64
                                       ─>  bf16, m 64, 4096 × 512, 90 %, 64 × 64 blocks
heads 32, kv_heads 8, causal True      ─>  32 heads, 8 KV heads, causal
hidden 4096, intermediate 14336, ...   ─>  8 of 32 layers of Llama-3-8B
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import pandas as pd

from sparsebench.results.formatting import PATTERNS, blocks_text, percent, size_text
from sparsebench.results.model_shapes import OF_MODEL, model_name

SIZES_OF_MODEL = {*OF_MODEL, "vocab", "heads", "kv_heads", "head_dim"}
"""Fields that the name of a model stands for."""

USUAL = {
    ("pattern", "dense"),
    ("pattern", "blocks"),
    ("pattern", "file"),
    ("caches", "1"),
    ("pruned", "mlp"),
    ("sparsity", "0"),
    ("level", "0"),
    ("activation", "relu"),
    ("scope", "kernel"),
    ("cache", "cold"),
    ("block", "1"),
    ("skew", "iid"),
}
"""Values that the name of a problem leaves out."""

FIRST = ("op", "dtype", "m", "shape", "n", "k", "pattern", "level", "sparsity", "block")
"""The order of fields in a name; others follow as they are given."""

TEXTS = {
    "active": "{} active",
    "concurrency": "{} at once",
    "cache": "{} cache",
    "head_dim": "head size {}",
    "heads": "{} heads",
    "kv_heads": "{} KV heads",
    "layers": "{} layers",
    "of_layers": "of {}",
    "requests": "{} requests",
    "vocab": "vocabulary {}",
    "weight_bits": "values of {} bits",
}
"""Texts of fields; any other field is its name and its value."""

VALUES = {
    ("causal", "True"): "causal",
    ("causal", "False"): "not causal",
    ("lists", "heads"): "a list for each head",
    ("lists", "kv_heads"): "a list for each KV head",
    ("lists", "one"): "one list for all heads",
    ("pattern", "blocks"): "block pattern",
    ("pattern", "top_k_blocks"): "the k best blocks of keys",
    ("pattern", "two_four_blocks"): "2:4 in the best blocks",
    ("pruned", "all"): "pruned MLPs and attention",
    ("lengths", "short"): "short",
    ("requests", "1"): "1 request",
    ("routing", "holes"): "half of the experts without tokens",
    ("routing", "measured"): "routing as uneven as DeepSeek-V3's",
    ("routing", "one"): "all tokens to the same experts",
    ("routing", "skewed"): "routing of one domain",
    ("routing", "uniform"): "uniform routing",
    ("scope", "chain"): "inside a chain",
    ("scope", "cold"): "first token after the start",
    ("scope", "first_token"): "first token",
    ("scope", "kernel"): "kernel time",
    ("scope", "op"): "as called from Python",
    ("scope", "per_token"): "between tokens",
    ("scope", "steps"): "device time of all steps",
}
VALUES |= dict.fromkeys([("pattern", "dense"), ("block", "1"), ("block", ""), ("values", "")], "")
"""Texts of single values of fields."""


def field_text(name: str, value: Any) -> str:
    """Write one field: `m 16`, `n × k 4096 × 4096`, `64 × 64 blocks`, `at 90 %`, `8 KV heads`."""
    text = _value(value)
    if (name, text) in VALUES:
        return VALUES[name, text]
    if name in TEXTS:
        return TEXTS[name].format(text)
    match name:
        case "level":
            return f"at {percent(value)}"
        case "sparsity":
            return percent(value)
        case "pattern" | "weights":
            return PATTERNS.get(text, text.replace("_", " "))
        case "block":
            return blocks_text(text)
        case "shape":
            return size_text(text)
        case "video":
            return f"video {text.replace('x', ' × ')}"
        case "op" | "dtype" | "source":
            return text
    return f"{name} {text}"


def measure_text(line: "Mapping[Any, Any] | pd.Series[Any]") -> str:
    """Write what was timed: `kernel time, cold cache`."""
    return f"{field_text('scope', line['scope'])}, {field_text('cache', line['cache'])}"


def name_parts(fields: Mapping[Any, Any], names: Iterable[str]) -> dict[str, str]:
    """Return the texts of some fields of a problem, by field, without missing and usual ones.

    n and k are one size, and the name of a model stands for its sizes.
    """
    names = [name for name in names if not _missing(fields.get(name))]
    names = [name for name in names if (name, _value(fields[name])) not in USUAL]
    names.sort(key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST))
    parts: dict[str, str] = {}
    of_model = not any(_missing(fields.get(name)) for name in OF_MODEL)
    for name in names:
        if of_model and name in SIZES_OF_MODEL:
            parts["model"] = model_name(*(int(fields[size]) for size in OF_MODEL))
        elif name == "n" and "k" in names:
            parts[name] = f"{_value(fields['n'])} × {_value(fields['k'])}"
        elif name == "level":
            parts[name] = percent(fields[name])
        elif not (name == "k" and "n" in names):
            parts[name] = field_text(name, fields[name])
    if " of " in parts.get("model", ""):  # 8 of 32 layers
        parts.pop("of_layers", None)
    return parts


def problem_name(fields: Mapping[Any, Any], names: Iterable[str]) -> str:
    """Name a problem by some of its fields: `linear, bf16, m 64, 90 %, 64 × 64 blocks`."""
    return ", ".join(name_parts(fields, names).values())


def split_fields(table: pd.DataFrame, names: Iterable[str]) -> tuple[list[str], str]:
    """Return the names of the fields that vary, and the constant fields as text."""
    values = {name: table[name].unique() for name in names if name in table}
    varying = [name for name, distinct in values.items() if len(distinct) > 1]
    constant = [name for name, distinct in values.items() if len(distinct) == 1]
    if "hidden" in table and table.hidden.notna().all() and SIZES_OF_MODEL & {*varying}:
        constant = [name for name in constant if name not in SIZES_OF_MODEL]
    return varying, problem_name(dict(table.iloc[0]), constant)


def problem_namer(
    lines: pd.DataFrame, fields: Iterable[str]
) -> tuple[Callable[[Mapping[Any, Any]], str], str]:
    """Return a function that names the problem of a line, and the text that all lines share.

    A field is part of the name if it varies among the lines of one op; the text has the others.
    """
    names = [name for name in fields if name != "seed" or lines.seed.nunique() > 1]
    by_op = {op: split_fields(group, names) for op, group in lines.groupby("op", sort=False)}
    op_names = ["op"] if len(by_op) > 1 else []

    def name(line: Mapping[Any, Any]) -> str:
        return problem_name(line, by_op[line["op"]][0] + op_names)

    return name, "; ".join(about for op, (_, about) in by_op.items() if about != op)


def _missing(value: Any) -> bool:
    return not isinstance(value, list) and bool(pd.isna(value) or value == "")


def _value(value: Any) -> str:
    """Write a value with all digits of a whole number; a list as sizes, `21x30x52`."""
    if isinstance(value, list):
        return "x".join(map(str, value))
    return f"{value:.10g}" if isinstance(value, float) else str(value)
