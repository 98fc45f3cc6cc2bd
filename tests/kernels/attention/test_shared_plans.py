"""Plans for all masks of their sizes: the lists that were loaded last, and what they compute."""

import math
from collections import OrderedDict
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._selection import Selection, select_in_torch
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import Operator
from sparsebench.kernels._common.product import Product
from sparsebench.kernels.attention import (
    _shared_plans,
    attention_triton,
    attention_triton_backward,
)
from sparsebench.kernels.attention._call import operator_of
from sparsebench.kernels.attention._selecting import _means_launch, _select_launch
from sparsebench.kernels.attention._shared_plans import (
    SharedPlans,
    Sizes,
    make_shared_plans,
    shared_plans_of,
)
from sparsebench.kernels.nn.attention import attention_of_elements
from tests.compiling.nvcc import hopper
from tests.compiling.triton_kernels import (
    assert_all_compile,
    programs_of_templates,
)
from tests.kernels.attention.cases import (
    BF16,
    SELECTIONS,
    Case,
    check_against_fp64,
    flat,
    gradients,
    moved,
    scores_of,
    selection_mask,
)


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_what_selects(capability, monkeypatch) -> None:
    programs = programs_of_templates(monkeypatch)
    mask = selection_mask(Case((4096, 4096), 64, (8, 8), causal=True), 0)
    for has_bits in (False, True):
        make_shared_plans(Sizes.of(mask)._replace(has_bits=has_bits), in_triton)
    for queries, dtype in ((1000, torch.bool), (1, torch.float16)):
        elements = torch.empty(2, 1, queries, 1000, dtype=dtype)
        make_shared_plans(Sizes.of_elements(elements, (64, 64)), in_triton)
    sizes, device = Selection(64, (4096, 4096), (64, 64), True, 7, 1, 1).sizes, torch.device("cpu")
    for mass in (1.0, 0.9):
        _select_launch.__wrapped__((*sizes,), mass, 65, torch.float32, device)
    for d, heads, of_means in ((128, 4, torch.float32), (96, 3, torch.bfloat16)):
        shape = (2, 1000, heads, d), (1000 * heads * d, heads * d, d, 1), torch.bfloat16
        _means_launch.__wrapped__(*shape, device, 64, 1, of_means)
    assert len(programs) == 18
    assert_all_compile(programs, capability)


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
    store: Any = OrderedDict()
    monkeypatch.setattr(_shared_plans, "_PLANS", store)
    monkeypatch.setattr(_shared_plans, "MOST_PLANS", 3)
    monkeypatch.setattr(_shared_plans, "MOST_BYTES", 2 * 64 * 64 // 8)

    def lengths(*used: int) -> list[int]:
        for keys in used:
            sizes = Sizes.of_elements(torch.ones(1, 1, 64, keys).bool(), (16, 16))
            shared_plans_of(sizes, lambda first: first)  # type: ignore[arg-type, return-value]
        return [key[0].tokens[1] for key in store]

    assert lengths(16, 32, 16) == [32, 16]
    assert lengths(48) == [32, 16, 48]
    assert lengths(8) == [16, 48, 8]
    assert lengths(100) == [8, 100]
    assert lengths(500) == [500]


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_a_plan_of_elements_computes_every_mask_of_its_sizes(op: Any) -> None:
    case = Case((45, 90), 16, (4, 2), batch=2, lists=2, head_dim=32, dtype="fp32")
    shape, backward = (2, 2, 45, 90), op == "attention_backward"
    plans = make_shared_plans(Sizes.of_elements(torch.empty(shape).bool(), (16, 16)), in_triton)
    product = product_of(plans, case, op)
    for seed in range(2):
        elements = elements_of(shape, 16, torch.bool, seed)
        plans.load(elements, transposed=backward, stamp=seed)
        result = require_right(product, case, op, BlockMask.from_elements(elements, 16))
        plans.load(torch.zeros_like(elements), transposed=False, stamp=seed)  # is not listed
        again = require_right(product, case, op, BlockMask.from_elements(elements, 16))
        assert torch.equal(again, result)


def in_triton(mask: BlockMask) -> Operator:
    return operator_of(mask, (attention_triton.KERNEL, attention_triton_backward.KERNEL))


def product_of(plans: SharedPlans, case: Case, op: Any) -> Product:
    """Return the product of the likeliest configuration."""
    engine, call = plans.operator.engines[op == "attention_backward"], case.call(op)
    return next(engine.candidates(plans.operator.weight(call), call)).plan()


def require_right(product: Product, case: Case, op: Any, mask: BlockMask) -> Tensor:
    """Compare what a product computes of a case with fp64; return its first result."""
    inputs = case.operands()
    o, lse, gradient = gradients(inputs, mask)
    q, k, v, do = (moved(flat(x)) for x in inputs)
    of_backward = moved(flat(o.to(q.dtype))), moved(lse.flatten(0, 1).float()), do
    rest, expected = ((), (o,)) if op == "attention" else (of_backward, gradient)
    results: Any = product.run(q, k, v, *rest)
    for actual, right in zip(results, expected, strict=False):
        error = (actual.double().cpu() - flat(right).reshape(actual.shape)).norm()
        assert error < (8e-3 if case.dtype == "fp16" else 2e-5) * right.norm()
    return results[0]  # type: ignore[no-any-return]


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
    plans = make_shared_plans(Sizes.of(moved(selection_mask(case, 0))), in_triton)
    product = product_of(plans, case, op)
    for seed in range(2):
        mask = selection_mask(case, seed)
        plans.load(moved(mask.columns), transposed=op == "attention_backward")
        require_right(product, case, op, mask)


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("op", ["attention", "attention_backward"])
def test_a_plan_leaves_out_the_keys_that_its_mask_does(op: Any) -> None:
    case = Case((45, 90), (16, 32), (4, 2), batch=2, lists=2, head_dim=32, dtype="fp32")
    masks = []
    for seed in range(2):
        keys = torch.rand(90, generator=torch.Generator().manual_seed(seed)) < 0.7
        keys[32:64] = True  # a whole block
        masks.append(moved(selection_mask(case, seed, keys)))
    plans = make_shared_plans(Sizes.of(masks[0]), in_triton)
    product = product_of(plans, case, op)
    for mask in masks:
        both = (gradients(case.operands(), each)[2] for each in (mask, mask.compact()))
        assert all(map(torch.equal, *both))
        plans.load(mask.columns, transposed=op == "attention_backward", bits=mask.bits)
        require_right(product, case, op, mask)


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
