"""NSA and MoBA: their branches, gates and gradients, compared with their definitions in fp64."""

from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from sparsebench import moba_attention, nsa_attention, select_attention
from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention._gated_sum import gated_sum
from sparsebench.kernels.attention._moba import FORCED as OF_MOBA
from sparsebench.kernels.attention._moba import score_blocks
from sparsebench.kernels.attention._nsa import FORCED as OF_NSA
from sparsebench.kernels.attention._nsa import compress
from sparsebench.kernels.nn import token_attention
from tests.compiling.nvcc import hopper
from tests.kernels.attention.cases import (
    BF16,
    gradients,
    moved,
)
from tests.kernels.attention.token_cases import (
    USED,
    TokenCase,
    best,
    block_means,
    gates,
    moba_of,
    nsa_of,
    softmax_over,
    visible_blocks,
)
from tests.tools.marks import crossed

HALF = TokenCase(70, 70, (4, 2), 16, 4, dtype=torch.float16)


@pytest.mark.interpreted
@pytest.mark.parametrize("window", [0, 1, 37])
@pytest.mark.parametrize("case", USED, ids=str)
def test_nsa_adds_up_its_branches(case: TokenCase, window: int) -> None:
    q, k, v = case.operands()
    g_cmp, g_slc, g_swa = gates(case)
    scale = case.head_dim**-0.5
    compressed, scores = nsa_of(q, k, v, case.block, scale)
    allowed = best(scores, case, 1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    right = compressed * g_cmp[..., None]
    right += softmax_over(q, k, v, allowed, scale) * g_slc[..., None]
    options: dict[str, Any] = {"keep": case.keep, "block": case.block}
    operands = [q, k, v, g_cmp, g_slc]
    if window:
        behind = torch.arange(case.queries)[:, None] + case.keys - case.queries
        behind = behind - torch.arange(case.keys)
        inside = ((behind >= 0) & (behind < window)).expand(case.batch, q.shape[2], -1, -1)
        right += softmax_over(q, k, v, inside, scale) * g_swa[..., None]
        operands, options["window"] = [*operands, g_swa], window
    o = nsa_attention(*map(moved, operands), **options)
    torch.testing.assert_close(o.cpu().double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.interpreted
@pytest.mark.parametrize(("case", "window"), crossed([*USED, HALF], [0, 37]), ids=str)
def test_nsa_has_gradients_of_all_but_its_selection(case: TokenCase, window: int) -> None:
    operands = [*case.operands(), *gates(case)][: 6 if window else 5]
    exact = [x.double().requires_grad_() for x in operands]
    q, k, v, *of_gates = exact
    scale, group = case.head_dim**-0.5, q.shape[2] // k.shape[2]
    compressed, _ = nsa_of(q, k, v, case.block, scale)
    _, scores = nsa_of(*operands[:3], case.block, scale)  # of means in the dtype of q
    allowed = best(scores, case, 1, 2).repeat_interleave(group, 1)
    behind = torch.arange(case.queries)[:, None] + case.keys - case.queries
    behind = behind - torch.arange(case.keys)
    inside = ((behind >= 0) & (behind < window)).expand(case.batch, q.shape[2], -1, -1)
    branches = compressed, *(softmax_over(q, k, v, x, scale) for x in (allowed, inside))
    right = sum(g[..., None] * o for g, o in zip(of_gates, branches, strict=False))
    inputs = [moved(x).requires_grad_() for x in operands]
    options: dict[str, Any] = {"keep": case.keep, "block": case.block, "window": window or 1}
    o = nsa_attention(*inputs, **options)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    do = do.to(o.dtype)
    actual = torch.autograd.grad(o, inputs, moved(do))
    wanted = torch.autograd.grad(right, exact, do.double())
    for one, other in zip((o, *actual), (right, *wanted), strict=True):
        bound = 1e-5 if case.dtype == torch.float32 else 4e-3
        assert (one.detach().cpu().double() - other).norm() < bound * other.norm()


def test_nothing_is_selected_if_each_query_keeps_all_blocks(monkeypatch) -> None:
    case = USED[2]  # 40 queries of 130 keys, in 9 blocks
    q, k, v = case.operands()
    inside = torch.ones(40, 130, dtype=torch.bool).tril(90).expand(1, 1, -1, -1)
    right = token_attention.attention(q, k, v, BlockMask.from_elements(inside, [16, 16]))
    zero, one = q.new_zeros(q.shape[:3]), q.new_ones(q.shape[:3])
    monkeypatch.setattr(BlockMask, "from_scores", None)
    for o in (
        moba_attention(q, k, v, keep=9, block=16),
        nsa_attention(q, k, v, zero, one, keep=9, block=16),
    ):
        torch.testing.assert_close(o, right)
    with pytest.raises(TypeError):
        moba_attention(q, k, v, keep=8, block=16)


def test_a_window_of_more_keys_than_there_are_takes_no_more_memory() -> None:
    q, k, v = USED[0].operands()
    operands, options = [q, k, v, *gates(USED[0])], {"keep": 4, "block": 16}
    whole = nsa_attention(*operands, window=70, **options)
    assert torch.equal(nsa_attention(*operands, window=10**9, **options), whole)


@pytest.mark.parametrize("window", [None, 20])
def test_nsa_may_first_run_in_inference_mode_or_a_checkpoint(window: int | None) -> None:
    case, count = USED[0], 5 if window is None else 6
    token_attention._window.cache_clear()
    options: dict[str, Any] = {"keep": 4, "block": 16, "window": window or 1}
    whole = partial(nsa_attention, **options)
    with torch.inference_mode():
        inferred = whole(*[*case.operands(), *gates(case)][:count])
    inputs = [x.requires_grad_() for x in [*case.operands(), *gates(case)][:count]]
    o = whole(*inputs)
    assert torch.allclose(o, inferred, atol=1e-6)
    again = checkpoint(whole, *inputs, use_reentrant=False)
    both = (torch.autograd.grad(y.sum(), inputs) for y in (o, again))
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize(
    "case", [TokenCase(200, 200, (4, 2), 4, 8), TokenCase(90, 90, (8, 1), 8, 6)]
)
def test_autocast_selects_what_its_dtype_selects(case: TokenCase) -> None:
    operands, of_gates = case.operands(), gates(case)
    options: dict[str, Any] = {"keep": case.keep, "block": case.block}
    narrow = [x.bfloat16() for x in operands]
    with torch.autocast("cpu", torch.bfloat16):
        results = (
            nsa_attention(*operands, *of_gates, **options),
            moba_attention(*operands, **options),
        )
    assert torch.equal(results[0], nsa_attention(*narrow, *of_gates, **options))
    assert torch.equal(results[1], moba_attention(*narrow, **options))


@pytest.mark.interpreted
@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 13, 3, 24), (1, 32, 2, 32)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_branches_are_added_up_with_their_gates(count: int, shape: Any, dtype: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = [shape] * count + [shape[:3]] * count
    operands = [torch.randn(size, generator=draw).to(dtype) for size in sizes]
    operands[-1] = operands[-1].float().mT.contiguous().mT  # of another dtype and layout
    pairs = [
        (o.double(), g.double()[..., None])
        for o, g in zip(operands[:count], operands[count:], strict=True)
    ]
    right, do = sum(o * g for o, g in pairs), torch.randn(shape, generator=draw).to(dtype)
    inputs = [moved(x).requires_grad_() for x in operands]
    o = gated_sum(inputs[:count], inputs[count:])
    actual = torch.autograd.grad(o, inputs, moved(do))
    of_branches = [do.double() * g for _, g in pairs]
    wanted = right, *of_branches, *((do.double() * o).sum(-1) for o, _ in pairs)
    bound = 1e-6 if dtype == torch.float32 else 2e-3
    for one, other, like in zip((o, *actual), wanted, (operands[0], *operands), strict=True):
        assert one.dtype == like.dtype
        assert (one.detach().cpu().double() - other).norm() <= bound * other.norm()
    with torch.no_grad():
        assert torch.equal(gated_sum(inputs[:count], inputs[count:]), o)


@pytest.mark.interpreted
@pytest.mark.parametrize("case", USED, ids=str)
def test_moba_attends_to_the_blocks_of_each_head(case: TokenCase) -> None:
    q, k, v = case.operands()
    allowed = best(moba_of(q, k, case.block), case, 0, 1)
    right = softmax_over(q, k, v, allowed, case.head_dim**-0.5)
    o = moba_attention(*map(moved, (q, k, v)), keep=case.keep, block=case.block)
    torch.testing.assert_close(o.cpu().double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("case", USED, ids=str)
def test_a_cpu_attends_in_torch_and_moba_has_gradients(case: TokenCase) -> None:
    inputs = [x.requires_grad_() for x in case.operands()]
    exact = [x.detach().double().requires_grad_() for x in inputs]
    q, k, v = (x.detach() for x in inputs)
    scale = case.head_dim**-0.5
    right = softmax_over(*exact, best(moba_of(q, k, case.block), case, 0, 1), scale)
    o = moba_attention(*inputs, keep=case.keep, block=case.block)
    do = torch.randn(o.shape, generator=torch.Generator().manual_seed(2))
    both = torch.autograd.grad(o, inputs, do), torch.autograd.grad(right, exact, do.double())
    for actual, wanted in zip((o, *both[0]), (right, *both[1]), strict=True):
        torch.testing.assert_close(actual.double(), wanted, atol=1e-5, rtol=1e-5)

    compressed, scores = nsa_of(q, k, v, case.block, scale)
    allowed = best(scores, case, 1, 2).repeat_interleave(q.shape[2] // k.shape[2], 1)
    g_cmp, g_slc, _ = (gate[..., None] for gate in gates(case))
    right = compressed * g_cmp + softmax_over(q, k, v, allowed, scale) * g_slc
    o = nsa_attention(q, k, v, g_cmp[..., 0], g_slc[..., 0], keep=case.keep, block=case.block)
    torch.testing.assert_close(o.double(), right, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("method", ["nsa", "moba"])
def test_methods_of_single_queries_are_the_branches_of_their_functions(method: str) -> None:
    case = USED[0]
    q, k, v = case.operands()
    options: dict[str, Any] = {"keep": max(case.keep, 3), "block": case.block}
    o = select_attention(q, k, v, method=method, causal=True, **options)
    if method == "moba":
        right = moba_attention(q, k, v, **options)
    else:
        zero, one = q.new_zeros(q.shape[:3]), q.new_ones(q.shape[:3])
        right = nsa_attention(q, k, v, zero, one, **options)
    torch.testing.assert_close(o, right)


def test_bad_calls_are_refused_in_one_line() -> None:
    q, k = torch.randn(1, 32, 4, 16), torch.randn(1, 32, 2, 16)
    gate_of = torch.rand(1, 32, 4)
    for call in (
        lambda: moba_attention(q, k, k, keep=0),
        lambda: moba_attention(q, k, k, block=0),
        lambda: moba_attention(q[0], k[0], k[0]),
        lambda: nsa_attention(q, k, k, gate_of, gate_of[..., :2]),
        lambda: nsa_attention(q, k, k, gate_of, gate_of, gate_of, window=0),
        lambda: nsa_attention(q, k, k, gate_of, gate_of, keep=2),
        lambda: nsa_attention(q, k, k, gate_of, gate_of.cfloat()),
        lambda: nsa_attention(q, k, k, gate_of, gate_of.to("meta")),
        lambda: moba_attention(q.to("meta"), k, k),
        lambda: moba_attention(q, k, k, scale=torch.inf),
    ):
        with pytest.raises((Unsupported, FormatError)) as error:
            call()
        assert "\n" not in str(error.value)


LARGE = [  # tokens, heads, key heads, block, keep
    (2000, 32, 8, 64, 16),
    (1500, 64, 4, 64, 16),
    (3000, 8, 2, 512, 3),
    (777, 6, 2, 32, 5),
]


@hopper
@pytest.mark.parametrize("sizes", LARGE)
def test_nsa_and_moba_are_right_on_a_gpu(sizes) -> None:
    s, heads, kv_heads, block, keep = sizes
    case = TokenCase(s, s, (heads, kv_heads), block, keep)
    torch.manual_seed(0)
    q = torch.randn(1, s, heads, 128, **BF16)
    k, v = (torch.randn(1, s, kv_heads, 128, **BF16) for _ in range(2))
    g_cmp, g_slc, g_swa = (torch.rand(1, s, heads, **BF16) for _ in range(3))
    compressed, scores = compress(q, k, v, block, 128**-0.5)
    options: dict[str, Any] = {"block": [1, block], "tokens": [s, s], "causal": True}
    mask = BlockMask.from_scores(scores.cpu(), keep, **OF_NSA, **options)
    inside = torch.ones(s, s, dtype=torch.bool).tril().triu(-99).expand(1, heads, -1, -1)
    operands = [x.cpu() for x in (q, k, v)]
    o_slc = softmax_over(*operands, mask.expand(heads), 128**-0.5)
    o_swa = softmax_over(*operands, inside, 128**-0.5)
    right = sum(
        g.cpu().double()[..., None] * o
        for g, o in ((g_cmp, compressed.cpu().double()), (g_slc, o_slc), (g_swa, o_swa))
    )
    with torch.no_grad():
        o = nsa_attention(q, k, v, g_cmp, g_slc, g_swa, keep=keep, block=block, window=100)
    assert (o.cpu().double() - right).norm() < 1e-2 * right.norm()

    gated = score_blocks(q, k, block).cpu()
    right_scores = moba_of(*operands[:2], block)
    torch.testing.assert_close(
        gated.double()[..., visible_blocks(case)],
        right_scores[..., visible_blocks(case)],
        atol=1e-1,
        rtol=1e-2,
    )
    mask = BlockMask.from_scores(gated, keep, **OF_MOBA, **options)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    o = moba_attention(*inputs, keep=keep, block=block)
    do = torch.randn_like(o)
    right, _, expected = gradients([*operands, do.cpu()], mask)
    for actual, wanted in zip(
        (o, *torch.autograd.grad(o, inputs, do)), (right, *expected), strict=True
    ):
        assert (actual.detach().cpu().double() - wanted).norm() < 1e-2 * wanted.norm()


@hopper
@pytest.mark.parametrize("sizes", [(1100, 32, 8, 64, 8), (700, 32, 2, 32, 5)])
def test_gradients_of_nsa_are_right_on_a_gpu(sizes) -> None:
    s, heads, kv_heads, block, keep = sizes
    torch.manual_seed(0)
    q, do = (torch.randn(1, s, heads, 128, **BF16) for _ in range(2))
    k, v = (torch.randn(1, s, kv_heads, 128, **BF16) for _ in range(2))
    inputs = [q, k, v, *(torch.rand(1, s, heads, **BF16) for _ in range(3))]
    exact = [x.double().requires_grad_() for x in inputs]
    scores = compress(q, k, v, block, 128**-0.5)[1].cpu()
    options: dict[str, Any] = {"block": [1, block], "tokens": [s, s], "causal": True}
    mask = BlockMask.from_scores(scores, keep, **OF_NSA, **options)
    query = torch.arange(s)[:, None]
    complete = (torch.arange(scores.shape[3]) + 1) * block <= query + 1
    window = torch.ones(s, s, dtype=torch.bool).tril().triu(-99)
    allowed = [x.expand(1, heads, -1, -1).cuda() for x in (complete, mask.expand(heads), window)]
    means = [exact[0], *(block_means(x, block) for x in exact[1:3])]
    operands = means, exact[:3], exact[:3]
    branches = [softmax_over(*x, at, 128**-0.5) for x, at in zip(operands, allowed, strict=True)]
    right = sum(g[..., None] * o for g, o in zip(exact[3:], branches, strict=True))
    for x in inputs:
        x.requires_grad_()
    o = nsa_attention(*inputs, keep=keep, block=block, window=100)
    actual = torch.autograd.grad(o, inputs, do)
    wanted = torch.autograd.grad(right, exact, do.double())
    for one, other in zip((o, *actual), (right, *wanted), strict=True):
        assert (one.double() - other).norm() < 1e-2 * other.norm()


@hopper
def test_a_graph_selects_for_each_query_anew_on_a_gpu() -> None:
    q, k, v = (torch.randn(2, 1024, heads, 128, **BF16) for heads in (16, 2, 2))
    g = torch.rand(2, 1024, 16, **BF16)
    with torch.no_grad():
        nsa_attention(q, k, v, g, g, g, keep=8)  # lists the mask of the window, which waits
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            results = nsa_attention(q, k, v, g, g, g, keep=8), moba_attention(q, k, v, block=128)
        for seed in range(3):
            torch.manual_seed(seed)
            for x in (q, k, v):
                x.normal_()
            if seed == 2:
                k.zero_()  # equal scores
            graph.replay()
            again = nsa_attention(q, k, v, g, g, g, keep=8), moba_attention(q, k, v, block=128)
            assert all(map(torch.equal, results, again))
            assert not any(x.isnan().any() for x in results)
