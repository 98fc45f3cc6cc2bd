"""`sparsebench convert`: checkpoints written from the description with numpy.packbits."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsebench import matmul
from sparsebench.errors import FormatError, SparsebenchError, SuiteError
from sparsebench.formats.bsr import Bsr
from sparsebench.harness.models.pruning import convert as conversion
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.convert import convert
from sparsebench.harness.models.pruning.left_dense import HEADS
from sparsebench.nn import SpenseGatedMLP, SpenseLinear
from sparsebench.results.model_files import DenseWeights
from tests.harness.tiny_models import generated, tiny, tokenizer, transformers
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.paths import ROOT

BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn
TWO_FOUR, BITMASK = "sparse-24-bitmask", "sparse-bitmask"
IDS = torch.arange(3, 35).view(2, 16)
UP = "model.layers.0.mlp.up_proj"


@pytest.fixture(autouse=True)
def _without_bars():
    with models.quiet(transformers):
        yield


def bits_of(weight: Tensor) -> Tensor:
    """Return the bits of a weight as integers, on which torch computes for every dtype."""
    return weight.view({1: torch.int8, 2: torch.int16, 4: torch.int32}[weight.itemsize])


def two_four(weight: Tensor) -> Tensor:
    """Keep the 2 largest of 4, and in some groups fewer; write some zeros as -0.0."""
    groups = weight.unflatten(1, (-1, 4))
    rank = groups.abs().argsort(-1, descending=True).argsort(-1)
    largest = groups.where(rank < 2, 0.0)
    largest[::3, ::5] = 0
    largest[1::3, ::5, 1:] = 0
    largest[::2] = largest[::2].where(largest[::2] != 0, -0.0)
    return largest.flatten(1)


def half(weight: Tensor) -> Tensor:
    return weight.where(torch.rand(weight.shape) < 0.5, 0.0)


def packed(name: str, weight: Tensor, form: str, old: bool = False) -> dict[str, Tensor]:
    bits = bits_of(weight)
    if form == TWO_FOUR:  # the two of largest absolute value, as torch ranks them
        order = (bits if weight.itemsize == 1 else weight).view(-1, 4).abs().topk(2, 1).indices
        stored = torch.zeros(order.shape[0], 4, dtype=torch.bool).scatter_(1, order, True)
        stored = stored.view(weight.shape)
        values, shape = bits[stored].view(len(weight), -1), torch.tensor(weight.shape).view(2, 1)
    else:
        stored = (weight.float() if weight.itemsize == 1 else weight) != 0
        values, shape = bits[stored], torch.tensor(weight.shape)
    mask = torch.from_numpy(np.packbits(stored.numpy(), axis=-1, bitorder="little"))
    prefix = f"{name}.weight." if old else f"{name}."
    tensors = {f"{prefix}shape": shape, f"{prefix}bitmask": mask}
    tensors[f"{prefix}compressed"] = values.view(weight.dtype)
    if form == BITMASK:
        counts = stored.sum(-1)
        tensors[f"{prefix}row_offsets"] = counts.cumsum(0) - counts
    return tensors


def write(
    path: Path,
    form: str,
    *,
    scales: str = "",
    old: bool = False,
    config: dict[str, Any] | None = None,
    change: Callable[[dict[str, Tensor]], Any] = lambda _: None,
    **fields: Any,
) -> Any:
    """Write a checkpoint whose linear layers are sparse; return the dense model of its weights.

    form    sparse-24-bitmask, sparse-bitmask, or dense 2:4
    scales  channel or tensor: the values are fp8
    old     the names before compressed-tensors 0.9
    """
    torch.manual_seed(1)
    model = tiny(**{"dtype": BF16, **fields})
    tensors: dict[str, Tensor] = {}
    linear = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and "layers" in n}
    with torch.no_grad():
        for name, layer in linear.items():
            weight = (half if form == BITMASK else two_four)(layer.weight)
            layer.weight.copy_(weight)
            if scales:
                scale = weight.float().abs().amax(1, keepdim=True) / 448
                scale = scale if scales == "channel" else scale.max().view(1)
                weight = (weight.float() / scale).to(E4M3)
                layer.weight.copy_(weight.float() * scale)
                tensors[f"{name}.weight_scale"] = scale
                tensors[f"{name}.input_scale"] = torch.ones(1)
            tensors |= (
                {f"{name}.weight": weight} if form == "dense" else packed(name, weight, form, old)
            )
    model.save_pretrained(path)
    tokenizer().save_pretrained(path)
    state = load_file(path / "model.safetensors")
    tensors |= {k: t for k, t in state.items() if k.removesuffix(".weight") not in linear}
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    group = {"weights": {"num_bits": 8, "type": "float", "strategy": scales, "symmetric": True}}
    compression = {
        "quant_method": "compressed-tensors",
        "format": "float-quantized" if scales else "dense",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group} if scales else {},
        "sparsity_config": {"format": form, "sparsity_structure": "2:4", "targets": ["Linear"]},
    }
    content = json.loads((path / "config.json").read_text())
    content["compression_config" if old else "quantization_config"] = config or compression
    (path / "config.json").write_text(json.dumps(content))
    return model


def loaded(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path)


CASES: list[tuple[dict[str, Any], dict[str, int]]] = [
    ({"form": TWO_FOUR}, {"SpenseGatedMLP": 2, "SpenseLinear": 8}),
    ({"form": TWO_FOUR, "old": True}, {"SpenseGatedMLP": 2, "SpenseLinear": 8}),
    ({"form": TWO_FOUR, "attention_bias": True, "mlp_bias": True}, {"SpenseLinear": 14}),
    ({"form": TWO_FOUR, "hidden_act": "gelu"}, {"SpenseLinear": 14}),
    ({"form": TWO_FOUR, "kind": "gemma3"}, {"SpenseGatedMLP": 2, "SpenseLinear": 8}),
    ({"form": "dense"}, {"SpenseGatedMLP": 2, "SpenseLinear": 8}),
    ({"form": BITMASK}, {"BitmapLinear": 14}),
    ({"form": BITMASK, "old": True, "attention_bias": True}, {"BitmapLinear": 14}),
]


@pytest.mark.parametrize(("options", "layers"), CASES, ids=lambda value: str(value))
def test_a_converted_model_computes_what_its_dense_weights_do(options, layers, tmp_path):
    model = write(tmp_path / "old", **options)
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == layers
    assert written.dense == {HEADS: DenseWeights(1, 300 * 64, "lm_head")}
    restored = loaded(tmp_path / "new")
    counts = [type(m).__name__ for _, m in restored.named_modules() if type(m).__name__ in layers]
    within = counts.count("SpenseGatedMLP") * 2  # gate_up and down
    assert len(counts) == sum(layers.values()) + within
    assert torch.equal(restored(IDS).logits, model(IDS).logits)
    assert torch.equal(generated(restored), generated(model))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "new")("so")["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    restored.save_pretrained(tmp_path / "again")
    assert torch.equal(loaded(tmp_path / "again")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("form", [TWO_FOUR, "dense"])
@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_fp8_weights_keep_their_values_and_scales(form, scales, tmp_path):
    model = write(tmp_path / "old", form, scales=scales)
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SpenseLinear": 14}
    assert written.unused == {"input_scale": 14}
    restored = loaded(tmp_path / "new")
    for name, layer in restored.named_modules():
        if isinstance(layer, SpenseLinear):
            assert layer.dtype == E4M3
            assert torch.equal(layer.to_dense().weight, model.get_submodule(name).weight)
    with torch.no_grad():
        expected, logits = model(IDS).logits, restored(IDS).logits
    error = (logits - expected).norm() / expected.norm()
    assert error < 0.05  # activations are rounded to e4m3
    convert(tmp_path / "old", tmp_path / "16", BF16)
    assert torch.equal(loaded(tmp_path / "16")(IDS).logits, expected)


def test_integers_and_32_bits_are_converted_with_a_dtype(tmp_path):
    def as_integers(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("compressed")]:
            tensors[name] = tensors[name].float().mul(100).round().to(torch.int8)

    write(tmp_path / "int8", TWO_FOUR, scales="channel", change=as_integers)
    write(tmp_path / "fp32", TWO_FOUR, dtype=torch.float32)
    write(tmp_path / "fp8", BITMASK, scales="channel")
    for name in ("int8", "fp32", "fp8"):
        with pytest.raises(FormatError, match="--dtype bfloat16"):
            convert(tmp_path / name, tmp_path / "new")
        assert not [path for path in tmp_path.iterdir() if path.name.startswith("new")]
        written = convert(tmp_path / name, tmp_path / f"{name}-16", BF16)
        assert sum(written.layers.values()) in (10, 14)
        assert loaded(tmp_path / f"{name}-16").dtype == BF16


def test_dense_layers_and_an_embedding_that_was_compressed_stay_dense(tmp_path):
    def change(tensors: dict[str, Tensor]) -> None:
        torch.manual_seed(0)
        for part in ("shape", "bitmask", "compressed"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = torch.randn(256, 64, dtype=BF16)
        table = two_four(tensors.pop("model.embed_tokens.weight"))
        tensors.update(packed("model.embed_tokens", table, TWO_FOUR))

    write(tmp_path / "old", TWO_FOUR, change=change)
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SpenseLinear": 10, "SpenseGatedMLP": 1}
    dense = {reason: weights.first for reason, weights in written.dense.items()}
    embedding = {"compressed weights outside of linear layers": "model.embed_tokens"}
    assert dense == {"linear layers without 2:4": UP, HEADS: "lm_head"} | embedding
    restored = loaded(tmp_path / "new")
    assert type(restored.get_submodule(UP)) is nn.Linear
    assert restored(IDS).logits.isfinite().all()


def write_experts(path: Path, kind: str, form: str, **fields: Any) -> None:
    """Write a mixture whose weights of layers are 2:4, expert by expert, in a form of `packed`."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2}
    more = {"vocab_size": 300, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    config = getattr(transformers, f"{kind}Config")(**sizes | more | fields)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=BF16)
    model.save_pretrained(path)
    tensors = {}
    for name, weight in load_file(path / "model.safetensors").items():
        linear = "layers" in name and weight.dim() == 2 and name.endswith("weight")
        if not linear or ".gate.weight" in name:
            tensors[name] = weight
        elif form == "dense":
            tensors[name] = two_four(weight)
        else:
            tensors |= packed(name.removesuffix(".weight"), two_four(weight), form)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    if form != "dense":
        content = json.loads((path / "config.json").read_text())
        content["quantization_config"] = {
            "quant_method": "compressed-tensors",
            "version": "0.9.0",
            "format": "dense",
            "sparsity_config": {"format": form},
        }
        (path / "config.json").write_text(json.dumps(content))


