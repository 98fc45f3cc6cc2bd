"""Slide: every (2N - 2):2N matrix round-trips, and its lifted matrix multiplies the columns."""

from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import FormatError
from sparsebench.formats.slide import Slide
from sparsebench.formats.spense import DTYPES
from sparsebench.harness.testing.formats import bits

KINDS = [(2, 4), (4, 6), (6, 8), (8, 10)]
SPECIAL = torch.tensor([-0.0, float("nan"), 1.0, -2.5, 0.0])


def pruned(values: Tensor, most: int, group: int) -> Tensor:
    """Return the values where a random `kept` of each group are kept, and +0.0 elsewhere."""
    n, k = values.shape
    keep = torch.rand(n, -(-k // group), group).argsort(-1) < most
    return values.where(keep.flatten(1)[:, :k], 0)


@settings(deadline=None, max_examples=60)
@given(
    st.tuples(st.integers(1, 100), st.integers(1, 700)),
    st.sampled_from(DTYPES),
    st.sampled_from(KINDS),
    st.integers(0, 2**20),
)
def test_every_matrix_round_trips(shape, dtype, kind, seed) -> None:
    torch.manual_seed(seed)
    dense = pruned(SPECIAL[torch.randint(len(SPECIAL), shape)], *kind).to(dtype)
    packed = Slide.from_dense(dense, kept=kind[0], group=kind[1])
    assert torch.equal(bits(packed.to_dense()), bits(dense))


@pytest.mark.parametrize(("most", "group"), KINDS)
def test_every_choice_of_the_elements_of_a_group_fits(most: int, group: int) -> None:
    subsets = [*combinations(range(group), most)]
    dense = torch.zeros(len(subsets), group)
    for row, subset in enumerate(subsets):
        dense[row, list(subset)] = torch.arange(1.0, most + 1)
    packed = Slide.from_dense(dense.half(), kept=most, group=group)
    assert torch.equal(packed.to_dense().float(), dense)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("most", "group"), KINDS)
def test_the_lifted_matrix_multiplies_the_lifted_columns(most, group, dtype) -> None:
    torch.manual_seed(0)
    w = pruned(torch.randint(-3, 4, (40, 700)).float(), most, group)
    packed, x = Slide.from_dense(w.to(dtype), kept=most, group=group), torch.randn(3, 700).double()
    columns = packed.columns
    lifted = pad(x, (0, int(columns.max()) + 1 - 700))[:, columns]
    product = lifted @ packed.lifted.to_dense().double().T
    torch.testing.assert_close(product, x @ w.double().T)


def test_a_block_of_six_of_eight_is_x_and_then_the_middles_of_its_groups() -> None:
    packed = Slide.from_dense(torch.zeros(1, 256).half())
    first = packed.columns[:192].tolist()
    assert first[:128] == [*range(128)]
    assert first[128:136] == [2, 3, 4, 5, 10, 11, 12, 13]
    assert packed.lifted.shape == (1, 384)


def test_a_full_group_is_named() -> None:
    dense = torch.zeros(3, 24).half()
    dense[2, 8:15] = 1
    with pytest.raises(FormatError, match=r"found 7 in row 2, group 1 \(columns 8 to 15\)"):
        Slide.from_dense(dense)
