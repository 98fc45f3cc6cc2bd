"""FlexAttention of PyTorch, compiled, with the lists of the mask.

BLOCK_SIZE is the mask's block, and tiles divide it: BLOCK_M, BLOCK_N. Blocks of 128 as a superset
of smaller ones, with a mask_mod that looks up each element's cell, took 3 to 15 times as long, so
blocks whose sides tl.dot does not take are unsupported.

`prepare` builds the lists and compiles, which takes seconds; neither is timed. A later process of a
verdict compiles and times the finalists alone. If the mask changes in every call, users build the
lists in every call as well. A launch with the option `plans` does that, compiled together with
attention, and its row's candidates have the times of the plan and of attention, each alone:

    lists     from the columns that a selection gives: BlockMask.from_kv_blocks, without the lists
              for gradients. The blocks that the causal rule cuts are separated first
    elements  create_block_mask with a mask_mod that looks up the cell of each element

The gradients are those of the compiled forward pass. Its node of autograd is called directly, so a
launch runs the backward kernels alone, on the current stream. Hooks replace the O and LSE that it
saved by those of the operands. By default the backward pass of H100 has tiles of 128 and supports
no smaller blocks, so each way sets its own tiles.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import e, log2, prod
from types import FunctionType
from typing import Any, Literal, NamedTuple

import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask as FlexMask
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.formats.block_mask_converters import rule_of, to_flex
from sparsebench.kernels._common.requirements import AMPERE, unsupported_device
from sparsebench.kernels._common.search import finalists, lines_of_parts, search
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_head
from sparsebench.kernels.peers._attention import mask_of, selected_lists
from sparsebench.results.record import Problem

FLEX_LISTS = "kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"
MOST_PAIRS = 2**32  # queries and keys of all lists that a launch looks up: 16k tokens, 16 lists
LONGEST = 128  # the side of FlexAttention's blocks by default
SMALLEST = 16  # the smallest tile of tl.dot
# m and n of a step of the backward pass, stages and warps: of those that torch itself times
BACKWARD_TILES = [
    (64, 128, 3, 8),
    (64, 128, 1, 8),
    (64, 64, 3, 4),
    (32, 64, 3, 4),
    (32, 32, 3, 4),
    (16, 16, 3, 4),
]
MOST_BACKWARD = 6  # candidates of the backward pass: each takes seconds to compile
Options = dict[str, int]
Gradients = Callable[[Tensor], list[Tensor]]
"""dO -> dQ, dK and dV [batch, heads, tokens, D]."""


class FlexCandidate(NamedTuple):
    """A candidate: its choice in the row, the mask with its lists, and options of the kernels."""

    choice: dict[str, Any]
    mask: FlexMask
    options: Options


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if reason := unsupported_device(device, AMPERE, newer=True):
        return reason
    if not is_tile(problem["head_dim"]):
        return f"head_dim: expected a power of two from {SMALLEST}, found {problem['head_dim']}"
    return None


def is_tile(side: int) -> bool:
    """Return whether tl.dot takes a tile of this side."""
    return side >= SMALLEST and side & (side - 1) == 0


def exact_mask(mask: BlockMask, heads: int) -> FlexMask:
    if mask.q_blocks == 1:  # it may be declared longer: decoding takes tiles of 16 queries
        mask = replace(mask, block=(max(mask.block[0], LONGEST), mask.block[1]))
    return to_flex(mask, heads)


def candidates(mask: BlockMask, heads: int) -> list[FlexCandidate]:
    """Return the candidates of the forward pass, with options of its kernel.

    Raises Unsupported if no tile divides the blocks.
    """
    b_q, b_k = mask.block
    if not (is_tile(b_k) and (mask.q_blocks == 1 or is_tile(b_q))):
        expected = f"a power of two from {SMALLEST} for FlexAttention's tiles"
        raise Unsupported(f"block: expected {expected}, found {[b_q, b_k]}")
    exact = exact_mask(mask, heads)
    m, n = min(128, b_q), min(128, b_k)
    tile = {"BLOCK_M": m, "BLOCK_N": min(64, n)}
    if mask.q_blocks == 1:  # the tiles of torch do not divide blocks of 16 keys
        options: list[Options] = [{}, {"BLOCK_M": SMALLEST, "BLOCK_N": min(64, n)}]
    elif m == n == 128:
        options = [{}, {**tile, "num_warps": 8, "num_stages": 3}]
    elif min(m, n) == 64:
        options = [tile, {**tile, "num_warps": 4, "num_stages": 2}]
    else:  # the default has four warps, too many for such a tile
        pipelines = ((2, 2), (1, 3), (2, 3))
        options = [tile, *({**tile, "num_warps": w, "num_stages": s} for w, s in pipelines)]
    return [FlexCandidate({"lists": "exact", **option}, exact, option) for option in options]


def backward_candidates(mask: BlockMask, heads: int) -> list[FlexCandidate]:
    """Return the candidates of the backward pass, with options of both kernels."""
    ways: list[FlexCandidate] = []
    way = candidates(mask, heads)[-1]
    forward = {f"fwd_{key}": value for key, value in way.options.items()}
    least = min(way.mask.BLOCK_SIZE)
    for m, n, stages, warps in BACKWARD_TILES:
        if least % n == 0 and n > least // 8:
            tile = {"BLOCK_M1": m, "BLOCK_N1": n, "BLOCK_M2": n, "BLOCK_N2": m}
            tile |= {"num_stages": stages, "num_warps": warps}
            backward = {f"bwd_{key}": value for key, value in tile.items()}
            ways.append(FlexCandidate({**way.choice, **tile}, way.mask, forward | backward))
    return ways[:MOST_BACKWARD]


def prepare(operands: Operands, *, plans: Literal["lists", "elements"] | None = None) -> Launch:
    """Convert the lists and compile; time the ways that run. Raises Unsupported."""
    problem, (q, k, v) = operands.problem, by_head(operands, "q", "k", "v")
    tokens, mask = problem["batch"] * problem["m"], mask_of(operands)
    ways = to_time(candidates(mask, problem["heads"]), operands)
    plan = _plan(mask, problem["heads"], plans) if plans else None

    def run(call: Callable[..., Tensor]) -> Tensor:
        return call(q, k, v).transpose(1, 2).reshape(tokens, -1)

    runs = [partial(run, _compiled(problem, way, plan)) for way in ways]
    launch = _fastest(runs, ways, operands)
    if plan is None:
        return launch
    fastest = next(way for way in ways if way.choice == launch.choice)
    parts: dict[str, Callable[[], object]] = {
        "plan": torch.compile(lambda: plan().as_tuple(), dynamic=False, fullgraph=True),
        "attention": partial(run, _compiled(problem, fastest)),
    }
    lines = lines_of_parts(parts, operands.device)
    choice = {**launch.choice, "plans": plans}
    return replace(launch, choice=choice, candidates=[*launch.candidates, *lines])


def _plan(mask: BlockMask, heads: int, plans: str) -> Callable[[], FlexMask]:
    """Return what builds FlexAttention's mask in a call. Raises Unsupported."""
    counts, columns = selected_lists(mask)
    pairs = mask.batch * mask.lists * prod(mask.tokens)
    if plans == "lists":
        return lambda: mask_of_lists(mask, counts, columns, heads)
    if plans != "elements":
        raise Unsupported(f"plans: expected lists or elements, found {plans!r}")
    if pairs > MOST_PAIRS:
        raise Unsupported(f"expected at most {MOST_PAIRS} elements to look up, found {pairs}")
    cells = mask.to_dense().bool().view(mask.batch, mask.lists, mask.q_blocks, mask.kv_blocks)
    return lambda: mask_of_elements(mask, cells, heads)


