"""The sizes of a decoder-only language model: from a short list, or from its config.json.

    hidden ──> wqkv ──> attention ──> wo ──> hidden ──> gate, up [hidden, intermediate] ──> down
               heads + 2 kv_heads, of head_dim each

In a mixture of experts, each layer has `experts` MLPs of `intermediate` units, of which a token
passes top_k, and `shared` units that all tokens pass. A layer without experts counts as if it had
them: DeepSeek-like models have a few.

The list has the values of the config.json of each model on Hugging Face, at the address in
`source`; for a model that reads images as well, those of its `text_config`.
"""

from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sparsebench._discovery import did_you_mean
from sparsebench.errors import ResultError
from sparsebench.results.files import from_json

NAMES = {  # a field of ModelShapes: the name in config.json
    "hidden": "hidden_size",
    "intermediate": "intermediate_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "vocab": "vocab_size",
}
OF_MODEL = ["hidden", "intermediate", "layers"]  # fields that name a model
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
OTHER_LAYERS = {"llama4", "llama4_text"}  # without experts, of another size: every second one
GEMMA = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256}
"""What a config.json of a Gemma 3 that reads images leaves out, from transformers."""

UNGATED = {"albert", "apertus", "arcee", "bert", "biogpt", "bloom", "camembert", "codegen"}
UNGATED |= {"deberta", "deberta-v2", "electra", "falcon", "gpt2", "gpt_bigcode", "gpt_neo"}
UNGATED |= {"gpt_neox", "gptj", "jais2", "mpt", "nanochat", "nemotron", "opt", "persimmon", "phi"}
UNGATED |= {"roberta", "roformer", "starcoder2", "xglm", "xlm-roberta"}
"""Model types whose MLPs have two weights; a config.json does not say so otherwise."""


@dataclass(frozen=True)
class ModelShapes:
    """The sizes of a model, all positive; `tied` if the head shares the weights of the embedding.

    activation   of the MLPs, as config.json names it
    source       the file or the address that the sizes come from
    """

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    _: KW_ONLY
    tied: bool = False
    activation: str = "silu"
    source: str = ""

    @property
    def units(self) -> int:
        """Return the hidden units of a layer."""
        return self.intermediate

    @property
    def units_of_token(self) -> int:
        """Return the hidden units of a layer that one token passes."""
        return self.intermediate

    def units_read(self, tokens: int) -> int:
        """Return the hidden units of a layer whose weights so many tokens read."""
        return self.intermediate

    @property
    def mlp(self) -> int:
        return 3 * self.hidden * self.units

    @property
    def attention(self) -> int:
        return self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)

    @property
    def weights(self) -> int:
        """Return the number of weights of the model, without norms."""
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * (self.mlp + self.attention) + tables


@dataclass(frozen=True)
class Mixture(ModelShapes):
    """The sizes of a mixture of experts: see above."""

    _: KW_ONLY
    experts: int
    top_k: int
    shared: int

    def experts_hit(self, tokens: int) -> int:
        """Return how many experts of a layer so many tokens hit if all are equally likely."""
        return round(self.experts * (1 - (1 - self.top_k / self.experts) ** tokens))

    @property
    def units(self) -> int:
        return self.experts * self.intermediate + self.shared

    @property
    def units_of_token(self) -> int:
        return self.top_k * self.intermediate + self.shared

    def units_read(self, tokens: int) -> int:
        return self.experts_hit(tokens) * self.intermediate + self.shared


def _shapes_of(repository: str, *sizes: int, **others: Any) -> ModelShapes:
    source = f"https://huggingface.co/{repository}/blob/main/config.json"
    name = repository.partition("/")[2].replace("gemma", "Gemma").replace("Meta-", "")
    return ModelShapes(name.removesuffix("-pt"), *sizes, **others, source=source)


_GEMMA: dict[str, Any] = {"tied": True, "activation": "gelu_pytorch_tanh"}
MODELS = [
    _shapes_of("meta-llama/Meta-Llama-3-8B", 4096, 14336, 32, 32, 8, 128, 128256),
    _shapes_of("Qwen/Qwen3-8B", 4096, 12288, 36, 32, 8, 128, 151936),
    _shapes_of("Qwen/Qwen3-32B", 5120, 25600, 64, 64, 8, 128, 151936),
    _shapes_of("google/gemma-3-270m", 640, 2048, 18, 4, 1, 256, 262144, **_GEMMA),
    _shapes_of("google/gemma-3-1b-pt", 1152, 6912, 26, 4, 1, 256, 262144, **_GEMMA),
    _shapes_of("google/gemma-3-4b-pt", 2560, 10240, 34, 8, 4, 256, 262208, **_GEMMA),
    _shapes_of("google/gemma-3-12b-pt", 3840, 15360, 48, 16, 8, 256, 262208, **_GEMMA),
    _shapes_of("google/gemma-3-27b-pt", 5376, 21504, 62, 32, 16, 128, 262208, **_GEMMA),
]


