"""The plug-in with the layers of vLLM 0.33, without an engine: shards of 1, 2 and 4 ranks.

Built and run by environments.sh. A process group of one process is all that is faked.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: tests/vllm/environments.sh")

import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.functional import linear  # noqa: E402
from vllm.config import LoadConfig, VllmConfig, set_current_vllm_config  # noqa: E402
from vllm.distributed import parallel_state  # noqa: E402
from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: E402
from vllm.model_executor.layers.linear import (  # noqa: E402
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.quantization import get_quantization_config  # noqa: E402
from vllm.model_executor.model_loader import get_model_loader  # noqa: E402

from sparsebench.errors import FormatError  # noqa: E402
from sparsebench.nn import BlockSparse, TwoFour, Unstructured  # noqa: E402
from sparsebench.vllm import linear as methods  # noqa: E402
from sparsebench.vllm.config import ServedConfig, warn_of_untested_versions  # noqa: E402
from sparsebench.vllm.linear import SparseLinearMethod, tokens_of  # noqa: E402
from sparsebench.vllm.packing import prune  # noqa: E402
from sparsebench.vllm.plugin import register  # noqa: E402

register()

K, N, HEADS, SIZE = 256, 1024, 8, 32
BF16 = {"dtype": "bfloat16"}
LAYERS: dict[str, dict[str, Any]] = {  # what a checkpoint says of a layer [n, k]
    "2:4": {"layer": "SpenseLinear", "sparse_shape": (0, 0)},
    "half 2:4": {"layer": "SpenseLinear", "sparse_shape": (0, 0)},
    "blocks": {"layer": "BlockSparseLinear", "block": (32, 32), "stored": 1},
    "anywhere": {"layer": "BitmapLinear", "stored": 16},
}
RECIPES: dict[str, Any] = {
    "2:4": TwoFour(),
    "half 2:4": TwoFour(0.5),
    "blocks": BlockSparse(32, 0.5),
    "anywhere": Unstructured(),
}
PARTS = {"qkv_proj": ["q_proj", "k_proj", "v_proj"], "gate_up_proj": ["gate_proj", "up_proj"]}
needs_033 = pytest.mark.skipif(
    not vllm.__version__.startswith("0.33."), reason="needs vLLM 0.33: the contracts are its own"
)
pytestmark = needs_033


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()


@contextmanager
def on_rank(rank: int, ranks: int) -> Iterator[VllmConfig]:
    """Be a rank, in an engine that loads sparse checkpoints."""
    engine = VllmConfig(load_config=LoadConfig(load_format="sparsebench"))
    group = {"rank_in_group": rank, "world_size": ranks, "device_group": None, "cpu_group": None}
    with pytest.MonkeyPatch.context() as patch, set_current_vllm_config(engine):
        patch.setattr(parallel_state, "_TP", SimpleNamespace(**group))
        yield engine


def configured(kind: str, *names: str) -> ServedConfig:
    """Return the configuration of a checkpoint whose layers have these names."""
    sizes = {"in_features": K, "out_features": N, "bias": False, **BF16}
    layers = {f"mlp.{name}": LAYERS[kind] | sizes for name in names}
    config = ServedConfig.from_config(
        {"quant_method": "sparsebench", "version": 1, "layers": layers}
    )
    config.packed_modules_mapping = PARTS
    return config


def pruned(kind: str, n: int, k: int) -> Tensor:
    return prune(drawn(n, k), RECIPES[kind])


def loaded(layer: Any, weight: Tensor, *shards: Any) -> Any:
    """Load a weight, or parts of it by their shard, as vLLM does; pack it."""
    parts = weight if isinstance(weight, list) else [weight]
    for part, shard in zip(parts, shards or [None], strict=True):
        place = () if shard is None else (shard,)
        layer.weight.weight_loader(layer.weight, part, *place)
    layer.quant_method.process_weights_after_loading(layer)
    assert isinstance(layer.quant_method, SparseLinearMethod)
    assert not hasattr(layer, "weight")
    return layer


OPTIONS: dict[str, Any] = {"bias": False, "return_bias": False, "params_dtype": torch.bfloat16}


def test_vllm_finds_the_plug_in() -> None:
    (entry,) = entry_points(group="vllm.general_plugins", name="sparsebench")
    entry.load()()
    entry.load()()  # every process may call it again
    assert get_quantization_config("sparsebench") is ServedConfig
    loader = get_model_loader(LoadConfig(load_format="sparsebench"))
    assert type(loader).__name__ == "UnpackingLoader"


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_columns_of_all_ranks_are_the_dense_product(kind: str, ranks: int) -> None:
    weight, x, shards = pruned(kind, N, K), drawn(5, K), []
    for rank in range(ranks):
        with on_rank(rank, ranks):
            config = configured(kind, "fc")
            layer = ColumnParallelLinear(K, N, quant_config=config, prefix="mlp.fc", **OPTIONS)
            shards.append(loaded(layer, weight)(x))
    torch.testing.assert_close(torch.cat(shards, -1), linear(x, weight))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_gate_and_up_of_all_ranks_are_the_dense_products(kind: str, ranks: int) -> None:
    weights, x, shards = [pruned(kind, N, K), pruned(kind, N, K).flip(1)], drawn(5, K), []
    for rank in range(ranks):
        with on_rank(rank, ranks):
            config = configured(kind, "gate_proj", "up_proj")
            options = OPTIONS | {"quant_config": config, "prefix": "mlp.gate_up_proj"}
            layer = MergedColumnParallelLinear(K, [N, N], **options)
            shards.append(loaded(layer, weights, 0, 1)(x).chunk(2, -1))
    for part, weight in zip(zip(*shards, strict=True), weights, strict=True):
        torch.testing.assert_close(torch.cat(part, -1), linear(x, weight))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", [kind for kind in LAYERS if kind != "half 2:4"])
def test_q_k_and_v_of_all_ranks_are_the_dense_products(kind: str, ranks: int) -> None:
    few = 4  # heads of K and V
    weights = [pruned(kind, heads * SIZE, K) for heads in (HEADS, few, few)]
    x, shards = drawn(5, K), []
    for rank in range(ranks):
        with on_rank(rank, ranks):
            config = configured(kind, "q_proj", "k_proj", "v_proj")
            options = OPTIONS | {"quant_config": config, "prefix": "mlp.qkv_proj"}
            layer = QKVParallelLinear(K, SIZE, HEADS, few, **options)
            sizes = [count * SIZE // ranks for count in (HEADS, few, few)]
            shards.append(loaded(layer, weights, "q", "k", "v")(x).split(sizes, -1))
    for part, weight in zip(zip(*shards, strict=True), weights, strict=True):
        torch.testing.assert_close(torch.cat(part, -1), linear(x, weight))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("kind", LAYERS)
def test_the_rows_of_all_ranks_add_up_to_the_dense_product(kind: str, ranks: int) -> None:
    weight, x = pruned(kind, K, N), drawn(5, N)
    if kind == "half 2:4":  # as down_proj of a gated MLP: the last columns are dense
        weight = torch.cat((pruned("2:4", K, N)[:, : N // 2], drawn(K, N)[:, N // 2 :]), 1)
    y = torch.zeros(5, K)
    for rank in range(ranks):
        with on_rank(rank, ranks):
            options = OPTIONS | {"reduce_results": False, "quant_config": configured(kind, "down")}
            layer = RowParallelLinear(N, K, prefix="mlp.down", **options)
            part = x.chunk(ranks, -1)[rank].contiguous()
            y += loaded(layer, weight)(part).float()
    torch.testing.assert_close(y, linear(x.float(), weight.float()), atol=0.25, rtol=0.02)


def test_a_bias_is_added_and_a_part_may_stay_dense() -> None:
    weights, x = [pruned("2:4", N, K), drawn(N, K)], drawn(5, K)
    with on_rank(0, 1):
        options = OPTIONS | {"bias": True, "quant_config": configured("2:4", "gate_proj")}
        layer = MergedColumnParallelLinear(K, [N, N], prefix="mlp.gate_up_proj", **options)
        layer.bias.data.copy_(drawn(2 * N))
        y = loaded(layer, weights, 0, 1)(x)
    torch.testing.assert_close(y, linear(x, torch.cat(weights)) + drawn(2 * N))


@pytest.mark.parametrize("kind", RECIPES)
def test_a_recipe_prunes_a_dense_weight(kind: str, tmp_path: Path) -> None:
    fields = {"2:4": {}, "half 2:4": {"dense": 0.5}, "blocks": {"block": 32, "sparsity": 0.5}}
    name = type(RECIPES[kind]).__name__
    file = tmp_path / "sparsebench.json"
    file.write_text(json.dumps({"recipe": name, "layers": ["mlp.*"]} | fields.get(kind, {})))
    config, x = ServedConfig.from_config_file(str(file)), drawn(5, K)
    with on_rank(0, 1):
        layer = ColumnParallelLinear(K, N, quant_config=config, prefix="mlp.fc", **OPTIONS)
        y = loaded(layer, drawn(N, K))(x)
    torch.testing.assert_close(y, linear(x, pruned(kind, N, K)))


def test_a_recipe_may_take_one_part_of_a_layer() -> None:
    config = ServedConfig.from_config({"recipe": "TwoFour", "layers": ["*.up_proj"]})
    config.packed_modules_mapping = PARTS
    weights, x = [drawn(N, K), drawn(N, K)], drawn(5, K)
    with on_rank(0, 1):
        options = OPTIONS | {"quant_config": config, "prefix": "mlp.gate_up_proj"}
        y = loaded(MergedColumnParallelLinear(K, [N, N], **options), weights, 0, 1)(x)
    expected = torch.cat((drawn(N, K), pruned("2:4", N, K)))
    torch.testing.assert_close(y, linear(x, expected))


def test_experts_routers_and_other_layers_stay_dense() -> None:
    config = ServedConfig.from_config({"recipe": "TwoFour", "layers": ["mlp.*", "*"]})
    assert config.get_quant_method(object.__new__(RoutedExperts), "mlp.experts") is None
    assert config.get_quant_method(torch.nn.Embedding(1, 1), "mlp.embed") is None
    with on_rank(0, 1):
        sizes = {"input_size": K, "output_size": 8, "quant_config": config} | OPTIONS
        router = ReplicatedLinear(prefix="mlp.gate", **sizes)
    assert type(router.quant_method).__name__ == "DenseLinearMethod"


def test_the_tokens_of_graphs_and_powers_of_two_are_planned() -> None:
    captures = SimpleNamespace(cudagraph_capture_sizes=[1, 2, 4, 8, 24])
    scheduler = SimpleNamespace(max_num_batched_tokens=100)
    engine = SimpleNamespace(compilation_config=captures, scheduler_config=scheduler)
    assert tokens_of(engine) == {1, 2, 4, 8, 16, 24, 32, 64, 100}


@pytest.mark.parametrize("search", [False, True])
def test_an_engine_searches_only_at_its_start_and_only_if_told(search, monkeypatch) -> None:
    planned: list[tuple[str, list[int]]] = []
    layer = SimpleNamespace(plan=lambda tokens: planned.append(("search", tokens)))
    monkeypatch.setattr(methods, "kinds_of", lambda sparse: [layer])
    plan_ahead = lambda sparse, tokens: planned.append(("plan", sorted(tokens)))  # noqa: E731
    monkeypatch.setattr(methods, "plan_ahead", plan_ahead)
    engine = VllmConfig(additional_config={"sparsebench_search": search})
    engine.compilation_config.cudagraph_capture_sizes = [1, 2]
    engine.scheduler_config.max_num_batched_tokens = 8
    methods.plan(torch.nn.Identity(), engine)
    assert planned == [("search", [1, 2, 4, 8])] * search + [("plan", [1, 2, 4, 8])]


def test_the_hash_of_compiled_code_depends_on_the_layout_of_the_weights() -> None:
    hashes = set()
    for kind in LAYERS:
        with on_rank(0, 1) as engine:
            config = configured(kind, "fc")
            layer = ColumnParallelLinear(K, N, quant_config=config, prefix="mlp.fc", **OPTIONS)
            loaded(layer, pruned(kind, N, K))
            hashes.add(engine.compute_hash())
    assert len(hashes) == len(LAYERS)


# ---- bad input ----


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"recipe": "TwoFours", "layers": ["*"]}, "did you mean TwoFour?"),
        ({"recipe": "SparseActivations", "layers": ["*"]}, "expected a known recipe"),
        (
            {"recipe": "TwoFour", "density": 0.5, "layers": ["*"]},
            "recipe TwoFour: expected a known field, found 'density'",
        ),
        ({"recipe": "BlockSparse", "block": "x", "layers": ["*"]}, "recipe BlockSparse: block"),
        ({"recipe": ["TwoFour"], "layers": ["*"]}, "expected a known recipe"),
        ({"recipe": "TwoFour"}, "layers: expected a list of patterns"),
        ({"quant_method": "sparsebench", "bits": 4}, "expected version 1 of a sparsebench"),
        ({"version": 1, "layers": {"a": {"layer": "X"}}}, "quantization_config: layers"),
    ],
)
def test_a_configuration_that_is_not_ours_is_one_line(config: Any, message: str) -> None:
    with pytest.raises(FormatError, match=message) as error:
        ServedConfig.from_config(config)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "config", [{"recipe": "TwoFour", "layers": ["mlp.*", "*.fc", "mpl.*"]}, None]
)
def test_a_name_without_a_layer_is_refused_before_the_first_request(config: Any) -> None:
    served = ServedConfig.from_config(config) if config else configured("2:4", "fc", "mpl")
    with on_rank(0, 1):
        layer = ColumnParallelLinear(K, N, quant_config=served, prefix="mlp.fc", **OPTIONS)
        with pytest.raises(FormatError, match=r"expected a linear layer .* for m[lp.]+\w*\*?, fo"):
            loaded(layer, drawn(N, K))


def test_ranks_that_divide_a_block_are_refused_before_weights_are_loaded() -> None:
    with on_rank(1, 2):
        options = OPTIONS | {"prefix": "mlp.down", "quant_config": configured("blocks", "down")}
        message = r"mlp\.down: expected a multiple of 32 columns on each rank"
        with pytest.raises(FormatError, match=message):
            RowParallelLinear(5 * 32, K, **options)


def test_packed_weights_need_their_load_format_and_an_engine_that_stays_awake() -> None:
    config, load_config = configured("2:4", "fc"), LoadConfig(load_format="sparsebench")
    awake = SimpleNamespace(enable_sleep_mode=False)
    other = SimpleNamespace(load_config=LoadConfig(), model_config=awake)
    with pytest.raises(FormatError, match=r"expected --load-format sparsebench .* found auto"):
        config.require_engine(other)
    asleep = SimpleNamespace(enable_sleep_mode=True)
    with pytest.raises(FormatError, match="found --enable-sleep-mode"):
        config.require_engine(SimpleNamespace(load_config=load_config, model_config=asleep))


def test_a_second_load_is_refused() -> None:
    with on_rank(0, 1):
        config = configured("2:4", "fc")
        layer = ColumnParallelLinear(K, N, quant_config=config, prefix="mlp.fc", **OPTIONS)
        loaded(layer, pruned("2:4", N, K))
        with pytest.raises(FormatError, match="start a new server"):
            layer.quant_method.process_weights_after_loading(layer)
        loader: Any = get_model_loader(LoadConfig(load_format="sparsebench"))
        with pytest.raises(FormatError, match="start a new server"):
            loader.get_all_weights(None, torch.nn.Sequential(layer))


def test_a_tuning_file_of_another_card_is_said_once(tmp_path: Path, monkeypatch) -> None:
    gpu = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    (tmp_path / "sparsebench-sm80_108.choices").write_text("")
    sizes, model = SimpleNamespace(pipeline_parallel_size=1), SimpleNamespace(model=str(tmp_path))
    engine, config = SimpleNamespace(parallel_config=sizes, model_config=model), configured("2:4")
    with pytest.warns(
        UserWarning, match=r"expected sparsebench-sm90_132\.choices for this GPU, found .*sm80_108"
    ):
        config.prepare(engine, torch.device("cuda"))
    config.prepare(engine, torch.device("cuda"))  # of the next layer, without a second warning


def test_another_version_is_named_once_at_the_start(caplog, monkeypatch) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    with caplog.at_level("WARNING", logger="vllm.sparsebench"):
        warn_of_untested_versions.cache_clear()
        configured("2:4", "fc")
        configured("2:4", "fc")
    assert caplog.text.count("sparsebench was tested with vllm 0.32 and 0.33, found 0.34.0") == 1
