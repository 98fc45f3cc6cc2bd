import hashlib
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebench._discovery import modules
from sparsebench.errors import SuiteError
from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.inputs.grid import Stack, ValueGrid, magnitudes
from sparsebench.harness.patterns._mask import level, mask
from sparsebench.harness.patterns.video_window import places
from sparsebench.harness.testing.patterns import CPU, chosen, hashed
from sparsebench.testing import Check, pattern_checks

IN_BLOCKS = ["blocks", "balanced_blocks", "banded", "block_diagonal"]
SPENSE = ["spense_rows", "spense_columns"]
GRAPHS = ["small_world", "scale_free"]


def fields(pattern: str, n: int, k: int, sparsity: float, block: Any = 1) -> dict[str, Any]:
    return {"pattern": pattern, "n": n, "k": k, "sparsity": sparsity, "block": block}


def cells(keep: Tensor, r: int, c: int) -> Tensor:
    """Return which blocks are kept; none may be kept in part."""
    rows = [keep[i : i + r].split(c, dim=1) for i in range(0, len(keep), r)]
    assert all(bool(b.all()) or not bool(b.any()) for row in rows for b in row)
    return torch.tensor([[bool(b.any()) for b in row] for row in rows])


CHECKS = [check for name in modules("harness.patterns") for check in pattern_checks(name)]


@pytest.mark.parametrize("check", CHECKS, ids=str)
def test_every_pattern_keeps_its_contract(check: Check) -> None:
    check()


@settings(deadline=None)
@given(
    st.sampled_from(["unstructured", *IN_BLOCKS]),
    st.tuples(st.integers(1, 60), st.integers(1, 60)),
    st.tuples(st.integers(1, 9), st.integers(1, 9)),
    st.floats(0, 0.99),
)
def test_a_level_is_met_exactly_or_refused(pattern, size, block, sparsity) -> None:
    """Blocks need not divide the matrix."""
    spec = fields(pattern, *size, sparsity, list(block))
    r, c = (1, 1) if pattern == "unstructured" else block
    try:
        result = level(spec)
    except SuiteError:
        assume(False)
    keep = cells(chosen(spec), r, c)
    assert 1 - int(keep.sum()) / keep.numel() == pytest.approx(result, abs=1e-12)
    assert abs(result - sparsity) <= 0.05 * (1 - sparsity)


HYBRID_LEVELS = (128, 0.2, "0"), (256, 0.4, "0.5"), (512, 0.6, "0.5")  # between whole tiles
NEAREST = [
    ("blocks", 1024, 1024, 0.9, 512, "in a 2x2 grid of 512x512 blocks: the nearest level is 0.75"),
    ("blocks", 16, 16, 0.99, 16, "is 0"),  # a level never prunes everything
    ("dense", 64, 64, 0.5, 16, "is 0"),
    ("two_four", 64, 64, 0.75, 16, "is 0.5"),
    ("balanced_blocks", 64, 64, 0.9, 16, "is 0.75"),
    *((p, n, n, s, 1, f"is {nearest}") for p in SPENSE for n, s, nearest in HYBRID_LEVELS),
]
REFUSED = [
    *((name, 4, 6, 0.5, 1, "multiple of 4, found 6") for name in ("two_four", *SPENSE)),
    ("six_eight", 4, 12, 0.25, 1, "multiple of 8, found 12"),
    ("four_six", 4, 8, 0.5, 1, "multiple of 6, found 8"),
    *((name, 64, 64, 0.5, [8, 16], "found 8x4") for name in GRAPHS),
    *((name, 64, 64, 0.5, 32, "found 2x2") for name in GRAPHS),
    ("block", 8, 8, 0.5, 1, r"\(did you mean blocks\?\)"),
]


@pytest.mark.parametrize(
    ("pattern", "n", "k", "sparsity", "block", "message"),
    [*((*case[:-1], f"{case[-1]}$") for case in NEAREST), *REFUSED],
)
def test_a_level_or_weight_that_does_not_fit_is_refused(pattern, n, k, sparsity, block, message):
    with pytest.raises(SuiteError, match=message):
        level(fields(pattern, n, k, sparsity, block))


