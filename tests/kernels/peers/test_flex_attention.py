"""FlexAttention as a peer: its lists and its mask_mod say what the mask says."""

import pytest
import torch

from sparsebench.kernels.peers import flex_attention
from tests.kernels.attention.cases import random_mask

MASKS = {
    "full": random_mask((96, 128), 32, batch=2, lists=2),
    "causal": random_mask((70, 70), 16, lists=2, causal=True),
    "bits": random_mask((50, 60), (24, 40), batch=2, bits=True),
}


@pytest.fixture(params=MASKS)
def mask(request: pytest.FixtureRequest):
    return MASKS[request.param]


def test_the_mask_mod_allows_what_the_mask_allows(mask) -> None:
    sizes = mask.batch, 2, *mask.tokens
    index = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
    allowed = flex_attention.mask_mod_of(mask, 2)(*index)
    assert torch.equal(allowed, mask.expand(2))


def test_exact_lists_have_each_block_once(mask) -> None:
    lists = flex_attention.exact_lists(mask, 4)
    cells = mask.to_dense().view(mask.batch, mask.lists, mask.q_blocks, -1).bool()
    for head in range(4):
        wanted = cells[:, mask.list_of(head, 4)]
        listed = torch.zeros_like(wanted, dtype=torch.int64)
        for counts, columns in (lists.partial, lists.full):
            kept = torch.arange(mask.kv_blocks) < counts[:, head, :, None]
            listed.scatter_add_(2, columns[:, head].long(), kept.long())
            assert counts.dtype == columns.dtype == torch.int32
        assert torch.equal(listed, wanted.long())


def test_coarser_lists_cover_the_mask(mask) -> None:
    lists = flex_attention.coarser_lists(mask, mask.lists)
    assert not lists.full[0].any()
    counts, columns = lists.partial
    allowed = mask.expand()
    for b, head, row, number in ((*at, int(counts[tuple(at)])) for at in counts.nonzero().tolist()):
        rows = slice(row * lists.block[0], (row + 1) * lists.block[0])
        for column in columns[b, head, row, :number].tolist():
            allowed[b, head, rows, column * lists.block[1] : (column + 1) * lists.block[1]] = False
    assert not allowed.any()


def test_blocks_that_no_tile_divides_have_only_coarser_lists() -> None:
    ways = flex_attention.candidates(MASKS["bits"], 2)
    assert [name["lists"] for name, _, _ in ways] == ["coarser"]
