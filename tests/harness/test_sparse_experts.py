"""sparsify_ on models whose experts share tensors: tokens, names in files, and what is refused."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from sparsebench.errors import FormatError, Unsupported
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
    "GptOss": {"num_local_experts": 4, "intermediate_size": 288, "num_experts_per_tok": 2},
    "Llama4Text": {"num_local_experts": 4, "intermediate_size": 288, "num_experts_per_tok": 2,
                   "intermediate_size_mlp": 64, "interleave_moe_layer_step": 1},
}  # fmt: skip
RECIPES = [TwoFour(), TwoFour(0.5), BlockSparse(32, 0.5), BlockSparse(64, 0.5)]  # 288 is 4.5 x 64


def only_experts(module: nn.Module, name: str) -> bool:
    return name.endswith(".experts")


def experts_in(model: Any) -> Any:
    """Return the module of the experts of the only layer."""
    (module,) = (m for name, m in model.named_modules() if only_experts(m, name))
    return module


def weights_in(module: Any) -> list[list[Tensor]]:
    """Return views of gate and up [i, h] and of down [h, i] of each dense expert."""
    both = [module.gate_up_proj.detach(), module.down_proj.detach()]
    if "GptOss" in type(module).__name__:
        return [[w.T[::2], w.T[1::2], d.T] for w, d in zip(*both, strict=True)]
    if "Llama4" in type(module).__name__:
        both = [w.transpose(1, 2) for w in both]
    return [[*w.chunk(2), d] for w, d in zip(*both, strict=True)]


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
        if name.endswith("_bias") or (family == "Llama4Text" and "gate_up_proj" in name):
            nn.init.normal_(weight, std=0.1)  # which are zeros
    return model.eval()


def pruned(weight: Tensor, recipe: Any) -> Tensor:
    """Return a weight [n, k] that a recipe has pruned."""
    if isinstance(recipe, BlockSparse):
        (n, k), b = weight.shape, recipe.block
        padded = nn.functional.pad(weight.double(), (0, -k % b, 0, -n % b))
        norms = padded.unflatten(1, (-1, b)).unflatten(0, (-1, b)).square().sum((1, 3))
        kept = torch.zeros_like(norms.flatten(), dtype=torch.bool)
        count = kept.numel()
        kept[norms.flatten().topk(count - round(recipe.sparsity * count)).indices] = True
        kept = kept.view(norms.shape).repeat_interleave(b, 0).repeat_interleave(b, 1)
        return weight.where(kept[:n, :k], 0)
    sparse = weight.shape[1] if not recipe.dense else weight.shape[1] // 2 // 128 * 128
    groups = weight[:, :sparse].unflatten(1, (-1, 4))
    order = groups.abs().argsort(dim=-1, descending=True, stable=True).argsort(-1)
    return torch.cat((groups.where(order < 2, 0).flatten(1), weight[:, sparse:]), 1)


def prune_experts(model: Any, recipe: Any) -> Any:
    """Write what a recipe leaves of each expert into a dense model."""
    for expert in weights_in(experts_in(model)):
        for part in expert:
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
    assert ("pads experts to multiples of 64" in caplog.text) == (recipe == RECIPES[-1])
    dense = prune_experts(model, recipe)
    experts, original = experts_in(sparse), experts_in(dense)
    assert isinstance(experts, SparseExperts)
    assert (experts.experts, experts.in_features, experts.hidden_features) == (4, 256, 288)
    assert (experts.activation == "clamped_swiglu") == (family == "GptOss")
    for gate_up, down, parts in zip(*experts.to_dense(), weights_in(original), strict=True):
        assert torch.equal(gate_up, torch.cat(parts[:2]))
        assert torch.equal(down, parts[2])
    tokens = generated(dense)
    assert torch.equal(generated(sparse), tokens)
    sparse.save_pretrained(tmp_path / "sparse")
    owners = {"Mixtral": "block_sparse_moe", "Llama4Text": "feed_forward"}
    names = {
        name for name in load_file(tmp_path / "sparse/model.safetensors") if ".experts." in name
    }
    tensor = "values" if isinstance(recipe, BlockSparse) else "sparse"
    assert f"model.layers.0.{owners.get(family, 'mlp')}.experts.gate_up.{tensor}" in names
    assert not [name for name in names if "proj" in name]
    restored = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "sparse")
    again = experts_in(restored)
    trained = {name for name, p in again.named_parameters() if p.requires_grad}
    assert trained == ({"gate_up.values", "down.values"} if tensor == "values" else set())
    for name, saved in experts.state_dict().items():
        assert torch.equal(again.state_dict()[name], saved), name
    assert torch.equal(generated(restored), tokens)
    restored.dequantize()
    assert type(experts_in(restored)) is type(original)
    assert torch.equal(generated(restored), tokens)
    restored.save_pretrained(tmp_path / "dense")
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense")
    for name, weight in original.named_parameters():
        assert torch.equal(experts_in(plain).get_parameter(name), weight)
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


def test_experts_of_another_layout_stay_dense_with_a_reason() -> None:
    for family, change in (
        ("Mixtral", {"has_gate": False}),
        ("Mixtral", {"has_post_expert_norm": True}),
        ("Llama4Text", {"forward": lambda x, ids, weights: x}),
    ):
        model = model_of(family, TwoFour())
        for name, value in change.items():
            setattr(experts_in(model), name, value)
        with pytest.warns(UserWarning, match=f"{family}Experts, whose experts share one tensor"):
            sparsify_(model, TwoFour())
    with pytest.warns(UserWarning, match="MixtralExperts, whose experts share one tensor"):
        sparsify_(model_of("Mixtral", TwoFour()), Unstructured())


IDS = torch.arange(3, 19)[None]


def adapter_gradients(model: Any) -> dict[str, Tensor]:
    """Return the gradients of adapters on the attention, by name."""
    peft = pytest.importorskip("peft", reason="needs the package peft")
    torch.manual_seed(0)
    targets = ["q_proj", "v_proj", "q_b_proj", "kv_b_proj"]
    config = peft.LoraConfig(r=4, target_modules=targets, init_lora_weights=False)
    adapted = peft.get_peft_model(model, config).train()
    adapted(IDS, labels=IDS).loss.backward()
    return {name: p.grad for name, p in adapted.named_parameters() if p.grad is not None}


@pytest.mark.filterwarnings("ignore")  # of peft
@pytest.mark.parametrize(
    ("family", "recipe"), crossed(["Mixtral", "Qwen3Moe", "GptOss", "Llama4Text"], RECIPES), ids=str
)
def test_adapters_beside_sparse_experts_train_as_in_the_pruned_dense_model(family, recipe) -> None:
    """Return a model of two layers, so that gradients pass the experts of the second."""
    model = model_of(family, recipe, num_hidden_layers=2).float()
    kind = torch.float32 if isinstance(recipe, BlockSparse) else FP16
    sparse = sparsify_(copy.deepcopy(model).to(kind), recipe, only_experts)
    for name, module in model.named_modules():
        if only_experts(module, name):
            experts = sparse.get_submodule(name)
            for packed, parts in zip(
                zip(*experts.to_dense(), strict=True), weights_in(module), strict=True
            ):
                gate, up = packed[0].chunk(2)
                for part, w in zip(parts, (gate, up, packed[1]), strict=True):
                    part.copy_(w)
    expected, actual = adapter_gradients(model), adapter_gradients(sparse)
    assert actual.keys() == expected.keys()
    assert any("layers.0" in name for name in actual)
    most = 1e-4 if kind == torch.float32 else 0.05
    for name, gradient in expected.items():
        error = float((actual[name].float() - gradient).norm() / gradient.norm())
        assert error < most, (name, error)


@pytest.mark.filterwarnings("ignore")  # of peft
def test_adapters_on_all_linear_layers_leave_out_experts_or_say_how() -> None:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    model = sparsify_(model_of("Qwen3Moe", BlockSparse()), BlockSparse(32, 0.5), only_experts)
    options = {"r": 4, "target_modules": "all-linear", "init_lora_weights": False}
    config = peft.LoraConfig(exclude_modules=r".*\.experts\..*", **options)
    adapted = peft.get_peft_model(copy.deepcopy(model), config)
    adapted(IDS, labels=IDS).loss.backward()
    assert all(p.grad is not None for p in adapted.parameters() if p.requires_grad)
    with pytest.raises(Unsupported, match=r"no adapter in experts, .* exclude_modules"):
        peft.get_peft_model(model, peft.LoraConfig(**options))(IDS)


def test_blocks_of_experts_train() -> None:
    model = sparsify_(model_of("Qwen3Moe", BlockSparse()), BlockSparse(32, 0.5), only_experts)
    values = [p for name, p in model.named_parameters() if name.endswith(".values")]
    optimizer = torch.optim.SGD(values, lr=1.0)
    losses = []
    for _ in range(5):
        loss = model(IDS, labels=IDS).loss
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0] - 0.1


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    (TwoFour(), {"hidden_act": "tanh"}, "expected an activation silu or .*, found Tanh"),
    (TwoFour(), {"intermediate_size": 40}, "gate_up: expected a multiple of 32 features, found 40"),
    (TwoFour(0.75), {}, "expected at least one sparse tile of 128, found none at dense 0.75"),
    (BlockSparse((32, 16), 0.5), {}, "block: expected square blocks for experts, found 32x16"),
    (BlockSparse(32, 0.999), {}, "expected a block to remain at sparsity 0.999, found 72"),
    (BlockSparse(32, -1), {}, "sparsity: expected 0 to 1, found -1"),
    (BlockSparse(32, math.nan), {}, "sparsity: expected 0 to 1, found nan"),
]


@pytest.mark.parametrize(("recipe", "fields", "message"), REFUSED, ids=[i[2][:50] for i in REFUSED])
def test_experts_that_do_not_fit_are_refused_before_any_change(recipe, fields, message) -> None:
    model = model_of("Mixtral", recipe, **fields)
    with pytest.raises(FormatError, match=rf"^model.layers.0.mlp.experts: {message}"):
        sparsify_(model, recipe, only_experts)
    assert not any(isinstance(module, SparseExperts) for module in model.modules())


def test_a_module_that_does_not_run_is_refused_in_one_line() -> None:
    model = model_of("Mixtral", TwoFour())
    experts_in(model).forward = lambda x, *_: x @ x.new_ones(1)
    with pytest.raises(FormatError, match=r"expected MixtralExperts to run on .*size") as error:
        sparsify_(model, TwoFour(), only_experts)
    assert "\n" not in str(error.value)


def test_a_module_that_computes_something_else_is_refused() -> None:
    model = model_of("Mixtral", TwoFour())
    experts_in(model).forward = lambda x, *_: x
    with pytest.raises(FormatError, match="to compute gated experts, found a relative error of"):
        sparsify_(model, TwoFour(), only_experts)
    model = model_of("GptOss", TwoFour())
    experts_in(model).limit = 5.0
    with pytest.raises(FormatError, match="or clamped_swiglu, found GptOssExperts"):
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
