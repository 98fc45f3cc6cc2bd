"""A decoder whose layers have block-sparse weights, or dense ones that start alike.

    W [n, k] in blocks, side by side in squares      qkv [3k, k]   +--+        wd [k, 4k]
    of the shorter side: each is a graph of its own                |  |        +--+--+--+--+
                                                                   +--+        |  |  |  |  |
    small_world   a ring with a fifth of its links moved           |  |        +--+--+--+--+
    uniform       as many blocks in each row, at random places     +--+
                                                                   |  |
                                                                   +--+
Both patterns have equally many blocks: of the rings the one nearest to the density asked for.

Weights start with a deviation of GAIN / sqrt(fan-in), and learn at a rate of RATE / fan-in, where
fan-in counts what is stored of a row. So a rate that suits one width suits all, and all sparsities
(Dey et al. 2024, Sparse maximal update parameterization, arXiv 2405.15743). At a width of 512 both
are as in model.py and train.py.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from sparsebench.errors import SuiteError
from sparsebench.harness.models.train_lm.model import DEVIATION, Decoder, Sizes
from sparsebench.harness.patterns.small_world import ring, ring_cells
from sparsebench.kernels.nn.linear import BlockSparseLinear

WEIGHTS = "qkv", "out", "wg", "wu", "wd"
ADDED = "out", "wd"  # to the residual stream
PATTERNS = "small_world", "uniform"
USUAL = 512  # the width of model.py
META = torch.device("meta")
NEAR = 0.2  # how far, relatively, the density may be from the one asked for
FEWEST = 4  # nodes of a ring that is no complete graph


@dataclass(frozen=True)
class Blocks:
    """Which blocks of a weight are stored."""

    pattern: Literal["small_world", "uniform"]
    block: int
    sparsity: float


def decoder(sizes: Sizes, blocks: Blocks | None, seed: int, device: torch.device = META) -> Decoder:
    """Return a decoder; dense without blocks; on "meta" without values. Raises SuiteError."""
    with device:
        model = Decoder(sizes, None)
    chosen = torch.Generator().manual_seed(seed)
    for layer in model.layers:
        for name in WEIGHTS:
            if blocks is None:
                continue
            n, k = getattr(layer, name).shape
            delattr(layer, name)
            setattr(layer, name, _blocked(n, k, blocks, chosen, device))
    if device != META:
        _draw(model, torch.Generator(device).manual_seed(seed))
    return model


@torch.no_grad()
def _draw(model: Decoder, draw: torch.Generator) -> None:
    for weight in (model.embedding, model.output):
        weight.normal_(0, DEVIATION, generator=draw)
    for layer in model.layers:
        for name in WEIGHTS:
            weight = getattr(layer, name)
            deviation = DEVIATION * math.sqrt(USUAL / fan_in(weight))
            deviation /= math.sqrt(2 * len(model.layers)) if name in ADDED else 1
            stored(weight).normal_(0, deviation, generator=draw)


def stored(weight: nn.Module | nn.Parameter) -> nn.Parameter:
    """Return the elements of a weight."""
    found = weight.values if isinstance(weight, BlockSparseLinear) else weight
    assert isinstance(found, nn.Parameter)
    return found


def fan_in(weight: nn.Module | nn.Parameter) -> float:
    """Return how many elements a row has, on average."""
    rows = weight.out_features if isinstance(weight, BlockSparseLinear) else len(stored(weight))
    return stored(weight).numel() / rows


def fan_ins(model: Decoder) -> dict[nn.Parameter, float]:
    """Return the fan-in of each weight of the layers."""
    weights = [getattr(layer, name) for layer in model.layers for name in WEIGHTS]
    return {stored(weight): fan_in(weight) for weight in weights}


def sparsity_of(model: Decoder, sizes: Sizes) -> float:
    """Return the part of the layers' weights that is not stored."""
    full = sizes.layers * (4 * sizes.width**2 + 3 * sizes.width * sizes.hidden)
    return 1 - sum(values.numel() for values in fan_ins(model)) / full


def links(nodes: int, sparsity: float) -> int:
    """Return the links to each side of the ring nearest to a sparsity. Raises SuiteError."""
    if nodes < FEWEST:
        raise SuiteError(f"block: expected at least {FEWEST} of them in a row; found {nodes}")
    cells = ring_cells(nodes)
    asked = (1 - sparsity) * nodes**2
    best = min(range(len(cells)), key=lambda i: abs(cells[i] - asked))
    if abs(cells[best] - asked) > NEAR * asked:
        nearest = f"{1 - cells[best] / nodes**2:.3g}, the nearest of {nodes} blocks in a row"
        raise SuiteError(f"sparsity: expected {nearest}; found {sparsity:g}")
    return best + 1


def pattern(rows: int, columns: int, blocks: Blocks, draw: torch.Generator) -> Tensor:
    """Return bool [rows, columns]: the blocks that are stored. Raises SuiteError."""
    side = min(rows, columns)
    if max(rows, columns) % side:
        raise SuiteError(f"hidden: expected a multiple of the width; found {rows}x{columns} blocks")
    count = links(side, blocks.sparsity)
    squares = [_square(side, count, blocks, draw) for _ in range(max(rows, columns) // side)]
    return torch.cat(squares, 0 if rows > columns else 1)


def _square(side: int, count: int, blocks: Blocks, draw: torch.Generator) -> Tensor:
    dice = torch.randint(2**31 - 1, (side, side), generator=draw)
    if blocks.pattern == "small_world":
        return torch.from_numpy(ring(dice.numpy(), count))
    return dice.argsort(1).argsort(1) < 2 * count + 1


def _blocked(
    n: int, k: int, blocks: Blocks, draw: torch.Generator, device: torch.device
) -> BlockSparseLinear:
    if n % blocks.block or k % blocks.block:
        expected = f"a multiple of the block, {blocks.block}"
        raise SuiteError(f"width, hidden: expected {expected}; found {n} and {k}")
    kept = pattern(n // blocks.block, k // blocks.block, blocks, draw)
    return BlockSparseLinear(k, n, block=blocks.block, pattern=kept, bias=False, device=device)
