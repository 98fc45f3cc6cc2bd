"""bsr_strips: its tiles, its work lists and what it refuses; its threads have a file."""

from dataclasses import replace

import pytest
import torch

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import _launch, bsr_strips
from sparsebench.kernels.bsr._strip_tiles import Config, boxes_of, packed_order, strips_of, tiles_of
from tests.kernels.bsr.cases import STRIPS
from tests.kernels.bsr.examples import example
from tests.kernels.contract import refusal


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


@pytest.mark.parametrize("block", [24, 48, 80, 96])
def test_a_step_has_room_for_every_tile_of_a_full_strip(block):
    w = Bsr.from_dense(torch.ones(8 * block, 2 * block).half(), block=block)
    tiles = tiles_of(w, transposed=False)
    for config in bsr_strips.configurations(tiles, 4096, 132):
        lists = tiles.lists(config, 4096, 132)
        assert lists.steps[:, 0, 0].max() * 2 * tiles.height * tiles.depth <= lists.room * 1024


def test_aligned_strips_have_no_column_twice_and_half_tiles_have_zeros():
    w = Bsr.from_dense(torch.ones(48, 96).half(), block=24)
    tiles = tiles_of(w, transposed=False, across=2)
    assert (tiles.depth, tiles.columns) == (16, 6)
    assert (tiles.pieces >= 0).all()  # full rows: a tile is half of one block, half of the next
    alone = Bsr.from_dense(torch.eye(96).half()[:24], block=24)
    assert (tiles_of(alone, transposed=False, across=2).pieces < 0).sum() == 24  # columns 24 to 31
    assert boxes_of(16, 2) == [32]
    counts = [strips_of(16, tokens, 2) for tokens in bsr_strips.TOKENS]
    assert counts == [4, 4, 2]


def test_packed_values_are_zero_where_there_is_no_block():
    w, _, _ = example((1, 48, 72, (24, 24), 0.5))
    w = replace(w, values=w.values.half())
    tiles = tiles_of(w, transposed=False, across=2)
    order = packed_order(tiles, tiles.lists(Config(64, 1, 1, 2), 64, 1))
    packed = _launch.packed(w.values, order)
    assert (packed[order < 0] == 0).all()
    assert sorted(packed[order >= 0].flatten().tolist()) == sorted(w.values.flatten().tolist())


def test_rows_that_share_strips_are_multiplied_together():
    there = torch.tensor([[1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]])
    w = Bsr.from_dense(there.repeat_interleave(24, 0).repeat_interleave(24, 1).float(), block=24)
    lists = tiles_of(w, transposed=False).lists(Config(64, 1, 2), 64, 2)
    assert sorted(sorted(pair) for pair in lists.units.tolist()) == [[0, 2], [1, 3]]
    assert lists.strips.tolist() == [2, 2]


@pytest.mark.parametrize("m", [1, 64, 65, 300, 4096])
def test_the_byte_model_offers_only_configurations_that_fit(m):
    w, _, _ = example((m, 960, 960, (48, 48), 0.2))
    tiles = tiles_of(w, transposed=False)
    configs = bsr_strips.configurations(tiles, m, 132)
    assert configs
    assert all(config.tokens < m + 64 and tiles.possible(config) for config in configs)
    if m == 4096:
        assert configs[0].tokens * configs[0].rows * configs[0].warpgroups * 48 >= 128 * 128


def test_unsupported_operands_are_refused_before_anything_is_built():
    w, x, dy = example((4, 120, 96, (24, 24), 1.0))
    half = replace(w, values=w.values.half())

    def refused(x: torch.Tensor, w: Bsr, transposed: bool = False) -> str:
        return refusal(lambda: bsr_strips.launch(x, w, STRIPS[0], transposed=transposed))

    assert "found torch.float32 and torch.float32" in refused(x, w)
    assert "expected activations of 96 columns, found shape [4, 120]" in refused(dy.half(), half)
    assert "of 120 columns, found shape [4, 96]" in refused(x.half(), half, True)
    for block in (8, 9, 6):
        odd = Bsr.from_dense(w.to_dense().half(), block=block)
        assert f"even sides from 10 on, found {block}x{block}" in refused(x.half(), odd)
    narrow = Bsr.from_dense(w.to_dense()[:, :90].half().contiguous(), block=24)
    assert "multiple of 8 columns to read, found 90" in refused(x[:, :90].half(), narrow)
    odd = Bsr.from_dense(w.to_dense()[:60].half().contiguous(), block=24)
    assert "multiple of 8 columns to write, found 60" in refused(x.half(), odd)
    large = Bsr.from_dense(torch.ones(160, 160).half(), block=80)
    with pytest.raises(Unsupported, match="tiles of 80x80, found Config"):
        bsr_strips.plan(large, 300, Config(256, 2, 2))
    with pytest.raises(FormatError, match="expected ascending columns"):
        tiles_of(replace(half, columns=half.columns.flip(0).contiguous()), transposed=False)
