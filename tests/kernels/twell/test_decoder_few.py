"""Test the decoding step with few active units: separate weights per layer, results on a GPU."""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.harness.catalog import load_op
from sparsebench.kernels.dense import _gemm
from sparsebench.kernels.twell import decoder_few, ffn_few
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper
from tests.kernels.layers import assert_right, operands_for, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OP = load_op("decoder")
SIZES = {"m": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
REST = {"vocab": 40, "layers": 3, "context": 20, "activation": "relu", "active": 6}


def problem(**fields: Any) -> Problem:
    return problem_of("decoder", **{**SIZES, **REST, "dtype": "fp16", **fields})


@dataclass
class _Layer:
    """Compute ffn_few.cu's layer with torch, with the same rounding of H and the gates."""

    x: Tensor
    wg: Tensor
    wu: Tensor
    wd_t: Tensor
    y: Tensor
    squared: bool
    code: str = "of torch"

    def __call__(self) -> Tensor:
        x, wg, wu, wd_t = (t.float() for t in (self.x, self.wg, self.wu, self.wd_t))
        gate = (x @ wg.T).to(self.y.dtype).float().relu()
        h = (gate.square() if self.squared else gate) * (x @ wu.T)
        self.y.copy_(h.to(self.y.dtype).float() @ wd_t)
        return self.y


@pytest.fixture
def layers(monkeypatch: pytest.MonkeyPatch) -> list[_Layer]:
    """Replace the Hopper kernel by torch, and return the list of its launches."""
    launches: list[_Layer] = []

    def launch(*operands: Tensor, squared: bool) -> _Layer:
        launches.append(_Layer(*operands, squared))
        return launches[-1]

    monkeypatch.setattr(ffn_few, "launch", launch)
    monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())
    return launches


@pytest.mark.interpreted
@pytest.mark.parametrize("fields", [{}, {"m": 5, "activation": "relu2", "layers": 2}], ids=str)
def test_an_interpreted_step_has_separate_weights_per_layer(fields, layers) -> None:
    operands = operands_for(problem(**fields), CPU)
    launch = decoder_few.prepare(operands)
    assert_right(launch, operands)
    assert [*launch.choice] == ["qkv", "o", "head", "attention"]
    assert launch.code == "of torch"
    count = operands.problem["layers"]
    assert len(layers) == count
    for name in ("wg", "wu", "wd_t"):
        assert len({getattr(layer, name).data_ptr() for layer in layers}) == count


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("m", [1, 16, 33, 64])
def test_a_step_is_correct_on_a_hopper_gpu(m: int, dtype: str) -> None:
    sizes = {"hidden": 512, "heads": 8, "head_dim": 64, "intermediate": 1024, "context": 300}
    operands = operands_for(problem(**sizes, m=m, dtype=dtype), CUDA)
    assert_right(decoder_few.prepare(operands), operands)
