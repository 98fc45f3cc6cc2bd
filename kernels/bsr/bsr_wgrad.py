"""Weight gradient in BSR in CUDA C++ for Hopper: dW = dY[m, n].T @ X[m, k] where W has blocks.

bsr_wgrad.cu is the kernel and draws its pipeline: four producer warps load by TMA, and two consumer
warpgroups sum four 64 x 64 tiles of dW each. _wgrad_schedule.py decides which tiles are summed
together and assigns them to CTAs. This file chooses a configuration and launches. It supports

    blocks    multiples of 64, 56, 48 or 40 rows and columns, fp16 or bf16; edge blocks may extend
              beyond W and are zero there
    sizes     any m, n and k
    dY, X     rows of any stride that is a multiple of 16 bytes

Sums are in fp32 over all tokens and always in the same order: equal operands give equal bits.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.requirements import unsupported_on_hopper
from sparsebench.kernels._common.scratch import workspace
from sparsebench.kernels._common.search import fastest_launch
from sparsebench.kernels._common.tuned_table import Tuned, blocked, choose, multiprocessors
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr._gradient import Gradient
from sparsebench.kernels.bsr._wgmma_pairs import SIDE
from sparsebench.kernels.bsr._wgrad_schedule import ALIGNED, TILES, sides_of, work_of

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

THREADS = 384
RING_BYTES = 216 * 1024  # bytes of all stages
SHARED_BYTES = RING_BYTES + 1024  # alignment to 1024 may take 1023
PARTIAL = 2 * SIDE * SIDE  # fp32 sums in a column of an item: one tile of each half
# Tensor maps of dy and x; loads, sums, starts, values; width; partials, counters.
ARGUMENTS = cuda.Layout("256s", *"PPPPiPP")
LARGEST = 2**31 - 1  # int32 of the kernel
C = TypeVar("C", bound="DataclassInstance")  # a kernel's Config
Strides = tuple[int, int]


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    depth  tokens in a step: 64, or 32 with twice as many stages
    wide   tiles of dW that a warpgroup sums at a time: 4 or 2
    """

    depth: int
    wide: int


CONFIGS = tuple(Config(depth, wide) for depth in (64, 32) for wide in (4, 2))


def configurations(pattern: Bsr, m: int, workers: int) -> list[Config]:
    """Return all four, by the predicted end of the last worker."""
    ends = {
        config: work_of(pattern, m, config.depth, config.wide, workers).last for config in CONFIGS
    }
    return sorted(CONFIGS, key=lambda config: ends[config])


@dataclass(frozen=True)
class Plan:
    """A launch without operands: it depends only on pattern, tokens and configuration.

    lists      on the device: loads, sums and starts of _wgrad_schedule.Work
    counters   int32 [partials, 2]: each launch leaves them in the state that the next one needs, so
               launches of a plan must not overlap
    partials   shape of the partial sums, fp32
    arguments  (tokens, address of dy, its strides, address of x, its strides, address of the
               values, address of the partial sums) -> arguments
    tokens     most tokens of dy and x
    shape      n and k
    blocks     [blocks, r, c]
    """

    loaded: cuda.Loaded
    lists: tuple[Tensor, ...]
    counters: Tensor
    partials: tuple[int, int]
    arguments: Callable[..., cuda.Arguments]
    tokens: int
    shape: tuple[int, int]
    blocks: tuple[int, int, int]
    dtype: torch.dtype


def launch(
    dy: Tensor, x: Tensor, pattern: Bsr, config: Config, *, watchdog: bool = False
) -> cuda.BoundKernel:
    """Return the kernel of dW's values [blocks, r, c]. Raises Unsupported.

    The pattern's values are not read. With `watchdog`, a kernel that hangs stops and prints where
    it waited; it runs slower.
    """
    if reason := unsupported_operands(dy, x, pattern):
        raise Unsupported(reason)
    return bind(plan(pattern, len(dy), config, watchdog=watchdog), dy, x)


def plan(pattern: Bsr, m: int, config: Config, *, watchdog: bool = False) -> Plan:
    """Divide the work and upload the lists. Only shape and dtype of the pattern's values matter.

    Expects operands that `unsupported_operands` accepts. Reads the index on the host, so it waits
    for the device.
    """
    device = pattern.offsets.device
    work = work_of(pattern, m, config.depth, config.wide, multiprocessors(device))
    lists = tuple(torch.from_numpy(a).to(device) for a in (work.loads, work.sums, work.starts))
    counters = torch.zeros(work.partials, 2, dtype=torch.int32, device=device)
    (n, k), blocks, dtype = pattern.shape, (*pattern.values.shape,), pattern.values.dtype
    sides = sides_of(pattern)
    constants = constants_of(config, work.tiles, sides, dtype)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = cuda.load("bsr_wgrad", "sum_blocks", constants, SHARED_BYTES, device)

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, dy: int, of_dy: Strides, x: int, of_x: Strides, values: int, partials: int
    ) -> cuda.Arguments:
        down, across = (side + side % ALIGNED for side in sides)
        maps = cuda.tensor_map(dy, (tokens, n), of_dy, dtype, (config.depth, down))
        maps += cuda.tensor_map(x, (tokens, k), of_x, dtype, (config.depth, across))
        addresses = (a.data_ptr() for a in lists)
        return ARGUMENTS(maps, *addresses, values, blocks[2], partials, counters.data_ptr())

    loaded = cuda.Loaded(kernel, code, device.index, len(work.starts) - 1, THREADS, SHARED_BYTES)
    partials = work.partials, config.wide * PARTIAL
    return Plan(loaded, lists, counters, partials, arguments, m, (n, k), blocks, dtype)


