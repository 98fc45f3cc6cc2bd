"""Plans that are made ahead for a model, and the file of choices beside a checkpoint."""

import json
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.errors import FormatError, Unsupported
from sparsebench.harness.models.pruning import ahead as planning
from sparsebench.kernels._common import choices
from sparsebench.kernels._common.operator import ahead
from sparsebench.kernels._common.product import Product, Selected
from sparsebench.kernels.nn import serving_transformers
from sparsebench.nn import TwoFour, sparsify_
from tests.harness.tiny_models import tiny, transformers
from tests.tools.command_line import refusal

GPU = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H200")
CUDA = torch.device("cuda")


def problem_of(m: int) -> dict[str, Any]:
    return {"op": "linear", "m": m, "n": 64, "k": 64, "density": 0.5}


class PlannedLayer(torch.nn.Module):
    """A layer whose search takes 64 tokens in a work item, whatever it plans."""

    def __init__(self) -> None:
        super().__init__()
        self.planned: list[tuple[int, bool]] = []
        self.register_buffer("values", torch.empty(1))

    def plan(self, tokens: list[int], *, search: bool = True) -> None:
        self.planned += [(m, search) for m in tokens]
        with ahead(search=search) as selected:
            for m in tokens:
                product = Product(lambda: None, code="sass:1")
                choice = {"kernel": "small", "tokens": 64}
                selected.append(Selected(product, choice, "search", problem_of(m)))


@pytest.fixture
def compilations(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """How often front.cpp was compiled, which takes 25 s."""
    made: list[str] = []
    monkeypatch.setattr(planning, "front_type", lambda: made.append("front.cpp"))
    return made


@pytest.fixture
def layer(monkeypatch: pytest.MonkeyPatch, compilations: list[str]) -> PlannedLayer:
    """The only kind of layer of every model, on a GPU."""
    only = PlannedLayer()
    monkeypatch.setattr(planning, "kinds_of", lambda model: [only])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU)
    monkeypatch.setattr(choices, "_CHECKPOINTS", {})
    return only


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    sparsify_(tiny(dtype=torch.bfloat16), TwoFour(), tokens=()).save_pretrained(tmp_path)
    return tmp_path


