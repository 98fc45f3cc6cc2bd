"""Masks, operands and a plain reference, which the tests of block-sparse attention share."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sparsebench.formats._selection import Selection
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._kernel import DTYPES, Launch, Operands
from sparsebench.kernels.attention._call import AttentionCall, Op
from sparsebench.kernels.attention._shapes import AttentionShape
from sparsebench.results.record import Problem
from tests.conftest import INTERPRETED

DEVICE = torch.device("cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu")
BF16: Any = {"device": "cuda", "dtype": torch.bfloat16}


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


class Case(NamedTuple):
    """Sizes of a mask and heads."""

    tokens: tuple[int, int]
    block: int | tuple[int, int]
    heads: tuple[int, int]
    batch: int = 1
    lists: int = 1
    causal: bool = False
    bits: bool = False
    head_dim: int = 128
    dtype: str = "fp16"
    density: float = 0.5
    places: bool = False

    def mask(self) -> BlockMask:
        """Return a random mask, the same each time; with `places`, each block has one."""
        mask = random_mask(
            self.tokens,
            self.block,
            batch=self.batch,
            lists=self.lists,
            density=self.density,
            causal=self.causal,
            bits=self.bits,
        )
        return with_places(mask) if self.places else mask

    def call(self, op: Op = "attention") -> AttentionCall:
        """Return the sizes as kernels take them, with the default factor of the scores."""
        heads, sides = (*self.heads, self.head_dim), sides_of(self.block)
        shape = AttentionShape(self.batch, *self.tokens, *heads, sides, self.dtype)
        return AttentionCall(op, shape, self.head_dim**-0.5)

    def operands(self) -> list[Tensor]:
        """Return random q, k, v and dO by head, the same each time."""
        torch.manual_seed(0)
        queries, keys = zip(self.tokens, self.heads, strict=True)
        return [
            torch.randn(self.batch, *size, self.head_dim).to(DTYPES[self.dtype])
            for size in (queries, keys, keys, queries)
        ]


def sides_of(block: int | tuple[int, int]) -> tuple[int, int]:
    """Return the queries and keys of a block."""
    return (block, block) if isinstance(block, int) else block


def random_mask(
    tokens: tuple[int, int],
    block: int | tuple[int, int],
    *,
    batch: int = 1,
    lists: int = 1,
    density: float = 0.5,
    causal: bool = False,
    bits: bool = False,
    seed: int = 0,
) -> BlockMask:
    """Return a mask of random blocks: one block at density 0, all at 1, and else with empty rows.

    At other densities the second row of blocks is empty if there are several.
    """
    draw = torch.Generator().manual_seed(seed)
    sides = sides_of(block)
    q_blocks, kv_blocks = (-(-size // side) for size, side in zip(tokens, sides, strict=True))
    cells = torch.rand(batch * lists, q_blocks, kv_blocks, generator=draw) < density
    cells[:, 0, 0] = True
    cells[:, 1:2] &= density == 1
    if not bits:
        dense = cells.flatten(0, 1).float()
        shape = {"block": [*sides], "tokens": [*tokens], "batch": batch}
        return BlockMask.from_dense(dense, **shape, causal=causal)
    elements = torch.rand(batch, lists, *tokens, generator=draw) < 0.5
    wide = cells.repeat_interleave(sides[0], 1).repeat_interleave(sides[1], 2)
    wide = wide[:, : tokens[0], : tokens[1]].view(batch, lists, *tokens)
    full = torch.rand(wide.shape[-2] // 32 + 1, generator=draw) < 0.5
    elements |= full.repeat_interleave(32)[: tokens[0], None]
    return BlockMask.from_elements(elements & wide, [*sides])


def selection_mask(case: Case, seed: int, keys: Tensor | None = None, keep: int = 2) -> BlockMask:
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


def without(mask: BlockMask, column: int) -> BlockMask:
    """Return a mask without one column of blocks; the mask has no bits."""
    cells = mask.to_dense()
    cells[:, column] = 0
    other = BlockMask.from_dense(
        cells, block=[*mask.block], tokens=[*mask.tokens], batch=mask.batch, causal=mask.causal
    )
    return with_places(other) if mask.keep else other


def with_places(mask: BlockMask, keep: int | None = None) -> BlockMask:
    """Return the mask with places for all blocks of a row, or `keep`; further ones are empty."""
    cells = mask.to_dense().view(mask.batch, mask.lists, mask.q_blocks, mask.kv_blocks)
    scores = torch.zeros_like(cells).masked_fill_(cells == 0, -torch.inf)
    options: dict[str, Any] = {"block": [*mask.block], "tokens": [*mask.tokens]}
    wide = BlockMask.from_scores(scores, keep or mask.kv_blocks, causal=mask.causal, **options)
    if mask.slots is None:
        return wide
    there = wide.present
    wide.columns[there], slots = mask.columns, torch.zeros_like(wide.columns)
    slots[there] = mask.slots
    return replace(wide, bits=mask.bits, slots=slots)


def with_more_behind(mask: BlockMask) -> BlockMask:
    """Return a mask of places with blocks behind the first empty place, which no walk reaches."""
    columns, last = mask.columns.clone(), mask.offsets[1:].long() - 1
    ends = (mask.counts > 1) & ~mask.present[last - 1]
    columns[last[ends]] = 0
    other = replace(mask, columns=columns)
    other.__dict__["transposed"] = mask.transposed
    return other


def moved(x: Any, device: torch.device = DEVICE) -> Any:
    """Return a mask or a tensor on the device of the kernels, or another one."""
    if isinstance(x, BlockMask):
        return replace(x, **{name: moved(array, device) for name, array in x.arrays().items()})
    return x.to(device)


def flat(x: Tensor) -> Tensor:
    """Return [batch, tokens, heads, D] as the kernels take it."""
    return x.flatten(2).flatten(0, 1)


def reference(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockMask, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """Return O [batch, S_q, H, D] and the LSE [batch, H, S_q] of q, k, v [batch, tokens, heads, D].

    Rows without an allowed element have O = 0 and LSE = -inf.
    """
    heads, group = q.shape[2], q.shape[2] // k.shape[2]
    scale = q.shape[3] ** -0.5 if scale is None else scale
    k, v = (x.repeat_interleave(group, 2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * scale
    scores = scores.masked_fill(~mask.expand(heads), -torch.inf)
    lse = scores.logsumexp(-1)
    p = (scores - lse.clamp(min=-1e30)[..., None]).exp()
    return torch.einsum("bhqk,bkhd->bqhd", p, v), lse


def launch_operands(case: Case, device: torch.device = DEVICE, **fields: Any) -> Operands:
    """Return what a suite gives to a kernel of op attention."""
    heads = dict(zip(("heads", "kv_heads"), case.heads, strict=True))
    sizes = {"m": case.tokens[0], **heads, "head_dim": case.head_dim, "dtype": case.dtype}
    problem = Problem("attention", {**sizes, "scale": None, **fields})
    inputs = (moved(flat(x), device) for x in case.operands()[:3])
    weights: Any = {"mask": moved(case.mask(), device)}
    return Operands(problem, weights, dict(zip("qkv", inputs, strict=True)), torch.add)


def assert_attends(launch: Launch, operands: Operands, case: Case) -> None:
    """Compare a launch with O in fp64, after its activations were drawn anew."""
    for x in operands.activations.values():
        x.copy_(x.flip(0))
    inputs = zip(operands.activations.values(), case.operands(), strict=False)
    o, _ = reference(*(x.cpu().double().view(by_head.shape) for x, by_head in inputs), case.mask())
    output: Any = launch.run()
    assert (output.double().cpu() - flat(o)).norm() < 4e-3 * o.norm()


def rising(operands: list[Tensor]) -> list[Tensor]:
    """Return operands whose last keys are 1,000 times as large as the first: scores up to 500."""
    q, k, v, do = operands
    growth = torch.logspace(-1, 2, k.shape[1], dtype=k.dtype)[:, None, None]
    return [q, k * growth, v, do]


def gradients(
    operands: Sequence[Tensor], mask: BlockMask
) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return O, the LSE, and dQ, dK and dV in fp64 of q, k, v and dO by head."""
    q, k, v = (x.double().requires_grad_() for x in operands[:3])
    o, lse = reference(q, k, v, mask)
    return o.detach(), lse.detach(), torch.autograd.grad(o, (q, k, v), operands[3].double())


def check_against_fp64(inputs: list[Tensor], mask: BlockMask, results: Any) -> None:
    """Compare O, dQ, dK and dV of q, k, v and dO with those in fp64."""
    arrays: dict[str, Any] = {name: array.cpu() for name, array in mask.arrays().items()}
    right, _, gradient = gradients([x.detach().cpu() for x in inputs], replace(mask, **arrays))
    for x, y in zip(results, (right, *gradient), strict=True):
        assert (x.detach().cpu().double() - y).norm() < 1e-2 * y.norm()
