"""Spense: every 2:4 hybrid round-trips, and stores the bytes of its docstring."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats.spense import DTYPES, ROW_STEP, SPLITS, Spense
from sparsebench.harness.testing.formats import bits

SHARES = list(zip(DTYPES, [0.5625, 0.5625, 0.625, 0.625], strict=True))
SPECIAL = torch.tensor([-0.0, float("nan"), 1.0, -2.5, 0.0])


def two_of_four(shape: tuple[int, int], values: Tensor) -> Tensor:
    """Return the values where a random 2 of each 4 in a row are kept, and +0.0 elsewhere."""
    n, k = shape
    mask = torch.rand(n, -(-k // 4), 4).argsort(-1) < 2
    return values.where(mask.flatten(1)[:, :k], 0)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 300), st.integers(1, 600)),
    st.sampled_from(DTYPES),
    st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]),
    st.sampled_from(SPLITS),
    st.integers(0, 2**20),
)
def test_every_hybrid_round_trips(shape, dtype, fraction, split, seed) -> None:
    torch.manual_seed(seed)
    values = SPECIAL[torch.randint(len(SPECIAL), shape)]
    dense = two_of_four(shape, values)
    last = int(shape[split == "columns"] * (1 - fraction))
    anything = (slice(last, None), slice(None))[:: 1 if split == "rows" else -1]
    dense[anything] = values[anything]
    dense = dense.to(dtype)
    packed = Spense.from_dense(dense, dense_fraction=fraction, split=split)
    assert torch.equal(bits(packed.to_dense()), bits(dense))
    assert all(size % ROW_STEP == 0 or size == whole for size, whole in sizes(packed))


def sizes(w: Spense) -> list[tuple[int, int]]:
    return list(zip(w.sparse_shape, w.shape, strict=True))


@pytest.mark.parametrize("stored", [0, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_may_store_fewer_elements_at_any_position(dtype: torch.dtype, stored: int) -> None:
    masks = [m for m in range(16) if m.bit_count() == stored]
    rows = [[(m >> i & 1) * (i + 1.0) for i in range(4)] for m in masks]
    dense = torch.tensor(rows).repeat(1, 3).to(dtype)
    packed = Spense.from_dense(dense)
    assert torch.equal(bits(packed.to_dense()), bits(dense))
    words = packed.sparse[0, 0, 8192:].view(torch.int32)
    codes = torch.stack([words >> 4 * j & 15 for j in range(8)]).unique().tolist()
    assert set(codes) <= {0b0100, 0b1000, 0b1100, 0b1001, 0b1101, 0b1110}


@pytest.mark.parametrize(("dtype", "share"), SHARES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("fraction", [0, 0.5, 1])
def test_it_stores_the_bytes_that_its_docstring_says(dtype, share, split, fraction) -> None:
    dense = torch.zeros(512, 1024).to(dtype)
    packed = Spense.from_dense(dense, dense_fraction=fraction, split=split)
    assert packed.stored_bytes == dense.nbytes * (share * (1 - fraction) + fraction)


def test_the_dense_part_grows_to_whole_tiles_and_rounding_of_floats_adds_none() -> None:
    dense = torch.zeros(300, 1280, dtype=torch.bfloat16)
    for fraction, rows, columns in [(0.1, 256, 1152), (0.9, 0, 128), (0.5, 128, 640)]:
        by_rows = Spense.from_dense(dense, dense_fraction=fraction)
        by_columns = Spense.from_dense(dense, dense_fraction=fraction, split="columns")
        assert by_rows.sparse_shape == (rows, 1280)
        assert by_columns.sparse_shape == (300, columns)
        assert (by_rows.split, by_columns.split) == SPLITS


def test_it_draws_its_tiles() -> None:
    dense = torch.zeros(64, 256, dtype=torch.bfloat16)
    dense[9, 4], dense[9, 7] = 1.0, 2.0  # row 9: group 1 has its first and last element
    dense[9, 128 + 72] = 3.0  # of a dense tile's second half
    packed = Spense.from_dense(dense, dense_fraction=0.5, split="columns")
    values = packed.sparse[0, 0, :8192].view(torch.bfloat16).view(64, 8, 8)
    assert values[9, 0 ^ 1, 2:4].tolist() == [1.0, 2.0]
    halves = packed.dense[0, 0].view(torch.bfloat16).view(2, 64, 8, 8)
    assert halves[1, 9, 1 ^ 1, 0] == 3.0
    assert values.count_nonzero() + halves.count_nonzero() == 3
    words = packed.sparse[0, 0, 8192:].view(torch.int32).view(4, 8, 2, 4)  # w, g, c, s
    assert words[0, 1, 0, 0] == 0x44C4_4444  # rows 1 and 9, groups 0 to 3
    assert (words == 0x4444_4444).sum() == words.numel() - 1


@pytest.mark.parametrize("split", SPLITS)
def test_the_first_group_with_more_than_two_of_four_is_named(split: str) -> None:
    dense = torch.zeros(300, 700, dtype=torch.float16)
    dense[299, 696:] = 1.0  # in the dense part
    dense[120, 4:8] = -2.0
    dense[70, 200] = -0.0  # no element
    dense[70, 201:204] = 1.0
    for row, group, count in [(70, 50, 3), (120, 1, 4)]:
        where = f"row {row}, group {group} .columns {4 * group} to {4 * group + 3}."
        with pytest.raises(FormatError, match=f"at most 2 of 4 .*, found {count} in {where}"):
            Spense.from_dense(dense, dense_fraction=0.25, split=split)
        dense[row] = 0.0
    Spense.from_dense(dense, dense_fraction=0.25, split=split)


@pytest.mark.parametrize(
    ("dense", "setting", "message"),
    [
        (torch.zeros(4, 4), {}, "expected fp16, bf16, fp8 .* or int8, found torch.float32"),
        (torch.zeros(4, 4).half(), {"split": "tiles"}, "a split by rows or columns, found 'tiles'"),
    ],
)
def test_impossible_settings_are_refused(dense, setting, message) -> None:
    with pytest.raises(FormatError, match=message):
        Spense.from_dense(dense, **setting)  # type: ignore[arg-type]
