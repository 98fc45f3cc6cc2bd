"""FlexAttention of PyTorch, compiled, with the lists of the mask.

    exact    BLOCK_SIZE is the mask's block, and tiles divide it: BLOCK_M, BLOCK_N
    coarser  blocks below 128, or whose sides tl.dot does not take, lie in blocks of 128: the lists
             are a superset, and a mask_mod looks up each element's cell

`prepare` builds the lists and compiles, which takes seconds; neither is timed. If
both ways are possible, both are candidates.

The gradients are those of the compiled forward pass. Its node of autograd is called directly, so a
launch runs the backward kernels alone, on the current stream. Hooks replace the O and LSE that it
saved by those of the operands. By default the backward pass of H100 has tiles of 128 and supports
no smaller blocks, so each way sets its own tiles.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import e, log2
from types import FunctionType
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config as functorch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.errors import Unsupported
from sparsebench.formats._format import rows_of
from sparsebench.formats.block_mask import BlockMask
from sparsebench.formats.block_mask_converters import padded_lists
from sparsebench.kernels._common.search import search
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.peers._attention import by_head, mask_of
from sparsebench.results.record import Problem

COARSE = 128  # the side of FlexAttention's blocks by default
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
Options = dict[str, int]


@dataclass(frozen=True)
class Lists:
    """Lists of blocks as FlexAttention takes them, for every head.

    partial, full  numbers int32 [batch, H, q_blocks], and columns int32 [..., kv_blocks]
    block          queries and keys of a block
    mask_mod       the elements of partial blocks, or None if there are none
    """

    partial: tuple[Tensor, Tensor]
    full: tuple[Tensor, Tensor]
    block: tuple[int, int]
    mask_mod: Callable[..., Tensor] | None


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why FlexAttention cannot run the problem, or None."""
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "needs compute capability 8.0 or newer"
    d = problem["head_dim"]
    if d & (d - 1) or d < SMALLEST:
        return f"head_dim: expected a power of two from {SMALLEST}, found {d}"
    return None


def exact_lists(mask: BlockMask, heads: int) -> Lists:
    """Return the blocks of the mask as they are."""
    partial, full = (_listed(mask, heads, partial=which) for which in (True, False))
    # A single block of queries may be declared longer: decoding takes tiles of 16 queries.
    b_q = max(mask.block[0], COARSE) if mask.q_blocks == 1 else mask.block[0]
    some = bool(mask.partial.any())
    rule = mask_mod_of(mask, heads) if some else None
    return Lists(partial, full, (b_q, mask.block[1]), rule)


