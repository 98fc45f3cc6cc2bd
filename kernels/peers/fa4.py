"""Block-sparse attention of FlashAttention 4, whose kernels are made by the CuTe DSL. Forward only.

On Hopper a tile has as many keys as a block, at most 128, and 64 or 128 queries. So larger blocks
are cut into blocks of 128, or of 64 where those do not fit, which hold the same mask. It refuses
fewer than 64 queries. A partial block would need its rule in the CuTe DSL, so causal masks are
unsupported here.
Counts and lists are read on the device, so a mask that changes in every call needs no plan.
Source: flash_attn/cute/interface.py and block_sparsity.py of flash-attn-4 4.0.0b36.
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask_converters import to_fa4
from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.kernels.peers._attention import cut, mask_of, unsupported_blocks
from sparsebench.results.record import Problem

SIDES = 128, 64
PACKAGE = "flash_attn", "flash-attn-4"


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return unsupported_heads(problem, device) or unsupported_blocks(problem, min(SIDES))


def unsupported_heads(problem: Problem, device: torch.device) -> str | None:
    if problem["head_dim"] not in (64, 96, 128):
        return f"head_dim: expected 64, 96 or 128, found {problem['head_dim']}"
    return unmet(problem, device, HOPPER, "fp16", "bf16", package=PACKAGE)


def prepare(operands: Operands) -> Launch:
    """Cut the lists. Raises Unsupported if flash_attn is an older version."""
    side = next(side for side in SIDES if unsupported_blocks(operands.problem, side) is None)
    lists = to_fa4(cut(mask_of(operands), side), operands.problem["heads"])
    sparsity = module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    return attention(operands, block_sparse_tensors=sparsity(*lists, block_size=(side, side)))


def module(name: str) -> Any:
    """Import a module of FlashAttention 4; version 2 has the same package without it."""
    try:
        return import_module(name)
    except ImportError as error:
        raise Unsupported(f"flash_attn is not FlashAttention 4: {error}") from error


def attention(operands: Operands, **options: Any) -> Launch:
    """Return a call of flash_attn_func, which returns O and the log-sum-exp."""
    attend = module("flash_attn.cute.interface").flash_attn_func
    scale, (q, k, v) = operands.problem["scale"], by_token(operands, "q", "k", "v")

    def run() -> Tensor:
        o: Tensor = attend(q, k, v, softmax_scale=scale, **options)[0]
        return o.flatten(2).flatten(0, 1)

    return Launch(run)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
