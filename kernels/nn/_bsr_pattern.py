"""Keep what is made for a BSR index, and notice when other code writes into the index.

An index is two tensors, and other code, such as AveragedModel and DDP, writes into them. So a
pattern holds a copy of the index, and the stamp of both tensors when they last equalled the copy:

    stamp  for offsets and columns: torch's count of the writes, the address, the length

If the stamp differs, a call compares the index with the copy, which waits for the device, and makes
new plans if they differ. torch does not count writes through `.data`, through NumPy, or by a
collective on the tensor itself. So one call in COMPARE_EVERY compares regardless of the stamp, and
raises if it detects such a write; a frozen layer does not. Tensors made in inference mode have no
count, so each call compares them. A pattern is an attribute of the tensor `columns`, and is freed
with it.

Kernels for small blocks read the values in another order than they are stored. Values that may be
trained are packed at every call, because a CUDA graph may replay an optimizer's step, which torch
does not count. Values without a gradient are packed once, and again if torch counts a write.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from random import randrange
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import offsets_of, require, rows_of
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.capture import is_capturing, keep, make_lasting
from sparsebench.kernels._common.operator import Earlier, Engine, Operator, ahead, bucket
from sparsebench.kernels._common.product import Product, Selected
from sparsebench.kernels.bsr._call import BsrCall, problem_of
from sparsebench.kernels.bsr._wgmma_lists import checked
from sparsebench.kernels.nn._bsr_engines import ENGINES, likeliest

COMPARE_EVERY = 256  # calls: a comparison takes 40 µs and waits for all queued work
PACKED = 2  # orders of frozen values that a pattern keeps
ATTRIBUTE = "_sparsebench_pattern"  # attribute of the tensor `columns`


class PlannedPattern:
    """A copy of an index, the plans made for it, and packed values that are frozen.

    offsets, columns  the copies; plans read these, so that writes into the index cannot corrupt one
    stamp             None for an index made in inference mode
    frozen            the index is never compared again
    """

    def __init__(
        self,
        offsets: Tensor,
        columns: Tensor,
        stamp: tuple[int, ...] | None,
        alike: "PlannedPattern | None" = None,
    ) -> None:
        """Copy an index, or take the copy and the plans of one that is alike.

        Raises Unsupported if its tensors are on different devices.
        """
        devices = sorted({str(offsets.device), str(columns.device)})
        if len(devices) > 1:
            raise Unsupported(f"expected one device, found {', '.join(devices)}")

        def copies() -> tuple[Tensor, Tensor]:
            with torch.inference_mode(False):
                return offsets.clone(), columns.clone()

        self._made: dict[Hashable, Any] = {}
        if alike is None:
            self.offsets, self.columns = make_lasting(copies, columns.device)
            self.operator = operator_of(self.offsets, self.columns)
        else:
            self.offsets, self.columns, self._made = alike.offsets, alike.columns, alike._made
            self.operator = alike.operator
        self.originals = offsets.detach(), columns.detach()  # keeps their addresses taken
        self.stamp, self.frozen, self.device = stamp, False, columns.device
        self.calls = randrange(COMPARE_EVERY)  # so that layers compare at different steps
        self.packs = Packs()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as an empty object of a type that torch.load accepts."""
        return OrderedDict, ()

    def run(self, call: BsrCall, a: Tensor, b: Tensor) -> Tensor:
        """Return a product, `call.m` being the number of tokens. The first call plans it."""
        capturing = is_capturing(a)
        live = call.live or (capturing and not self.frozen)  # replays read what is there then
        product = self._product(call, a, b, live=live)
        if product.pack is not None:
            b = product.pack(b) if live else self.packs.of(product, b)
        result: Tensor = product.run(a, b)
        return result

    def _product(self, call: BsrCall, a: Tensor, b: Tensor, *, live: bool) -> Product:
        """Return the plan of the bucket of a call."""
        planned, plans = call._replace(m=bucket(call.m)), self.operator.plans
        of_live = planned._replace(live=live)  # a capture takes the plan for live values
        return self.select(
            of_live if planned not in plans and of_live in plans else planned, a, b
        ).product

    def select(
        self,
        call: BsrCall,
        a: Tensor | None = None,
        b: Tensor | None = None,
        earlier: Earlier | None = None,
    ) -> Selected:
        """Plan a call; with operands, a search may time what can run it. Raises Unsupported."""

        def workload(product: Product) -> Any:
            assert a is not None
            assert b is not None
            if call.live:
                return lambda: product.run(a, product.packed(b))
            return partial(product.run, a, product.packed(b))

        return self.operator.select(call, None if a is None else workload, earlier)

    def made_once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """Return what the first call with this key made of the index."""
        if key not in self._made:
            self._made[key] = make_lasting(make, self.device)
        return self._made[key]

    def is_planned(self, call: BsrCall) -> bool:
        """Return whether a call has a plan."""
        return call._replace(m=bucket(call.m)) in self.operator.plans

    def equals(self, offsets: Tensor, columns: Tensor) -> bool:
        """Return whether an index equals the copy. Waits for the device."""
        pairs = (self.offsets, offsets), (self.columns, columns)
        same = all((a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape) for a, b in pairs)
        return same and all(torch.equal(a, b) for a, b in pairs)


