"""Every architecture of transformers whose attention is supported, with the tokens of SDPA.

Each is a tiny random model. What SDPA cannot do there, such as the export of some caches, is not
expected; what is refused says why in one line.
"""

import warnings
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.harness.tiny_models import transformers
from tests.tools.marks import exhaustive

from transformers.models.auto.modeling_auto import (  # isort: skip
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)

import sparsebench.nn  # noqa: F401
from sparsebench.errors import Unsupported

SIZES: dict[str, Any] = {"vocab_size": 300, "pad_token_id": 0, "bos_token_id": 2, "eos_token_id": 1}
for size, names in {
    64: "hidden_size n_embd d_model word_embed_proj_dim",
    128: "intermediate_size n_inner encoder_ffn_dim decoder_ffn_dim ffn_dim"
    " max_position_embeddings n_positions max_target_positions max_source_positions",
    2: "num_hidden_layers n_layer num_layers encoder_layers decoder_layers num_key_value_heads"
    " num_experts_per_tok",
    4: "num_attention_heads n_head num_heads encoder_attention_heads decoder_attention_heads"
    " num_experts num_local_experts n_routed_experts",
    16: "head_dim kv_lora_rank qk_nope_head_dim v_head_dim mamba_chunk_size mamba_d_state",
    32: "moe_intermediate_size shared_expert_intermediate_size q_lora_rank",
    8: "qk_rope_head_dim sliding_window",
    1: "n_group topk_group",
}.items():
    SIZES |= dict.fromkeys(names.split(), size)

FEW = {"llama", "gemma3_text", "bart"}  # in the default run
# One of each kind of call: heads with keys of their own or shared, static caches, windows in all or
# some layers, chunks, other attention beside it, what is refused. To trace all takes ten minutes,
# and what inference mode changes is in the call alone.
KINDS = FEW | {"gpt2", "qwen2_moe", "mistral", "cwm", "modernbert-decoder", "llama4_text"}
KINDS |= {"fuyu", "doge", "inkling_text"}
REFUSED = {  # supported by the interface, but with other scores, or masks that are biases
    "doge": "found a bias",
    "gemma4_unified_text": "one size from 1 to 256",
    "inkling_text": "expected plain|Observed exception",
}
IDS = torch.arange(3, 25).view(2, 11)
PADDED = torch.ones(2, 11, dtype=torch.long)
PADDED[0, :4] = 0
NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


@lru_cache(maxsize=1)  # the ways of an architecture follow each other, and each sets its attention
def made(name: str) -> Any:
    """Return a tiny decoder, or None if these sizes make none."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    kind = getattr(transformers, names if isinstance(names, str) else names[0], None)
    try:
        config = type(transformers.AutoConfig.for_model(name))(**SIZES, is_decoder=True)
        with torch.device("meta"):
            size = sum(p.numel() for p in kind(config).parameters())
        if size > 3_000_000:
            return None
        torch.manual_seed(0)
        return kind(config).float().eval()
    except Exception:  # transformers has no common list of what a configuration needs
        return None


def logits(model: Any) -> Tensor:
    result: Tensor = model(IDS, attention_mask=PADDED, use_cache=False).logits
    return result[PADDED.bool()]


def eager(model: Any) -> Tensor:
    with torch.no_grad():
        return logits(model)


def inference(model: Any) -> Tensor:
    with torch.inference_mode():
        return logits(model)


def generated(model: Any, **options: Any) -> Tensor:
    options |= {"attention_mask": PADDED, "do_sample": False, "max_new_tokens": 6}
    tokens: Tensor = model.generate(IDS, pad_token_id=0, eos_token_id=None, **options)
    return tokens


def static(model: Any) -> Tensor:
    return generated(model, cache_implementation="static")


def static_and_compiled(model: Any) -> Tensor:
    config = transformers.CompileConfig(backend="aot_eager", fullgraph=True, mode=None)
    config._compile_all_devices = True
    return generated(model, cache_implementation="static", compile_config=config)


def fullgraph(model: Any) -> Tensor:
    with torch.no_grad():
        return logits(torch.compile(model, fullgraph=True, backend="aot_eager"))


def exported(model: Any) -> Tensor:
    inputs = {"attention_mask": PADDED, "use_cache": False}
    with torch.no_grad():
        return logits(torch.export.export(model, (IDS,), inputs, strict=False).module())


RUN: list[Callable[[Any], Tensor]] = [eager, generated, static]
RUN_BY_KINDS = [inference, fullgraph, exported]
CASES = [
    (name, way) if name in FEW else exhaustive((name, way))
    for name in NAMES
    for way in [*RUN, *(RUN_BY_KINDS if name in KINDS else [])]
]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        yield


@pytest.mark.parametrize(
    ("name", "way"), CASES, ids=lambda value: getattr(value, "__name__", value)
)
def test_an_architecture_computes_what_it_does_with_sdpa(name, way):
    if (model := made(name)) is None:
        pytest.skip("needs sizes of its own")
    if not model._can_set_attn_implementation():
        with pytest.raises(Unsupported, match="computes attention itself"):
            model.set_attn_implementation("sparsebench")
        return
    try:
        model.set_attn_implementation("sdpa")
        expected = eager(model) if way in RUN_BY_KINDS else way(model)
    except Exception as error:  # of many kinds: transformers' and torch's own limits
        pytest.skip(f"with SDPA: {type(error).__name__}")
    torch._dynamo.reset()
    model.set_attn_implementation("sparsebench")
    if name in REFUSED:
        with pytest.raises(Exception, match=REFUSED[name]):
            way(model)
        return
    actual = way(model)
    if actual.is_floating_point():
        torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)
    else:
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_compiled_generation_has_the_same_tokens(name):
    model = made(name)
    expected = generated(model)
    model.set_attn_implementation("sparsebench")
    assert torch.equal(static_and_compiled(model), expected)