def model_name(hidden: int, intermediate: int, layers: int) -> str:
    """Name a model by its sizes: `Qwen3-32B`, or `8 of 32 layers of Llama-3-8B`."""
    for model in MODELS:
        if (model.hidden, model.intermediate) == (hidden, intermediate):
            part = f"{layers} of {model.layers} layers of " if layers < model.layers else ""
            return part + model.name
    return f"{layers} layers of {hidden} and {intermediate} units"


def read_shapes(model: str) -> ModelShapes:
    """Return the sizes of a listed model, or of a config.json or the folder that holds one.

    Raises ResultError for an unknown name, for a file without the sizes, and for a model with an
    encoder, with MLPs that are not gated, or with experts or keys of another arrangement.
    """
    by_name = {shapes.name.lower(): shapes for shapes in MODELS}
    if model.lower() in by_name:
        return by_name[model.lower()]
    path = Path(model)
    if not path.exists():
        names = [shapes.name for shapes in MODELS]
        close = did_you_mean(model, names) or f" (one of {', '.join(names)})"
        raise ResultError(
            f"expected a config.json, its folder or a listed model; found {model!r}{close}"
        )
    file = path / "config.json" if path.is_dir() else path
    config = from_json(file)
    if config.get("is_encoder_decoder") or "MaskedLM" in str(config.get("architectures")):
        kind = config.get("model_type", "an encoder")
        raise ResultError(f"{file}: expected a decoder-only model, found {kind}")
    part = config.get("text_config", config)
    return _of_config(file, part if isinstance(part, dict) else {})


def _of_config(file: Path, config: dict[str, Any]) -> ModelShapes:
    kind = str(config.get("model_type", "")).lower()
    if kind in UNGATED:
        raise ResultError(
            f"{file}: expected gated MLPs (gate, up and down), found model_type {kind}"
        )
    config = (GEMMA if kind == "gemma3_text" else {}) | config
    mixture = _mixture(file, config, kind)
    inner = {"intermediate": "moe_intermediate_size"} if config.get("moe_intermediate_size") else {}
    sizes = {field: _size(file, config, name) for field, name in (NAMES | inner).items()}
    names = {"kv_heads": "num_key_value_heads", "head_dim": "head_dim"}
    usual = {"kv_heads": sizes["heads"], "head_dim": sizes["hidden"] // sizes["heads"]}
    for field, name in names.items():
        absent = config.get(name) is None
        sizes[field] = usual[field] if absent else _size(file, config, name)
    activation = config.get("hidden_act") or config.get("hidden_activation") or "unknown"
    make = partial(Mixture, **mixture) if mixture else ModelShapes
    return make(
        name=file.resolve().parent.name if file.name == "config.json" else file.stem,
        **sizes,
        tied=bool(config.get("tie_word_embeddings", "gemma" in kind)),
        activation=str(activation),
        source=str(file),
    )


def _mixture(file: Path, config: dict[str, Any], kind: str) -> dict[str, Any]:
    """Return the fields that only a mixture has; none for another model. Raises ResultError."""
    if not (names := [name for name in EXPERTS if config.get(name)]):
        return {}
    for name, actual in (("model_type", kind), ("kv_lora_rank", config.get("kv_lora_rank"))):
        if actual in OTHER_LAYERS or (name == "kv_lora_rank" and actual):
            expected = "expected experts and keys as in Mixtral, Qwen-MoE or OLMoE"
            raise ResultError(f"{file}: {expected}, found {name} {actual}")
    experts, top_k = (_size(file, config, name) for name in (names[0], "num_experts_per_tok"))
    if top_k > experts:
        expected = f"expected at most {experts} experts"
        raise ResultError(f"{file}: num_experts_per_tok: {expected}, found {top_k}")
    name = "shared_expert_intermediate_size"
    shared = _size(file, config, name) if config.get(name) else 0
    return {"experts": experts, "top_k": top_k, "shared": shared}


def _size(file: Path, config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        actual = "none" if value is None else repr(value)
        raise ResultError(f"{file}: expected {name}, a positive integer; found {actual}")
    return value
