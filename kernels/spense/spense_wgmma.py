"""Linear layer with 2:4 sparse and dense weights in one launch on Hopper: Y[m, n] = X[m, k] W.T.

    spense_wgmma.cu   the kernel; draws its pipeline: W by bulk copies, X by TMA, wgmma.sp and wgmma
                      into the same fp32 accumulators
    _stream_k.py      which CTA multiplies what, and which work items are cut along k
    _clusters.py      for few tokens, a cluster for each work item instead
    _tilings.py       for more tokens, how many of them a work item has
    this file         chooses a configuration and launches

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

import struct
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import product

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import ROW_BYTES, ROWS, VALUE_BYTES, Spense
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.cuda import (
    ADDRESSES,
    HALVES,
    Arguments,
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    clusters_at_once,
    compile_ahead,
    load,
    on_tape,
    tensor_map,
)
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.scales import UNSCALED, Scales
from sparsebench.kernels._common.scratch import counters, workspace
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.device import multiprocessors
from sparsebench.kernels._common.tuned_table import Tuned, choose
from sparsebench.kernels._common.work_list import WORKERS, Ints
from sparsebench.kernels._kernel import Kernel, Launch, Operands, output_dtype
from sparsebench.kernels.spense import _clusters, _operands, _tilings
from sparsebench.kernels.spense._operands import sizes_of, weight_of
from sparsebench.kernels.spense._stream_k import schedule, tiles_of

DTYPES = *HALVES, torch.float8_e4m3fn
TOKENS = *range(16, 129, 16), *range(136, 257, 8)
POWERS = 16, 32, 64, 128, 256
BOX = ROW_BYTES // 2  # columns of a box of X or Y, counted in 16 bits
SHARED_BYTES = 226 * 1024  # stages, tiles of the epilogue, mbarriers, alignment to 1024
STORE_TOKENS = 16  # tokens of Y that a warpgroup stores at a time
# Maps of x, y and the last tile of x; Weights; First; Scales; items, workspace, counters.
ARGUMENTS = Layout("384s", "PPiiiiii", f"{20 * WORKERS}s", "PPii", *"PPP")
SPLIT_ARGUMENTS = Layout("384s", "PPiiiiii", "ii", "PPii")  # maps; Weights; Items; Scales
CLUSTERS_FIRST = range(33, 129)  # tokens for which clusters are timed first
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


def configurations(m: int) -> list[Config]:
    """Return at most four configurations to time for m tokens, the likeliest first.

    The smallest tile that holds all tokens reads W once. If none does, the largest two are timed.
    """
    fitting = [tokens for tokens in POWERS if tokens < 2 * m or tokens == POWERS[0]]
    if m <= 32:
        return [Config(fitting[-1], 1, ahead) for ahead in (5, 4, 6)]
    if m <= 64:  # clusters of one CTA are 2 to 3 % faster with many features
        return [Config(fitting[-1], *sizes) for sizes in ((2, 5), (2, 4), (1, 5), (1, 6))]
    return [Config(tokens, cluster, 4) for tokens in fitting[:-3:-1] for cluster in (2, 1)]


def searched(
    m: int, shape: tuple[int, int], itemsize: int, device: torch.device, most: int = 5
) -> list[Config]:
    """Return `configurations`, and at most `most` clusters for W [n, k], the likeliest first.

    Beyond 128 tokens, work lists of tiles as high as m needs come first (_tilings.py).

    itemsize  bytes of an element
    """
    tilings = _tilings.likeliest(m, shape, itemsize, multiprocessors(device))
    high = [Config(tokens, 1, *sizes) for tokens, *sizes in tilings]
    at_once = {split: _at_once(split, device) for split in _clusters.SPLITS}
    likeliest = _clusters.likeliest(m, shape, itemsize, at_once, most)
    clusters = [Config(tokens, 1, *sizes) for tokens, *sizes in likeliest]
    listed = list(dict.fromkeys([*high, *configurations(m)]))
    if 128 < m <= 256:  # 27.4 us instead of 28.2 with 18432 features in fp8
        listed.append(Config(128, 1, 4, 3))
    return [*clusters, *listed] if m in CLUSTERS_FIRST else [*listed, *clusters]


def _at_once(ctas: int, device: torch.device) -> int:
    """Return how many clusters of `ctas` CTAs run at a time."""
    if ctas == 1 or device.type != "cuda":
        return max(multiprocessors(device) // ctas, 1)
    return clusters_at_once(ctas, Config(16, 1, 4).threads, SHARED_BYTES, device)


def space() -> list[Config]:
    few, many = product((16, 32, 64), (1, 2), (4, 5, 6, 8)), product((128, 256), (1, 2), (4,))
    return [Config(*sizes) for sizes in (*few, *many)]


@dataclass(frozen=True)
class Plan:
    """A launch without addresses: it depends on shapes, configuration and activation.

    items          work items, on the device; empty with `split`
    first          the argument First: the first work tile of each worker, and where its items
                   start; with `split` the argument Items
    workspace      floats of partial sums
    counters       one for each warpgroup of each item that is cut
    x, y           shapes of X, with the most tokens, and of Y or H
    sparse, dense  shapes of W's tiles
    tiles          the kernel's argument Weights, but for the addresses
    n              rows of W
    dtype, kind    dtype of X and W, and of Y or H
    """

    loaded: Loaded
    config: Config
    items: Tensor
    first: bytes
    workspace: int
    counters: int
    x: tuple[int, int]
    y: tuple[int, int]
    sparse: tuple[int, ...]
    dense: tuple[int, ...]
    tiles: tuple[int, ...]
    n: int
    dtype: torch.dtype
    kind: torch.dtype
    activation: str | None = None


def launch(
    x: Tensor,
    w: Spense,
    config: Config,
    scales: Scales = UNSCALED,
    *,
    activation: str | None = None,
    watchdog: bool = False,
) -> BoundKernel:
    """Return the kernel, bound to these operands, that computes Y [m, n] or H [m, n / 2].

    With `watchdog` a kernel that hangs ends and reports where it waited; it is a little slower.
    Raises Unsupported.
    """
    if reason := unsupported_operands(x, w, activation):
        raise Unsupported(reason)
    return bind(plan(w, len(x), config, activation=activation, watchdog=watchdog), x, w, scales)


def plan(
    w: Spense,
    m: int,
    config: Config,
    *,
    activation: str | None = None,
    watchdog: bool = False,
    device: torch.device | None = None,
    lifted_from: int | None = None,
) -> Plan:
    """Schedule the work and upload the list. Reads only the shapes and the dtype of W.

    device       by default that of W
    lifted_from  columns of X, if W is a lifted 6:8 matrix and the kernel lifts X

    The caller checks the operands first (`unsupported_operands`).
    """
    device, (n, k), lifts = device or w.sparse.device, w.shape, lifted_from is not None
    constants = constants_of(config, w.dtype, activation, windows=lifts)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = load("spense_wgmma", "multiply_tiles", constants, SHARED_BYTES, device)
    launched = kernel, code, device.index
    shared = config.threads, SHARED_BYTES
    if config.split:
        groups, token_tiles = -(-n // (ROWS * config.warpgroups)), -(-m // config.tokens)
        items: Ints = np.zeros((0, 8), np.int32)
        slots = counters = 0
        first = struct.pack("ii", token_tiles, -(-k // w.span))
        loaded = Loaded(*launched, groups * token_tiles * config.split, *shared)
    else:
        workers = multiprocessors(device) // config.cluster
        sizes = m, config.tokens, config.cluster, workers
        unit = UNIT if lifts else 1
        work = schedule(w, *sizes, rows_of_cta=config.warpgroups, unit=unit)
        items, first, slots, counters = work.items, work.first, work.slots, work.counters
        loaded = Loaded(*launched, workers * config.cluster, *shared, together=True)
    tile_rows = config.warpgroups * config.cluster
    return Plan(
        loaded,
        config,
        items=torch.from_numpy(items).to(device),
        first=first,
        workspace=slots * tile_rows * ROWS * -(-config.tokens // STORE_TOKENS) * STORE_TOKENS,
        counters=counters * tile_rows,
        x=(m, lifted_from or k),
        y=(m, n // 2 if activation else n),
        sparse=tuple(w.sparse.shape),
        dense=tuple(w.dense.shape),
        tiles=tiles_of(w),
        n=n,
        dtype=w.dtype,
        kind=w.dtype if activation else output_dtype(w.dtype),
        activation=activation,
    )


def bind(plan: Plan, x: Tensor, w: Spense, scales: Scales = UNSCALED) -> BoundKernel:
    """Bind a plan to operands, a new output and a new workspace. Raises Unsupported."""
    expected = plan.x[1], plan.sparse, plan.dense, plan.dtype, plan.dtype
    actual = x.shape[1], w.sparse.shape, w.dense.shape, x.dtype, w.dtype
    if actual != expected or not 0 < x.shape[0] <= plan.x[0]:
        limit = f"expected operands of the plan, up to {plan.x[0]} tokens and {expected}"
        raise Unsupported(f"{limit}; found {x.shape[0]} and {actual}")
    m = len(x)
    scales.require(w.shape[0], m, x.dtype)
    y = x.new_empty((m, plan.y[1]), dtype=plan.kind)
    tensors: list[Tensor] = [x, w.sparse, w.dense, *scales.tensors]
    scratch: list[int] = [0, 0]
    if not plan.config.split:
        sums = x.new_empty(max(plan.workspace, 1), dtype=torch.float32)
        counts = x.new_zeros(max(plan.counters, 1), dtype=torch.int32)  # zero after each launch
        tensors += [plan.items, sums, counts]
        scratch = [sums.data_ptr(), counts.data_ptr()]
    tiles = w.sparse.data_ptr(), w.dense.data_ptr()
    args = arguments(
        plan, m, (x.data_ptr(), x.stride(0)), y.data_ptr(), *tiles, *scales.addresses, *scratch
    )
    return BoundKernel(plan.loaded, args, tuple(tensors), y)


class Product:
    """A plan to call: a new Y or H of X and of W's tiles (selection.Product).

    The caller checks the operands: at most `plan.x[0]` tokens, in the plan's dtype, aligned.
    """

    pack = order = None

    def __init__(self, plan: Plan) -> None:
        """Keep the plan, and the arguments for the addresses used last."""
        self.plan, self.code = plan, plan.loaded.code
        self.arguments = lru_cache(ADDRESSES)(partial(arguments, plan))

    def run(
        self,
        x: Tensor,
        sparse: Tensor,
        dense: Tensor,
        features: Tensor | None = None,
        tokens: Tensor | None = None,
    ) -> Tensor:
        """Multiply X by the tiles; fp32 scales of `features` [n] and `tokens` [m] in fp8."""
        plan, m = self.plan, x.shape[0]
        y = x.new_empty((m, plan.y[1]), dtype=plan.kind)
        sums, counts = workspace(x, plan.workspace), counters(x, plan.counters)
        tensors = y, sparse, dense, features, tokens, sums, counts
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        plan.loaded.enqueue(self.arguments(m, (x.data_ptr(), x.stride(0)), *addresses))
        on_tape(y, owners=(plan, sums, counts))
        if is_capturing(x):
            keep(plan)
        return y


def arguments(
    plan: Plan,
    m: int,
    x: tuple[int, int],
    y: int,
    sparse: int,
    dense: int,
    features: int,
    tokens: int,
    sums: int,
    counts: int,
) -> Arguments:
    """Return the arguments of a launch with m tokens, by addresses; x is address and stride."""
    k, width = plan.x[1], plan.y[1]
    part = plan.config.tokens // plan.config.cluster
    maps = _map_of(x[0], (m, k), x[1], plan.dtype, (part, BOX))
    written = BOX * plan.kind.itemsize // 4 if plan.activation else BOX  # columns, in 16 bits
    stored = STORE_TOKENS // 2 if plan.config.tokens % STORE_TOKENS else STORE_TOKENS
    maps += _map_of(y, (m, width), width, plan.kind, (stored, written))
    maps += _map_of(x[0], (m, k), x[1], plan.dtype, (m % part or part, BOX))
    tiles, scaling = (sparse, dense, *plan.tiles), (features, tokens, plan.n, m)
    if plan.config.split:
        return SPLIT_ARGUMENTS(maps, *tiles, *struct.unpack("ii", plan.first), *scaling)
    return ARGUMENTS(maps, *tiles, plan.first, *scaling, plan.items.data_ptr(), sums, counts)


def _map_of(
    address: int, shape: tuple[int, int], stride: int, dtype: torch.dtype, box: tuple[int, int]
) -> bytes:
    """Return the tensor map of a matrix in words of 16 bits, of which one holds two fp8 values."""
    each, (height, width) = 2 // dtype.itemsize, shape
    kind = dtype if each == 1 else torch.bfloat16
    return tensor_map(address, (height, width // each), (stride // each, 1), kind, box)


def constants_of(
    config: Config, dtype: torch.dtype, activation: str | None = None, *, windows: bool = False
) -> Constants:
    """Return the macros of spense_wgmma.cu; with `windows`, the kernel lifts X."""
    return (
        ("TOKENS", config.tokens),
        ("CLUSTER", config.cluster),
        ("AHEAD", config.ahead),
        ("WARPGROUPS", config.warpgroups),
        ("SPLIT", config.split),
        ("WINDOWS", int(windows)),
        ("FP8", int(dtype == torch.float8_e4m3fn)),
        ("FP16", int(dtype == torch.float16)),
        ("ACTIVATION", ACTIVATIONS.index(activation)),
        ("THREADS", config.threads),
        ("SHARED_BYTES", SHARED_BYTES),
        ("ROWS", ROWS),
        ("ROW_BYTES", ROW_BYTES),
        ("VALUE_BYTES", VALUE_BYTES),
        ("STORE_TOKENS", STORE_TOKENS),
        ("WORKERS", WORKERS),
    )


def unsupported_operands(x: Tensor, w: Spense, activation: str | None = None) -> str | None:
    if activation not in ACTIVATIONS:
        names = ", ".join(filter(None, ACTIVATIONS))
        return f"activation: expected one of {names}; found {activation!r}"
    limits = {"most_tokens": TOKENS[-1], "most_columns": 2**21, "y_step": 8}
    if reason := _operands.unsupported(x, w, DTYPES, **limits):
        return reason
    step = 2 * _operands.ALIGNMENT // x.itemsize
    if activation and w.shape[0] % step:
        return f"expected a multiple of {step} rows of gate and up, found {w.shape[0]}"
    return None


def prepare(
    operands: Operands,
    activation: str | None = None,
    scales: Scales = UNSCALED,
    *,
    tuned: Tuned = True,
) -> Launch:
    w, x = weight_of(operands.weights, "w"), operands.activations["x"]
    if reason := unsupported_operands(x, w, activation):
        raise Unsupported(reason)
    sizes, wide = sizes_of(operands, x, w), tuned == "wide"
    tried = searched(len(x), w.shape, x.itemsize, x.device, 12 if wide else 5)
    tried = list(dict.fromkeys([*tried, *space()])) if wide else tried
    configs, by = choose("spense_wgmma", Config, operands, sizes, tuned, tried)
    compile_ahead("spense_wgmma", [constants_of(each, w.dtype, activation) for each in configs])
    candidates = [launch(x, w, config, scales, activation=activation) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


unsupported = partial(unsupported_on_hopper, dtypes=("fp16", "bf16", "fp8"))

KERNEL = Kernel("linear", "spense", "cuda", prepare, unsupported, tunes=True)
