"""TwELL: its tiles, its exact spill, and the published words bit for bit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats.twell import Twell
from sparsebench.harness.testing.formats import bits

# Two tokens of 512 features, of the published description: a tile is a count and 31 entries,
# each the bf16 bits above the column. 1.0 is 3F80, 2.0 4000, 0.5 3F00, 3.0 4040.
ENTRIES = {(0, 3): 1.0, (0, 255): 2.0, (1, 300): 0.5, (1, 511): 3.0}
WORDS = [
    [2, 0x3F800003, 0x400000FF, *[0] * 29, *[0] * 32],
    [*[0] * 32, 2, 0x3F00012C, 0x404001FF, *[0] * 29],
]


def example() -> Tensor:
    dense = torch.zeros(2, 512, dtype=torch.bfloat16)
    for at, value in ENTRIES.items():
        dense[at] = value
    return dense


def test_it_draws_its_layout() -> None:
    dense = torch.tensor([[1.0, 0, 2, 0, 0, 0, 0, 0], [0, 3, 0, 0, 4, 5, 6, 0]])
    packed = Twell.from_dense(dense, tile=4, capacity=2)
    assert {name: a.tolist() for name, a in packed.arrays().items()} == {
        "counts": [[2, 0], [1, 2]],
        "columns": [[[0, 2], [0, 0]], [[1, 0], [4, 5]]],
        "values": [[[1, 2], [0, 0]], [[3, 0], [4, 5]]],
        "spill_offsets": [0, 0, 1],
        "spill_columns": [6],
        "spill_values": [6],
    }
    assert packed.stored_bytes == 4 * 4 + 8 * (2 + 4) + 3 * 4 + 2 + 4


@settings(deadline=None, max_examples=100)
@given(
    st.tuples(st.integers(1, 9), st.integers(1, 70)),
    st.integers(1, 40).flatmap(lambda t: st.tuples(st.just(t), st.integers(1, t))),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64]),
)
def test_any_matrix_fits_any_tile(shape, setting, density, dtype) -> None:
    torch.manual_seed(0)
    tile, capacity = setting
    special = torch.tensor([-0.0, float("nan"), float("inf"), 1.0, -2.0])
    drawn = special[torch.randint(5, shape)].where(torch.rand(shape) < density, 0).to(dtype)
    packed = Twell.from_dense(drawn, tile=tile, capacity=capacity)
    assert torch.equal(bits(packed.to_dense()), bits(drawn))


def test_entries_beyond_the_capacity_are_in_the_spill_in_order() -> None:
    dense = torch.ones(3, 600, dtype=torch.bfloat16)
    dense[1, 40:] = 0
    packed = Twell.from_dense(dense)
    assert packed.counts.tolist() == [[31, 31, 31], [31, 0, 0], [31, 31, 31]]
    assert packed.spill_offsets.tolist() == [0, 507, 516, 1023]
    assert packed.spill_columns[507:516].tolist() == list(range(31, 40))
    assert torch.equal(bits(packed.to_dense()), bits(dense))


def test_columns_use_all_16_bits() -> None:
    dense = torch.zeros(1, 65536, dtype=torch.bfloat16)
    dense[0, 40000] = dense[0, 65535] = -1.0
    packed = Twell.from_dense(dense)
    assert torch.equal(bits(packed.to_dense()), bits(dense))
    assert packed.words()[0, 40000 // 256 * 32 + 1].item() == 0xBF809C40
    assert torch.equal(bits(Twell.from_words(packed.words(), packed.shape).to_dense()), bits(dense))


def test_the_default_writes_the_published_words_in_their_bytes() -> None:
    packed = Twell.from_dense(example())
    words = packed.words()
    assert words.dtype == torch.uint32
    assert words.tolist() == WORDS
    assert packed.stored_bytes == words.nbytes + packed.spill_offsets.nbytes


def test_published_words_are_read_in_any_order_and_not_beyond_their_count() -> None:
    words = torch.tensor(WORDS, dtype=torch.uint32)
    words[0, 1:4] = torch.tensor([0x400000FF, 0x3F800003, 0xDEADBEEF], dtype=torch.uint32)
    packed = Twell.from_words(words, (2, 512))
    assert torch.equal(bits(packed.to_dense()), bits(example()))
    assert packed.words()[0, :4].tolist() == [2, 0x400000FF, 0x3F800003, 0]


@pytest.mark.parametrize("capacity", [31, 63, 127])
def test_each_published_capacity_round_trips_through_words(capacity: int) -> None:
    dense = torch.zeros(2, 300, dtype=torch.bfloat16)
    dense[0, :capacity] = -3.0
    dense[1, :40] = -0.0  # no entries
    dense[1, 299] = float("nan")
    packed = Twell.from_dense(dense, capacity=capacity)
    back = Twell.from_words(packed.words(), (2, 300), capacity=capacity)
    assert torch.equal(bits(back.to_dense()), bits(dense))
    for name, array in packed.arrays().items():
        assert torch.equal(bits(back.arrays()[name]), bits(array)), name


@pytest.mark.parametrize(
    ("shape", "setting", "message"),
    [
        ((1, 8), {"tile": 16}, "expected a capacity of 1 to 16, .*, found 31"),
        ((1, 65537), {}, "expected at most 65536 columns for 16-bit indices, found 65537"),
    ],
)
def test_impossible_settings_are_refused(shape, setting, message) -> None:
    with pytest.raises(FormatError, match=message):
        Twell.from_dense(torch.zeros(shape), **setting)


@pytest.mark.parametrize(
    ("dense", "capacity", "message"),
    [
        (torch.ones(1, 256, dtype=torch.bfloat16), 31, "at most 31 .* each tile, found 225 beyond"),
        (torch.zeros(1, 256), 31, "expected bfloat16 values in words, found torch.float32"),
        (torch.zeros(1, 256, dtype=torch.bfloat16), 30, "divisor of the tile of 256 .* found 30"),
    ],
    ids=["a spill", "fp32", "a capacity of 30"],
)
def test_what_the_published_words_cannot_hold_is_refused(dense, capacity, message) -> None:
    with pytest.raises(FormatError, match=message):
        Twell.from_dense(dense, capacity=capacity).words()


@pytest.mark.parametrize(
    ("at", "word", "message"),
    [
        (0, 32, "expected counts of at most 31, found more in 1 tiles"),
        (0, 0xFFFFFFFF, "expected counts of at most 31, found more in 1 tiles"),
        (1, 0x3F800100, "expected columns inside their tiles of 256 and below 500, found 1"),
        (34, 0x3F8001FF, "expected columns inside their tiles of 256 and below 500, found 1"),
    ],
    ids=["a count beyond", "a count of all ones", "another tile's column", "beyond the matrix"],
)
def test_words_that_are_not_a_matrix_are_refused(at: int, word: int, message: str) -> None:
    words = torch.tensor([[1, 0x3F800000, *[0] * 30, 2, 0x3F800100, 0x3F800101, *[0] * 29]])
    words[0, at] = word
    with pytest.raises(FormatError, match=message):
        Twell.from_words(words.to(torch.uint32), (1, 500))


def test_words_of_another_size_or_type_are_refused() -> None:
    for words in (torch.zeros(1, 64, dtype=torch.int32), torch.zeros(1, 32)):
        with pytest.raises(FormatError, match=r"expected 32-bit words \[1, 32\], found torch"):
            Twell.from_words(words, (1, 256))
