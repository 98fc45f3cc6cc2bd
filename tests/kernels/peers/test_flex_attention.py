"""FlexAttention as a peer: its lists and its mask_mod say what the mask says."""

import json

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention as of_torch

import sparsebench
from sparsebench.kernels._common.search import Search, Trial
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers import flex_attention
from sparsebench.results.record import Problem
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
    allowed = flex_attention.lookup_of(mask, 2)(*index)
    assert torch.equal(allowed, mask.expand(2))


def test_exact_lists_have_each_block_once(mask) -> None:
    flex = flex_attention.exact_mask(mask, 4)
    cells = mask.to_dense().view(mask.batch, mask.lists, mask.q_blocks, -1).bool()
    for head in range(4):
        expected = cells[:, mask.list_of(head, 4)]
        listed = torch.zeros_like(expected, dtype=torch.int64)
        for counts, columns in (
            (flex.kv_num_blocks, flex.kv_indices),
            (flex.full_kv_num_blocks, flex.full_kv_indices),
        ):
            valid = torch.arange(mask.kv_blocks) < counts[:, head, :, None]
            listed.scatter_add_(2, columns[:, head].long(), valid.long())
            assert counts.dtype == columns.dtype == torch.int32
        assert torch.equal(listed, expected.long())


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_our_output_is_that_of_flex_attention(mask) -> None:
    sizes = [*zip(mask.tokens, (4, 2), strict=True)]
    q, k, v = (torch.randn(mask.batch, *size, 16) for size in (*sizes, sizes[1]))
    ours = sparsebench.attention(q, k, v, mask)
    by_head = (x.transpose(1, 2) for x in (q, k, v))
    # Without compilation torch reads the mask_mod alone, which has all elements in this mask.
    theirs = of_torch(*by_head, block_mask=flex_attention.coarser_mask(mask, 4), enable_gqa=True)
    torch.testing.assert_close(ours, theirs.transpose(1, 2))


def test_coarser_lists_cover_the_mask(mask) -> None:
    flex = flex_attention.coarser_mask(mask, mask.lists)
    assert not flex.full_kv_num_blocks.any()
    counts, columns = flex.kv_num_blocks, flex.kv_indices
    allowed = mask.expand()
    for b, head, row, number in ((*at, int(counts[tuple(at)])) for at in counts.nonzero().tolist()):
        b_q, b_k = flex.BLOCK_SIZE
        for column in columns[b, head, row, :number].tolist():
            allowed[b, head, row * b_q :, column * b_k :][:b_q, :b_k] = False
    assert not allowed.any()


def test_blocks_that_no_tile_divides_have_only_coarser_lists() -> None:
    ways = flex_attention.candidates(MASKS["bits"], 2)
    assert [way.choice["lists"] for way in ways] == ["coarser"]


def test_tiles_of_the_backward_pass_divide_the_blocks() -> None:
    for block in (128, 64, 32, 16):
        ways = flex_attention.backward_candidates(random_mask((256, 256), block), 2)
        assert any(way.choice["lists"] == "exact" for way in ways)
        for way in ways:
            for side in ("M1", "N1", "M2", "N2"):
                assert way.mask.BLOCK_SIZE[0] % way.options[f"bwd_BLOCK_{side}"] == 0


def test_a_later_process_times_the_finalists_of_the_first_one() -> None:
    ways = flex_attention.backward_candidates(random_mask((256, 256), 64), 2)
    times_us = [100.0, *[140.0] * (len(ways) - 2), 90.0]
    trials = tuple(Trial(median_us=time_us) for time_us in times_us)
    choices = [way.choice for way in ways]
    lines = Search(len(ways) - 1, trials).lines(choices, whole=True)
    problem = Problem("attention_backward", {})
    for timed, pinned, expected in (
        (json.loads(json.dumps(lines)), None, [choices[0], choices[-1]]),
        (lines, choices[-1], choices),  # `prepare` takes the pinned way by itself
        ([], None, choices),
    ):
        operands = Operands(problem, {}, {}, abs, pinned=pinned, timed=timed)
        assert [way.choice for way in flex_attention.to_time(ways, operands)] == expected
