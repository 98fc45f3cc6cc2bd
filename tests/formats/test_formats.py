"""The contract of every format in the folder: what goes in comes out, and -0.0 is zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.utils import prune

from sparsebench.errors import FormatError
from sparsebench.formats._format import BITS, Format, has_value, is_stored
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.spense import Spense
from sparsebench.formats.twell import Twell
from sparsebench.harness.catalog import load_format, names

FORMATS = names("formats")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
SHAPES = [(1, 1), (3, 5), (16, 16), (33, 64), (64, 128), (70, 31)]


def bits(tensor: Tensor) -> Tensor:
    """Return the bits of each element; those of +0.0 for -0.0."""
    whole = tensor.view(BITS[tensor.element_size()])
    return whole.where(has_value(whole), 0)


def matrix(shape: tuple[int, int], dtype: torch.dtype, density: float = 0.5) -> Tensor:
    torch.manual_seed(0)
    return torch.randn(shape).to(dtype).where(torch.rand(shape) < density, 0)


def two_of_four(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Return a matrix that any format can hold: 2 of each 4 elements along a row."""
    return matrix(shape, dtype, 1.0).where(torch.arange(shape[1]) % 4 < 2, 0)


def stored(name: str, dense: Tensor, **params: object) -> Format:
    """Convert, or set the example aside where the format refuses the matrix."""
    try:
        return load_format(name).from_dense(dense, **params)
    except FormatError as refusal:
        pytest.skip(str(refusal))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_format_round_trips(name: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for dense in (two_of_four(shape, dtype), torch.zeros(shape, dtype=dtype)):
        packed = stored(name, dense)
        back = packed.to_dense()
        assert packed.shape == back.shape == shape
        assert back.dtype == dtype
        assert back.is_contiguous()
        assert torch.equal(bits(back), bits(dense))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("special", [-0.0, float("nan"), float("inf"), -float("inf"), 6e-8])
def test_every_format_keeps_every_value(name: str, dtype: torch.dtype, special: float) -> None:
    dense = torch.zeros(64, 128, dtype=dtype)
    dense[5, 9] = dense[63, 127] = special
    assert torch.equal(bits(stored(name, dense).to_dense()), bits(dense))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_a_matrix_that_it_can_be_compared_on(name: str) -> None:
    load_format(name).from_dense(two_of_four((256, 256), torch.bfloat16))


@pytest.mark.parametrize("name", FORMATS)
def test_stored_bytes_are_those_of_the_arrays(name: str) -> None:
    packed = stored(name, two_of_four((64, 128), torch.bfloat16))
    assert packed.stored_bytes == sum(
        a.untyped_storage().nbytes() for a in packed.arrays().values()
    )
    assert all(a.is_contiguous() for a in packed.arrays().values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    "bad",
    [torch.zeros(4), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(8, 4).T],
    ids=["a vector", "integers", "strided"],
)
def test_every_format_refuses_what_is_not_a_matrix(name: str, bad: Tensor) -> None:
    with pytest.raises(FormatError, match=r"expected .*, found"):
        load_format(name).from_dense(bad)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["csr", "bsr"]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 17), st.integers(1, 17)),
    st.floats(0, 1),
)
def test_any_matrix_fits_compressed_rows_and_blocks(
    name: str, shape: tuple[int, int], block: tuple[int, int], density: float
) -> None:
    params = {"block": list(block)} if name == "bsr" else {}
    dense = matrix(shape, torch.bfloat16, density)
    packed = load_format(name).from_dense(dense, **params)
    assert torch.equal(bits(packed.to_dense()), bits(dense))


def test_bsr_draws_its_layout() -> None:
    dense = torch.kron(torch.tensor([[1.0, 0, 0, 2], [0, 0, 3, 0]]), torch.ones(2, 3))
    packed = load_format("bsr").from_dense(dense, block=[2, 3])
    arrays = packed.arrays()
    assert arrays["offsets"].tolist() == [0, 2, 3]
    assert arrays["columns"].tolist() == [0, 3, 2]
    assert arrays["values"][:, 0, 0].tolist() == [1, 2, 3]
    assert packed.stored_bytes == 4 * 3 + 4 * 3 + 4 * 18


def test_csr_draws_its_layout() -> None:
    dense = torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 3, 0]])
    arrays = load_format("csr").from_dense(dense).arrays()
    assert [a.tolist() for a in arrays.values()] == [[0, 2, 2, 3], [0, 2, 1], [1, 2, 3]]


def test_a_block_of_nothing_is_refused() -> None:
    with pytest.raises(FormatError, match="expected a block of at least 1x1, found 0x4"):
        load_format("bsr").from_dense(torch.zeros(4, 4), block=[0, 4])


