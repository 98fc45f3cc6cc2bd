"""Linear layer with block-sparse weights in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_wgmma.cu is the kernel and draws its pipeline: TMA loads by two producer warps, wgmma by two
warpgroups that share each X tile, one CTA an SM for the whole launch. _wgmma_pairs.py says which
64 rows of W go together, _wgmma_schedule.py which CTA multiplies what; here are the choice of a
configuration, the launch, and what is refused:

    blocks of a multiple of 64 rows and 64 columns, fp16 or bf16, k and n multiples of 8 (TMA's
    rows of 16 bytes); any m, edge blocks that leave W, empty block rows, X with any row stride of a
    multiple of 16 bytes

Few tokens are not its field: a row of blocks is not split along k, so that n = 4096 and m = 64 are
32 items for 132 SMs. Nor are single long rows (_wgmma_schedule.py).

bsr_wgmma_dgrad.py is the same kernel over the transposed pattern.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.cuda import (
    ADDRESSES,
    Arguments,
    BoundKernel,
    Constants,
    Layout,
    Loaded,
    load,
    tensor_map,
    unsupported_on_hopper,
)
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Tuned, blocked, choose
from sparsebench.kernels._common.work_list import WORKERS
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr._wgmma_pairs import NO_SLICE, SIDE, Groups, groups_of
from sparsebench.kernels.bsr._wgmma_schedule import schedule

TOKENS = 256, 128, 64
FEW_ITEMS = 132  # one for each SM of an H200
THREADS = 384
# Slots, two 64 x 64 chunks of Y for each warpgroup, and what aligning to 1024 may take.
RING_BYTES = 192 * 1024
SHARED_BYTES = RING_BYTES + 4 * 8 * 1024 + 1024
ARGUMENTS = Layout("384s", f"{20 * WORKERS}s", *"PP")  # maps of x, w and y; First; steps, items
LARGEST = 2**31 - 1  # of what the kernel counts in an int32


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens   of X that a CTA multiplies at a time: 256, 128 or 64
    cluster  CTAs that share the tiles of W, each with its own tokens: 1 or 2
    """

    tokens: int
    cluster: int