QWEN = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("kind", "fields", "form"),
    [("Mixtral", {"num_local_experts": 12}, "dense"), ("Qwen3Moe", QWEN, TWO_FOUR)],
)
def test_experts_become_one_layer(kind, fields, form, tmp_path):
    """Twelve of them, because names sort 10 before 2."""
    write_experts(tmp_path / "dense", kind, "dense", **fields)
    expected = loaded(tmp_path / "dense")
    if form != "dense":
        write_experts(tmp_path / "old", kind, form, **fields)
    written = convert(tmp_path / ("dense" if form == "dense" else "old"), tmp_path / "new")
    assert written.layers == {"SparseExperts": 2, "SpenseLinear": 8}
    assert set(written.dense) == {HEADS, f"{kind}TopKRouter"}
    restored = loaded(tmp_path / "new")
    for old, new in zip(expected.model.layers, restored.model.layers, strict=True):
        gate_up, down = new.mlp.experts.to_dense()
        assert torch.equal(gate_up, old.mlp.experts.gate_up_proj)
        assert torch.equal(down, old.mlp.experts.down_proj)
    with torch.no_grad():
        actual, right = (model(IDS).logits.float() for model in (restored, expected))
    assert float((actual - right).norm() / right.norm()) < 0.02
    owner = "block_sparse_moe" if kind == "Mixtral" else "mlp"
    names = load_file(tmp_path / "new/model.safetensors")
    assert f"model.layers.0.{owner}.experts.gate_up.sparse" in names
    assert written.after < 0.8 * written.before or form != "dense"


