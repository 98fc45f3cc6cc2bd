"""Linear layer with 2:4 sparse and dense weights in one launch on Hopper: Y[m, n] = X[m, k] W.T.

    spense_wgmma.cu   the kernel; draws its pipeline: W by bulk copies, X by TMA, wgmma.sp and wgmma
                      into the same fp32 accumulators
    _stream_k.py      which CTA multiplies what, and which work items are cut along k
    _clusters.py      for few tokens, a cluster for each work item instead
    _tilings.py       for more tokens, how many of them a work item has
    this file         chooses configurations and plans

    dtype     fp16, bf16, or fp8 (e4m3) with Y in bf16
    sizes     any m; n a multiple of 8; k of 8 (16 bits) or 16 (8 bits), so that rows have a
              multiple of 16 bytes
    X         row strides of a multiple of 16 bytes
    W         any split

In fp8 the tensor cores accumulate in fewer bits than fp32, like torch._scaled_mm with
use_fast_accum. Accumulators may be scaled by feature and by token before Y is rounded.

With an `activation`, W holds gate and up of a gated MLP (spense_ffn.py). The launch then writes
H[m, n / 2] = act(X Wg.T) * (X Wu.T) instead of Y, rounded once to X's dtype. In fp8 that is e4m3,
which saturates at 448. n must then be a multiple of 16, or of 32 in fp8, so that rows of H have a
multiple of 16 bytes. The activation is applied to scaled values. H is linear in U, so the scales
of up may contain a scale of H; those of the next product then contain its inverse.

If W is a lifted 6:8 matrix (formats/slide.py), the idle warps can lift X on chip (slide_wgmma.py).
"""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats.spense import ROW_BYTES, ROWS, VALUE_BYTES, Spense
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.declarations import record
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.engines import gpu_engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.scratch import counters, workspace
from sparsebench.kernels._common.work_list import WORKERS, first_of, uploaded
from sparsebench.kernels.spense import _clusters, _tilings
from sparsebench.kernels.spense._call import ALIGNMENT, TALLEST, SpenseCall, bind, unsupported_sizes
from sparsebench.kernels.spense._stream_k import schedule, tiles_of

