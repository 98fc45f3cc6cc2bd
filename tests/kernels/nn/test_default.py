"""What users get, as suites measure it: layers on a CPU, and on a GPU also steps of a model."""

from functools import partial
from typing import Any

import pytest
import torch

from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import Spense
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.dense import experts_decoder_grouped
from sparsebench.kernels.nn import default
from tests.compiling.nvcc import hopper
from tests.kernels.attention.cases import Case, assert_attends, launch_operands
from tests.kernels.contract import refusal
from tests.kernels.layers import assert_right, assert_right_twice, operands_for, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
MLP = "wg", "wu", "wd"


def packed(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    """Return how each weight is packed; those of few active units stay dense."""
    if kind == "bsr":
        return dict.fromkeys(names, partial(Bsr.from_dense, block=32))
    if kind == "spense":
        pack = partial(Spense.from_dense, dense_fraction=0.5)
        return {name: partial(pack, split="columns") if name == "wd" else pack for name in names}
    return dict.fromkeys(names, Bitmap.from_dense) if kind == "bitmap" else {}


def layer(kind: str, device: torch.device, op: str = "ffn", **fields: Any) -> Operands:
    patterns: dict[str, Any] = {
        "bsr": {"pattern": "blocks", "block": 32, "sparsity": 0.5, "activation": "silu"},
        "spense": {"pattern": "spense_hidden", "sparsity": 0.25, "activation": "silu"},
        "twell": {"activation": "relu", "active": 9.0},
    }
    sizes = {"m": 20, "n": 512, "k": 256, "dtype": "fp16"}
    problem = problem_of(op, **{**sizes, **patterns[kind], **fields})
    return operands_for(problem, device, packed(kind, MLP if op != "mlp" else MLP[1:]))


def test_a_dense_weight_in_fp8_is_refused() -> None:
    problem = problem_of("linear", m=16, n=64, k=64, dtype="fp8")
    assert "found fp8" in refusal(lambda: default.prepare(operands_for(problem, CPU, {})))


def mixture(kind: str, device: torch.device) -> Operands:
    pattern = {"pattern": "two_four"} if kind == "spense" else {"pattern": "blocks", "block": 32}
    sizes = {"m": 20, "n": 128, "k": 256, "experts": 4, "top_k": 2, "dtype": "bf16"}
    pack = Spense.from_dense if kind == "spense" else partial(Bsr.from_dense, block=32)
    problem = problem_of("experts_ffn", **sizes, **pattern, sparsity=0.5)
    return operands_for(problem, device, dict.fromkeys(MLP, pack))


@pytest.mark.parametrize("kind", ["bsr", "spense"])
def test_a_mixture_is_right_on_a_cpu(kind: str) -> None:
    operands = mixture(kind, CPU)
    assert_right(default.prepare(operands), operands)


@hopper
@pytest.mark.parametrize("kind", ["bsr", "spense"])
def test_a_mixture_is_right_on_a_gpu(kind: str) -> None:
    assert_right_twice(mixture(kind, CUDA), default.prepare)


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        *(("bsr", {}), ("spense", {}), ("twell", {})),
        ("bsr", {"n": 496}),  # gate ends inside a block
        ("bsr", {"op": "mlp"}),  # without a gate
    ],
)
def test_a_layer_is_right_on_a_cpu(kind: str, fields: dict[str, Any]) -> None:
    operands = layer(kind, CPU, **fields)
    launch = default.prepare(operands)
    assert_right(launch, operands)
    if kind == "bsr" and not fields.get("op"):  # gate and up are one product
        assert {*launch.choice} == {"gate_up", "down"}


@pytest.mark.parametrize(
    ("fields", "reason"), [({"op": "mlp"}, "ffn"), ({"activation": "silu"}, "relu")]
)
def test_a_layer_that_users_do_not_have_is_refused(fields: dict[str, Any], reason: str) -> None:
    assert reason in refusal(lambda: default.prepare(layer("twell", CPU, **fields)))


@hopper
@pytest.mark.parametrize(
    ("kind", "dtype"), [("bsr", "bf16"), ("spense", "bf16"), ("spense", "fp8"), ("twell", "bf16")]
)
@pytest.mark.parametrize("m", [1, 40])
def test_a_layer_is_right_on_hopper(kind: str, dtype: str, m: int) -> None:
    operands = layer(kind, CUDA, m=m, dtype=dtype)
    launch = assert_right_twice(operands, default.prepare)
    products = {"gate_up", "down"}
    names = {"bsr": products, "spense": products, "twell": {"kernel", "problem"}}
    assert {*launch.choice} >= names[kind]


@hopper
@pytest.mark.parametrize("kind", ["bsr", "spense", "bitmap"])
@pytest.mark.parametrize("pruned", ["mlp", "all"])
@pytest.mark.parametrize("m", [1, 33])
def test_a_step_of_a_model_is_right_on_hopper(kind: str, pruned: str, m: int) -> None:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 1024}
    rest = {"vocab": 40, "layers": 2, "context": 300, "pruned": pruned, "dtype": "bf16"}
    pattern = {"pattern": "blocks", "block": 32, "sparsity": 0.5}
    if kind == "bitmap":
        pattern = {"pattern": "unstructured", "sparsity": 0.5}
    if kind == "spense":
        pattern = {"pattern": "spense_hidden", "sparsity": 0.25}
    names = MLP if pruned == "mlp" else (*MLP, "wqkv", "wo")
    formats: dict[str, Any] = packed(kind, names)
    operands = operands_for(problem_of("decoder", **sizes, **rest, **pattern, m=m), CUDA, formats)
    assert_right_twice(operands, default.prepare)


@hopper
@pytest.mark.parametrize("kind", ["bsr", "spense"])
@pytest.mark.parametrize("m", [1, 33])
def test_a_step_of_a_mixture_is_right_on_hopper(kind: str, m: int) -> None:
    sizes = {"hidden": 512, "heads": 8, "kv_heads": 2, "head_dim": 64, "intermediate": 256}
    rest = {"vocab": 40, "layers": 2, "context": 300, "dtype": "bf16", "experts": 8, "top_k": 2}
    blocks = {"pattern": "blocks", "block": 32, "sparsity": 0.5}
    pattern = blocks if kind == "bsr" else {"pattern": "two_four", "sparsity": 0.5}
    formats: dict[str, Any] = dict.fromkeys(
        MLP, Spense.from_dense if kind == "spense" else partial(Bsr.from_dense, block=32)
    )
    spec = problem_of("experts_decoder", **sizes, **rest, **pattern, m=m)
    operands = operands_for(spec, CUDA, formats)
    assert_right_twice(operands, default.prepare)
    dense = operands_for(spec, CUDA, {})
    assert_right_twice(dense, experts_decoder_grouped.prepare)


@pytest.mark.parametrize("device", [CPU, pytest.param(CUDA, marks=[pytest.mark.gpu])])
def test_attention_is_called_as_users_call_it(device: torch.device) -> None:
    case = Case((60, 90), 32, (4, 2), batch=2, lists=2, causal=True, head_dim=32)
    operands = launch_operands(case, device)
    launch = default.prepare(operands)
    for _ in range(3):
        assert_attends(launch, operands, case)
