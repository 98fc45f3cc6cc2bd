"""Linear layer with zeros anywhere in W, for up to 128 tokens: Y[m, n] = X[m, k] @ W[n, k].T.

W becomes the sum of two 2:4 matrices, which the tensor cores multiply as they are (wgmma.sp):
nothing is decoded. bitmap_pairs.cu is the kernel and draws both. This file packs W (`pairs_of`),
chooses a configuration and plans.

    dtype     fp16, bf16
    sizes     up to 128 tokens; k a multiple of 8, any n
    X         row strides of a multiple of 16 bytes; where W is zero, infinity and NaN in X may not
              be multiplied, as in any 2:4 product, so Y has no NaN there
    bytes     of dense, 0.56 + 2 d: d, the elements beyond two of a group of four, is 0.094 of all
              at 50 % zeros and 0.023 at 70 %; W keeps its records beside them
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import islice, product
from threading import Lock

import torch
from torch import Tensor
from torch.nn.functional import pad

from sparsebench.formats._format import BITS, has_value
from sparsebench.formats.bitmap import UNIT, Bitmap
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.capture import make_lasting
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.made_once import made_while_used
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.stamp import Stamp, stamp_of
from sparsebench.kernels._common.unstructured import UnstructuredCall, bind
from sparsebench.results.record import Problem

ROWS, COLUMNS, ROW_BYTES, GROUP = 64, 128, 128, 4
LIST_STEP = 4  # elements of a list that a thread reads at a time
BANKS = 32  # of shared memory, and lanes of a warp
PACK_STEP = 2**18  # columns of W times tiles of 64 rows that are packed at a time
TILE_BYTES = ROWS * ROW_BYTES
HEAD_BYTES = TILE_BYTES + TILE_BYTES // 8
TOKENS = 16, 32, 48, 64, 96, 128  # to which X is padded
MOST_TOKENS = TOKENS[-1]
HEIGHTS, TURNS, SPLITS, DEPTHS = (2, 3, 4, 1), (1, 2), (1, 2, 3, 4, 5, 6, 8), (6, 5, 4, 3, 2)
MOST_SUMS = 288  # tokens times warpgroups: more need more registers than there are


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens      tokens of X, padded to one of TOKENS
    height      rows of tiles of a CTA, which share X
    turns       warpgroups of a row, which multiply tiles in turn: 1 or 2
    split       CTAs of a cluster, which divide k
    depth       stages of the ring: a multiple of `turns`, and at least twice as many
    """

    tokens: int
    height: int
    turns: int
    split: int
    depth: int

    @property
    def warpgroups(self) -> int:
        """Return the warpgroups of a CTA that multiply."""
        return self.height * self.turns

    @property
    def threads(self) -> int:
        """Return the threads of a CTA, with the two warps that load."""
        return 128 * self.warpgroups + 64

    def stage_bytes(self, room: int) -> int:
        """Return the bytes of a stage; `room` is those of the longest list."""
        stage = 2 * self.tokens * ROW_BYTES + self.height * (HEAD_BYTES + room)
        return -(-stage // 1024) * 1024

    def shared_bytes(self, room: int) -> int:
        """Return the bytes of shared memory; `room` is those of the longest list."""
        seconds = self.height * 2 * TILE_BYTES
        barriers = self.depth * (16 + 4 * self.height)
        sums = self.turns * self.tokens * (ROWS * self.height + 4) * 4
        return 1024 + max(self.depth * self.stage_bytes(room), sums) + seconds + barriers


@dataclass(frozen=True, eq=False)
class Pairs:
    """W as the kernel reads it.

    heads   uint8 [row tiles, tiles of a row, 9216]  the first matrix, as in formats/spense.py
    lists   uint8 [bytes]                            the second: place << 16 | value, 4 bytes each
    bounds  int32 [tiles + 1]                        start of each list, in units of 16 bytes
    room    bytes of the longest list
    """

    heads: Tensor
    lists: Tensor
    bounds: Tensor
    room: int

    @property
    def stored_bytes(self) -> int:
        """Return the bytes of all arrays."""
        return self.heads.numel() + self.lists.numel() + 4 * self.bounds.numel()


def pack(dense: Tensor) -> Pairs:
    """Pack a matrix [n, k] of fp16 or bf16."""
    parts = [_pack_rows(rows) for rows in dense.split(max(PACK_STEP // dense.shape[1], 1) * ROWS)]
    heads, lists, units = (torch.cat(each) for each in zip(*parts, strict=True))
    bounds = pad(units.cumsum(0), (1, 0)).int()
    return Pairs(heads, lists, bounds, int(units.amax()) * UNIT)


def _pack_rows(dense: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the heads, the lists, and the size of each list in UNITs."""
    bits = pad(dense.view(BITS[2]), (0, -dense.shape[1] % COLUMNS, 0, -len(dense) % ROWS))
    groups = bits.unflatten(1, (-1, GROUP))
    stored = has_value(groups)
    count, zeroth = stored.sum(-1, dtype=torch.uint8), stored[..., 0]
    beyond = torch.stack((zeroth & (count > 2), (count > 2) & ~zeroth | (count == 4)), -1)
    first = groups.clone()
    first[..., :2].masked_fill_(beyond, 0)
    heads = Spense.from_dense(first.flatten(1).view(dense.dtype)).sparse

    def tiles(of_groups: Tensor) -> Tensor:  # [rows, groups, 2] -> [tiles, elements of one]
        cut = of_groups.unflatten(0, (-1, ROWS)).unflatten(2, (-1, COLUMNS // GROUP))
        by_tile: Tensor = cut.transpose(1, 2).flatten(0, 1).flatten(1)
        return by_tile

    in_list, device = tiles(beyond), dense.device
    counts = in_list.sum(-1)
    units = -(-counts // LIST_STEP)
    of_list = (units.cumsum(0) - units) * LIST_STEP
    lists = torch.zeros(int(units.sum()) * LIST_STEP, dtype=torch.int32, device=device)
    tile, element = in_list.nonzero(as_tuple=True)
    places = _places(device)[element]
    words = places << 16 | tiles(groups[..., :2])[in_list].int() & 0xFFFF
    turn = _turns(tile, places)
    tile, words, rank = tile[turn], words[turn], in_list.cumsum(-1)[in_list] - 1
    last = rank == counts[tile] - 1
    for more in range(LIST_STEP):  # the last element again, up to a whole step
        again = last & (rank % LIST_STEP + more < LIST_STEP) if more else slice(None)
        of_tile = tile[again]
        lists[of_list[of_tile] + _at(rank[again] + more, units[of_tile])] = words[again]
    return heads, lists.view(torch.uint8), units


def _turns(tile: Tensor, places: Tensor) -> Tensor:
    """Return the order of the elements of all lists in which 32 neighbours lie in many banks.

    tile    of each element, ascending
    places  of each, as the kernel reads them

    The first element of each bank comes first, bank by bank, and then the second of each.
    """
    bank = tile * BANKS + (places >> 2) % BANKS
    order = bank.argsort(stable=True)
    ordered = bank[order]
    rank = torch.empty_like(bank)
    first = torch.searchsorted(ordered, ordered)
    rank[order] = torch.arange(len(bank), device=bank.device) - first
    return ((tile * ROWS * ROW_BYTES + rank) * BANKS + bank % BANKS).argsort()


def _at(rank: Tensor, steps: Tensor) -> Tensor:
    """Return the place in a list of `steps` steps of the element that is stored `rank`th.

    A warp reads up to 32 steps, a lane one of them, and stores the lanes' first elements together.
    """
    warp, rank = rank // (BANKS * LIST_STEP), rank % (BANKS * LIST_STEP)
    lanes = (steps - warp * BANKS).clamp(max=BANKS)
    return warp * BANKS * LIST_STEP + rank % lanes * LIST_STEP + rank // lanes


@cache
def _places(device: torch.device) -> Tensor:
    """Return int32 [64 x 64], the byte in its swizzled tile of each element of the second."""
    row = torch.arange(ROWS, dtype=torch.int32, device=device)[:, None]
    byte = 2 * torch.arange(ROW_BYTES // 2, dtype=torch.int32, device=device)
    return (row * ROW_BYTES + ((byte // UNIT ^ row % 8) * UNIT) + byte % UNIT).flatten()


_LOCK = Lock()


@made_while_used
def _pairs(w: Bitmap, stamp: Stamp) -> Pairs:
    return make_lasting(lambda: pack(w.to_dense()), w.records.device)


def pairs_of(w: Bitmap) -> Pairs:
    """Return the pairs of W as it is now, made once while a plan reads them. Raises Unsupported."""
    with _LOCK:  # plans are made in threads
        return _pairs(w, stamp_of(w, "bitmap_pairs"))


def choices(w: Bitmap, call: UnstructuredCall) -> Sequence[Config]:
    """Return what fits, the likeliest first."""
    device, room = w.records.device, pairs_of(w).room
    at_once = {split: at_once_of(split, device) for split in SPLITS}
    configs = configurations(*w.shape, call.m, room)
    return sorted(configs, key=lambda config: _predicted_us(config, w.shape, room, at_once))


def configurations(n: int, k: int, m: int, room: int) -> Iterator[Config]:
    """Yield the configurations for m tokens, each with as many stages as fit."""
    tokens = next(t for t in TOKENS if t >= m)
    for height, turns, split in product(HEIGHTS, TURNS, SPLITS):
        fits = split * turns <= -(-k // COLUMNS) and height <= -(-n // ROWS)
        if fits and height * turns * tokens <= MOST_SUMS:
            depths = (d for d in DEPTHS if d % turns == 0 and d > turns)
            configs = (Config(tokens, height, turns, split, d) for d in depths)
            yield from islice((c for c in configs if c.shared_bytes(room) <= cuda.SHARED_BYTES), 1)


def _predicted_us(
    config: Config, shape: tuple[int, int], room: int, at_once: Mapping[int, int]
) -> float:
    """Return the predicted time without the launch, in µs.

    The numbers fit 14336 x 4096 and 5120 x 13824 on an H200. The first copy and the store of a
    round take 5 together, and 3 more in a cluster. In a microsecond an SM copies 46 KB, if the
    other stages cover the 2.6 that a copy takes, and all SMs read 3.9 MB of W. Without turns the
    copies take 6 % longer.
    """
    n, k = shape
    of_w = config.height * (HEAD_BYTES + room)
    groups = -(-n // (ROWS * config.height))
    rounds = -(-groups // max(at_once[config.split], 1))
    steps = -(-k // (COLUMNS * config.split))
    copies = steps * max(config.stage_bytes(room) / 46e3, 2.6 / (config.depth - 1))
    bytes_of_w = groups * -(-k // COLUMNS) * of_w / 3.9e6
    ends = rounds * (5 + 3 * (config.split > 1))
    return (ends + max(rounds * copies, bytes_of_w)) * (1.06 if config.turns == 1 else 1)


def at_once_of(split: int, device: torch.device) -> int:
    """Return how many clusters of `split` CTAs run at a time, one CTA on an SM."""
    if split == 1 or device.type != "cuda":
        return max(multiprocessors(device) // split, 1)
    return cuda.clusters_at_once(
        split, Config(16, 2, 1, split, 2).threads, cuda.SHARED_BYTES, device
    )


def plan(w: Bitmap, call: UnstructuredCall, config: Config) -> Product:
    """Pack W, unless it is, and load the kernel. Raises Unsupported."""
    pairs, (n, k), device = pairs_of(w), w.shape, w.records.device
    row_tiles, tiles = -(-n // ROWS), -(-k // COLUMNS)
    constants, shared = constants_of(config, w.dtype), config.shared_bytes(pairs.room)
    kernel = cuda.load("bitmap_pairs", "multiply_pairs", constants, shared, device)
    ctas = -(-row_tiles // config.height) * config.split
    loaded = kernel.on(ctas, config.threads)
    arrays = pairs.heads, pairs.lists, pairs.bounds
    weights = *(a.data_ptr() for a in arrays), row_tiles, tiles

    @lru_cache(cuda.ADDRESSES)
    def arguments(m: int, x: int, stride: int, y: int) -> cuda.Arguments:
        of_x = cuda.tensor_map(x, (m, k), (stride, 1), w.dtype, (m, ROW_BYTES // 2))
        return kernel.arguments(of_x, *weights, y, m, n, pairs.room)

    def run(x: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(x.shape[0], n) if out is None else out
        args = arguments(x.shape[0], x.data_ptr(), x.stride(0), y.data_ptr())
        return cuda.launch(loaded, args, y, pairs)

    return Product(run, kernel.code)


def constants_of(config: Config, dtype: torch.dtype) -> cuda.Constants:
    return (
        *(("TOKENS", config.tokens), ("HEIGHT", config.height), ("TURNS", config.turns)),
        *(("SPLIT", config.split), ("DEPTH", config.depth)),
        ("FP16", int(dtype == torch.float16)),
    )


def unsupported_call(w: Bitmap, call: UnstructuredCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    (n, k), m = w.shape, call.m
    if w.dtype not in cuda.HALVES:
        return f"expected fp16 or bf16, found {w.dtype}"
    if k % 8 or not n or not k:
        return f"expected a multiple of 8 columns of X, found {k} and {n} rows of W"
    return _unsupported_tokens(m)


def _unsupported_tokens(m: int) -> str | None:
    fits = 1 <= m <= MOST_TOKENS
    return None if fits else f"expected 1 to {MOST_TOKENS} tokens, found {m}"


def unsupported(problem: Problem, device: torch.device) -> str | None:
    reason = unsupported_on_hopper(problem, device, ("fp16", "bf16"))
    return _unsupported_tokens(problem["m"]) or reason


KERNEL = gpu_engine(
    *("bitmap_pairs", "linear", "bitmap", Config, choices, plan),
    *(unsupported, bind, unsupported_call),
)
