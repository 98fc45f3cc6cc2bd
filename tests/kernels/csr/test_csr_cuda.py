"""The CSR kernels: their threads on a CPU, where NaN goes, their lists, and their machine code.

On the CPU the kernels' own source runs thread by thread, with the arguments of its launches.
"""

from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.csr import Csr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.unstructured import UnstructuredCall
from sparsebench.kernels.csr import csr_cuda, csr_cuda_wgrad
from sparsebench.kernels.csr._panels import PanelShape, work_of
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of, run_here
from tests.kernels.contract import Example, run_engine
from tests.tools.marks import needs_gxx, sampled

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
CALLS = {
    "multiply_rows": """
        multiply_rows(at<const Element*>(0), at<long long>(1), at<int>(2), at<int>(3),
                      at<const Pair*>(4), at<const u32*>(5), at<const Start*>(6), at<const int*>(7),
                      at<const int*>(8), at<int>(9), at<int>(10), at<int>(11), at<int>(12),
                      at<Element*>(13), at<int>(14));
    """,
    "sum_products": """
        sum_products(at<const Element*>(0), at<long long>(1), at<int>(2), at<const Element*>(3),
                     at<long long>(4), at<int>(5), at<int>(6), at<const Range*>(7), at<int>(8),
                     at<const uint4*>(9), at<const Head*>(10), at<int>(11), at<int>(12),
                     at<int>(13), at<float*>(14), at<Element*>(15));
    """,
    "add_parts": """
        add_parts(at<const float*>(0), at<int>(1), at<int>(2), at<Element*>(3));
    """,
}


@cache
def library(name: str, constants: cuda.Constants) -> Any:
    """Build the source of a kernel for this machine."""
    functions = ("multiply_rows",) if name == "csr_cuda" else ("sum_products", "add_parts")
    narrowing = "__float_as_uint(f)" if dict(constants)["FP32"] else "(u16)narrow(f)"
    source = f"""
      #define __align__(n)
      #include "mma_on_cpu.h"
      static void prefetch_l2(const void*) {{}}
      using u16 = unsigned short;
      #define narrow(f) {narrowing}
      {device_code(f"{name}.cu", "narrow")}
    """
    source += "".join(
        entry_point(CALLS[function], name=f"run_{function}") for function in functions
    )
    return library_of(source, constants)


def on_two_sms(patch: pytest.MonkeyPatch, module: ModuleType, config: Any, room: int) -> ModuleType:
    """Run a kernel here, as on a GPU of two SMs whose CTAs may have so much shared memory."""
    gpu = SimpleNamespace(shared_memory_per_multiprocessor=config.ctas * (room + 1024))
    name = module.__name__.rpartition(".")[2]

    def build(function: str, constants: cuda.Constants) -> Any:
        return getattr(library(name, constants), f"run_{function}")

    run_here(patch, build, room)
    patch.setattr(module, "multiprocessors", lambda device: 2)
    patch.setattr(cuda, "target_of", lambda device: "cpu")
    patch.setattr(torch.cuda, "get_device_properties", lambda device: gpu)
    return module


EXAMPLES = [
    *(Example(3, 5, 7, 0.5), Example(65, 40, 132, 0.2), Example(40, 70, 260, 0.1)),
    *(Example(5, 4, 700, 0.02), Example(33, 9, 64, 0.0), Example(9, 33, 100, 1.0)),
]
EVERY = [(8, FP32), (16, FP32), (32, FP32), (64, FP32)]
EVERY += [(16, BF16), (64, BF16), (32, FP16), (128, FP16)]
CASES = [
    (example, *room, *EVERY[(2 * i + j + turn) % 8])
    for turn in (0, 3)
    for i, example in enumerate(EXAMPLES)
    for j, room in enumerate(((8000, 100), (40000, 0)))
]


