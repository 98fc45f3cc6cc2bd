"""The dense kernels of a gated layer beside cuBLAS: gate and up fused, and torch.compile."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.harness.bench.operands import redraw
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.dense import ffn_dense_triton, torch_compile
from tests.compiling.triton_kernels import complaint_about_launch
from tests.kernels.contract import refusal
from tests.kernels.layers import assert_correct, operands_for, problem_of
from tests.tools.marks import needs_gxx

OP = load_op("ffn")


def case_of(m: int, n: int, k: int, dtype: str, activation: str, device: str = "cpu") -> Operands:
    fields = {"m": m, "n": n, "k": k, "dtype": dtype, "activation": activation}
    return operands_for(problem_of("ffn", **fields), torch.device(device))


@pytest.mark.interpreted
@pytest.mark.parametrize("path", ["tma", "pointers"])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_interpreted_fused_gate_and_up_are_correct(dtype, activation, path):
    case = case_of(19, 72, 40, dtype, activation)
    x = case.activations["x"]
    wg, wu, wd = (case.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    for config in ffn_dense_triton.configurations(len(x), x.element_size(), path):
        h = ffn_dense_triton.launch(x, wg, wu, config, activation)()
        assert_correct(torch.mm(h, wd.t()), case)


@pytest.mark.compiles
@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_fused_gate_and_up_compile_in_every_configuration(m: int) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, w = empty(m, 2048), empty(5632, 2048)
    for path in ("tma", "pointers"):
        for config in ffn_dense_triton.configurations(m, 2, path):
            program = ffn_dense_triton.launch(x, w, w, config, "relu2")
            assert complaint_about_launch(program, 90) is None


def test_an_unknown_mode_is_refused() -> None:
    case = case_of(2, 8, 8, "fp32", "relu")
    message = refusal(lambda: torch_compile.prepare(case, mode="fast"))
    assert "option mode: expected one of default, max-autotune" in message


@needs_gxx
def test_a_compiled_definition_follows_its_activations() -> None:
    case = case_of(3, 24, 16, "fp32", "relu")
    launch = torch_compile.prepare(case)
    redraw(case.problem, OP, case.activations, 1)
    assert_correct(launch(), case)
    assert launch.choice == {"mode": "default"}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [ffn_dense_triton, torch_compile])
@pytest.mark.parametrize("m", [1, 33, 300, 2000])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
def test_dense_kernels_are_correct_on_a_gpu(kernel: Any, m: int, activation: str) -> None:
    case = case_of(m, 1024, 512, "bf16", activation, "cuda")
    launch = kernel.prepare(case)
    redraw(case.problem, OP, case.activations, 1)
    assert_correct(launch(), case)
    assert_correct(kernel.prepare(replace(case, pinned=launch.choice))(), case)