def test_a_level_is_that_of_the_named_weight() -> None:
    spec = fields("balanced_blocks", 64, 1024, 0.875, 16)
    assert level(spec) == 0.875
    with pytest.raises(SuiteError, match="64x4 grid"):
        level(spec, ("k", "n"))


def test_balanced_blocks_are_equally_many_in_every_block_row() -> None:
    keep = cells(chosen(fields("balanced_blocks", 256, 320, 0.7, 16)), 16, 16)
    assert (keep.sum(1) == 6).all()


def test_the_weights_of_an_mlp_are_dense_in_the_same_hidden_units() -> None:
    spec = fields("spense_hidden", 512, 128, 0.25)
    to_hidden, from_hidden = (mask(spec, shape, hashed, CPU) for shape in (("n", "k"), ("k", "n")))
    assert torch.equal(to_hidden, chosen(fields("spense_rows", 512, 128, 0.25)))
    assert torch.equal(from_hidden.all(0), torch.arange(512) >= 256)
    assert torch.equal(to_hidden.all(1), from_hidden.all(0))


@pytest.mark.parametrize("pattern", SPENSE)
@pytest.mark.parametrize(
    ("size", "sparsity", "front"),
    [
        (512, 0.25, 256),
        (512, 0.375, 384),
        (1408, 0.25, 640),  # of 11 tiles 5.5 are to be dense: 6 are
        (200, 0.25, 100),
        (512, 0.5, 512),
        (512, 0.0, 0),
    ],
)
def test_a_hybrid_is_two_four_in_front_and_whole_behind(pattern, size, sparsity, front) -> None:
    spec = fields(pattern, size, size, sparsity)
    pruned, whole = chosen(spec).tensor_split([front], dim=SPENSE.index(pattern))
    assert (pruned.reshape(-1, 4).sum(1) == 2).all()
    assert whole.all()
    assert level(spec) == front / size / 2


@pytest.mark.parametrize("pattern", SPENSE)
def test_a_pure_hybrid_is_two_four_bit_for_bit(pattern: str) -> None:
    assert torch.equal(
        chosen(fields(pattern, 64, 128, 0.5)), chosen(fields("two_four", 64, 128, 0.5))
    )


def test_a_band_lies_about_the_diagonal_of_any_shape() -> None:
    keep = chosen(fields("banded", 64, 256, 0.75, [4, 16]))
    rows, columns = keep.nonzero(as_tuple=True)
    assert (rows / 64 - columns / 256).abs().max() < 0.25
    assert keep[::4, ::16].diagonal().all()


def test_block_diagonal_parts_are_equal_but_for_rounding() -> None:
    keep = cells(chosen(fields("block_diagonal", 80, 80, 0.66, 8)), 8, 8)
    assert keep.int().tolist() == [
        [int(r * 3 // 10 == c * 3 // 10) for c in range(10)] for r in range(10)
    ]
    wide = cells(chosen(fields("block_diagonal", 4, 8, 0.5, 1)), 1, 1)
    assert wide[0].tolist() == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    ("pattern", "digest"), [("small_world", "1171a5628b9ba644"), ("scale_free", "014126e9bbb635ed")]
)
def test_a_graph_has_the_same_bits_on_every_machine(pattern: str, digest: str) -> None:
    spec = fields(pattern, 400, 400, 0.91, 4)
    keep = chosen(spec)
    assert hashlib.sha256(keep.numpy().tobytes()).hexdigest()[:16] == digest
    other = mask(spec, ("n", "k"), lambda grid: scores(1, "w", grid.cells, CPU), CPU)
    assert not torch.equal(keep, other)  # of another seed


def test_random_blocks_are_spread_over_rows() -> None:
    keep = cells(chosen(fields("blocks", 512, 512, 0.5, 8)), 8, 8)
    assert 10 < int(keep.sum(1).min()) < 32 < int(keep.sum(1).max()) < 54


def test_the_pattern_of_a_file_is_used_unchanged() -> None:
    assert level(fields("file", 8, 8, 0.123)) == 0.123


@settings(deadline=None)
@given(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 3), min_size=1), st.data())
def test_the_highest_scores_are_kept_and_the_first_of_equals(given_scores, data) -> None:
    count = len(given_scores)
    keep = data.draw(st.integers(1, count))
    spec = fields("unstructured", 1, count, 1 - keep / count)
    result = mask(spec, ("n", "k"), lambda grid: torch.tensor(given_scores, dtype=torch.int32), CPU)
    order = sorted(range(count), key=lambda i: (-given_scores[i], i))
    assert result.flatten().nonzero().flatten().tolist() == sorted(order[:keep])