def operator_of(offsets: Tensor, columns: Tensor) -> Operator:
    """Return the plans of an index, which they read."""
    weights: dict[Any, Bsr] = {}

    def weight(call: BsrCall) -> Bsr:
        key = call.shape, call.block
        if key not in weights:
            require_index(offsets, columns, *key)
            blocks = columns.new_empty((1, 1, 1)).expand(len(columns), *call.block)  # never read
            weights[key] = Bsr(call.shape, offsets, columns, blocks)
        return weights[key]

    def problem(call: BsrCall) -> dict[str, Any]:
        return problem_of(call, len(columns))

    def order(call: BsrCall) -> Sequence[Engine]:
        return likeliest(call, len(columns), columns.device)

    return Operator(ENGINES, weight, problem, columns.device, order)


class Packs:
    """Frozen values in the order of a kernel: at most PACKED copies, the ones used last."""

    def __init__(self) -> None:
        """Hold nothing."""
        self.source: Tensor | None = None
        self.version = -1
        self.by_order: OrderedDict[Hashable, Tensor] = OrderedDict()

    def of(self, product: Product, values: Tensor) -> Tensor:
        """Return the values as a product reads them; packs them if torch counts a write."""
        assert product.pack is not None
        if values.is_inference():  # torch does not count its writes
            return product.pack(values)
        source = self.source  # holding it keeps its address taken
        moved = source is None or source.data_ptr() != values.data_ptr()
        if moved or values._version != self.version:
            self.by_order.clear()
            self.source, self.version = values.detach(), values._version
        if (packed := self.by_order.get(product.order)) is None:
            pack = partial(product.pack, values)
            packed = self.by_order[product.order] = make_lasting(pack, values.device)
            if len(self.by_order) > PACKED:
                self.by_order.popitem(last=False)
        if is_capturing(packed):
            keep(packed)
        return packed


def pattern_of(offsets: Tensor, columns: Tensor) -> PlannedPattern:
    """Return the pattern of an index.

    Waits for the device at the first call, after a write, and once in COMPARE_EVERY calls. Raises
    Unsupported, and RuntimeError if torch did not count a write.
    """
    cached = getattr(columns, ATTRIBUTE, None)
    stamp = _stamp(offsets, columns)
    if type(cached) is PlannedPattern and cached.stamp == stamp is not None:
        cached.calls += 1
        if cached.frozen or cached.calls % COMPARE_EVERY:
            return cached
    return _compare(cached if type(cached) is PlannedPattern else None, stamp, offsets, columns)


def freeze_index(offsets: Tensor, columns: Tensor) -> None:
    """Compare an index no more, and pack its frozen values once in captures, too.

    A call that is captured first may do this, because it is promised that the index stays.
    """
    pattern = pattern_of(offsets, columns)
    if not pattern.frozen:
        pattern.frozen, pattern.stamp = True, _stamp(offsets, columns)
        setattr(columns, ATTRIBUTE, pattern)


def share_plans(index: "Index", alike: "Index") -> None:
    """Let an index take the plans of an equal one; the values of each are packed by themselves.

    Two layers with one tensor `columns` would have one pattern, which packs the values of only one
    of them, so that every call of the other packs again. Waits for the device. Raises FormatError.
    """
    pattern, (offsets, columns) = pattern_of(*alike), index
    require(pattern.equals(offsets, columns), "expected two equal indices, found different ones")
    setattr(columns, ATTRIBUTE, PlannedPattern(offsets, columns, _stamp(*index), pattern))


def _stamp(offsets: Tensor, columns: Tensor) -> tuple[int, ...] | None:
    try:
        counts = offsets._version, columns._version
    except RuntimeError:  # an inference tensor
        return None
    addresses = offsets.data_ptr(), columns.data_ptr()
    return *counts, *addresses, offsets.shape[0], columns.shape[0]  # len() takes ten times as long


