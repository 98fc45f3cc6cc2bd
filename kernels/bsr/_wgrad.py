"""What the CUDA kernels for weight gradients share: dW = dY[m, n].T @ X[m, k] at W's blocks.

    box     columns of dY or of X that TMA loads at a time: a tile of up to 64, or a strip of 32
    item    boxes of dY and of X, and the parts of dW that a CTA sums from them at a time
    piece   an item, or every second, third, ... of its steps
    worker  a CTA, which sums its pieces one after the other

They take fp16 or bf16, any m, n and k, and rows of dY and X of any stride that is a multiple of 16
bytes. Edge blocks may extend beyond W and are zero there. Sums are in fp32 over all tokens.

Loads are the bottleneck, so each kernel groups W's blocks into items that share them; its file says
how. Here items are assigned to workers, longest first as in _wgmma_lists.py. They stay whole if
the last worker then ends earlier. Otherwise a worker takes whole items up to the mean load, and the
rest is cut into pieces of equal length, one per worker; longer items are cut into more pieces.
Pieces of an item that is cut write partial sums, which are added in a fixed order (split_k.cuh), so
equal operands give equal bits.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from heapq import heapreplace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.operator import Engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.scratch import workspace
from sparsebench.kernels._common.work_list import WORKERS, Ints, Records, fill, starts_of, uploaded
from sparsebench.kernels.bsr._call import LARGEST, BsrCall, bsr_engine

THREADS = 384
RING_BYTES = 216 * 1024  # bytes of all stages
SHARED_BYTES = RING_BYTES + 1024  # alignment to 1024 may take 1023
STRIP, STRIP_BYTES = 32, 64  # columns of a strip, and bytes of a row
ALIGNED = 16  # columns: TMA loads boxes that start elsewhere at half the rate
SHORTEST = 256  # tokens of a piece: fewer do not pay for a partial sum
TRIED = 4  # configurations that a search times, by the predicted end of the last worker
UNIT = 64  # tokens that costs refer to: TMA takes 61 ns for a strip on one SM, 122 for a tile

Floats = NDArray[np.float64]


class Item(NamedTuple):
    """What a worker loads and sums at a time.

    dy, x  numbers of the boxes that a step loads
    sums   what the kernel sums from them
    """

    dy: list[int]
    x: list[int]
    sums: list[Any]

    @property
    def loads(self) -> int:
        """Return the number of boxes."""
        return len(self.dy) + len(self.x)


class ItemList(NamedTuple):
    """The items of a pattern for a configuration, whatever the tokens of a step.

    costs     [items] of UNIT tokens, in loads of a box
    partials  [items] cost of a partial sum
    """

    items: list[Item]
    costs: Ints | Floats
    partials: Ints | Floats


class Piece(NamedTuple):
    """The steps share, share + of, share + 2 of, ... of an item; all steps if of = 1."""

    item: int
    share: int
    of: int


class Division(NamedTuple):
    """Which worker sums which steps of which item.

    pieces  int [pieces, 3], worker by worker: fields of Piece
    starts  int32 [workers + 1]: first piece of each worker that has any
    steps   of an item that is whole
    last    predicted end of the last worker, in loads of a box
    """

    pieces: Ints
    starts: Ints
    steps: int
    last: float


@dataclass(frozen=True)
class WgradWork:
    """What a kernel reads, and how it is compiled.

    loads      Loads [pieces], worker by worker
    sums       Sums [pieces, consumers]
    starts     int32 [workers + 1]: first piece of each worker (Division)
    cut        number of partial sums of the items that are cut
    partial    fp32 sums in each of them
    boxes      rows and columns of a box of dY, and of X
    constants  macros, beside those of all kernels
    places     positions in the values; None if `sums` has them
    width      columns of a block, if the kernel takes any
    """

    loads: Records
    sums: Records
    starts: Ints
    cut: int
    partial: int
    boxes: tuple[tuple[int, int], tuple[int, int]]
    constants: cuda.Constants
    places: Records | None = None
    width: tuple[int, ...] = ()


@dataclass
class Prediction:
    """The items of a pattern and when the last worker would end, by configuration."""

    listed: Callable[[Bsr, Any], ItemList]
    pattern: Bsr
    m: int
    workers: int

    def __post_init__(self) -> None:
        """Compute each configuration once."""
        self.of_steps = cache(partial(self.listed, self.pattern))
        self.end = cache(self._end)

    def list(self, config: Any) -> ItemList:
        """Return the items; they are the same for any tokens of a step."""
        return self.of_steps(replace(config, depth=UNIT))

    def _end(self, config: Any) -> float:
        """Return the predicted end of the last worker, in loads of a box."""
        return division_of(self.list(config), self.m, config.depth, self.workers).last


@dataclass(frozen=True)
class Gradient:
    """What the kernel NAME.cu decides; the search, the schedule and the launch are here.

    config  has the tokens of a step, `depth`
    listed  (pattern, configuration) -> its items. Reads the index on the host
    tried   (prediction) -> the configurations to compare by their predicted end
    written (pattern, configuration, items, division) -> the lists
    """

    name: str
    config: type
    listed: Callable[[Bsr, Any], ItemList]
    tried: Callable[[Prediction], Iterable[Any]]
    written: Callable[[Bsr, Any, ItemList, Division], WgradWork]

    def choices(self, pattern: Bsr, m: int, workers: int) -> list[Any]:
        """Return the TRIED configurations that end first."""
        prediction = Prediction(self.listed, pattern, m, workers)
        return sorted(dict.fromkeys(self.tried(prediction)), key=prediction.end)[:TRIED]

    def work(self, pattern: Bsr, m: int, config: Any, workers: int) -> WgradWork:
        """Return the lists of a launch for up to m tokens."""
        items = self.listed(pattern, config)
        return self.written(pattern, config, items, division_of(items, m, config.depth, workers))

    def engine(self, unsupported_call: Callable[[Bsr, BsrCall], str | None]) -> Engine:
        """Return the engine."""

        def choices(w: Bsr, call: BsrCall) -> list[Any]:
            return self.choices(w, call.m, multiprocessors(w.columns.device))

        def plan(w: Bsr, call: BsrCall, config: Any) -> Product:
            work = self.work(w, call.m, config, multiprocessors(w.columns.device))
            return _product(self.name, w, call, work)

        supported = unsupported_on_hopper, self.config, unsupported_call
        return bsr_engine(self.name, "wgrad", choices, plan, *supported)


def unsupported_sizes(w: Bsr, call: BsrCall, side: int, places: int) -> str | None:
    """Return why no kernel can compute a gradient of this dtype and size, or None.

    side    columns that boxes may reach beyond dY and X
    places  positions in the values, which kernels count
    """
    (n, k), (r, c) = w.shape, w.block
    if call.dtype not in cuda.HALVES:
        return f"expected fp16 or bf16 operands of one dtype, found {call.dtype}"
    if n % 8 or k % 8:
        return f"expected multiples of 8 columns of dY and X, found {n} and {k}"
    if max(places, call.m + UNIT, 2 * (n + side), 2 * (k + side)) > LARGEST:
        actual = f"{len(w.columns)} blocks of {r}x{c} in {n}x{k}, {call.m} tokens"
        return f"expected less than 2^30 rows and columns and 2^31 tokens, found {actual}"
    return None


def division_of(listed: ItemList, m: int, depth: int, workers: int) -> Division:
    """Divide the sums over m tokens, in steps of `depth`, among workers.

    A worker sums its pieces of cut items before its whole items.
    """
    partials = listed.partials
    costs, steps = np.asarray(listed.costs * (depth / UNIT), float), -(-m // depth)
    whole, _ = _assignment(costs * steps, workers, np.inf)
    of_workers, rest = _assignment(costs * steps, workers, costs.sum() * steps / workers)
    none: list[list[Piece]] = [[] for _ in whole]
    ways = [(none, whole)]
    if 0 < len(rest) <= workers:
        ways.append((_pieces_of(rest, costs, steps, -(-SHORTEST // depth), of_workers), of_workers))
    lists = [
        [pieces + [Piece(item, 0, 1) for item in items] for pieces, items in zip(*way, strict=True)]
        for way in ways
    ]

    def end(pieces: list[Piece]) -> float:
        apart = sum(partials[piece.item] for piece in pieces if piece.of > 1)
        return float(apart + sum(costs[p.item] * (-(-steps // p.of)) for p in pieces))

    last, best = min(((max(map(end, way)), way) for way in lists), key=lambda way: way[0])
    busy = [pieces for pieces in best if pieces] or [[]]
    starts = np.array([0, *accumulate(map(len, busy))], np.int32)
    flat = [piece for pieces in busy for piece in pieces]
    return Division(np.array(flat, np.int64).reshape(-1, 3), starts, steps, last)


def _assignment(costs: Floats, workers: int, most: float) -> tuple[list[list[int]], list[int]]:
    """Assign items, longest first, to the least loaded worker; also return those beyond `most`."""
    of_workers: list[list[int]] = [[] for _ in range(workers)]
    loads, rest = [(0.0, worker) for worker in range(workers)], []
    for item in np.argsort(-costs, kind="stable").tolist():
        load, worker = loads[0]
        if load + costs[item] > most:
            rest.append(item)
        else:
            of_workers[worker].append(item)
            heapreplace(loads, (load + costs[item], worker))
    return of_workers, sorted(rest)


def _pieces_of(
    items: list[int], costs: Floats, steps: int, shortest: int, of_workers: list[list[int]]
) -> list[list[Piece]]:
    """Cut items, always the one with the longest pieces, until each worker has a piece.

    Long pieces go to workers with short lists. A piece has at least `shortest` steps.
    """
    parts = dict.fromkeys(items, 1)
    for _ in range(len(of_workers) - len(items)):
        longest = max(items, key=lambda item: costs[item] / parts[item])
        if steps < shortest * (parts[longest] + 1):
            break
        parts[longest] += 1
    longest_first = [Piece(item, share, of) for item, of in parts.items() for share in range(of)]
    longest_first.sort(key=lambda piece: -costs[piece.item] / piece.of)
    pieces: list[list[Piece]] = [[] for _ in of_workers]
    least_first = np.argsort([costs[items].sum() for items in of_workers], kind="stable").tolist()
    for piece, worker in zip(longest_first, least_first, strict=False):
        pieces[worker].append(piece)
    return pieces


def work_from(
    name: str,
    division: Division,
    columns: Ints,
    sums: Records,
    constants: cuda.Constants,
    **rest: Any,
) -> WgradWork:
    """Return the work of pieces from that of whole items.

    columns  [items, room] first column of each box, as the kernel reads it; -1: not loaded
    sums     Sums [items, consumers], without what depends on the piece
    rest     other fields of WgradWork
    """
    (item, share, of), cut = division.pieces.T, np.zeros(len(sums), int)
    cut[item] = np.where(of > 1, of, 0)
    first, count = cut.cumsum() - cut, -(-(division.steps - share) // of)
    adds = np.where((share > 0) | (of == 1), 1, 2**31 - (of - 1))  # all pieces together: 2^31
    sums = sums[item]
    part = {"first": first[item], "share": share, "of": of, "adds": adds}
    fill(sums, count=count[:, None])
    fill(sums["part"], **{name: values[:, None] for name, values in part.items()})
    loads = np.zeros(len(item), record(name, "Loads", constants))
    fill(loads, boxes=columns[item], step=share, count=count, stride=of)
    return WgradWork(loads, sums, division.starts, int(cut.sum()), constants=constants, **rest)


def room_of(strips: int) -> int:
    """Return the room in a stage: each of four warps loads the same number of strips."""
    return -(-strips // 4) * 4


def strips_of(items: Sequence[Item], dy: Ints, x: Ints, room: int) -> Ints:
    """Return the first column of each strip, * 2, + 1 if it is of dY; dY's first: [items, room]."""
    boxes = np.full((len(items), room), -1)
    for mine, item in zip(boxes, items, strict=True):
        mine[: item.loads] = [*(dy[item.dy] * 2 + 1), *(x[item.x] * 2)]
    return boxes


