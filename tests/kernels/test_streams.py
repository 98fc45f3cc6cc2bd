"""The kernels that read, write and copy memory, in Triton's interpreter."""

import pytest
import torch

from sparsebench.kernels._common import streams

pytestmark = pytest.mark.interpreted

SIZE = 2**16


def source() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(-1000, 1000, (SIZE,), dtype=torch.int32)  # no sum overflows


def test_a_reader_reads_every_element() -> None:
    right = source()
    for label, reader in streams.readers(right):
        total = reader().sum(dtype=torch.int32)
        assert total == right.sum(dtype=torch.int32), label


def test_a_writer_writes_every_element() -> None:
    target = torch.empty(SIZE, dtype=torch.int32)
    for label, writer in streams.writers(target):
        target.zero_()
        assert bool((writer() == 1).all()), label


def test_a_copier_copies_every_element() -> None:
    right = source()
    target = torch.empty_like(right)
    for label, copier in streams.copiers(right, target):
        target.zero_()
        assert torch.equal(copier(), right), label


def test_a_tensor_of_part_of_a_chunk_is_refused() -> None:
    with pytest.raises(ValueError, match="expected int32 in whole chunks of 1024, found 1000"):
        list(streams.readers(torch.zeros(1000, dtype=torch.int32)))