def _compare(
    cached: PlannedPattern | None, stamp: tuple[int, ...] | None, offsets: Tensor, columns: Tensor
) -> PlannedPattern:
    """Return the cached pattern if the index still equals it, else a new one."""
    same_stamp = cached is not None and cached.stamp == stamp is not None
    if columns.is_cuda and torch.cuda.is_current_stream_capturing():  # a capture cannot compare
        return (
            cached if cached and same_stamp else PlannedPattern(offsets, columns, None)
        )  # without plans
    if cached and cached.equals(offsets, columns):
        cached.stamp = stamp
        return cached
    if same_stamp:
        raise RuntimeError(
            f"the index of {len(columns)} blocks was written in a way that torch does not count "
            f"(.data, NumPy, a collective), so up to {COMPARE_EVERY} calls since then were wrong: "
            "load a state dict or call set_pattern instead"
        )
    pattern = PlannedPattern(offsets, columns, stamp)
    setattr(columns, ATTRIBUTE, pattern)
    return pattern


def replan(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
    """Make every plan of the old index for the new one, so that no later call waits.

    The kernels and configurations stay where they can.
    """
    pattern = getattr(old[1], ATTRIBUTE, None)
    plans = [*pattern.operator.plans.items()] if type(pattern) is PlannedPattern else []
    with ahead(search=False):
        for call, selected in plans:
            assert isinstance(call, BsrCall)
            try:
                choice = {**selected.choice, "by": selected.by}  # a search may replace it later
                pattern_of(*new).select(call, earlier=Earlier(choice, ()))
            except Unsupported:  # this configuration cannot run the new pattern
                pattern_of(*new).select(call)


# ---- an index ----

Index = tuple[Tensor, Tensor]
"""Offsets and columns of a BSR matrix, int32."""


def index_of(pattern: Tensor) -> Index:
    """Return offsets and columns of a pattern, bool [block rows, block columns]."""
    require(
        pattern.dim() == 2 and pattern.dtype == torch.bool,
        f"pattern: expected a bool matrix, found {pattern.dtype} {list(pattern.shape)}",
    )
    rows, columns = pattern.nonzero(as_tuple=True)
    return offsets_of(rows, len(pattern)), columns.to(torch.int32)


def require_index(
    offsets: Tensor, columns: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise FormatError unless this is the index of a BSR matrix [n, k]. Waits for the device."""
    for name, index in (("offsets", offsets), ("columns", columns)):
        if index.dim() != 1 or index.dtype != torch.int32 or not index.is_contiguous():
            layout = f"{index.dtype} {list(index.shape)} with strides {list(index.stride())}"
            raise FormatError(f"{name}: expected a contiguous list of int32, found {layout}")
    checked(Bsr(shape, offsets, columns, columns.new_empty((1, 1, 1)).expand(len(columns), *block)))


def copy_of(offsets: Tensor, columns: Tensor, device: torch.device) -> Index:
    with torch.inference_mode(False):  # torch does not count writes into inference tensors
        return offsets.detach().to(device, copy=True), columns.detach().to(device, copy=True)


def source_of(old: Index, new: Index, width: int) -> Tensor:
    """Return int64 [new blocks]: the position of each block in the old index, or -1."""
    before, after = (rows_of(offsets) * width + columns for offsets, columns in (old, new))
    if not len(before):
        return torch.full_like(after, -1)
    at = torch.searchsorted(before, after).clamp(max=len(before) - 1)
    return at.where(before[at] == after, -1)


def draw_pattern(grid: tuple[int, int], sparsity: float) -> Tensor:
    """Draw a pattern whose block rows all store the same number of blocks, or one more."""
    rows, columns = grid
    least, remainder = divmod(stored_of(sparsity, rows * columns), rows)
    counts = least + (torch.randperm(rows, device="cpu") < remainder).long()
    return torch.rand(grid, device="cpu").argsort(1).argsort(1) < counts[:, None]


def stored_of(sparsity: float, blocks: int) -> int:
    """Return the number of blocks to store."""
    require(0 <= sparsity <= 1, f"sparsity: expected 0 to 1, found {sparsity}")
    return round((1 - sparsity) * blocks)


def grid_of(shape: tuple[int, int], block: tuple[int, int]) -> tuple[int, int]:
    (n, k), (r, c) = shape, block
    return -(-n // r), -(-k // c)