def test_experts_that_are_not_two_four_stay_dense_and_are_counted(tmp_path):
    write_experts(tmp_path / "old", "Mixtral", "dense", num_local_experts=8)
    state = load_file(tmp_path / "old/model.safetensors")
    down = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    state[down] = torch.randn_like(state[down])
    save_file(state, tmp_path / "old/model.safetensors", {"format": "pt"})
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SparseExperts": 1, "SpenseLinear": 8}
    experts = DenseWeights(2, 3 * 8 * 128 * 128, "model.layers.1.mlp.experts.gate_up_proj")
    router = DenseWeights(2, 2 * 8 * 128, "model.layers.0.mlp.gate.weight")
    shared = {"MixtralExperts, whose experts share one tensor": experts}
    head = DenseWeights(1, 300 * 128, "lm_head")
    assert written.dense == {HEADS: head, "MixtralTopKRouter": router} | shared
    stored = loaded(tmp_path / "new").model.layers[1].mlp.experts.down_proj
    assert torch.equal(stored[3], state[down])


def test_experts_in_a_size_that_no_kernel_has_stay_dense(tmp_path):
    fields = {"num_local_experts": 2, "intermediate_size": 112, "num_hidden_layers": 1}
    write_experts(tmp_path / "old", "Mixtral", "dense", **fields)
    expected = loaded(tmp_path / "old")(IDS).logits
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SpenseLinear": 4}
    assert torch.equal(loaded(tmp_path / "new")(IDS).logits, expected)


