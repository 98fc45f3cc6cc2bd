"""sparsebench.attention: values and gradients, compiled and not, and what it refuses."""

import copy
import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import sparsebench
from sparsebench import attention, select_attention
from sparsebench.errors import SparsebenchError, Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.front import Recordings
from sparsebench.kernels._common.product import Product, Selected
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels.attention._call import AttentionCall
from sparsebench.kernels.attention._shapes import AttentionShape
from sparsebench.kernels.nn._attention_op import attend_recorded, plans_of, recordings_of
from sparsebench.kernels.nn.attention import attention_and_lse
from tests.kernels.attention.cases import Case, gradients, moved, random_mask, reference, without
from tests.kernels.conftest import launch
from tests.tools.marks import needs_gxx

D = 8
TOKENS = 40, 56
SMALL = Case(TOKENS, 16, (2, 1), lists=2, head_dim=16, dtype="fp32")
LARGE = Case((300, 420), 64, (4, 4), lists=4, dtype="bf16")


def drawn(batch: int = 2, heads: int = 4, kv_heads: int = 2) -> list[Tensor]:
    torch.manual_seed(0)
    sizes = ((TOKENS[0], heads), (TOKENS[1], kv_heads), (TOKENS[1], kv_heads))
    return [torch.randn(batch, *size, D, requires_grad=True) for size in sizes]


@pytest.mark.parametrize(
    "options",
    [{"lists": 4}, {"lists": 2, "causal": True}, {"bits": True}],
    ids=["per head", "causal", "bits"],
)
def test_values_and_gradients_are_those_of_the_definition(options: dict) -> None:
    mask, operands = random_mask(TOKENS, 16, batch=2, **options), drawn()
    right, lse = reference(*operands, mask)
    do = torch.randn_like(right)
    expected = torch.autograd.grad(right, operands, do)
    o, log_sums = attention_and_lse(*operands, mask)
    torch.testing.assert_close(o, right)
    torch.testing.assert_close(log_sums, lse)
    for actual, gradient in zip(torch.autograd.grad(o, operands, do), expected, strict=True):
        torch.testing.assert_close(actual, gradient)


def test_one_sequence_needs_no_batch() -> None:
    mask, operands = random_mask(TOKENS, 16), drawn(batch=1)
    o = sparsebench.attention(*(x[0] for x in operands), mask)
    torch.testing.assert_close(o, reference(*operands, mask)[0][0])


def test_a_compiled_call_has_the_same_gradients() -> None:
    mask, operands = random_mask(TOKENS, 16, batch=2), drawn()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparsebench.attention(q, k, v, mask).square().sum()

    expected = torch.autograd.grad(loss(*operands), operands)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for actual, gradient in zip(
        torch.autograd.grad(compiled(*operands), operands), expected, strict=True
    ):
        torch.testing.assert_close(actual, gradient)


def test_the_operator_keeps_torchs_contract() -> None:
    mask, (q, k, v) = random_mask(TOKENS, 16, batch=2), drawn()
    sizes = [*mask.tokens, *mask.block, mask.batch, mask.lists, int(mask.causal), 0, 0]
    arrays = [array for array in (mask.offsets, mask.columns, mask.slots) if array is not None]
    operator = torch.ops.sparsebench.block_sparse_attention.default
    torch.library.opcheck(operator, (q, k, v, arrays, sizes, 0.3))


def test_a_nan_that_no_query_selects_reaches_no_result() -> None:
    operands = drawn(batch=1, heads=1, kv_heads=1)
    cells = torch.ones(3, 4)
    cells[:, 2] = 0
    mask = type(random_mask(TOKENS, 16)).from_dense(cells, block=16, tokens=[*TOKENS])
    with torch.no_grad():
        operands[1][:, 32:48] = operands[2][:, 32:48] = torch.nan
    o = sparsebench.attention(*operands, mask)
    gradients = torch.autograd.grad(o.sum(), operands)
    assert not any(x.isnan().any() for x in (o, *gradients))
    assert not gradients[1][:, 32:48].any()


