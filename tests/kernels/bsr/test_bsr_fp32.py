"""bsr_fp32: its threads on a CPU, its machine code, and on a GPU its products."""

import ctypes
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.tuned_table import shared_bytes_of
from sparsebench.kernels.bsr import bsr_fp32
from sparsebench.kernels.bsr._launch import Product
from sparsebench.kernels.bsr.bsr_fp32 import Config
from tests.compiling.nvcc import ampere, assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of
from tests.kernels.bsr.examples import Shape, assert_right, example, on_gpu
from tests.tools.marks import needs_cupy, needs_gxx, sampled

TARGETS = "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"
# Every side of a step; blocks of several steps; edge blocks; rows without a block; no block; rows
# of X that are no multiples of 16 bytes.
SHAPES: list[Shape] = [
    (32, 96, 256, 32, 0.5),
    (17, 64, 512, 32, 0.3),
    (65, 160, 192, (16, 16), 0.4),
    (5, 100, 76, (8, 8), 0.3),
    (40, 200, 260, (64, 32), 0.6),
    (33, 150, 132, (24, 40), 0.5),
    (3, 250, 300, (128, 128), 1.0),
    (20, 90, 71, (16, 24), 0.5),
    (50, 640, 320, (32, 64), 0.03),
    (1, 64, 64, (32, 32), 0.0),
]
CONFIGS = [Config(32, 4, 2), Config(16, 8, 2), Config(16, 4, 4), Config(32, 4, 8)]


@cache
def on_cpu(constants: cuda.Constants) -> Any:
    """Build the kernel's source for this machine."""
    source = '#include "mma_on_cpu.h"\n'
    for size in (16, 4):
        source += f"""
          static void copy_{size}(float* to, const float* from, bool there) {{
            copy(smem_address(to), (const char*)from, {size}, there);
          }}
        """
    call = """
        multiply_fp32(at<const float*>(0), at<long long>(1), at<const BlockRow*>(2),
                      at<const int*>(3), at<const float*>(4), at<float*>(5),
                      at<int>(6), at<int>(7), at<int>(8), at<int>(9));
    """
    source += device_code("bsr_fp32.cu") + entry_point(call, "32 * WARPS")
    return library_of(source, (*constants, ("FP16", 0)))


def emulated(x: Tensor, w: Bsr, config: Config, late: int, patch: pytest.MonkeyPatch) -> Tensor:
    patch.setattr(cuda, "load", lambda *arguments: (None, "code"))
    patch.setattr(cuda, "target_of", lambda device: "cpu")
    program = bsr_fp32.launch(x, w, config)
    constants = bsr_fp32.constants_of(config, w.block, bsr_fp32.is_aligned(x), "cpu")
    kernel = on_cpu((*constants, ("LATE", late)))
    program.out.fill_(float("nan"))
    shared = ctypes.c_size_t(program.loaded.shared_bytes)
    kernel.call(program.args[0], program.loaded.grid, shared)
    return program.out


CASES = [
    (shape, CONFIGS[(i + turn) % 4], (i + turn) % 2)
    for turn in (0, 1)
    for i, shape in enumerate(SHAPES)
]


@needs_gxx
@pytest.mark.parametrize(("shape", "config", "late"), sampled(CASES, *range(10)), ids=str)
def test_its_threads_give_the_product_on_a_cpu(shape, config, late, monkeypatch) -> None:
    w, x, _ = example(shape)
    assert_right(emulated(x, w, config, late, monkeypatch), x, w, False, shape)


@needs_gxx
def test_nan_is_where_the_definition_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    w, _, _ = example((0, 90, 71, (16, 24), 0.5))
    wide = torch.full((37, 75), float("nan"))[:, :71]  # no NaN beyond k reaches an edge block
    wide.copy_(torch.randn(37, 71))
    wide[3], wide[7, 5], wide[36, 70] = float("nan"), float("inf"), float("nan")
    stored = replace(w, values=torch.ones_like(w.values)).to_dense()
    touched = (~wide.isfinite()).float() @ stored.T > 0
    y = emulated(wide, w, CONFIGS[0], 0, monkeypatch)
    assert torch.equal(~y.isfinite(), touched)
    right = wide.nan_to_num(0, 0, 0) @ w.to_dense().T
    torch.testing.assert_close(y[~touched], right[~touched])


@by_nvcc
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_without_a_spill(target, tmp_path) -> None:
    for block in ((32, 32), (16, 16), (8, 24), (128, 64)):
        for config in CONFIGS[:3]:
            for aligned in (True, False):
                constants = bsr_fp32.constants_of(config, block, aligned, target)
                assert_compiles_cleanly("bsr_fp32", constants, tmp_path, target=target)


@pytest.mark.parametrize("m", [1, 16, 17, 33, 1000])
@pytest.mark.parametrize("block", [8, 16, 32, (24, 40), 64, 128])
def test_every_shape_has_configurations_that_any_gpu_holds(block: Any, m: int) -> None:
    w, _, _ = example((1, 512, 512, block, 0.2))
    configs = bsr_fp32.configurations(w, m, 132, 99 * 1024)
    assert configs
    assert all(c.shared_bytes(w.block) <= 99 * 1024 for c in configs)
    assert len(bsr_fp32.configurations(w, m, 132, 227 * 1024)) >= len(configs)
    assert configs[0].tokens == (16 if m <= 16 else 32)


@pytest.mark.gpu
@needs_cupy
@ampere
@pytest.mark.parametrize("shape", [*SHAPES, (32, 4096, 4096, 32, 0.1), (300, 2048, 1000, 16, 0.2)])
def test_the_products_are_right_on_a_gpu_and_the_same_bits_every_time(shape: Shape) -> None:
    w, x = on_gpu(shape, "fp32", False)
    most = shared_bytes_of(x.device)
    for config in {*CONFIGS, *bsr_fp32.configurations(w, len(x), 132, most)}:
        if config.shared_bytes(w.block) > most:
            continue
        program = bsr_fp32.launch(x, w, config)
        for _ in range(2):  # redrawn in place
            x.copy_(torch.randn_like(x))
            results = []
            for _ in range(3):
                program.out.fill_(float("nan"))
                results.append(program().clone())
            torch.cuda.synchronize()
            assert_right(results[0], x, w, False, (shape, config))
            bits = [result.view(torch.int32) for result in results]
            assert all(torch.equal(a, b) for a, b in pairwise(bits))


@pytest.mark.gpu
@needs_cupy
@ampere
def test_one_plan_serves_fewer_tokens_and_rows_that_are_not_aligned() -> None:
    w, x = on_gpu((70, 320, 260, 32, 0.4), "fp32", False)
    product = Product(bsr_fp32.plan(w, len(x), CONFIGS[0], aligned=True))
    for m in (70, 33, 1):
        assert_right(product.run(x[:m], w.values), x[:m], w, False, m)
    shifted = torch.full((70, 263), float("nan"), device="cuda")[:, 1:261]
    shifted.copy_(x)
    assert not bsr_fp32.is_aligned(shifted)
    assert_right(bsr_fp32.launch(shifted, w, CONFIGS[0])(), shifted, w, False, "shifted")
