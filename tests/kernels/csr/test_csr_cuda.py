"""csr_cuda: its threads on a CPU, its lists, and on a GPU its products; machine code of both.

On the CPU the kernel's own source runs thread by thread, with the arguments of its launch.
"""

import ctypes
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common.transposed import dgrad_of
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.csr import csr_cuda, csr_cuda_wgrad
from sparsebench.kernels.csr._panels import Shape, work_of
from sparsebench.kernels.csr.csr_cuda import Config
from sparsebench.results.record import Problem
from tests.compiling.nvcc import ampere, assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import entry_point, library_of
from tests.kernels.csr.examples import (
    BF16,
    FP16,
    FP32,
    SHAPES,
    example,
    on_gpu,
    on_this_machine,
    on_two_sms,
)
from tests.tools.marks import needs_gxx, sampled


@cache
def on_cpu(config: Config, dtype: torch.dtype, aligned: bool) -> Any:
    """Build the kernel's source for this machine."""
    call = """
        multiply_rows(at<const Element*>(0), at<long long>(1), at<int>(2), at<int>(3),
                      at<const Pair*>(4), at<const u32*>(5), at<const Start*>(6), at<const int*>(7),
                      at<const int*>(8), at<int>(9), at<int>(10), at<int>(11), at<int>(12),
                      at<Element*>(13), at<int>(14));
    """
    constants = (*csr_cuda.constants_of(config, dtype, aligned), ("LATE", 0))
    return library_of(on_this_machine("csr_cuda.cu", dtype) + entry_point(call), constants)


def emulated(x: Tensor, w: Csr, config: Config, room: int, patch: pytest.MonkeyPatch) -> Tensor:
    """Run the launch on a GPU of two SMs."""
    calls = on_two_sms(csr_cuda, config, room, patch)
    program = csr_cuda.launch(x, w, config)
    constants = dict(calls[0][2])
    kernel = on_cpu(config, x.dtype, bool(constants["ALIGNED"]))
    program.out.fill_(float("nan"))
    assert program.loaded.shared_bytes <= room
    kernel.call(program.args[0], program.loaded.grid, ctypes.c_size_t(program.loaded.shared_bytes))
    return program.out


EVERY = [(8, FP32), (16, FP32), (32, FP32), (64, FP32)]
EVERY += [(16, BF16), (64, BF16), (32, FP16), (128, FP16)]
CASES = [
    (shape, *room, *EVERY[(2 * i + j + turn) % 8])
    for turn in (0, 3)
    for i, shape in enumerate(SHAPES)
    for j, room in enumerate(((8000, 100), (40000, 0)))
]


@needs_gxx
@pytest.mark.parametrize(
    ("shape", "room", "spare", "tokens", "dtype"), sampled(CASES, 0, 3, 5, 6, 9, 10), ids=str
)
def test_its_threads_give_the_product_on_a_cpu(shape, room, spare, tokens, dtype, monkeypatch):
    x, w = example(shape, dtype)
    y = emulated(x, w, Config(tokens, 64, 1, spare), room, monkeypatch)
    right = (x.float() @ w.to_dense().float().T).to(dtype)
    torch.testing.assert_close(y, right, rtol=0, atol=0)


@needs_gxx
def test_nan_is_where_the_definition_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of steps multiplies zeros by zeros, and no token of X."""
    x, w = example(SHAPES[1], FP32)
    x[3], x[7, 5], x[9, 0] = float("nan"), float("inf"), float("nan")
    wide = torch.full((len(x), x.shape[1] + 3), float("nan"))[:, : x.shape[1]]
    wide.copy_(x)  # rows apart: columns are read one by one
    stored = w.to_dense().ne(0).float()
    touched = (~x.isfinite()).float() @ stored.T > 0
    y = emulated(wide, w, Config(8, 64, 1), 8000, monkeypatch)
    assert torch.equal(~y.isfinite(), touched)
    right = x.nan_to_num(0, 0, 0) @ w.to_dense().T
    torch.testing.assert_close(y[~touched], right[~touched], rtol=0, atol=0)


def test_ways_that_read_together_read_other_banks() -> None:
    w = Csr.from_dense(torch.ones(16, 256))
    parts = torch.ones(16, dtype=torch.int64)
    work = work_of(w, Shape(torch.tensor([0, 16]), parts, 256, 1, 16, 4))
    order = torch.empty(16 * 256, dtype=torch.int64)
    order[work.targets] = work.places
    together = order.view(-1, 4, 4, 2) % 4  # step, quarter, way, element
    assert (together.sort(2).values == torch.arange(4)[:, None]).all()


def test_the_gradient_of_x_is_a_linear_layer_of_the_transposed_weights() -> None:
    kernel = dgrad_of(replace(csr_cuda.KERNEL, prepare=lambda operands: operands))
    dy, w = torch.ones(3, 4), Csr.from_dense(torch.arange(32.0).view(4, 8))
    gradient = Operands(Problem("linear_dgrad", {}), {"w": w}, {"dy": dy}, torch.matmul)
    product = kernel.prepare(gradient)
    assert product.activations["x"] is dy
    assert torch.equal(product.weights["w"].to_dense(), w.to_dense().t())


def test_a_panel_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(csr_cuda, "room_of", lambda device, ctas: 1000)
    x, w = example(SHAPES[1], FP32)
    with pytest.raises(Unsupported, match="bytes of shared memory, found 1000"):
        csr_cuda.divided(w, len(x), Config(64, 256, 1), x.device)


BOTH = [(csr_cuda, dtype, csr_cuda.space(dtype)) for dtype in (FP32, BF16)]
BOTH += [(csr_cuda_wgrad, dtype, csr_cuda_wgrad.space()) for dtype in (FP32, BF16)]
CONFIGS = [(module, config, dtype) for module, dtype, space in BOTH for config in space]
WGRAD = [case[0] for case in CONFIGS].index(csr_cuda_wgrad)


@by_nvcc
@pytest.mark.parametrize(("module", "config", "dtype"), sampled(CONFIGS, 0, WGRAD), ids=str)
def test_both_kernels_compile_without_a_spill(module, config, dtype, tmp_path: Path) -> None:
    for aligned in (True, False):
        constants = module.constants_of(config, dtype, aligned)
        assert_compiles_cleanly(module.__name__.rpartition(".")[2], constants, tmp_path)


# ---- on a GPU ----


@pytest.mark.gpu
@ampere
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_products_are_right_on_a_gpu(name: str) -> None:
    dtype = DTYPES[name]
    for shape in [*SHAPES, (1000, 333, 1030, 0.1), (64, 512, 4608, 0.02)]:
        x, w = on_gpu(example(shape, dtype))
        right = (x.double() @ w.to_dense().double().T).to(dtype)
        for config in csr_cuda.space(dtype):
            program = csr_cuda.launch(x, w, config)
            for _ in range(2):
                program.out.fill_(float("nan"))
                torch.testing.assert_close(program(), right, rtol=0, atol=0)
