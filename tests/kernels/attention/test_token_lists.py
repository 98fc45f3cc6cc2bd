"""Lists of single queries: their gathering, what NSA and MoBA select, and attention in fp64."""

import math
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from sparsebench import moba_attention, nsa_attention, select_attention
from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._selection import Selection
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.attention import (
    _gated_sum,
    _gathering,
    _moba,
    _nsa,
    attention_gathered,
    attention_gathered_backward,
    attention_selected,
    attention_triton,
)
from sparsebench.kernels.attention._call import ListedMask
from sparsebench.kernels.attention._gated_sum import gated_sum
from sparsebench.kernels.attention._gathering import CHUNK, Gathered, bound_gathering
from sparsebench.kernels.attention._moba import FORCED as OF_MOBA
from sparsebench.kernels.attention._moba import score_blocks
from sparsebench.kernels.attention._nsa import FORCED as OF_NSA
from sparsebench.kernels.attention._nsa import compress
from sparsebench.kernels.attention._selecting import _select_launch
from sparsebench.kernels.nn import token_attention
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper
from tests.compiling.triton_kernels import complaint_about_launch
from tests.kernels.attention.cases import (
    Case,
    flat,
    gradients,
    moved,
    random_mask,
    with_more_behind,
    with_places,
)
from tests.tools.marks import crossed