def mask_of_lists(mask: BlockMask, counts: Tensor, columns: Tensor, heads: int) -> FlexMask:
    """Return FlexAttention's mask of the lists of `selected_lists`: device operations only."""
    (s_q, s_kv), (b_q, b_k), rule = mask.tokens, mask.block, rule_of(mask, heads)
    place = torch.arange(mask.kv_blocks, device=columns.device)
    partial_counts, tails = torch.zeros_like(counts), columns
    if mask.causal:  # such blocks are the last ones of a row
        first_query = torch.arange(0, s_q, b_q, device=columns.device)[:, None]
        last_key = ((columns + 1) * b_k).clamp(max=s_kv) - 1
        cut = (last_key > first_query + s_kv - s_q) & (place < counts[..., None])
        partial_counts = cut.sum(-1, dtype=torch.int32)
        first = (counts - partial_counts)[..., None]
        tails = columns.gather(-1, (first + place).clamp(max=mask.kv_blocks - 1))
    lists = partial_counts, tails, counts - partial_counts, columns
    some, of_some, every, of_every = (x.repeat_interleave(heads // mask.lists, 1) for x in lists)
    return _flex_mask(mask, rule, some, of_some, every, of_every)


def mask_of_elements(mask: BlockMask, cells: Tensor, heads: int) -> FlexMask:
    """Return the mask of cells [batch, lists, q_blocks, kv_blocks], as create_block_mask has it."""
    (s_q, s_kv), (b_q, b_k), causal = mask.tokens, mask.block, mask.causal

    def rule(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        allowed = cells[b, h, q // b_q, k // b_k]
        return allowed & (k <= q + (s_kv - s_q)) if causal else allowed

    by_elements = create_block_mask(
        rule, mask.batch, mask.lists, s_q, s_kv, cells.device, BLOCK_SIZE=mask.block
    )
    group = heads // mask.lists
    lists = [getattr(by_elements, name) for name in FLEX_LISTS]
    repeated = [x.repeat_interleave(group, 1) for x in lists if x is not None]
    return _flex_mask(mask, lambda b, h, q, k: rule(b, h // group, q, k), *repeated)


def _flex_mask(mask: BlockMask, rule: Any, *lists: Tensor) -> FlexMask:
    """Return FlexAttention's mask of counts and columns of partial and of full blocks."""
    make: Any = FlexMask.from_kv_blocks
    sizes = {"BLOCK_SIZE": mask.block, "seq_lengths": mask.tokens}
    flex_mask: FlexMask = make(*lists, **sizes, mask_mod=rule, compute_q_blocks=False)
    return flex_mask


def prepare_backward(operands: Operands) -> Launch:
    """Compile both passes, and run the backward pass alone. Raises Unsupported."""
    problem = operands.problem
    # .data has a separate version counter: the harness redraws the activations in place.
    q, k, v = (x.detach().data.requires_grad_() for x in by_head(operands, "q", "k", "v"))
    o, do = by_head(operands, "o", "do")
    lse = operands.activations["lse"].view(problem["batch"], problem["heads"], problem["m"])
    base2 = torch.empty_like(lse)  # as the forward kernel saves it
    ways = to_time(backward_candidates(mask_of(operands), problem["heads"]), operands)

    def run(gradients: Gradients) -> Tensor:
        torch.mul(lse, log2(e), out=base2)
        parts = gradients(do)
        return torch.cat([x.transpose(1, 2).reshape(-1, x.shape[-1]) for x in parts])

    passes = [_gradients(_compiled(problem, w), (q, k, v), o, base2, w.options) for w in ways]
    return _fastest([partial(run, gradients) for gradients in passes], ways, operands)


def to_time(ways: list[FlexCandidate], operands: Operands) -> list[FlexCandidate]:
    """Return the finalists of an earlier process, or all ways if there are none."""
    whole = [line for line in operands.timed if "of" not in line]
    near = [] if operands.pinned else finalists(whole)
    return [way for way in ways if way.choice in near] or ways


def _gradients(
    call: Callable[..., Tensor], inputs: Sequence[Tensor], o: Tensor, lse: Tensor, options: Options
) -> Gradients:
    """Return the backward pass of a compiled call.

    The first call compiles both passes, with these O and LSE in place of those that it would save.
    """
    places, result = {x.data_ptr() for x in inputs}, list[Tensor]()

    def replaced(saved: Tensor) -> Tensor:
        if saved.shape == o.shape and saved.dtype == o.dtype:
            return saved if saved.data_ptr() in places else o
        return lse if saved.shape == lse.shape and saved.dtype == torch.float32 else saved

    def backward(do: Tensor) -> list[Tensor]:
        node: Any = result[0].grad_fn
        with torch.no_grad():
            return [x for x in node.apply(do) if isinstance(x, Tensor)]

    def run(do: Tensor) -> list[Tensor]:
        if result:
            return backward(do)
        # A donated buffer is overwritten: that would be the given O.
        with functorch.patch(donated_buffer=False), _backward_tiles(options):
            with torch.autograd.graph.saved_tensors_hooks(replaced, lambda saved: saved):
                result.append(call(*inputs))  # its node lives as long as it does
            return backward(do)

    return run


def _backward_tiles(options: Options) -> Any:
    """Return a context in which torch compiles the backward pass with the tiles of `options`.

    Otherwise torch leaves out every tile that its own list does not have.
    """
    from torch._inductor.choices import InductorChoices
    from torch._inductor.template_heuristics.triton import FlexBwDConfig
    from torch._inductor.virtualized import V

    names = "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps"
    tile = [FlexBwDConfig(*(options[f"bwd_{name}"] for name in names))]

    class Tile(InductorChoices):
        def get_flex_attention_bwd_configs(self, *_: Any, **__: Any) -> list[FlexBwDConfig]:
            """Return the one tile."""
            return tile

    return V.set_choices_handler(Tile())


def _compiled(
    problem: Problem, way: FlexCandidate, plan: Callable[[], FlexMask] | None = None
) -> Callable[..., Any]:
    grouped = problem["heads"] != problem["kv_heads"]
    kernel_options: Any = way.options or None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(
            *(q, k, v),
            block_mask=way.mask if plan is None else plan(),
            scale=problem["scale"],
            enable_gqa=grouped,
            kernel_options=kernel_options,
        )

    # The compiler counts how often it compiles a code object and gives up at eight, and then
    # FlexAttention computes every element, so each way gets a copy.
    code = FunctionType(attend.__code__.replace(), globals(), closure=attend.__closure__)
    return torch.compile(code, dynamic=False, fullgraph=True)


def _fastest(
    runs: Sequence[Callable[[], Tensor]], ways: Sequence[FlexCandidate], operands: Operands
) -> Launch:
    choices = [way.choice for way in ways]
    if operands.pinned:
        pinned = {name: value for name, value in operands.pinned.items() if name != "plans"}
        return Launch(runs[choices.index(pinned)], pinned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the compiler's code
        result = search(runs, operands.device)
        runs[result.best]()  # a single candidate compiles here
    lines = result.lines(choices, whole=True)  # a later process runs them again
    return Launch(runs[result.best], choices[result.best], candidates=lines)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
BACKWARD = Kernel("attention_backward", "block_mask", "cuda", prepare_backward, unsupported)