@pytest.mark.parametrize("moved", [False, True], ids=["written", "moved"])
def test_plans_stay_with_the_mask_until_it_is_written_or_moved(moved: bool) -> None:
    mask, operands = random_mask(TOKENS, 16, batch=2), drawn()
    first = sparsebench.attention(*operands, mask)
    assert torch.equal(first, sparsebench.attention(*operands, mask))
    columns = mask.columns.clone()
    columns[0] = 3 - columns[0] if int(mask.offsets[1]) == 1 else columns[0]
    if moved:
        mask.columns.data = columns
    else:
        mask.columns.copy_(columns)
    changed = sparsebench.attention(*operands, mask)
    torch.testing.assert_close(changed, reference(*operands, mask)[0])


def test_a_mask_is_copied_and_pickled_after_a_call() -> None:
    mask, operands = random_mask(TOKENS, 16, batch=2), drawn()
    o = sparsebench.attention(*operands, mask)
    for other in (copy.deepcopy(mask), pickle.loads(pickle.dumps(mask))):
        assert torch.equal(sparsebench.attention(*operands, other), o)


@pytest.mark.parametrize(
    ("spoil", "token"),
    [
        (lambda q, k, v, mask: (q[:, 1:], k, v, mask), "queries"),
        (lambda q, k, v, mask: (q, k, v[:, 1:], mask), "alike"),
        (lambda q, k, v, mask: (q[:, :, :3], k, v, mask), "multiple"),
        (lambda q, k, v, mask: (q[:, :, :0], k, v, mask), "multiple"),
        (lambda q, k, v, mask: (q[..., :0], k[..., :0], v[..., :0], mask), "one size from 1 to"),
        (lambda q, k, v, mask: (q.double(), k.double(), v.double(), mask), "fp16"),
        (lambda q, k, v, mask: (q, k.half(), v, mask), "float16"),
        (lambda q, k, v, mask: (q, k, v, replace(mask, lists=3)), "lists"),
        (lambda q, k, v, mask: (q, k, v, mask.to_dense()), "BlockMask"),
    ],
)
def test_operands_that_do_not_fit_are_refused_in_one_line(spoil, token: str) -> None:
    mask = random_mask(TOKENS, 16, batch=2)
    with pytest.raises(Unsupported, match=token) as refused:
        sparsebench.attention(*spoil(*drawn(), mask))
    assert "\n" not in str(refused.value)


def test_autocast_casts_as_sdpa_does() -> None:
    mask, (q, k, v) = random_mask(TOKENS, 16, batch=2), drawn()
    expected = sparsebench.attention(*(x.bfloat16() for x in (q, k, v)), mask)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sparsebench.attention(q, k, v.bfloat16(), mask)
        call = torch.compile(sparsebench.attention, fullgraph=True, backend="aot_eager")
        compiled = call(*(x.detach() for x in (q, k, v.bfloat16())), mask)
    assert torch.equal(mixed, expected)
    assert torch.equal(compiled, expected)
    for gradient, x in zip(torch.autograd.grad(mixed.sum(), (q, k, v)), (q, k, v), strict=True):
        assert gradient.dtype == x.dtype


def test_the_mask_of_another_library_is_named_with_its_module() -> None:
    foreign = create_block_mask(lambda b, h, i, j: i >= j, None, None, *TOKENS, device="cpu")
    with pytest.raises(Unsupported, match=r"sparsebench's BlockMask, found torch\.nn\.attention"):
        sparsebench.attention(*drawn(), foreign)


def test_a_scale_that_is_not_positive_is_refused() -> None:
    with pytest.raises(Unsupported, match="scale"):
        sparsebench.attention(*drawn(), random_mask(TOKENS, 16, batch=2), scale=0)


# ---- recorded calls ----


