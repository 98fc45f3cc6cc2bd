"""The contract of the CUDA kernels for weight gradients: bsr_wgrad, _mma and _small.

test_NAME.py has the tests that only one of them needs: its work lists and what it refuses.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_wgrad, bsr_wgrad_mma, bsr_wgrad_small
from sparsebench.kernels.bsr._wgrad_schedule import TILES
from sparsebench.kernels.bsr._wgrad_small_schedule import room_of
from sparsebench.kernels.bsr.bsr_wgrad_small import DEEP, FEWEST, MOST, UNITS
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, hopper
from tests.kernels.bsr.cases import SHAPES, WGRAD, WGRAD_MMA, WGRAD_SMALL, name_of
from tests.kernels.bsr.examples import Shape, activations, assert_right_gradient, moved, pattern_of
from tests.tools.marks import sampled

KERNELS = bsr_wgrad, bsr_wgrad_mma, bsr_wgrad_small
CONFIGS = [
    *((bsr_wgrad, c) for c in WGRAD),
    *((bsr_wgrad_mma, c) for c in WGRAD_MMA),
    *((bsr_wgrad_small, c) for c in WGRAD_SMALL),
]
BLOCK = {bsr_wgrad: 64, bsr_wgrad_mma: 16, bsr_wgrad_small: 32}
# More items than workers, and items that are cut in either way.
LARGE: dict[Any, list[Shape]] = {
    bsr_wgrad: [
        (4096, 1024, 1024, (64, 64), 0.3),
        (1030, 4096, 4096, (128, 128), 0.5),
        (2000, 4096, 4096, (64, 64), 0.2),
        (4096, 2048, 4096, (64, 64), 0.05),
        (3000, 2080, 1920, (80, 96), 0.1),
    ],
    bsr_wgrad_mma: [(2000, 1024, 1024, (16, 16), 0.2), (4096, 512, 2048, (16, 16), 0.15)],
    bsr_wgrad_small: [
        (4096, 1024, 1024, (32, 32), 0.3),
        (1030, 4096, 4096, (16, 16), 0.3),
        (2000, 2048, 4096, (48, 48), 0.1),
        (4096, 2048, 2048, (32, 32), 0.05),
    ],
}


def small_configs() -> list[Any]:
    """Return a configuration for each machine code that bsr_wgrad_small may ask for."""
    ways = {
        (depth, units, room_of(strips)): bsr_wgrad_small.Config(depth, units, room_of(strips))
        for units in UNITS
        for strips in range(FEWEST, MOST + 1)
        for depth in (64, 32)
        if depth == 32 or strips <= DEEP
    }
    return [*ways.values()]


def variants(module: Any, config: Any) -> Iterator[cuda.Constants]:
    """Yield the macros of the code that a configuration runs."""
    if module is bsr_wgrad_small:
        for dtype in (torch.float16, torch.bfloat16):
            yield module.constants_of(config, dtype)
    elif module is bsr_wgrad_mma:
        ways = (16, 24, True, torch.float16), (12, 36, False, torch.bfloat16)
        for slots, room, held, dtype in ways:
            yield module.constants_of(config, slots, room, held, dtype)
    else:
        for tiles in TILES[::-1]:
            for sides, dtype in (((64, 64), torch.float16), ((48, 40), torch.bfloat16)):
                yield module.constants_of(config, tiles, sides, dtype)


COMPILED = [
    *sampled([(bsr_wgrad, config) for config in WGRAD]),
    *sampled([(bsr_wgrad_mma, config) for config in WGRAD_MMA]),
    *sampled([(bsr_wgrad_small, config) for config in small_configs()]),
]


@by_nvcc
@pytest.mark.parametrize(("module", "config"), COMPILED, ids=str)
def test_every_variant_compiles_without_a_spill_or_a_serialised_product(module, config, tmp_path):
    for constants in variants(module, config):
        assert_compiles_cleanly(name_of(module), constants, tmp_path)


def on_gpu(shape: Shape, dtype: str) -> tuple[Bsr, Tensor, Tensor]:
    dy, x = (a.cuda().to(DTYPES[dtype]) for a in activations(shape))
    return moved(pattern_of(shape), dtype), dy, x


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("module", "config"), CONFIGS, ids=str)
def test_the_sums_are_right_on_a_gpu_and_the_same_bits_every_time(module, config, dtype) -> None:
    for shape in [*LARGE[module], *SHAPES[name_of(module)]]:
        pattern, dy, x = on_gpu(shape, dtype)
        for watchdog in (True, False):
            program = module.launch(dy, x, pattern, config, watchdog=watchdog)
            results = []
            for _ in range(3):
                program.out.fill_(float("nan"))
                results.append(program().clone())
            torch.cuda.synchronize()
            assert_right_gradient(results[0], dy, x, pattern, (shape, watchdog))
            bits = [result.view(torch.int16) for result in results]
            assert all(torch.equal(a, b) for a, b in pairwise(bits))


@hopper
@pytest.mark.parametrize(
    ("module", "config", "block"),
    [
        (bsr_wgrad, bsr_wgrad.Config(64, 4), 64),
        (bsr_wgrad_mma, WGRAD_MMA[0], 16),
        (bsr_wgrad_small, bsr_wgrad_small.Config(32, 8, 20), 16),
    ],
)
def test_a_nan_stays_in_its_row_and_column(module: Any, config: Any, block: int) -> None:
    pattern, dy, x = on_gpu((3000, 512, 512, block, 0.5), "bf16")
    dy[:, 70], x[:, 130] = float("nan"), float("nan")
    values = module.launch(dy, x, pattern, config)()
    dense = replace(pattern, values=values).to_dense().isnan()
    there = replace(pattern, values=torch.ones_like(values)).to_dense() == 1
    there[torch.arange(512) != 70] &= torch.arange(512, device="cuda") == 130
    assert torch.equal(dense, there)


@hopper
@pytest.mark.parametrize(
    ("module", "config"),
    [(bsr_wgrad, WGRAD[1]), (bsr_wgrad_mma, WGRAD_MMA[0]), (bsr_wgrad_small, WGRAD_SMALL[0])],
)
def test_one_plan_serves_other_operands(module: Any, config: Any) -> None:
    pattern, dy, x = on_gpu((1000, 1024, 1024, BLOCK[module], 0.1), "bf16")
    plan = module.plan(pattern, len(dy), config)
    for factor in (1, 2):
        values = bsr_wgrad.bind(plan, dy * factor, x)()
        assert_right_gradient(values, dy * factor, x, pattern, factor)
    values = bsr_wgrad.bind(plan, dy[:10], x[:10])()  # fewer tokens, too
    assert_right_gradient(values, dy[:10], x[:10], pattern)
    with pytest.raises(Unsupported, match="planned for"):
        bsr_wgrad.bind(plan, torch.cat([dy, dy]), torch.cat([x, x]))