@pytest.mark.parametrize("name", ["csr", "bsr"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_sample_is_the_other_matrix_at_the_stored_positions(
    name: str, shape: tuple[int, int]
) -> None:
    packed = stored(name, matrix(shape, torch.float16, 0.05))
    other = matrix(shape, torch.float64, 1.0)
    ones = packed.sample(torch.ones(shape)).to_dense()
    sampled = packed.sample(other)
    assert torch.equal(sampled.to_dense(), other.where(ones == 1, 0))
    assert (ones.bool() | (packed.to_dense() == 0)).all()
    assert int(sampled.arrays()["values"].count_nonzero()) == int(ones.sum())  # padding is zero
    for array, of_other in zip(packed.arrays().items(), sampled.arrays().items(), strict=True):
        assert array[0] == of_other[0]
        assert array[0] == "values" or torch.equal(array[1], of_other[1])


@pytest.mark.parametrize("name", ["csr", "bsr"])
def test_a_sample_of_a_matrix_of_another_size_is_refused(name: str) -> None:
    packed = stored(name, torch.ones(4, 6))
    with pytest.raises(FormatError, match=r"expected \[4, 6\], found \[6, 4\]"):
        packed.sample(torch.ones(6, 4))


def test_a_format_says_when_it_cannot_take_other_values() -> None:
    with pytest.raises(FormatError, match="dense has no room for the values of another matrix"):
        stored("dense", torch.ones(4, 6)).sample(torch.ones(4, 6))


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def masked(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """Return weight * mask, as torch.nn.utils.prune writes it; torch multiplies no fp8."""
    torch.manual_seed(0)
    weight = torch.randn(mask.shape).clamp(-4, 4)
    weight = weight.sign() * weight.abs().clamp(min=0.125)
    found = (weight * mask).to(dtype)
    assert bool((found.float().signbit() & (found.float() == 0)).any())  # -0.0 is there
    return found


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_mask_multiplied_onto_weights_stores_the_blocks_of_the_mask(dtype: torch.dtype) -> None:
    torch.manual_seed(1)
    blocks = torch.rand(6, 8) < 0.2
    mask = blocks.repeat_interleave(16, 0).repeat_interleave(16, 1)
    dense = masked(dtype, mask)
    packed = Bsr.from_dense(dense, block=16)
    assert packed.offsets.diff().tolist() == blocks.sum(1).tolist()
    assert packed.columns.tolist() == blocks.nonzero()[:, 1].tolist()
    assert torch.equal(bits(packed.to_dense()), bits(dense))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("store", [Csr, Twell])
def test_a_mask_multiplied_onto_weights_stores_its_elements_alone(
    store: type[Format], dtype: torch.dtype
) -> None:
    mask = torch.rand(40, 300, generator=torch.Generator().manual_seed(1)) < 0.05
    dense = masked(dtype, mask)
    packed = store.from_dense(dense)
    count = len(packed.values) if isinstance(packed, Csr) else int(packed.arrays()["counts"].sum())
    assert count == int(mask.sum())
    assert torch.equal(bits(packed.to_dense()), bits(dense))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_a_mask_of_two_of_four_multiplied_onto_weights_is_two_of_four(dtype: torch.dtype) -> None:
    mask = torch.rand(128, 64, 4).argsort(-1).flatten(1) < 2
    dense = masked(dtype, mask)
    assert torch.equal(bits(Spense.from_dense(dense).to_dense()), bits(dense))


def test_weights_pruned_by_torch_store_what_is_left() -> None:
    layer = torch.nn.Linear(96, 64)
    mask = (torch.rand(4, 6) < 0.3).repeat_interleave(16, 0).repeat_interleave(16, 1)
    prune.custom_from_mask(layer, "weight", mask)
    prune.remove(layer, "weight")
    packed = Bsr.from_dense(layer.weight.detach(), block=16)
    assert len(packed.columns) == int(mask.sum()) // 256


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.float64])
def test_zero_of_either_sign_is_zero_and_everything_else_is_stored(dtype: torch.dtype) -> None:
    ends = torch.finfo(dtype)
    values = [0.0, -0.0, ends.smallest_normal, -ends.smallest_normal, ends.max, ends.min]
    dense = torch.tensor([*values, float("nan")], dtype=torch.float64).to(dtype)
    least = dense.view(BITS[dense.element_size()]).clone()
    least[:2] = torch.tensor([1, torch.iinfo(least.dtype).min + 1])  # smallest subnormals
    assert is_stored(dense).tolist() == [False, False, True, True, True, True, True]
    assert is_stored(least.view(dtype)).all()
