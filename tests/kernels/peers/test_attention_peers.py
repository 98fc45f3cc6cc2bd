"""Peers of block-sparse attention: the 2017 algorithm, lists cut into smaller blocks, refusals."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats import block_mask_converters as converters
from sparsebench.formats.block_mask import BlockMask
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers import (
    _attention,
    attention_unfused,
    cudnn_block_sparse,
    fa4,
    fastvideo,
    fla_nsa,
    flashinfer_block_sparse,
    flex_attention,
)
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


@pytest.mark.parametrize(("block", "side"), [(128, 128), ((256, 128), 128), ((64, 192), 64)])
def test_fa4_gets_lists_of_its_tiles(
    block: Any, side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stand-in for FlashAttention 4 attends by the lists that it is given."""
    mask = random_mask((512, 384), block, lists=2)
    torch.manual_seed(0)
    q, k, v = (torch.randn(1, n, heads, 64) for n, heads in ((512, 4), (384, 2), (384, 2)))

    def lists(*tensors: Tensor, block_size: tuple[int, int]) -> BlockMask:
        return converters.from_fa4(converters.Fa4(*tensors), mask.tokens, block_size)

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, softmax_scale: float, block_sparse_tensors: BlockMask
    ) -> tuple[Tensor, Tensor]:
        assert block_sparse_tensors.block == (side, side)
        return reference(q, k, v, block_sparse_tensors, softmax_scale)

    of_fa4 = {
        "interface": SimpleNamespace(flash_attn_func=attend),
        "block_sparsity": SimpleNamespace(BlockSparseTensorsTorch=lists),
    }
    for name, module in of_fa4.items():
        monkeypatch.setitem(sys.modules, f"flash_attn.cute.{name}", module)
    fields = {"head_dim": 64, "scale": 0.3, "kv_heads": 2, "m": 512, "context": 384}
    problem = Problem("attention", FIELDS | fields | {"block": list(mask.block)})
    rows = {name: flat(x) for name, x in (("q", q), ("k", k), ("v", v))}
    launch = fa4.KERNEL.prepare(Operands(problem, {"mask": mask}, rows, abs))
    torch.testing.assert_close(launch().view_as(q), reference(q, k, v, mask, 0.3)[0])


def case(mask: BlockMask) -> tuple[Operands, Tensor]:
    """Return operands of 4 heads of 64, and the O of a mask."""
    torch.manual_seed(0)
    (s_q, s_kv), kv_heads = mask.tokens, mask.lists
    sizes = ((s_q, 4), (s_kv, kv_heads), (s_kv, kv_heads))
    q, k, v = (torch.randn(1, n, heads, 64) for n, heads in sizes)
    fields = {"head_dim": 64, "scale": 0.3, "kv_heads": kv_heads, "lists": "kv_heads"}
    fields |= {"m": s_q, "context": s_kv, "block": list(mask.block)}
    rows = {name: flat(x) for name, x in (("q", q), ("k", k), ("v", v))}
    problem = Problem("attention", FIELDS | fields)
    return Operands(problem, {"mask": mask}, rows, abs), flat(reference(q, k, v, mask, 0.3)[0])


