"""Lists of single queries: their gathering, what NSA and MoBA select, and attention in fp64."""

from itertools import pairwise, product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._selection import Selection
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels.attention import (
    _gated_sum,
    _gathered_tiles,
    _gathering,
    _moba,
    _nsa,
    attention_gathered,
    attention_gathered_backward,
    attention_selected,
    attention_triton,
)
from sparsebench.kernels.attention._call import ListedMask
from sparsebench.kernels.attention._gathering import CHUNK, Gathered, bound_gathering
from sparsebench.kernels.attention._moba import score_blocks
from sparsebench.kernels.attention._nsa import compress
from sparsebench.kernels.attention._selecting import _select_launch
from tests.compiling.triton_kernels import (
    complaint_about_launch,
    programs_of_templates,
)
from tests.kernels.attention.cases import (
    Case,
    assert_attends,
    launch_operands,
    moved,
    random_mask,
    with_more_behind,
    with_places,
)
from tests.kernels.attention.token_cases import (
    TokenCase,
    moba_of,
    nsa_of,
    visible_blocks,
)

MASKS: list[dict[str, Any]] = [
    {"tokens": (70, 200), "block": (1, 16), "lists": 2, "causal": True},
    {"tokens": (33, 64), "block": (1, 64), "batch": 2},
    {"tokens": (2100, 90), "block": (1, 1), "density": 0.1},  # more words and blocks than a step
    {"tokens": (90, 290), "block": (1, 1), "density": 0.1},  # more than registers have
    {"tokens": (50, 100), "block": (1, 16), "density": 1},
    {"tokens": (90, 70), "block": (1, 16), "lists": 2, "density": 0.7, "causal": True},
]


def visible(token: int, mask: BlockMask) -> set[int]:
    """Return the blocks that a query sees."""
    last = token + mask.tokens[1] - mask.tokens[0] if mask.causal else mask.tokens[1]
    return {j for j in range(mask.kv_blocks) if j * mask.block[1] <= last}


@pytest.mark.interpreted
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize(
    ("options", "least"), [*zip(MASKS, (16, 20, 3, 4, 33, 9), strict=True)], ids=str
)
def test_the_queries_of_a_block_are_gathered_as_in_torch(
    options: dict[str, Any], least: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    least = CHUNK + 1 if apart else least
    monkeypatch.setattr(_gathering, "STEP", 32)
    right_mask = random_mask(**options)
    wide = with_more_behind(with_places(right_mask))
    places = int(wide.counts.max())
    right = Gathered.of(right_mask, places, least, apart)
    gathered = Gathered(*(torch.full_like(x, -7) for x in right))
    mask = moved(wide)
    for program in bound_gathering(mask, Gathered(*map(moved, gathered)), places, least, apart):
        program()
    for name in ("starts", "bases", "counts", "words", "commons"):
        assert torch.equal(getattr(gathered, name), getattr(right, name)), name
    entries, starts, ends = gathered.entries, gathered.starts, gathered.bases[:, -1]
    chunks, blocks = gathered.words.shape[1:]
    tokens, offsets = mask.q_blocks, right_mask.offsets.tolist()
    listed = [set(right_mask.indices[a:b].tolist()) for a, b in pairwise(offsets)]
    if apart:
        behind = right_mask.kv_blocks
        seen = [visible(t, right_mask) for t in range(tokens)]
        listed = [
            {behind} if row and row == seen[i % tokens] else row for i, row in enumerate(listed)
        ]
        assert any(row == {behind} for row in listed) or options in (MASKS[0], *MASKS[2:4])
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
    complete = [apart and row == {right_mask.kv_blocks} for row in listed]
    assert gathered.counts.tolist() == [
        -1 if each else len(row) for each, row in zip(complete, listed, strict=True)
    ]
    of_rows = [[] for _ in listed]
    for list_, block in product(range(len(starts)), range(blocks)):
        first = int(starts[list_, block])
        of_block = entries[first : first + int(ends[list_, block])]
        assert (of_block.diff() > 0).all()
        for entry in of_block.tolist():
            of_rows[entry // places].append((entry % places, block))
    assert of_rows == [[*enumerate(sorted(row))] for row in listed]


CASES = [
    TokenCase(70, 70, (4, 2), 16, 3),
    TokenCase(40, 130, (16, 1), 8, 5, batch=2, dtype=torch.float16),
    TokenCase(50, 50, (3, 1), 16, 2, head_dim=48),
    TokenCase(90, 60, (2, 2), 8, 4),  # the first 30 queries see nothing
]


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
    bound = 2e-3 if q.dtype == torch.float16 else 1e-5
    torch.testing.assert_close(actual.cpu().double(), o, atol=bound, rtol=bound)
    require_scores(scores, right, bias, case, atol=2e-3)


@pytest.mark.interpreted
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_moba_scores_blocks_by_their_means(case: TokenCase, biased: bool) -> None:
    q, k, _ = case.operands()
    right = moba_of(q, k, case.block)
    bias = torch.randn(right.shape) if biased else None
    scores = score_blocks(*map(moved, (q, k)), case.block, None if bias is None else moved(bias))
    require_scores(scores, right, bias, case, atol=1e-2)


def require_scores(
    scores: Tensor, right: Tensor, bias: Tensor | None, case: TokenCase, atol: float
) -> None:
    """Compare the scores of visible blocks with those in fp64; `atol` is that of fp16."""
    half, seen = case.dtype == torch.float16, visible_blocks(case)
    close = {"atol": atol, "rtol": 2e-3} if half else {"atol": 1e-5, "rtol": 1e-5}
    right = right if bias is None else right + bias
    torch.testing.assert_close(scores.cpu().double()[..., seen], right[..., seen], **close)


@pytest.mark.interpreted(also_compiled=False)
@pytest.mark.parametrize("selects", ["nsa", "moba", "scores", "lists"])
def test_a_launch_that_selects_for_each_query_attends_to_the_mask(selects: Any) -> None:
    lists = {"nsa": 2, "moba": 4}.get(selects, 1)
    case = Case((70, 70), (1, 16), (4, 2), batch=2, lists=lists, causal=True, head_dim=32)
    operands = launch_operands(case, block=[1, 16])
    assert_attends(attention_selected.prepare(operands, selects=selects), operands, case)


def test_ways_to_select_need_their_lists() -> None:
    for selects, lists, block, causal, reason in (
        ("nsa", 4, 1, True, "expected a list for each of 2 heads or fewer, found 4"),
        ("moba", 4, 16, True, "expected 1 queries"),
        ("nsa", 2, 1, False, "expected a causal mask"),
    ):
        case = Case((70, 70), (block, 16), (4, 2), lists=lists, causal=causal, head_dim=32)
        operands = launch_operands(case, block=[block, 16])
        with pytest.raises(Unsupported, match=reason):
            attention_selected.prepare(operands, selects=selects)


def test_more_places_than_int32_can_number_are_refused(monkeypatch) -> None:
    monkeypatch.setattr(_gathered_tiles, "MOST_ENTRIES", 2 * 70)
    monkeypatch.setattr(attention_triton, "choose_path", lambda reason, device: "pointers")
    case = Case((70, 70), (1, 16), (4, 2), lists=2, causal=True, head_dim=32)
    w, call = ListedMask(case.mask()), case.call()
    with pytest.raises(Unsupported, match="at most 140 places of all queries, found"):
        attention_gathered.plan(w, call, attention_gathered.choices(w, call)[0])


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_what_serves_lists_of_queries(capability, monkeypatch) -> None:
    programs = programs_of_templates(monkeypatch)
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
