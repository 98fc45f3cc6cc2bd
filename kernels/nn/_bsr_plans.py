"""Choose and plan the kernel of each product of a block-sparse layer.

    GPU of compute capability 9.0, fp16 or bf16, n and k multiples of 8; by the block's shape:
      multiples of 64                      bsr_wgmma above FEW tokens, else bsr_triton
      16x16 and 32x32                      bsr_small
      a side of 24, 40, 48, 80, ...        bsr_strips, if both sides are divisible by 80 or by a
                                           multiple of 8 from 16 to 64; else bsr_triton
      multiples of 8, for dW               bsr_wgrad if tiles of 40 to 64 divide the block, else
                                           bsr_wgrad_small
    other GPUs, and TRITON_INTERPRET=1     bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
    CPU                                    dense products in torch, as a reference

A plan holds everything that depends only on the index and the sizes: pairs of block rows, work
lists on the device, machine code. Making one copies the index to the host; calling it never waits
for the device. Calls of one plan must run one after the other on the device, as they do on one
stream, because bsr_wgrad and bsr_wgrad_small keep counters in the memory of their plans.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from types import ModuleType
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from triton import knobs

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.cuda import HOPPER, unsupported_on_hopper
from sparsebench.kernels._common.triton import (
    BoundKernel,
    Template,
    choose_path,
    tensor_of,
    unsupported,
)
from sparsebench.kernels._common.tuned_table import blocked, lookup, multiprocessors
from sparsebench.kernels.bsr import (
    _launch,
    bsr_small,
    bsr_strips,
    bsr_triton,
    bsr_triton_dgrad,
    bsr_triton_wgrad,
    bsr_wgmma,
    bsr_wgrad,
    bsr_wgrad_small,
)
from sparsebench.kernels.bsr._wgmma_pairs import SIDE, checked
from sparsebench.kernels.bsr._wgrad_schedule import sides_of
from sparsebench.kernels.bsr._wgrad_small_schedule import PIECE
from sparsebench.results.record import Problem

NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}  # on a GPU
FEW = 256  # tokens: too few work items for 132 SMs, 11.2 µs while Triton takes 9.8 (bsr/NOTES.md)
C = TypeVar("C")  # a kernel's Config

Multiply = Callable[[Tensor, Tensor], Tensor]
"""(X, values) to Y, (dY, values) to dX, or (dY, X) to the values of dW, always a new tensor."""


class Call(NamedTuple):
    """A product for m tokens. With the index, it determines the plan.

    shape  n and k of W
    block  rows r and columns c
    dtype  of both operands
    """

    op: Literal["linear", "dgrad", "wgrad"]
    m: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype

    @property
    def transposed(self) -> bool:
        """Return whether the product is with W instead of W.T."""
        return self.op == "dgrad"


Planner = Callable[[Call, Bsr], Multiply]
"""Plans a call for one kernel; raises Unsupported if the kernel cannot run it."""


def require_index(
    offsets: Tensor, columns: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise FormatError unless this is the index of a BSR matrix [n, k]. Waits for the device."""
    for name, index in (("offsets", offsets), ("columns", columns)):
        if index.dim() != 1 or index.dtype != torch.int32 or not index.is_contiguous():
            layout = f"{index.dtype} {list(index.shape)} with strides {list(index.stride())}"
            raise FormatError(f"{name}: expected a contiguous list of int32, found {layout}")
    checked(Bsr(shape, offsets, columns, columns.new_empty((1, 1, 1)).expand(len(columns), *block)))


def plan(call: Call, offsets: Tensor, columns: Tensor) -> Multiply:
    """Plan a call for the kernel that `choose_planner` selects. Raises FormatError, Unsupported."""
    if columns.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{call.op} of {call.m} tokens, {call.dtype}, is not planned: call it once before "
            "capturing a CUDA graph, and let nothing write into the index in between, as DDP does "
            "without broadcast_buffers=False"
        )
    require_index(offsets, columns, call.shape, call.block)
    values = columns.new_empty((len(columns), *call.block), dtype=call.dtype)  # never read
    w = Bsr(call.shape, offsets, columns, values)
    return choose_planner(call, columns.device)(call, w)