MASKS: list[dict[str, Any]] = [
    {"tokens": (70, 200), "block": (1, 16), "lists": 2, "causal": True},
    {"tokens": (33, 64), "block": (1, 64), "batch": 2},
    {"tokens": (2100, 90), "block": (1, 1), "density": 0.1},  # more words and blocks than a step
    {"tokens": (50, 100), "block": (1, 16), "density": 1},
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("options", "least"), [*zip(MASKS, (16, 20, 3, 33), strict=True)], ids=str)
def test_the_queries_of_a_block_are_gathered_as_in_torch(
    options: dict[str, Any], least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_gathering, "STEP", 32)
    right_mask = random_mask(**options)
    wide = with_more_behind(with_places(right_mask))
    places = int(wide.counts.max())
    right = Gathered.of(right_mask, places, least)
    gathered = Gathered(*(torch.full_like(x, -7) for x in right))
    mask = moved(wide)
    for program in bound_gathering(mask, places, Gathered(*map(moved, gathered)), least):
        program()
    for name in ("starts", "bases", "counts", "words", "commons"):
        assert torch.equal(getattr(gathered, name), getattr(right, name)), name
    entries, starts, ends = gathered.entries, gathered.starts, gathered.bases[:, -1]
    chunks, blocks = gathered.words.shape[1:]
    tokens, offsets = mask.q_blocks, right_mask.offsets.tolist()
    listed = [set(right_mask.indices[a:b].tolist()) for a, b in pairwise(offsets)]
    for cell in product(range(len(starts)), range(chunks)):
        first = cell[0] * tokens + cell[1] * CHUNK
        rows = listed[first : min(first + CHUNK, (cell[0] + 1) * tokens)]
        bits = [sum((block in row) << i for i, row in enumerate(rows)) for block in range(blocks)]
        assert [bit % (1 << CHUNK) for bit in gathered.words[cell].tolist()] == bits
        common = [block for block in range(blocks) if bits[block].bit_count() >= least]
        at = cell[0] * chunks + cell[1]
        assert gathered.common[at, : gathered.commons[at]].tolist() == common
        for row in rows:
            row -= {*common}
    assert gathered.counts.tolist() == [len(row) for row in listed]
    of_rows = [[] for _ in listed]
    for list_, block in product(range(len(starts)), range(blocks)):
        first = int(starts[list_, block])
        of_block = entries[first : first + int(ends[list_, block])]
        assert (of_block.diff() > 0).all()
        for entry in of_block.tolist():
            of_rows[entry // places].append((entry % places, block))
    assert of_rows == [[*enumerate(sorted(row))] for row in listed]


class TokenCase(NamedTuple):
    """Sizes of a selection."""

    queries: int
    keys: int
    heads: tuple[int, int]
    block: int
    keep: int
    head_dim: int = 32
    dtype: torch.dtype = torch.float32
    batch: int = 1

    def operands(self) -> list[Tensor]:
        """Return q, k and v by head, the same each time."""
        draw = torch.Generator().manual_seed(0)
        queries, keys = zip((self.queries, self.keys), self.heads, strict=True)
        sizes = [(self.batch, *size, self.head_dim) for size in (queries, keys, keys)]
        return [torch.randn(size, generator=draw).to(self.dtype) for size in sizes]


CASES = [
    TokenCase(70, 70, (4, 2), 16, 3),
    TokenCase(40, 130, (16, 1), 8, 5, batch=2, dtype=torch.float16),
    TokenCase(50, 50, (3, 1), 16, 2, head_dim=48),
    TokenCase(90, 60, (2, 2), 8, 4),  # the first 30 queries see nothing
]


def pooled(x: Tensor, block: int) -> Tensor:
    """Return the mean of each block of tokens, of those that there are [batch, n, heads, D]."""
    return torch.stack([part.mean(1) for part in x.double().split(block, 1)], 1).to(x.dtype)


def nsa_of(q: Tensor, k: Tensor, v: Tensor, block: int, scale: float) -> tuple[Tensor, Tensor]:
    """Return O of the compressed branch and the scores in fp64, one query at a time."""
    keys, values = (pooled(x, block).double() for x in (k, v))
    (batch, s, heads, _), groups = q.shape, k.shape[2]
    o = q.new_zeros(q.shape, dtype=torch.float64)
    scores = o.new_zeros(batch, groups, s, keys.shape[1])
    for b, t, h in [(b, t, h) for b in range(batch) for t in range(s) for h in range(heads)]:
        group, position = h * groups // heads, t + k.shape[1] - s
        complete = max(position + 1, 0) // block
        p = (keys[b, :complete, group] @ q[b, t, h].double() * scale).softmax(0)
        o[b, t, h] = p @ values[b, :complete, group]
        scores[b, group, t, :complete] += p
    return o, scores


def moba_of(q: Tensor, k: Tensor, block: int) -> Tensor:
    """Return the scores in fp64."""
    keys = pooled(k, block).double().repeat_interleave(q.shape[2] // k.shape[2], 2)
    return torch.einsum("bshd,bnhd->bhsn", q.double(), keys)


def seen(case: TokenCase) -> Tensor:
    """Return which blocks each query sees, bool [queries, n]."""
    first = torch.arange(0, case.keys, case.block)
    return first <= (torch.arange(case.queries) + case.keys - case.queries)[:, None]


@pytest.mark.interpreted
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_nsa_scores_blocks_by_its_compressed_branch(case: TokenCase, biased: bool) -> None:
    q, k, v = case.operands()
    o, right = nsa_of(q, k, v, case.block, 0.3)
    bias = torch.randn(right.shape) if biased else None
    actual, scores = compress(
        *map(moved, (q, k, v)), case.block, 0.3, None if bias is None else moved(bias)
    )
    close = (
        {"atol": 2e-3, "rtol": 2e-3} if q.dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-5}
    )
    torch.testing.assert_close(actual.cpu().double(), o, **close)
    right = right if bias is None else right + bias
    torch.testing.assert_close(
        scores.cpu().double()[..., seen(case)], right[..., seen(case)], **close
    )


@pytest.mark.interpreted
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_moba_scores_blocks_by_their_means(case: TokenCase, biased: bool) -> None:
    q, k, _ = case.operands()
    right = moba_of(q, k, case.block)
    bias = torch.randn(right.shape) if biased else None
    scores = score_blocks(*map(moved, (q, k)), case.block, None if bias is None else moved(bias))
    close = (
        {"atol": 1e-2, "rtol": 2e-3} if q.dtype == torch.float16 else {"atol": 1e-5, "rtol": 1e-5}
    )
    right = right if bias is None else right + bias
    torch.testing.assert_close(
        scores.cpu().double()[..., seen(case)], right[..., seen(case)], **close
    )


def softmax_over(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, scale: float) -> Tensor:
    """Return attention in fp64 over elements [batch, H, S_q, S_kv]; 0 for a query without any."""
    group = q.shape[2] // k.shape[2]
    k, v = (x.double().repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.double(), k) * scale
    p = scores.masked_fill(~allowed, -math.inf).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", p.masked_fill(~allowed.any(-1, True), 0), v)


def best(scores: Tensor, case: TokenCase, first: int, last: int) -> Tensor:
    """Return which keys the selected blocks have, bool like scores [batch, lists, S, keys].

    The definition, one row at a time: forced blocks, then the highest scores, lower blocks first.
    """
    allowed = torch.zeros(*scores.shape[:3], case.keys, dtype=torch.bool)
    visible = seen(case).sum(1).tolist()
    for row in [
        (b, h, t)
        for b in range(case.batch)
        for h in range(scores.shape[1])
        for t in range(case.queries)
    ]:
        t, count = row[2], visible[row[2]]
        forced = {j for j in range(count) if j < first or j >= count - last}
        rest = sorted(set(range(count)) - forced, key=lambda j: (-float(scores[row][j]), j))
        for j in [*forced, *rest[: case.keep - len(forced)]]:
            allowed[row][j * case.block : (j + 1) * case.block] = True
        allowed[row][max(t + case.keys - case.queries + 1, 0) :] = False
    return allowed


def gates(case: TokenCase) -> list[Tensor]:
    draw = torch.Generator().manual_seed(1)
    size = case.batch, case.queries, case.heads[0]
    return [torch.rand(size, generator=draw).to(case.dtype) for _ in range(3)]


USED = [
    TokenCase(70, 70, (4, 2), 16, 4),
    TokenCase(60, 60, (4, 1), 8, 5, batch=2),
    TokenCase(40, 130, (2, 2), 16, 20),
]
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


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selects", ["nsa", "moba", "scores", "lists"])
def test_a_launch_that_selects_for_each_query_attends_to_the_mask(selects: Any) -> None:
    lists = {"nsa": 2, "moba": 4}.get(selects, 1)
    case = Case((70, 70), (1, 16), (4, 2), batch=2, lists=lists, causal=True, head_dim=32)
    mask, inputs = case.mask(), case.operands()
    fields = {"m": 70, "heads": 4, "kv_heads": 2, "head_dim": 32, "scale": None, "dtype": "fp16"}
    problem = Problem("attention", fields | {"block": [1, 16]})
    activations = dict(zip("qkv", map(flat, inputs), strict=False))
    weights: Any = {"mask": moved(mask)}
    launch = attention_selected.prepare(
        Operands(problem, weights, activations, torch.add), selects=selects
    )
    for x in activations.values():
        x.copy_(x.flip(0))  # drawn anew
    again = [x.view(2, 70, -1, 32).double() for x in activations.values()]
    right = softmax_over(*again, mask.expand(4), 32**-0.5)
    output: Any = launch.run()
    assert (output.double() - flat(right)).norm() < 4e-3 * right.norm()


def test_ways_to_select_need_their_lists() -> None:
    for selects, lists, block, causal, reason in (
        ("nsa", 4, 1, True, "expected a list for each of 2 heads or fewer, found 4"),
        ("moba", 4, 16, True, "expected 1 queries"),
        ("nsa", 2, 1, False, "expected a causal mask"),
    ):
        case = Case((70, 70), (block, 16), (4, 2), lists=lists, causal=causal, head_dim=32)
        fields = {"m": 70, "heads": 4, "kv_heads": 2, "head_dim": 32, "scale": None}
        problem = Problem("attention", fields | {"block": [block, 16], "dtype": "fp16"})
        activations = dict(zip("qkv", map(flat, case.operands()), strict=False))
        operands = Operands(problem, {"mask": case.mask()}, activations, torch.add)
        with pytest.raises(Unsupported, match=reason):
            attention_selected.prepare(operands, selects=selects)


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


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_what_serves_lists_of_queries(capability, monkeypatch) -> None:
    programs: list[BoundKernel] = []
    monkeypatch.setattr(Template, "__init__", lambda self, bound, *_: programs.extend(bound))
    path = "tma" if capability >= 90 else "pointers"
    monkeypatch.setattr(attention_triton, "choose_path", lambda reason, device: path)
    for block, lists in (((1, 64), 8), ((1, 512), 32)):
        case = Case((512, 512), block, (32, 8), lists=lists, causal=True, dtype="bf16", places=True)
        w = ListedMask(case.mask())
        for engine in (attention_gathered, attention_gathered_backward):
            call = case.call(engine.KERNEL.op)
            for config in engine.choices(w, call):
                engine.plan(w, call, config)
    cpu, bf16 = torch.device("cpu"), torch.bfloat16
    for heads, groups, d in ((64, 4, 128), (32, 8, 128), (12, 4, 96)):
        sizes = (1, 512, heads, d), (1, groups, 8, d), bf16, cpu, 64, 512
        _nsa._launch.__wrapped__(*sizes, 0.1, False)
        _moba._launch.__wrapped__(*sizes, True)
    for gate, branches in ((bf16, 2), (torch.float32, 3)):
        _gated_sum._launch.__wrapped__(
            (1, 512, 32, 96), (bf16,) * branches + (gate,) * branches, cpu
        )
    for side in (16, 512):  # several rows for each program, and one
        selection = Selection(1 << 16, (16384, 16384), (1, side), True, 12, 1, 2)
        kind = selection.grid[1], torch.float32, cpu
        _select_launch.__wrapped__((*selection.sizes,), 1.0, *kind)
    kinds = {program.kernel.__name__ for program in programs}
    assert kinds == {
        "_mark",
        "_accumulate",
        "_begin",
        "_place",
        "_attend",
        "_merge",
        "_walk",
        "_select_rows",
        "_score",
        "_add",
        "_deltas",
        "_differentiate",
        "_merge_gradients",
        "_dkv",
    }
    for program in programs:
        complaint = complaint_about_launch(program, capability)
        assert complaint is None or "spill" in complaint, (program.kernel.__name__, complaint)


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


BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}
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
        gated.double()[..., seen(case)], right_scores[..., seen(case)], atol=1e-1, rtol=1e-2
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
    means = [exact[0], *(pooled(x, block) for x in exact[1:3])]
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
