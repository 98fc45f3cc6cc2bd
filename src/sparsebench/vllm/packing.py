"""Pack the dense weight that an engine has loaded into sparse layers.

    weight [n, k]    parts above each other: q, k and v, or gate and up, or a single one
    storage          of each part, by the checkpoint or a recipe: 2:4, blocks, anywhere, dense

    one layer        if all parts are stored alike
    sparse first     the same, if the parts end with dense rows: its outputs are put back in order
    side by side     else: one layer for each part, whose outputs are concatenated

In 2:4, the last rows or columns of a part may be dense. A rank has any share of them, so they are
found in the shard itself: its first rows, or its first columns, that are 2:4 are stored sparse.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sparsebench.errors import FormatError
from sparsebench.formats._format import require, rows_of, sides_of
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import ROW_STEP, SPAN_BYTES
from sparsebench.harness.models.pruning.gated import linear_of
from sparsebench.harness.models.pruning.sparsify import BlockSparse, Recipe, TwoFour, Unstructured
from sparsebench.kernels.nn import BitmapLinear, BlockSparseLinear, SpenseLinear

GROUP = 4  # columns of which 2:4 stores two


@dataclass(frozen=True)
class Storage:
    """How a weight is stored.

    layer  SpenseLinear, BlockSparseLinear, BitmapLinear or nn.Linear
    block  rows and columns that one rank must have together
    """

    layer: type[nn.Module]
    block: tuple[int, int] = (1, 1)

    def __str__(self) -> str:
        """Return the name of the layer, and the block."""
        blocks = f" in blocks of {self.block[0]}x{self.block[1]}" if self.block != (1, 1) else ""
        return f"{self.layer.__name__}{blocks}"


DENSE, ANYWHERE = Storage(nn.Linear), Storage(BitmapLinear)
TWO_FOUR = Storage(SpenseLinear, (1, GROUP))


def storage_of_layer(layer: Mapping[str, Any]) -> Storage:
    """Return the storage of a layer of a checkpoint. Raises FormatError for one without a place."""
    kind, dtype = layer["layer"], layer["dtype"]
    expected = "expected a layer in 16 or 32 bits with zeros in its weights"
    require(dtype != "float8_e4m3fn", f"{expected}, found {kind} in {dtype}")
    match kind:
        case "SpenseLinear" | "SpenseGatedMLP":
            return TWO_FOUR
        case "BlockSparseLinear":
            return Storage(BlockSparseLinear, sides_of(layer["block"]))
        case "BitmapLinear":
            return ANYWHERE
    raise FormatError(f"{expected}, found {kind}")


def storage_of_recipe(recipe: Recipe) -> Storage:
    """Return the storage that a recipe gives. Raises FormatError for one without a place."""
    match recipe:
        case TwoFour():
            return TWO_FOUR
        case BlockSparse():
            return Storage(BlockSparseLinear, sides_of(recipe.block))
        case Unstructured():
            return ANYWHERE
    raise FormatError(f"expected BlockSparse, TwoFour or Unstructured, found {recipe}")


def require_whole_blocks(
    storages: Sequence[Storage], shard: tuple[Sequence[int], int], whole: tuple[int, int]
) -> None:
    """Raise FormatError if the borders between ranks divide a block.

    shard  rows of each part, and columns, of one rank
    whole  rows and columns of all ranks
    """
    (sizes, k), (rows, columns) = shard, whole
    for storage, n in zip(storages, sizes, strict=True):
        sides = (("rows", n, sum(sizes), rows), ("columns", k, k, columns))
        for step, (name, size, part, total) in zip(storage.block, sides, strict=True):
            expected = f"expected a multiple of {step} {name} on each rank for {storage}"
            divided = part != total and size % step
            advice = "take fewer ranks, or smaller blocks"
            require(not divided, f"{expected}, found {size} of {total}: {advice}")


def prune(weight: Tensor, recipe: Recipe) -> Tensor:
    """Return a weight [n, k] pruned by magnitude. Raises FormatError."""
    linear = linear_of(weight.clone())
    recipe.check(linear)
    layer: Any = recipe.make(linear)
    pruned: Tensor = layer.to_dense().weight
    return pruned.detach()


def pack(weight: Tensor, sizes: Sequence[int], storages: Sequence[Storage]) -> nn.Module:
    """Return layers without a bias that multiply by a weight [n, k]. Raises FormatError.

    sizes     rows of each part
    storages  of each part
    """
    first, *others = storages
    whole = all(size % first.block[0] == 0 for size in [*sizes][:-1])
    if whole and all(other == first for other in others):
        return _layer_of(weight, first, sizes)
    parts = zip(weight.split([*sizes]), sizes, storages, strict=True)
    return SideBySide(_layer_of(part.contiguous(), storage, [n]) for part, n, storage in parts)


class SideBySide(nn.ModuleList):
    """Layers of the same input: Y is their outputs, concatenated."""

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n of all layers] of X [..., k]."""
        return torch.cat([layer(x) for layer in self], -1)


