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

from sparsebench.kernels._common.search import search
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem

MODULES = "fa3_fwd_interface", "flash_attn_interface"  # of the wheel, and of a build


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why FlashAttention 3 cannot run the problem here, or None."""
    if not _installed():
        return f"needs one of {', '.join(MODULES)} (pip install fa3-fwd), found none"
    if torch.cuda.get_device_capability(device) != (9, 0):
        return "needs compute capability 9.0"
    if problem["dtype"] != "bf16":
        return f"expected bf16, found {problem['dtype']}"
    d = problem["head_dim"]
    return None if 64 <= d <= 256 and d % 8 == 0 else f"head_dim: expected 64 to 256, found {d}"


def prepare(operands: Operands) -> Launch:
    """Time the ways to pack heads, and for few queries to split keys; keep the fastest."""
    problem, causal = operands.problem, operands.problem["causal"]
    attend = import_module(_installed()[0]).flash_attn_func
    q, k, v = (
        operands.activations[name]
        .unflatten(1, (-1, problem["head_dim"]))
        .unflatten(0, (problem["batch"], -1))
        for name in "qkv"
    )
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
    result = search([partial(run, way) for way in ways], operands.device)
    best = ways[result.best]
    return Launch(partial(run, best), best, candidates=result.lines(ways))


def _installed() -> list[str]:
    return [name for name in MODULES if find_spec(name)]


KERNEL = Kernel("attention", "dense", "cuda", prepare, unsupported)
