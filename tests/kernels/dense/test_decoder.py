"""A decoding step: right in every layer, searched or pinned, and on redrawn activations."""

import json
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from triton.compiler import ASTSource

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.contest_state import bound
from sparsebench.harness.bench.correctness import Expected, check, roundings
from sparsebench.harness.bench.operands import operands as drawn
from sparsebench.harness.bench.operands import redraw
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._kernel import OUTPUTS, Launch, Operands
from sparsebench.kernels.bsr import decoder_bsr
from sparsebench.kernels.dense import _decoder, _decoder_glue, _gemm, decoder_dense
from sparsebench.results.record import Problem
from tests.compiling.triton_kernels import complaint_about

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OP = load_op("decoder")
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


@pytest.fixture(autouse=True)
def _no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    if not torch.cuda.is_available():  # a build of torch without cuBLASLt refuses its name
        monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())


def problem(**fields: Any) -> Problem:
    return Problem(
        "decoder", {**OP.defaults, **SMALL, "dtype": "fp16", **fields}, defaults=OP.defaults
    )


def given(
    asked: Problem, device: torch.device = CPU, formats: Mapping[str, Any] = {}
) -> tuple[Operands, dict[str, Tensor]]:
    """Draw operands; `formats` converts some weights."""
    dense = drawn(asked, OP, device, None)
    weights: dict[str, Format] = {
        name: formats.get(name, Dense.from_dense)(w) for name, w in dense.weights.items()
    }
    return Operands(asked, weights, dense.activations, bound(OP.definition, asked)), dense.weights


def verdict(launch: Launch, these: Operands, weights: Mapping[str, Tensor]) -> Any:
    """Redraw the activations, poison the output, and check what the launch writes."""
    asked, activations = these.problem, these.activations
    redraw(asked, OP, activations, 7)
    out = launch()
    assert isinstance(out, Tensor)
    out.fill_(torch.nan)
    full = {**weights, **activations}
    exact = {name: t.double() for name, t in full.items()}
    right, spread = (bound(f, asked)(**exact) for f in (OP.definition, OP.spread))
    plain, dtype = bound(OP.definition, asked)(**full), asked["dtype"]
    rounded = roundings(dtype, OP.rounds(dtype))
    return check(
        launch(), Expected(right, spread, OUTPUTS[dtype], OP.depth(**exact), *rounded, plain=plain)
    )


def assert_right(these: Operands, weights: Mapping[str, Tensor], prepare: Any) -> Launch:
    launch: Launch = prepare(these)
    found = verdict(launch, these, weights)
    assert found.reason is None, found.reason
    return launch


def assert_right_twice(these: Operands, weights: Mapping[str, Tensor], prepare: Any) -> Launch:
    """Check a searched launch, and one from the pinned choice."""
    launch = assert_right(these, weights, prepare)
    again = prepare(replace(these, pinned=json.loads(json.dumps(launch.choice))))
    assert again.choice == launch.choice
    assert verdict(again, these, weights).reason is None
    return launch


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
    assert_right(*given(problem(**fields)), decoder_dense.prepare)


@pytest.mark.interpreted
def test_an_interpreted_choice_can_be_pinned() -> None:
    launch = assert_right_twice(*given(problem()), decoder_dense.prepare)
    assert [*launch.choice] == ["qkv", "o", "gate_up", "down", "head", "attention"]


@pytest.mark.interpreted
@pytest.mark.parametrize("parts", [2, 3])
def test_interpreted_attention_is_right_in_several_parts(
    parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = _decoder_glue.Config(parts, 16, 4, 2)
    monkeypatch.setattr(_decoder_glue, "configurations", lambda about: [config])
    assert_right(*given(problem(layers=1)), decoder_dense.prepare)


@pytest.mark.interpreted
@pytest.mark.parametrize("pruned", ["mlp", "all"])
def test_an_interpreted_step_of_blocks_is_right(pruned: str) -> None:
    size = {"m": 1, "hidden": 64, "intermediate": 96}
    asked = problem(**size, pattern="blocks", block=16, sparsity=0.5, pruned=pruned)
    blocks = {name: lambda w: Bsr.from_dense(w, block=16) for name in _decoder.LAYER}
    launch = assert_right(*given(asked, formats=blocks), decoder_bsr.prepare)
    assert ("kernel" in launch.choice["qkv"]) is (pruned == "all")
    assert launch.choice["down"]["kernel"] == "bsr_triton"


@pytest.mark.interpreted
def test_an_interpreted_step_that_mixes_up_layers_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    these, weights = given(problem(layers=3, caches=3))
    real = _decoder.normed

    def first_gains(stream: Any, added: Any, gain: Any, *rest: Any) -> Any:
        return real(stream, added, these.activations["gains"][0], *rest)

    monkeypatch.setattr(_decoder, "normed", first_gains)
    assert "error" in str(verdict(decoder_dense.prepare(these), these, weights).reason)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_attention_compiles_without_a_spill(
    capability: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
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


def test_copies_have_separate_memory() -> None:
    weight = Dense.from_dense(torch.randn(4, 8))
    copy = _decoder.copied(weight)
    assert torch.equal(copy.values, weight.values)
    assert copy.values.data_ptr() != weight.values.data_ptr()


class _Small:
    total_memory = 10**9


def test_a_model_that_is_too_large_is_refused_before_it_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = problem(
        m=1, hidden=5120, heads=64, kv_heads=8, head_dim=128, intermediate=25600, layers=64
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: _Small)
    found = _decoder.unsupported_size(whole, CUDA)
    assert found == (
        "needs at least 62.4 GB for the weights of all layers, found a device that has 1.0 GB"
    )
    assert "needs at least 49.8 GB" in str(_decoder.unsupported_size(whole, CUDA, 0.75))
    assert _decoder.unsupported_size(problem(), CUDA) is None


def test_contenders_refuse_a_model_that_no_longer_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    these, _ = given(problem())
    monkeypatch.setattr(Operands, "device", CUDA)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 20, 1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 0)
    with pytest.raises(Unsupported, match="has room for"):
        _decoder.require_room(these)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("m", [1, 16, 33])
def test_a_step_is_right_on_a_gpu(m: int, dtype: str) -> None:
    fields = {"hidden": 512, "heads": 8, "head_dim": 128, "intermediate": 1024, "vocab": 256}
    asked = problem(**fields, m=m, context=1000, dtype=dtype, layers=3, caches=2)
    assert_right_twice(*given(asked, CUDA), decoder_dense.prepare)