def choose_planner(call: Call, device: torch.device) -> Planner:
    """Choose the kernel of a call; no other function does. Raises Unsupported."""
    if device.type == "cpu" and not knobs.runtime.interpret:
        return _plan_torch
    if call.dtype not in NAMES:
        raise Unsupported(f"expected fp16, bf16 or fp32 on a GPU, found {call.dtype}")
    problem = Problem(call.op, {"dtype": NAMES[call.dtype]})
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    hopper = hopper and call.dtype != torch.float32 and not any(size % 8 for size in call.shape)
    planner: Planner | None
    if call.op == "wgrad":
        planner = None if any(side % PIECE for side in call.block) else _plan_wgrad
    elif call.block in {(b, b) for b in bsr_small.BLOCKS}:
        planner = _plan_small
    elif not any(side % SIDE for side in call.block):
        planner = _plan_wgmma if call.m > FEW else None
    else:
        odd = any(side & (side - 1) for side in call.block)  # not a power of two, as was measured
        planner = _plan_strips if odd and all(map(bsr_strips.depth_of, call.block)) else None
    if hopper and planner:
        reason = unsupported_on_hopper(problem, device)
    else:
        reason, planner = unsupported(problem, device), _plan_triton
    if reason:
        raise Unsupported(reason)
    return planner


# ---- CUDA C++ kernels for Hopper ----


def _plan_wgmma(call: Call, w: Bsr) -> Multiply:
    _require_supported(bsr_wgmma, call, w)
    config = bsr_wgmma.configurations(call.m, w.shape[call.transposed])[0]
    return _plan_product(bsr_wgmma, call, w, config)


def _plan_small(call: Call, w: Bsr) -> Multiply:
    _require_supported(bsr_small, call, w)
    workers = multiprocessors(w.columns.device)
    config = bsr_small.configurations(w, call.m, workers, call.transposed)[0]
    return _plan_product(bsr_small, call, w, config)


def _plan_strips(call: Call, w: Bsr) -> Multiply:
    _require_supported(bsr_strips, call, w)
    tiles, workers = bsr_strips.tiles_of(w, call.transposed), multiprocessors(w.columns.device)
    config = bsr_strips.configurations(tiles, call.m, workers)[0]
    return _plan_product(bsr_strips, call, w, config, tiles)


def _plan_wgrad(call: Call, w: Bsr) -> Multiply:
    kernel = bsr_wgrad if all(sides_of(w)) else bsr_wgrad_small
    _require_supported(kernel, call, w)
    config = kernel.configurations(w, call.m, multiprocessors(w.columns.device))[0]
    plan = kernel.plan(w, call.m, _tuned(_name(kernel), call, w, config))
    return lambda dy, x: bsr_wgrad.bind(plan, dy, x)()


def _require_supported(kernel: ModuleType, call: Call, w: Bsr) -> None:
    x, dy = _activations(call)
    if call.op == "wgrad":
        reason = kernel.unsupported_operands(dy, x, w)
    else:
        reason = kernel.unsupported_operands(dy if call.transposed else x, w, call.transposed)
    if reason:
        raise Unsupported(reason)


def _plan_product(kernel: ModuleType, call: Call, w: Bsr, default: Any, *tiles: Any) -> Multiply:
    """Plan Y or dX with the tuned configuration of these sizes, else with the default."""
    name = _name(kernel) + "_dgrad" * call.transposed
    config = _tuned(name, call, w, default)
    plan = kernel.plan(w, call.m, config, *tiles, transposed=call.transposed)
    return lambda a, values: _launch.bind(plan, a, values)()


def _name(kernel: ModuleType) -> str:
    return kernel.__name__.rpartition(".")[2]


# ---- Triton kernels ----


def _plan_triton(call: Call, w: Bsr) -> Multiply:
    if call.op == "wgrad":
        return _triton_wgrad(call, w)
    return _triton_dgrad(call, w) if call.op == "dgrad" else _triton_linear(call, w)


def _triton_linear(call: Call, w: Bsr) -> Multiply:
    (x, _), size = _activations(call), call.dtype.itemsize
    path = choose_path(None, bsr_triton.unsupported_by_tma(x, w), w.columns.device)
    configs = bsr_triton.configurations(call.m, w.block, size, path)
    as_stored = (c for c in configs if bsr_triton.packed_block(w.block, c) == w.block)
    config = _tuned("bsr_triton", call, w, next(as_stored, configs[0]), path=path)
    (packed, pack), bare = _packer(w, config), _bare(w)

    def bound(x: Tensor, values: Tensor) -> BoundKernel:
        return bsr_triton.launch(x, bare, config, replace(packed, values=values))

    templates = _templates(bound)
    return lambda x, values: templates(x, pack(values))


