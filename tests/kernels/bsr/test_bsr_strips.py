"""bsr_strips: its tiles and its work lists, emulated in NumPy."""

from dataclasses import replace
from itertools import pairwise, product

import numpy as np
import pytest
import torch

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import _launch, bsr_strips
from sparsebench.kernels.bsr._small_steps import END, LAST, NO_STRIP, worked
from sparsebench.kernels.bsr._strip_tiles import (
    Config,
    boxes_of,
    packed_order,
    strips_of,
    tiles_of,
)
from sparsebench.kernels.bsr.bsr_strips import costs_of
from tests.kernels.bsr.cases import SHAPES, STRIPS
from tests.kernels.bsr.examples import example
from tests.kernels.contract import refusal
from tests.tools.marks import crossed


def emulated(w: Bsr, x: torch.Tensor, config: Config, transposed: bool) -> np.ndarray:
    """Emulate the device with the lists; assert that no element is written twice."""
    tiles = tiles_of(w, transposed, config.across)
    height, depth, lists = tiles.height, tiles.depth, tiles.lists(config, len(x), 5)
    steps, bounds = worked(lists, costs_of(lists, tiles, config), len(x), config.tokens, workers=5)
    values = w.values.half()
    values = values.transpose(1, 2).contiguous() if transposed else values
    packed = _launch.packed(values, packed_order(tiles, lists), tiles.piece).float()
    packed = packed.reshape(-1, 8)
    size = len(tiles.row), depth // 8, height, 8
    blocks = packed[: len(tiles.row) * height * depth // 8].view(size).transpose(1, 2)
    blocks = blocks.reshape(-1, height, depth).numpy() if size[0] else ()
    padded = np.pad(x.half().float().numpy(), ((0, config.tokens), (0, 64)))  # zero outside of X
    y = np.full((len(x), w.shape[1] if transposed else w.shape[0]), np.nan, np.float32)
    for (start, end), group in product(pairwise(bounds.tolist()), range(config.warpgroups)):
        sums = np.zeros((config.rows, config.tokens, height), np.float32)
        for step in steps[start:end]:
            count, token, item, first = step[0].tolist()
            strips = step[1].view(np.uint16).tolist()
            counts, what = step[2 + group, :2].tolist()
            places = int(step[2 + group, 2:].view(np.uint64)[0])
            at = first + (what & 0xFF)
            assert count * height * depth * 2 <= lists.room * 1024
            for row in range(config.rows):
                for _ in range(counts >> 4 * row & 15):
                    place = places & 7
                    slot, late = divmod(place, 2) if depth % 16 else (place, 0)
                    slot, beside = divmod(slot, config.across)
                    assert slot < strips_of(depth, config.tokens, config.across)
                    assert strips[slot] != NO_STRIP
                    column = (
                        strips[slot] * depth * config.across // 16 * 16 + 8 * late + 16 * beside
                    )
                    assert late * 8 + depth <= sum(boxes_of(depth, config.across))
                    tile = padded[token : token + config.tokens, column : column + depth]
                    sums[row] += tile @ blocks[at].T
                    places, at = places >> 3, at + 1
            assert at <= first + count
            if what & LAST:
                own = lists.units[item].reshape(config.warpgroups, -1)[group]
                for row, unit in enumerate(own.tolist()):
                    column = unit * height
                    part = y[
                        token : token + config.tokens, max(0, column) : max(0, column + height)
                    ]
                    assert np.isnan(part).all()
                    part[:] = sums[row, : part.shape[0], : part.shape[1]]
                sums[:] = 0
        assert what & END
    return y


@pytest.mark.parametrize(
    ("shape", "transposed", "config"),
    crossed(SHAPES["bsr_strips"], [False, True], STRIPS),
    ids=str,
)
def test_the_lists_give_the_product_and_write_every_element_once(shape, transposed, config):
    w, x, dy = example(shape)
    if not tiles_of(w, transposed, config.across).possible(config):
        return  # refused, below
    w, (x, dy) = replace(w, values=w.values.half().float()), (a.half().float() for a in (x, dy))
    dense = w.to_dense()
    found = emulated(w, dy if transposed else x, config, transposed)
    expected = dy @ dense if transposed else x @ dense.T
    np.testing.assert_allclose(found, expected.numpy(), rtol=0, atol=2e-4)


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
    found = [strips_of(16, tokens, 2) for tokens in bsr_strips.TOKENS]
    assert found == [4, 4, 2]


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
    found = bsr_strips.configurations(tiles, m, 132)
    assert found
    assert all(config.tokens < m + 64 and tiles.possible(config) for config in found)
    if m == 4096:
        assert found[0].tokens * found[0].rows * found[0].warpgroups * 48 >= 128 * 128


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