def configurations(m: int, width: int) -> list[Config]:
    """Return what is worth trying for m tokens and `width` columns of Y: at most four.

    More tokens are less traffic; the next size down comes first where not every SM would have an
    item (m = 256 or 1024 and 4096 columns: up to 1.3 times as fast).
    """
    tiles = [tokens for tokens in TOKENS if tokens < 2 * m or tokens == TOKENS[-1]][:2]
    if -(-m // tiles[0]) * -(-width // (2 * SIDE)) <= FEW_ITEMS:
        tiles.reverse()
    return [Config(tokens, ctas) for tokens in tiles for ctas in (1, 2) if ctas == 1 or m > tokens]


def space() -> list[Config]:
    """Return what a long search times: everything."""
    return [Config(tokens, ctas) for tokens in TOKENS for ctas in (1, 2)]


@dataclass(frozen=True)
class Plan:
    """What depends on the pattern, the tokens and the configuration, but on no operand's address.

    lists         on the device: steps, items
    arguments     by the addresses of x, of its values and of y, with x's strides after its address
    activations   [m, k], or [m, n] if transposed;  blocks [blocks, r, c];  out [m, n] or [m, k]
    """

    loaded: Loaded
    lists: tuple[Tensor, ...]
    arguments: Callable[[int, tuple[int, ...], int, int], Arguments]
    activations: tuple[int, int]
    blocks: tuple[int, int, int]
    out: tuple[int, int]
    dtype: torch.dtype


def launch(
    x: Tensor,
    w: Bsr,
    config: Config,
    groups: Groups | None = None,
    *,
    transposed: bool = False,
    watchdog: bool = False,
) -> BoundKernel:
    """Return the program that computes X @ W.T [m, n], or X @ W [m, k] if transposed.

    A `watchdog` ends a kernel that hangs, says where it waited, and slows it down a little.
    """
    if reason := unsupported_operands(x, w, transposed):
        raise Unsupported(reason)
    planned = plan(w, len(x), config, groups, transposed=transposed, watchdog=watchdog)
    return bind(planned, x, w.values)


def plan(
    w: Bsr,
    m: int,
    config: Config,
    groups: Groups | None = None,
    *,
    transposed: bool = False,
    watchdog: bool = False,
) -> Plan:
    """Pair the rows, assign the work and upload the lists; of w's values, shape and dtype count.

    `unsupported_operands` says what may not come here. Reads the index on the host, and so waits
    for the device.
    """
    groups, device = groups or groups_of(w, transposed), w.offsets.device
    workers = torch.cuda.get_device_properties(device).multi_processor_count // config.cluster
    work = schedule(groups, m, config.tokens * config.cluster, workers)
    lists = tuple(torch.from_numpy(a).to(device) for a in (groups.steps, work.items))
    first = work.first
    constants = constants_of(config, w.values.dtype, transposed)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = load("bsr_wgmma", "multiply_blocks", constants, SHARED_BYTES, device)
    grid = (len(work.starts) - 1) * config.cluster
    (n, k), (blocks, r, c), dtype = w.shape, w.values.shape, w.values.dtype
    activations, out = ((m, n), (m, k)) if transposed else ((m, k), (m, n))
    rows = max(blocks, 1) * r, c  # a map needs a row

    @lru_cache(ADDRESSES)
    def arguments(x: int, strides: tuple[int, int], values: int, y: int) -> Arguments:
        x_map = tensor_map(x, activations, strides, dtype, (config.tokens, SIDE))
        w_map = tensor_map(values, rows, (c, 1), dtype, (SIDE // config.cluster, SIDE))
        y_map = tensor_map(y, out, (out[1], 1), dtype, (SIDE, SIDE))
        return ARGUMENTS(x_map + w_map + y_map, first, *(a.data_ptr() for a in lists))

    loaded = Loaded(kernel, code, device.index, grid, THREADS, SHARED_BYTES)
    return Plan(loaded, lists, arguments, activations, (blocks, r, c), out, dtype)


def bind(plan: Plan, x: Tensor, values: Tensor) -> BoundKernel:
    """Return the program of a plan on these operands, into an output of its own."""
    expected = plan.activations, plan.blocks, plan.dtype, plan.dtype
    found = x.shape, values.shape, x.dtype, values.dtype
    if found != expected or not values.is_contiguous():
        raise Unsupported(f"planned for {expected}, contiguous blocks; found {found}")
    y = x.new_empty(plan.out)
    if not plan.blocks[0]:
        values = values.new_zeros(1, *plan.blocks[1:])
    args = plan.arguments(x.data_ptr(), x.stride(), values.data_ptr(), y.data_ptr())
    return BoundKernel(plan.loaded, args, (x, values, *plan.lists), y)


def constants_of(config: Config, dtype: torch.dtype, transposed: bool) -> Constants:
    """Return what the kernel is compiled for."""
    return (
        ("TOKENS", config.tokens),
        ("CLUSTER", config.cluster),
        ("TRANSPOSED", int(transposed)),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("WORKERS", WORKERS)),
        *(("SIDE", SIDE), ("NO_SLICE", NO_SLICE)),
    )


def unsupported_operands(x: Tensor, w: Bsr, transposed: bool) -> str | None:
    """Say which of the kernel's conditions fails, if any."""
    (n, k), (r, c), values = w.shape, w.block, w.values
    width = k if transposed else n
    if reason := cuda.unsupported_operands(x, w, transposed):
        return reason
    if r % SIDE or c % SIDE or not r or not c:
        return f"expected blocks of a multiple of {SIDE} rows and columns, found {r}x{c}"
    if c > NO_SLICE or -(-width // SIDE) > NO_SLICE or max(len(values) * r, len(x)) > LARGEST - r:
        found = f"{len(values)} blocks of {r}x{c}, {len(x)} tokens, {width} columns to write"
        return (
            f"expected less than 2^31 rows of blocks and of tokens and 2^22 columns, found {found}"
        )
    return None


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Pair the rows and assign the work; take a table's configuration, or time a few."""
    return prepared(operands, operands.activations["x"], tuned, transposed=False)


def prepared(operands: Operands, x: Tensor, tuned: Tuned, *, transposed: bool) -> Launch:
    """Return the launch of the pinned configuration, a table's or the fastest."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    if reason := unsupported_operands(x, w, transposed):
        raise Unsupported(reason)
    groups = groups_of(w, transposed)
    sizes = blocked(len(x), *w.shape, operands.problem["dtype"], w.block, len(w.values))
    name = "bsr_wgmma_dgrad" if transposed else "bsr_wgmma"
    searched = space() if tuned == "wide" else configurations(len(x), w.shape[int(transposed)])
    configs, by = choose(name, Config, operands, sizes, tuned, searched)
    candidates = [launch(x, w, config, groups, transposed=transposed) for config in configs]
    return fastest_launch(configs, candidates, by, x.device)


KERNEL = Kernel("linear", "bsr", "cuda", prepare, unsupported_on_hopper, tunes=True)
