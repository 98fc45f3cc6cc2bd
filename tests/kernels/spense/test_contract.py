"""The contract of spense_mma and spense_wgmma: what they refuse, and on a GPU their products."""

from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from sparsebench.formats.spense import Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.spense import spense_mma, spense_wgmma
from sparsebench.results.record import Problem
from tests.kernels.contract import assert_device_refusal, refusal
from tests.kernels.spense.examples import (
    LARGE,
    ODD,
    SHAPES,
    WGMMA_CONFIGS,
    assert_right,
    example,
    on_gpu,
)
from tests.tools.marks import needs_cupy

KERNELS = [spense_mma, spense_wgmma]
each_kernel = pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.__name__[-5:])
MMA_CONFIGS = spense_mma.space(228)
DTYPES = {spense_mma: ("bf16", "fp16"), spense_wgmma: ("bf16", "fp16", "fp8")}


def refused(kernel: ModuleType, x: Tensor, w: Spense) -> str:
    operands = Operands(Problem("linear", {}), {"w": w}, {"x": x}, torch.matmul)
    return refusal(lambda: kernel.prepare(operands))


def odd(n: int, k: int, dtype: torch.dtype = torch.float16) -> tuple[Tensor, Spense]:
    return example((4, n, k, 0.0, "rows"), dtype)


@each_kernel
def test_operands_that_it_cannot_read_are_unsupported(kernel: ModuleType) -> None:
    x, w = odd(64, 128)
    assert "found torch.bfloat16 and torch.float16" in refused(kernel, x.bfloat16(), w)
    assert "found shape [4, 64]" in refused(kernel, x[:, :64], w)
    assert "found strides [1, 4]" in refused(kernel, x.T.contiguous().T, w)
    assert "found 132 and 64" in refused(kernel, *odd(64, 132))
    assert "found 128 and 63" in refused(kernel, *odd(63, 128))
    assert "found 0, 64 and 128" in refused(kernel, x[:0], w)
    shifted = torch.cat((w.sparse.flatten()[:8], w.sparse.flatten()))[8:].view_as(w.sparse)
    assert "bytes more" in refused(kernel, x, replace(w, sparse=shifted))


def test_fp8_is_for_wgmma_in_columns_of_16() -> None:
    assert "torch.float8_e4m3fn" in refused(spense_mma, *odd(64, 128, torch.float8_e4m3fn))
    assert "found 136 and 64" in refused(spense_wgmma, *odd(64, 136, torch.float8_e4m3fn))


AMPERE, HOPPER = "compute capability 8.0 or newer", "compute capability 9.0"


@pytest.mark.parametrize(
    ("kernel", "device", "capability", "dtype", "reasons"),
    [
        (spense_mma, "cpu", (9, 0), "bf16", (AMPERE, "found cpu")),
        (spense_mma, "cuda", (7, 5), "bf16", (AMPERE, "found 7.5")),
        (spense_mma, "cuda", (9, 0), "fp8", ("fp8",)),
        (spense_mma, "cuda", (8, 0), "fp32", ("fp32",)),
        (spense_mma, "cuda", (8, 0), "fp16", ()),
        (spense_mma, "cuda", (12, 0), "bf16", ()),
        *((spense_wgmma, "cpu", (9, 0), dtype, (HOPPER, "found cpu")) for dtype in ("bf16", "fp8")),
        (spense_wgmma, "cuda", (8, 0), "bf16", (HOPPER, "found 8.0")),
        (spense_wgmma, "cuda", (9, 0), "fp32", ("fp32",)),
        (spense_wgmma, "cuda", (9, 0), "fp8", ()),
    ],
)
def test_other_devices_and_dtypes_are_unsupported(
    kernel, device, capability, dtype, reasons, monkeypatch
) -> None:
    problem = {"dtype": dtype}
    assert_device_refusal(kernel.KERNEL, device, capability, problem, reasons, monkeypatch)


@needs_cupy
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"])
def test_nvrtc_compiles_spense_mma_for_every_target(target: str) -> None:
    constants = spense_mma.constants_of(MMA_CONFIGS[4], torch.float16, dense=True)
    assert cuda.compiled("spense_mma", constants, target).startswith(b"\x7fELF")


# ---- on a GPU ----

GPU_CASES = [
    (kernel, config, dtype)
    for kernel, configs in ((spense_mma, MMA_CONFIGS), (spense_wgmma, WGMMA_CONFIGS))
    for config in configs
    for dtype in DTYPES[kernel]
]


def skip_unless_it_runs(kernel: ModuleType, dtype: str) -> None:
    problem = Problem("linear", {"dtype": dtype})
    if reason := kernel.KERNEL.unsupported(problem, torch.device("cuda")):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize(("kernel", "config", "dtype"), GPU_CASES, ids=str)
def test_products_are_right_and_the_same_at_each_launch(kernel, config, dtype) -> None:
    skip_unless_it_runs(kernel, dtype)
    if kernel is spense_mma and config.kib >= spense_mma.kib_of(torch.device("cuda")):
        pytest.skip(f"expected {config.kib} KiB of shared memory for a CTA, found fewer")
    for shape in [*LARGE, *SHAPES, *(ODD if kernel is spense_mma else [])]:
        x, w = on_gpu(shape, dtype)
        for options in [{}, {"watchdog": True}] if kernel is spense_wgmma else [{}]:
            program = kernel.launch(x, w, config, **options)
            outputs = []
            for _ in range(3):
                program.out.fill_(float("nan"))
                outputs.append(program().clone())
            torch.cuda.synchronize()
            assert_right(program.out, x, w, shape)
            assert all(torch.equal(y, outputs[0]) for y in outputs), shape
