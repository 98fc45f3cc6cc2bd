"""`sparsebench convert`: checkpoints written from the description with numpy.packbits."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsebench import matmul
from sparsebench.errors import FormatError, SuiteError
from sparsebench.formats.bsr import Bsr
from sparsebench.harness.models.pruning import convert as conversion
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.convert import convert
from sparsebench.harness.models.pruning.left_dense import HEADS
from sparsebench.nn import SpenseGatedMLP, SpenseLinear
from sparsebench.results.model_files import DenseWeights
from tests.harness.checkpoints import (
    BF16,
    BITMASK,
    E4M3,
    IDS,
    TWO_FOUR,
    UP,
    load_model,
    pack,
    two_four,
    write,
    write_experts,
)
from tests.harness.tiny_models import generated, tiny, tokenizer, transformers
from tests.tools.command_line import output, refusal, sparsebench
from tests.tools.paths import ROOT


@pytest.fixture(autouse=True)
def _without_bars():
    with models.quiet(transformers):
        yield


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
    restored = load_model(tmp_path / "new")
    counts = [type(m).__name__ for _, m in restored.named_modules() if type(m).__name__ in layers]
    within = counts.count("SpenseGatedMLP") * 2  # gate_up and down
    assert len(counts) == sum(layers.values()) + within
    assert torch.equal(restored(IDS).logits, model(IDS).logits)
    assert torch.equal(generated(restored), generated(model))
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "new")("so")["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "old"]
    restored.save_pretrained(tmp_path / "again")
    assert torch.equal(load_model(tmp_path / "again")(IDS).logits, model(IDS).logits)


@pytest.mark.parametrize("form", [TWO_FOUR, "dense"])
@pytest.mark.parametrize("scales", ["channel", "tensor"])
def test_fp8_weights_keep_their_values_and_scales(form, scales, tmp_path):
    model = write(tmp_path / "old", form, scales=scales)
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SpenseLinear": 14}
    assert written.unused == {"input_scale": 14}
    restored = load_model(tmp_path / "new")
    for name, layer in restored.named_modules():
        if isinstance(layer, SpenseLinear):
            assert layer.dtype == E4M3
            assert torch.equal(layer.to_dense().weight, model.get_submodule(name).weight)
    with torch.no_grad():
        expected, logits = model(IDS).logits, restored(IDS).logits
    error = (logits - expected).norm() / expected.norm()
    assert error < 0.05  # activations are rounded to e4m3
    convert(tmp_path / "old", tmp_path / "16", BF16)
    assert torch.equal(load_model(tmp_path / "16")(IDS).logits, expected)


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
        assert load_model(tmp_path / f"{name}-16").dtype == BF16


def test_dense_layers_and_an_embedding_that_was_compressed_stay_dense(tmp_path):
    def change(tensors: dict[str, Tensor]) -> None:
        torch.manual_seed(0)
        for part in ("shape", "bitmask", "compressed"):
            del tensors[f"{UP}.{part}"]
        tensors[f"{UP}.weight"] = torch.randn(256, 64, dtype=BF16)
        table = two_four(tensors.pop("model.embed_tokens.weight"))
        tensors.update(pack("model.embed_tokens", table, TWO_FOUR))

    write(tmp_path / "old", TWO_FOUR, change=change)
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SpenseLinear": 10, "SpenseGatedMLP": 1}
    dense = {reason: weights.first for reason, weights in written.dense.items()}
    embedding = {"compressed weights outside of linear layers": "model.embed_tokens"}
    assert dense == {"linear layers without 2:4": UP, HEADS: "lm_head"} | embedding
    restored = load_model(tmp_path / "new")
    assert type(restored.get_submodule(UP)) is nn.Linear
    assert restored(IDS).logits.isfinite().all()


QWEN = {"num_experts": 12, "num_experts_per_tok": 2, "moe_intermediate_size": 96}


@pytest.mark.parametrize(
    ("kind", "fields", "form"),
    [("Mixtral", {"num_local_experts": 12}, "dense"), ("Qwen3Moe", QWEN, TWO_FOUR)],
)
def test_experts_become_one_layer(kind, fields, form, tmp_path):
    """Twelve of them, because names sort 10 before 2."""
    write_experts(tmp_path / "dense", kind, "dense", **fields)
    expected = load_model(tmp_path / "dense")
    if form != "dense":
        write_experts(tmp_path / "old", kind, form, **fields)
    written = convert(tmp_path / ("dense" if form == "dense" else "old"), tmp_path / "new")
    assert written.layers == {"SparseExperts": 2, "SpenseLinear": 8}
    assert set(written.dense) == {HEADS, f"{kind}TopKRouter"}
    restored = load_model(tmp_path / "new")
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
    stored = load_model(tmp_path / "new").model.layers[1].mlp.experts.down_proj
    assert torch.equal(stored[3], state[down])


def test_experts_in_a_size_that_no_kernel_has_stay_dense(tmp_path):
    fields = {"num_local_experts": 2, "intermediate_size": 112, "num_hidden_layers": 1}
    write_experts(tmp_path / "old", "Mixtral", "dense", **fields)
    expected = load_model(tmp_path / "old")(IDS).logits
    written = convert(tmp_path / "old", tmp_path / "new")
    assert written.layers == {"SpenseLinear": 4}
    assert torch.equal(load_model(tmp_path / "new")(IDS).logits, expected)


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
    assert torch.equal(load_model(tmp_path / "new")(IDS).logits, model(IDS).logits)
    places["x"] = "../../secret.safetensors"
    index.write_text(json.dumps({"weight_map": places}))
    with pytest.raises(SuiteError, match="beside it"):
        convert(tmp_path / "old", tmp_path / "again")
    index.write_text("{}")
    with pytest.raises(SuiteError, match="weight_map"):
        convert(tmp_path / "old", tmp_path / "again")


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
        kinds = {type(module) for module in load_model(Path(folder)).modules()}
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
