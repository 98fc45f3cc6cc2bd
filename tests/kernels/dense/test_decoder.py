"""A decoding step: right in every layer, searched or pinned, and on redrawn activations."""

from functools import partial
from typing import Any

import pytest
import torch
from triton.compiler import ASTSource

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import Spense
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.dense import _decoder, _decoder_glue, decoder_dense
from sparsebench.kernels.nn import default
from sparsebench.results.record import Problem
from tests.compiling.triton_kernels import complaint_about
from tests.kernels.layers import (
    CPU,
    assert_right,
    assert_right_twice,
    error_of,
    operands_for,
    problem_of,
)
from tests.tools.marks import exhaustive

CUDA = torch.device("cuda")
SMALL = {
    "m": 3,
    "hidden": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "intermediate": 80,
    "vocab": 40,
    "layers": 2,
    "context": 37,
}


def small(**fields: Any) -> Problem:
    return problem_of("decoder", **{**SMALL, "dtype": "fp16", **fields})


def operands_of(device: torch.device = CPU, **fields: Any) -> Operands:
    return operands_for(small(**fields), device)


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "fields",
    [
        {"dtype": "fp32", "layers": 3, "caches": 2, "m": 1},
        {"heads": 24, "kv_heads": 1, "head_dim": 48, "context": 1, "activation": "relu2"},
        {"heads": 2, "head_dim": 64, "context": 100, "activation": "relu", "m": 2},
    ],
    ids=str,
)
def test_an_interpreted_step_is_right(fields: Any) -> None:
    operands = operands_of(**fields)
    assert_right(decoder_dense.prepare(operands), operands)


def mixture(**fields: Any) -> Problem:
    sizes = {"experts": 4, "top_k": 2, "hidden": 64, "intermediate": 64, **fields}
    return problem_of("experts_decoder", **{**SMALL, "dtype": "fp16", **sizes})


@pytest.mark.interpreted
def test_an_interpreted_step_of_a_mixture_is_right() -> None:
    """With the experts that users get; torch's grouped product runs on a GPU alone."""
    for pattern, pack in (
        ({"pattern": "two_four"}, Spense.from_dense),
        ({"pattern": "blocks", "block": 32}, partial(Bsr.from_dense, block=32)),
    ):
        formats = dict.fromkeys(("wg", "wu", "wd"), pack)
        operands = operands_for(mixture(**pattern, sparsity=0.5, layers=3), CPU, formats)
        assert_right(default.prepare(operands), operands)


@pytest.mark.interpreted
def test_an_interpreted_choice_can_be_pinned() -> None:
    launch = assert_right_twice(operands_of(layers=1), decoder_dense.prepare)
    assert [*launch.choice] == ["qkv", "o", "gate_up", "down", "head", "attention"]


@pytest.mark.interpreted
@pytest.mark.parametrize("parts", [exhaustive(2), 3])
def test_interpreted_attention_is_right_in_several_parts(parts, monkeypatch) -> None:
    config = _decoder_glue.Config(parts, 16, 4, 2)
    monkeypatch.setattr(_decoder_glue, "configurations", lambda about: [config])
    operands = operands_of(layers=1)
    assert_right(decoder_dense.prepare(operands), operands)


@pytest.mark.interpreted
@pytest.mark.parametrize("pruned", [exhaustive("mlp"), "all"])
def test_an_interpreted_step_of_blocks_is_right(pruned: str) -> None:
    size = {"m": 1, "hidden": 64, "intermediate": 96, "layers": 1}
    pattern = {"pattern": "blocks", "block": 16, "sparsity": 0.5, "pruned": pruned}
    blocks = {name: lambda w: Bsr.from_dense(w, block=16) for name in _decoder.LAYER}
    operands = operands_for(small(**size, **pattern), formats=blocks)
    launch = default.prepare(operands)
    assert_right(launch, operands)
    assert ("kernel" in launch.choice["qkv"]) is (pruned == "all")
    assert launch.choice["down"]["kernel"] == "bsr_triton"


@pytest.mark.interpreted
def test_an_interpreted_step_that_mixes_up_layers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = operands_of(layers=2, caches=2)
    real = _decoder.normed

    def first_gains(stream: Any, added: Any, gain: Any, *rest: Any) -> Any:
        return real(stream, added, operands.activations["gains"][0], *rest)

    monkeypatch.setattr(_decoder, "normed", first_gains)
    assert "error" in str(error_of(decoder_dense.prepare(operands), operands))


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_attention_compiles_without_a_spill(capability, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = _decoder_glue._attend
    tokens, warps, stages = _decoder_glue.SHAPES[3]
    constants = {"GROUP": 8, "ROWS": 16, "HALF": 64, "PADDED": 64, "EPSILON": 1e-6}
    constants |= {"TOKENS": tokens, "WHOLE": False, "STAGES": stages, "TO_LOG2": 0.1}
    kinds = dict.fromkeys(function.arg_names, "*bf16") | dict.fromkeys(constants, "constexpr")
    kinds |= dict.fromkeys(("turn", "sums", "weights"), "*fp32") | {"PRECISION": "constexpr"}
    kinds |= dict.fromkeys(("cache", "kv_heads", "parts", "each"), "i32")
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(function.arg_names)
        if kinds[name].startswith("*") or name == "cache"
    }
    source = ASTSource(function, kinds, constants | {"PRECISION": "ieee"}, aligned)
    assert complaint_about(source, capability, {"num_warps": warps}) is None


def test_contenders_refuse_a_model_that_no_longer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    operands = operands_of()
    monkeypatch.setattr(Operands, "device", CUDA)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    with pytest.raises(Unsupported, match="has room for"):
        _decoder.require_room(operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("m", [1, 16, 33])
def test_a_step_is_right_on_a_gpu(m: int, dtype: str) -> None:
    fields: dict[str, Any] = {
        "hidden": 512,
        "heads": 8,
        "head_dim": 128,
        "intermediate": 1024,
        "vocab": 256,
    }
    fields |= {"m": m, "context": 1000, "dtype": dtype, "layers": 3, "caches": 2}
    assert_right_twice(operands_of(CUDA, **fields), decoder_dense.prepare)
