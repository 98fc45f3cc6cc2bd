"""Choose the kernel of each product of a block-sparse layer, and keep its plan.

    CUDA, compute capability 9.0, fp16 or bf16,
      blocks of multiples of 64, n and k of 8     bsr_wgmma from FEW tokens on, and bsr_wgrad for dW
      blocks of 16x16 and 32x32, n and k of 8     bsr_small
      blocks with a side of 24, 40, 48, 80, ...   bsr_strips, if a multiple of 8 from 16 to 64 or
                                                  80 goes into both sides, likewise
      any multiples of 8, likewise, dW            bsr_wgrad where tiles of 40 to 64 go into the
                                                  blocks, else bsr_wgrad_small
    other CUDA; any GPU under TRITON_INTERPRET=1  bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
    CPU                                           torch, dense products: a reference, not a kernel

A plan holds everything that depends only on the index and the sizes: pairs of block rows, work
lists on the device, machine code. The first call of a pattern with a number of tokens makes its
plan, and copies the index to the host for that. Later calls never wait for the device.

An index is two tensors, and anybody may write into them: AveragedModel and DDP do. So a pattern is
a copy of an index, and the stamp that both tensors had when they were last equal to the copy:

    stamp  for offsets and columns: torch's count of the writes into it, its address, its length

A call with another stamp compares the index with the copy, which waits for the device, and plans
anew if they differ. torch does not count a write through `.data`, through NumPy, or by a collective
on the tensor itself. So one call in OFTEN compares whatever the stamp is, and raises on such a
write. Tensors made in inference mode have no count: each call compares them. A pattern is an
attribute of the tensor `columns`, and is freed with it.

Calls of one pattern must run one after the other on the device, as they do on one stream, because
bsr_wgrad and bsr_wgrad_small count in memory of their plans.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
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
FEW = 256  # tokens: too few work items for 132 SMs, 11.2 µs where Triton takes 9.8 (bsr/NOTES.md)
OFTEN = 256  # calls: a comparison waits 40 µs and what is queued
KEPT = "_sparsebench_pattern"  # attribute of a tensor
C = TypeVar("C")  # a kernel's Config

Multiply = Callable[[Tensor, Tensor], Tensor]
"""(X, values) to Y, (dY, values) to dX, (dY, X) to dW's values: a new tensor at each call."""


class Call(NamedTuple):
    """A product of m tokens: with the index, all that a plan depends on.

    shape  n and k of W;  block  r and c;  dtype  of both operands
    """

    op: Literal["linear", "dgrad", "wgrad"]
    m: int
    shape: tuple[int, int]
    block: tuple[int, int]
    dtype: torch.dtype


