"""The layouts of Marlin and Sparse-Marlin, their library, and their products on a GPU.

`SPARSEBENCH_PEERS=DIR pytest authors/tests/test_marlin.py` with a built checkout of Sparse-Marlin
below DIR also runs their kernels on a GPU.
"""

from types import ModuleType

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.int4_two_four import Int4TwoFour
from sparsebench_authors import _builds, _marlin, marlin, sparse_marlin
from tests.kernels.four_bits import assert_products_are_right, weight


@pytest.mark.parametrize("four_columns", [False, True])
def test_a_lane_of_the_library_reads_the_rows_of_its_fragment(four_columns: bool) -> None:
    rows = torch.arange(16)[:, None].expand(16, 128).contiguous()
    words = _marlin.tiled(rows, four_columns=four_columns).view(2, 32, 4)
    nibbles = words[..., None] >> 4 * torch.arange(8) & 15
    lane = torch.arange(32)[:, None, None]
    first = 2 * (lane % 4) + torch.tensor([0, 8, 0, 8, 1, 9, 1, 9])
    assert torch.equal(nibbles, first.expand(32, 4, 8).expand(2, 32, 4, 8))


def test_metadata_of_2_4_holds_the_positions_of_kept_weights() -> None:
    dense = weight()
    _, metadata, _ = sparse_marlin.packed(Int4TwoFour.from_dense(dense))
    groups = dense.unflatten(1, (-1, 4)) != 0
    pairs = groups.nonzero()[:, 2].view(256, -1, 2)
    expected = (pairs[..., 0] | pairs[..., 1] << 2).flatten().bincount(minlength=16)
    nibbles = (metadata.int()[..., None] >> 4 * torch.arange(4)) & 15
    assert torch.equal(nibbles.flatten().bincount(minlength=16), expected)


def test_a_library_of_another_version_is_refused(tmp_path, monkeypatch) -> None:
    file = tmp_path / "marlin_cuda.so"
    file.write_bytes(b"no library")
    monkeypatch.setattr(_builds, "prebuilt", lambda *names: file)
    with pytest.raises(Unsupported, match="expected a library"):
        _marlin.function.__wrapped__(_marlin.SPARSE)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 17, 130])
@pytest.mark.parametrize("peer", [marlin, sparse_marlin])
def test_products_of_4_bits_are_right_on_a_gpu(peer: ModuleType, m: int) -> None:
    assert_products_are_right(peer, "fp16", m)
