"""The default of each Triton kernel of attention compiles ahead of time, without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels.attention import (
    attention_split,
    attention_triton,
    attention_triton_backward,
)
from sparsebench.kernels.attention._lists import shared_heads
from sparsebench.kernels.attention._shapes import Shape
from tests.compiling.triton_kernels import SHARED_BYTES, complaint_about_launch
from tests.kernels.attention.cases import DTYPES, random_mask
from tests.tools.marks import sampled

CASES = [
    (capability, block, head_dim, dtype)
    for capability in SHARED_BYTES
    for block in (128, 64, 32, 16, (24, 40))
    for head_dim in (128, 64)
    for dtype in ("bf16", "fp32")
]


def programs(block: Any, head_dim: int, dtype: str, path: Any, count: int) -> list[BoundKernel]:
    """Return the kernels of the first configurations of each module."""
    mask = random_mask((256, 256), block, lists=4, causal=True)
    shape = Shape(1, 256, 256, 8, 4, head_dim, mask.block, dtype)
    q = torch.zeros(256, 8 * head_dim, dtype=DTYPES[dtype])
    k = torch.zeros(256, 4 * head_dim, dtype=DTYPES[dtype])
    shared = shared_heads(mask, 8, 4)
    few, one = replace(shape, q_tokens=1), random_mask((1, 256), block, lists=4, causal=True)
    bound: list[BoundKernel] = []
    bound += [
        attention_triton.launch((q, k, k), mask, shape, 0.1, config).program
        for config in attention_triton.configurations(shape, shared, path)[:count]
    ]
    bound += [
        attention_split.launch((q[:1], k, k), one, few, 0.1, config).program
        for config in attention_split.configurations(few, shared, path, 132)[:count]
    ]
    lse = torch.zeros(8, 256)
    for config in attention_triton_backward.configurations(shape, shared, path)[:count]:
        operands = q, k, k, q, lse, q
        program = attention_triton_backward.launch(operands, mask, shape, 0.1, config).program
        assert program.before
        bound += [program.before, replace(program, before=None)]
    return bound


@pytest.mark.compiles
@pytest.mark.parametrize(("capability", "block", "head_dim", "dtype"), sampled(CASES, 22))
def test_the_default_compiles_and_fits_the_shared_memory(capability, block, head_dim, dtype):
    path = "tma" if capability >= 90 else "pointers"
    for program in programs(block, head_dim, dtype, path, 1):
        complaint = complaint_about_launch(program, capability)
        # Some spill a little with the arithmetic of a mask, and in fp32 with D = 128 much. A search
        # times the alternatives.
        assert complaint is None or "spill" in complaint, (program.kernel.__name__, complaint)
