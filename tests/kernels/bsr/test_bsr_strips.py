"""bsr_strips: its tiles, its work lists and what it refuses; its threads have a file."""

import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import bsr_strips
from sparsebench.kernels.bsr._strip_tiles import tiles_of
from tests.kernels.bsr.examples import example


@pytest.mark.parametrize(
    ("block", "tile", "turned"),
    [
        ((24, 24), (24, 24), (24, 24)),
        ((80, 96), (80, 48), (96, 80)),
        ((128, 72), (64, 24), (72, 64)),
        ((16, 120), (16, 40), (40, 16)),
        ((48, 112), (48, 56), (56, 48)),
    ],
)
def test_a_tile_is_the_largest_equal_part_of_a_block_that_the_kernel_takes(block, tile, turned):
    w = Bsr.from_dense(torch.ones(256, 256), block=[*block])
    for transposed, sides in ((False, tile), (True, turned)):
        tiles = tiles_of(w, transposed)
        assert (tiles.height, tiles.depth) == sides
        assert len(tiles.row) == -(-256 // sides[0]) * -(-256 // sides[1])


@pytest.mark.parametrize("m", [1, 64, 65, 300, 4096])
def test_the_byte_model_offers_only_configurations_that_fit(m):
    w, _, _ = example((m, 960, 960, (48, 48), 0.2))
    tiles = tiles_of(w, transposed=False)
    configs = bsr_strips.configurations(tiles, m, 132)
    assert configs
    assert all(config.tokens < m + 64 and tiles.possible(config) for config in configs)
    if m == 4096:
        assert configs[0].tokens * configs[0].rows * configs[0].warpgroups * 48 >= 128 * 128
