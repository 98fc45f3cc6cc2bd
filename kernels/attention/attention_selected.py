"""Attention whose blocks are selected in every launch: what a mask that changes costs.

    selects   a method's name   its scores, the blocks, their lists, attention, what it adds
              scores                        the blocks, their lists, attention
              lists                                     their lists, attention

`attention_wgmma` or `attention_gathered` beside it has attention alone, so differences of the rows
are the parts. The candidates of a row also have the time of each part alone, by its name in `of`.
A contest compares outputs for one mask. So scores are added to a bias, which is GAP larger for the
blocks of the mask. The mask is selected if scores differ by less; if not, the judge finds a wrong
output. A row's first block has PEAK times GAP, so that halving (_selecting.py) ends after 9 rounds,
as it does with ordinary scores. In rows that have fewer blocks than others, the rest is -inf. Every
part does the work of a call without a bias (sparsebench.select_attention). `settings` are numbers
for options of the method, such as "stride=8". A branch that a method adds to attention needs a
factor of 0 there: "gate=0" for vsa. NSA has its selected branch alone. If a method has more lists
than the mask, each list of the mask is selected several times.

Bound: attention's, and what the method's file says of its scores.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench._discovery import load, modules, unknown
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common.operator import Earlier, Engine, OperatorCall, launch_of
from sparsebench.kernels._common.product import Product, Selected
from sparsebench.kernels._common.search import lines_of_parts
from sparsebench.kernels._kernel import Kernel, Launch, Operands, refuse
from sparsebench.kernels.attention import attention_gathered, attention_triton, attention_wgmma
from sparsebench.kernels.attention._call import AttentionCall, bind, operator_of
from sparsebench.kernels.attention._shapes import by_head, unsupported
from sparsebench.kernels.attention._shared_plans import SharedPlans, Sizes, make_shared_plans
from sparsebench.kernels.attention.methods._method import FOLDER, Method, Scored

ENGINES = attention_gathered.KERNEL, attention_wgmma.KERNEL, attention_triton.KERNEL
WITHOUT = "scores", "lists"  # parts without a method
GAP, PEAK = 2.0**9, 2.0**8  # scores of normal Q and K, D 128, are below 100


def prepare(operands: Operands, *, selects: str = "pooled", settings: str = "") -> Launch:
    """Choose the kernel of attention, and make plans that take any lists. Raises Unsupported."""
    mask, bound = operands.weights["mask"], bind(operands, ENGINES)
    assert isinstance(mask, BlockMask)
    call: AttentionCall = bound.call
    q, k, v = bound.activations
    score = _scoring(selects, _numbers(settings), mask, call)
    heads = [by_head(x, call.shape) for x in (q, k, v)]
    bias, select = selection_of(mask, score(*heads).scores.shape[1] if score else mask.lists)
    selection = select(bias)
    plans = plans_of(selection, ENGINES)

    def columns(scored: Scored | None) -> Tensor:
        return select(bias if scored is None else scored.scores).columns

    def run(product: Product) -> Tensor:
        if score is None:
            plans.load(selection.columns if selects == "lists" else columns(None), transposed=False)
            alone: Tensor = product.run(q, k, v)[0]
            return alone
        scored = score(*heads, bias=bias)
        plans.load(columns(scored), transposed=False)
        o = product.run(*(x.flatten(0, 1).flatten(1) for x in (scored.q, scored.k, scored.v)))[0]
        return scored.finish(by_head(o, call.shape)).flatten(0, 1).flatten(1)

    plans.load(selection.columns, transposed=False)
    selected = choose(plans, bound, operands)
    launch = launch_of(selected, lambda: run(selected.product))
    parts: dict[str, Callable[[], object]] = {
        "lists": lambda: plans.load(selection.columns, transposed=False),
        "attention": bound.run(selected.product),
    }
    if selects != "lists":
        parts["select"] = lambda: columns(None)
    if score is not None:
        parts["score"] = lambda: score(*heads, bias=bias)
    lines = [*launch.candidates, *lines_of_parts(parts, operands.device)]
    return replace(launch, choice={**launch.choice, "selects": selects}, candidates=lines)


def selection_of(mask: BlockMask, lists: int) -> tuple[Tensor, Callable[[Tensor], BlockMask]]:
    """Return scores that select a mask, and the function from scores to the mask they select.

    Scores are fp32 [batch, lists, q_blocks, kv_blocks]. Raises Unsupported for a mask with bits,
    and for `lists` that are no multiple of the mask's.
    """
    refuse("expected a mask without bits, found bits" if mask.bits is not None else None)
    if lists % mask.lists:
        refuse(f"expected a list for each of {lists} heads or fewer, found {mask.lists}")
    cells = mask.to_dense().view(mask.batch, mask.lists, mask.q_blocks, mask.kv_blocks)
    most = max(1, int(mask.counts.max()))
    bias = torch.where(cells != 0, GAP, 0.0)
    bias[(cells != 0) & (cells.cumsum(3) == 1)] *= PEAK
    fewer = mask.counts.view(*cells.shape[:3], 1) < most
    bias = bias.masked_fill_((cells == 0) & fewer, -torch.inf)

    def select(scores: Tensor) -> BlockMask:
        block, tokens = [*mask.block], [*mask.tokens]
        return BlockMask.from_scores(scores, most, block=block, tokens=tokens, causal=mask.causal)

    return bias.repeat_interleave(lists // mask.lists, 1), select


def plans_of(selection: BlockMask, engines: tuple[Engine, ...]) -> SharedPlans:
    """Return the plans of all masks of these sizes, by the engines that can run the call."""
    device = selection.columns.device

    def likeliest(call: AttentionCall) -> Sequence[Engine]:
        return [e for e in engines if not e.unsupported(call.problem, device)]

    return make_shared_plans(
        Sizes.of(selection), lambda first: operator_of(first, engines, likeliest)
    )


def choose(plans: SharedPlans, bound: OperatorCall, operands: Operands) -> Selected:
    """Return the fastest plan of a suite's call, over the lists that were loaded last."""
    earlier = Earlier(operands.pinned, [line for line in operands.timed if "of" not in line])
    return replace(bound, operator=plans.operator).select(earlier)


def _numbers(settings: str) -> dict[str, float]:
    """Return numbers by name from a text such as "stride=8, norm=0.5". Raises Unsupported."""
    numbers = {}
    for each in filter(None, (part.strip() for part in settings.split(","))):
        name, _, value = each.partition("=")
        try:
            number = float(value)
        except ValueError:
            refuse(f'settings: expected text such as "stride=8, norm=0.5", found {each!r}')
        numbers[name.strip()] = int(number) if number.is_integer() else number
    return numbers


def _scoring(
    selects: str, settings: Mapping[str, Any], mask: BlockMask, call: AttentionCall
) -> Callable[..., Scored] | None:
    """Return the method's score of q, k and v, or None for a part without one."""
    if selects in WITHOUT:
        return None
    if selects not in (names := modules(FOLDER)):
        refuse(f"selects: {unknown('a part or a method', selects, [*names, *WITHOUT])}")
    method: Method = load(FOLDER, selects)
    method.require(selects, settings)
    (b_q, b_k), queries = mask.block, method.queries or mask.block[1]
    refuse(None if b_q == queries else f"block: expected {queries} queries, found {[b_q, b_k]}")
    return partial(method.score, scale=call.scale, block=b_k, causal=mask.causal, **settings)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
"""Selects blocks, lists them, and attends to them."""