def test_shards_are_read_and_written(tmp_path, monkeypatch):
    model = write(tmp_path / "old", TWO_FOUR)
    state = load_file(tmp_path / "old/model.safetensors")
    (tmp_path / "old/model.safetensors").unlink()
    places = {name: f"part-{i % 3}.safetensors" for i, name in enumerate(state)}
    for file in {*places.values()}:
        save_file(
            {n: state[n] for n, place in places.items() if place == file}, tmp_path / "old" / file
        )
    index = tmp_path / "old/model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    monkeypatch.setattr(conversion, "SHARD_BYTES", 60_000)
    written = convert(tmp_path / "old", tmp_path / "new")
    assert len([*(tmp_path / "new").glob("model-0*-of-0*.safetensors")]) > 2
    assert (written.before, written.after) > (0, 0)
    assert torch.equal(loaded(tmp_path / "new")(IDS).logits, model(IDS).logits)
    places["x"] = "../../secret.safetensors"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(SuiteError, match="beside it"):
        convert(tmp_path / "old", tmp_path / "again")
    index.write_text("{}")
    with pytest.raises(SuiteError, match="weight_map"):
        convert(tmp_path / "old", tmp_path / "again")


SHARD = "part-1.safetensors"
INDICES: list[tuple[Callable[[Path, dict[str, str]], Any], str]] = [
    (lambda path, _: (path / SHARD).unlink(), f"index.json: expected {SHARD} beside it"),
    (lambda path, _: (path / "part-0.safetensors").rename(path / SHARD), "part-0.*beside it"),
    (lambda _, places: places.update({"lm_head.weight": "x"}), "expected x beside it, found none"),
    (lambda _, places: places.update({"x": SHARD}), f"{SHARD}: expected x as in the index"),
    (lambda _, places: places.update({"x": None}), "expected files beside it, found None"),
    (lambda _, places: places.clear(), "expected a weight_map of files, found {}"),
    (
        lambda path, _: shutil.copy(path / SHARD, path / "model.safetensors"),
        "expected model.safetensors or its index, found both",
    ),
    (
        lambda path, _: shutil.copy(path / SHARD, path / "part-0.safetensors"),
        f"in one file, found part-0.safetensors and {SHARD}",
    ),
]


