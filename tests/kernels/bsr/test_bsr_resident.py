"""bsr_resident: its packing and the operands that it refuses."""

from dataclasses import replace

import pytest
import torch

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.bsr import bsr_resident
from sparsebench.kernels.bsr.bsr_resident import pack, pitch_of, turned, words_of
from tests.kernels.bsr.cases import RESIDENT, SHAPES
from tests.kernels.bsr.examples import example
from tests.kernels.contract import refusal

BLOCKS = [(10, 10), (8, 8), (24, 24), (20, 50), (2, 6), (64, 16)]


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_packed_block_has_the_words_of_a_lane_in_the_order_of_the_products(block):
    r, c = block
    values = torch.randn(3, r, c)
    packed = pack(values)
    assert packed.shape == (3, 32, words_of(block), 2)
    assert pack(values[:0]).shape == (1, 32, words_of(block), 2)  # no block: a place for a load
    high, deep = -(-r // 8), (c + 7) // 16
    padded = torch.nn.functional.pad(values, (0, -c % 16, 0, -r % 8))
    for lane in range(32):
        row, column = lane // 4, lane % 4 * 2
        words = [
            padded[1, 8 * part + row, at + column : at + column + 2]
            for step in range(deep)
            for part in range(high)
            for at in (16 * step, 16 * step + 8)
        ]
        if c > 16 * deep:
            words += [
                padded[1, 8 * part + row, 16 * deep + column : 16 * deep + column + 2]
                for part in range(high)
            ]
        assert torch.equal(packed[1, lane], torch.stack(words))


@pytest.mark.parametrize("shape", SHAPES["bsr_resident"], ids=str)
def test_a_turned_matrix_is_the_transpose(shape):
    w, *_ = example(shape)
    there = turned(w)
    assert there.block == w.block[::-1]
    assert torch.equal(there.to_dense(), w.to_dense().T)


@pytest.mark.parametrize("k", [8, 16, 1000, 1024, 4096])
def test_eight_rows_of_the_tile_lie_in_different_banks(k):
    pitch = pitch_of(k)
    assert 2 * k <= pitch <= 2 * k + 16
    assert len({(row * pitch // 4 + word) % 32 for row in range(8) for word in range(4)}) == 32


def test_unsupported_operands_are_refused_before_anything_is_built():
    w, x, _ = example((4, 60, 96, (6, 12), 1.0))
    half = replace(w, values=w.values.half())

    def refused(x: torch.Tensor, w: Bsr) -> str:
        return refusal(lambda: bsr_resident.launch(x, w, RESIDENT[0]))

    assert "found torch.float32 and torch.float32" in refused(x, w)
    assert "of 96 columns, found shape [4, 90]" in refused(x[:, :90].half(), half)
    for block in (9, 66):
        odd = Bsr.from_dense(w.to_dense().half(), block=block)
        assert f"even numbers, found {block}x{block}" in refused(x.half(), odd)
    narrow = Bsr.from_dense(w.to_dense()[:, :90].half().contiguous(), block=6)
    assert "a multiple of 8 and of Y of 2, found 90 and 60" in refused(x[:, :90].half(), narrow)
    assert "found strides [97, 1]" in refused(torch.zeros(4, 97).half()[:, :96], half)
