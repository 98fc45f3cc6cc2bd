"""Decoding over pages: summaries, scores, the pages that are selected, and attention to them."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench import decode_attention, summarize_pages
from sparsebench.kernels.attention import (
    _page_scores,
    _paged,
    attention_decode,
    attention_paged,
)
from sparsebench.kernels.attention._page_scores import _launch as launch_of_scores
from sparsebench.kernels.attention._page_scores import scores_of, select_pages
from sparsebench.kernels.attention._paged import Config, PagedShape, attend, config_of
from sparsebench.kernels.attention._paged import _launch as launch_of_attention
from sparsebench.kernels.attention._summaries import _launch as launch_of_summaries
from tests.compiling.nvcc import ampere, hopper
from tests.compiling.triton_kernels import (
    assert_all_compile,
    programs_of_templates,
)
from tests.kernels.attention.cases import (
    DEVICE,
    Case,
    assert_attends,
    launch_operands,
)
from tests.kernels.attention.page_cases import BOUNDS, MEANS, assert_right, cache, places_of
from tests.kernels.contract import refusal

EDGES = [0, 1, 15, 16, 17, 33, 95, 96]  # lengths beside the edges of pages of 16


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("kinds", [BOUNDS, MEANS])
def test_summaries_are_those_of_the_keys_that_there_are(kinds: int) -> None:
    c = cache(EDGES, kinds=kinds)
    right = torch.full_like(c.summaries, 7)
    for row, length in zip(c.table.tolist(), EDGES, strict=True):
        for place in range(-(-length // 16)):
            keys = c.k[row[place], : min(16, length - place * 16)]
            bounds = [keys.amin(0), keys.amax(0)] if kinds == BOUNDS else [keys.mean(0)]
            right[row[place]] = torch.stack(bounds, 1)
    torch.testing.assert_close(c.summaries, right)
    before, lengths = c.summaries.clone(), [min(n + 3, 96) for n in EDGES]
    c.k.nan_to_num_(0.5)
    c.lengths.copy_(torch.tensor(lengths))
    summarize_pages(c.summaries, c.k, c.table, c.lengths, appended=3)
    whole = torch.full_like(right, 7)
    summarize_pages(whole, c.k, c.table, c.lengths)
    torch.testing.assert_close(c.summaries, whole)
    assert not torch.equal(before, whole)


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize(
    ("page", "heads", "d", "dtype", "kinds", "by_head", "keep"),
    [
        (16, (4, 2), 32, "fp32", BOUNDS, False, 3),
        (16, (4, 2), 32, "fp16", MEANS, True, 3),
        (16, (4, 2), 32, "fp16", BOUNDS, True, None),
        (32, (6, 2), 48, "fp16", BOUNDS, True, 3),
        (64, (2, 2), 32, "fp32", MEANS, False, 3),
        (128, (20, 1), 32, "fp16", BOUNDS, False, 3),
        (128, (20, 1), 32, "fp16", BOUNDS, False, None),
    ],
)
def test_each_kv_head_attends_to_its_best_pages(
    page, heads, d, dtype, kinds, by_head, keep
) -> None:
    lengths = [n * page // 16 for n in (0, 15, 17, 96)]
    c = cache(lengths, page=page, heads=heads, d=d, dtype=dtype, kinds=kinds, by_head=by_head)
    summaries = None if keep is None else c.summaries
    o = decode_attention(*c.operands, summaries, keep=keep)
    assert_right(c, o, places_of(c, keep), dtype)
    assert not o[0].any()


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("keep", [3, None])
@pytest.mark.parametrize("keys", [16, 64])
def test_splits_are_merged_and_counters_return_to_zero(keep, keys: int) -> None:
    c = cache([90, 0, 17], heads=(4, 1))
    places = places_of(c, keep)
    columns = select_pages(c.operands, c.summaries, keep, 1, 1) if keep else None
    for _ in range(2):
        o = attend(c.operands, columns, 32**-0.5, Config(keys, 5, 2, 4))
        assert_right(c, o, places, "fp32")


@pytest.mark.interpreted(also_compiled=False)
def test_entries_outside_of_the_pool_are_absent() -> None:
    c = cache([96, 96, 40, 96])
    c.table[0] = torch.tensor([-1, 3, 1 << 30, 4, 5, len(c.k)])  # the first, the last and another
    c.table[1] = -(1 << 31)
    c.table[2, 3:] = 1 << 30
    for x in (c.k, c.v):
        x.nan_to_num_(0.5)
    summarize_pages(c.summaries, c.k, c.table, c.lengths)
    for keep in (2, 3, None):
        o = decode_attention(*c.operands, None if keep is None else c.summaries, keep=keep)
        assert_right(c, o, places_of(c, keep), "fp32")
        assert not o[1].any()


@pytest.mark.interpreted(also_compiled=False)
def test_a_page_whose_summary_is_nan_is_selected_only_at_the_ends() -> None:
    c = cache([96, 80])
    c.summaries[c.table[:, [0, 2, 4]].long()] = torch.nan
    c.summaries[c.table[0, 3].long(), 0, 0, 0] = torch.nan  # of one KV head
    places = places_of(c, 4)
    assert places[0][0] == [0, 1, 5]
    assert places[1][0] == [0, 1, 3, 4]
    assert_right(c, decode_attention(*c.operands, c.summaries, keep=4), places, "fp32")
    c.k[c.table[0, 1].long(), 3, 1, 5] = torch.nan
    summarize_pages(c.summaries, c.k, c.table, c.lengths)
    bounds = c.summaries[c.table[0, 1].long()]
    assert bounds.isnan().sum() == 2
    assert bounds[1, :, 5].isnan().all()


@pytest.mark.interpreted(also_compiled=False)
def test_the_earliest_of_equal_pages_are_selected() -> None:
    c = cache([96, 80])
    c.summaries.fill_(0.5)
    columns = select_pages(c.operands, c.summaries, 4, 1, 1).view(2, 2, 4)
    assert columns.tolist() == [[[0, 1, 2, 5]] * 2, [[0, 1, 2, 4]] * 2]


@pytest.mark.interpreted(also_compiled=False)
def test_scores_bound_every_product_of_their_page() -> None:
    c = cache([96, 50], heads=(6, 2))
    scores = scores_of(c.operands, c.summaries, 0, 0).view(2, 2, -1)
    for n, length in enumerate((96, 50)):
        for head in range(2):
            keys = c.k[c.table[n].long()][:, :, head].flatten(0, 1)[:length]
            products = c.q[n].view(2, 3, -1)[head] @ keys.T
            for place, most in enumerate(products.amax(0).split(16)):
                assert scores[n, head, place] >= most.max() - 1e-4
    assert (scores[1, :, 4:] == -math.inf).all()
    forced = scores_of(c.operands, c.summaries, 1, 2).view(2, 2, -1)
    assert (forced[0] == math.inf).nonzero()[:, 1].tolist() == [0, 4, 5] * 2
    assert (forced[1] == math.inf).nonzero()[:, 1].tolist() == [0, 2, 3] * 2


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("keep", [2, 40])
def test_as_few_pages_as_are_forced_and_more_than_there_are(keep: int) -> None:
    c = cache([95, 33, 1])
    o = decode_attention(*c.operands, c.summaries, keep=keep)
    assert_right(c, o, places_of(c, keep), "fp32")
    o = decode_attention(*c.operands, c.summaries, keep=keep, first=0, last=0)
    assert_right(c, o, places_of(c, keep, 0, 0), "fp32")


@pytest.mark.interpreted(also_compiled=False)
def test_lengths_outside_of_the_table_are_its_ends() -> None:
    c = cache([96, 96])
    for beyond in (1 << 30, (1 << 31) - 1):  # rounded up to pages, the second would be negative
        c.lengths.copy_(torch.tensor([-3, beyond]))
        few, o = decode_attention(*c.operands, c.summaries, keep=3), decode_attention(*c.operands)
        c.lengths.copy_(torch.tensor([0, 96]))
        assert torch.equal(few, decode_attention(*c.operands, c.summaries, keep=3))
        assert torch.equal(o, decode_attention(*c.operands))
        assert not few[0].any()
        assert o[1].any()


@pytest.mark.interpreted(also_compiled=False)
def test_no_sequence_and_no_page_give_zeros() -> None:
    c = cache([96, 96])
    few = c.q[:0], c.k, c.v, c.table[:0], c.lengths[:0]
    assert decode_attention(*few).shape == (0, 4, 32)
    o = decode_attention(c.q, c.k, c.v, c.table[:, :0], c.lengths, c.summaries, keep=4)
    assert not o.any()
    pools = c.k[:0], c.v[:0], c.table, c.lengths
    assert not decode_attention(c.q, *pools).any()
    assert not decode_attention(c.q, *pools, c.summaries[:0], keep=4).any()


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "table": ({"table": lambda c: c.table.long()}, "table torch.int32 [2, 6] on"),
    "lengths": ({"lengths": lambda c: c.lengths[:1]}, "lengths torch.int32 [2]"),
    "page": ({"k_pages": lambda c: c.k[:, :8], "v_pages": lambda c: c.v[:, :8]}, "page_size of 16"),
    "values": ({"v_pages": lambda c: c.v.half()}, "v_pages torch.float32"),
    "strides": (
        {"v_pages": lambda c: c.v.transpose(1, 2).contiguous().transpose(1, 2)},
        "v_pages with strides",
    ),
    "groups": ({"q": lambda c: c.q[:, :3]}, "a multiple of 2 KV heads"),
    "summaries": ({"summaries": lambda c: c.summaries[:, :, :, :16]}, "summaries torch.float32"),
    "keep": ({"keep": 1}, "keep at least 1 and first + last"),
    "neither": ({"keep": None}, "both summaries and keep"),
    "scale": ({"scale": 0.0}, "a scale above 0"),
    "infinity": ({"scale": math.inf}, "a scale above 0, and finite; found inf"),
    "no head": (
        {"k_pages": lambda c: c.k[:, :, :0], "v_pages": lambda c: c.v[:, :, :0]},
        "k_pages [pages, page_size, H_kv, D]",
    ),
    "gradient": ({"q": lambda c: c.q.requires_grad_()}, "without a gradient"),
}


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("name", REFUSED)
def test_operands_that_do_not_fit_are_refused_in_one_line(name: str) -> None:
    c = cache([96, 50])
    changes, message = REFUSED[name]
    values = {"q": c.q, "k_pages": c.k, "v_pages": c.v, "table": c.table, "lengths": c.lengths}
    values |= {"summaries": c.summaries, "keep": 3}  # type: ignore[dict-item]
    values |= {key: value(c) if callable(value) else value for key, value in changes.items()}
    text = refusal(lambda: decode_attention(**values))  # type: ignore[arg-type]
    assert message in text
    assert "\n" not in text


@pytest.mark.interpreted(also_compiled=False)
def test_an_address_between_16_bytes_is_refused_and_queries_are_copied() -> None:
    c = cache([96, 50])
    wide = torch.cat((c.q[..., :1], c.q), -1)[..., 1:]
    assert torch.equal(decode_attention(wide, *c.operands[1:]), decode_attention(*c.operands))
    lengths = torch.cat((c.lengths[:1], c.lengths))[1:]
    assert "16 bytes" in refusal(lambda: decode_attention(*c.operands[:4], lengths))


@pytest.mark.interpreted(also_compiled=False)
def test_a_compiled_call_is_one_graph() -> None:
    c = cache([96, 50])

    def step(q: Tensor, keep: int) -> Tensor:
        summarize_pages(c.summaries, c.k, c.table, c.lengths, appended=1)
        return decode_attention(q * 2, *c.operands[1:], c.summaries, keep=keep)

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for keep in (3, 4):  # the second is symbolic
        assert torch.equal(compiled(c.q, keep), step(c.q, keep))


def test_autocast_changes_no_result() -> None:
    c = cache([96, 50])
    with torch.autocast(DEVICE.type, torch.bfloat16):
        o = decode_attention(*c.operands)
    assert torch.equal(o, decode_attention(*c.operands))


ON_ANY_DEVICE = [
    lambda: test_summaries_are_those_of_the_keys_that_there_are(BOUNDS),
    lambda: test_summaries_are_those_of_the_keys_that_there_are(MEANS),
    lambda: test_each_kv_head_attends_to_its_best_pages(32, (6, 2), 48, "fp16", BOUNDS, True, 3),
    lambda: test_each_kv_head_attends_to_its_best_pages(16, (4, 2), 32, "bf16", MEANS, False, 3),
    lambda: test_each_kv_head_attends_to_its_best_pages(128, (20, 1), 32, "fp32", 2, False, None),
    test_entries_outside_of_the_pool_are_absent,
    test_a_page_whose_summary_is_nan_is_selected_only_at_the_ends,
    lambda: test_as_few_pages_as_are_forced_and_more_than_there_are(2),
    lambda: test_as_few_pages_as_are_forced_and_more_than_there_are(40),
    test_lengths_outside_of_the_table_are_its_ends,
    test_no_sequence_and_no_page_give_zeros,
    test_a_compiled_call_is_one_graph,
]


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a GPU runs the kernels")
@pytest.mark.parametrize("check", ON_ANY_DEVICE)
def test_a_cpu_computes_the_same_in_torch(check: Callable[[], None]) -> None:
    check()


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selects", ["bounds", "means", "lists", None])
def test_a_launch_of_a_suite_attends_to_the_mask(selects: Any) -> None:
    case = Case((1, 128), (1, 16), (4, 2), batch=2, lists=2, causal=True, head_dim=32)
    case = case._replace(density=1) if selects is None else case
    operands = launch_operands(case, context=128, batch=2, block=[1, 16])
    if selects is None:
        launch = attention_paged.KERNEL.prepare(operands)
    else:
        launch = attention_decode.KERNEL.prepare(operands, selects=selects)
    assert_attends(launch, operands, case)


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_what_decodes(capability, monkeypatch) -> None:
    programs = programs_of_templates(monkeypatch)
    for module in (_paged, _page_scores):
        monkeypatch.setattr(module, "starts_early", lambda device: capability >= 90)
    cpu = torch.device("cpu")
    for page, heads, d, kinds, dtype, group in (
        (64, 8, 128, BOUNDS, torch.bfloat16, 4),
        (16, 8, 128, MEANS, torch.bfloat16, 4),
        (32, 3, 96, BOUNDS, torch.bfloat16, 4),
        (64, 1, 256, BOUNDS, torch.float16, 64),
        (16, 2, 128, BOUNDS, torch.float32, 4),
    ):
        strides = page * heads * d, heads * d, d
        sizes = 16, 512, group * heads, heads, d, 9000, page
        shape = PagedShape(*sizes, strides, 512, dtype, cpu)
        launch_of_scores.__wrapped__(shape, kinds, 1, 1)
        launch_of_summaries.__wrapped__(shape, kinds, 1)
        for listed, splits in ((True, 3), (False, 8)) if group == 4 else ((True, 1),):
            config = config_of(shape, 32)._replace(splits=splits)
            launch_of_attention.__wrapped__(shape, 32, listed, 0.1, config)
    assert len(programs) == 19
    assert_all_compile(programs, capability)


GPU: Any = {"page": 64, "heads": (32, 8), "d": 128, "dtype": "bf16", "capacity": 40}


@ampere
@pytest.mark.gpu
@pytest.mark.parametrize(
    ("page", "kinds", "by_head"), [(16, BOUNDS, False), (64, MEANS, True), (128, BOUNDS, False)]
)
def test_each_kv_head_attends_to_its_best_pages_on_a_gpu(page, kinds, by_head) -> None:
    lengths = [0, 1, page - 1, page, page + 1, 17 * page + 3, 40 * page - 1, 40 * page]
    c = cache(lengths, **{**GPU, "page": page}, kinds=kinds, by_head=by_head)
    for keep in (6, None):
        o = decode_attention(*c.operands, None if keep is None else c.summaries, keep=keep)
        places = places_of(c, keep)
        if keep is not None:  # bf16 scores may be nearly equal, so take the device's own choice
            columns = select_pages(c.operands, c.summaries, keep, 1, 1).view(8, 8, -1)
            chosen = [[[x for x in row if x >= 0] for row in lists] for lists in columns.tolist()]
            same = sum(
                a == b
                for x, y in zip(chosen, places, strict=True)
                for a, b in zip(x, y, strict=True)
            )
            assert same >= 60
            places = chosen
        assert_right(c, o, places, "bf16")


@ampere
@pytest.mark.gpu
def test_a_graph_replays_with_other_lengths_tables_and_keys_on_a_gpu() -> None:
    c = cache([100] * 8, **GPU)
    decode_attention(*c.operands, c.summaries, keep=6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        summarize_pages(c.summaries, c.k, c.table, c.lengths, appended=1)
        o = decode_attention(*c.operands, c.summaries, keep=6)
        whole = decode_attention(*c.operands)
    for seed, lengths in enumerate(([0, 1, 64, 65, 2000, 2559, 2560, 700], [2560] * 8, [5] * 8)):
        c.refill(lengths, seed)
        c.table[3, 1] = len(c.k) + seed
        graph.replay()
        assert torch.equal(o, decode_attention(*c.operands, c.summaries, keep=6))
        assert_right(c, whole, places_of(c, None), "bf16")
        if seed == 0:
            assert not o[0].any()


@hopper
@pytest.mark.filterwarnings("default")  # of inductor
def test_compiled_code_decodes_on_a_gpu() -> None:
    c = cache([100, 2000, 2560, 64], **GPU)

    def step(q: Tensor) -> Tensor:
        summarize_pages(c.summaries, c.k, c.table, c.lengths, appended=1)
        return decode_attention(q * 2, *c.operands[1:], c.summaries, keep=6)

    right = step(c.q)
    assert torch.equal(torch.compile(step, fullgraph=True)(c.q), right)