@needs_gxx
@pytest.mark.parametrize(
    ("example", "room", "spare", "tokens", "dtype"), sampled(CASES, 0, 3, 5, 6, 8, 10), ids=str
)
def test_its_threads_give_both_products_on_a_cpu(example, room, spare, tokens, dtype, monkeypatch):
    config = csr_cuda.Config(tokens, 64, 1, spare)
    on_two_sms(monkeypatch, csr_cuda, config, room)
    for engine in (csr_cuda.KERNEL, csr_cuda.DGRAD):
        assert run_engine(engine, example, dtype, configs=[config])


KINDS = [(1, FP32), (2, FP32), (1, BF16), (1, FP16)]
GRADIENTS = [
    (example, room, *KINDS[(i + j + turn) % 4])
    for turn in (0, 2)
    for i, example in enumerate(e for e in EXAMPLES if e.part)
    for j, room in enumerate((24000, 90000))
]


@needs_gxx
@pytest.mark.parametrize(
    ("example", "room", "vectors", "dtype"), sampled(GRADIENTS, 0, 1, 3, 5, 6, 8), ids=str
)
def test_its_threads_give_the_gradient_on_a_cpu(example, room, vectors, dtype, monkeypatch):
    config = csr_cuda_wgrad.Config(vectors, 64, 1)
    on_two_sms(monkeypatch, csr_cuda_wgrad, config, room)
    assert run_engine(csr_cuda_wgrad.KERNEL, example, dtype, configs=[config])


@needs_gxx
def test_nan_is_where_the_definition_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Padding of steps multiplies zeros by zeros, and no token of X."""
    config = csr_cuda.Config(8, 64, 1)
    on_two_sms(monkeypatch, csr_cuda, config, 8000)
    w = Csr.from_dense(EXAMPLES[1].dense(FP32))
    x = torch.randint(-2, 3, (65, 132)).float()
    x[3], x[7, 5], x[9, 0] = float("nan"), float("inf"), float("nan")
    y = csr_cuda.plan(w, UnstructuredCall("linear", 65), config).run(x)
    touched = (~x.isfinite()).float() @ w.to_dense().ne(0).float().T > 0
    assert torch.equal(~y.isfinite(), touched)
    right = x.nan_to_num(0, 0, 0) @ w.to_dense().T
    torch.testing.assert_close(y[~touched], right[~touched], rtol=0, atol=0)


def test_ways_that_read_together_read_other_banks() -> None:
    w = Csr.from_dense(torch.ones(16, 256))
    parts = torch.ones(16, dtype=torch.int64)
    work = work_of(w, PanelShape(torch.tensor([0, 16]), parts, 256, 1, 16, 4))
    order = torch.empty(16 * 256, dtype=torch.int64)
    order[work.targets] = work.places
    together = order.view(-1, 4, 4, 2) % 4  # step, quarter, way, element
    assert (together.sort(2).values == torch.arange(4)[:, None]).all()


def test_a_panel_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    config = csr_cuda.Config(64, 256, 1)
    on_two_sms(monkeypatch, csr_cuda, config, 1000)
    w = Csr.from_dense(EXAMPLES[1].dense(FP32))
    with pytest.raises(Unsupported, match="bytes of shared memory, found 1000"):
        csr_cuda.plan(w, UnstructuredCall("linear", 65), config)


CALL, ONE = UnstructuredCall("linear", 1), torch.ones(1, 1)
CONFIGS = [
    (module, config, dtype)
    for module in (csr_cuda, csr_cuda_wgrad)
    for dtype in (FP32, BF16)
    for config in module.choices(Csr.from_dense(ONE.to(dtype)), CALL)
]
WGRAD = [case[0] for case in CONFIGS].index(csr_cuda_wgrad)


@by_nvcc
@pytest.mark.parametrize(("module", "config", "dtype"), sampled(CONFIGS, 0, WGRAD), ids=str)
def test_both_kernels_compile_without_a_spill(module, config, dtype, tmp_path: Path) -> None:
    for aligned in (True, False):
        constants = module.constants_of(config, dtype, aligned)
        assert_compiles_cleanly(module.__name__.rpartition(".")[2], constants, tmp_path)
