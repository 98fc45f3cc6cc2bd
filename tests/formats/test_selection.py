"""Blocks that are selected by scores or taken from lists of indices, against plain loops."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats.block_mask import BlockMask

CASES = [  # tokens, block, causal, keep, first, last
    ((37, 53), (16, 8), True, 3, 1, 1),
    ((40, 40), (8, 8), True, 2, 0, 1),
    ((40, 20), (8, 8), True, 2, 0, 0),  # the first 20 queries see nothing
    ((30, 50), (8, 16), False, 4, 2, 1),
    ((64, 64), (16, 16), False, 4, 0, 0),
    ((16, 130), (16, 8), True, 17, 3, 4),
    ((20, 12), (8, 8), True, 2, 2, 1),  # a place for each block: all may be kept in any case
]


def chosen(scores: Tensor, row: int, case: tuple[Any, ...], mass: float = 1) -> list[int]:
    """Return the blocks of a row, by their definition."""
    (s_q, s_kv), (b_q, b_k), causal, keep, first, last = case
    last_query = min((row + 1) * b_q, s_q) - 1
    seen = [j for j in range(-(-s_kv // b_k)) if not causal or j * b_k <= last_query + s_kv - s_q]
    always = {*seen[:first], *(seen[-last:] if last else [])}

    def place(j: int) -> tuple[bool, float, int]:
        return j not in always, -float(scores[j]) if j not in always else 0.0, j

    usable = [j for j in seen if j in always or float(scores[j]) > -math.inf]
    best = sorted(usable, key=place)[:keep]
    if mass < 1:
        real = [float(scores[j]) for j in seen if float(scores[j]) > -math.inf]
        weights = {j: weight(float(scores[j]), max(real, default=0.0)) for j in seen}
        goal = mass * sum(weights.values())
        best = [
            j for i, j in enumerate(best) if j in always or sum(map(weights.get, best[:i])) < goal
        ]
    return sorted(best)


def weight(score: float, top: float) -> float:
    """Return the weight of a score before they are divided by their sum."""
    if math.isnan(score):
        return 0
    return 1.0 if score == top else math.exp(score - top)


def drawn(case: tuple[Any, ...], batch: int = 2, lists: int = 3) -> Tensor:
    """Return scores with equal ones, infinite ones and NaN."""
    tokens, block = case[:2]
    grid = [-(-size // side) for size, side in zip(tokens, block, strict=True)]
    draw = torch.Generator().manual_seed(0)
    scores = torch.randint(-3, 4, (batch, lists, *grid), generator=draw).float()
    kinds = torch.rand(scores.shape, generator=draw)
    for value, most in ((math.nan, 0.1), (-math.inf, 0.2), (math.inf, 0.25), (-0.0, 0.3)):
        scores[(kinds < most) & (kinds >= most - 0.1)] = value
    return scores


def rows_of(mask: BlockMask) -> list[list[int]]:
    return [[*map(int, row.nonzero().flatten())] for row in mask.to_dense()]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_blocks_with_the_highest_scores_are_selected(case, dtype) -> None:
    tokens, block, causal, keep, first, last = case
    scores = drawn(case).to(dtype)
    options = {"block": [*block], "tokens": [*tokens], "causal": causal}
    mask = BlockMask.from_scores(scores, keep, first=first, last=last, **options)
    flat = scores.flatten(0, 2)
    expected = [chosen(row, i % scores.shape[2], case) for i, row in enumerate(flat)]
    assert rows_of(mask) == expected
    cells = BlockMask.from_dense(mask.to_dense(), batch=2, **options)
    assert torch.equal(mask.expand(), cells.expand())
    for name, array in cells.arrays().items():
        assert torch.equal(getattr(mask.compact(), name), array), name
    for name, array in cells.transposed._asdict().items():
        if array is not None and name != "places":
            assert torch.equal(getattr(mask.transposed, name), array), name
    assert torch.equal(mask.counts.view(2, 3, -1)[0, 0], mask.counts.view(2, 3, -1)[1, 2])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("mass", [0.02, 0.55, 0.9])
def test_the_fewest_blocks_that_have_the_mass_are_selected(case, mass: float) -> None:
    tokens, block, causal, keep, first, last = case
    scores = drawn(case)
    scores[1] = torch.randn(scores[1].shape, generator=torch.Generator().manual_seed(1)) * 2
    options: dict[str, Any] = {"block": [*block], "tokens": [*tokens], "causal": causal}
    options |= {"mass": mass, "first": first, "last": last}
    for most in (keep, None):
        mask = BlockMask.from_scores(scores, most, **options)
        bounds = (tokens, block, causal, most or scores.shape[3], first, last)
        expected = [
            chosen(row, i % scores.shape[2], bounds, mass)
            for i, row in enumerate(scores.flatten(0, 2))
        ]
        assert rows_of(mask) == expected
        assert mask.keep == (most or scores.shape[3])


@pytest.mark.parametrize("case", CASES)
def test_keys_that_are_not_there_are_left_out_of_every_row(case) -> None:
    tokens, block, causal, keep, first, last = case
    keys = torch.rand(tokens[1], generator=torch.Generator().manual_seed(1)) < 0.8
    keys[:: block[1]] = True
    options: dict[str, Any] = {"block": [*block], "tokens": [*tokens], "causal": causal}
    options |= {"keep": keep, "first": first, "last": last}
    mask = BlockMask.from_scores(drawn(case), keys=keys, **options)
    whole = BlockMask.from_scores(drawn(case), **options)
    assert torch.equal(mask.indices, whole.indices)
    for each in (mask, mask.compact()):
        assert torch.equal(each.expand(), whole.expand() & keys)
    assert bool((mask.partial >= whole.partial).all())


def test_a_mass_of_equal_scores_is_that_of_the_lower_columns() -> None:
    scores = torch.ones(1, 1, 2, 8)
    assert rows_of(BlockMask.from_scores(scores, mass=0.5)) == [[0, 1, 2, 3]] * 2
    assert rows_of(BlockMask.from_scores(scores, mass=0.51, last=1)) == [[0, 1, 2, 3, 7]] * 2
    assert rows_of(BlockMask.from_scores(scores, 3, mass=0.5)) == [[0, 1, 2]] * 2


def test_all_of_the_mass_is_every_block_with_a_score() -> None:
    scores = torch.tensor([0.0, -200.0, math.nan, -math.inf]).view(1, 1, 1, 4)
    assert rows_of(BlockMask.from_scores(scores, mass=1)) == [[0, 1]]
    alone = torch.full_like(scores, math.nan)
    assert rows_of(BlockMask.from_scores(alone, mass=0.5, first=1)) == [[0]]
    assert rows_of(BlockMask.from_scores(alone, mass=0.5)) == [[]]


def test_a_compiled_selection_takes_another_keep_and_another_mass() -> None:
    def select(scores: Tensor, keep: int, mass: float) -> Tensor:
        return BlockMask.from_scores(scores, keep, mass=mass).columns

    compiled = torch.compile(select, fullgraph=True, backend="aot_eager")
    scores = torch.arange(16.0).view(1, 1, 4, 4)
    for kept in ((2, 0.3), (3, 0.4), (4, 0.9)):  # from the second on, both are symbolic
        assert torch.equal(compiled(scores, *kept), select(scores, *kept))


@pytest.mark.parametrize("case", CASES)
def test_lists_of_indices_in_any_order_are_taken_once(case) -> None:
    tokens, block, causal, *_ = case
    height, count = (-(-size // side) for size, side in zip(tokens, block, strict=True))
    draw = torch.Generator().manual_seed(0)
    indices = torch.randint(-2, count + 2, (1, 2, height, 5), generator=draw)
    mask = BlockMask.from_indices(indices, tokens=[*tokens], block=[*block], causal=causal)
    marks = torch.full((1, 2, height, count), -math.inf)
    for at in torch.cartesian_prod(*map(torch.arange, indices.shape)).tolist():
        if 0 <= (j := int(indices[tuple(at)])) < count:
            marks[(*at[:3], j)] = 0
    whole = (*case[:3], count, 0, 0)
    expected = [chosen(row, i % height, whole) for i, row in enumerate(marks.flatten(0, 2))]
    assert rows_of(mask) == expected


def test_keys_of_another_length_or_device_are_refused() -> None:
    options: dict[str, Any] = {"keep": 1, "block": 16}
    for keys in (torch.ones(31).bool(), torch.ones(32), [True] * 32):
        with pytest.raises(FormatError, match=r"keys: expected bool \[32\], found"):
            BlockMask.from_scores(torch.zeros(1, 1, 2, 2), keys=keys, **options)
    elsewhere = torch.ones(32, dtype=torch.bool, device="meta")
    with pytest.raises(FormatError, match="keys: expected them on cpu, as the scores; found meta"):
        BlockMask.from_scores(torch.zeros(1, 1, 2, 2), keys=elsewhere, **options)


def test_what_cannot_be_selected_is_refused_in_one_line() -> None:
    scores = torch.zeros(1, 1, 4, 4)
    for options, reason in (
        ({"keep": 5}, "keep: expected a whole number from 1 to 4 blocks, found 5"),
        ({"keep": 0}, "keep: expected a whole number from 1 to 4 blocks, found 0"),
        ({"keep": True}, "keep: expected a whole number from 1 to 4 blocks, found True"),
        ({"keep": None}, "keep: expected a whole number from 1 to 4 blocks, found None"),
        ({"keep": 2, "first": 2, "last": 1}, "first \\+ last up to keep = 2; found 2 and 1"),
        ({"keep": 2, "first": 0.5}, "expected whole numbers from 0 on, .*; found 0.5 and 0"),
        ({"mass": 0}, "mass: expected a number above 0, at most 1; found 0"),
        ({"mass": 1.5}, "mass: expected a number above 0, at most 1; found 1.5"),
        ({"keep": 2, "mass": math.nan}, "mass: expected a number above 0, at most 1; found nan"),
        ({"keep": 2, "mass": "all"}, "mass: expected a number above 0, at most 1; found 'all'"),
        ({"keep": 5, "mass": 0.5}, "keep: expected a whole number from 1 to 4 blocks, found 5"),
        ({"keep": 2, "last": -1}, "expected whole numbers from 0 on, .*; found 0 and -1"),
        ({"keep": 2, "tokens": [64, 500]}, "expected .*: \\[1, 4\\], found .*\\[1, 1, 4, 4\\]"),
        ({"keep": 2, "tokens": []}, "tokens: expected \\[queries, keys\\], each at least 1; found"),
        ({"keep": 2, "causal": None}, "causal: expected True or False, found None"),
    ):
        with pytest.raises(FormatError, match=reason):
            BlockMask.from_scores(scores, **options)
    for dtype in (torch.int64, torch.float8_e4m3fn):
        with pytest.raises(FormatError, match="in floating point of 16 bits or more, found torch"):
            BlockMask.from_scores(scores.to(dtype), 2)
    with pytest.raises(FormatError, match="or more, found list"):
        BlockMask.from_scores([1.0], 1)
    whole = torch.zeros(1, 1, 4, 2, dtype=torch.int32)
    for indices in (scores, whole[:, :, 1:], whole[..., :0], whole[:0], whole[0], [[0]]):
        with pytest.raises(FormatError, match=r"indices: expected int32 or int64 .*4 q_blocks"):
            BlockMask.from_indices(indices, tokens=[512, 512])
