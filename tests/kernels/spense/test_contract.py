"""The contract of every kernel of 2:4 hybrid and 6:8 weights: its calls, and on a GPU its products.

The kernels come from discovery, so a new one needs no test here. test_refusals.py has the operands
that they refuse.
"""

import json
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench._discovery import modules
from sparsebench.errors import Unsupported
from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import Spense, tile_shapes
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._common import choices
from sparsebench.kernels._common.operator import Engine, OperatorCall
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.spense import spense_mma, spense_wgmma
from sparsebench.kernels.spense._call import SpenseCall, problem_of
from sparsebench.results.record import Problem
from tests.kernels.contract import refusal
from tests.kernels.spense.examples import (
    LARGE,
    ODD,
    SHAPES,
    Shape,
    assert_right,
    call_of,
    example,
    on_gpu,
)

FAMILY = "sparsebench.kernels.spense."
HERE = [load_kernel(name) for name, place in modules("kernels").items() if place.startswith(FAMILY)]
ENGINES = [
    kernel for kernel in HERE if isinstance(kernel, Engine) and not kernel.op.startswith("experts")
]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}


def bound(engine: Engine, x: Tensor, w: Spense | Slide) -> OperatorCall:
    """Return the operands of a suite as a call."""
    operands = Operands(Problem("linear", {}), {"w": w}, {"x": x}, torch.mm)
    return engine.bind(operands, (engine,))


def test_every_kernel_of_one_product_is_an_engine() -> None:
    assert {engine.name for engine in ENGINES} == {"spense_mma", "spense_wgmma", "slide_wgmma"}
    assert {kernel.op for kernel in HERE if not isinstance(kernel, Engine)} == {
        "ffn",
        "experts_ffn",
    }


# ---- calls ----


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_layout_determines_the_tiles_of_a_weight(shape: Shape, dtype: torch.dtype) -> None:
    w = example(shape, dtype)[1]
    shapes = tile_shapes(w.shape, w.sparse_shape, dtype.itemsize)
    assert shapes == (tuple(w.sparse.shape), tuple(w.dense.shape))


def test_published_choices_are_those_of_calls() -> None:
    lines = (choices.package_folder() / "sm90_132.choices").read_text().splitlines()
    published = [
        line for line in map(json.loads, lines) if line["problem"]["op"] == "spense.linear"
    ]
    for line in published:
        given = line["problem"]
        n, k = given["n"], given["k"]
        sparse = round(2 * n * (1 - given["density"])), k  # rows, 2:4 in all columns
        sizes = given["m"], (n, k), sparse, DTYPES[given["dtype"]], given["activation"]
        assert choices.key(problem_of(SpenseCall(*sizes))) == choices.key(given)
        assert spense_wgmma.KERNEL.config(**line["config"])
    assert published


def test_the_problem_of_a_lifted_weight_has_the_columns_of_x() -> None:
    x, w = torch.zeros(5, 240).half(), Slide.from_dense(torch.zeros(64, 240).half())
    call = bound(load_kernel("slide_wgmma"), x, w).call
    sizes = {"m": 8, "n": 64, "k": 240, "density": 0.75}
    fields = {"op": "slide.linear", "dtype": "fp16", "activation": None}
    assert problem_of(call) == {**fields, **sizes}


REFUSED = [
    (
        spense_wgmma,
        "fp16",
        16,
        "gelu",
        "expected one of silu, relu, relu2, gelu_tanh; found 'gelu'",
    ),
    (spense_wgmma, "fp16", 24, "silu", "16 rows of gate and up, found 64 and 24"),
    (spense_wgmma, "fp8", 48, "silu", "32 rows of gate and up, found 64 and 48"),
    (spense_mma, "fp16", 32, "silu", "expected no activation, which spense_wgmma has, found silu"),
]


@pytest.mark.parametrize(("module", "dtype", "n", "activation", "reason"), REFUSED)
def test_hidden_units_that_a_kernel_cannot_write_are_unsupported(
    module: Any, dtype: str, n: int, activation: str, reason: str
) -> None:
    w = Spense.from_dense(torch.zeros(n, 64).to(DTYPES[dtype]))
    call, config = call_of(w, 4, activation), module.KERNEL.config(16, 1, 4)
    assert reason in refusal(lambda: module.KERNEL.choices(w, call))
    assert reason in refusal(lambda: module.KERNEL.plan(w, call, config))


# ---- on a GPU ----


def drawn(engine: Engine, shape: Shape, dtype: str) -> tuple[Tensor, Spense | Slide]:
    """Return normal deviates on the GPU, in rows that are apart."""
    x, w = on_gpu(shape, dtype)
    wide = torch.full((len(x), x.shape[1] + 32), torch.nan, device="cuda").to(x.dtype)
    rows = wide[:, 16:-16].copy_(x)
    if engine.consumes == "spense":
        return rows, w
    keep = torch.rand(shape[1], -(-shape[2] // 8), 8, device="cuda").argsort(-1) < 6
    values = torch.randn(shape[1:3], device="cuda") * keep.flatten(1)[:, : shape[2]]
    return rows, Slide.from_dense((values + 0.0).to(x.dtype))


def poisoned_run(product: Product, call: SpenseCall, x: Tensor, *stored: Tensor | None) -> Tensor:
    """Return the product in a given output, which had NaN everywhere."""
    out = x.new_empty(len(x), call.width, dtype=call.kind).fill_(torch.nan)
    assert product.run(x, *stored, out=out) is out
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*LARGE, *SHAPES, *ODD], ids=str)
@pytest.mark.parametrize("engine", ENGINES, ids=lambda engine: engine.name)
def test_every_choice_is_right(engine: Engine, shape: Shape, dtype: str) -> None:
    """The products of a call are equal in each bit, also for fewer tokens and in a given output."""
    problem = Problem("linear", {"dtype": dtype})
    if reason := engine.unsupported(problem, torch.device("cuda")):
        pytest.skip(reason)
    x, w = drawn(engine, shape, dtype)
    these = bound(engine, x, w)
    call, weight = these.call, these.operator.weight(these.call)
    try:
        configs = engine.choices(weight, call)
    except Unsupported as error:
        pytest.skip(str(error))
    few = x[: -(-len(x) // 3)]
    scales = [torch.rand(size, device="cuda") + 0.5 for size in (shape[1], len(x))]
    for config in configs:
        product = engine.plan(weight, call, config)
        stored = these.weights(product)
        y = poisoned_run(product, call, x, *stored)
        assert_right(y, x, w, config)
        assert torch.equal(poisoned_run(product, call, x, *stored), y), config
        assert torch.equal(these.run(product)(), y), config
        assert_right(poisoned_run(product, call, few, *stored), few, w, (config, "fewer tokens"))
        for features in (scales[0], None) if dtype == "fp8" else ():
            y = poisoned_run(product, call, x, *stored[:2], features, scales[1])
            assert_right(y, x, w, (config, "scaled"), features, scales[1])
