"""Dense weights in 4 bits by torch: its product of bf16 activations and packed int4 weights.

    Y [m, n] = X [m, k] @ ((code - 8) * scale).T        one scale for each 128 weights of a row

This is the kernel that torchao deploys for weights in int4 ("tinygemm"), called directly. It
converts 4 bits to bf16 in registers and multiplies by mma.sync. The packing interleaves 2, 4 or 8
tiles of 16 columns, which is searched. Zeros of W are stored and multiplied like other weights.

    needs   an NVIDIA GPU, compute capability 8.0 or newer
    dtype   bf16 activations, fp32 accumulation
    sizes   n a multiple of 8; k of 16 times the tiles and of the group

Source: torch.ops.aten._weight_int4pack_mm, pytorch/aten/src/ATen/native/cuda/int4mm.cu.
"""

from functools import partial

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.int4 import Int4
from sparsebench.kernels._common.requirements import WEIGHT_BITS, unsupported_in_4_bits
from sparsebench.kernels._common.search import fastest_call, pinned_or
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

INNER_K_TILES = 8, 4, 2
TILE, ROWS, GROUPS = 16, 8, (32, 64, 128, 256)


def prepare(operands: Operands) -> Launch:
    """Pack the weights in each way, and choose the fastest. Raises Unsupported for other groups."""
    w, x = operands.weights["w"], operands.activations["x"]
    assert isinstance(w, Int4)
    k, group = w.shape[1], w.group
    if group not in GROUPS or k % group:
        raise Unsupported(
            f"expected k a multiple of the group, one of {GROUPS}; found {k}, {group}"
        )
    scales = w.scales.t().contiguous()
    scales_and_zeros = torch.stack((scales, torch.zeros_like(scales)), 2)
    every = [{"inner_k_tiles": t} for t in INNER_K_TILES if k % (t * TILE) == 0]
    choices = pinned_or(every, operands)
    product = torch.ops.aten._weight_int4pack_mm
    pack = torch.ops.aten._convert_weight_to_int4pack
    packed = [pack(w.codes, choice["inner_k_tiles"]) for choice in choices]
    calls = [partial(product, x, codes, group, scales_and_zeros) for codes in packed]
    return fastest_call(calls, choices, operands.device, weight_bits=WEIGHT_BITS)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return unsupported_in_4_bits(problem, device, "bf16", ROWS, min(INNER_K_TILES) * TILE)


KERNEL = Kernel("linear", "int4", "cuda", prepare, unsupported)
