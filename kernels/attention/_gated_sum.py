"""The sum of branches of attention, each multiplied by a gate for each token and head.

    O[t, h] = sum over branches of  gate[t, h] . branch[t, h]                  summed in fp32

A program adds ROWS rows of D elements of all branches, so each branch is read once and O is written
once. In torch, each product and each sum would read and write a whole matrix.

Bound: the bytes of the branches and of O. At 16k tokens, 32 heads and D = 128 in bf16, three
branches are 537 MB: 0.13 ms at 4.2 TB/s, and 1.07 GB in torch.
"""

from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from sparsebench.kernels._common.torch_operator import torch_operator
from sparsebench.kernels._common.transforms import aligned, is_traced
from sparsebench.kernels._common.triton import BoundKernel, Template
from sparsebench.kernels.attention._selecting import BOUND

ROWS = 32  # of a program
MOST_BRANCHES = 3


def gated_sum(branches: list[Tensor], gates: list[Tensor]) -> Tensor:
    """Return the sum, of the shape and dtype of the branches. Branches and gates get gradients.

    branches  [batch, tokens, heads, D] of one dtype, two or three
    gates     [batch, tokens, heads], floats
    """
    differentiates = torch.is_grad_enabled() and any(x.requires_grad for x in (*branches, *gates))
    o: Tensor = (_operator if differentiates or is_traced() else _gated_sum)(branches, gates)
    return o


def _gated_sum(branches: list[Tensor], gates: list[Tensor]) -> Tensor:
    first = branches[0]
    if first.device.type != "cuda" and not triton.knobs.runtime.interpret:
        pairs = zip(branches, gates, strict=True)
        return torch.stack([o.float() * g.float()[..., None] for o, g in pairs]).sum(0).to(first)
    operands = [aligned(x) for x in (*branches, *gates)]
    template = _launch(tuple(first.shape), tuple(x.dtype for x in operands), first.device)
    return template.enqueue(*operands)[0]


def _like_first(branches: list[Tensor], gates: list[Tensor]) -> Tensor:
    return branches[0].new_empty(branches[0].shape)


def _save(ctx: Any, inputs: tuple[list[Tensor], list[Tensor]], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[0], *inputs[1])


def _differentiate(ctx: Any, do: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    saved = ctx.saved_tensors  # once: a checkpoint unpacks them once
    count = len(saved) // 2
    branches, gates = saved[:count], saved[count:]
    of_branches = [(do * gate[..., None]).to(do.dtype) for gate in gates]
    pairs = zip(branches, gates, strict=True)
    return of_branches, [(do.float() * o.float()).sum(-1).to(gate.dtype) for o, gate in pairs]


_operator = torch_operator(
    "gated_sum", _gated_sum, _like_first, save=_save, backward=_differentiate
)


@lru_cache(BOUND)
def _launch(
    shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...], device: torch.device
) -> Template:
    """Return the launch of `gated_sum` for such operands; a device binds it once."""
    count, depth = len(dtypes) // 2, shape[3]
    sizes = [shape] * count + [shape[:3]] * count
    operands = [
        torch.empty(size, dtype=dtype, device="meta")
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]
    none: list[None] = [None] * (MOST_BRANCHES - count)
    o, rows = torch.empty_like(operands[0]), shape[0] * shape[1] * shape[2]
    args = *operands[:count], *none, *operands[count:], *none, o, rows
    constants = {"D": depth, "DEPTH": triton.next_power_of_2(depth), "ROWS": ROWS, "num_warps": 4}
    program = BoundKernel(_add, (triton.cdiv(rows, ROWS),), args, constants, o)
    return Template([program], operands, [o])


@triton.jit  # type: ignore[untyped-decorator]
def _add(  # type: ignore[no-untyped-def]
    first, second, third, first_gate, second_gate, third_gate, out, rows,
    D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    row, depth = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, DEPTH)[None, :]
    real, at = row < rows, row.to(tl.int64)[:, None] * D + depth
    stored = real[:, None] & (depth < D)
    total = _scaled(first, first_gate, row, real, at, stored)
    total += _scaled(second, second_gate, row, real, at, stored)
    if third is not None:
        total += _scaled(third, third_gate, row, real, at, stored)
    tl.store(out + at, total.to(out.dtype.element_ty), stored)


@triton.jit
def _scaled(branch, gate, row, real, at, stored):  # type: ignore[no-untyped-def]
    weight = tl.load(gate + row, real, 0.0).to(tl.float32)
    return tl.load(branch + at, stored, 0.0).to(tl.float32) * weight[:, None]