class Sums:
    """In the place of a planned kernel, for q, k and v of one size: sums by launches on a CPU.

    O = Q + K + V, and the LSE is the start of 2 Q; dQ = Q + dO, dK = K + O, dV = V + dO
    """

    def run(self, *operands: Tensor) -> list[Tensor]:
        """Return O and the LSE, or dQ, dK and dV."""
        q, k, v, *rest = operands
        if not rest:
            results = [torch.empty_like(q), q.new_empty(2 * 4, 40)]
            launch(q, k, v, results[0])
            launch(q, results[1])
        else:
            o, lse, do = rest
            results = [torch.empty_like(q) for _ in range(3)]
            for pair, result in zip(((q, do), (k, o), (v, do)), results, strict=True):
                launch(*pair, result)
            unused = torch.empty_like(lse)
            launch(lse, unused)
            on_tape(unused)
        on_tape(*results, owners=(self,))
        return results


@needs_gxx
@pytest.mark.exhaustive  # compiles front.cpp for 25 s
@pytest.mark.skipif(torch.cuda.is_available(), reason="the driver itself is connected there")
@pytest.mark.usefixtures("recording")
def test_a_recorded_call_runs_the_planned_kernels_of_both_passes() -> None:
    mask = random_mask((40, 40), 16, batch=2)
    q, k, v = (torch.randint(-9, 9, (2, 40, 4, D)).float().requires_grad_() for _ in range(3))
    shape, recordings = (
        AttentionShape(2, 40, 40, 4, 4, D, mask.block, "fp32"),
        recordings_of(mask, None),
    )
    for op in ("attention", "attention_backward"):
        plans_of(mask).plans[AttentionCall(op, shape, 0.5)] = Selected(
            Product(Sums().run), {}, "test", {}
        )

    do = torch.randint(-9, 9, q.shape).float()
    for _ in range(5):
        results = recordings.replay(q, k, v)
        o, lse = results or attend_recorded(recordings, q, k, v, mask, 0.5)
        assert torch.equal(o, q + k + v)
        assert torch.equal(lse.flatten(), 2 * q.flatten()[: lse.numel()])
        assert not lse.requires_grad
        gradients = torch.autograd.grad(o, (q, k, v), do)
        assert all(map(torch.equal, gradients, (q + do, k + o, v + do)))
    results = recordings.replay(q.mT.contiguous().mT, k, v)  # is copied
    assert torch.equal(results[0], o)
    mask.columns.add_(0)  # a write that torch counts
    assert recordings.replay(q, k, v) is None
    with pytest.raises(RuntimeError, match="modified since"):
        results[0].sum().backward()
    freed = weakref.ref(mask)
    del mask, recordings, results, gradients, o
    gc.collect()
    assert freed() is None


def on_gpu(mask: BlockMask) -> BlockMask:
    arrays = {name: array.cuda() for name, array in mask.arrays().items()}
    return replace(mask, **arrays)


def results_of(mask: BlockMask, operands: list[Tensor], do: Tensor) -> list[Tensor]:
    """Return O, the LSE and the gradients of a call."""
    o, lse = attention_and_lse(*operands, mask)
    return [o.detach(), lse, *torch.autograd.grad(o, operands, do)]


GPU_MASKS = [{"block": 64}, {"block": 128, "causal": True}, {"block": 64, "bits": True}]


@pytest.mark.gpu
@pytest.mark.parametrize("options", GPU_MASKS, ids=str)
def test_recorded_calls_equal_those_in_python_on_a_gpu(options, monkeypatch) -> None:
    mask = on_gpu(random_mask((320, 320), batch=2, lists=2, density=0.6, **options))
    for draw in range(6):
        q, k, v = (torch.randn(2, 320, 4, 64, device="cuda").bfloat16() for _ in range(3))
        if draw % 2:  # views that no kernel reads
            q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v))
        operands = [x.requires_grad_() for x in (q, k, v)]
        do = torch.randn_like(q) if draw else torch.ones((), device="cuda").bfloat16().expand_as(q)
        actual = results_of(mask, operands, do)
        with monkeypatch.context() as patch:
            patch.setattr(Recordings, "call", lambda *args: args[-1]())
            right = results_of(replace(mask), operands, do)
        assert all(map(torch.equal, actual, right))
        with torch.autocast("cuda", torch.bfloat16):
            assert all(map(torch.equal, results_of(mask, operands, do), right))
        with torch.inference_mode():
            assert torch.equal(sparsebench.attention(*operands, mask), right[0])
            assert torch.equal(
                sparsebench.attention(*(x.clone() for x in operands), mask), right[0]
            )
    kernels = [selected.choice["kernel"] for selected in plans_of(mask).plans.values()]
    replayed = recordings_of(mask, None).replay(*operands) is not None
    assert replayed or kernels[0] != "attention_wgmma"