@settings(deadline=None, max_examples=25)
@given(
    st.tuples(st.integers(1, 20), st.integers(1, 20)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
)
def test_the_score_of_real_blocks_orders_them_by_their_sum(size, block, dtype) -> None:
    torch.manual_seed(0)
    weight = torch.randn(size).to(dtype)
    grid = ValueGrid(*size, *block)
    result = magnitudes(weight, grid)
    rows = [weight[i : i + block[0]] for i in range(0, size[0], block[0])]
    sums = torch.stack([b.double().abs().sum() for row in rows for b in row.split(block[1], 1)])
    by_score, by_sum = result.argsort(stable=True), sums.argsort(stable=True)
    assert torch.allclose(sums[by_score], sums[by_sum], rtol=1e-9)
    assert int(result.min()) >= 0


def test_the_sum_of_a_huge_block_does_not_overflow() -> None:
    weight = torch.ones(2048, 8192, dtype=torch.bfloat16)
    weight[:, 4096:] *= 1.5
    low, high = magnitudes(weight, ValueGrid(2048, 8192, 2048, 4096)).tolist()
    assert 2 * high == 3 * low > 0


ATTENTION = {  # levels of 12 x 12 blocks, and of those that a causal mask sees
    "sliding_window": (0.5, 0.5),
    "window_global": (0.5, 0.5),
    "bigbird": (0.5, 0.5),
    "top_k_blocks": (0.5, 0.5),
    "random_blocks": (0.5, 0.5),
    "video_window": (0.5, 0.5),
    "strided": (0.375, 0.346154),
    "fixed": (0.5, 0.461538),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("pattern", ATTENTION)
def test_a_pattern_of_attention_keeps_a_level_of_every_mask_and_no_row_is_empty(pattern, causal):
    stack = Stack(3, (185, 185), (16, 16), causal, (5, 37, 1))
    spec: dict[str, Any] = {"pattern": pattern, "rows": 36, "columns": 12, "block": 16}
    spec |= {"masks": stack, "sparsity": ATTENTION[pattern][causal]}
    keep = mask(spec, ("rows", "columns"), hashed, CPU).view(3, 12, 12)
    past = torch.ones(12, 12).tril() if causal else torch.ones(12, 12)
    assert not bool((keep & (past == 0)).any())
    assert bool(keep.diagonal(dim1=1, dim2=2).all())
    counts = keep.sum((1, 2)).tolist()
    assert len(set(counts)) == 1
    assert 1 - counts[0] / float(past.sum()) == pytest.approx(level(spec, ("rows", "columns")))
    drawn = pattern in ("bigbird", "top_k_blocks", "random_blocks")
    assert torch.equal(keep[0], keep[1]) != drawn


def test_a_pattern_that_has_no_causal_form_is_refused() -> None:
    spec: dict[str, Any] = {"pattern": "banded", "rows": 12, "columns": 12, "block": 16}
    spec |= {"masks": Stack(1, (192, 192), (16, 16), True), "sparsity": 0.5}
    with pytest.raises(SuiteError, match="causal"):
        level(spec, ("rows", "columns"))


def test_a_window_of_a_video_reaches_frames_rows_and_columns() -> None:
    stack = Stack(1, (512, 512), (64, 64), False, (8, 8, 8))  # 2 x 2 x 2 cubes of 64 tokens
    spec: dict[str, Any] = {"pattern": "video_window", "rows": 8, "columns": 8, "block": 64}
    spec |= {"masks": stack, "sparsity": 0.0}
    assert bool(mask(spec, ("rows", "columns"), hashed, CPU).all())
    at = places(stack, 0)
    assert len({tuple(place.tolist()) for place in at}) == 8
    assert set(at.flatten().tolist()) == {2**20 // 4, 3 * 2**20 // 4}
