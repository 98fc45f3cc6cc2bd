"""Masks that are selected on the device: their kernels, and calls that select other blocks."""

import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench import attention, select_attention
from sparsebench.errors import Unsupported
from sparsebench.formats._selection import Selection, select_in_torch
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import Operator
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.attention import (
    _selecting,
    _shared_plans,
    attention_selected,
    attention_selected_backward,
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
from sparsebench.kernels.attention._shared_plans import (
    SharedPlans,
    Sizes,
    make_shared_plans,
    shared_plans_of,
)
from sparsebench.kernels.nn.attention import attention_of_elements
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper
from tests.compiling.triton_kernels import complaint_about_launch
from tests.kernels.attention.cases import Case, flat, gradients, moved, sides_of, with_places
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


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_what_selects(capability, monkeypatch) -> None:
    programs: list[BoundKernel] = []
    monkeypatch.setattr(Template, "__init__", lambda self, bound, *_: programs.extend(bound))
    mask = selected(Case((4096, 4096), 64, (8, 8), causal=True), 0)
    for has_bits in (False, True):
        make_shared_plans(Sizes.of(mask)._replace(has_bits=has_bits), in_triton)
    for queries, dtype in ((1000, torch.bool), (1, torch.float16)):
        elements = torch.empty(2, 1, queries, 1000, dtype=dtype)
        make_shared_plans(Sizes.of_elements(elements, (64, 64)), in_triton)
    sizes, device = Selection(64, (4096, 4096), (64, 64), True, 7, 1, 1).sizes, torch.device("cpu")
    for mass in (1.0, 0.9):
        _select_launch.__wrapped__((*sizes,), mass, 65, torch.float32, device)
    for d, heads in ((128, 4), (96, 3)):
        shape = (2, 1000, heads, d), (1000 * heads * d, heads * d, d, 1), torch.bfloat16
        _means_launch.__wrapped__(*shape, device, 64, 1)
    assert len(programs) == 18
    for program in (*programs, *(one.before for one in programs if one.before)):
        complaint = complaint_about_launch(program, capability)
        assert complaint is None, (program.kernel.__name__, complaint)


LISTED = [  # elements, block: every kind of block, one list for all rows of a mask, views
    ((2, 2, 37, 53), 16, torch.bool),
    ((1, 3, 40, 64), 8, torch.float32),
    ((2, 1, 1, 100), 16, torch.float16),
    ((2, 1, 30, 45), 12, torch.bool),
]


def elements_of(shape: tuple[int, ...], block: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Return elements with full, partial and absent blocks, and a row of blocks without any."""
    draw = torch.Generator().manual_seed(seed)
    grid = [*shape[:2], *(-(-size // block) for size in shape[2:])]
    kinds = torch.randint(0, 3, grid, generator=draw)
    kinds[:, :, -1] = 0
    kinds = kinds.repeat_interleave(block, 2).repeat_interleave(block, 3)
    kinds = kinds[:, :, : shape[2], : shape[3]]
    allowed = (kinds == 2) | ((kinds == 1) & (torch.rand(shape, generator=draw) < 0.5))
    if dtype == torch.bool:
        return allowed
    return torch.zeros(shape, dtype=dtype).masked_fill(~allowed, -1e4)


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize(("shape", "block", "dtype"), LISTED)
def test_plans_of_elements_have_the_lists_of_those_that_were_loaded_last(
    shape, block: int, dtype
) -> None:
    for seed in range(2):
        elements = elements_of(shape, block, dtype, seed)
        wide = torch.zeros(*shape[:3], 2 * shape[3], dtype=dtype)[..., : shape[3]]
        expanded = wide.copy_(elements)[:, :1].expand(shape)
        for x in (elements, expanded):
            sizes = Sizes.of_elements(x, (block, block))
            plans = shared_plans_of(sizes, lambda first: first)  # type: ignore[arg-type, return-value]
            plans.load(x, transposed=True)
            first: Any = plans.operator
            right = BlockMask.from_elements((x == 0) if x.is_floating_point() else x, block)
            there, count = first.present, len(right.columns)
            pairs = (
                (first.columns[there], first.slots[there], right.columns, right.slots),
                (*first.transposed[1:3], *right.transposed[1:3]),
            )
            for lines, slots, right_lines, right_slots in pairs:
                assert torch.equal(lines[:count], right_lines)
                if right.bits is not None:
                    partial = right_lines < 0
                    bits = first.bits[slots[:count][partial]]
                    assert torch.equal(bits, right.bits[right_slots[partial]])
            assert torch.equal(first.transposed.offsets, right.transposed.offsets)
            assert not there[len(there) - first.kv_blocks :].any()


def test_plans_that_were_not_used_make_room(monkeypatch) -> None:
    kept: Any = OrderedDict()
    monkeypatch.setattr(_shared_plans, "_PLANS", kept)
    monkeypatch.setattr(_shared_plans, "MOST_PLANS", 3)
    monkeypatch.setattr(_shared_plans, "MOST_BYTES", 2 * 64 * 64 // 8)

    def lengths(*used: int) -> list[int]:
        for keys in used:
            sizes = Sizes.of_elements(torch.ones(1, 1, 64, keys).bool(), (16, 16))
            shared_plans_of(sizes, lambda first: first)  # type: ignore[arg-type, return-value]
        return [key[0].tokens[1] for key in kept]

    assert lengths(16, 32, 16) == [32, 16]
    assert lengths(48) == [32, 16, 48]
    assert lengths(8) == [16, 48, 8]
    assert lengths(100) == [8, 100]
    assert lengths(500) == [500]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_a_plan_of_elements_computes_every_mask_of_its_sizes(op: Any) -> None:
    case = Case((45, 90), 16, (4, 2), batch=2, lists=2, head_dim=32, dtype="fp32")
    inputs, call, shape = case.operands(), case.call(op), (2, 2, 45, 90)
    plans = make_shared_plans(Sizes.of_elements(torch.empty(shape).bool(), (16, 16)), in_triton)
    backward = op == "attention_backward"
    engine = plans.operator.engines[backward]
    product = next(engine.candidates(plans.operator.weight(call), call)).plan()
    for seed in range(2):
        elements = elements_of(shape, 16, torch.bool, seed)
        o, lse, gradient = gradients(inputs, BlockMask.from_elements(elements, 16))
        q, k, v, do = (flat(x) for x in inputs)
        rest = flat(o.to(q.dtype)), lse.flatten(0, 1).float(), do
        plans.load(elements, transposed=backward, stamp=seed)
        results: Any = product.run(q, k, v, *(rest if backward else ()))
        for actual, wanted in zip(results, gradient if backward else (o,), strict=False):
            assert (
                actual.double() - flat(wanted).reshape(actual.shape)
            ).norm() < 2e-5 * wanted.norm()
        plans.load(torch.zeros_like(elements), transposed=False, stamp=seed)  # is not listed
        assert torch.equal(product.run(q, k, v, *(rest if backward else ()))[0], results[0])


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
        plans = shared_plans_of(Sizes.of(mask), lambda first: first)  # type: ignore[arg-type, return-value]
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
        make_shared_plans(Sizes.of(moved(selected(case, 0))), in_triton),
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


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_a_plan_leaves_out_the_keys_that_its_mask_does(op: Any) -> None:
    case = Case((45, 90), (16, 32), (4, 2), batch=2, lists=2, head_dim=32, dtype="fp32")
    inputs, call, plans, product = case.operands(), case.call(op), None, None
    backward = op == "attention_backward"
    for seed in range(2):
        keys = torch.rand(90, generator=torch.Generator().manual_seed(seed)) < 0.7
        keys[32:64] = True  # a whole block
        mask = moved(selected(case, seed, keys))
        if plans is None:
            plans = make_shared_plans(Sizes.of(mask), in_triton)
            engine = plans.operator.engines[backward]
            product = next(engine.candidates(plans.operator.weight(call), call)).plan()
        o, lse, gradient = gradients(inputs, mask)
        compact = mask.compact()
        assert all(map(torch.equal, gradients(inputs, compact)[2], gradient))
        q, k, v, do = (moved(flat(x)) for x in inputs)
        rest = moved(flat(o.to(q.dtype))), moved(lse.flatten(0, 1).float()), do
        plans.load(mask.columns, transposed=backward, bits=mask.bits)
        results: Any = product.run(q, k, v, *(rest if backward else ()))  # type: ignore[union-attr]
        for actual, right in zip(results, gradient if backward else (o,), strict=False):
            error = (actual.double().cpu() - flat(right).reshape(actual.shape)).norm()
            assert error < 2e-5 * right.norm()


def selected(case: Case, seed: int, keys: Tensor | None = None, keep: int = 2) -> BlockMask:
    """Return a mask with an empty row, and one with fewer blocks than places."""
    tokens, block = case.tokens, case.block if isinstance(case.block, tuple) else (case.block,) * 2
    grid = [-(-size // side) for size, side in zip(tokens, block, strict=True)]
    scores = torch.randn(
        case.batch, case.lists, *grid, generator=torch.Generator().manual_seed(seed)
    )
    scores[:, :, 0] = -math.inf
    scores[:, :, 1, 1:] = math.nan
    options: dict[str, Any] = {"tokens": [*tokens], "block": [*block], "causal": case.causal}
    return BlockMask.from_scores(scores, keep, keys=keys, **options)


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
    for other in (with_places(mask, keep), *(selected(case, seed, keep=keep) for seed in range(2))):
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


def check_against_fp64(inputs: list[Tensor], mask: BlockMask, results: Any) -> None:
    """Compare O, dQ, dK and dV of q, k, v and dO with those in fp64."""
    arrays: dict[str, Any] = {name: array.cpu() for name, array in mask.arrays().items()}
    right, _, gradient = gradients([x.detach().cpu() for x in inputs], replace(mask, **arrays))
    for x, y in zip(results, (right, *gradient), strict=True):
        assert (x.detach().cpu().double() - y).norm() < 1e-2 * y.norm()


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


ELEMENTS = [  # lists, head dimension, block
    (1, 128, 64),
    (4, 64, 64),
    (1, 96, 32),  # in Triton
]


@hopper
@pytest.mark.parametrize(("lists", "d", "block"), ELEMENTS)
def test_a_graph_lists_other_elements_in_each_replay_on_a_gpu(lists, d, block) -> None:
    q, do = (torch.randn(2, 300, 4, d, **BF16) for _ in range(2))
    k, v = (torch.randn(2, 500, 2, d, **BF16) for _ in range(2))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    shape, graph = (2, lists, 300, 500), torch.cuda.CUDAGraph()
    elements = torch.zeros(shape, dtype=torch.bool, device="cuda")
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        o = attention_of_elements(*inputs, elements, block=block)
        results = o, *torch.autograd.grad(o, inputs, do)
        again = attention_of_elements(*inputs, elements, block=block)  # a second layer
    for seed in range(3):
        given = elements_of(shape, block, torch.bool, seed)
        elements.copy_(given)
        graph.replay()
        mask = BlockMask.from_elements(given, block)
        check_against_fp64([*inputs, do], mask, results)
        assert torch.equal(o, again)
        eager = attention_of_elements(*inputs, elements, block=block)
        torch.testing.assert_close(o, eager, atol=2e-2, rtol=2e-2)


@hopper
@pytest.mark.filterwarnings("default")  # of inductor, and of the mode that finds waits
@pytest.mark.parametrize("option", [("backend", "aot_eager"), ("mode", "reduce-overhead")], ids=str)
def test_a_compiled_model_that_makes_its_mask_waits_for_nothing_on_a_gpu(option) -> None:
    x = [torch.randn(2, 256, heads, 64, **BF16) for heads in (4, 2, 2)]
    rows = torch.arange(256, device="cuda")

    def model(q: Tensor, k: Tensor, v: Tensor, window: Tensor) -> Tensor:
        behind = rows[:, None] - rows
        allowed = ((behind >= 0) & (behind < window)).expand(2, 1, 256, 256).clone()
        for _ in range(2):
            q = attention_of_elements(q, k, v, allowed, block=64)
        return q

    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, **dict([option]))
    with torch.no_grad():
        for count in (50, 60, 70, 200, 1):
            window = torch.tensor(count, device="cuda")
            right = model(*x, window)
            torch.cuda.set_sync_debug_mode("error" if count in (200, 1) else "default")
            try:
                o = compiled(*x, window)
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.testing.assert_close(o, right, atol=2e-2, rtol=2e-2)


@hopper
def test_what_is_added_to_scores_makes_its_queries_nan_on_a_gpu() -> None:
    x = [torch.randn(1, 200, heads, 64, **BF16) for heads in (4, 2, 2)]
    mask = torch.zeros(1, 1, 200, 200, device="cuda").masked_fill_(
        ~torch.ones(200, 200, device="cuda").tril().bool(), -1e4
    )
    biased = mask.clone()
    biased[0, 0, 7, 3], biased[0, 0, 90, 150] = 0.5, math.nan
    graph = torch.cuda.CUDAGraph()
    right = attention_of_elements(*x, mask, block=64)
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        o = attention_of_elements(*x, biased, block=64)
    graph.replay()
    wrong = o.isnan().flatten(2).all(2)[0]
    assert wrong.nonzero().flatten().tolist() == [7, 90]
    torch.testing.assert_close(o[:, ~wrong], right[:, ~wrong], atol=2e-2, rtol=2e-2)
    with pytest.raises(Unsupported, match="found a bias"):
        attention_of_elements(*x, biased, block=64)
