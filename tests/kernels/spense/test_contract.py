"""The contract of spense_mma and spense_wgmma: what they refuse, and on a GPU their products."""

from types import ModuleType

import pytest
import torch

from sparsebench.kernels._common import cuda
from sparsebench.kernels.spense import spense_mma, spense_wgmma
from sparsebench.results.record import Problem
from tests.kernels.spense.examples import LARGE, ODD, SHAPES, WGMMA_CONFIGS, assert_right, on_gpu
from tests.tools.marks import needs_cupy

MMA_CONFIGS = spense_mma.space(228)
DTYPES = {spense_mma: ("bf16", "fp16"), spense_wgmma: ("bf16", "fp16", "fp8")}


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