@pytest.mark.parametrize("block", [(256, 128), (64, 192)])
def test_cudnn_gets_lists_of_its_blocks(block: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    mask, side = random_mask((512, 384), block, lists=2), 64

    def attend(
        q: Tensor, k: Tensor, v: Tensor, *, q2k_block_index: Tensor, **options: Any
    ) -> dict[str, Tensor]:
        index, counts = q2k_block_index, options["q2k_block_nums"]
        assert options["allow_empty_block_nums"] or int(counts.min()) > 0
        assert (options["sparse_block_size"], options["layout"]) == (side, "bshd")
        lists = converters.PaddedLists(counts, index)
        given = converters.from_cudnn(lists, mask.tokens, (side, side))
        return {"o_tensor": reference(q, k, v, given, options["softmax_scale"])[0]}

    stand_in = SimpleNamespace(block_sparse_attention_forward=attend)
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    operands, expected = case(mask)
    torch.testing.assert_close(cudnn_block_sparse.KERNEL.prepare(operands)(), expected)


def test_cudnn_splits_the_keys_as_its_option_says(monkeypatch: pytest.MonkeyPatch) -> None:
    splits: list[int] = []

    def attend(q: Tensor, *_: Tensor, kv_splits: int, **__: Any) -> dict[str, Tensor]:
        splits.append(kv_splits)
        return {"o_tensor": torch.zeros_like(q)}

    stand_in = SimpleNamespace(block_sparse_attention_forward=attend)
    monkeypatch.setitem(sys.modules, "cudnn", stand_in)
    operands, _ = case(random_mask((256, 256), 64, lists=2))
    launch = cudnn_block_sparse.KERNEL.prepare(operands, kv_splits=4)
    launch()
    assert set(splits) == {4} == {launch.choice["kv_splits"]}


def test_flashinfer_gets_blocks_of_64_for_cake_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    mask, sides = random_mask((256, 384), 128, lists=4), dict[str, int]()

    class Wrapper:
        def __init__(self, workspace: Tensor, backend: str) -> None:
            self.backend = backend

        def plan(self, cells: Tensor, rows: Tensor, *_: Any, **options: Any) -> None:
            side = sides[self.backend] = int(rows[0, 0])
            dense, tokens = cells.flatten(0, 1).float(), list(mask.tokens)
            self.mask = BlockMask.from_dense(dense, block=side, tokens=tokens)
            self.scale = options["sm_scale"]

        def run(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> Tensor:
            tokens = [x.transpose(0, 1)[None] for x in (q, k, v)]
            heads = reference(*tokens, self.mask, self.scale)[0][0].transpose(0, 1)
            return out.copy_(heads.reshape(out.shape)).view(q.shape)

    stand_in = SimpleNamespace(VariableBlockSparseAttentionWrapper=Wrapper)
    monkeypatch.setitem(sys.modules, "flashinfer", stand_in)
    monkeypatch.setattr(flashinfer_block_sparse, "WORKSPACE", 1)
    operands, expected = case(mask)
    torch.testing.assert_close(flashinfer_block_sparse.KERNEL.prepare(operands)(), expected)
    assert sides == {"fa2": 128, "fa3": 128, "cake": 64}
    parts = parts_of_launches(monkeypatch, flashinfer_block_sparse)
    launch = flashinfer_block_sparse.KERNEL.prepare(operands, plans=True)
    assert launch.choice == {"backend": "fa2", "plans": True}
    sides.clear()
    torch.testing.assert_close(parts["attention"](), expected)
    assert not sides
    torch.testing.assert_close(launch(), expected)
    assert sides == {"fa2": 128}  # planned in the launch


def parts_of_launches(monkeypatch: pytest.MonkeyPatch, peer: Any) -> dict[str, Any]:
    """Return a dict that receives the parts which a peer would time on a GPU."""
    parts: dict[str, Any] = {}
    monkeypatch.setattr(peer, "lines_of_parts", lambda each, device: parts.update(each) or [])
    return parts


@pytest.mark.parametrize("plans", ["lists", "elements"])
def test_flex_attention_has_its_plan_and_attention_as_parts(
    monkeypatch: pytest.MonkeyPatch, plans: str
) -> None:
    masks = []

    def attend(q: Tensor, *_: Any, block_mask: Any, **options: Any) -> Tensor:
        masks.append(block_mask)
        return q

    monkeypatch.setattr(torch, "compile", lambda call, **_: call)
    monkeypatch.setattr(flex_attention, "flex_attention", attend)
    parts = parts_of_launches(monkeypatch, flex_attention)
    operands, _ = case(random_mask((96, 128), 32, lists=2))
    launch = flex_attention.KERNEL.prepare(operands, plans=plans)
    masks.clear()
    for call in (launch, launch, parts["attention"], parts["attention"]):
        call()
    assert masks[0] is not masks[1]  # built in each launch
    assert masks[2] is masks[3]
    assert torch.equal(masks[0].to_dense(), masks[2].to_dense())
    assert [*parts] == ["plan", "attention"]
    assert parts["plan"]()[:2] == (96, 128)


def test_fastvideo_refuses_a_query_without_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel loads the first block of every list, so an empty list would attend to block 0."""
    cells = torch.ones(8, 2)

    def attend(q: Tensor, k: Tensor, v: Tensor, *lists: Tensor) -> list[Tensor]:
        index, counts, sizes = lists
        assert sizes.tolist() == [64] * (k.shape[2] // 64)
        given = converters.from_cudnn(converters.PaddedLists(counts, index), mask.tokens, (64, 64))
        o = reference(*(x.transpose(1, 2) for x in (q, k, v)), given, 0.3)[0]
        return [o.transpose(1, 2)]

    name = "fastvideo_kernel._C.fastvideo_kernel_ops"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(block_sparse_fwd=attend))
    for cells[3] in (torch.tensor([0, 1]), torch.tensor([0, 0])):
        mask = BlockMask.from_dense(cells, block=128, tokens=[256, 256])
        operands, expected = case(mask)
        if cells[3].any():
            torch.testing.assert_close(fastvideo.KERNEL.prepare(operands)(), expected)
        else:
            with pytest.raises(Unsupported, match="queries without one"):
                fastvideo.KERNEL.prepare(operands)


def test_fla_gets_the_lists_of_single_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = torch.rand(2 * 96, 6, generator=torch.Generator().manual_seed(0)) < 0.5
    cells[:, 0] = True  # no query is without a block
    options: dict[str, Any] = {"block": [1, 16], "tokens": [96, 96], "causal": True}
    mask = BlockMask.from_dense(cells.float(), **options)

    def attend(q: Tensor, k: Tensor, v: Tensor, *, block_indices: Tensor, **given: Any) -> Tensor:
        assert given["block_counts"] == block_indices.shape[3]
        listed = converters.from_nsa(block_indices, given["block_size"], k.shape[1])
        return reference(q, k, v, listed, given["scale"])[0]

    monkeypatch.setitem(sys.modules, "fla.ops.nsa", SimpleNamespace(parallel_nsa=attend))
    operands, expected = case(mask)
    torch.testing.assert_close(fla_nsa.KERNEL.prepare(operands)(), expected)


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"lists": "heads"}, "lists kv_heads"),
        ({"block": 64}, "block"),
        ({"heads": 32, "kv_heads": 8}, "found 4"),
        ({"heads": 24, "kv_heads": 1}, "found 24"),
        ({"block": [1, 48]}, "power of two"),
        ({"causal": False}, "causal"),
        ({}, "fla-core"),
    ],
)
def test_fla_refuses_what_its_kernel_does_not_take(fields: dict[str, Any], token: str) -> None:
    usual = {"block": [1, 64], "lists": "kv_heads", "heads": 64, "causal": True}
    problem = Problem("attention", FIELDS | usual | fields)
    assert token in str(fla_nsa.KERNEL.unsupported(problem, torch.device("cuda")))


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


@pytest.mark.parametrize("prepare", ["prepare", "prepare_backward"])
def test_cudnn_without_the_language_of_its_kernels_is_unsupported(
    prepare: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """cudnn looks its functions up when they are first used, and imports their packages then."""

    class Package(SimpleNamespace):
        def __getattr__(self, name: str) -> Any:
            raise ImportError(f"{name} needs nvidia-cudnn-frontend[cutedsl]")

    monkeypatch.setitem(sys.modules, "cudnn", Package())
    with pytest.raises(Unsupported, match="cutedsl"):
        getattr(cudnn_block_sparse, prepare)(SimpleNamespace())
