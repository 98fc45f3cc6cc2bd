"""FlashAttention 3, dense and forward only, from the wheel fa3-fwd or a build of its authors' code.

It does not read the mask. A causal mask is aligned to the last key, as the op's is. Version 0.0.3
of the wheel supports bf16 and head dimensions from 64 to 256, and runs under torch 2.11.
"""

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from itertools import product
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common.search import fastest_call
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_token
from sparsebench.kernels.peers._attention import unsupported_on_hopper
from sparsebench.results.record import Problem

MODULES = "fa3_fwd_interface", "flash_attn_interface"  # of the wheel, and of a build


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why FlashAttention 3 cannot run the problem here, or None."""
    if reason := unsupported_on_hopper(_module(), "fa3-fwd", device):
        return reason
    if problem["dtype"] != "bf16":
        return f"expected bf16, found {problem['dtype']}"
    d = problem["head_dim"]
    inside = 64 <= d <= 256 and d % 8 == 0
    return None if inside else f"head_dim: expected a multiple of 8 from 64 to 256, found {d}"


def prepare(operands: Operands) -> Launch:
    """Time the ways to pack heads, and for few queries to split keys; keep the fastest."""
    problem, causal = operands.problem, operands.problem["causal"]
    attend = import_module(_module()).flash_attn_func
    q, k, v = by_token(operands, "q", "k", "v")
    grouped, few = problem["heads"] != problem["kv_heads"], problem["m"] <= 16
    ways = [
        {"pack_gqa": pack, "num_splits": splits}
        for pack, splits in product(
            (None, True, False) if grouped else (None,), (1, 0) if few else (1,)
        )
    ]

    def run(way: dict[str, Any]) -> Tensor:
        o = attend(q, k, v, softmax_scale=problem["scale"], causal=causal, **way)
        o = o[0] if isinstance(o, tuple) else o
        rows: Tensor = o.flatten(2).flatten(0, 1)
        return rows

    if operands.pinned:
        ways = [dict(operands.pinned)]
    return fastest_call([partial(run, way) for way in ways], ways, operands.device)


def _module() -> str:
    """Return the name of the installed module, or of the wheel's if neither is installed."""
    return next(filter(find_spec, MODULES), MODULES[0])


KERNEL = Kernel("attention", "dense", "cuda", prepare, unsupported)
