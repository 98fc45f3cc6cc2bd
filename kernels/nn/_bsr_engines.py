"""The engines of a block-sparse weight, and the order in which a layer tries them.

    GPU of compute capability 9.0, fp16 or bf16, n and k multiples of 8
      Y and dX   bsr_wgmma       blocks of multiples of 64, as stored
                 bsr_small       blocks of 8, 16 and 32, packed; larger ones cut, up to 256 tokens
                 bsr_strips      even sides from 10 on, packed
                 bsr_triton      powers of two from 16, as stored, below MANY tokens
      dW         bsr_wgrad       blocks that tiles of 40 to 64 divide
                 bsr_wgrad_mma   blocks of 16, of which few are stored
                 bsr_wgrad_small multiples of 8
      fp8        Y alone: bsr_wgmma and bsr_triton
    GPU of compute capability 8.0 and newer
      Y          bsr_resident    16 bits, even sides, frozen values, few tokens and columns
                 bsr_fp32        fp32, as stored; exact, as bsr_triton is
                 dense           frozen values of a small layer, copied (_dense_copy.py)
    other GPUs, other blocks and sizes, and TRITON_INTERPRET=1
                 bsr_triton, bsr_triton_dgrad, bsr_triton_wgrad
    CPU          dense products in torch, as a reference

The operator takes one of them: what a search found fastest, or else the first that `likeliest`
returns, whose order is what H100 and H200 measured (bsr/NOTES.md). A weight that can change is
packed at every call, so a search times the packing too (`live`).

A plan holds everything that depends only on the index and the sizes: pairs of block rows, work
lists on the device, machine code. Making one copies the index to the host; calling it never waits
for the device. Calls of one plan must run one after the other on the device, as they do on one
stream, because the CUDA kernels of dW keep counters in the memory of their plans.
"""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from triton import knobs

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.choices import density_of
from sparsebench.kernels._common.operator import Engine, NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.requirements import HOPPER
from sparsebench.kernels._kernel import DTYPES, NAMES, output_dtype, refuse
from sparsebench.kernels.bsr import (
    bsr_fp32,
    bsr_resident,
    bsr_small,
    bsr_strips,
    bsr_triton,
    bsr_triton_dgrad,
    bsr_triton_wgrad,
    bsr_wgmma,
    bsr_wgrad,
    bsr_wgrad_mma,
    bsr_wgrad_small,
)
from sparsebench.kernels.bsr._call import BsrCall, bsr_engine
from sparsebench.kernels.bsr._strip_tiles import LEAST_GATHERED
from sparsebench.kernels.nn import _dense_copy
from sparsebench.results.record import Problem

FP8 = DTYPES["fp8"]
FEW = 64  # tokens: up to here blocks as stored, by Triton, are the likeliest for large blocks
MANY = 512  # tokens: from here on bsr_wgmma is the likeliest for blocks of 64 and more
# Up to these tokens and columns of X bsr_resident may be the fastest: 1000 x 1000 in blocks of 10
# took 0.81 of the time of bsr_strips with 64 tokens on an H200, and 1.3 with 1024.
RESIDENT_TOKENS, RESIDENT_COLUMNS = 256, 2048
LARGE = 64  # least side of blocks that bsr_wgmma multiplies as stored


