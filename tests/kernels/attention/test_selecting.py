"""Masks that are selected on the device: their kernels, and calls that select other blocks."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench import attention, select_attention
from sparsebench.formats._selection import Selection, select_in_torch
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import Operator
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.attention import (
    attention_selected,
    attention_triton,
    attention_triton_backward,
)
from sparsebench.kernels.attention._call import operator_of
from sparsebench.kernels.attention._selecting import (
    MOST_BLOCKS,
    _means_launch,
    _select_launch,
    means,
    select,
)
from sparsebench.kernels.attention._shared_plans import make_shared_plans, shared_plans_of
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper
from tests.compiling.triton_kernels import complaint_about_launch
from tests.kernels.attention.cases import Case, flat, gradients, moved
from tests.kernels.contract import refusal

SELECTIONS = [  # rows are those of two lists
    Selection(6, (37, 53), (16, 8), True, 3, 1, 1),
    Selection(10, (40, 20), (8, 8), True, 2),  # the first 20 queries see nothing
    Selection(8, (30, 50), (8, 16), False, 4, 2, 1),
    Selection(2, (64, 64), (64, 64), False, 1),
    Selection(4, (32, 1000), (16, 8), True, 40, 3, 4),
    Selection(6, (37, 53), (16, 8), True, 7, 1, 1, mass=0.7),
    Selection(10, (40, 20), (8, 8), True, 2, mass=0.5),
    Selection(4, (32, 1000), (16, 8), False, 125, 0, 4, mass=0.9),
]


def scores_of(selection: Selection, seed: int = 0) -> Tensor:
    """Return scores with equal ones, infinite ones and NaN; a row of each alone."""
    draw = torch.Generator().manual_seed(seed)
    size = selection.rows, selection.grid[1]
    scores = torch.randint(-3, 4, size, generator=draw).float()
    kinds = torch.rand(size, generator=draw)
    for value, most in ((math.nan, 0.1), (-math.inf, 0.2), (math.inf, 0.25), (-0.0, 0.3)):
        scores[(kinds < most) & (kinds >= most - 0.1)] = value
    scores[0], scores[-1] = math.nan, 1.0
    return scores


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_a_row_selects_in_registers_what_its_definition_selects(selection: Selection) -> None:
    scores = scores_of(selection)
    wide = torch.cat((scores[:, :1], scores, scores), 1)[:, 1 : 1 + scores.shape[1]]
    of = selection.sizes, selection.mass
    for given in (scores, scores.half(), wide):
        for array, right in zip(select(given, *of), select_in_torch(given, *of), strict=True):
            assert torch.equal(array, right)
    flat = torch.ones_like(scores)  # equal weights, that add up exactly
    assert all(map(torch.equal, select(flat, *of), select_in_torch(flat, *of)))


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


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_what_selects(capability, monkeypatch) -> None:
    programs: list[BoundKernel] = []
    monkeypatch.setattr(Template, "__init__", lambda self, bound, *_: programs.extend(bound))
    mask = selected(Case((4096, 4096), 64, (8, 8), causal=True), 0)
    make_shared_plans(mask, in_triton)
    sizes, device = Selection(64, (4096, 4096), (64, 64), True, 7, 1, 1).sizes, torch.device("cpu")
    for mass in (1.0, 0.9):
        _select_launch.__wrapped__((*sizes,), mass, 65, torch.float32, device)
    for d, heads in ((128, 4), (96, 3)):
        shape = (2, 1000, heads, d), (1000 * heads * d, heads * d, d, 1), torch.bfloat16
        _means_launch.__wrapped__(*shape, device, 64, 1)
    assert len(programs) == 6
    for program in (*programs, programs[1].before):
        assert program is not None
        complaint = complaint_about_launch(program, capability)
        assert complaint is None, (program.kernel.__name__, complaint)


def in_triton(mask: BlockMask) -> Operator:
    return operator_of(mask, (attention_triton.KERNEL, attention_triton_backward.KERNEL))


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selection", SELECTIONS)
def test_shared_plans_have_the_lists_of_the_mask_that_was_loaded_last(selection: Selection) -> None:
    shape = selection.rows, selection.grid[1]
    lists = selection.rows // selection.grid[0]
    for seed in range(2):
        arrays = select_in_torch(scores_of(selection, seed), selection.sizes)
        fields: Any = shape, *selection[1:3], 1, lists, selection.causal, *arrays
        mask = BlockMask(*fields, keep=selection.keep)
        mask = replace(mask, columns=moved(mask.columns), offsets=moved(mask.offsets))
        plans = shared_plans_of(mask, lambda first: first)  # type: ignore[arg-type, return-value]
        first: Any = plans.operator
        first.columns.fill_(7)
        plans.load(mask.columns, transposed=False)
        assert torch.equal(first.columns, mask.columns)
        plans.load(mask.columns, transposed=True)
        assert torch.equal(first.columns, mask.columns)
        for name, array in mask.transposed._asdict().items():
            if array is not None:
                loaded = getattr(first.transposed, name)[: len(array)]
                assert torch.equal(loaded, array), name
        plans.load(torch.full_like(mask.columns, 1 << 30), transposed=True)  # outside of the mask
        assert not BlockMask.present.fget(first).any()  # type: ignore[attr-defined]
        assert not first.transposed.offsets.any()


CASES = [
    Case((60, 90), 32, (4, 2), batch=2, lists=2, causal=True, head_dim=32),
    Case((45, 70), (16, 32), (2, 2), lists=1, head_dim=32, dtype="fp32"),
]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
@pytest.mark.parametrize("case", CASES)
def test_a_plan_computes_every_mask_of_its_sizes(case: Case, op: Any) -> None:
    plans, call, inputs = (
        make_shared_plans(moved(selected(case, 0)), in_triton),
        case.call(op),
        case.operands(),
    )
    backward = op == "attention_backward"
    engine = plans.operator.engines[backward]
    product = next(engine.candidates(plans.operator.weight(call), call)).plan()
    for seed in range(2):
        mask = selected(case, seed)
        o, lse, gradient = gradients(inputs, mask)
        q, k, v, do = (moved(flat(x)) for x in inputs)
        rest = moved(flat(o.to(q.dtype))), moved(lse.flatten(0, 1).float()), do
        plans.load(moved(mask.columns), transposed=backward)
        results: Any = product.run(q, k, v, *(rest if backward else ()))
        for actual, right in zip(results, gradient if backward else (o,), strict=False):
            error = (actual.double().cpu() - flat(right).reshape(actual.shape)).norm()
            assert error < (8e-3 if case.dtype == "fp16" else 2e-5) * right.norm()


def selected(case: Case, seed: int) -> BlockMask:
    """Return a mask with an empty row, and one with fewer blocks than places."""
    tokens, block = case.tokens, case.block if isinstance(case.block, tuple) else (case.block,) * 2
    grid = [-(-size // side) for size, side in zip(tokens, block, strict=True)]
    scores = torch.randn(
        case.batch, case.lists, *grid, generator=torch.Generator().manual_seed(seed)
    )
    scores[:, :, 0] = -math.inf
    scores[:, :, 1, 1:] = math.nan
    return BlockMask.from_scores(scores, 2, tokens=[*tokens], block=[*block], causal=case.causal)


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selects", ["pooled", "scores", "lists"])
@pytest.mark.parametrize("lists", [1, 2])
def test_a_launch_that_selects_attends_to_the_mask(selects: Any, lists: int) -> None:
    case = Case((60, 90), 32, (4, 2), batch=2, lists=lists, causal=True, head_dim=32)
    mask, inputs = case.mask(), case.operands()
    fields = {"m": 60, "heads": 4, "kv_heads": 2, "head_dim": 32, "scale": None, "dtype": "fp16"}
    activations = dict(zip("qkv", map(flat, inputs), strict=False))
    weights: Any = {"mask": moved(mask)}
    operands = Operands(Problem("attention", fields), weights, activations, torch.add)
    launch = attention_selected.prepare(operands, selects=selects)
    for x in activations.values():
        x.copy_(x.flip(0))  # drawn anew
    sizes = [x.shape[2:] for x in inputs]
    again = [x.view(2, -1, *size) for x, size in zip(activations.values(), sizes, strict=False)]
    o, *_ = gradients([*again, inputs[3]], mask)
    output: Any = launch.run()
    assert (output.double() - flat(o)).norm() < 4e-3 * o.norm()
    assert launch.choice["selects"] == selects


BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}
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