def loaded(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")


def tuned(folder: Path, model: Any = None, **options: Any) -> list[str]:
    model = model or loaded(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "_load", lambda folder: SimpleNamespace(to=lambda device: model))
        return planning.tune(folder, [1, 5, 20], CUDA, options.pop("minutes", 1), **options)


def test_the_file_of_a_checkpoint_is_taken_when_it_is_loaded(layer, checkpoint: Path) -> None:
    model = loaded(checkpoint)
    layer.planned.clear()
    (line,) = tuned(checkpoint, model)
    assert line == f"{checkpoint}/sparsebench-sm90_132.choices: 3 choices for 1 to 32 tokens"
    assert layer.planned == [(1, True), (8, True), (32, True)]
    layer.planned.clear()
    loaded(checkpoint)
    assert sorted(layer.planned) == [(1, False), (8, False), (32, False)]
    chosen = choices.of_checkpoints()[choices.key(problem_of(8))]
    assert chosen == {"kernel": "small", "tokens": 64, "code": "sass:1"}


def test_a_file_that_is_written_again_is_read_again(layer, checkpoint: Path) -> None:
    tuned(checkpoint)
    loaded(checkpoint)
    file = planning.file_of(checkpoint, CUDA)
    file.write_text(file.read_text().replace('"tokens": 64', '"tokens": 32'))
    loaded(checkpoint)
    assert choices.of_checkpoints()[choices.key(problem_of(8))]["tokens"] == 32


def test_a_folder_that_cannot_be_written_is_an_error_before_the_search(layer, checkpoint) -> None:
    (checkpoint / "file").write_text("")
    model = loaded(checkpoint)
    layer.planned.clear()
    with pytest.raises(OSError, match="file"):
        tuned(checkpoint, model, out=checkpoint / "file" / "below")
    assert not layer.planned
    tuned(checkpoint, model, out=checkpoint / "a" / "b")
    assert planning.file_of(checkpoint / "a" / "b", CUDA).exists()


def test_one_layer_of_each_kind_is_planned_on_each_gpu(monkeypatch) -> None:
    model = sparsify_(tiny(dtype=torch.bfloat16), TwoFour(), tokens=())
    names = [*planning.describe(model)]
    devices = {name: ["cuda:0"] for name in names if "layers.0" in name}
    devices |= {name: ["cuda:1"] for name in names if "layers.1" in name}
    devices[names[-1]] = ["meta", "cuda:1"]  # offloaded in part
    of_layer = {model.get_submodule(name): devices[name] for name in names}

    def tensors(layer: torch.nn.Module) -> list[Any]:
        return [SimpleNamespace(device=torch.device(device)) for device in of_layer[layer]]

    monkeypatch.setattr(planning, "_tensors", tensors)
    whole = {(str(planning.describe(model)[name]), *devices[name]) for name in names[:-1]}
    assert len(planning.kinds_of(model)) == len(whole) > len({kind for kind, _ in whole})


def test_all_layers_in_blocks_are_planned_for_the_tokens_of_a_file(
    monkeypatch, compilations
) -> None:
    layers = [PlannedLayer(), PlannedLayer()]
    model = torch.nn.ModuleList(layers)
    monkeypatch.setattr(planning, "BlockSparseLinear", PlannedLayer)
    monkeypatch.setattr(planning, "describe", lambda model: {"0": {}, "1": {}})
    monkeypatch.setattr(
        planning, "_tensors", lambda layer: [SimpleNamespace(device=CUDA, is_cuda=False)]
    )
    planning.plan_ahead(model, [1, 5])
    assert [sorted({*layer.planned}) for layer in layers] == 2 * [[(1, False), (8, False)]]
    layers[1].planned.clear()
    planning.plan_ahead(model)
    assert not layers[1].planned
    assert compilations == ["front.cpp", "front.cpp"]
    layers[0].planned.clear()
    planning.plan_ahead(model, ())
    assert not layers[0].planned


def test_layers_that_no_kernel_runs_are_said_when_they_are_loaded(layer, checkpoint, monkeypatch):
    def plan(tokens: list[int], *, search: bool) -> None:
        raise Unsupported("needs compute capability 8.0 or newer, found 7.5")

    monkeypatch.setattr(layer, "plan", plan)
    with pytest.warns(UserWarning, match=r"^PlannedLayer: needs compute capability") as warned:
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    assert sum("compute capability" in str(each.message) for each in warned) == 1


def test_a_version_of_transformers_that_was_not_tested_is_named(layer, checkpoint, monkeypatch):
    monkeypatch.setattr(serving_transformers, "version", lambda name: "5.99.0.dev0")
    with pytest.warns(UserWarning, match=r"expected transformers 5\.17 to 5\.23, found 5\.99\.0"):
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")


def test_without_a_file_the_powers_of_two_are_planned(layer, checkpoint: Path) -> None:
    loaded(checkpoint)
    assert sorted(layer.planned) == [(m, False) for m in planning.POWERS]


def test_if_the_time_is_up_the_file_has_what_was_reached(layer, checkpoint: Path) -> None:
    lines = tuned(checkpoint, minutes=0)
    assert lines[1] == "time is up: 2 numbers of tokens left, of 3"
    header = json.loads(planning.file_of(checkpoint, CUDA).read_text().splitlines()[0])
    assert header["tuned"]["tokens"] == [1]


def test_what_no_kernel_computes_is_said_and_the_rest_is_written(layer, checkpoint: Path) -> None:
    plan = layer.plan

    def without_eight(tokens: list[int], **options: Any) -> None:
        if tokens == [8]:
            raise Unsupported("expected another number")
        plan(tokens, **options)

    layer.plan = without_eight
    written, refused = tuned(checkpoint)
    assert "2 choices for 1 to 32 tokens" in written
    assert refused == "PlannedLayer, 8 tokens: expected another number"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("gpu", "expected sparsebench-sm90_132.choices for this GPU, found sparsebench-sm80_108"),
        ("version", "expected version .*, found 0.1"),
        ("layers", "expected layers .*, found 0123"),
        ("tokens", "expected a first line with 'tuned'"),
        ("no tokens", "expected a first line with 'tuned'"),
        ("empty", "expected a first line with 'tuned', found ''"),
        ("nested", r"expected a first line with 'tuned', found '\[\[\["),
    ],
)
def test_a_file_that_does_not_fit_is_one_line_and_changes_nothing(
    layer, checkpoint: Path, change: str, message: str
) -> None:
    tuned(checkpoint)
    file = planning.file_of(checkpoint, CUDA)
    first, *rest = file.read_text().splitlines()
    header = json.loads(first)["tuned"]
    header |= {"version": {"version": "0.1"}, "layers": {"layers": "0123"}}.get(change, {})
    header |= {"tokens": {"tokens": "many"}, "no tokens": {"tokens": []}}.get(change, {})
    file.write_text("\n".join([json.dumps({"tuned": header}), *rest, ""]) * (change != "empty"))
    if change == "nested":
        file.write_text("[" * 100_000)
    if change == "gpu":
        file.rename(checkpoint / "sparsebench-sm80_108.choices")
    with pytest.warns(UserWarning, match=message) as caught:
        tokens = planning.take(
            transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
        )
    assert "sparsebench tune" in str(caught[0].message)
    assert tokens is None
    assert not choices.of_checkpoints()