class SparseFirst(nn.Module):
    """A layer whose W has the sparse rows of all parts first, then their dense rows.

    sizes   rows of each part
    sparse  how many of them are sparse
    """

    def __init__(self, layer: nn.Module, sizes: Sequence[int], sparse: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.lengths = [*sparse, *(n - m for n, m in zip(sizes, sparse, strict=True))]

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n of all parts] of X [..., k], in the order of the parts."""
        pieces = self.layer(x).split(self.lengths, -1)
        parts = len(pieces) // 2
        return torch.cat([pieces[i + half] for i in range(parts) for half in (0, parts)], -1)

    def extra_repr(self) -> str:
        """Return the rows of each piece, by which vLLM's compiled code differs."""
        return f"lengths={self.lengths}"


def _layer_of(weight: Tensor, storage: Storage, sizes: Sequence[int]) -> nn.Module:
    if storage.layer is SpenseLinear:
        return _with_dense_region(weight, sizes)
    if storage.layer is BitmapLinear:
        return BitmapLinear.from_dense(weight)
    if storage.layer is BlockSparseLinear:
        return _in_blocks(weight, storage.block)
    return linear_of(weight.clone()).requires_grad_(False)


def _in_blocks(weight: Tensor, block: tuple[int, int]) -> BlockSparseLinear:
    (n, k), bsr = weight.shape, Bsr.from_dense(weight, block=[*block])
    pattern = torch.zeros(-(-n // block[0]), -(-k // block[1]), dtype=torch.bool)
    pattern[rows_of(bsr.offsets).cpu(), bsr.columns.long().cpu()] = True
    options: dict[str, Any] = {"bias": False, "device": weight.device, "dtype": weight.dtype}
    layer = BlockSparseLinear(k, n, block=block, pattern=pattern, **options)
    with torch.no_grad():
        layer.values.copy_(bsr.values)
    return layer.freeze()


def _with_dense_region(weight: Tensor, sizes: Sequence[int]) -> nn.Module:
    """Store the first rows of each part, or the first columns, in 2:4, whichever are more."""
    (n, k), fits = weight.shape, _two_four(weight)
    if fits.all():
        return SpenseLinear.from_dense(weight)
    step = SPAN_BYTES // weight.element_size()
    columns = _leading(fits.all(0)) * GROUP // step * step
    each = [_leading(part) // ROW_STEP * ROW_STEP for part in fits.all(1).split([*sizes])]
    if not (rows := sum(each)) and not columns:
        return _layer_of(weight, DENSE, sizes)
    if rows * k < columns * n:
        return SpenseLinear.from_dense(weight, dense_fraction=1 - columns / k, split="columns")
    parts = zip(weight.split([*sizes]), each, strict=True)
    sparse, dense = zip(*(part.split([m, len(part) - m]) for part, m in parts), strict=True)
    sparse_first = torch.cat([*sparse, *dense])
    layer = SpenseLinear.from_dense(sparse_first, dense_fraction=1 - rows / n, split="rows")
    return layer if len(sizes) == 1 else SparseFirst(layer, sizes, each)


def _two_four(weight: Tensor) -> Tensor:
    """Return bool [n, k / 4]: whether at most two of the four have values. Raises FormatError."""
    n, k = weight.shape
    require(k % GROUP == 0, f"expected a multiple of {GROUP} columns, found a weight {n}x{k}")
    stored: Tensor = (weight != 0).unflatten(1, (-1, GROUP)).sum(-1)
    return stored <= GROUP // 2


def _leading(flags: Tensor) -> int:
    """Return how many flags are true before the first that is false."""
    return int(flags.int().cumprod(0).sum())
