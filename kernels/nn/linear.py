"""A linear layer with block-sparse weights, for training: Y = X @ W.T + bias, W in BSR.

         W [n, k], blocks of r x c               a parameter                 buffers
        +----+----+----+----+
        | b0 |    | b1 |    |        values [blocks, r, c]       offsets  0 2 3
        +----+----+----+----+           b0 b1 b2                 columns  0 2 1
        |    | b2 |    |    |
        +----+----+----+----+        Gradients and optimizer state are as large as the values.

Blocks of the last block row and column may extend beyond W. Their values outside are zero, and stay
zero, because their gradient is zero. kernels/nn/_bsr_plans.py chooses the kernels.
"""

from collections.abc import Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import offsets_of, require, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels.nn import _bsr_autograd
from sparsebench.kernels.nn._bsr_plans import replan, require_index

Index = tuple[Tensor, Tensor]
"""Offsets and columns of a BSR matrix, int32."""


class BlockSparseLinear(nn.Module):
    """nn.Linear with W [out_features, in_features] in blocks: the same call, bias and autocast.

    block     rows r and columns c of a block, or one number for both
    sparsity  fraction of blocks that are not stored; every block row stores as many, at random
    pattern   instead of sparsity: bool [ceil(n / r), ceil(k / c)], true where a block is stored

    `set_pattern` replaces offsets and columns; never write into them. Raises FormatError.
    """

    values: nn.Parameter
    bias: nn.Parameter | None
    offsets: Tensor
    columns: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        block: int | tuple[int, int],
        sparsity: float | None = None,
        pattern: Tensor | None = None,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """Draw the values, and the pattern if none is given."""
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.block = _block(block)
        grid = self._grid
        require((sparsity is None) != (pattern is None), "expected either sparsity or pattern")
        if pattern is None:
            assert sparsity is not None
            pattern = _drawn(grid, sparsity)
        found = f"{pattern.dtype} {list(pattern.shape)}"
        require(pattern.shape == grid, f"pattern: expected bool {list(grid)}, found {found}")
        offsets, columns = index_of(pattern)
        self.register_buffer("offsets", offsets.to(device))
        self.register_buffer("columns", columns.to(device))
        made: dict[str, Any] = {"device": device, "dtype": dtype}
        self.values = nn.Parameter(torch.empty(len(columns), *self.block, **made))
        self.bias = nn.Parameter(torch.empty(out_features, **made)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw as nn.Linear does, uniform below 1 / sqrt(fan-in); fan-in counts stored blocks."""
        rows, columns = rows_of(self.offsets), self.columns.long()
        down, across = (
            torch.arange(count * side, device=rows.device).view(count, side) < size
            for size, side, count in zip(self._shape, self.block, self._grid, strict=True)
        )  # rows of each block row, and columns of each block column, inside W
        down, across = down[rows], across[columns]
        fan_in = torch.zeros(self._grid[0], device=rows.device)
        fan_in.index_add_(0, rows, across.sum(1).float())
        bound = fan_in.rsqrt().where(fan_in > 0, 0)
        with torch.no_grad():
            self.values.uniform_(-1, 1).mul_(bound[rows, None, None])
            self.values.mul_(down[:, :, None] & across[:, None, :])
            if self.bias is not None:
                each = bound.repeat_interleave(self.block[0])
                self.bias.uniform_(-1, 1).mul_(each[: self.out_features])

    @classmethod
    def from_dense(cls, linear: nn.Linear, block: int | tuple[int, int], sparsity: float) -> Self:
        """Keep the blocks of a dense layer with the largest Euclidean norms, and the bias.

        `sparsity` is the fraction of blocks to drop. Raises FormatError.
        """
        r, c = _block(block)
        n, k = linear.weight.shape
        rows, columns = _grid((n, k), (r, c))
        weight = linear.weight.detach()
        padded = nn.functional.pad(weight.float(), (0, columns * c - k, 0, rows * r - n))
        norms = padded.square().view(rows, r, columns, c).sum((1, 3)).flatten()
        largest = norms.argsort(descending=True, stable=True)[: _kept(sparsity, rows * columns)]
        pattern = torch.zeros_like(norms, dtype=torch.bool)
        pattern[largest] = True
        layer = cls(
            *(k, n),
            block=(r, c),
            pattern=pattern.view(rows, columns),
            bias=linear.bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            layer.values.copy_(layer.bsr.sample(weight.contiguous()).values)
            if layer.bias is not None:
                layer.bias.copy_(linear.bias)
        return layer

    def to_dense(self) -> nn.Linear:
        """Return the layer as nn.Linear, zeros where no block is stored."""
        n, k, values = self.out_features, self.in_features, self.values
        made: dict[str, Any] = {"device": values.device, "dtype": values.dtype}
        linear = nn.Linear(k, n, bias=self.bias is not None, **made)
        with torch.no_grad():
            linear.weight.copy_(self.bsr.to_dense())
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    @property
    def _grid(self) -> tuple[int, int]:
        return _grid(self._shape, self.block)

    @property
    def bsr(self) -> Bsr:
        """Return W in BSR, in the parameter's own memory and out of autograd."""
        return Bsr(self._shape, self.offsets, self.columns, self.values.detach())

    def set_pattern(self, offsets: Tensor, columns: Tensor, values: Tensor | None = None) -> Tensor:
        """Store other blocks. Blocks that stay keep their values; new ones are zero.

        offsets, columns  the new index, int32 (formats/bsr.py)
        values            [blocks, r, c], to take instead

        Return int64 [blocks]: which old block each one was, or -1. `repack` moves an optimizer's
        state by it. The parameter is the same object, without a gradient. The kernels are planned
        for the new pattern here, so that no later call waits. A CUDA graph must be captured again.
        Raises FormatError.
        """
        device, old = self.offsets.device, (self.offsets, self.columns)
        new = offsets.detach().to(device, copy=True), columns.detach().to(device, copy=True)
        require_index(*new, self._shape, self.block)
        source = _source(old, new, self._grid[1])
        if values is None:
            values = repack(self.values.detach(), source)
        else:
            expected = self.values.dtype, (len(new[1]), *self.block)
            found = values.dtype, (*values.shape,)
            require(found == expected, f"values: expected {expected}, found {found}")
            values = values.detach().to(device, copy=True).contiguous()
        self.values.data, self.values.grad = values, None
        self.offsets, self.columns = new
        replan(old, new)
        return source

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        index = f"{prefix}offsets", f"{prefix}columns"
        if all(name in state_dict for name in index):
            self.set_pattern(state_dict[index[0]], state_dict[index[1]])
        super()._load_from_state_dict(state_dict, prefix, *args, **options)

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported, FormatError."""
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Unsupported(f"expected [..., {self.in_features}], found {list(x.shape)}")
        values: Tensor = self.values
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, values = x.to(dtype), values.to(dtype)
        flat = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        y = _bsr_autograd.multiply(flat, values, self.offsets, self.columns, self.out_features)
        bias = self.bias
        if bias is not None:
            y.add_(bias)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Return sizes, block, and how many blocks are stored."""
        (rows, columns), (r, c) = self._grid, self.block
        stored = f"stored={len(self.columns)} of {rows * columns}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, block={r}x{c}, {stored}, bias={self.bias is not None}"


def index_of(pattern: Tensor) -> Index:
    """Return offsets and columns of a pattern, bool [block rows, block columns]."""
    require(
        pattern.dim() == 2 and pattern.dtype == torch.bool,
        f"pattern: expected a bool matrix, found {pattern.dtype} {list(pattern.shape)}",
    )
    rows, columns = pattern.nonzero(as_tuple=True)
    return offsets_of(rows, len(pattern)), columns.to(torch.int32)


def repack(blocks: Tensor, source: Tensor) -> Tensor:
    """Return [new blocks, r, c]: old block source[i] at i, zeros where source[i] is -1.

    `source` is what set_pattern returned. It also moves an optimizer's state:
    state["exp_avg"] = repack(state["exp_avg"], source).
    """
    if not len(blocks):
        return blocks.new_zeros(len(source), *blocks.shape[1:])
    return blocks[source.clamp(min=0)].masked_fill_(source[:, None, None] < 0, 0)


def _source(old: Index, new: Index, width: int) -> Tensor:
    """Return int64 [new blocks]: the position of each block in the old index, or -1."""
    before, after = (rows_of(offsets) * width + columns for offsets, columns in (old, new))
    if not len(before):
        return torch.full_like(after, -1)
    at = torch.searchsorted(before, after).clamp(max=len(before) - 1)
    return at.where(before[at] == after, -1)


def _drawn(grid: tuple[int, int], sparsity: float) -> Tensor:
    """Draw a pattern in which all block rows store equally many blocks, or one more."""
    rows, columns = grid
    each, more = divmod(_kept(sparsity, rows * columns), rows)
    counts = each + (torch.randperm(rows) < more).long()
    return torch.rand(grid).argsort(1).argsort(1) < counts[:, None]


def _kept(sparsity: float, blocks: int) -> int:
    require(0 <= sparsity <= 1, f"sparsity: expected 0 to 1, found {sparsity}")
    return round((1 - sparsity) * blocks)


def _block(block: int | tuple[int, int]) -> tuple[int, int]:
    r, c = (block, block) if isinstance(block, int) else block
    require(r > 0 and c > 0, f"block: expected at least 1x1, found {r}x{c}")
    return r, c


def _grid(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    (n, k), (r, c) = shape, block
    return -(-n // r), -(-k // c)
