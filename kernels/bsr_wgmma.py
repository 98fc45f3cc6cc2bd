"""Linear layer with block-sparse weights in CUDA C++ for Hopper: Y[m, n] = X[m, k] @ W[n, k].T.

bsr_wgmma.cu is the kernel and draws its pipeline: TMA loads by two producer warps, wgmma by two
warpgroups that share each X tile, one CTA an SM for the whole launch. _wgmma.py says which 64 rows
of W go together, _schedule.py which CTA multiplies what; here are the choice of a configuration,
the launch, and what is refused:

    blocks of a multiple of 64 rows and 64 columns, fp16 or bf16, k and n multiples of 8 (TMA's
    rows of 16 bytes); any m, edge blocks that leave W, empty block rows, X with any row stride of a
    multiple of 16 bytes

Few tokens are not its field: a row of blocks is not split along k, so that n = 4096 and m = 64 are
32 items for 132 SMs. Nor are single long rows (_schedule.py).

bsr_wgmma_dgrad.py is the same kernel over the transposed pattern.
"""

from dataclasses import asdict, dataclass

import numpy as np
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._cuda import (
    Constants,
    Program,
    by_value,
    load,
    supports_hopper,
    tensor_map,
)
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Unsupported
from sparsebench.kernels._schedule import schedule
from sparsebench.kernels._tune import fastest
from sparsebench.kernels._wgmma import NO_SLICE, SIDE, Groups, groups_of

TOKENS = 256, 128, 64
THREADS = 384
# 192 KB of slots, two 64 x 64 chunks of Y for each warpgroup, and what aligning to 1024 may take.
SHARED_BYTES = 192 * 1024 + 4 * 8 * 1024 + 1024
LARGEST = 2**31 - 1  # of what the kernel counts in an int32


@dataclass(frozen=True)
class Config:
    """One way to run the kernel.

    tokens   of X that a CTA multiplies at a time: 256, 128 or 64
    cluster  CTAs that share the tiles of W, each with its own tokens: 1 or 2
    """

    tokens: int
    cluster: int


def configurations(m: int) -> list[Config]:
    """Return what is worth trying for m tokens: at most four.

    More tokens are less traffic; the next size down wins where items are few.
    """
    tiles = [tokens for tokens in TOKENS if tokens < 2 * m or tokens == TOKENS[-1]][:2]
    return [Config(tokens, ctas) for tokens in tiles for ctas in (1, 2) if ctas == 1 or m > tokens]


def launch(
    x: Tensor,
    w: Bsr,
    config: Config,
    groups: Groups | None = None,
    *,
    transposed: bool = False,
    watchdog: bool = False,
) -> Program:
    """Return the program that computes X @ W.T [m, n], or X @ W [m, k] if transposed.

    A `watchdog` ends a kernel that hangs, says where it waited, and slows it down a little.
    """
    if reason := refusal(x, w, transposed):
        raise Unsupported(reason)
    groups = groups or groups_of(w, transposed)
    y = x.new_empty(len(x), w.shape[1] if transposed else w.shape[0])
    values = w.values if len(w.values) else w.values.new_zeros(1, *w.block)  # a map needs a row
    maps = by_value(
        tensor_map(x, config.tokens, SIDE),
        tensor_map(values.view(-1, w.block[1]), SIDE // config.cluster, SIDE),
        tensor_map(y, SIDE, SIDE),
    )
    workers = torch.cuda.get_device_properties(x.device).multi_processor_count // config.cluster
    plan = schedule(groups, len(x), config.tokens * config.cluster, workers)
    lists = [torch.from_numpy(a).to(x.device) for a in (groups.steps, plan.items, plan.starts)]
    constants = constants_of(config, x.dtype, transposed)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = load("bsr_wgmma", "multiply_blocks", constants, SHARED_BYTES, x.device)
    grid = (len(plan.starts) - 1) * config.cluster
    args = (maps, *(np.uint64(a.data_ptr()) for a in lists))
    return Program(kernel, grid, THREADS, SHARED_BYTES, args, (x, values, *lists), y, code)


def constants_of(config: Config, dtype: torch.dtype, transposed: bool) -> Constants:
    """Return what the kernel is compiled for."""
    return (
        ("TOKENS", config.tokens),
        ("CLUSTER", config.cluster),
        ("TRANSPOSED", int(transposed)),
        ("FP16", int(dtype == torch.float16)),
    )


def refusal(x: Tensor, w: Bsr, transposed: bool) -> str | None:
    """Say which of the kernel's conditions fails, if any; TMA has its own (_cuda.tensor_map)."""
    (n, k), (r, c), values = w.shape, w.block, w.values
    depth, width = (n, k) if transposed else (k, n)
    if x.dtype != values.dtype or x.dtype not in (torch.float16, torch.bfloat16):
        return f"expected fp16 or bf16 operands of one dtype, found {x.dtype} and {values.dtype}"
    if x.dim() != 2 or x.shape[1] != depth:
        return f"expected activations of {depth} columns, found shape {list(x.shape)}"
    if r % SIDE or c % SIDE or not r or not c:
        return f"expected blocks of a multiple of {SIDE} rows and columns, found {r}x{c}"
    if not values.is_contiguous():
        return f"expected contiguous blocks, found strides {list(values.stride())}"
    if width % 8:
        return f"expected a multiple of 8 columns to write, found {width}"
    if c > NO_SLICE or -(-width // SIDE) > NO_SLICE or max(len(values) * r, len(x)) > LARGEST - r:
        found = f"{len(values)} blocks of {r}x{c}, {len(x)} tokens, {width} columns to write"
        return (
            f"expected less than 2^31 rows of blocks and of tokens and 2^22 columns, found {found}"
        )
    return None


def prepare(operands: Operands) -> Launch:
    """Pair the rows, assign the work, compile and time the configurations."""
    return tuned(operands, operands.activations["x"], transposed=False)


def tuned(operands: Operands, x: Tensor, *, transposed: bool) -> Launch:
    """Return the fastest configuration, or the settled one."""
    w = operands.weights["w"]
    assert isinstance(w, Bsr)
    if reason := refusal(x, w, transposed):
        raise Unsupported(reason)
    groups = groups_of(w, transposed)
    settled = operands.settled
    configs = [Config(**settled)] if settled else configurations(len(x))
    candidates = [launch(x, w, config, groups, transposed=transposed) for config in configs]
    best = fastest(candidates, x.device)
    return Launch(candidates[best], asdict(configs[best]), candidates[best].code)


KERNEL = Kernel(
    op="linear", consumes="bsr", device="cuda", supports=supports_hopper, prepare=prepare
)
