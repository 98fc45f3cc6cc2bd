"""A decoder whose layers have block-sparse weights, or dense ones with the same initialization.

    W [n, k] in blocks, laid out in squares of       qkv [3k, k]   +--+        wd [k, 4k]
    the shorter side, one graph each                               |  |        +--+--+--+--+
                                                                   +--+        |  |  |  |  |
    small_world   a ring with a fifth of its links moved           |  |        +--+--+--+--+
    uniform       equally many blocks in each row, at random       +--+
                                                                   |  |
                                                                   +--+
Both patterns have equally many blocks: those of the ring nearest to the requested density.

The initial deviation is proportional to 1 / sqrt(fan-in) and the learning rate to 1 / fan-in, where
fan-in counts the stored elements of a row. A rate that suits one width then suits all widths and
sparsities (Dey et al. 2024, Sparse maximal update parameterization, arXiv 2405.15743). At a width
of 512 both are equal to those of model.py and training.py.
"""

import math
from dataclasses import dataclass
from itertools import product
from typing import Literal

import torch
from torch import Tensor, nn

from sparsebench.errors import SuiteError
from sparsebench.harness.models.train_lm.model import DEVIATION, Decoder, Sizes
from sparsebench.harness.models.train_lm.training import BASE_WIDTH
from sparsebench.harness.patterns.small_world import ring, ring_cells
from sparsebench.kernels.nn.linear import BlockSparseLinear

WEIGHTS = "qkv", "out", "wg", "wu", "wd"
RESIDUAL = "out", "wd"  # these add to the residual stream
PATTERNS = "small_world", "uniform"
META = torch.device("meta")
TOLERANCE = 0.2  # relative, of the density
MIN_NODES = 4  # smaller rings are complete graphs


@dataclass(frozen=True)
class Blocks:
    """The pattern, size and sparsity of the blocks of a weight."""

    pattern: Literal["small_world", "uniform"]
    block: int
    sparsity: float


def decoder(sizes: Sizes, blocks: Blocks | None, seed: int, device: torch.device = META) -> Decoder:
    """Return a decoder: dense if blocks is None, without values on "meta". Raises SuiteError."""
    with device:
        model = Decoder(sizes, None)
    draw = torch.Generator().manual_seed(seed)
    for layer, name in product(model.layers, WEIGHTS):
        if blocks:
            n, k = getattr(layer, name).shape
            delattr(layer, name)
            setattr(layer, name, _block_layer(n, k, blocks, draw, device))
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
            deviation = DEVIATION * math.sqrt(BASE_WIDTH / fan_in(weight))
            deviation /= math.sqrt(2 * len(model.layers)) if name in RESIDUAL else 1
            elements_of(weight).normal_(0, deviation, generator=draw)


def elements_of(weight: nn.Module | nn.Parameter) -> nn.Parameter:
    values = weight.values if isinstance(weight, BlockSparseLinear) else weight
    assert isinstance(values, nn.Parameter)
    return values


def fan_in(weight: nn.Module | nn.Parameter) -> float:
    """Return the mean number of stored elements per row."""
    elements = elements_of(weight)
    rows = weight.out_features if isinstance(weight, BlockSparseLinear) else len(elements)
    return elements.numel() / rows


def fan_ins(model: Decoder) -> dict[nn.Parameter, float]:
    weights = [getattr(layer, name) for layer in model.layers for name in WEIGHTS]
    return {elements_of(weight): fan_in(weight) for weight in weights}


def sparsity_of(model: Decoder, sizes: Sizes) -> float:
    """Return the fraction of the layers' weights that is not stored."""
    full = sizes.layers * (4 * sizes.width**2 + 3 * sizes.width * sizes.hidden)
    return 1 - sum(values.numel() for values in fan_ins(model)) / full


def links(nodes: int, sparsity: float) -> int:
    """Return the links per side of the ring nearest to a sparsity. Raises SuiteError."""
    if nodes < MIN_NODES:
        raise SuiteError(f"block: expected at least {MIN_NODES} blocks in a row; found {nodes}")
    cells = ring_cells(nodes)
    cells_needed = (1 - sparsity) * nodes**2
    best = min(range(len(cells)), key=lambda i: abs(cells[i] - cells_needed))
    if abs(cells[best] - cells_needed) > TOLERANCE * cells_needed:
        nearest = f"{1 - cells[best] / nodes**2:.3g}, the nearest of {nodes} blocks in a row"
        raise SuiteError(f"sparsity: expected {nearest}; found {sparsity:g}")
    return best + 1


def pattern(rows: int, columns: int, blocks: Blocks, draw: torch.Generator) -> Tensor:
    """Return bool [rows, columns], true for stored blocks. Raises SuiteError."""
    side = min(rows, columns)
    if max(rows, columns) % side:
        raise SuiteError(f"hidden: expected a multiple of the width; found {rows}x{columns} blocks")
    count = links(side, blocks.sparsity)
    squares = []
    for _ in range(max(rows, columns) // side):
        dice = torch.randint(2**31 - 1, (side, side), generator=draw)
        if blocks.pattern == "small_world":
            squares.append(torch.from_numpy(ring(dice.numpy(), count)))
        else:
            squares.append(dice.argsort(1).argsort(1) < 2 * count + 1)
    return torch.cat(squares, 0 if rows > columns else 1)


def _block_layer(
    n: int, k: int, blocks: Blocks, draw: torch.Generator, device: torch.device
) -> BlockSparseLinear:
    if n % blocks.block or k % blocks.block:
        expected = f"layers whose sides are multiples of the block, {blocks.block}"
        raise SuiteError(f"width, hidden: expected {expected}; found one of {n}x{k}")
    mask = pattern(n // blocks.block, k // blocks.block, blocks, draw)
    return BlockSparseLinear(k, n, block=blocks.block, pattern=mask, bias=False, device=device)
