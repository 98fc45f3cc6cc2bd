"""FlexAttention as a peer: its lists say what the mask says."""

import json
from itertools import product

import pytest
import torch

from sparsebench.errors import Unsupported
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


@pytest.mark.parametrize("plans", ["lists", "elements"])
@pytest.mark.parametrize(
    "mask",
    [
        random_mask((96, 128), 32, batch=2, lists=2),
        random_mask((70, 100), 16, lists=2, causal=True),
        random_mask((64, 64), (16, 32), lists=1, causal=True),
    ],
)
def test_a_mask_that_is_built_in_a_call_is_the_one_that_is_built_before(mask, plans: str) -> None:
    built = flex_attention._plan(mask, 4, plans)()
    before = flex_attention.exact_mask(mask, 4)
    q, k = torch.arange(mask.tokens[0])[:, None], torch.arange(mask.tokens[1])
    kinds = [("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")]
    cells = [torch.zeros(mask.batch, 4, mask.q_blocks, mask.kv_blocks).int() for _ in range(4)]
    for cell, (made, kind) in zip(cells, product((built, before), kinds), strict=True):
        counts, columns = (getattr(made, name) for name in kind)
        valid = torch.arange(mask.kv_blocks) < counts[..., None]
        cell.scatter_add_(3, columns.long(), valid.int())
        assert counts.dtype == columns.dtype == torch.int32
    assert torch.equal(cells[0] + cells[1], cells[2] + cells[3])
    if plans == "lists":  # create_block_mask calls a block at the edge partial
        assert torch.equal(cells[0], cells[2])
    assert built.seq_lengths == mask.tokens
    assert built.q_num_blocks is None
    if mask.causal:
        allowed = built.mask_mod(torch.tensor(0), torch.tensor(3), q, k)
        present = mask.expand(4)[0, 3]
        assert torch.equal(allowed & present, present)


def test_what_cannot_be_built_in_a_call_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Unsupported, match="lists or elements, found 'cells'"):
        flex_attention._plan(MASKS["full"], 4, "cells")
    with pytest.raises(Unsupported, match="found bits"):
        flex_attention._plan(MASKS["bits"], 2, "lists")
    monkeypatch.setattr(flex_attention, "MOST_PAIRS", 1)
    with pytest.raises(Unsupported, match="at most 1 elements to look up"):
        flex_attention._plan(MASKS["full"], 4, "elements")


def test_blocks_that_no_tile_divides_are_unsupported() -> None:
    with pytest.raises(Unsupported, match=r"power of two from 16 .*, found \[24, 40\]"):
        flex_attention.candidates(MASKS["bits"], 2)


def test_tiles_of_the_backward_pass_divide_the_blocks() -> None:
    for block in (128, 64, 32, 16):
        ways = flex_attention.backward_candidates(random_mask((256, 256), block), 2)
        assert ways
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
