"""FlashAttention 3, dense and forward only, from the wheel fa3-fwd or a build of its authors' code.

It does not read the mask. A causal mask is aligned to the last key, as the op's is. Version 0.0.3
of the wheel supports bf16 and head dimensions from 64 to 256, and runs under torch 2.11.
"""

from importlib import import_module
from importlib.util import find_spec
from itertools import product

import torch
from torch import Tensor

from sparsebench.kernels._common.requirements import HOPPER, unmet
from sparsebench.kernels._common.search import fastest_choice
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.results.record import Problem

MODULES = "fa3_fwd_interface", "flash_attn_interface"  # names in the wheel, and in a build


def unsupported(problem: Problem, device: torch.device) -> str | None:
    d = problem["head_dim"]
    if not 64 <= d <= 256 or d % 8:
        return f"head_dim: expected a multiple of 8 from 64 to 256, found {d}"
    return unmet(problem, device, HOPPER, "bf16", package=(_module(), "fa3-fwd"))


def prepare(operands: Operands) -> Launch:
    """Time the ways to pack heads, and for few queries to split keys; keep the fastest."""
    problem = operands.problem
    attend = import_module(_module()).flash_attn_func
    q, k, v = by_token(operands, "q", "k", "v")
    options = {"softmax_scale": problem["scale"], "causal": problem["causal"]}
    packs = (None, True, False) if problem["heads"] != problem["kv_heads"] else (None,)
    splits = (1, 0) if problem["m"] <= 16 else (1,)

    def run(pack_gqa: bool | None, num_splits: int) -> Tensor:
        o = attend(q, k, v, **options, pack_gqa=pack_gqa, num_splits=num_splits)
        o = o[0] if isinstance(o, tuple) else o
        rows: Tensor = o.flatten(2).flatten(0, 1)
        return rows

    ways = [{"pack_gqa": pack, "num_splits": split} for pack, split in product(packs, splits)]
    return fastest_choice(run, ways, operands)


def _module() -> str:
    """Return the name of the installed module, or of the wheel's if neither is installed."""
    return next(filter(find_spec, MODULES), MODULES[0])


KERNEL = Kernel("attention", "dense", "cuda", prepare, unsupported)
