"""bsr_wgmma: its groups, its schedule and its work lists, emulated in NumPy."""

from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.errors import FormatError
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels.bsr import bsr_wgmma
from sparsebench.kernels.bsr._wgmma_pairs import NO_SLICE, groups_of, span_of
from sparsebench.kernels.bsr._wgmma_schedule import schedule
from sparsebench.kernels.bsr.bsr_wgmma import Config
from tests.compiling.nvcc import hopper
from tests.kernels.bsr.cases import SHAPES, WGMMA
from tests.kernels.bsr.examples import assert_right, call_of, example, on_gpu
from tests.tools.marks import crossed, needs_cupy

HALF, E4M3 = torch.float16, torch.float8_e4m3fn


def bsr_of(there: Any, block: tuple[int, int] = (64, 64)) -> Bsr:
    """Return random blocks where the pattern says."""
    there, (r, c) = np.asarray(there, bool), block
    offsets = np.concatenate([[0], there.sum(1).cumsum()]).astype(np.int32)
    columns = np.nonzero(there)[1].astype(np.int32)
    values = torch.randn(len(columns), r, c, generator=torch.Generator().manual_seed(0))
    shape = there.shape[0] * r, there.shape[1] * c
    return Bsr(shape, torch.from_numpy(offsets), torch.from_numpy(columns), values)


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
            row, column = step[1 + half], int(step[3]) >> 16 * half & 0xFFFF
            if row >= 0:
                tile = blocks[row : row + 64, column : column + span]
                x_tile = padded[token : token + both, step[0] : step[0] + span]
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


def test_a_step_of_fp8_is_a_row_of_128_bytes_where_blocks_allow_it():
    for width, in_fp8 in ((64, 64), (128, 128), (192, 64), (256, 128)):
        w = bsr_of([[1]], (64, width))
        assert span_of(replace(w, values=w.values.to(E4M3))) == in_fp8
        assert span_of(replace(w, values=w.values.half())) == 64


def test_slices_that_share_the_most_columns_are_paired():
    groups = groups_of(
        bsr_of([[1, 1, 0, 0], [0, 0, 1, 1], [1, 1, 0, 0], [0, 1, 1, 1], [0, 0, 0, 1]])
    )
    assert groups.slices.tolist() == [[0, 2], [1, 3], [4, NO_SLICE]]


@pytest.mark.parametrize("density", [0.5, 0.1, 0.02])
def test_workers_are_balanced_and_go_through_the_tokens_in_order(density):
    there = np.random.default_rng(0).random((96, 96)) < density
    plan = schedule(groups_of(bsr_of(there)), 4000, 256, workers=132)
    items = plan.items[: plan.starts[-1]].astype(int)
    assert len(np.unique(items[:, 2:], axis=0)) == len(items) == 48 * 16
    cost = items[:, 1] + 3
    loads = np.add.reduceat(cost, plan.starts[:-1])
    assert loads.max() <= 1.1 * max(cost.max(), cost.sum() / 132)
    for begin, end in pairwise(plan.starts):
        assert begin < end
        assert (np.diff(items[begin:end, 2]) >= 0).all()


def broken(**change: Any) -> Bsr:
    return replace(bsr_of([[1, 1], [0, 1]]), **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": torch.tensor([0, 3])}, "expected 3 offsets from 0 to 3, found 2 from 0 to 3"),
        ({"offsets": torch.tensor([0, 2, 2])}, "expected 3 offsets from 0 to 3, found 3 from 0 to"),
        ({"offsets": torch.tensor([0, 4, 3])}, "expected ascending offsets, found 4 to 3 in row 1"),
        ({"columns": torch.tensor([0, 1])}, "expected 3 block columns, found 2"),
        ({"columns": torch.tensor([0, 2, 1])}, "expected block columns 0 to 1, found 0 to 2"),
        ({"columns": torch.tensor([-1, 0, 1])}, "expected block columns 0 to 1, found -1 to 1"),
        ({"columns": torch.tensor([1, 0, 1])}, "ascending columns, found .1, 0. in block row 0"),
        ({"columns": torch.tensor([1, 1, 1])}, "ascending columns, found .1, 1. in block row 0"),
    ],
)
def test_an_invalid_index_is_refused(change, message):
    with pytest.raises(FormatError, match=message):
        groups_of(broken(**change))


@pytest.mark.parametrize("m", [1, 64, 65, 128, 129, 256, 257, 4096])
def test_a_problem_has_at_most_four_configurations_that_suit_its_tokens(m):
    w = bsr_of(np.ones((64, 1)))
    configs = bsr_wgmma.choices(w, call_of("linear", w, m, "bf16")._replace(m=m))
    assert 1 <= len(configs) <= 4
    assert all(config in WGMMA for config in configs)
    assert all(
        config.tokens * config.cluster < 2 * m or config == Config(64, 1) for config in configs
    )


@pytest.mark.parametrize(("m", "width", "tokens"), [(256, 14336, 128), (1024, 8192, 256)])
def test_the_smaller_tile_comes_first_if_there_are_few_items(m, width, tokens):
    w = bsr_of(np.ones((width // 64, 1)))
    assert bsr_wgmma.choices(w, call_of("linear", w, m, "bf16"))[0].tokens == tokens


@needs_cupy
@hopper
@pytest.mark.parametrize("config", WGMMA, ids=str)
def test_fp8_is_right_with_and_without_scales_on_a_gpu(config: Config):
    for shape in (*SHAPES["bsr_wgmma fp8"], (1000, 1536, 1280, (128, 128), 0.3)):
        w, x = on_gpu(shape, "fp8", transposed=False)
        product = bsr_wgmma.plan(w, call_of("linear", w, len(x), "fp8"), config)
        packed = product.packed(w.values)
        y = product.run(x, packed)
        assert y.dtype == torch.bfloat16
        assert_right(y, x, w, False, shape)
        features, tokens = (torch.rand(s, device="cuda") + 0.5 for s in (w.shape[0], len(x)))
        scaled = product.run(x, packed, features, tokens, out=torch.full_like(y, torch.nan))
        assert_right(scaled, x, w, False, shape, features, tokens)


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
