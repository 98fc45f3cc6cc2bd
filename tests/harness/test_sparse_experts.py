"""sparsify_ on models whose experts share tensors: tokens, names in files, and what is refused."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsebench.errors import FormatError
from sparsebench.harness.models.pruning.ahead import plan_ahead
from sparsebench.nn import (
    BlockSparse,
    SparseExperts,
    SpenseLinear,
    TwoFour,
    Unstructured,
    sparsify_,
)
from tests.harness.tiny_models import SIZES, generated, transformers
from tests.tools.marks import crossed

FP16 = torch.float16
SEED = 5  # the two largest logits differ by 1 % of their deviation or more, 10 times what sums do
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 288}
FAMILIES: dict[str, dict[str, Any]] = {
    "Mixtral": {"num_local_experts": 4, "intermediate_size": 288, "num_experts_per_tok": 2},
    "Qwen2Moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, **ROUTED},
    "Qwen3Moe": {"num_experts": 4, **ROUTED},
    "Olmoe": {"num_experts": 4, "intermediate_size": 288, "num_experts_per_tok": 2,
              "num_key_value_heads": 4, "head_dim": 64},
    "DeepseekV3": {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                   "first_k_dense_replace": 0, "q_lora_rank": 64, "kv_lora_rank": 64,
                   "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
                   "num_key_value_heads": 4, **ROUTED},
}  # fmt: skip
RECIPES = [TwoFour(), TwoFour(0.5), BlockSparse(32, 0.5)]


def only_experts(module: nn.Module, name: str) -> bool:
    return name.endswith("mlp.experts")


def model_of(family: str, recipe: Any, **fields: Any) -> Any:
    """Return a dense model in evaluation mode."""
    sizes = (
        SIZES
        | {"vocab_size": 32, "hidden_size": 256, "num_hidden_layers": 1}
        | FAMILIES[family]
        | fields
    )
    config = getattr(transformers, f"{family}Config")(**sizes)
    torch.manual_seed(SEED)
    dtype = torch.float32 if isinstance(recipe, BlockSparse) else FP16
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    for name, weight in model.named_parameters():
        if "lm_head" in name or "down_proj" in name:  # so that no two tokens are nearly alike
            nn.init.normal_(weight, std=0.5)
    return model.eval()


def pruned(weight: Tensor, recipe: Any) -> Tensor:
    """Return a weight [n, k] that a recipe has pruned."""
    if isinstance(recipe, BlockSparse):
        (n, k), b = weight.shape, recipe.block
        norms = weight.view(n // b, b, k // b, b).double().square().sum((1, 3)).flatten()
        kept = torch.zeros_like(norms, dtype=torch.bool)
        kept[norms.topk(len(norms) - round(recipe.sparsity * len(norms))).indices] = True
        kept = kept.view(n // b, k // b).repeat_interleave(b, 0).repeat_interleave(b, 1)
        return weight.where(kept, 0)
    sparse = weight.shape[1] if not recipe.dense else weight.shape[1] // 2 // 128 * 128
    groups = weight[:, :sparse].unflatten(1, (-1, 4))
    order = groups.abs().argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return torch.cat((groups.where(order < 2, 0).flatten(1), weight[:, sparse:]), 1)


def prune_experts(model: Any, recipe: Any) -> Any:
    """Write what a recipe leaves of each expert into a dense model."""
    for name, module in model.named_modules():
        if only_experts(module, name):
            for w in (module.gate_up_proj.detach(), module.down_proj.detach()):
                for matrix in w:
                    for part in matrix.chunk(1 if w.shape[1] == 256 else 2):
                        part.copy_(pruned(part, recipe))
    return model


@pytest.mark.parametrize(("family", "recipe"), crossed([*FAMILIES], RECIPES), ids=str)
def test_a_sparse_model_generates_what_the_pruned_dense_one_does(
    family, recipe, tmp_path: Path, caplog
):
    model = model_of(family, recipe)
    with caplog.at_level("INFO", "sparsebench"):
        sparse = sparsify_(copy.deepcopy(model), recipe, only_experts)
    assert f"replaces 1 {family}Experts; leaves dense: none" in caplog.text
    dense = prune_experts(model, recipe)
    experts = sparse.model.layers[0].mlp.experts
    assert isinstance(experts, SparseExperts)
    assert (experts.experts, experts.top_k) == (4, 2)
    original = dense.model.layers[0].mlp.experts
    for actual, w in zip(
        experts.to_dense(), (original.gate_up_proj, original.down_proj), strict=True
    ):
        assert torch.equal(actual, w)
    tokens = generated(dense)
    assert torch.equal(generated(sparse), tokens)
    sparse.save_pretrained(tmp_path / "sparse")
    owner = "block_sparse_moe" if family == "Mixtral" else "mlp"
    names = {
        name for name in load_file(tmp_path / "sparse/model.safetensors") if ".experts." in name
    }
    tensor = "values" if isinstance(recipe, BlockSparse) else "sparse"
    assert f"model.layers.0.{owner}.experts.gate_up.{tensor}" in names
    assert not [name for name in names if "proj" in name]
    restored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    again = restored.model.layers[0].mlp.experts
    assert not any(p.requires_grad for p in again.parameters())
    for a, b in zip(again.to_dense(), experts.to_dense(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(generated(restored), tokens)
    restored.dequantize()
    assert torch.equal(generated(restored), tokens)
    restored.save_pretrained(tmp_path / "dense")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    assert type(plain.model.layers[0].mlp.experts) is type(original)
    assert torch.equal(generated(plain), tokens)


def test_a_whole_model_becomes_sparse_and_a_state_dict_fills_another() -> None:
    """Without a filter, experts and the linear layers around them are replaced."""
    model = model_of("Qwen2Moe", TwoFour())
    with pytest.warns(UserWarning, match="1 Qwen2MoeExperts") as caught:
        sparse = sparsify_(copy.deepcopy(model), TwoFour())
    assert "experts share" not in str(caught[0].message)
    layer = sparse.model.layers[0]
    assert isinstance(layer.mlp.experts, SparseExperts)
    assert isinstance(layer.self_attn.q_proj, SpenseLinear)
    with pytest.warns(UserWarning, match="1 Qwen2MoeExperts"):
        other = sparsify_(model_of("Qwen2Moe", TwoFour()), TwoFour())
    for buffer in other.buffers():
        if buffer.dtype == torch.uint8:
            buffer.zero_()
    other.load_state_dict(sparse.state_dict())
    assert torch.equal(generated(other), generated(sparse))


GPT_OSS = {"num_local_experts": 4, "intermediate_size": 64, "num_experts_per_tok": 2}


def test_experts_of_another_layout_stay_dense_with_a_reason() -> None:
    config = transformers.GptOssConfig(**SIZES | GPT_OSS | {"num_hidden_layers": 1})
    model = transformers.AutoModelForCausalLM.from_config(config)
    with pytest.warns(UserWarning, match="GptOssExperts, whose experts share one tensor"):
        sparsify_(model, BlockSparse(16, 0.5))
    with pytest.warns(UserWarning, match="MixtralExperts, whose experts share one tensor"):
        sparsify_(model_of("Mixtral", TwoFour()), Unstructured())


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TwoFour(), {"hidden_act": "tanh"}, "expected an activation silu or gelu_tanh or relu, found"),
    (TwoFour(), {"intermediate_size": 40}, "gate_up: expected a multiple of 32 features, found 40"),
    (TwoFour(0.75), {}, "expected at least one sparse tile of 128, found none at dense 0.75"),
    (BlockSparse(64, 0.5), {}, "gate_up: expected a multiple of 64 features, found 288"),
    (BlockSparse((32, 16), 0.5), {}, "block: expected square blocks for experts, found 32x16"),
    (BlockSparse(32, 0.999), {}, "expected a block to remain at sparsity 0.999, found 72"),
]


@pytest.mark.parametrize(("recipe", "fields", "message"), REFUSED, ids=[i[2][:50] for i in REFUSED])
def test_experts_that_do_not_fit_are_refused_before_any_change(recipe, fields, message) -> None:
    model = model_of("Mixtral", recipe, **fields)
    with pytest.raises(FormatError, match=rf"^model.layers.0.mlp.experts: {message}"):
        sparsify_(model, recipe, only_experts)
    assert not any(isinstance(module, SparseExperts) for module in model.modules())


def test_a_module_that_computes_something_else_is_refused() -> None:
    model = model_of("Mixtral", TwoFour())
    experts = model.model.layers[0].mlp.experts
    experts.forward = lambda x, *_: x
    with pytest.raises(FormatError, match="to compute gated experts, found a relative error of"):
        sparsify_(model, TwoFour(), only_experts)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [TwoFour(), BlockSparse(32, 0.5)], ids=str)
def test_a_model_on_a_gpu_computes_what_the_pruned_dense_one_does(recipe) -> None:
    if isinstance(recipe, TwoFour) and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("2:4 experts need a Hopper")
    model = model_of("Qwen3Moe", TwoFour()).cuda()
    sparse = sparsify_(copy.deepcopy(model), recipe, only_experts, tokens=())
    plan_ahead(sparse, [1, 16])
    dense = prune_experts(model, recipe)
    for tokens in (1, 16):
        ids = torch.arange(3, 3 + tokens, device="cuda")[None]
        with torch.no_grad():
            logits, expected = (each(ids).logits.float() for each in (sparse, dense))
        assert float((logits - expected).norm() / expected.norm()) < 0.01