def likeliest(call: BsrCall, stored: int, device: torch.device) -> list[Engine]:
    """Return the engines that may run a call, the likeliest first. Raises Unsupported."""
    if device.type == "cpu" and not knobs.runtime.interpret:
        return [_IN_TORCH[call.op]]
    if call.dtype not in NAMES:
        raise Unsupported(f"expected {', '.join(NAMES.values())} on a GPU, found {call.dtype}")
    if call.dtype == FP8 and call.op != "linear":
        raise Unsupported("expected no gradient of fp8 operands, found one")
    triton, step = _TRITON[call.op], 16 // call.dtype.itemsize
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == HOPPER
    hopper = hopper and call.dtype != torch.float32
    rows_fit = not (call.shape[0] % 8 or call.shape[1] % step)  # rows that TMA reads
    engines = _on_hopper(call, stored) if hopper and rows_fit else []
    # A step is 8 x 8 or more, so smaller blocks are zeros for the most part: 4 x 4 took bsr_triton
    # 252 to 1,396 µs in fp32 and 47 to 205 in bf16, and a dense copy 24 to 57 and 8 to 10.
    mostly_zeros = min(call.block) < bsr_fp32.SIDES[-1]
    if not engines:
        exact = call.dtype == torch.float32 and call.op == "linear" and device.type == "cuda"
        engines = [bsr_fp32.KERNEL, triton] if exact else [triton]
        if mostly_zeros:
            engines.reverse()
    elif (
        call.op != "wgrad"
        and call.m < MANY
        and all(s >= 16 and not s & (s - 1) for s in call.block)
    ):
        unpacked = call.live or call.dtype == FP8
        first = unpacked and call.m <= FEW and min(call.block) >= LARGE
        engines = [triton, *engines] if first else [*engines, triton]
    frozen = call.op == "linear" and not call.live and device.type == "cuda"  # it packs slowly
    if frozen and _dense_copy.unsupported_call(call) is None:
        engines.insert(0 if mostly_zeros else len(engines), _dense_copy.OF_BLOCKS)
    if frozen and call.m <= RESIDENT_TOKENS and call.shape[1] <= RESIDENT_COLUMNS:
        engines = [*engines, bsr_resident.KERNEL]
    problem = Problem(engines[0].op, {"dtype": NAMES[call.dtype]})
    refuse(engines[0].unsupported(problem, device))
    return engines


def _on_hopper(call: BsrCall, stored: int) -> list[Engine]:
    """Return the kernels in CUDA C++ that may run a call, the likeliest first."""
    r, c = call.block
    if call.op == "wgrad":
        if r % 8 or c % 8:
            return []
        if (r, c) == (bsr_wgrad_mma.SIDE, bsr_wgrad_mma.SIDE):
            density = density_of(*call.shape, call.block, stored)
            few = density <= bsr_wgrad_mma.DENSEST
            return [*([bsr_wgrad_mma.KERNEL] if few else []), bsr_wgrad_small.KERNEL]
        return [bsr_wgrad.KERNEL, bsr_wgrad_small.KERNEL]
    large = not (r % LARGE or c % LARGE)
    if call.dtype == FP8:
        return [bsr_wgmma.KERNEL] if large else []
    modules: list[Any] = [bsr_small, bsr_strips]
    if large:
        modules = [bsr_wgmma, bsr_strips] if call.m >= MANY else [*modules, bsr_wgmma]
    engines = [module.DGRAD if call.transposed else module.KERNEL for module in modules]
    sides_fit = (r, c) == (8, 8) or not (r % 2 or c % 2 or min(r, c) < LEAST_GATHERED)
    return engines if sides_fit else []


# ---- the reference on a CPU ----


def _in_torch(w: Bsr, call: BsrCall, config: NoConfig) -> Product:
    """Plan a dense product in torch."""
    pattern = replace(w, values=w.values.new_empty((0, *w.block)))

    def run(a: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        with torch.autocast("cpu", enabled=False):  # the layer has already cast
            y = product(a, b)
        return y if out is None else out.copy_(y)

    def product(a: Tensor, b: Tensor) -> Tensor:
        if call.op == "wgrad":
            return pattern.sample(a.T @ b).values
        dense = replace(pattern, values=b).to_dense()
        if a.dtype == FP8:
            return (a.float() @ dense.float().T).to(output_dtype(FP8))
        return a @ (dense.T if call.op == "linear" else dense)

    return Product(run)


_IN_TORCH = {
    op: bsr_engine("torch", op, lambda w, call: [NoConfig()], _in_torch, lambda *_: None)
    for op in ("linear", "dgrad", "wgrad")
}
_TRITON = {
    "linear": bsr_triton.KERNEL,
    "dgrad": bsr_triton_dgrad.KERNEL,
    "wgrad": bsr_triton_wgrad.KERNEL,
}
ENGINES: tuple[Engine, ...] = (
    *(bsr_fp32.KERNEL, bsr_resident.KERNEL, bsr_small.KERNEL, bsr_strips.KERNEL, *_TRITON.values()),
    *(bsr_wgmma.KERNEL, bsr_wgrad.KERNEL, bsr_wgrad_mma.KERNEL, bsr_wgrad_small.KERNEL),
    _dense_copy.OF_BLOCKS,
)
