"""Test the decoding step with few active units: separate weights per layer, results on a GPU."""

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.harness.catalog import load_op
from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels.dense import _gemm
from sparsebench.kernels.twell import decoder_few, ffn_few
from sparsebench.kernels.twell._call import TwellCall
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper
from tests.kernels.layers import assert_right, operands_for, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OP = load_op("decoder")
SIZES = {"m": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
REST = {"vocab": 40, "layers": 3, "context": 20, "activation": "relu", "active": 6}


def problem(**fields: Any) -> Problem:
    return problem_of("decoder", **{**SIZES, **REST, "dtype": "fp16", **fields})


@pytest.mark.interpreted
@pytest.mark.parametrize("fields", [{}, {"m": 5, "activation": "relu2", "layers": 2}], ids=str)
def test_an_interpreted_step_has_separate_weights_per_layer(fields, monkeypatch) -> None:
    addresses: list[tuple[int, ...]] = []

    def plan(device: torch.device, call: TwellCall, config: NoConfig) -> Product:
        """Plan the layer in torch, with the same rounding of H and the gates."""

        def run(x: Tensor, *weights: Tensor, out: Tensor) -> Tensor:
            wg, wu, wd_t = (w.float() for w in weights)
            addresses.append(tuple(w.data_ptr() for w in weights))
            gate = (x.float() @ wg.T).to(x.dtype).float().relu()
            h = (gate.square() if call.squared else gate) * (x.float() @ wu.T)
            return out.copy_(h.to(x.dtype).float() @ wd_t)

        return Product(run, "of torch")

    monkeypatch.setattr(ffn_few, "KERNEL", replace(ffn_few.KERNEL, plan=plan))
    monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())
    operands = operands_for(problem(**fields), CPU)
    launch = decoder_few.prepare(operands)
    assert_right(launch, operands)
    assert [*launch.choice] == ["qkv", "o", "head", "attention"]
    assert launch.code == "of torch"
    for each in zip(*addresses, strict=True):
        assert len(set(each)) == operands.problem["layers"]


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("m", [1, 16, 33, 64])
def test_a_step_is_correct_on_a_hopper_gpu(m: int, dtype: str) -> None:
    sizes = {"hidden": 512, "heads": 8, "head_dim": 64, "intermediate": 1024, "context": 300}
    operands = operands_for(problem(**sizes, m=m, dtype=dtype), CUDA)
    assert_right(decoder_few.prepare(operands), operands)
