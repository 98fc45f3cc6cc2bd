"""csr_cuda_wgrad: its threads on a CPU, and on a GPU its sums."""

import ctypes
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.csr import Csr
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.csr import csr_cuda_wgrad
from sparsebench.kernels.csr.csr_cuda_wgrad import Config
from tests.compiling.nvcc import ampere
from tests.emulation.cuda_on_cpu import library_of
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
    """Build the source of both kernels for this machine."""
    source = on_this_machine("csr_cuda_wgrad.cu", dtype)
    source += """
      static void** a;
      template <class T> T& at(int i) { return *(T*)a[i]; }
      static void products() {
        sum_products(at<const Element*>(0), at<long long>(1), at<int>(2), at<const Element*>(3),
                     at<long long>(4), at<int>(5), at<int>(6), at<const Range*>(7), at<int>(8),
                     at<const uint4*>(9), at<const Head*>(10), at<int>(11), at<int>(12),
                     at<int>(13), at<float*>(14), at<Element*>(15));
      }
      static void addition() {
        add_parts(at<const float*>(0), at<int>(1), at<int>(2), at<Element*>(3));
      }
      extern "C" void call(void** first, int grid, size_t bytes, void** second, int adding) {
        a = first;
        launch(grid, THREADS, 1, bytes, products);
        a = second;
        if (second) launch(adding, THREADS, 1, 0, addition);
      }
    """
    constants = (*csr_cuda_wgrad.constants_of(config, dtype, aligned), ("LATE", 0))
    return library_of(source, constants)


def emulated(dy: Tensor, x: Tensor, w: Csr, config: Config, room: int, patch: Any) -> Tensor:
    """Run the launch on a GPU of two SMs."""
    calls = on_two_sms(csr_cuda_wgrad, config, room, patch)
    program = csr_cuda_wgrad.launch(dy, x, w, config)
    kernel = on_cpu(config, x.dtype, bool(dict(calls[0][2])["ALIGNED"]))
    first, then = program.products, program.addition
    size = ctypes.c_size_t(first.loaded.shared_bytes)
    second = (then.args[0], then.loaded.grid) if then else (None, 0)
    for kernel_of in filter(None, (first, then)):
        kernel_of.out.fill_(float("nan"))
    kernel.call(first.args[0], first.loaded.grid, size, *second)
    return (then or first).out


KINDS = [(1, FP32), (2, FP32), (1, BF16), (1, FP16)]
CASES = [
    (shape, room, *KINDS[(i + j + turn) % 4])
    for turn in (0, 2)
    for i, shape in enumerate(s for s in SHAPES if s[3])
    for j, room in enumerate((24000, 90000))
]


@needs_gxx
@pytest.mark.parametrize(
    ("shape", "room", "vectors", "dtype"), sampled(CASES, 0, 1, 3, 5, 6, 8), ids=str
)
def test_its_threads_give_the_gradient_on_a_cpu(shape, room, vectors, dtype, monkeypatch):
    x, w = example(shape, dtype)
    dy = torch.randint(-3, 4, (len(x), w.shape[0]), generator=torch.Generator().manual_seed(1))
    dy = dy.to(dtype)
    values = emulated(dy, x, w, Config(vectors, 64, 1), room, monkeypatch)
    right = w.sample((dy.float().T @ x.float()).to(dtype))
    torch.testing.assert_close(values, right.values, rtol=0, atol=0)


@pytest.mark.gpu
@ampere
@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
def test_the_gradients_are_right_on_a_gpu(name: str) -> None:
    dtype = DTYPES[name]
    for shape in [*(s for s in SHAPES if s[3]), (1000, 333, 1030, 0.1), (64, 512, 4608, 0.02)]:
        x, w = on_gpu(example(shape, dtype))
        dy = (torch.arange(len(x) * w.shape[0], device="cuda") % 7 - 3).view(len(x), -1).to(dtype)
        right = w.sample((dy.double().T @ x.double()).to(dtype)).values
        for config in csr_cuda_wgrad.space():
            gradient = csr_cuda_wgrad.launch(dy, x, w, config)
            for _ in range(2):
                torch.testing.assert_close(gradient().values, right, rtol=0, atol=0)
