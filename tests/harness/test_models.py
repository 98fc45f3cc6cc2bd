"""Tests of whole models: sparsify_, Hugging Face checkpoints, and prune."""

import json
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sparsebench.errors import FormatError, SuiteError
from sparsebench.harness.models.pruning import model as models
from sparsebench.harness.models.pruning.gated import DenseGatedMLP, Gated
from sparsebench.harness.models.pruning.layer import Pruner
from sparsebench.nn import (
    BitmapLinear,
    BlockSparse,
    BlockSparseLinear,
    SparseActivations,
    SpenseGatedMLP,
    SpenseLinear,
    TwoFour,
    Unstructured,
    sparsify_,
)
from tests.harness.tiny_models import generated, tiny, tokenizer, transformers, write_gguf
from tests.tools.command_line import refusal, sparsebench
from tests.tools.paths import ROOT

BF16, FP16 = torch.bfloat16, torch.float16
MODELS: list[tuple[Any, dict[str, Any]]] = [
    (BlockSparse(16, 0.5), {}),
    (BlockSparse((8, 32), 0.75), {"dtype": BF16, "attention_bias": True}),
    (TwoFour(), {"dtype": FP16, "attention_bias": True}),
    (TwoFour(0.5), {"dtype": BF16, "kind": "gemma3"}),
    (Unstructured(), {"dtype": BF16, "attention_bias": True}),
    (SparseActivations(), {"hidden_act": "relu"}),
    (SparseActivations(8), {"hidden_act": "relu2", "dtype": BF16}),
]


@pytest.fixture(autouse=True)
def _without_bars() -> Iterator[None]:
    with models.quiet(transformers):
        yield


def mlps(module: nn.Module, _: str) -> bool:
    return Gated.of(module) is not None


def chosen(recipe: Any) -> Any:
    return mlps if recipe == TwoFour(0.5) else None


def reloaded(path: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(path, **options)


# ---- recipes ----


def test_filter_is_called_for_an_mlp_before_its_layers():
    names: list[str] = []

    def one(module: nn.Module, name: str) -> bool:
        names.append(name)
        return name.endswith(("layers.0.mlp", "q_proj"))

    model = sparsify_(tiny(dtype=BF16), TwoFour(), one)
    assert isinstance(model.model.layers[0].mlp, SpenseGatedMLP)
    assert isinstance(model.model.layers[1].self_attn.q_proj, SpenseLinear)
    assert type(model.model.layers[1].mlp.up_proj) is nn.Linear
    assert "model.layers.0.mlp.up_proj" not in names
    assert "model.layers.1.mlp.up_proj" in names


def test_plain_module_needs_no_transformers(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)  # as if it were not installed
    layers = nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)
    model = sparsify_(nn.Sequential(*layers).eval(), BLOCKS, lambda _, name: name == "2")
    assert [type(layer) for layer in model] == [nn.Linear, nn.ReLU, BlockSparseLinear]
    assert not model[2].training