def coarser_lists(mask: BlockMask, heads: int) -> Lists:
    """Return blocks of multiples of the mask's, about 128 long; each of them is partial."""
    wide = tuple(side * max(1, COARSE // side) for side in mask.block)
    q, kv = (-(-size // side) for size, side in zip(mask.tokens, wide, strict=True))
    ratio = [outer // inner for outer, inner in zip(wide, mask.block, strict=True)]
    rows = rows_of(mask.offsets)
    lists, row = rows // mask.q_blocks, rows % mask.q_blocks
    at = lists * q + row // ratio[0]
    cells = torch.zeros(mask.batch * mask.lists * q, kv, dtype=torch.bool, device=rows.device)
    cells[at, mask.indices // ratio[1]] = True
    counts = cells.sum(1, dtype=torch.int32)
    columns = (~cells).to(torch.int8).argsort(dim=1, stable=True).to(torch.int32)
    some = (
        _by_head(counts.view(mask.batch, mask.lists, q), heads),
        _by_head(columns.view(mask.batch, mask.lists, q, kv), heads),
    )
    none = torch.zeros_like(some[0]), torch.zeros_like(some[1])
    return Lists(some, none, (wide[0], wide[1]), mask_mod_of(mask, heads))


def _listed(mask: BlockMask, heads: int, *, partial: bool) -> tuple[Tensor, Tensor]:
    """Return numbers of blocks, and columns padded to all key blocks: torch transposes them."""
    counts, columns = padded_lists(mask, heads, partial=partial)
    return counts, pad(columns, (0, mask.kv_blocks - columns.shape[-1]))


def _by_head(lists: Tensor, heads: int) -> Tensor:
    return lists.repeat_interleave(heads // lists.shape[1], 1).contiguous()


def mask_mod_of(mask: BlockMask, heads: int) -> Callable[..., Tensor]:
    """Return which elements are allowed, as a function of sequence, head, query and key."""
    (s_q, s_kv), (b_q, b_k), share = mask.tokens, mask.block, heads // mask.lists
    rows = rows_of(mask.offsets)
    absent, full = -2, -1
    partial = mask.partial.cumsum(0) - 1 if mask.slots is None else mask.slots
    kinds = torch.full(mask.shape, absent, dtype=torch.int32, device=rows.device)
    kinds[rows, mask.indices] = torch.where(mask.partial, partial, full).to(torch.int32)
    lists, q_blocks, causal, bits = mask.lists, mask.q_blocks, mask.causal, mask.bits

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        kind = kinds[(b * lists + h // share) * q_blocks + q // b_q, k // b_k]
        allowed = kind != absent
        if causal:
            allowed = allowed & ((kind == full) | (k <= q + (s_kv - s_q)))
        if bits is not None:
            byte = bits[kind.clamp(min=0), q % b_q, k % b_k // 8].to(torch.int32)
            allowed = allowed & ((kind == full) | (((byte >> (k % b_k % 8)) & 1) == 1))
        return allowed

    return mask_mod


def candidates(mask: BlockMask, heads: int) -> list[tuple[dict[str, Any], Lists, Options]]:
    """Return the candidates: a name for the row, lists, and options of the forward kernel."""
    b_q, b_k = mask.block
    ways: list[tuple[dict[str, Any], Lists, Options]] = []
    tiles = all(side >= SMALLEST and side & (side - 1) == 0 for side in (b_q, b_k))
    if tiles or (mask.q_blocks == 1 and b_k >= SMALLEST and b_k & (b_k - 1) == 0):
        lists = exact_lists(mask, heads)
        m, n = min(128, b_q), min(128, b_k)
        tile = {"BLOCK_M": m, "BLOCK_N": min(64, n)}
        if mask.q_blocks == 1:
            options: list[Options] = [{}]
        elif m == n == 128:
            options = [{}, {**tile, "num_warps": 8, "num_stages": 3}]
        elif min(m, n) == 64:
            options = [tile, {**tile, "num_warps": 4, "num_stages": 2}]
        else:  # the default has four warps, too many for such a tile
            pipelines = ((2, 2), (1, 3), (2, 3))
            more = [{**tile, "num_warps": w, "num_stages": s} for w, s in pipelines]
            options = [tile, *more]
        ways += [({"lists": "exact", **option}, lists, option) for option in options]
    if min(b_q, b_k) < COARSE and mask.q_blocks > 1:
        ways.append(({"lists": "coarser"}, coarser_lists(mask, heads), {}))
    return ways


def backward_ways(mask: BlockMask, heads: int) -> list[tuple[dict[str, Any], Lists, Options]]:
    """Return the candidates of the backward pass: a name, lists, and options of both kernels."""
    ways: list[tuple[dict[str, Any], Lists, Options]] = []
    for name, lists, options in candidates(mask, heads)[-2:]:
        forward = {f"fwd_{key}": value for key, value in options.items()}
        least = min(lists.block)
        for m, n, stages, warps in BACKWARD_TILES:
            if least % n == 0 and n > least // 8:
                tile = {"BLOCK_M1": m, "BLOCK_N1": n, "BLOCK_M2": n, "BLOCK_N2": m}
                tile |= {"num_stages": stages, "num_warps": warps}
                backward = {f"bwd_{key}": value for key, value in tile.items()}
                ways.append(({**name, **tile}, lists, forward | backward))
    return ways[:6]


def prepare(operands: Operands) -> Launch:
    """Convert the lists and compile; time the ways that run. Raises Unsupported."""
    mask, problem = mask_of(operands), operands.problem
    q, k, v = by_head(operands, "q", "k", "v")
    tokens = problem["batch"] * problem["m"]
    ways = candidates(mask, problem["heads"])

    def run(call: Callable[..., Tensor]) -> Tensor:
        return call(q, k, v).transpose(1, 2).reshape(tokens, -1)

    runs = []
    for _, lists, options in ways:
        call = _compiled(operands, lists, options)
        runs.append(partial(run, call))
    return _fastest(runs, [name for name, _, _ in ways], operands)


def prepare_backward(operands: Operands) -> Launch:
    """Compile both passes, and run the backward pass alone. Raises Unsupported."""
    mask, problem = mask_of(operands), operands.problem
    # .data has a version counter of its own: the harness redraws the activations in place.
    q, k, v = (x.detach().data.requires_grad_() for x in by_head(operands, "q", "k", "v"))
    o, do = by_head(operands, "o", "do")
    lse = operands.activations["lse"].view(problem["batch"], problem["heads"], problem["m"])
    base2 = torch.empty_like(lse)  # as the forward kernel saves it
    ways = backward_ways(mask, problem["heads"])

    def run(gradients: _Gradients) -> Tensor:
        torch.mul(lse, log2(e), out=base2)
        parts = gradients(do)
        return torch.cat([x.transpose(1, 2).reshape(-1, x.shape[-1]) for x in parts])

    runs = []
    for _, lists, options in ways:
        call = _compiled(operands, lists, options)
        gradients = _Gradients(call, (q, k, v), o, base2, options)
        runs.append(partial(run, gradients))
    return _fastest(runs, [name for name, _, _ in ways], operands)


class _Gradients:
    """The backward pass of a compiled call, whose saved O and LSE are replaced."""

    def __init__(
        self,
        call: Callable[..., Tensor],
        inputs: tuple[Tensor, ...],
        o: Tensor,
        lse: Tensor,
        options: Options,
    ) -> None:
        """Take the call; the first call of this object compiles both passes."""
        self.call, self.inputs, self.options = call, inputs, options
        self.o, self.lse = o, lse
        self.node: Any = None

    def __call__(self, do: Tensor) -> list[Tensor]:
        """Return dQ, dK and dV [batch, heads, tokens, D]."""
        if self.node is not None:
            return self._run(do)
        # A donated buffer is overwritten: that would be the given O.
        with functorch.patch(donated_buffer=False), self._tiles():
            with torch.autograd.graph.saved_tensors_hooks(self._saved, lambda saved: saved):
                self.node = self.call(*self.inputs).grad_fn
            return self._run(do)

    def _run(self, do: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [x for x in self.node.apply(do) if isinstance(x, Tensor)]

    def _saved(self, saved: Tensor) -> Tensor:
        places = {x.data_ptr() for x in self.inputs}
        if saved.shape == self.o.shape and saved.dtype == self.o.dtype:
            return saved if saved.data_ptr() in places else self.o
        return self.lse if saved.shape == self.lse.shape and saved.dtype == torch.float32 else saved

    def _tiles(self) -> Any:
        """Return a context in which torch compiles the backward pass with the tiles of `options`.

        Otherwise torch leaves out every tile that its own list does not have.
        """
        from torch._inductor.choices import InductorChoices
        from torch._inductor.template_heuristics.triton import FlexBwDConfig

        names = "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "num_stages", "num_warps"
        tile = [FlexBwDConfig(*(self.options[f"bwd_{name}"] for name in names))]
        method = "get_flex_attention_bwd_configs"
        return patch.object(InductorChoices, method, lambda *_, **__: tile)


def _compiled(operands: Operands, lists: Lists, options: Options) -> Callable[..., Any]:
    """Return FlexAttention compiled for these lists."""
    from torch.nn.attention.flex_attention import BlockMask as FlexMask
    from torch.nn.attention.flex_attention import flex_attention

    problem, mask = operands.problem, mask_of(operands)
    block_mask = FlexMask.from_kv_blocks(
        *lists.partial,
        *lists.full,
        BLOCK_SIZE=lists.block,
        mask_mod=lists.mask_mod,
        seq_lengths=mask.tokens,
    )
    grouped = problem["heads"] != problem["kv_heads"]
    kernel_options: Any = options or None

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(
            q,
            k,
            v,
            block_mask=block_mask,
            scale=problem["scale"],
            enable_gqa=grouped,
            kernel_options=kernel_options,
        )

    # The compiler counts how often it compiles a code object and gives up at eight, and then
    # FlexAttention computes every element, so each way gets a copy.
    code = FunctionType(attend.__code__.replace(), globals(), closure=attend.__closure__)
    return torch.compile(code, dynamic=False, fullgraph=True)


def _fastest(
    runs: Sequence[Callable[[], Tensor]], names: Sequence[Mapping[str, Any]], operands: Operands
) -> Launch:
    """Return the fastest launch, or the pinned one."""
    if not runs:
        raise Unsupported(f"no tile divides blocks of {list(mask_of(operands).block)}")
    if pinned := operands.pinned:
        return Launch(runs[[dict(name) for name in names].index(dict(pinned))], pinned)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from the compiler's code
        result = search(runs, operands.device)
        if len(runs) == 1:
            runs[0]()  # compiles
    return Launch(runs[result.best], names[result.best], candidates=result.lines(names))


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
BACKWARD = Kernel("attention_backward", "block_mask", "cuda", prepare_backward, unsupported)