@pytest.mark.parametrize(("change", "message"), INDICES, ids=[i[1][:40] for i in INDICES])
def test_shards_that_do_not_fit_the_index_are_one_line(change, message, tmp_path):
    write(tmp_path / "old", TWO_FOUR)
    state = load_file(tmp_path / "old/model.safetensors")
    (tmp_path / "old/model.safetensors").unlink()
    places: dict[str, str] = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(state)}
    for file in {*places.values()}:
        part = {name: state[name] for name in state if places[name] == file}
        save_file(part, tmp_path / "old" / file)
    change(tmp_path / "old", places)
    index = {"weight_map": places}
    (tmp_path / "old/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SparsebenchError, match=message) as error:
        convert(tmp_path / "old", tmp_path / "new")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_two_tensors_of_one_name_in_the_model_are_refused(tmp_path):
    write(tmp_path / "old", TWO_FOUR, change=lambda t: t.update({"norm.weight": torch.ones(64)}))
    with pytest.raises(FormatError, match=r"found model.norm.weight and norm.weight"):
        convert(tmp_path / "old", tmp_path / "new")


def test_the_command_says_what_it_wrote(tmp_path):
    write(tmp_path / "old", TWO_FOUR, scales="channel")
    done = sparsebench("convert", tmp_path / "old", "--out", tmp_path / "new", "--device", "cpu")
    assert (done.returncode, done.stderr) == (0, "")
    assert "14 SpenseLinear" in done.stdout
    assert "14 input_scale" in done.stdout
    refusal("convert", tmp_path / "old", "--out", tmp_path / "new", "--device", "cpu")
    options = "--dtype", "bfloat16", "--json", "--device", "cpu"
    done = sparsebench("convert", tmp_path / "old", "--out", tmp_path / "16", *options)
    assert json.loads(done.stdout)["layers"] == {"SpenseGatedMLP": 2, "SpenseLinear": 8}


def _config(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "sparsity_config": {"format": TWO_FOUR}, **fields}


def _zero_point(tensors: dict[str, Tensor]) -> None:
    tensors[f"{UP}.weight_scale"] = torch.ones(1)
    tensors[f"{UP}.weight_zero_point"] = torch.ones(1)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    (
        "hostile",
        {"config": _config(sparsity_config={"format": "os.system:echo"})},
        "sparsity_config.format: expected .*sparse-24-bitmask.*os.system",
    ),
    (
        "close",
        {"config": _config(sparsity_config={"format": "sparse-24-bitmsk"})},
        "did you mean sparse-24-bitmask",
    ),
    ("packed", {"config": _config(format="pack-quantized")}, "format: .*pack-quantized"),
    ("transform", {"config": _config(transform_config={"x": 1})}, "transform_config"),
    ("dense", {"config": _config(sparsity_config={"format": "dense"})}, "for the bitmask of"),
    (
        "group",
        {"config": _config(config_groups={"g": {"format": "nvfp4-pack-quantized"}})},
        "nvfp4",
    ),
    ("missing", {"change": lambda t: t.pop(f"{UP}.shape")}, f"{UP}: expected shape"),
    ("twice", {"change": lambda t: t.update({f"{UP}.weight": torch.ones(2)})}, "and no weight"),
    (
        "sizes",
        {"change": lambda t: t[f"{UP}.shape"].mul_(2)},
        rf"{UP}.weight: expected \[256, 64\], found \[512, 128\]",
    ),
    (
        "bitmask",
        {"change": lambda t: t.update({f"{UP}.bitmask": t[f"{UP}.bitmask"][:, 1:].contiguous()})},
        f"{UP}: bitmask: expected",
    ),
    ("bits", {"change": lambda t: t[f"{UP}.bitmask"].fill_(255)}, f"{UP}: compressed: expected"),
    ("nan", {"change": lambda t: t[f"{UP}.compressed"][0].fill_(torch.nan)}, f"{UP}: .*finite"),
    (
        "infinite",
        {"change": lambda t: t["model.norm.weight"].fill_(torch.inf)},
        "model.norm: weight: expected finite",
    ),
    ("none", {"change": lambda t: t.pop("lm_head.weight")}, "expected lm_head.weight of Llama"),
    (
        "extra",
        {"change": lambda t: t.update({"model.layers.2.mlp.b.weight": torch.ones(8)})},
        "expected a place for model.layers.2.mlp.b.weight in LlamaForCausalLM, found none",
    ),
    ("version", {"config": _config(version="0.15.0")}, r"version: expected 0.14 or older .*0.15"),
    ("later", {"config": _config(version="9")}, r"version: expected 0.14 or older .*'9'"),
    (
        "scale",
        {"change": lambda t: t.update({f"{UP}.weight_scale": torch.ones(2, 2)})},
        f"{UP}: weight_scale",
    ),
    ("zero", {"change": _zero_point}, f"{UP}.weight_zero_point"),
    (
        "int4",
        {"change": lambda t: t.update({f"{UP}.weight_packed": torch.ones(2)})},
        "weight_packed",
    ),
]