def _triton_dgrad(call: Call, w: Bsr) -> Multiply:
    (_, dy), size = _activations(call), call.dtype.itemsize
    path = choose_path(None, bsr_triton_dgrad.unsupported_by_tma(dy, w), w.columns.device)
    default = bsr_triton_dgrad.configurations(call.m, w.block, size, path)[0]
    config = _tuned("bsr_triton_dgrad", call, w, default, path=path)
    bare, by_columns = _bare(w), bsr_triton_dgrad.index_of(w)

    def bound(dy: Tensor, values: Tensor) -> BoundKernel:
        return bsr_triton_dgrad.launch(dy, replace(bare, values=values), config, by_columns)

    return _templates(bound)


def _triton_wgrad(call: Call, w: Bsr) -> Multiply:
    (x, dy), device, size = _activations(call), w.columns.device, call.dtype.itemsize
    path = choose_path(None, bsr_triton_wgrad.unsupported_by_tma(dy, x, w.block), device)
    sizes = len(w.columns), size, path, multiprocessors(device)
    default = bsr_triton_wgrad.configurations(call.m, w.block, *sizes)[0]
    config = _tuned("bsr_triton_wgrad", call, w, default, path=path)
    pattern, strips = _bare(w), bsr_triton_wgrad.strips_of(w, config)
    return _templates(lambda dy, x: bsr_triton_wgrad.launch(dy, x, pattern, config, strips))


def _templates(bound: Callable[[Tensor, Tensor], BoundKernel]) -> Multiply:
    """Return a function that runs `bound` on any operands; each pair of layouts builds it once."""

    @lru_cache(8)
    def template(dtype: torch.dtype, *layouts: tuple[torch.Size, tuple[int, ...]]) -> Template:
        program = bound(*(torch.empty_strided(*o, dtype=dtype, device="meta") for o in layouts))
        operands = (tensor_of(arg) for arg in (program.before or program).args[:2])
        return Template([program], [t for t in operands if t is not None], [program.out])

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return template(a.dtype, (a.shape, a.stride()), (b.shape, b.stride()))(a, b)[0]

    return multiply


def _packer(
    w: Bsr, config: bsr_triton.Config
) -> tuple[bsr_triton.Packed, Callable[[Tensor], Tensor]]:
    """Return the index that bsr_triton.pack makes, and a function that packs values.

    The function does not wait for the device.
    """
    (r, c), blocks = w.block, len(w.values)
    number = torch.arange(1, blocks + 1, dtype=torch.int32, device=w.columns.device)
    numbered = number[:, None, None].expand(blocks, r, c).contiguous()
    packed = bsr_triton.pack(replace(w, values=numbered), config)
    size, index = packed.values.shape, replace(packed, values=number[:0])
    if size == numbered.shape:
        return index, lambda values: values
    # A packed block now holds the numbers of the blocks in it, counted from 1; 0 means no block.
    numbers = packed.values[:, : config.group * r : r, 0]
    slot, member = numbers.nonzero(as_tuple=True)
    order = numbers[slot, member].argsort()
    slot, member = slot[order], member[order]

    def pack(values: Tensor) -> Tensor:
        united = values.new_zeros(size)
        united[:, : config.group * r, :c].view(size[0], config.group, r, c)[slot, member] = values
        return united

    return index, pack


def _activations(call: Call) -> tuple[Tensor, Tensor]:
    """Return X and dY on the device "meta", for their shapes and dtype."""
    n, k = call.shape
    x, dy = (torch.empty(call.m, size, dtype=call.dtype, device="meta") for size in (k, n))
    return x, dy


def _bare(w: Bsr) -> Bsr:
    """Return the pattern with its block size, but without values."""
    return replace(w, values=w.values.new_empty((0, *w.block)))


def _tuned(kernel: str, call: Call, w: Bsr, default: C, **fixed: Any) -> C:
    """Return the tuned configuration for these sizes, else the default. Times nothing."""
    sizes = blocked(call.m, *call.shape, NAMES[call.dtype], call.block, len(w.columns))
    fields = lookup(kernel, sizes, w.columns.device, **fixed)
    return type(default)(**fields) if fields else default


def _plan_torch(call: Call, w: Bsr) -> Multiply:
    pattern = _bare(w)

    def product(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # the layer has already cast
            return a @ b

    def dense(values: Tensor) -> Tensor:
        return replace(pattern, values=values).to_dense()

    if call.op == "linear":
        return lambda x, values: product(x, dense(values).T)
    if call.op == "dgrad":
        return lambda dy, values: product(dy, dense(values))
    return lambda dy, x: pattern.sample(product(dy.T, x)).values
