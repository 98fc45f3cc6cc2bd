"""Dense layers: several products, gate and up in one kernel, and torch.compile.

They are searched, pinned, and called with redrawn activations.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.dense import _layers, cublas, ffn_dense_triton, torch_compile
from tests.compiling.triton_kernels import complaint_about_launch
from tests.kernels.contract import refusal
from tests.kernels.layers import (
    CPU,
    assert_correct,
    assert_right,
    assert_right_twice,
    operands_for,
    problem_of,
)
from tests.tools.marks import needs_gxx

CUDA = torch.device("cuda")
SIZES = [(3, 40, 24), (33, 272, 136)]


def operands_of(
    op: str, sizes: tuple[int, int, int], dtype: str, activation: str, device: torch.device = CPU
) -> Operands:
    fields = dict(zip("mnk", sizes, strict=True)) | {"dtype": dtype, "activation": activation}
    return operands_for(problem_of(op, **fields), device)


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", ["relu", "relu2", "silu"])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_layer_without_a_gate_is_two_products(dtype, activation, sizes) -> None:
    operands = operands_of("mlp", sizes, dtype, activation)
    assert_right_twice(operands, _layers.mlp)
    assert [*_layers.mlp(operands).choice] == ["up", "down"]


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_an_interpreted_training_step_is_six_products(activation, sizes) -> None:
    operands = operands_of("ffn_step", sizes, "fp16", activation)
    assert_right_twice(operands, _layers.ffn_step)
    names = [*_layers.ffn_step(operands).choice]
    assert names == ["gate_up", "dh", "y", "dx", "dw", "dwd"]


@pytest.mark.interpreted
def test_interpreted_gate_and_up_are_one_product_or_two() -> None:
    operands = operands_of("ffn", SIZES[0], "fp16", "silu")
    for pair in _layers.PAIRS:
        pinned = {name: {"library": "cublas"} for name in (*pair, "down")}
        launch = _layers.ffn(replace(operands, pinned=pinned))
        assert launch.choice == pinned
        assert_right(launch, operands)


@pytest.mark.interpreted
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_interpreted_fused_gate_and_up_are_correct(dtype, activation):
    case = operands_of("ffn", (19, 72, 40), dtype, activation)
    x = case.activations["x"]
    wg, wu, wd = (case.weights[name].to_dense() for name in ("wg", "wu", "wd"))
    for config in ffn_dense_triton.configurations(len(x), x.element_size()):
        h = ffn_dense_triton.launch(x, wg, wu, config, activation)()
        assert_correct(torch.mm(h, wd.t()), case)


@pytest.mark.compiles
@pytest.mark.parametrize("m", [1, 64, 300, 4096])
def test_fused_gate_and_up_compile_in_every_configuration(m: int) -> None:
    def empty(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    x, w = empty(m, 2048), empty(5632, 2048)
    for config in ffn_dense_triton.configurations(m, 2):
        program = ffn_dense_triton.launch(x, w, w, config, "relu2")
        assert complaint_about_launch(program, 90) is None


def test_an_unknown_mode_is_refused() -> None:
    case = operands_of("ffn", (2, 8, 8), "fp32", "relu")
    message = refusal(lambda: torch_compile.prepare(case, mode="fast"))
    assert "option mode: expected one of default, max-autotune" in message


@needs_gxx
def test_a_compiled_definition_follows_its_activations(monkeypatch) -> None:
    # Inductor would compile a program for each vector extension of the CPU, for seconds.
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", True)
    operands = operands_of("ffn", SIZES[0], "fp32", "relu")
    launch = torch_compile.prepare(operands)
    assert_right(launch, operands)
    assert launch.choice == {"mode": "default"}


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [ffn_dense_triton, torch_compile])
@pytest.mark.parametrize("m", [1, 33, 300, 2000])
@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
def test_kernels_of_gate_and_up_are_right_on_a_gpu(kernel: Any, m: int, activation: str) -> None:
    operands = operands_of("ffn", (m, 1024, 512), "bf16", activation, CUDA)
    launch = kernel.prepare(operands)
    assert_right(launch, operands)
    assert_right(kernel.prepare(replace(operands, pinned=launch.choice)), operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("sizes", [*SIZES, (1, 1000, 333), (1000, 2048, 512)])
@pytest.mark.parametrize("op", ["mlp", "ffn", "ffn_step"])
def test_layers_are_right_on_a_gpu(op: str, sizes: Any, activation: str, dtype: str) -> None:
    assert_right_twice(operands_of(op, sizes, dtype, activation, CUDA), cublas.prepare)
