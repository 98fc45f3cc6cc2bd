"""Weights in 4 bits: problems that have them, and how the peers pack and multiply them.

`SPARSEBENCH_PEERS=DIR pytest ...` with a built checkout of Sparse-Marlin below DIR also runs its
kernels on a GPU.
"""

from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.int4 import Int4
from sparsebench.formats.int4_two_four import Int4TwoFour
from sparsebench.harness.bench.operands import operands
from sparsebench.harness.catalog import load_format, load_op
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers import _authors, _marlin, marlin, sparse_marlin, torch_int4
from sparsebench.results.record import Problem
from tests.kernels.layers import problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OP = load_op("linear")
PEERS = {torch_int4: "bf16", marlin: "fp16", sparse_marlin: "fp16"}


def problem(**fields: Any) -> Problem:
    sizes = {"m": 4, "n": 256, "k": 384, "dtype": "fp16", "weight_bits": 4}
    two_four = {"pattern": "two_four", "sparsity": 0.5}
    return problem_of("linear", **{**sizes, **two_four, **fields})


def weight(**fields: Any) -> Tensor:
    return operands(problem(**fields), OP, CPU, None).weights["w"]


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("k", [384, 100])
def test_a_problem_of_4_bits_fits_the_format_and_keeps_its_pattern(dtype: str, k: int) -> None:
    w = weight(dtype=dtype, k=k)
    stored = Int4.from_dense(w)
    assert torch.equal(stored.to_dense(), w)
    assert torch.equal(w != 0, weight(dtype=dtype, k=k, weight_bits=None) != 0)
    assert stored.unpacked().unique().numel() >= 15


def test_weights_of_16_bits_are_refused_by_the_format() -> None:
    with pytest.raises(FormatError, match="row 0, columns 0 to 127"):
        Int4.from_dense(weight(weight_bits=None))


def test_weights_that_are_not_2_4_are_refused() -> None:
    with pytest.raises(FormatError, match="row 0, columns 0 to 3"):
        Int4TwoFour.from_dense(weight(pattern="dense", sparsity=0.0))


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
    monkeypatch.setattr(_authors, "prebuilt", lambda *names: file)
    with pytest.raises(Unsupported, match="expected a library"):
        _marlin.function.__wrapped__(_marlin.SPARSE)


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 17, 130])
@pytest.mark.parametrize(("peer", "dtype"), PEERS.items())
def test_products_of_4_bits_are_right_on_a_gpu(peer: ModuleType, dtype: str, m: int) -> None:
    four_bits = problem(m=m, n=512, k=1024, dtype=dtype)
    if reason := peer.KERNEL.unsupported(four_bits, CUDA):
        pytest.skip(reason)
    inputs = operands(four_bits, OP, CUDA, None)
    w, x = inputs.weights["w"], inputs.activations["x"]
    stored = load_format(peer.KERNEL.consumes).from_dense(w)
    launch = peer.prepare(Operands(four_bits, {"w": stored}, {"x": x}, OP.definition))
    for _ in range(2):
        expected = x.double() @ w.double().T
        y = launch()
        assert isinstance(y, Tensor)
        assert (y.double() - expected).norm() <= 4e-3 * expected.norm()
        x.normal_()
    assert launch.choice["weight_bits"] == 4
