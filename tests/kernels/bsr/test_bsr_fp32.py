"""bsr_fp32: its threads on a CPU, its machine code, and what fits."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels.bsr import bsr_fp32
from sparsebench.kernels.bsr.bsr_fp32 import Config
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc
from tests.emulation.cuda_on_cpu import device_code, entry_point, library_of, run_here
from tests.kernels.bsr.cases import SHAPES
from tests.kernels.bsr.examples import assert_right, call_of, example
from tests.tools.marks import needs_gxx, sampled

TARGETS = "sm_80", "sm_89", "sm_90", "sm_100", "sm_120"
CONFIGS = [Config(32, 4, 2), Config(16, 8, 2), Config(16, 4, 4), Config(32, 4, 8)]


def on_cpu(constants: cuda.Constants, late: bool) -> Any:
    """Build the kernel's source for this machine."""
    source = '#include "mma_on_cpu.h"\n'
    for size in (16, 8, 4):
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
    return library_of(source, (*constants, ("FP16", 0)), late)


def emulated(x: Tensor, w: Bsr, config: Config, late: bool, patch: pytest.MonkeyPatch) -> Tensor:
    run_here(patch, lambda function, macros: on_cpu(macros, late).call)
    patch.setattr(cuda, "target_of", lambda device: "cpu")
    y = torch.full((len(x), w.shape[0]), float("nan"))
    return bsr_fp32.plan(w, call_of("linear", w, len(x), "fp32"), config).run(x, w.values, out=y)


MOST_SHARED_BYTES = 227 * 1024  # of a block on Hopper


def configs_for(block: int | tuple[int, int]) -> list[bsr_fp32.Config]:
    sides = (block, block) if isinstance(block, int) else block
    return [config for config in CONFIGS if config.shared_bytes(sides) <= MOST_SHARED_BYTES]


CASES = [
    (shape, configs[(i + turn) % len(configs)], (i + turn) % 2 == 1)
    for turn in (0, 1)
    for i, shape in enumerate(SHAPES["bsr_fp32"])
    for configs in [configs_for(shape[3])]
]


@needs_gxx
@pytest.mark.parametrize(("shape", "config", "late"), sampled(CASES, *range(17)), ids=str)
def test_its_threads_give_the_product_on_a_cpu(shape, config, late, monkeypatch) -> None:
    w, x, _ = example(shape)
    assert_right(emulated(x, w, config, late, monkeypatch), x, w, False, shape)


@needs_gxx
@pytest.mark.parametrize("block", [(16, 24), (10, 10)], ids=str)
def test_nan_is_where_the_definition_has_it(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w, _, _ = example((0, 90, 71, block, 0.5))
    wide = torch.full((37, 75), float("nan"))[:, :71]  # no NaN beyond k reaches an edge block
    wide.copy_(torch.randn(37, 71))
    wide[3], wide[7, 5], wide[36, 70] = float("nan"), float("inf"), float("nan")
    stored = replace(w, values=torch.ones_like(w.values)).to_dense()
    touched = (~wide.isfinite()).float() @ stored.T > 0
    y = emulated(wide, w, CONFIGS[0], False, monkeypatch)
    assert torch.equal(~y.isfinite(), touched)
    right = wide.nan_to_num(0, 0, 0) @ w.to_dense().T
    torch.testing.assert_close(y[~touched], right[~touched])


@by_nvcc
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles_without_a_spill(target, tmp_path) -> None:
    for block in ((32, 32), (16, 16), (8, 24), (128, 64), (10, 10), (36, 20), (3, 5)):
        for config in CONFIGS[:3]:
            for k in (1000, 1001):
                constants = bsr_fp32.constants_of(config, block, k, target)
                assert_compiles_cleanly("bsr_fp32", constants, tmp_path, target=target)


@pytest.mark.parametrize("m", [1, 16, 17, 33, 1000])
@pytest.mark.parametrize("block", [3, 8, 10, 16, 32, (24, 40), 64, 128])
def test_every_shape_has_configurations_that_any_gpu_holds(block: Any, m: int, monkeypatch) -> None:
    w, _, _ = example((1, 512, 512, block, 0.2))
    call, counts = call_of("linear", w, m, "fp32"), []
    for held in (99 * 1024, MOST_SHARED_BYTES):
        monkeypatch.setattr(bsr_fp32, "shared_bytes_of", lambda device, held=held: held)
        configs = bsr_fp32.choices(w, call)
        counts.append(len(configs))
        assert all(c.shared_bytes(w.block) <= held for c in configs)
        assert configs[0].tokens == (16 if m <= 16 else 32)
    assert 0 < counts[0] <= counts[1]
