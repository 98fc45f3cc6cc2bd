"""The contract of every format in the folder: what goes in comes out, and -0.0 is zero."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sparsebench.errors import FormatError
from sparsebench.formats._format import BITS, is_stored, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.cvse import Cvse
from sparsebench.formats.twell import Twell
from sparsebench.harness.bench.prepare import unsupported
from sparsebench.harness.catalog import load_format, names
from sparsebench.harness.testing.formats import bits, matrix
from sparsebench.results.record import Contender, Problem
from sparsebench.testing import Check, check_format, format_checks


@pytest.mark.parametrize("check", [c for n in names("formats") for c in format_checks(n)], ids=str)
def test_every_format_keeps_its_contract(check: Check) -> None:
    check()


@pytest.mark.parametrize("block", [2, [3, 5], 64])
def test_blocks_of_any_size_keep_the_contract(block: object) -> None:
    check_format("bsr", block=block)


@settings(deadline=None, max_examples=50)
@given(
    st.sampled_from(["csr", "bsr"]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.tuples(st.integers(1, 17), st.integers(1, 17)),
    st.floats(0, 1),
)
def test_any_matrix_fits_compressed_rows_and_blocks(name, shape, block, density) -> None:
    params = {"block": list(block)} if name == "bsr" else {}
    dense = matrix(shape, density, torch.bfloat16)
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


def test_the_text_of_a_format_has_the_sizes_of_its_arrays_and_no_values() -> None:
    text = repr(Bsr.from_dense(torch.ones(256, 128), block=64))
    arrays = "offsets: int32 [5], columns: int32 [8], values: float32 [8, 64, 64]"
    assert text == f"Bsr(shape: [256, 128], {arrays})"


def test_csr_draws_its_layout() -> None:
    dense = torch.tensor([[1.0, 0, 2], [0, 0, 0], [0, 3, 0]])
    arrays = load_format("csr").from_dense(dense).arrays()
    assert [a.tolist() for a in arrays.values()] == [[0, 2, 2, 3], [0, 2, 1], [1, 2, 3]]


@pytest.mark.parametrize("name", ["csr", "bsr"])
def test_a_sample_of_a_matrix_of_another_size_is_refused(name: str) -> None:
    packed = load_format(name).from_dense(torch.ones(4, 6))
    with pytest.raises(FormatError, match=r"expected \[4, 6\], found \[6, 4\]"):
        packed.sample(torch.ones(6, 4))


def test_a_format_says_when_it_cannot_take_other_values() -> None:
    with pytest.raises(FormatError, match="dense cannot store the values"):
        load_format("dense").from_dense(torch.ones(4, 6)).sample(torch.ones(4, 6))


FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]


def masked(dtype: torch.dtype, mask: Tensor) -> Tensor:
    """Return weight * mask, as torch.nn.utils.prune writes it; torch multiplies no fp8."""
    torch.manual_seed(0)
    weight = torch.randn(mask.shape).clamp(-4, 4)
    weight = weight.sign() * weight.abs().clamp(min=0.125)
    sparse = (weight * mask).to(dtype)
    assert bool((sparse.float().signbit() & (sparse.float() == 0)).any())  # -0.0 is there
    return sparse


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
def test_a_mask_multiplied_onto_weights_stores_its_elements_alone(store, dtype) -> None:
    mask = torch.rand(40, 300, generator=torch.Generator().manual_seed(1)) < 0.05
    dense = masked(dtype, mask)
    packed = store.from_dense(dense)
    count = len(packed.values) if isinstance(packed, Csr) else int(packed.arrays()["counts"].sum())
    assert count == int(mask.sum())
    assert torch.equal(bits(packed.to_dense()), bits(dense))


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float8_e5m2, torch.float64])
def test_zero_of_either_sign_is_zero_and_everything_else_is_stored(dtype: torch.dtype) -> None:
    ends = torch.finfo(dtype)
    values = [0.0, -0.0, ends.smallest_normal, -ends.smallest_normal, ends.max, ends.min]
    dense = torch.tensor([*values, float("nan")], dtype=torch.float64).to(dtype)
    least = dense.view(BITS[dense.element_size()]).clone()
    least[:2] = torch.tensor([1, torch.iinfo(least.dtype).min + 1])  # smallest subnormals
    assert is_stored(dense).tolist() == [False, False, True, True, True, True, True]
    assert is_stored(least.view(dtype)).all()


BAD_PARAMS = [
    *(("bsr", {"block": block}) for block in [[4], [1, 2, 3], [], "16", 0, -1, 1.5, True, None]),
    ("bsr", {"block": [4.0, 4]}),
    *(("spense", {"dense_fraction": part}) for part in ["a", None, float("nan"), 2, -0.1]),
    ("spense", {"split": 3}),
    *(("slide", {"kept": kept}) for kept in (5, 8, "6", 6.0, True, None)),
    *(("slide", {"kept": group - 2, "group": group}) for group in (2, 7)),
    *(("twell", {name: value}) for name in ("tile", "capacity") for value in (0, "x", 1.5, True)),
    *(("cvse", {"height": height}) for height in (0, "8", 2.5, True, None)),
]


@pytest.mark.parametrize(("name", "params"), BAD_PARAMS, ids=str)
def test_a_bad_parameter_is_refused_and_known_before_a_run(name, params) -> None:
    with pytest.raises(FormatError, match=r"expected .*found") as raised:
        load_format(name).from_dense(torch.zeros(64, 64, dtype=torch.bfloat16), **params)
    if load_format(name).operand == "activations":
        return  # kernels build it: a suite gives it no parameters
    contender = Contender(name, "reference", params)
    problem = Problem("linear", {"m": 4, "n": 64, "k": 64, "dtype": "bf16"})
    assert unsupported(problem, contender, torch.device("cpu")) == str(raised.value)


@pytest.mark.parametrize("name", names("formats"))
def test_no_format_of_ours_refuses_its_default_parameters(name: str) -> None:
    problem = Problem("linear", {"m": 4, "n": 64, "k": 64, "dtype": "bf16"})
    assert unsupported(problem, Contender(name, "reference"), torch.device("cpu")) is None


def test_rows_are_numbered_without_waiting_if_their_count_is_passed() -> None:
    """A tensor on meta has no values that the host could read, as in a capture."""
    offsets = torch.tensor([0, 2, 2, 5])
    assert rows_of(offsets, 5).tolist() == rows_of(offsets).tolist() == [0, 0, 2, 2, 2]
    assert rows_of(offsets.to("meta"), 5).shape == (5,)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [Bsr, Csr, Cvse])
def test_a_graph_unpacks_the_values_that_it_finds(kind) -> None:
    """As `sparsebench.matmul` does in a graph with a weight that is not frozen."""
    dense = matrix((96, 64), 0.5, torch.float16).cuda()
    w = kind.from_dense(dense)
    graph = torch.cuda.CUDAGraph()
    w.to_dense()
    with torch.cuda.graph(graph):
        unpacked = w.to_dense()
    w.values.mul_(2)
    unpacked.fill_(float("nan"))
    graph.replay()
    assert torch.equal(unpacked, 2 * dense)
