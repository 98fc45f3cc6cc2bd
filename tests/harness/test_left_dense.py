"""What sparsify_ leaves dense; experts, adapters, and checkpoints in models with other heads."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from sparsebench.errors import FormatError, Unsupported
from sparsebench.kernels.nn import BitmapLinear, BlockSparseLinear, SpenseLinear
from sparsebench.nn import BlockSparse, SparseActivations, TwoFour, Unstructured, sparsify_
from tests.harness.tiny_models import tiny, transformers

BF16 = torch.bfloat16
BLOCKS = BlockSparse(16, 0.5)
SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
}
IDS = torch.arange(3, 35).view(2, 16)


# ---- code that reads `weight` ----


def test_the_weight_of_a_packed_layer_tells_everything_but_values():
    w = torch.zeros(64, 48, dtype=BF16)
    layers = [
        BlockSparseLinear(48, 64, block=16, sparsity=0.5, dtype=BF16),
        SpenseLinear.from_dense(w),
        SpenseLinear.from_dense(w, dtype=torch.float8_e4m3fn),
        BitmapLinear.from_dense(w),
    ]
    for layer in layers:
        weight = layer.weight
        assert isinstance(layer, nn.Linear)
        assert isinstance(weight, Tensor)
        assert (weight.dtype, weight.device, weight.shape) == (BF16, torch.device("cpu"), (64, 48))
        facts = weight.size(0), weight.dim(), weight.numel(), weight.is_cuda
        assert facts == (64, 2, 3072, False)
        for read in (lambda w: linear(torch.ones(1, 48), w), lambda w: w.data, lambda w: w[0]):
            with pytest.raises(Unsupported, match=type(layer).__name__):
                read(weight)
    layers[0].weight.requires_grad = False
    assert not layers[0].values.requires_grad


@pytest.mark.parametrize("padding", [None, torch.tensor([[False] * 5, [False] * 4 + [True]])])
def test_the_fast_path_of_a_transformer_encoder_is_not_taken(padding):
    layer = nn.TransformerEncoderLayer(64, 4, 128, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    sparsify_(model, BLOCKS, lambda _, name: name.endswith(("linear1", "linear2")))
    x = torch.randn(2, 5, 64)
    with torch.no_grad():
        y = model(x, src_key_padding_mask=padding)
    torch.testing.assert_close(model(x, src_key_padding_mask=padding), y)


@pytest.mark.parametrize("compiled", [False, True])
def test_t5_reads_the_dtype_of_its_weights(compiled):
    sizes = {"vocab_size": 64, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 1}
    config = transformers.T5Config(**sizes, num_heads=4)
    model = transformers.T5EncoderModel(config).eval()
    mlp = sparsify_(model, BLOCKS).encoder.block[0].layer[1].DenseReluDense
    x = torch.randn(3, 64)
    run = torch.compile(mlp, fullgraph=True, backend="eager") if compiled else mlp
    torch.testing.assert_close(run(x), mlp.wo(mlp.wi(x).relu()))


def test_code_that_computes_with_a_weight_raises_at_its_first_call():
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 1, "state_size": 8}
    model = transformers.MambaForCausalLM(transformers.MambaConfig(**sizes)).eval()
    with torch.no_grad():
        sparsify_(model, BLOCKS, lambda _, name: name.endswith("in_proj"))
        assert model(input_ids=IDS).logits.isfinite().all()
        sparsify_(model, BLOCKS, lambda _, name: name.endswith("dt_proj"))
        with pytest.raises(Unsupported, match="BlockSparseLinear"):
            model(input_ids=IDS)


# ---- what stays dense ----


def qwen_moe() -> Any:
    sizes = {"num_key_value_heads": 2, "num_experts": 16, "moe_intermediate_size": 32}
    config = transformers.Qwen2MoeConfig(**SIZES, **sizes, shared_expert_intermediate_size=64)
    return transformers.Qwen2MoeForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(**SIZES, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("make", "token"), [(mixtral, r"Router \(256 weights"), (qwen_moe, "shared_expert_gate")]
)
def test_experts_routers_and_one_row_gates_stay_dense_and_are_counted(make, token):
    """Unstructured takes no experts."""
    model = make().to(BF16)
    dense = [
        p for name, p in model.named_parameters() if "experts." in name or "expert_gate" in name
    ]
    with pytest.warns(UserWarning, match=token) as caught:
        sparsify_(model, Unstructured())
    [message] = [str(warning.message) for warning in caught]
    assert "98,304 weights in 2 tensors" in message
    assert "\n" not in message
    assert {*map(id, dense)} <= {*map(id, model.parameters())}
    assert isinstance(model.model.layers[0].self_attn.q_proj, BitmapLinear)


def test_a_filter_still_hears_of_experts_but_of_nothing_else():
    with pytest.warns(UserWarning, match="Qwen2MoeExperts") as caught:
        sparsify_(qwen_moe(), BLOCKS, lambda _, name: name.endswith("q_proj"))
    assert "gate" not in str(caught[0].message).replace("gate_up_proj", "")


class Router(nn.Module):
    """A layer with a row for each of 16 experts, in a model whose configuration has as many."""

    class config:
        @staticmethod
        def to_dict() -> dict[str, int]:
            return {"num_local_experts": 16}

    def __init__(self) -> None:
        super().__init__()
        self.router, self.up = nn.Linear(64, 16), nn.Linear(64, 64)


def test_a_router_stays_dense():
    with pytest.warns(UserWarning, match="routers"):
        model = sparsify_(Router(), BLOCKS)
    assert type(model.router) is nn.Linear
    assert isinstance(model.up, BlockSparseLinear)


def test_a_model_without_a_layer_says_what_it_has():
    config = transformers.GPT2Config(vocab_size=64, n_embd=64, n_layer=1, n_head=2)
    with pytest.raises(FormatError, match="Conv1D"):
        sparsify_(transformers.GPT2LMHeadModel(config), BLOCKS)


def test_a_layer_of_multihead_attention_and_a_head_stay_dense_and_replaced_ones_are_counted():
    vision = SIZES | {"image_size": 32, "patch_size": 8}
    model = transformers.SiglipForImageClassification(
        transformers.SiglipConfig(text_config=SIZES, vision_config=vision)
    )
    with pytest.warns(UserWarning, match="sparsify_ replaces 8 Linear; leaves dense") as caught:
        sparsify_(model, BLOCKS)
    assert "MultiheadAttention (16,448 weights in 2 tensors" in str(caught[0].message)


def test_heads_alone_are_no_warning_but_a_line_of_the_log(caplog):
    caplog.set_level("INFO", logger="sparsebench")
    sparsify_(tiny(), BLOCKS)
    heads = "output heads (19,200 weights in 1 tensor, the first is lm_head)"
    assert caplog.messages == [f"sparsify_ replaces 14 Linear; leaves dense: {heads}"]


def test_a_filter_can_take_a_head():
    model = sparsify_(tiny(), BLOCKS, lambda _, name: name == "lm_head")
    assert isinstance(model.lm_head, BlockSparseLinear)


def test_a_gated_mlp_with_biases_becomes_three_linear_layers():
    model = sparsify_(tiny(dtype=BF16, mlp_bias=True), TwoFour())
    assert isinstance(model.model.layers[0].mlp.gate_proj, SpenseLinear)


# ---- adapters ----


def adapted(model: Any, targets: Any) -> Any:
    peft = pytest.importorskip("peft", reason="needs the package peft")
    with warnings.catch_warnings(action="ignore"):  # peft uses deprecated names of transformers
        return peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=targets))


def trained(model: Any) -> set[str]:
    """Train adapters for three steps; return the layers of block 0 that have one."""
    weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.Adam(weights.values(), lr=1e-2), []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        assert all(p.grad is not None for p in weights.values())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[2] < losses[1] < losses[0]
    names = {name.partition(".lora_")[0] for name in weights if ".layers.0." in name}
    return {name.rpartition(".")[2] for name in names}


def only_linear(module: nn.Module, name: str) -> bool:
    return isinstance(module, nn.Linear) and "layers" in name


ATTENTION, MLP = {"q_proj", "k_proj", "v_proj", "o_proj"}, {"gate_proj", "up_proj", "down_proj"}
ADAPTED: list[tuple[Any, Callable[..., bool] | None, Any, set[str]]] = [
    (TwoFour(), None, "all-linear", ATTENTION | {"gate_up", "down"}),
    (TwoFour(), only_linear, ["q_proj", "gate_proj"], {"q_proj", "gate_proj"}),
    (Unstructured(), None, "all-linear", ATTENTION | MLP),
    (BLOCKS, None, "all-linear", ATTENTION | MLP),
]


@pytest.mark.parametrize(
    ("recipe", "filter_fn", "targets", "layers"), ADAPTED, ids=range(len(ADAPTED))
)
def test_adapters_train_on_every_layer(recipe, filter_fn, targets, layers):
    model = adapted(sparsify_(tiny(dtype=BF16), recipe, filter_fn), targets)
    assert trained(model) == layers
    with pytest.raises(Unsupported, match="has no dense weight"):
        model.merge_and_unload()


@pytest.mark.parametrize(
    ("recipe", "advice"), [(TwoFour(), "isinstance"), (SparseActivations(), "filter_fn")], ids=str
)
def test_an_adapter_for_a_part_of_a_whole_mlp_is_an_error_with_advice(recipe, advice):
    dtype = torch.float32 if isinstance(recipe, SparseActivations) else BF16
    act = {"hidden_act": "relu"} if isinstance(recipe, SparseActivations) else {}
    model = sparsify_(tiny(dtype=dtype, **act), recipe)
    with pytest.raises(ValueError, match=rf"a part of \w+: .*{advice}"):
        adapted(model, ["q_proj", "gate_proj"])


def test_adapters_on_a_layer_that_trains_its_own_weights_are_refused():
    model = adapted(sparsify_(tiny(hidden_act="relu"), SparseActivations()), "all-linear")
    with pytest.raises(Unsupported, match="filter_fn"):
        model(IDS)


def test_layers_under_adapters_become_sparse_and_the_adapters_do_not():
    model = adapted(tiny(dtype=BF16), "all-linear")
    with pytest.warns(UserWarning, match="adapters"):
        sparsify_(model, TwoFour())
    assert trained(model) == ATTENTION | MLP
    layer = model.base_model.model.model.layers[0].mlp.up_proj
    assert isinstance(layer.base_layer, SpenseLinear)
    assert type(layer.lora_A.default) is nn.Linear


# ---- checkpoints in a model with another head ----


HEADS: list[tuple[str, dict[str, Any], str, list[str]]] = [
    ("Llama", SIZES, "LlamaForCausalLM", ["LlamaModel", "LlamaForSequenceClassification"]),
    ("Llama", SIZES, "LlamaModel", ["LlamaForCausalLM"]),
    ("Bert", SIZES, "BertModel", ["BertForSequenceClassification", "BertForMaskedLM"]),
]


@pytest.mark.parametrize(("family", "sizes", "saved", "others"), HEADS, ids=[h[2] for h in HEADS])
@pytest.mark.filterwarnings("ignore")
def test_a_checkpoint_loads_under_another_head(family, sizes, saved, others, tmp_path, capfd):
    config = getattr(transformers, f"{family}Config")(**sizes)
    model = getattr(transformers, saved)(config).eval()
    sparsify_(model, BLOCKS)
    model.save_pretrained(tmp_path / "saved")
    for other in others:
        loaded = getattr(transformers, other).from_pretrained(tmp_path / "saved")
        assert any(isinstance(m, BlockSparseLinear) for m in loaded.modules())
        assert torch.equal(loaded.base_model(IDS)[0], model.base_model(IDS)[0])
        loaded.save_pretrained(tmp_path / other)
        again = getattr(transformers, other).from_pretrained(tmp_path / other)
        assert torch.equal(again.base_model(IDS)[0], model.base_model(IDS)[0])
