"""Peers of block-sparse attention: the 2017 algorithm, lists cut into smaller blocks, refusals."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats import block_mask_converters as converters
from sparsebench.formats.block_mask import BlockMask
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers import _attention, attention_unfused, fa4
from sparsebench.results.record import Problem
from tests.kernels.attention.cases import flat, random_mask, reference

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
    mask = random_mask((50, 70), options.pop("block", 16), **options)
    q = torch.randn(mask.batch, 50, 4, 16)
    k, v = (torch.randn(mask.batch, 70, 2, 16) for _ in range(2))
    scratch = attention_unfused.scratch_of(mask, 4, q)
    o = attention_unfused.attend(q, k, v, mask, 0.3, scratch, warps=4)
    expected, _ = reference(q, k, v, mask, 0.3)
    torch.testing.assert_close(o.view_as(expected), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("block", [128, (256, 128)])
def test_fa4_gets_lists_of_its_tiles(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in for FlashAttention 4 attends by the lists that it is given."""
    mask = random_mask((512, 384), block, lists=2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, 64) for n, heads in ((512, 4), (384, 2), (384, 2)))

    def lists(*tensors: Tensor, block_size: tuple[int, int]) -> BlockMask:
        return converters.from_fa4(converters.Fa4(*tensors), mask.tokens, block_size)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, block_sparse_tensors: BlockMask
    ) -> tuple[Tensor, Tensor]:
        assert block_sparse_tensors.block == (128, 128)
        return reference(q, k, v, block_sparse_tensors, softmax_scale)

    of_fa4 = {
        "interface": SimpleNamespace(flash_attn_func=attend),
        "block_sparsity": SimpleNamespace(BlockSparseTensorsTorch=lists),
    }
    for name, module in of_fa4.items():
        monkeypatch.setitem(sys.modules, f"flash_attn.cute.{name}", module)
    problem = Problem("attention", FIELDS | {"head_dim": 64, "scale": 0.3, "kv_heads": 2})
    rows = {name: flat(x) for name, x in (("q", q), ("k", k), ("v", v))}
    launch = fa4.KERNEL.prepare(Operands(problem, {"mask": mask}, rows, abs))
    torch.testing.assert_close(launch().view_as(q), reference(q, k, v, mask, 0.3)[0])


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
    "name",
    ["fa3", "fa4", "fa4_dense", "cudnn_block_sparse", "flashinfer_block_sparse", "fastvideo"],
)
def test_a_package_that_is_not_installed_is_the_reason(name: str) -> None:
    reason = load_kernel(name).unsupported(Problem("attention", FIELDS), torch.device("cuda"))
    assert "pip install" in str(reason)