@pytest.mark.gpu
def test_a_recorded_step_is_captured_on_a_gpu() -> None:
    mask = on_gpu(random_mask((256, 256), 64, density=0.6))
    operands = [torch.randn(1, 256, 2, 64, device="cuda").bfloat16() for _ in range(3)]
    operands = [x.requires_grad_() for x in operands]
    do, graph = torch.randn_like(operands[0]), torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(5):
            right = results_of(mask, operands, do)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        captured = results_of(mask, operands, do)
    graph.replay()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, right))


# ---- with kernels ----


def check_again(case: Case, calls: int, allowed: float) -> None:
    """Compare O and the gradients of some calls of a mask with those in fp64."""
    mask, operands = case.mask(), case.operands()
    o, _, expected = gradients(operands, mask)
    *leaves, do = map(moved, operands)
    mask = moved(mask)
    for x in leaves:
        x.requires_grad_()
    for _ in range(calls):
        actual = sparsebench.attention(*leaves, mask)
        parts = actual, *torch.autograd.grad(actual, leaves, do)
        for part, right in zip(parts, (o, *expected), strict=True):
            torch.testing.assert_close(part.cpu().double(), right, atol=allowed, rtol=allowed)


@pytest.mark.interpreted
def test_a_plan_is_run_again_in_the_interpreter() -> None:
    check_again(SMALL, 2, 1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize(("case", "allowed"), [(SMALL, 1e-4), (LARGE, 6e-2)], ids=["fp32", "bf16"])
def test_a_call_is_planned_then_recorded_and_then_replayed(case: Case, allowed: float) -> None:
    check_again(case, 4, allowed)


@pytest.mark.gpu
def test_a_nan_in_a_block_that_no_query_selects_reaches_nothing() -> None:
    mask = moved(without(LARGE.mask(), 3))
    leaves = [moved(x) for x in LARGE.operands()[:3]]
    for x in leaves[1:]:
        x[:, 192:256] = torch.nan
    for x in leaves:
        x.requires_grad_()
    o = sparsebench.attention(*leaves, mask)
    grads = torch.autograd.grad(o.sum(), leaves)
    assert not any(x.isnan().any() for x in (o, *grads))


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from the compiler's own code
def test_a_call_can_be_compiled_and_captured_with_its_gradients() -> None:
    mask, (*leaves, do) = moved(LARGE.mask()), map(moved, LARGE.operands())
    for x in leaves:
        x.requires_grad_()

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return sparsebench.attention(q * 2, k, v, mask)

    eager = torch.autograd.grad(step(*leaves), leaves, do)
    compiled = torch.compile(step, fullgraph=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = torch.autograd.grad(step(*leaves), leaves, do)
    for x in captured:
        x.fill_(torch.nan)
    graph.replay()
    for parts in (torch.autograd.grad(compiled(*leaves), leaves, do), captured):
        for actual, gradient in zip(parts, eager, strict=True):
            torch.testing.assert_close(actual, gradient, atol=2e-2, rtol=2e-2)


QKV = [(2, 96, 4, D), (2, 96, 2, D), (2, 96, 2, D)]


def test_a_selection_in_inference_mode_is_that_of_any_call() -> None:
    torch.manual_seed(0)
    operands = [torch.randn(size) for size in QKV]
    with torch.inference_mode():
        o = select_attention(*operands, keep=2, block=16)
    assert torch.equal(o, select_attention(*operands, keep=2, block=16))


def test_the_weights_of_a_mass_are_those_of_scaled_scores() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(size) for size in QKV)
    o = select_attention(q, k, v, mass=0.6, block=16, first=0, last=0, scale=2.0)
    queries, keys = (x.view(2, 6, 16, 2, -1, D).mean((2, 4)).transpose(1, 2) for x in (q, k))
    mask = BlockMask.from_scores(2 * queries @ keys.mT, mass=0.6, block=16)
    assert 2 * 2 * 6 < mask.present.sum() < 2 * 2 * 6 * 5
    assert torch.equal(o, attention(q, k, v, mask, scale=2.0))


def test_a_selection_under_autocast_casts_operands_but_scores_in_fp32() -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(size) for size in QKV)
    k = 1 + k * 1e-2  # scores that are alike in bf16
    right = select_attention(*(x.bfloat16() for x in (q, k, v)), keep=2, block=16, first=0)
    with torch.autocast("cpu", torch.bfloat16):
        o = select_attention(q, k, v.bfloat16(), keep=2, block=16, first=0)
    assert torch.equal(o, right)


