"""A linear layer with block-sparse weights, for training: Y = X @ W.T + bias, W in BSR.

         W [n, k], blocks of r x c               a parameter                 buffers
        +----+----+----+----+
        | b0 |    | b1 |    |        values [blocks, r, c]       offsets  0 2 3
        +----+----+----+----+           b0 b1 b2                 columns  0 2 1
        |    | b2 |    |    |
        +----+----+----+----+        Gradients and optimizer state are as large as the values.

Blocks of the last block row and column may extend beyond W. Their values outside are zero, and stay
zero because their gradient is zero. _bsr_engines.py orders the kernels, and _bsr_pattern.py notices
when other code writes into the index.

Under fully_shard the values are divided among the ranks, but every rank has the whole index, and
all ranks must have the same one. The layer checks this when it is sharded, reset or loaded. Under
fully_shard the number of blocks cannot change, and under DistributedDataParallel the pattern.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

import torch
from torch import Tensor, nn

from sparsebench.errors import Unsupported
from sparsebench.formats._format import require, rows_of, sides_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.front import Guard, Recordings
from sparsebench.kernels._common.operator import bucket
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.nn import _bsr_autograd
from sparsebench.kernels.nn._bsr_pattern import (
    Index,
    copy_of,
    draw_pattern,
    freeze_index,
    grid_of,
    index_of,
    pattern_of,
    replan,
    require_index,
    source_of,
    stored_of,
)
from sparsebench.kernels.nn._moves import (
    gather_shards,
    is_sharded,
    repack,
    require_one_index,
    require_outside_ddp,
    shard_like,
    state_moves,
)
from sparsebench.kernels.nn._packed import PackedWeight, plan_each


class BlockSparseLinear(nn.Linear):
    """nn.Linear with W [out_features, in_features] in blocks: the same call, bias and autocast.

    block     rows r and columns c of a block, or one number for both
    sparsity  fraction of blocks that are not stored; the stored ones are drawn at random, equally
              many in every block row
    pattern   instead of sparsity: bool [ceil(n / r), ceil(k / c)], true where a block is stored

    `set_pattern` replaces offsets and columns. On the device "meta" the layer keeps the pattern on
    the CPU, and `to_empty` writes it into the buffers. Raises FormatError.
    """

    values: nn.Parameter
    bias: nn.Parameter | None  # type: ignore[assignment]
    offsets: Tensor
    columns: Tensor
    _sharded = False  # whether fully_shard has divided the values
    _unwritten: Index | None = None  # the index on the CPU, while the buffers are on "meta"

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
        """Draw the values, and also the pattern if there is none."""
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        self._recordings = Recordings(_bsr_autograd.SIGNATURE)  # calls without Python (front.py)
        self.block = sides_of(block)
        self._shape = out_features, in_features
        self._grid = grid = grid_of(self._shape, self.block)
        require((sparsity is None) != (pattern is None), "expected either sparsity or pattern")
        if pattern is None:
            assert sparsity is not None
            pattern = draw_pattern(grid, sparsity)
        layout = f"{pattern.dtype} {list(pattern.shape)}"
        require(pattern.shape == grid, f"pattern: expected bool {list(grid)}, found {layout}")
        require(not pattern.is_meta, "pattern: expected values, found a tensor on meta")
        require(
            dtype is None or dtype.itemsize > 1, f"dtype: expected 16 or 32 bits, found {dtype}"
        )
        options: dict[str, Any] = {"device": torch.empty(0, device=device).device, "dtype": dtype}
        self.register_buffer("offsets", None)
        self.register_buffer("columns", None)
        self._write(index_of(pattern), options["device"])
        self.values = nn.Parameter(torch.empty(len(self.columns), *self.block, **options))
        self.bias = nn.Parameter(torch.empty(out_features, **options)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw uniformly up to 1 / sqrt(fan-in), as nn.Linear does; fan-in counts stored blocks."""
        if self.values.is_meta:
            return
        rows, columns = rows_of(self.offsets), self.columns.long()
        down, across = (
            torch.arange(count * side, device=rows.device).view(count, side) < size
            for size, side, count in zip(self._shape, self.block, self._grid, strict=True)
        )  # rows of each block row, and columns of each block column, inside W
        down, across = down[rows], across[columns]
        fan_in = torch.zeros(self._grid[0], device=rows.device, dtype=torch.float32)
        fan_in.index_add_(0, rows, across.sum(1).float())
        bound = fan_in.rsqrt().where(fan_in > 0, 0)
        inside = (down[:, :, None] & across[:, None, :]) * bound[rows, None, None]
        bias_bound = bound.repeat_interleave(self.block[0])[: self.out_features]
        if is_sharded(self.values):
            require_one_index(self.values, self.offsets, self.columns)
        with torch.no_grad():
            self.values.uniform_(-1, 1).mul_(shard_like(inside, self.values))
            if self.bias is not None:
                self.bias.uniform_(-1, 1).mul_(shard_like(bias_bound, self.bias))

    @classmethod
    def from_dense(cls, linear: nn.Linear, block: int | tuple[int, int], sparsity: float) -> Self:
        """Keep the blocks of a dense layer that have the largest Euclidean norms, and the bias.

        `sparsity` is the fraction of blocks that are dropped. Raises FormatError.
        """
        is_layer = isinstance(linear, nn.Linear)  # the weight of transformers' Conv1D is W.T
        require(is_layer, f"expected an nn.Linear, found {type(linear).__name__}")
        r, c = sides_of(block)
        n, k = linear.weight.shape
        rows, columns = grid_of((n, k), (r, c))
        weight = linear.weight.detach()
        padded = nn.functional.pad(weight.float(), (0, columns * c - k, 0, rows * r - n))
        if padded.numel():  # the squares of 1e-30 would be zero
            padded = padded.ldexp(-padded.abs().max().frexp().exponent)
        norms = padded.square().view(rows, r, columns, c).sum((1, 3)).flatten()
        largest = norms.argsort(descending=True, stable=True)[: stored_of(sparsity, rows * columns)]
        pattern = torch.zeros_like(norms, dtype=torch.bool)
        pattern[largest] = True
        layer = cls(
            in_features=k,
            out_features=n,
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
        """Return the layer as nn.Linear, with zeros where no block is stored."""
        options: dict[str, Any] = {"device": self.values.device, "dtype": self.values.dtype}
        options["bias"] = self.bias is not None
        linear = nn.Linear(self.in_features, self.out_features, **options)
        with torch.no_grad():
            linear.weight.copy_(self.bsr.to_dense())
            if self.bias is not None:
                linear.bias.copy_(self.bias)
        return linear

    @property
    def bsr(self) -> Bsr:
        """Return W in BSR. It shares the parameter's memory and has no gradient."""
        return Bsr(self._shape, self.offsets, self.columns, self.values.detach())

    def set_pattern(self, offsets: Tensor, columns: Tensor) -> Tensor:
        """Change which blocks are stored. Blocks that stay keep their values; new ones are zero.

        offsets, columns  the new index, int32 (formats/bsr.py)

        Return int64 [blocks]: the old position of each block, or -1. The parameter remains the same
        object and loses its gradient, and the state that optimizers have for it moves with the
        blocks (_moves.py). The kernels are planned for the new pattern at once, so that no later
        call waits. A CUDA graph must be captured again. Under fully_shard, all ranks must call this
        with the same index; DistributedDataParallel must wrap the module anew afterwards. Raises
        FormatError, and then leaves the layer as it was.
        """
        old = self._unwritten or (self.offsets, self.columns)
        on_meta = offsets.is_meta or columns.is_meta
        require(not on_meta, "offsets, columns: expected values, found a tensor on meta")
        new = copy_of(offsets, columns, old[0].device)
        require_index(*new, self._shape, self.block)
        source = source_of(old, new, self._grid[1])
        move_state = state_moves(self.values, source)
        require_outside_ddp(self)
        if self.values.is_meta:
            values = self.values.new_empty(len(source), *self.block)
        else:
            values = repack(gather_shards(self.values.detach()), source)
        before = self.offsets, self.columns
        self._store(new, values)
        move_state()
        replan(before, (self.offsets, self.columns))
        return source

    def _write(self, index: Index, device: torch.device) -> None:
        """Set the buffers on this device; if it is "meta", also keep the index on the CPU."""
        self.offsets, self.columns = copy_of(*index, device)
        keep = device.type == "meta" and not index[0].is_meta
        self._unwritten = copy_of(*index, torch.device("cpu")) if keep else None

    def _store(self, index: Index, values: Tensor) -> None:
        """Replace index and values. Raises FormatError, and then leaves the layer as it was."""
        if self._sharded:
            gathered = "values: expected sharded, found gathered: call reshard of the FSDP module"
            require(is_sharded(self.values), gathered)
            blocks, expected = len(values), len(self.values)
            fixed = "the number of blocks cannot change under fully_shard"
            require(blocks == expected, f"{fixed}: expected {expected}, found {blocks}")
            if not index[0].is_meta:
                require_one_index(self.values, *index)
            with torch.no_grad():
                self.values.copy_(shard_like(values, self.values))
        else:
            if values.shape != self.values.shape:
                require_outside_ddp(self)  # whose hooks are those of the autograd node
                _forget_shape(self.values)
            self.values.data = values
        self.values.grad = None
        self._write(index, self.offsets.device)

    def _load_from_state_dict(
        self, state_dict: Mapping[str, Any], prefix: str, *args: Any, **options: Any
    ) -> None:
        names = "offsets", "columns", "values"
        tensors: list[Any] = [state_dict.get(f"{prefix}{name}") for name in names]
        offsets, columns, values = tensors
        has_index = offsets is not None and columns is not None
        if has_index and values is None:
            self.set_pattern(offsets, columns)
        elif has_index:
            shape, expected = (*values.shape,), (len(columns), *self.block)
            require(shape == expected, f"{prefix}values: expected {expected}, found {shape}")
            if not offsets.is_meta:
                require_index(offsets, columns, self._shape, self.block)
            before, current = (self.offsets, self.columns), self.values.detach()
            same = shape == (*current.shape,)
            self._store((offsets, columns), current if same else current.new_zeros(shape))
            replan(before, (self.offsets, self.columns))
        super()._load_from_state_dict(state_dict, prefix, *args, **options)
        self._rewrite()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        dtype = fn(self.offsets.new_empty(1)).dtype
        require(dtype == torch.int32, f"offsets and columns: expected int32, found {dtype}")
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._rewrite()
        return self

    def _rewrite(self) -> None:
        """Write the index kept for "meta" into the buffers, or replace one of inference mode."""
        if self.offsets.is_meta:
            return
        if self._unwritten is not None or self.offsets.is_inference():
            index = self._unwritten or (self.offsets, self.columns)
            self._write(index, self.offsets.device)

    @property
    def weight(self) -> PackedWeight:  # type: ignore[override]
        """Return dtype, device and sizes of W, without values."""
        return PackedWeight.of(self, self.values.dtype, self.values)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set as nn.Module does; fully_shard sets sharded values this way. Raises FormatError."""
        super().__setattr__(name, value)
        if name == "values" and not self._sharded and is_sharded(value):
            self._sharded = True
            if not value.is_meta:
                require_one_index(value, self.offsets, self.columns)

    def forward(self, x: Tensor) -> Tensor:
        """Return Y [..., n] of X [..., k]. Raises Unsupported, FormatError."""
        if not torch.compiler.is_compiling():
            y: Tensor | None = self._recordings.replay(x)
            if y is not None:
                return y
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise Unsupported(f"expected [..., {self.in_features}], found {list(x.shape)}")
        parameters, buffers = self._parameters, self._buffers
        values: Any = parameters.get("values")
        cast = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64
        if cast:
            dtype = torch.get_autocast_dtype(x.device.type)
            x, values = x.to(dtype), self.values.to(dtype)
        if torch.compiler.is_compiling() or not x.is_cuda:
            bias, offsets, columns = parameters.get("bias"), self.offsets, self.columns
            return _bsr_autograd.multiply(x, values, bias, offsets, columns, self.out_features)
        guards = [Guard(None if cast else parameters, "values", values)]
        guards.append(Guard(parameters, "bias", parameters.get("bias")))
        guards += [Guard(buffers, name, buffers[name]) for name in ("offsets", "columns")]
        return _bsr_autograd.multiply_recorded(
            self._recordings, x, self.out_features, guards, cast=cast
        )

    def freeze(self) -> Self:
        """Stop training the layer: no gradient, no comparison of the index, values packed once.

        A search may keep a dense copy of a small layer (_dense_copy.py), beside the values. Later
        writes to the values that torch counts are noticed. Raises FormatError on "meta".
        """
        require(not self.values.is_meta, "expected values, found a tensor on meta")
        self.requires_grad_(False)
        freeze_index(self.offsets, self.columns)
        self._recordings.clear()
        return self

    def plan(self, tokens: Iterable[int], *, search: bool = True) -> Self:
        """Plan the product of these numbers of tokens now instead of at a first call.

        search  time what can run it, and keep the fastest, for the gradients too if the values are
                trained; False plans Y alone, and takes what is listed
        """
        self._recordings.clear()
        plan_each(tokens, self._search if search else self._select, search=search)
        return self

    def _select(self, m: int) -> None:
        """Plan m tokens without a search."""
        sizes = (self.out_features, self.in_features), self.block, self.values.dtype
        call = BsrCall("linear", bucket(m), *sizes, live=self.values.requires_grad)
        pattern_of(self.offsets, self.columns).select(call)

    def _search(self, m: int) -> None:
        x, index = self.values.new_zeros(m, self.in_features), (self.offsets, self.columns)
        y = self(x)
        if self.values.requires_grad:  # not by autograd: its threads for a GPU are not `ahead`
            _bsr_autograd.dgrad(y, self.values, *index, self.in_features)
            _bsr_autograd.wgrad(y, x, *index, *self.block)

    def extra_repr(self) -> str:
        """Return the sizes, the block, and the number of stored blocks."""
        (rows, columns), (r, c) = self._grid, self.block
        stored = f"stored={len(self.columns)} of {rows * columns}"
        sizes = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{sizes}, block={r}x{c}, {stored}, bias={self.bias is not None}"


def _forget_shape(parameter: nn.Parameter) -> None:
    """Let a parameter take data of another shape.

    The autograd node that accumulates its gradient stores the shape, and lives as long as the loss
    of the last step.
    """
    if not parameter.requires_grad:
        return

    def node() -> Any:
        return torch.autograd.graph.get_gradient_edge(parameter).node

    node().metadata[_forget_shape] = True
    if _forget_shape not in node().metadata:
        return
    other = torch.float64 if parameter.dtype == torch.float32 else torch.float32
    parameter.data = parameter.new_empty(0, dtype=other)  # data of another dtype has another node