DTYPES = *cuda.HALVES, torch.float8_e4m3fn
TOKENS = *range(16, 129, 16), *range(136, TALLEST + 1, 8)
POWERS = 16, 32, 64, 128, 256
BOX = ROW_BYTES // 2  # columns of a box of X or Y, counted in 16 bits
SHARED_BYTES = 226 * 1024  # stages, tiles of the epilogue, mbarriers, alignment to 1024
STORE_TOKENS = 16  # tokens of Y that a warpgroup stores at a time
CLUSTERS, CLUSTERS_FIRST = 5, range(33, 129)  # most clusters; tokens for which they come first
MORE = 4  # configurations for more tokens
UNIT = 3  # tiles of a lifted 6:8 matrix that have whole windows: four boxes of X, two of middles
ACTIVATIONS = None, "silu", "relu", "relu2", "gelu_tanh"  # in the order of the kernel's ACTIVATION


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens      tokens of X in a work item, one of TOKENS
    cluster     CTAs of a cluster, which share the boxes of X: 1 or 2
    ahead       most tiles of W in flight for a warpgroup
    warpgroups  warpgroups of a CTA that multiply: 1 to 3 rows of tiles of W share X
    split       0: a work list for as many CTAs as the GPU runs at a time. Otherwise a cluster of
                `split` CTAs for each work item, which share its k tiles; cluster is then 1
    """

    tokens: int
    cluster: int
    ahead: int
    warpgroups: int = 2
    split: int = 0

    @property
    def threads(self) -> int:
        """Return the threads of a CTA: the warpgroups that multiply, and one that copies."""
        return 128 * (self.warpgroups + 1)

    @property
    def stored(self) -> int:
        """Return the tokens of the sums of a work item, whole stores of Y."""
        return -(-self.tokens // STORE_TOKENS) * STORE_TOKENS


def choices(w: Spense, call: SpenseCall, clusters: int = CLUSTERS) -> list[Config]:
    """Return the likeliest configurations, and those for half as many tokens more.

    So more tokens never take less time. There are at most `clusters` clusters for each number.
    """
    of = call.shape, call.dtype.itemsize, w.sparse.device, clusters
    more = configurations(call.m + call.m // 2, *of)[:MORE]
    return list(dict.fromkeys([*configurations(call.m, *of), *more]))


def closed(w: Spense, call: SpenseCall) -> list[Config]:
    """Return configurations of few kernels for all numbers of tokens, the likeliest first."""
    of = call.m, call.shape, call.dtype.itemsize
    tilings = _tilings.likeliest(*of, multiprocessors(w.sparse.device), closed=True)
    return [Config(tokens, 1, *each) for tokens, *each in tilings] or choices(w, call)[:1]


def configurations(
    m: int, shape: tuple[int, int], itemsize: int, device: torch.device, clusters: int = CLUSTERS
) -> list[Config]:
    """Return configurations for m tokens and W [n, k], the likeliest first.

    itemsize  bytes of an element
    clusters  the most clusters

    Beyond 128 tokens, work lists of tiles as high as m needs come first (_tilings.py). Then come
    powers of two: the smallest one that holds all tokens reads W once. If none does, the largest
    two are listed.
    """
    tilings = _tilings.likeliest(m, shape, itemsize, multiprocessors(device))
    fitting = [tokens for tokens in POWERS if tokens < 2 * m or tokens == POWERS[0]]
    sizes: list[tuple[int, ...]]
    if m <= 32:
        sizes = [(fitting[-1], 1, ahead) for ahead in (5, 4, 6)]
    elif m <= 64:  # clusters of one CTA are 2 to 3 % faster with many features
        sizes = [(fitting[-1], *each) for each in ((2, 5), (2, 4), (1, 5), (1, 6))]
    else:
        sizes = [(tokens, cluster, 4) for tokens in fitting[:-3:-1] for cluster in (2, 1)]
    if 128 < m <= 256:  # 27.4 us instead of 28.2 with 18432 features in fp8
        sizes.append((128, 1, 4, 3))
    lists = [Config(tokens, 1, *each) for tokens, *each in tilings]
    lists += [Config(*each) for each in sizes]
    at_once = {split: _at_once(split, device) for split in _clusters.SPLITS}
    likeliest = _clusters.likeliest(m, shape, itemsize, at_once, clusters)
    shared = [Config(tokens, 1, *each) for tokens, *each in likeliest]
    listed = [*shared, *lists] if m in CLUSTERS_FIRST else [*lists, *shared]
    return list(dict.fromkeys(listed))


def _at_once(ctas: int, device: torch.device) -> int:
    """Return how many clusters of `ctas` CTAs run at a time."""
    if ctas == 1 or device.type != "cuda":
        return max(multiprocessors(device) // ctas, 1)
    return cuda.clusters_at_once(ctas, Config(16, 1, 4).threads, SHARED_BYTES, device)


def plan(w: Spense, call: SpenseCall, config: Config) -> Product:
    """Schedule the work and upload the list. Reads only the shapes and the device of W's tiles."""
    device, (n, k), m, lifts = w.sparse.device, call.shape, call.m, call.lifted_from is not None
    constants = constants_of(config, call.dtype, call.activation, windows=lifts)
    kernel = cuda.load("spense_wgmma", "multiply_tiles", constants, SHARED_BYTES, device)
    groups, workers = -(-n // (ROWS * config.warpgroups)), multiprocessors(device)
    listed, sums, arrivals = torch.empty(0, dtype=torch.int32, device=device), 0, 0
    if config.split:
        token_tiles = -(-m // config.tokens)
        first: tuple[Any, ...] = (token_tiles, -(-k // w.span))
        grid = groups * token_tiles
    else:
        sizes = m, config.tokens, config.cluster, workers // config.cluster
        unit = UNIT if lifts else 1
        work = schedule(w, *sizes, rows_of_cta=config.warpgroups, unit=unit)
        listed, grid = uploaded(work.items, device), workers // config.cluster
        items = work.items.view(record("spense_wgmma", "WorkItem"))["tile"]
        first = first_of(items, work.starts)
        tile_rows = config.warpgroups * config.cluster
        sums = work.slots * tile_rows * ROWS * config.stored
        arrivals = work.counters * tile_rows
    ctas = grid * max(config.split, config.cluster)
    loaded = kernel.on(ctas, config.threads, together=not config.split)
    tiles = tiles_of(w)

    @lru_cache(cuda.ADDRESSES)
    def arguments(tokens: int, x: tuple[int, int], y: int, *rest: int) -> cuda.Arguments:
        sparse, dense, features, of_tokens, partial_sums, counts = rest
        maps = maps_of(call, config, tokens, x, y)
        weights, scales = (sparse, dense, *tiles), (features, of_tokens, n, tokens)
        lists = () if config.split else (listed.data_ptr(), partial_sums, counts)
        return kernel.arguments(*maps, *weights, *first, *scales, *lists)

    def run(
        x: Tensor,
        sparse: Tensor,
        dense: Tensor,
        features: Tensor | None = None,
        tokens: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        y = x.new_empty((x.shape[0], call.width), dtype=call.kind) if out is None else out
        scratch = workspace(x, sums), counters(x, arrivals)
        operands = sparse, dense, features, tokens, *scratch
        at = [0 if operand is None else operand.data_ptr() for operand in operands]
        args = arguments(x.shape[0], (x.data_ptr(), x.stride(0)), y.data_ptr(), *at)
        return cuda.launch(loaded, args, y, listed, *(part for part in scratch if part is not None))

    return Product(run, kernel.code)


def maps_of(
    call: SpenseCall, config: Config, tokens: int, x: tuple[int, int], y: int
) -> list[bytes]:
    """Return the tensor maps of X, Y and the last tile of X; x is address and stride."""
    part = config.tokens // config.cluster
    of_x = x[0], (tokens, call.depth), x[1], call.dtype
    written = BOX * call.kind.itemsize // 4 if call.activation else BOX  # columns, in 16 bits
    stored = STORE_TOKENS // 2 if config.tokens % STORE_TOKENS else STORE_TOKENS
    of_y = y, (tokens, call.width), call.width, call.kind
    boxes = (part, BOX), (stored, written), (tokens % part or part, BOX)
    return [map_of(*of, box) for of, box in zip((of_x, of_y, of_x), boxes, strict=True)]


def map_of(
    address: int, shape: tuple[int, int], stride: int, dtype: torch.dtype, box: tuple[int, int]
) -> bytes:
    """Return the tensor map of a matrix in words of 16 bits, of which one holds two fp8 values."""
    each, (height, width) = 2 // dtype.itemsize, shape
    kind = dtype if each == 1 else torch.bfloat16
    return cuda.tensor_map(address, (height, width // each), (stride // each, 1), kind, box)


def constants_of(
    config: Config, dtype: torch.dtype, activation: str | None = None, *, windows: bool = False
) -> cuda.Constants:
    """Return the macros of spense_wgmma.cu; with `windows`, the kernel lifts X."""
    return (
        *(("TOKENS", config.tokens), ("CLUSTER", config.cluster), ("AHEAD", config.ahead)),
        *(("WARPGROUPS", config.warpgroups), ("SPLIT", config.split), ("WINDOWS", int(windows))),
        *(("FP8", int(dtype == torch.float8_e4m3fn)), ("FP16", int(dtype == torch.float16))),
        *(("ACTIVATION", ACTIVATIONS.index(activation)), ("THREADS", config.threads)),
        *(("SHARED_BYTES", SHARED_BYTES), ("ROWS", ROWS), ("ROW_BYTES", ROW_BYTES)),
        *(("VALUE_BYTES", VALUE_BYTES), ("STORE_TOKENS", STORE_TOKENS), ("WORKERS", WORKERS)),
    )


def unsupported_call(w: Spense, call: SpenseCall) -> str | None:
    """Return why the kernel cannot run a call, or None."""
    if call.activation not in ACTIVATIONS:
        names = ", ".join(filter(None, ACTIVATIONS))
        return f"activation: expected one of {names}; found {call.activation!r}"
    step = 2 * ALIGNMENT // call.dtype.itemsize if call.activation else 8
    return unsupported_sizes(call, DTYPES, step, 2**21)


unsupported = partial(unsupported_on_hopper, dtypes=("fp16", "bf16", "fp8"))

KERNEL = gpu_engine(
    *("spense_wgmma", "linear", "spense", Config, choices, plan),
    *(unsupported, bind, unsupported_call),
    closed=closed,
)
