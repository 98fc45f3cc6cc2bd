"""Block masks: rows, partial blocks, bits, the transpose, and the masks of other libraries."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

from sparsebench.errors import FormatError
from sparsebench.formats import block_mask_converters as other
from sparsebench.formats._blocks import areas, pack_bits, unpack_bits
from sparsebench.formats._selection import PARTIAL
from sparsebench.formats.block_mask import BlockMask

CASES = [  # tokens, block, batch, lists, causal
    ((37, 53), (16, 8), 2, 3, True),
    ((5, 7), (2, 3), 1, 2, False),
    ((40, 20), (8, 8), 1, 1, True),  # the first 20 queries see nothing
    ((1, 33), (16, 16), 3, 2, True),
    ((64, 64), (64, 64), 1, 1, False),
]
IDS = ["offset", "odd", "more queries", "decoding", "one block"]


def drawn(density: float, case: tuple[Any, ...]) -> tuple[Tensor, BlockMask]:
    """Return cells and their mask."""
    tokens, block, batch, lists, causal = case
    rows, columns = -(-tokens[0] // block[0]), -(-tokens[1] // block[1])
    draw = torch.Generator().manual_seed(0)
    cells = (torch.rand(batch * lists * rows, columns, generator=draw) < density).float()
    mask = BlockMask.from_dense(
        cells, block=list(block), tokens=list(tokens), batch=batch, causal=causal
    )
    return cells, mask


def elements(cells: Tensor, case: tuple[Any, ...]) -> Tensor:
    """Return what the cells allow, bool [batch, lists, queries, keys]."""
    (s_q, s_kv), (b_q, b_k), batch, lists, causal = case
    wide = cells.bool().view(batch, lists, -1, cells.shape[1])
    wide = wide.repeat_interleave(b_q, 2).repeat_interleave(b_k, 3)[:, :, :s_q, :s_kv]
    keys, queries = torch.arange(s_kv), torch.arange(s_q)[:, None]
    return wide & (keys <= queries + s_kv - s_q) if causal else wide


@pytest.mark.parametrize("density", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_a_mask_allows_the_elements_of_its_cells(case: tuple[Any, ...], density: float) -> None:
    cells, mask = drawn(density, case)
    allowed = elements(cells, case)
    assert torch.equal(mask.expand(), allowed)
    tokens, block, _, lists, causal = case
    area = areas(tokens, block, causal, cells.device)
    by_list = cells.long().view(-1, *area.shape)
    assert int((by_list * area).sum()) == int(allowed.sum())
    by_head = mask.expand(2 * lists)
    assert torch.equal(by_head[:, ::2], allowed)
    assert torch.equal(by_head[:, 1::2], allowed)


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_blocks_of_a_row_ascend_and_future_ones_are_absent(case: tuple[Any, ...]) -> None:
    _, mask = drawn(1.0, case)
    for row in mask.indices.split(mask.counts.tolist()):
        assert row.tolist() == sorted(set(row.tolist()))
    area = areas(mask.tokens, mask.block, mask.causal, mask.columns.device)
    assert len(mask.columns) == int((area > 0).sum()) * mask.batch * mask.lists
    full = areas(mask.tokens, mask.block, False, mask.columns.device)
    assert mask.partial.sum() == ((area > 0) & (area < full)).sum() * mask.batch * mask.lists


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_elements_are_stored_as_bits(case: tuple[Any, ...]) -> None:
    cells, _ = drawn(0.6, case)
    allowed = elements(cells, case)
    allowed &= torch.rand(allowed.shape, generator=torch.Generator().manual_seed(1)) < 0.9
    mask = BlockMask.from_elements(allowed, list(case[1]))
    assert torch.equal(mask.expand(), allowed)
    again = BlockMask.build(
        mask.tokens,
        mask.block,
        torch.arange(mask.shape[0]).repeat_interleave(mask.counts).flip(0),
        mask.indices.flip(0),
        mask.partial.flip(0),
        batch=mask.batch,
        lists=mask.lists,
        bits=None if mask.bits is None else mask.bits.flip(0),
    )
    assert all(torch.equal(again.arrays()[name], a) for name, a in mask.arrays().items())


@pytest.mark.parametrize("case", CASES, ids=IDS)
def test_the_transpose_has_the_same_blocks_by_column(case: tuple[Any, ...]) -> None:
    _, mask = drawn(0.5, case)
    turned = mask.transposed
    lists = mask.batch * mask.lists
    by_column = torch.zeros(lists, mask.kv_blocks, mask.q_blocks, dtype=torch.int32)
    columns = torch.arange(lists * mask.kv_blocks).repeat_interleave(turned.offsets.diff())
    flags = torch.where(turned.rows < 0, 2, 1).int()
    by_column.view(-1, mask.q_blocks)[columns, (turned.rows & ~PARTIAL).long()] = flags
    by_row = torch.zeros(mask.shape, dtype=torch.int32)
    rows = torch.arange(mask.shape[0]).repeat_interleave(mask.counts)
    by_row[rows, mask.indices.long()] = torch.where(mask.partial, 2, 1).int()
    assert torch.equal(by_column.mT, by_row.view(lists, mask.q_blocks, mask.kv_blocks))


def test_a_mask_draws_its_layout() -> None:
    mask = BlockMask.from_dense(torch.ones(2, 3), block=4, tokens=[8, 12], causal=True)
    assert mask.offsets.tolist() == [0, 2, 5]
    assert mask.indices.tolist() == [0, 1, 0, 1, 2]
    assert mask.partial.tolist() == [False, True, False, False, True]
    assert mask.columns[1] == 1 + PARTIAL
    assert mask.stored_bytes == 4 * 3 + 4 * 5
    assert mask.list_of(3, 4) == 0


def test_the_lowest_bit_is_the_first_key() -> None:
    row = torch.tensor([[[1, 0, 0, 0, 0, 0, 0, 0, 0, 1]]], dtype=torch.bool)
    assert pack_bits(row).tolist() == [[[1, 2]]]
    assert torch.equal(unpack_bits(pack_bits(row), 10), row)


BAD = [
    ({"tokens": [64, 32]}, torch.ones(3, 2), "multiple of 4 and 2 columns"),
    ({"tokens": [64, 32]}, torch.ones(4, 3), "multiple of 4 and 2 columns"),
    ({"batch": 2}, torch.ones(3, 2), "2 sequences"),
    ({"tokens": [64]}, torch.ones(4, 4), "tokens: expected"),
    ({"tokens": [0, 64]}, torch.ones(4, 4), "tokens: expected"),
    ({"batch": 0}, torch.ones(4, 4), "batch: expected"),
    ({"block": 0}, torch.ones(4, 4), "block: expected"),
    ({}, torch.full((4, 4), 0.5), "0 and 1"),
]


@pytest.mark.parametrize(("params", "cells", "message"), BAD)
def test_cells_that_do_not_fit_are_refused(params, cells, message) -> None:
    with pytest.raises(FormatError, match=message):
        BlockMask.from_dense(cells, **{"block": 16, **params})


def test_lists_that_no_head_can_have_and_large_expansions_are_refused() -> None:
    _, mask = drawn(0.5, CASES[0])
    with pytest.raises(FormatError, match="multiple of the mask's 3 lists"):
        mask.list_of(0, 4)
    with pytest.raises(FormatError, match="elements"):
        BlockMask.from_dense(torch.ones(256, 256)).expand()
    rows, columns = torch.tensor([0, 0]), torch.tensor([1, 1])
    with pytest.raises(FormatError, match="twice"):
        BlockMask.build((4, 4), (2, 2), rows, columns)
    with pytest.raises(FormatError, match="below 2 for every block"):
        BlockMask.build((4, 4), (2, 2), rows, columns + 1)


HEADS = 6


def masks() -> list[BlockMask]:
    """Return masks with full, causal and other partial blocks."""
    cells, causal = drawn(0.5, CASES[0])
    allowed = elements(cells, CASES[0])
    allowed[..., ::3, ::5] = False
    return [causal, BlockMask.from_elements(allowed, [16, 8])]


@pytest.mark.parametrize("mask", masks(), ids=["causal", "bits"])
def test_flex_attention_sees_the_same_elements(mask: BlockMask) -> None:
    flex = other.to_flex(mask, HEADS)
    assert mask.block == flex.BLOCK_SIZE
    back = other.from_flex(flex, causal=mask.causal)
    assert torch.equal(back.expand(), mask.expand(HEADS))
    by_bits = other.from_flex(flex)
    assert torch.equal(by_bits.expand(), mask.expand(HEADS))


def test_a_mask_that_flex_attention_made_has_its_elements() -> None:
    def documents(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 50 == k // 50) & (q >= k)

    flex = create_block_mask(documents, 1, 2, 150, 150, device="cpu", BLOCK_SIZE=(16, 8))
    mask = other.from_flex(flex)
    q, k = torch.arange(150)[:, None], torch.arange(150)
    right = documents(q, q, q, k).expand(1, 2, -1, -1)
    assert torch.equal(mask.expand(), right)
    assert not bool(mask.partial.all())


def test_fa4_and_cudnn_get_padded_lists() -> None:
    _, causal = drawn(0.5, CASES[0])
    tensors = other.to_fa4(causal, HEADS)
    back = other.from_fa4(tensors, causal.tokens, causal.block, causal=True)
    assert torch.equal(back.expand(), causal.expand(HEADS))
    _, full = drawn(0.5, CASES[1])
    lists = other.to_cudnn(full, 4)
    assert lists.counts.shape == (1, 4, 3)
    back = other.from_cudnn(lists, full.tokens, full.block)
    assert torch.equal(back.expand(), full.expand(4))


@pytest.mark.parametrize("causal", [False, True])
def test_flashinfer_gets_one_list(causal: bool) -> None:
    _, mask = drawn(0.5, ((32, 48), (16, 8), 1, 1, causal))
    converted = other.to_flashinfer(mask)
    assert (converted.mask is not None) == causal
    back = other.from_flashinfer(converted, mask.tokens, mask.block)
    assert torch.equal(back.expand(), mask.expand())


def test_flashinfer_gets_blocks_of_any_size_by_head() -> None:
    cells, mask = drawn(0.5, CASES[1])
    converted = other.to_flashinfer_variable(mask, 4)
    assert torch.equal(converted.block_mask_map[::2].flatten(0, 1), cells.bool())
    assert converted.block_row_sz.tolist() == [[2, 2, 1]] * 4
    assert converted.block_col_sz.tolist() == [[3, 3, 1]] * 4


@pytest.mark.parametrize("density", [0, 0.3, 1])
def test_lists_of_single_queries_hold_any_causal_elements_of_whole_blocks(density: float) -> None:
    """Dense elements [heads, q, k] become lists, and lists the same elements."""
    draw = torch.Generator().manual_seed(0)
    cells = torch.rand(2, 3, 40, 4, generator=draw) < density
    past = torch.ones(40, 50).tril(10).bool()
    elements = cells.repeat_interleave(16, 3)[..., :50] & past
    wide = torch.zeros(2, 3, 40, 64).bool()
    wide[..., :50] = elements
    listed = wide.unflatten(3, (4, 16)).any(4).flatten(0, 2)
    options = {"block": [1, 16], "tokens": [40, 50], "batch": 2, "causal": True}
    mask = BlockMask.from_dense(listed.float(), **options)  # type: ignore[arg-type]
    assert torch.equal(mask.expand(), elements)
    assert torch.equal(mask.to_dense(), listed.float())
    indices = other.to_nsa(mask)
    assert indices.shape[:3] == (2, 40, 3)
    shuffled = indices[..., torch.randperm(indices.shape[3], generator=draw)]
    for lists in (indices, shuffled.int(), torch.cat((indices, shuffled), 3)):
        again = other.from_nsa(lists, 16, 50)
        assert torch.equal(again.offsets, mask.offsets)
        assert torch.equal(again.columns, mask.columns)
        assert torch.equal(again.expand(), elements)


def test_what_a_library_cannot_hold_is_refused() -> None:
    _, causal = drawn(0.5, CASES[0])
    _, full = drawn(0.5, CASES[1])
    bits = masks()[1]
    refusals: list[Callable[[], object]] = [
        lambda: other.to_cudnn(causal, HEADS),
        lambda: other.to_fa4(bits, HEADS),
        lambda: other.to_flashinfer(causal),
        lambda: other.to_flashinfer(BlockMask.from_dense(torch.ones(1, 1), block=4, tokens=[3, 4])),
        lambda: other.to_flashinfer_variable(causal, HEADS),
        lambda: other.to_flashinfer_variable(full, 3),
        lambda: other.to_nsa(causal),
        lambda: other.to_nsa(drawn(0.5, ((5, 7), (1, 3), 1, 2, False))[1]),
        lambda: other.from_nsa(torch.full((1, 4, 1, 2), 9), 16, 50),
        lambda: other.from_nsa(torch.zeros(4, 2), 16, 50),
        lambda: other.from_fa4(other.to_fa4(causal, HEADS), causal.tokens, causal.block),
    ]
    for refused in refusals:
        with pytest.raises(FormatError, match="expected"):
            refused()
