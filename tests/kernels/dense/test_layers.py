"""Dense layers of several products: searched, pinned, and on redrawn activations."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.dense import _layers, cublas
from tests.kernels.layers import CPU, assert_right, assert_right_twice, operands_for, problem_of

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


def test_a_choice_of_one_library_is_the_definition_by_that_library() -> None:
    operands = operands_of("mlp", SIZES[0], "fp32", "relu")
    launch = cublas.prepare(replace(operands, pinned={"library": "cublaslt"}))
    assert launch.choice == {"library": "cublaslt"}
    assert_right(launch, operands)


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize("sizes", [*SIZES, (1, 1000, 333), (1000, 2048, 512)])
@pytest.mark.parametrize("op", ["mlp", "ffn", "ffn_step"])
def test_layers_are_right_on_a_gpu(op: str, sizes: Any, activation: str, dtype: str) -> None:
    assert_right_twice(operands_of(op, sizes, dtype, activation, CUDA), cublas.prepare)
