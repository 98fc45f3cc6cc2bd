"""Peers of block-sparse attention: the 2017 algorithm, lists cut into smaller blocks, refusals."""

from typing import Any

import pytest
import torch

from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels.peers import _attention, attention_unfused
from sparsebench.results.record import Problem
from tests.kernels.attention.cases import random_mask, reference

FIELDS: dict[str, Any] = {
    "dtype": "bf16", "m": 256, "context": None, "batch": 1, "heads": 4, "kv_heads": 4,
    "head_dim": 128, "block": 64, "causal": False, "lists": "heads", "scale": None,
}  # fmt: skip


@pytest.mark.interpreted
@pytest.mark.parametrize(
    "options",
    [
        {"lists": 4, "batch": 2},
        {"causal": True, "block": (16, 32)},
        {"bits": True, "lists": 2, "block": 32},
    ],
    ids=["per head", "causal", "bits"],
)
def test_three_kernels_compute_what_one_does(options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    mask = random_mask((50, 70), options.pop("block", 16), **options)
    q = torch.randn(mask.batch, 50, 4, 16)
    k, v = (torch.randn(mask.batch, 70, 2, 16) for _ in range(2))
    scratch = attention_unfused.scratch_of(mask, 4, q)
    o = attention_unfused.attend(q, k, v, mask, 0.3, scratch, warps=4)
    expected, _ = reference(q, k, v, mask, 0.3)
    torch.testing.assert_close(o.view_as(expected), expected, atol=1e-5, rtol=1e-5)


def test_a_mask_is_the_same_in_smaller_blocks() -> None:
    mask = random_mask((128, 192), (32, 64), lists=2)
    smaller = _attention.cut(mask, 16)
    assert smaller.block == (16, 16)
    assert torch.equal(smaller.expand(), mask.expand())


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"block": 96}, "64"),
        ({"m": 250}, "tokens"),
        ({"causal": True}, "causal"),
        ({"block": [64, 128], "m": 512}, None),
    ],
)
def test_blocks_that_cannot_be_cut_are_refused(fields: dict[str, Any], token: str | None) -> None:
    reason = _attention.unsupported_blocks(Problem("attention", FIELDS | fields), 64)
    assert reason is None if token is None else token in str(reason)


@pytest.mark.parametrize(
    "name", ["fa3", "cudnn_block_sparse", "flashinfer_block_sparse", "fastvideo"]
)
def test_a_package_that_is_not_installed_is_the_reason(name: str) -> None:
    reason = load_kernel(name).unsupported(Problem("attention", FIELDS), torch.device("cuda"))
    assert "pip install" in str(reason)
