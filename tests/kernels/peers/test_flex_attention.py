"""FlexAttention as a peer: its lists say what the mask says."""

import json

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
