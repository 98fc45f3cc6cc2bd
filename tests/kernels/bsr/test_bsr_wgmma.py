"""bsr_wgmma: its work lists, emulated in NumPy, and products in fp8 on a GPU."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels.bsr import bsr_wgmma
from sparsebench.kernels.bsr._wgmma_lists import groups_of, schedule, span_of
from sparsebench.kernels.bsr.bsr_wgmma import Config
from tests.compiling.nvcc import hopper
from tests.kernels.bsr.cases import SHAPES, WGMMA
from tests.kernels.bsr.examples import assert_right, call_of, example, on_gpu
from tests.tools.marks import crossed, needs_cupy

HALF, E4M3 = torch.float16, torch.float8_e4m3fn


def emulated(
    w: Bsr, x: torch.Tensor, config: Config, transposed: bool, dtype: torch.dtype = torch.float16
) -> np.ndarray:
    """Emulate the device with the lists; assert that no element is written twice."""
    typed = replace(w, values=w.values.to(dtype))
    groups, span = groups_of(typed, transposed), span_of(typed)
    both = config.tokens * config.cluster
    plan = schedule(groups, len(x), both, workers=5)
    blocks = w.values.reshape(-1, w.block[1]).numpy()
    padded = np.pad(x.numpy(), ((0, both), (0, span)))  # what a tile has outside of X is zero
    y = np.full((len(x), w.shape[1] if transposed else w.shape[0]), np.nan, np.float32)
    for (first, count, token, slices), half in product(plan.items[: plan.starts[-1]], (0, 1)):
        total = np.zeros((64, both), np.float32)
        for step in groups.steps[first : first + count]:
            row, column = step[f"w{half}"], int(step["columns"]) >> 16 * half & 0xFFFF
            if row >= 0:
                tile = blocks[row : row + 64, column : column + span]
                x_tile = padded[token : token + both, step["x"] : step["x"] + span]
                total += (tile.T if transposed else tile) @ x_tile.T
        at = (int(slices) >> 16 * half & 0xFFFF) * 64
        out = y[token : token + both, at : at + 64]
        assert np.isnan(out).all()
        out[:] = total.T[: out.shape[0], : out.shape[1]]
    return y


@pytest.mark.parametrize(
    ("shape", "transposed", "config"),
    crossed(SHAPES["bsr_wgmma"], [False, True], [Config(256, 1), Config(64, 2)]),
    ids=str,
)
def test_the_lists_give_the_product_and_write_every_element_once(shape, transposed, config):
    w, x, dy = example(shape)
    dense = w.to_dense().numpy()
    expected = dy.numpy() @ dense if transposed else x.numpy() @ dense.T
    actual = emulated(w, dy if transposed else x, config, transposed)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("shape", SHAPES["bsr_wgmma fp8"], ids=str)
def test_the_lists_of_fp8_give_the_product(shape):
    w, x, _ = example(shape)
    actual = emulated(w, x, Config(64, 2), transposed=False, dtype=E4M3)
    np.testing.assert_allclose(actual, x.numpy() @ w.to_dense().numpy().T, rtol=1e-4, atol=1e-3)


@needs_cupy
@hopper
@pytest.mark.parametrize("config", WGMMA, ids=str)
def test_fp8_is_right_on_a_gpu(config: Config):
    for shape in (*SHAPES["bsr_wgmma fp8"], (1000, 1536, 1280, (128, 128), 0.3)):
        w, x = on_gpu(shape, "fp8", transposed=False)
        product = bsr_wgmma.plan(w, call_of("linear", w, len(x), "fp8"), config)
        y = product.run(x, product.packed(w.values))
        assert y.dtype == torch.bfloat16
        assert_right(y, x, w, False, shape)


@needs_cupy
@hopper
@pytest.mark.parametrize("block", [64, 128])
def test_a_nan_of_fp8_stays_out_of_the_rows_that_do_not_touch_its_column(block: int):
    dense = torch.ones(2 * block, 4 * block, device="cuda").to(E4M3)
    dense.view(torch.uint8)[:block, block : 2 * block] = 0
    x = torch.ones(300, 4 * block, device="cuda").to(E4M3)
    x.view(torch.uint8)[:, 2 * block - 1] = 0x7F
    w = Bsr.from_dense(dense, block=block)
    product = bsr_wgmma.plan(w, call_of("linear", w, len(x), "fp8"), Config(128, 1))
    y = product.run(x, product.packed(w.values))
    assert y[:, :block].isfinite().all()
    assert y[:, block:].isnan().all()


@needs_cupy
def test_an_error_of_nvrtc_names_the_macros():
    constants = bsr_wgmma.constants_of(WGMMA[0], torch.float16, transposed=False)
    with pytest.raises(RuntimeError, match=r"NVRTC, bsr_wgmma.cu -DTOKENS=256: .*CLUSTER"):
        cuda.compiled("bsr_wgmma", constants[:1])