def test_example_of_the_readme_runs():
    page = (ROOT / "harness/models/pruning/README.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(example, names)
    assert isinstance(names["restored"].model.layers[0].mlp, SpenseGatedMLP)


class Scaled(nn.Module):
    """A gated MLP with an extra factor."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (
            nn.Linear(64, 128, bias=False),
            nn.Linear(64, 128, bias=False),
        )
        self.down_proj, self.act_fn = nn.Linear(128, 64, bias=False), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return 0.9 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def _tied() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight = model[0].weight
    return model


def _hooked() -> nn.Module:
    model = nn.Sequential(nn.Linear(64, 64))
    model[0].register_forward_hook(lambda *_: None)
    return model


REFUSED: list[tuple[Callable[[], nn.Module], Any, str]] = [
    (lambda: tiny(), TwoFour(), r"model.layers.0.self_attn.q_proj: .*fp16, bf16.*float32"),
    (lambda: tiny(dtype=BF16, hidden_act="gelu"), TwoFour(), r"layers.0.mlp: .*activation.*GELU"),
    (tiny, SparseActivations(), r"layers.0.mlp: .*activation.*silu"),
    (
        lambda: tiny(hidden_act="relu"),
        SparseActivations(999),
        r"layers.0.mlp: slots: expected 1 to 256",
    ),
    (
        lambda: tiny(mlp_bias=True, hidden_act="relu"),
        SparseActivations(),
        r"gate_proj: expected no bias",
    ),
    (lambda: nn.Sequential(Scaled().bfloat16()), TwoFour(), r"^0: .*Scaled.*error of 0.1"),
    (lambda: nn.Sequential(nn.Linear(64, 64).bfloat16()), TwoFour(0.5), r"^0: .*dense 0.5"),
    (
        lambda: nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 32)),
        BlockSparse(64, 0.8),
        r"^1: .*sparsity 0.8.*32x128 of 2 blocks",
    ),
    (lambda: nn.Sequential(nn.Linear(64, 64)), BlockSparse(0), r"^0: block: expected an integer"),
    (_tied, BlockSparse(), r"^0: .*weight shared"),
    (_hooked, BlockSparse(), r"^0: .*hooks"),
    (
        lambda: nn.Sequential(layer := nn.Linear(64, 64), nn.Sequential(layer)),
        BlockSparse(),
        r"^0: .*unshared layer",
    ),
    (lambda: nn.Sequential(nn.Linear(64, 64, device="meta")), BlockSparse(), r"^0: .*device meta"),
    (
        lambda: nn.MultiheadAttention(64, 4),
        BlockSparse(),
        r"^expected a layer for BlockSparse .*, found MultiheadAttention \(16,448 weights in 2",
    ),
    (lambda: nn.Linear(64, 64), BlockSparse(), r"expected a model"),
    (lambda: nn.Sequential(nn.ReLU()), BlockSparse(), r"expected a layer for BlockSparse"),
    (lambda: nn.Sequential(nn.Linear(64, 64)), BlockSparse, r"recipe: expected BlockSparse\("),
]


@pytest.mark.parametrize(("make", "recipe", "message"), REFUSED, ids=[r[2][:40] for r in REFUSED])
def test_unfit_layers_are_one_error_before_any_change(make, recipe, message):
    model = make()
    before = [type(module) for module in model.modules()]
    with pytest.raises(FormatError, match=message) as error:
        sparsify_(model, recipe)
    assert "\n" not in str(error.value)
    assert [type(module) for module in model.modules()] == before


# ---- checkpoints ----


@pytest.mark.parametrize(("recipe", "fields"), MODELS, ids=lambda value: str(value))
def test_saved_model_is_restored_and_generates_the_same_tokens(recipe, fields, tmp_path):
    model = sparsify_(tiny(**fields), recipe, chosen(recipe))
    tokens, ids = generated(model), torch.arange(3, 131).view(1, -1)
    model.save_pretrained(tmp_path / "sparse")
    restored = reloaded(tmp_path / "sparse")
    assert torch.equal(restored(ids).logits, model(ids).logits)
    assert {type(m) for m in restored.modules()} == {type(m) for m in model.modules()}
    for (name, tensor), expected in zip(
        restored.state_dict().items(), model.state_dict().values(), strict=True
    ):
        assert torch.equal(tensor, expected), name
        assert tensor.dtype == expected.dtype
    assert torch.equal(generated(restored), tokens)
    for name, parameter in restored.named_parameters():
        layer = restored.get_submodule(name.rpartition(".")[0])
        assert parameter.requires_grad != (type(layer) in (SpenseLinear, BitmapLinear)), name
    restored.save_pretrained(tmp_path / "twice")
    files = [tmp_path / where / "model.safetensors" for where in ("sparse", "twice")]
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("recipe", [BlockSparse(16, 0.5), TwoFour()], ids=str)
def test_dequantized_checkpoint_needs_no_sparsebench(recipe, tmp_path):
    model = sparsify_(tiny(dtype=BF16), recipe)
    tokens = generated(model)
    dense = model.dequantize()
    assert not any(isinstance(m, BlockSparseLinear | SpenseLinear) for m in dense.modules())
    assert torch.equal(generated(dense), tokens)
    dense.save_pretrained(tmp_path)
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
    restored = reloaded(tmp_path)
    assert restored.state_dict().keys() == tiny().state_dict().keys()
    assert not any(isinstance(m, DenseGatedMLP) for m in restored.modules())
    assert torch.equal(generated(restored), tokens)


def test_changed_pattern_is_saved(tmp_path):
    model = sparsify_(tiny(), BlockSparse(16, 0.5))
    layer = model.model.layers[0].mlp.up_proj
    layer.set_pattern(layer.offsets.clamp(max=3), layer.columns[:3].clone())
    model.save_pretrained(tmp_path)
    restored = reloaded(tmp_path).model.layers[0].mlp.up_proj
    assert len(restored.columns) == 3
    assert torch.equal(restored.values, layer.values)


def _config(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    config = json.loads((path / "config.json").read_text())
    change(config["quantization_config"])
    (path / "config.json").write_text(json.dumps(config))


def _tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors", {"format": "pt"})


MLP, UP = "model.layers.0.mlp", "model.layers.0.mlp.up_proj"
LOST, WEIGHT = "model.layers.7.mlp", "model.layers.1.mlp.up_proj.weight"
BLOCKS = BlockSparse(16, 0.5)
ABSENT = "in the checkpoint, found none"
OF_CONFIG: list[tuple[Any, Callable[[dict[str, Any]], Any], str]] = [
    (TwoFour(), lambda c: c.update(version=2), "expected version 1.*found 2"),
    (TwoFour(), lambda c: c["layers"][MLP].pop("dense"), f"{MLP}.*dense: expected a value"),
    (TwoFour(), lambda c: c["layers"][MLP].update(layer="X"), "layers: .*'X'"),
    (TwoFour(), lambda c: c.update(more=1), "expected no .*more"),
    (TwoFour(), lambda c: c["layers"].update({LOST: c["layers"][MLP]}), f"{LOST}: expected a"),
    (BLOCKS, lambda c: c["layers"][UP].update(in_features=32), rf"{UP}: .*\[32, 256\] .*\[64,"),
    (BLOCKS, lambda c: c["layers"][UP].update(stored=65), f"{UP}: stored: expected at most 64"),
]
OF_TENSORS: list[tuple[Any, Callable[[dict[str, Tensor]], Any], str]] = [
    (BLOCKS, lambda t: t.pop(f"{UP}.values"), rf"{UP}.values: .* \[32, 16, 16\] {ABSENT}"),
    (BLOCKS, lambda t: t[f"{UP}.columns"].fill_(99), f"{UP}: expected block columns 0 to 3, fou"),
    (TwoFour(), lambda t: t[f"{MLP}.down._extra_state"].add_(1), r"sparse columns.*: .*56, 1\]"),
]


@pytest.mark.parametrize(
    ("file", "recipe", "change", "message"),
    [*((_config, *case) for case in OF_CONFIG), *((_tensors, *case) for case in OF_TENSORS)],
)
def test_invalid_checkpoint_is_one_error(recipe, file, change, message, tmp_path):
    sparsify_(tiny(dtype=BF16), recipe).save_pretrained(tmp_path)
    file(tmp_path, change)
    with pytest.raises(FormatError, match=message) as error:
        reloaded(tmp_path)
    assert "\n" not in str(error.value)


def test_tiles_are_not_loaded_as_another_dtype(tmp_path):
    sparsify_(tiny(dtype=BF16), TwoFour()).save_pretrained(tmp_path)
    with pytest.raises(FormatError, match=r"expected dtype bfloat16.*float16"):
        reloaded(tmp_path, dtype=FP16)


def test_model_quantized_by_another_tool_is_refused():
    model = tiny()
    model.hf_quantizer = object()
    with pytest.raises(FormatError, match="expected dense layers, found object"):
        sparsify_(model, BLOCKS)
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


# ---- prune ----


@pytest.fixture(scope="module", params=["llama", "gemma3"])
def directory(request, tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    with models.quiet(transformers):
        tiny(request.param).save_pretrained(path)
        tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(models.python_reference()[:4000])
    return path


def test_pruned_directory_loads_and_generates_the_same_tokens(directory, text, tmp_path):
    options = directory, "--calibration", text, "--tokens", 1024, "--device", "cpu"
    out = tmp_path / "pruned"
    done = sparsebench(
        "prune", *options, "--method", "wanda", "--dense", 0.5, "--out", out, "--json"
    )
    assert (done.returncode, done.stderr) == (0, "")
    printed = json.loads(done.stdout)
    [outcome] = printed["outcomes"]
    assert (printed["calibration"], printed["held_out"]) == (1024, 1024)
    assert (outcome["dense"], outcome["sparsity"]) == (0.5, 0.25)
    assert 0 < outcome["errors"]["output"] < 0.5
    loaded = models.load(directory, torch.device("cpu"))
    seen, unseen = models.contexts(loaded, text.read_text(), 1024)
    assert (printed["mlps"], printed["layers"]) == (
        len(loaded.mlps),
        len(loaded.model.model.layers),
    )
    assert printed["loss"] == pytest.approx(models.loss_of(loaded.model, unseen), rel=1e-5)
    pruned = models.prune_model(loaded, Pruner("wanda", 0.5), seen, unseen)
    assert pruned.loss == pytest.approx(outcome["loss"], rel=1e-5)
    restored = reloaded(out)
    assert all(isinstance(layer.mlp, SpenseGatedMLP) for layer in restored.model.layers)
    assert torch.equal(generated(restored), generated(loaded.model.to(BF16)))
    assert restored.model.layers[0].mlp.gate_up.sparse_shape == (256, 64)
    assert transformers.AutoTokenizer.from_pretrained(out)("so")["input_ids"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pruned"]
    line = refusal("prune", directory, "--device", "cpu", "--out", out)
    assert "expected a new folder or a file to write" in line


def test_mlps_are_pruned_from_outputs_of_pruned_ones(directory, text):
    loaded = models.load(directory, torch.device("cpu"))
    seen, unseen = models.contexts(loaded, text.read_text(), 1024)
    before = models.loss_of(loaded.model, unseen)
    inputs: dict[str, Tensor] = {}
    with models.restore_weights(loaded):
        pruned = models.prune_model(loaded, Pruner("magnitude", 0.0), seen, unseen)
        last = loaded.model.model.layers[1].mlp
        handle = last.register_forward_pre_hook(lambda _, x: inputs.update(last=x[0]))
        loaded.model.base_model(unseen)
        handle.remove()
        weights = [weight.clone() for weight in Gated.of(last).weights]
    assert pruned.loss != before
    assert models.loss_of(loaded.model, unseen) == pytest.approx(before, rel=1e-6)
    dense = Gated.of(loaded.model.model.layers[1].mlp).weights
    x = inputs["last"].flatten(0, -2)
    error = (x @ weights[0].T - x @ dense[0].T).norm() / (x @ dense[0].T).norm()
    assert pruned.errors[1]["gate"] == pytest.approx(float(error), rel=1e-3)
    unpruned = models.prune_model(loaded, Pruner("spensegpt", 1.0, "scored"), seen, unseen)
    assert unpruned.loss == pytest.approx(before, rel=1e-5)


def test_held_out_contexts_come_last(directory):
    loaded = models.load(directory, torch.device("cpu"))
    words = "".join(chr(97 + i % 26) for i in range(4 * 1023))
    numbers = loaded.tokenizer(words, add_special_tokens=False)["input_ids"]
    seen, unseen = models.contexts(loaded, words, 2048)
    assert (seen.shape, unseen.shape) == ((2, 1024), (1, 1024))
    assert seen[:, 0].tolist() == [2, 2]
    assert seen[1, 1] == numbers[1023]
    assert unseen[0, -1] == numbers[3 * 1023 - 1]
    with pytest.raises(SuiteError, match=r"text: expected at least 3069 tokens.*found 3000"):
        models.contexts(loaded, words[:3000], 2048)
    with pytest.raises(SuiteError, match=r"book\.txt: expected at least"):
        models.contexts(loaded, "short", 2048, "book.txt")


def test_gguf_file_gives_the_model_that_it_was_written_from(text, tmp_path):
    model, path = tiny("gemma3", num_hidden_layers=6), tmp_path / "small.gguf"
    write_gguf(path, model)
    loaded = models.load(path, torch.device("cpu"))
    tokens = torch.arange(260, 300)[None]
    assert models.loss_of(loaded.model, tokens) == pytest.approx(models.loss_of(model, tokens))
    done = sparsebench(
        *("prune", path, "--calibration", text, "--tokens", 1024, "--method", "magnitude"),
        *("--dense", "0,0.5", "--device", "cpu"),
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[1].rstrip().endswith("loss (nats)")
    assert "6 gated MLPs pruned in a model of 6 layers" in done.stdout
    linear, first = "other linear layers (73,728 weights in 24", "model.layers.0.self_attn.q_proj"
    heads = f"output heads ({300 * 64:,} weights in 1 tensor, the first is lm_head)"
    last = f"leaves dense: {linear} tensors, the first is {first}); {heads}"
    assert done.stdout.splitlines()[-1] == last
    assert len(done.stdout.splitlines()) == 6


def _without_mlps(path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=1, n_head=2)
    transformers.GPT2LMHeadModel(config).save_pretrained(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: (path / "config.json").unlink(), "with config.json, found none"),
        (lambda path: (path / "model.safetensors").write_bytes(b"no"), "expected a usable"),
        (lambda path: _tensors(path, lambda t: t.pop(WEIGHT)), f"expected {WEIGHT} of Llama"),
        (
            lambda path: _tensors(path, lambda t: t["model.norm.weight"].fill_(torch.nan)),
            "model.norm.weight: expected finite",
        ),
        (
            lambda path: _tensors(path, lambda t: t.update({"model.norm.weight": torch.ones(65)})),
            r"model.norm.weight: expected \[64\], found \[65\]",
        ),
        (
            lambda path: _tensors(path, lambda t: t.update({"model.b.weight": torch.ones(8)})),
            "expected a place for model.b.weight in LlamaForCausalLM, found none",
        ),
        (
            lambda path: [file.unlink() for file in path.glob("tokenizer*")],
            "found no tokenizer that can be read",
        ),
        (
            lambda path: sparsify_(tiny(dtype=BF16), TwoFour()).save_pretrained(path),
            "a quantized checkpoint",
        ),
        (_without_mlps, "expected gated MLPs, found none in GPT2LMHeadModel"),
    ],
)
def test_invalid_directory_is_one_error(change, message, tmp_path):
    tiny().save_pretrained(tmp_path)
    tokenizer().save_pretrained(tmp_path)
    change(tmp_path)
    with pytest.raises((SuiteError, FormatError), match=message) as error:
        models.load(tmp_path, torch.device("cpu"))
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_missing_transformers_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(SuiteError, match=r"expected the package transformers .*models"):
        models.load(tmp_path, torch.device("cpu"))