@pytest.mark.parametrize(
    ("options", "message"), [r[1:] for r in REFUSED], ids=[r[0] for r in REFUSED]
)
def test_what_cannot_be_read_is_one_line_and_writes_nothing(options, message, tmp_path):
    write(tmp_path / "old", TWO_FOUR, **options)
    with pytest.raises(SparsebenchError, match=message) as error:
        convert(tmp_path / "old", tmp_path / "new")
    assert "\n" not in str(error.value)
    assert [path.name for path in tmp_path.iterdir()] == ["old"]


def test_a_model_without_sparse_weights_is_refused(tmp_path):
    tiny(dtype=BF16).save_pretrained(tmp_path / "old")
    with pytest.raises(SuiteError, match=r"linear layers without 2:4 \(.* in 14 tensors"):
        convert(tmp_path / "old", tmp_path / "new")
    with pytest.raises(SuiteError, match="expected the directory"):
        convert(tmp_path / "none", tmp_path / "new")


def test_every_line_of_the_page_for_users_of_torchao_and_vllm_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write(Path("llama-2of4"), TWO_FOUR)
    tiny(dtype=BF16).save_pretrained("llama")
    tokenizer().save_pretrained("llama")
    Path("text.txt").write_text(models.python_reference()[:4000], encoding="utf-8")
    page = (ROOT / "kernels/nn/MIGRATION.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page, re.DOTALL | re.MULTILINE):
        if language == "python":
            exec(block, names)
        for command in re.findall("^sparsebench (.*)", block, re.MULTILINE):
            output(*command.split(), "--device", "cpu")
    for folder in ("llama-spense", "llama-two-four", "llama-pruned"):
        kinds = {type(module) for module in loaded(Path(folder)).modules()}
        assert SpenseGatedMLP in kinds
    weight = torch.randn(64, 64, dtype=BF16) * torch.tensor([1, 0, 0, 1]).repeat(16)
    assert SpenseLinear.from_dense(weight, dtype=E4M3)(weight).dtype == BF16
    assert matmul(weight, Bsr.from_dense(weight, block=64)).shape == (64, 64)


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_a_checkpoint_without_a_tokenizer_is_said(has_tokenizer: bool, tmp_path: Path) -> None:
    write(tmp_path / "in", TWO_FOUR)
    for file in (tmp_path / "in").glob("tokenizer*"):
        file.unlink()
    if has_tokenizer:
        tokenizer().save_pretrained(tmp_path / "in")
    done = convert(tmp_path / "in", tmp_path / "out")
    said = " ".join(conversion.lines(tmp_path / "out", done))
    assert ("expected a tokenizer or processor" in said) != has_tokenizer