class Pattern:
    """An index as it was when it was planned, and its plans.

    offsets, columns  copies, which plans read: whatever is written into the index, a plan is whole
    stamp             None for an index of inference mode
    """

    def __init__(self, offsets: Tensor, columns: Tensor, stamp: tuple[int, ...] | None) -> None:
        """Copy an index. Raises Unsupported."""
        devices = sorted({str(offsets.device), str(columns.device)})
        if len(devices) > 1:
            raise Unsupported(f"expected one device, found {', '.join(devices)}")
        with torch.inference_mode(False):
            self.offsets, self.columns = offsets.clone(), columns.clone()
        self.held = offsets.detach(), columns.detach()  # so that no other index has the addresses
        self.stamp, self.calls = stamp, 0
        self.plans: dict[Call, Multiply] = {}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Copy and pickle as nothing, of a type that torch.load allows."""
        return OrderedDict, ()

    def plan(self, call: Call) -> Multiply:
        """Return the kernel of a call; the first call of these sizes makes the plan."""
        try:
            return self.plans[call]
        except KeyError:
            made = self.plans[call] = plan(call, self.offsets, self.columns)
            return made

    def equals(self, offsets: Tensor, columns: Tensor) -> bool:
        """Say whether this is still the index. Waits for the device."""
        pairs = (self.offsets, offsets), (self.columns, columns)
        same = all((a.device, a.dtype, a.shape) == (b.device, b.dtype, b.shape) for a, b in pairs)
        return same and all(torch.equal(a, b) for a, b in pairs)


def pattern_of(offsets: Tensor, columns: Tensor) -> Pattern:
    """Return the pattern of an index. Raises Unsupported, and RuntimeError on an uncounted write.

    Waits for the device at the first call, after a write, and once in OFTEN calls.
    """
    found = getattr(columns, KEPT, None)
    stamp = _stamp(offsets, columns)
    if type(found) is Pattern and found.stamp == stamp is not None:
        found.calls += 1
        if found.calls % OFTEN:
            return found
    return _compared(found, stamp, offsets, columns)


def _stamp(offsets: Tensor, columns: Tensor) -> tuple[int, ...] | None:
    try:
        counts = offsets._version, columns._version
    except RuntimeError:  # an inference tensor
        return None
    addresses = offsets.data_ptr(), columns.data_ptr()
    return *counts, *addresses, offsets.shape[0], columns.shape[0]  # len() takes ten times as long


def _compared(
    found: Any, stamp: tuple[int, ...] | None, offsets: Tensor, columns: Tensor
) -> Pattern:
    known = type(found) is Pattern
    if columns.is_cuda and torch.cuda.is_current_stream_capturing():  # nothing can be compared
        if known and found.stamp == stamp is not None:
            return found  # type: ignore[no-any-return]
        return Pattern(offsets, columns, None)  # has no plan, and says so
    if known and found.equals(offsets, columns):
        found.stamp = stamp
        return found  # type: ignore[no-any-return]
    if known and found.stamp == stamp is not None:
        raise RuntimeError(
            f"the index of {len(columns)} blocks was written in a way that torch does not count "
            f"(.data, NumPy, a collective); up to {OFTEN} calls since then are wrong: "
            "load a state dict or call set_pattern instead"
        )
    made = Pattern(offsets, columns, stamp)
    setattr(columns, KEPT, made)
    return made


def replan(old: tuple[Tensor, Tensor], new: tuple[Tensor, Tensor]) -> None:
    """Make for a new index every plan that the old one has, so that no later call waits."""
    found = getattr(old[1], KEPT, None)
    for call in [*found.plans] if type(found) is Pattern else ():
        pattern_of(*new).plan(call)


def require_index(
    offsets: Tensor, columns: Tensor, shape: tuple[int, int], block: tuple[int, int]
) -> None:
    """Raise FormatError unless this is the index of a BSR matrix [n, k]. Waits for the device."""
    for name, index in (("offsets", offsets), ("columns", columns)):
        if index.dim() != 1 or index.dtype != torch.int32 or not index.is_contiguous():
            found = f"{index.dtype} {list(index.shape)} with strides {list(index.stride())}"
            raise FormatError(f"{name}: expected a contiguous list of int32, found {found}")
    checked(Bsr(shape, offsets, columns, columns.new_empty((1, 1, 1)).expand(len(columns), *block)))


def plan(call: Call, offsets: Tensor, columns: Tensor) -> Multiply:
    """Plan a call for the kernel that `chosen` names. Raises FormatError, Unsupported."""
    if columns.is_cuda and torch.cuda.is_current_stream_capturing():
        what = f"{call.op} of {call.m} tokens, {call.dtype}"
        raise RuntimeError(
            f"{what}, is not planned: call it once before capturing a CUDA graph, and let nothing "
            "write into the index, as DDP does without broadcast_buffers=False"
        )
    require_index(offsets, columns, call.shape, call.block)
    values = columns.new_empty((len(columns), *call.block), dtype=call.dtype)  # never read
    w = Bsr(call.shape, offsets, columns, values)
    return chosen(call, columns.device)(call, w)


def chosen(call: Call, device: torch.device) -> Callable[[Call, Bsr], Multiply]:
    """Choose the kernel of a call; nothing else does. Raises Unsupported."""
    if device.type == "cpu" and not knobs.runtime.interpret:
        return _in_torch
    if call.dtype not in NAMES:
        raise Unsupported(f"expected fp16, bf16 or fp32 on a GPU, found {call.dtype}")
    problem = Problem(call.op, {"dtype": NAMES[call.dtype]})
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    hopper = hopper and call.dtype != torch.float32 and not any(size % 8 for size in call.shape)
    if call.op == "wgrad":
        ours = None if any(side % PIECE for side in call.block) else _wgrad_on_hopper
    elif call.block in {(b, b) for b in bsr_small.BLOCKS}:
        ours = _small
    elif not any(side % SIDE for side in call.block):
        ours = _large if call.m > FEW else None
    else:
        odd = any(side & (side - 1) for side in call.block)  # no power of two: what was measured
        ours = _strips if odd and all(map(bsr_strips.depth_of, call.block)) else None
    if hopper and ours:
        reason, kernels = unsupported_on_hopper(problem, device), ours
    else:
        reason, kernels = unsupported(problem, device), _in_triton
    if reason:
        raise Unsupported(reason)
    return kernels


def _wgrad_on_hopper(call: Call, w: Bsr) -> Multiply:
    (x, dy), workers = _activations(call), multiprocessors(w.columns.device)
    small = not all(sides_of(w))
    kernel, name = (bsr_wgrad_small, "bsr_wgrad_small") if small else (bsr_wgrad, "bsr_wgrad")
    if reason := kernel.unsupported_operands(dy, x, w):
        raise Unsupported(reason)
    config = _tuned(name, call, w, kernel.configurations(w, call.m, workers)[0])
    plan = kernel.plan(w, call.m, config)
    return lambda dy, x: bsr_wgrad.bind(plan, dy, x)()


def _large(call: Call, w: Bsr) -> Multiply:
    x, dy = _activations(call)
    transposed = call.op == "dgrad"
    if reason := bsr_wgmma.unsupported_operands(dy if transposed else x, w, transposed):
        raise Unsupported(reason)
    name = "bsr_wgmma_dgrad" if transposed else "bsr_wgmma"
    config = _tuned(name, call, w, bsr_wgmma.configurations(call.m, w.shape[transposed])[0])
    plan = bsr_wgmma.plan(w, call.m, config, transposed=transposed)
    return lambda a, values: _launch.bind(plan, a, values)()


def _small(call: Call, w: Bsr) -> Multiply:
    x, dy = _activations(call)
    transposed = call.op == "dgrad"
    if reason := bsr_small.unsupported_operands(dy if transposed else x, w, transposed):
        raise Unsupported(reason)
    name = "bsr_small_dgrad" if transposed else "bsr_small"
    workers = multiprocessors(w.columns.device)
    default = bsr_small.configurations(w, call.m, workers, transposed)[0]
    config = _tuned(name, call, w, default)
    plan = bsr_small.plan(w, call.m, config, transposed=transposed)
    return lambda a, values: _launch.bind(plan, a, values)()


def _strips(call: Call, w: Bsr) -> Multiply:
    x, dy = _activations(call)
    transposed = call.op == "dgrad"
    if reason := bsr_strips.unsupported_operands(dy if transposed else x, w, transposed):
        raise Unsupported(reason)
    name = "bsr_strips_dgrad" if transposed else "bsr_strips"
    tiles, workers = bsr_strips.tiles_of(w, transposed), multiprocessors(w.columns.device)
    config = _tuned(name, call, w, bsr_strips.configurations(tiles, call.m, workers)[0])
    plan = bsr_strips.plan(w, call.m, config, tiles, transposed=transposed)
    return lambda a, values: _launch.bind(plan, a, values)()


def _in_triton(call: Call, w: Bsr) -> Multiply:
    if call.op == "wgrad":
        return _wgrad_in_triton(call, w)
    return _dgrad_in_triton(call, w) if call.op == "dgrad" else _linear_in_triton(call, w)


def _linear_in_triton(call: Call, w: Bsr) -> Multiply:
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


def _dgrad_in_triton(call: Call, w: Bsr) -> Multiply:
    (_, dy), size = _activations(call), call.dtype.itemsize
    path = choose_path(None, bsr_triton_dgrad.unsupported_by_tma(dy, w), w.columns.device)
    default = bsr_triton_dgrad.configurations(call.m, w.block, size, path)[0]
    config = _tuned("bsr_triton_dgrad", call, w, default, path=path)
    bare, by_columns = _bare(w), bsr_triton_dgrad.index_of(w)

    def bound(dy: Tensor, values: Tensor) -> BoundKernel:
        return bsr_triton_dgrad.launch(dy, replace(bare, values=values), config, by_columns)

    return _templates(bound)


def _wgrad_in_triton(call: Call, w: Bsr) -> Multiply:
    (x, dy), device, size = _activations(call), w.columns.device, call.dtype.itemsize
    path = choose_path(None, bsr_triton_wgrad.unsupported_by_tma(dy, x, w.block), device)
    sizes = len(w.columns), size, path, multiprocessors(device)
    default = bsr_triton_wgrad.configurations(call.m, w.block, *sizes)[0]
    config = _tuned("bsr_triton_wgrad", call, w, default, path=path)
    pattern, strips = _bare(w), bsr_triton_wgrad.strips_of(w, config)
    return _templates(lambda dy, x: bsr_triton_wgrad.launch(dy, x, pattern, config, strips))


def _templates(bound: Callable[[Tensor, Tensor], BoundKernel]) -> Multiply:
    """Return a function that runs `bound` on any operands; it is built once a pair of layouts."""

    @lru_cache(8)
    def template(dtype: torch.dtype, *layouts: tuple[torch.Size, tuple[int, ...]]) -> Template:
        made = bound(*(torch.empty_strided(*o, dtype=dtype, device="meta") for o in layouts))
        operands = (tensor_of(arg) for arg in (made.before or made).args[:2])
        return Template([made], [t for t in operands if t is not None], [made.out])

    def multiply(a: Tensor, b: Tensor) -> Tensor:
        return template(a.dtype, (a.shape, a.stride()), (b.shape, b.stride()))(a, b)[0]

    return multiply


def _packer(
    w: Bsr, config: bsr_triton.Config
) -> tuple[bsr_triton.Packed, Callable[[Tensor], Tensor]]:
    """Return the packed index of bsr_triton.pack, and a function that packs values.

    The function does not wait for the device.
    """
    (r, c), blocks = w.block, len(w.values)
    number = torch.arange(1, blocks + 1, dtype=torch.int32, device=w.columns.device)
    numbered = number[:, None, None].expand(blocks, r, c).contiguous()
    packed = bsr_triton.pack(replace(w, values=numbered), config)
    size, index = packed.values.shape, replace(packed, values=number[:0])
    if size == numbered.shape:
        return index, lambda values: values
    # A packed block now holds the numbers of the blocks in it, from 1 on; 0 is none.
    found = packed.values[:, : config.group * r : r, 0]
    slot, member = found.nonzero(as_tuple=True)
    order = found[slot, member].argsort()
    slot, member = slot[order], member[order]

    def pack(values: Tensor) -> Tensor:
        united = values.new_zeros(size)
        united[:, : config.group * r, :c].view(size[0], config.group, r, c)[slot, member] = values
        return united

    return index, pack


def _activations(call: Call) -> tuple[Tensor, Tensor]:
    """Return X and dY without data: they have a shape, a dtype and an alignment."""
    n, k = call.shape
    x, dy = (torch.empty(call.m, size, dtype=call.dtype, device="meta") for size in (k, n))
    return x, dy


def _bare(w: Bsr) -> Bsr:
    """Return the pattern with its block size, and no values."""
    return replace(w, values=w.values.new_empty((0, *w.block)))


def _tuned(kernel: str, call: Call, w: Bsr, default: C, **fixed: Any) -> C:
    """Return a table's configuration for these sizes, else the default. Times nothing."""
    sizes = blocked(call.m, *call.shape, NAMES[call.dtype], call.block, len(w.columns))
    found = lookup(kernel, sizes, w.columns.device, **fixed)
    return type(default)(**found) if found else default


def _in_torch(call: Call, w: Bsr) -> Multiply:
    pattern = _bare(w)

    def product(a: Tensor, b: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # the layer has cast already
            return a @ b

    def dense(values: Tensor) -> Tensor:
        return replace(pattern, values=values).to_dense()

    if call.op == "linear":
        return lambda x, values: product(x, dense(values).T)
    if call.op == "dgrad":
        return lambda dy, values: product(dy, dense(values))
    return lambda dy, x: pattern.sample(product(dy.T, x)).values