@pytest.mark.parametrize(
    ("sizes", "options", "reason"),
    [
        ([(0, *size[1:]) for size in QKV], {}, "expected at least one sequence, found q \\[0, "),
        ([(8,), *QKV[1:]], {}, "expected q \\[batch"),
        (QKV, {"keep": None}, "keep: expected a whole number from 1 to 6 blocks, found None"),
        (QKV, {"mass": 2}, "mass: expected a number above 0, at most 1; found 2"),
        (QKV, {"block": 0}, "block: expected an integer of at least 1, found 0"),
        (QKV, {"block": [16, 32]}, "block: expected an integer of at least 1, found \\[16"),
    ],
)
def test_what_cannot_select_is_refused_in_one_line(sizes, options: dict, reason: str) -> None:
    with pytest.raises(SparsebenchError, match=reason):
        select_attention(*map(torch.randn, sizes), **{"keep": 2, "block": 16, **options})


@pytest.mark.parametrize("method", ["pooled", "xattention", "nsa", "moba"])
def test_a_selection_on_meta_has_the_shape_of_q(method: str) -> None:
    q, k, v = (torch.empty(2, 90, heads, 16, device="meta") for heads in (4, 2, 2))
    o = select_attention(q, k, v, keep=3, block=16, causal=True, method=method)
    assert (o.shape, o.device) == (q.shape, q.device)


@pytest.mark.parametrize("options", [{"mass": 0.5}, {"keep": 1}, {"mass": 0.5, "method": "nsa"}])
def test_a_single_block_of_keys_is_all_that_is_kept(options: dict) -> None:
    q, k, v = (torch.randn(1, 30, heads, 16) for heads in (4, 2, 2))
    mask = BlockMask.from_dense(torch.ones(1, 1), block=64, tokens=[30, 30], causal=True)
    o = select_attention(q, k, v, block=64, causal=True, **options)
    torch.testing.assert_close(o, attention(q, k, v, mask))


@pytest.mark.parametrize("mass", [None, 0.4])
def test_a_selection_compiles_and_equals_its_mask(mass: float | None) -> None:
    torch.manual_seed(0)
    operands = [torch.randn(2, 200, heads, 32, requires_grad=True) for heads in (4, 2, 2)]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return select_attention(q, k, v, keep=3, mass=mass, block=32, causal=True)

    torch._dynamo.reset()
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    results = [
        (o, *torch.autograd.grad(o.square().sum(), operands))
        for o in (run(*operands), compiled(*operands))
    ]
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)
    q, k, v = operands
    queries = q.detach().unflatten(2, (2, 2)).mean(3)
    means = [
        torch.stack([x[:, at : at + 32].mean(1) for at in range(0, 200, 32)], 2)
        for x in (queries, k.detach())
    ]
    options: Any = {"tokens": [200, 200], "block": 32, "causal": True, "first": 1, "last": 1}
    scores = means[0] @ means[1].mT * 32**-0.5
    mask = BlockMask.from_scores(scores, 3, mass=mass, **options)
    assert mask.present.all() == (mass is None)
    torch.testing.assert_close(attention(q, k, v, mask), results[0][0])