def test_sparsify_plans_what_is_asked_for(layer) -> None:
    sparsify_(tiny(dtype=torch.bfloat16), TwoFour(), tokens=())
    assert not layer.planned
    sparsify_(tiny(dtype=torch.bfloat16), TwoFour())
    assert sorted(layer.planned) == [(m, False) for m in planning.POWERS]


def test_sparsify_with_tokens_takes_the_file_beside_the_weights(layer, checkpoint: Path) -> None:
    tuned(checkpoint)
    model = tiny(dtype=torch.bfloat16)
    sparsify_(model, TwoFour(), tokens=[])
    assert not choices.of_checkpoints()
    model = tiny(dtype=torch.bfloat16)
    model.config._name_or_path = str(checkpoint)
    sparsify_(model, TwoFour(), tokens=[])
    assert len(choices.of_checkpoints()) == 3


def test_layers_on_a_cpu_are_not_planned() -> None:
    assert not planning.kinds_of(sparsify_(tiny(dtype=torch.bfloat16), TwoFour()))


@pytest.mark.parametrize(
    ("text", "counts"), [("1", [1]), ("1,16,64", [1, 16, 64]), ("3-5, 4-6", [3, 4, 5, 6])]
)
def test_numbers_of_tokens_are_lists_of_ranges(text: str, counts: list[int]) -> None:
    assert planning.counts_of(text) == counts


@pytest.mark.parametrize("text", ["", "0", "a", "5-1", "1-", "-3", "1-99999"])
def test_numbers_of_tokens_that_cannot_be_are_one_line(text: str) -> None:
    with pytest.raises(FormatError, match="--tokens: expected numbers from 1 to 65536, such as"):
        planning.counts_of(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{}", "--device", "cpu"], "expected an NVIDIA GPU"),
        (["{}", "--tokens", "0"], "--tokens: expected numbers from 1"),
        (["{}", "--only", "m=1"], "expected a suite"),
        (["quick", "--tokens", "1"], "expected the folder of a model"),
        (["quik"], "quick"),
    ],
)
def test_a_wrong_call_of_tune_is_one_line(arguments, message, tmp_path: Path) -> None:
    assert message in refusal("tune", *(a.format(tmp_path) for a in arguments))


def test_a_folder_without_sparse_layers_is_one_line(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path)
    with pytest.raises(FormatError, match="expected sparse layers"):
        planning.tune(tmp_path, [1], torch.device("cpu"), 1)


def test_a_process_that_imports_no_layers_loads_a_sparse_checkpoint(checkpoint: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from sparsebench.harness.models.pruning.ahead import _load, describe\n"
        "print(len(describe(_load(Path(sys.argv[1])))))"
    )
    command = [sys.executable, "-c", code, str(checkpoint)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(run.stdout) > 0
    assert "MISSING" not in run.stderr