class Product:
    """A plan to call: the values of dW, new, of dY and X (selection.Product).

    The caller checks the operands: at most `plan.tokens` tokens, in the plan's dtype, aligned.
    """

    pack = order = None

    def __init__(self, plan: Plan) -> None:
        self.plan, self.code = plan, plan.loaded.code

    def run(self, dy: Tensor, x: Tensor) -> Tensor:
        """Sum the blocks of dY.T @ X; a graph keeps the plan alive."""
        plan = self.plan
        values = x.new_empty(plan.blocks)
        rows, columns = plan.partials
        partials = workspace(x, rows * columns)  # launches on a stream share it
        sums = 0 if partials is None else partials.data_ptr()
        addresses = dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride()
        plan.loaded.enqueue(plan.arguments(x.shape[0], *addresses, values.data_ptr(), sums))
        cuda.on_tape(values, owners=(plan, partials))
        if is_capturing(x):
            keep(plan)
        return values


def bind(plan: Plan, dy: Tensor, x: Tensor) -> cuda.BoundKernel:
    """Return a plan's kernel on these operands, with new values. Raises Unsupported."""
    (m, n), k, expected = dy.shape, x.shape[1], (plan.shape, plan.dtype, plan.dtype)
    if ((n, k), dy.dtype, x.dtype) != expected or m != len(x) or m > plan.tokens:
        limit = f"planned for {plan.tokens} tokens and {expected}"
        raise Unsupported(f"{limit}, found {dy.dtype} {list(dy.shape)}, {x.dtype} {list(x.shape)}")
    values = x.new_empty(plan.blocks)
    partials = x.new_empty(plan.partials, dtype=torch.float32)
    args = plan.arguments(
        *(m, dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride()),
        *(values.data_ptr(), partials.data_ptr()),
    )
    return cuda.BoundKernel(
        plan.loaded, args, (dy, x, partials, plan.counters, *plan.lists), values
    )


def constants_of(
    config: Config, tiles: int, sides: tuple[int, int], dtype: torch.dtype
) -> cuda.Constants:
    """Return the macros of bsr_wgrad.cu; `sides` are height and width of a tile."""
    return (
        *(("HEIGHT", sides[0]), ("WIDTH", sides[1])),
        ("DEPTH", config.depth),
        ("TILES", tiles),
        ("WIDE", config.wide),
        ("FP16", int(dtype == torch.float16)),
        *(("THREADS", THREADS), ("RING_BYTES", RING_BYTES), ("SIDE", SIDE), ("BOXES", max(TILES))),
    )


def unsupported_operands(dy: Tensor, x: Tensor, pattern: Bsr) -> str | None:
    """Return why the kernel cannot run on these operands, or None; see also cuda.tensor_map."""
    if reason := unsupported_pair(dy, x, pattern):
        return reason
    (n, k), (r, c) = pattern.shape, pattern.block
    down, across = sides_of(pattern)
    if not down or not across:
        return f"expected blocks of multiples of 40, 48, 56 or 64 rows and columns, found {r}x{c}"
    places = len(pattern.columns) * r * c // 2  # tiles_of
    if max(places, len(x) + SIDE, n + r, k + c) > LARGEST:
        actual = f"{len(pattern.columns)} blocks of {r}x{c} in {n}x{k}, {len(x)} tokens"
        return f"expected less than 2^31 rows, columns, tokens and pairs of values, found {actual}"
    return None


def unsupported_pair(dy: Tensor, x: Tensor, pattern: Bsr) -> str | None:
    (n, k), dtype = pattern.shape, pattern.values.dtype
    if len({dy.dtype, x.dtype, dtype}) > 1 or dtype not in (torch.float16, torch.bfloat16):
        actual = f"{dy.dtype}, {x.dtype} and a pattern of {dtype}"
        return f"expected fp16 or bf16 operands of one dtype, found {actual}"
    if dy.dim() != 2 or x.dim() != 2 or len(dy) != len(x) or (dy.shape[1], x.shape[1]) != (n, k):
        actual = f"shapes {list(dy.shape)} and {list(x.shape)}"
        return f"expected dY [m, {n}] and X [m, {k}], found {actual}"
    return None


def kernel_of(
    name: str,
    config: Callable[..., C],
    unsupported: Callable[[Tensor, Tensor, Bsr], str | None],
    configurations: Callable[[Bsr, int, int], list[C]],
    launch: Callable[[Tensor, Tensor, Bsr, C], cuda.BoundKernel],
) -> Kernel:
    """Return the kernel of `linear_wgrad`; configurations are of a pattern, m tokens and SMs."""

    def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
        """Take the pinned configuration or a table's, or time all."""
        dy, x, pattern = operands.activations["dy"], operands.activations["x"], operands.pattern
        assert isinstance(pattern, Bsr)
        if reason := unsupported(dy, x, pattern):
            raise Unsupported(reason)
        blocks = len(pattern.columns)
        sizes = blocked(len(x), *pattern.shape, operands.problem["dtype"], pattern.block, blocks)
        workers = multiprocessors(x.device)
        searched = [] if operands.pinned else configurations(pattern, len(x), workers)
        configs, by = choose(name, config, operands, sizes, tuned, searched)
        candidates = [Gradient(launch(dy, x, pattern, each), pattern) for each in configs]
        return fastest_launch(configs, candidates, by, x.device)

    return Kernel("linear_wgrad", "bsr", "cuda", prepare, unsupported_on_hopper, tunes=True)


KERNEL = kernel_of("bsr_wgrad", Config, unsupported_operands, configurations, launch)