def _product(name: str, w: Bsr, call: BsrCall, work: WgradWork) -> Product:
    """Upload the lists, compile, and return the product.

    Counters, of which each launch leaves the state that the next one needs, belong to the plan, so
    its launches must not overlap.
    """
    device, (n, k), dtype = w.columns.device, w.shape, call.dtype
    blocks = len(w.columns), *w.block
    starts = () if work.places is None else (starts_of(work.starts),)
    arrays = work.loads, work.sums, work.starts if work.places is None else work.places
    lists = tuple(uploaded(array, device) for array in arrays)
    counters = torch.zeros(work.cut, 2, dtype=torch.int32, device=device)
    constants: cuda.Constants = (
        *(("DEPTH", work.boxes[0][0]), ("FP16", int(dtype == torch.float16))),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES)),
        *((("WORKERS", WORKERS),) if starts else ()),
        *work.constants,
    )
    kernel = cuda.load(name, "sum_blocks", constants, SHARED_BYTES, device)
    loaded = kernel.on(len(work.starts) - 1, THREADS)
    owner = *lists, counters

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, dy: int, of_dy: Any, x: int, of_x: Any, values: int, sums: int
    ) -> cuda.Arguments:
        dy_map = cuda.tensor_map(dy, (tokens, n), of_dy, dtype, work.boxes[0])
        x_map = cuda.tensor_map(x, (tokens, k), of_x, dtype, work.boxes[1])
        at = *(array.data_ptr() for array in lists), *starts, values, *work.width, sums
        return kernel.arguments(dy_map, x_map, *at, counters.data_ptr())

    def run(dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        values = x.new_empty(blocks) if out is None else out
        sums = workspace(x, work.cut * work.partial)  # launches on a stream share it
        address = 0 if sums is None else sums.data_ptr()
        at = dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride(), values.data_ptr(), address
        others = () if sums is None else (sums,)
        return cuda.launch(loaded, arguments(len(x), *at), values, owner, *others)

    return Product(run, kernel.code)
