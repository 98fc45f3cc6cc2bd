"""The default of each Triton kernel of attention compiles ahead of time, without a GPU."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.compiling.triton_kernels import SHARED_BYTES, complaint_about_launch
from tests.kernels.attention.cases import DTYPES, Case, choices_of, kernels_of, module_of
from tests.tools.marks import sampled

NAMES = kernels_of("attention") + kernels_of("attention_backward")
CASES = [
    (capability, block, head_dim, dtype)
    for capability in SHARED_BYTES
    for block in (128, 64, 32, 16, (24, 40))
    for head_dim in (128, 64)
    for dtype in ("bf16", "fp32")
]


@pytest.mark.compiles
@pytest.mark.parametrize("name", [name for name in NAMES if "wgmma" not in name])
@pytest.mark.parametrize(("capability", "block", "head_dim", "dtype"), sampled(CASES, 22))
def test_the_default_compiles_and_fits_the_shared_memory(
    capability: int, block: Any, head_dim: int, dtype: str, name: str
) -> None:
    queries = 1 if name == "attention_split" else 256
    sizes = {"lists": 4, "causal": True, "head_dim": head_dim, "dtype": dtype}
    case = Case((queries, 256), block, (8, 4), **sizes)
    q, k = (torch.zeros(n, h * head_dim, dtype=DTYPES[dtype]) for n, h in ((queries, 8), (256, 4)))
    operands = (q, k, k, q, torch.zeros(8, queries), q) if "backward" in name else (q, k, k)
    mask = case.mask()
    config = choices_of(name, case, mask, "tma" if capability >= 90 else "pointers")[0]
    bound = module_of(name).launch(operands, mask, case.shape(), 0.1, config).program
    for program in filter(None, (bound.before, replace(bound, before=None))):
        complaint = complaint_about_launch(program, capability)
        # Some spill a little with the arithmetic of a mask, and in fp32 with D = 128 much. A search
        # times the alternatives.
        assert complaint is None or "spill" in complaint, (program.kernel.__name__, complaint)
