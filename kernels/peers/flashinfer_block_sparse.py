"""Block-sparse attention of FlashInfer, for one list per key head: blocks of any size.

VariableBlockSparseAttentionWrapper makes a list of keys for each block of queries in `plan`, and
reads q, k and v head by head, so their copies are timed with the launch. The plan is not timed, or
with `plans` in every launch, as users of a mask that changes pay it: it copies the mask to the CPU
and waits for it, so such a launch is in no CUDA graph. The row's candidates then have the times of
the plan and of attention, each alone. It supports no partial blocks, and nvcc compiles its kernels
at the first plan or call. Its backends for Hopper are all timed:

    fa2, fa3  any blocks: a list of tokens
    cake      bf16, D = 128, as many key heads as heads, 1 to 64 blocks of 64 per block of queries;
              larger blocks are cut into those. The wrapper never chooses it by itself.

Source: flashinfer/sparse.py and cake_vsa_sm90.py of FlashInfer 0.7.2.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.block_mask_converters import to_flashinfer_variable
from sparsebench.kernels._common.requirements import unsupported_dtype, unsupported_without
from sparsebench.kernels._common.search import fastest_call, lines_of_parts, pinned_or
from sparsebench.kernels._kernel import DTYPES, Kernel, Launch, Operands
from sparsebench.kernels.dense._sdpa import by_head
from sparsebench.kernels.peers._attention import (
    cut,
    mask_of,
    unsupported_blocks,
    unsupported_causal,
)
from sparsebench.results.record import Problem

WORKSPACE = 128 * 1024 * 1024  # bytes, as FlashInfer recommends
BACKENDS = "fa2", "fa3", "cake"
CAKE_SIDE = 64


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["head_dim"] not in (64, 128, 256):
        return f"head_dim: expected 64, 128 or 256, found {problem['head_dim']}"
    if problem["batch"] != 1:
        return f"expected one sequence, found {problem['batch']}"
    if problem["lists"] == "heads" and problem["heads"] != problem["kv_heads"]:
        expected = f"one for each of {problem['kv_heads']} key heads"
        return f"lists: expected {expected}, found one per head"
    return (
        unsupported_without("flashinfer", "flashinfer-python")
        or unsupported_dtype(problem, "fp16", "bf16")
        or unsupported_causal(problem)
    )


def prepare(operands: Operands, *, plans: bool = False) -> Launch:
    """Plan with every backend, and keep the fastest that runs. Raises Unsupported."""
    wrapper_of = import_module("flashinfer").VariableBlockSparseAttentionWrapper
    problem, (q, k, v) = operands.problem, by_head(operands, "q", "k", "v")
    mask = mask_of(operands)
    heads = problem["heads"], problem["kv_heads"], problem["head_dim"]
    shape = problem["kv_heads"] * problem["m"], problem["heads"] // problem["kv_heads"], heads[2]
    out = q.new_empty(shape)  # cake needs it in a CUDA graph

    def run(wrapper: Any, plan: Callable[[], object] | None, backend: str) -> Tensor:
        if plan:
            plan()
        # fa2 and fa3 copy what is not contiguous themselves, once.
        views = [x[0].contiguous() if backend == "cake" else x[0] for x in (q, k, v)]
        o: Tensor = wrapper.run(*views, out=out)
        return o.transpose(0, 1).reshape(problem["m"], -1)

    options = {"sm_scale": problem["scale"], "q_data_type": DTYPES[problem["dtype"]]}
    calls: list[Callable[[], Tensor]] = []
    parts, choices, reasons = [], [], []
    for choice in pinned_or([{"backend": backend} for backend in BACKENDS], operands):
        workspace = torch.empty(WORKSPACE, dtype=torch.uint8, device=operands.device)
        try:
            wrapper = wrapper_of(workspace, **choice)
            smaller = choice["backend"] == "cake" and not unsupported_blocks(problem, CAKE_SIDE)
            blocks = cut(mask, CAKE_SIDE) if smaller else mask
            lists = to_flashinfer_variable(blocks, problem["kv_heads"])
            plan = partial(wrapper.plan, *lists, *heads, **options)
            plan()
        except (RuntimeError, ValueError, AssertionError) as error:
            reasons.append(f"{choice['backend']}: {error}".splitlines()[0])
            continue
        calls.append(partial(run, wrapper, plan if plans else None, choice["backend"]))
        parts.append({"plan": plan, "attention": partial(run, wrapper, None, choice["backend"])})
        choices.append(choice)
    if not calls:
        raise Unsupported("; ".join(reasons))
    launch = fastest_call(calls, choices, operands.device, **({"plans": True} if plans else {}))
    if not plans:
        return launch
    fastest = next(i for i, call in enumerate(calls) if call is launch.run)
    lines = [*launch.candidates, *lines_of_parts(parts[fastest], operands.device)]
    return replace(launch, candidates=lines)


KERNEL = Kernel("attention", "block_mask", "cuda", prepare, unsupported)
