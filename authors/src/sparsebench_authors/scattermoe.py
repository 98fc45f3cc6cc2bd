"""The gated layer of a mixture by ScatterMoE's authors: two Triton kernels that sort no rows.

    sort ids ─> G | U = X @ [Wg | Wu].T, rows of X gathered, written by expert ─> act(G) * U
             ─> H @ Wd.T, written back to the order of tokens ─> sum with the shares

A program multiplies 128 rows by the weight of each expert that one of them has, one after the
other. So with few rows per expert it multiplies the same 128 rows many times. Its tile of
128 x 128 x 32, four warps and four stages are the only ones.

The steps are those of the authors' GLUMLP, with a plain sort. Theirs also counts each expert's rows
by `bincount`, which waits for the device and serves the gradients alone.

    needs   --peers DIR with a checkout (_builds.py), compute capability 8.0 or newer
    dtype   fp16 or bf16; their fp32 is TF32

Source: Tan et al., arXiv 2403.08245; github.com/shawntan/scattermoe, Apache licence, version 0.3.0.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels._common import foreign_code
from sparsebench.kernels._common.gated_layer import dense_experts
from sparsebench.kernels._common.requirements import AMPERE, unmet
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.results.record import Problem
from sparsebench_authors import _builds

REPOSITORY = "github.com/shawntan/scattermoe"
MARKER = "scattermoe/kernels/ops.py"
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": torch.nn.functional.silu,
    "relu": torch.relu,
    "relu2": lambda z: torch.relu(z).square(),
}


def prepare(operands: Operands) -> Launch:
    """Import their kernels, and store gate and up of an expert as one matrix."""
    folder = foreign_code.checkout(MARKER)
    assert folder
    ops: Any = _builds.imported(folder / MARKER)
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    both, down = (w.transpose(1, 2) for w in dense_experts(operands))
    act, top_k = ACTIVATIONS[operands.problem["activation"]], ids.shape[1]

    def run() -> Tensor:
        experts, order = torch.sort(ids.view(-1))
        products = ops.scatter2scatter(x, both, experts, order, top_k, y_grouped=True)
        gate, up = products.chunk(2, -1)
        rows = ops.scatter2scatter(act(gate) * up, down, experts, order, 1, x_grouped=True)
        of_tokens = rows.view(*ids.shape, -1)
        y: Tensor = torch.bmm(shares[:, None], of_tokens)[:, 0]
        return y

    return Launch(run, {"digest": _builds.digest((folder / MARKER).parent)})


def unsupported(problem: Problem, device: torch.device) -> str | None:
    reason = unmet(problem, device, AMPERE, "fp16", "bf16", newer=True)
    return reason or _builds.missing(MARKER, REPOSITORY)


KERNEL = Kernel("experts_ffn", "dense", "cuda", prepare, unsupported)
