"""Products of the CUDA kernels for weight gradients: dW = dY[m, n].T @ X[m, k] at W's blocks.

Each of them loads boxes of dY and X by TMA, and sums pieces that a schedule assigns to CTAs
(_wgrad_schedule.py). Pieces of an item that is cut write partial sums, and the last one adds them,
always in the same order, so equal operands give equal bits.
"""

from functools import lru_cache

import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.operator import Product
from sparsebench.kernels._common.scratch import workspace
from sparsebench.kernels.bsr._call import LARGEST, BsrCall
from sparsebench.kernels.bsr._wgmma_pairs import SIDE

THREADS = 384
RING_BYTES = 216 * 1024  # bytes of all stages
SHARED_BYTES = RING_BYTES + 1024  # alignment to 1024 may take 1023
Strides = tuple[int, int]


def gradient_of(
    name: str,
    w: Bsr,
    call: BsrCall,
    constants: cuda.Constants,
    boxes: tuple[tuple[int, int], tuple[int, int]],
    layout: cuda.Layout,
    lists: tuple[Tensor, ...],
    starts: tuple[bytes, ...],
    width: tuple[int, ...],
    workers: int,
    partials: tuple[int, int],
    *,
    watchdog: bool,
) -> Product:
    """Compile NAME.cu, and return its product.

    boxes     rows and columns of a box of dY, and of X
    layout    of the arguments: both tensor maps, lists, starts, the address of the values, width,
              the addresses of the partial sums and of the counters
    partials  their number, and fp32 sums in each. Counters, of which each launch leaves the state
              that the next one needs, belong to the plan, so its launches must not overlap
    """
    device, (n, k), dtype = w.columns.device, w.shape, call.dtype
    blocks = len(w.columns), *w.block
    counters = torch.zeros(partials[0], 2, dtype=torch.int32, device=device)
    constants += (("WATCHDOG", 1),) if watchdog else ()
    kernel, code = cuda.load(name, "sum_blocks", constants, SHARED_BYTES, device)
    loaded = cuda.Loaded(kernel, code, device.index, workers, THREADS, SHARED_BYTES)
    owner = *lists, counters

    @lru_cache(cuda.ADDRESSES)
    def arguments(
        tokens: int, dy: int, of_dy: Strides, x: int, of_x: Strides, values: int, sums: int
    ) -> cuda.Arguments:
        maps = cuda.tensor_map(dy, (tokens, n), of_dy, dtype, boxes[0])
        maps += cuda.tensor_map(x, (tokens, k), of_x, dtype, boxes[1])
        arrays = (array.data_ptr() for array in lists)
        return layout(maps, *arrays, *starts, values, *width, sums, counters.data_ptr())

    def run(dy: Tensor, x: Tensor, out: Tensor | None = None) -> Tensor:
        values = x.new_empty(blocks) if out is None else out
        sums = workspace(x, partials[0] * partials[1])  # launches on a stream share it
        address = 0 if sums is None else sums.data_ptr()
        at = dy.data_ptr(), dy.stride(), x.data_ptr(), x.stride(), values.data_ptr(), address
        others = () if sums is None else (sums,)
        return cuda.launch(loaded, arguments(len(x), *at), values, owner, *others)

    return Product(run, code)


def unsupported_sizes(w: Bsr, call: BsrCall, side: int, places: int) -> str | None:
    """Return why no kernel can compute a gradient of this dtype and size, or None.

    side    columns that boxes of strips may reach beyond dY and X
    places  positions in the values, which kernels count
    """
    (n, k), (r, c) = w.shape, w.block
    if call.dtype not in cuda.HALVES:
        return f"expected fp16 or bf16 operands of one dtype, found {call.dtype}"
    if n % 8 or k % 8:
        return f"expected multiples of 8 columns of dY and X, found {n} and {k}"
    if max(places, call.m + SIDE, 2 * (n + side), 2 * (k + side)) > LARGEST:
        actual = f"{len(w.columns)} blocks of {r}x{c} in {n}x{k}, {call.m} tokens"
        return f"expected less than 2^30 rows and columns and 2^31 tokens, found {actual}"
    return None
