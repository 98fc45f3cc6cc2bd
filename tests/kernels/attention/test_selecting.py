"""Masks that are selected on the device: their kernels, and calls that select other blocks."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench import attention, select_attention
from sparsebench.formats._selection import Selection, select_in_torch
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.triton import Template
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.attention import (
    _selecting,
    attention_selected,
    attention_selected_backward,
)
from sparsebench.kernels.attention._selecting import MOST_BLOCKS, _select_launch, means, select
from sparsebench.kernels.attention._shared_plans import SharedPlans
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper
from tests.kernels.attention.cases import (
    BF16,
    SELECTIONS,
    Case,
    assert_attends,
    check_against_fp64,
    flat,
    gradients,
    launch_operands,
    moved,
    scores_of,
    selection_mask,
    sides_of,
    with_places,
)
from tests.kernels.contract import refusal


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("many", [1 << 16, 1], ids=["a row", "several"])
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_row_selects_in_registers_what_its_definition_selects(
    selection: Selection, many: int, monkeypatch
) -> None:
    monkeypatch.setattr(_selecting, "MANY_ROWS", many)
    _select_launch.cache_clear()
    scores = scores_of(selection)
    wide = torch.cat((scores[:, :1], scores, scores), 1)[:, 1 : 1 + scores.shape[1]]
    of = selection.sizes, selection.mass
    for given in (scores, scores.half(), wide):
        for array, right in zip(select(given, *of), select_in_torch(given, *of), strict=True):
            assert torch.equal(array, right)
    flat = torch.ones_like(scores)  # equal weights, that add up exactly
    assert all(map(torch.equal, select(flat, *of), select_in_torch(flat, *of)))


LARGEST = torch.finfo(torch.float32).max
EXTREMES = [  # scores of a row
    *([math.nan], [math.inf], [-math.inf], [LARGEST, -LARGEST], [LARGEST, math.inf]),
    *([-LARGEST, -math.inf], [1e-45, -1e-45, 3e-45, 0.0, -0.0], [1e-30, 1e30, 1.0, -1e30]),
]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("mass", [1.0, 1e-9, 0.5])
@pytest.mark.parametrize(("keep", "first", "last"), [(1, 0, 0), (4, 1, 1), (7, 4, 3), (15, 0, 0)])
def test_the_largest_and_the_smallest_scores_have_an_order(
    keep: int, first: int, last: int, mass: float, monkeypatch
) -> None:
    monkeypatch.setattr(_selecting, "MANY_ROWS", 1)  # rows of a program end in other rounds
    _select_launch.cache_clear()
    draw = torch.Generator().manual_seed(0)
    picks = torch.randint(0, 60, (len(EXTREMES), 15), generator=draw)
    pairs = zip(EXTREMES, picks.tolist(), strict=True)
    scores = torch.tensor([[values[n % len(values)] for n in row] for values, row in pairs])
    selection = Selection(len(scores), (16, 240), (16, 16), False, keep, first, last, mass)
    for given in (scores, scores.bfloat16()):
        pair = (each(given, selection.sizes, mass) for each in (select, select_in_torch))
        assert all(map(torch.equal, *pair))


def test_a_row_of_too_many_blocks_is_refused() -> None:
    scores = torch.zeros(1, MOST_BLOCKS + 1)
    sizes = Selection(1, (16, scores.shape[1] * 16), (16, 16), False, 4).sizes
    assert f"found {MOST_BLOCKS + 1}" in refusal(lambda: select(scores, sizes))


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("sizes", [(2, 37, 6, 48), (1, 16, 4, 64), (3, 5, 1, 32)])
def test_means_are_those_of_the_tokens_and_heads_that_there_are(sizes) -> None:
    x = torch.randn(*sizes, generator=torch.Generator().manual_seed(0))
    groups = max(1, sizes[2] // 2)
    right = [
        x[:, at : at + 16].unflatten(2, (groups, -1)).mean((1, 3)) for at in range(0, sizes[1], 16)
    ]
    wide = torch.cat((x, x), -1)[..., : sizes[3]]
    for given in (x, wide, x.half().float()):
        torch.testing.assert_close(
            means(given, 16, groups), torch.stack(right, 2), atol=2e-3, rtol=1e-3
        )


@pytest.mark.interpreted(also_compiled=False)
def test_what_pools_and_selects_gets_addresses_at_multiples_of_16(monkeypatch) -> None:
    addresses: list[int] = []

    def call(template: Template, x: Tensor) -> list[Tensor]:
        addresses.append(x.data_ptr() % 16)
        return run(template, x)

    run = Template.__call__
    monkeypatch.setattr(Template, "__call__", call)
    x, scores = torch.randn(1, 37, 4, 34)[..., 1:33], torch.randn(8, 20)[:, 1:5]
    torch.testing.assert_close(means(x, 16, 2), means(x.clone(), 16, 2))
    sizes = Selection(8, (64, 64), (16, 16), False, 2).sizes
    assert all(map(torch.equal, select(scores, sizes), select_in_torch(scores, sizes)))
    assert addresses == [0] * 3


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selects", ["pooled", "scores", "lists"])
@pytest.mark.parametrize("lists", [1, 2])
def test_a_launch_that_selects_attends_to_the_mask(selects: Any, lists: int) -> None:
    case = Case((60, 90), 32, (4, 2), batch=2, lists=lists, causal=True, head_dim=32)
    operands = launch_operands(case)
    launch = attention_selected.prepare(operands, selects=selects)
    assert_attends(launch, operands, case)
    assert launch.choice["selects"] == selects


def check_gradients_of_other_columns(case: Case, monkeypatch, error: float) -> None:
    """Check a launch that lists its columns, after other columns took their place.

    On a GPU, a captured graph is replayed.
    """
    sources: list[Tensor] = []
    load = SharedPlans.load

    def record_source(self: SharedPlans, source: Tensor, **options: Any) -> None:
        sources.append(source)
        load(self, source, **options)

    monkeypatch.setattr(SharedPlans, "load", record_source)
    mask, inputs = case.mask(), case.operands()
    sizes = {"m": case.tokens[0], "heads": case.heads[0], "kv_heads": case.heads[1]}
    sizes |= {"block": [*sides_of(case.block)], "head_dim": case.head_dim}
    problem = Problem("attention_backward", {**sizes, "scale": None, "dtype": case.dtype})
    q, k, v, do = (moved(flat(x)) for x in inputs)
    lse = moved(torch.zeros(case.batch * case.heads[0], case.tokens[0]))
    activations = {"q": q, "k": k, "v": v, "o": torch.zeros_like(q), "lse": lse, "do": do}
    weights: Any = {"mask": moved(mask)}
    launch = attention_selected_backward.prepare(Operands(problem, weights, activations, torch.add))
    output: Any = launch.run()
    graph = torch.cuda.CUDAGraph() if output.is_cuda else None
    if graph is not None:
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            output = launch.run()
    keep = int(mask.counts.max())
    for other in (
        with_places(mask, keep),
        *(selection_mask(case, seed, keep=keep) for seed in range(2)),
    ):
        o, lse, gradient = gradients(inputs, other)
        sources[-1].copy_(other.columns)
        activations["o"].copy_(flat(o))
        activations["lse"].copy_(lse.flatten(0, 1))
        output.fill_(torch.nan)
        graph.replay() if graph is not None else launch.run()
        right = torch.cat([x.reshape(-1, case.head_dim) for x in gradient])
        assert (output.double().cpu() - right).norm() < error * right.norm()


def test_a_mask_with_bits_has_no_selection() -> None:
    mask = Case((64, 64), 32, (2, 2), bits=True).mask()
    assert "found bits" in refusal(lambda: attention_selected.selection_of(mask, 1))


GRADIENTS = [
    Case((60, 90), 32, (4, 2), batch=2, lists=2, causal=True, head_dim=32),
    Case((45, 70), (16, 32), (2, 2), head_dim=32, dtype="fp32"),
    Case((37, 37), (1, 16), (4, 2), lists=2, causal=True, head_dim=32, dtype="fp32"),
]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("case", GRADIENTS)
def test_a_launch_has_the_gradients_of_the_columns_that_it_lists(case: Case, monkeypatch) -> None:
    error = 8e-3 if case.dtype == "fp16" else 2e-5
    check_gradients_of_other_columns(case, monkeypatch, error)


ON_A_GPU = [
    Case((1000, 1000), 128, (8, 2), batch=2, lists=2, causal=True, dtype="bf16"),
    Case((1000, 1000), 64, (8, 2), lists=2, causal=True, dtype="bf16"),
    Case((500, 515), 64, (6, 2), lists=2, head_dim=96, dtype="fp16"),  # in Triton
    Case((300, 300), (1, 64), (8, 2), lists=2, causal=True, dtype="bf16"),  # gathered
]


@hopper
@pytest.mark.parametrize("case", ON_A_GPU)
def test_a_graph_has_the_gradients_of_other_columns_in_each_replay_on_a_gpu(
    case: Case, monkeypatch
) -> None:
    check_gradients_of_other_columns(case, monkeypatch, 1e-2)


SHAPES = [  # tokens, heads, key heads, D, block, keep, causal
    (1000, 8, 2, 128, 128, 3, True),
    (1000, 4, 4, 64, 64, 5, False),
    (515, 6, 2, 96, 64, 4, True),  # in Triton
]


@hopper
@pytest.mark.parametrize("shape", SHAPES)
def test_each_call_selects_and_attends_to_its_own_blocks_on_a_gpu(shape) -> None:
    s, heads, kv_heads, d, block, keep, causal = shape
    for seed in range(3):
        torch.manual_seed(seed)
        q, do = (torch.randn(2, s, heads, d, **BF16) for _ in range(2))
        k, v = (torch.randn(2, s, kv_heads, d, **BF16) for _ in range(2))
        for x in (q, k, v):
            x.requires_grad_()
        o = select_attention(q, k, v, keep=keep, block=block, causal=causal)
        scores = means(q.detach(), block, kv_heads) @ means(k.detach(), block, kv_heads).mT
        options: Any = {"block": block, "tokens": [s, s], "causal": causal}
        mask = BlockMask.from_scores(scores.cpu(), keep, first=1, last=1, **options)
        right, _, gradient = gradients([x.detach().cpu() for x in (q, k, v, do)], mask)
        actual = torch.autograd.grad(o, (q, k, v), do)
        for x, y in zip((o, *actual), (right, *gradient), strict=True):
            assert (x.detach().cpu().double() - y).norm() < 1e-2 * y.norm()


@hopper
def test_a_graph_selects_anew_in_each_replay_on_a_gpu() -> None:
    x: Any = [torch.randn(1, 1024, heads, 128, **BF16) for heads in (8, 2, 2)]
    graph, backward = torch.cuda.CUDAGraph(), [t.clone().requires_grad_() for t in x]
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        o = select_attention(*x, keep=3, block=64, causal=True)
        both = select_attention(*backward, keep=3, block=64, causal=True)
        gradient = torch.autograd.grad(both, backward, both.detach())
    for seed in range(3):
        torch.manual_seed(seed)
        for t, u in zip(x, backward, strict=True):
            t.normal_()
            u.data.copy_(t)
        graph.replay()
        again = [t.clone().requires_grad_() for t in x]
        right = select_attention(*again, keep=3, block=64, causal=True)
        assert torch.equal(o, right)
        expected = torch.autograd.grad(right, again, right.detach())
        assert all(map(torch.equal, gradient, expected))
    mask = BlockMask.from_scores(torch.rand(1, 2, 16, 16, device="cuda"), 3, block=64)
    o = attention(*x, mask)
    assert torch.equal(o, attention(*x, mask.compact()))


RAGGED = [  # queries, keys, heads, key heads, D, block, causal
    (1000, 1000, 8, 2, 128, 128, True),
    (900, 2300, 4, 2, 64, 64, False),
    (500, 500, 6, 2, 96, 64, True),  # in Triton
]


@hopper
@pytest.mark.parametrize("shape", RAGGED)
def test_rows_have_other_numbers_of_blocks_in_each_replay_on_a_gpu(shape) -> None:
    s_q, s_kv, heads, kv_heads, d, block, causal = shape
    q, do = (torch.randn(2, s_q, heads, d, **BF16) for _ in range(2))
    k, v = (torch.randn(2, s_kv, kv_heads, d, **BF16) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    grid = 2, kv_heads, -(-s_q // block), -(-s_kv // block)
    scores, graph = torch.zeros(grid, device="cuda"), torch.cuda.CUDAGraph()
    options: dict[str, Any] = {"block": block, "tokens": [s_q, s_kv], "causal": causal}
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        mask = BlockMask.from_scores(scores, mass=0.8, **options)
        o = attention(*inputs, mask)
        results = o, *torch.autograd.grad(o, inputs, do)
    for seed in range(4):
        torch.manual_seed(seed)
        scores.normal_().mul_(torch.rand(grid[:3], device="cuda")[..., None] * 9)
        scores[torch.rand(grid[:3], device="cuda") < 0.3] = -math.inf  # rows without a block
        scores[torch.rand(grid[:3], device="cuda") < 0.2] = 0.0  # nearly all blocks
        graph.replay()
        assert 0 < mask.present.sum() < len(mask.columns)
        check_against_fp64([*inputs, do], mask, results)
    scores.fill_(-math.inf)
    graph.replay()
    assert not any(x.any() for x in results)
