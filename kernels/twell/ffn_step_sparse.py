"""A training step of a gated feed-forward layer with few active units, relu or relu2.

    forward     G, dense; lists of the active units, made by each call; Y over these units
    backward    dX, dWg, dWu and dWd.T over these units

It runs the two operators of _autograd.py, as a SparseGatedMLP does. Then it copies the five results
into one tensor, as the op's definition does. Results are correct for any number of active units.
The lists have room for an average of `slots` units per token (by default a 64th of all); a call
with more active units is dense.
"""

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.twell._autograd import (
    SHARE,
    gated_mlp,
    gated_mlp_backward,
    require_kernels,
)
from sparsebench.kernels.twell._call import TwellCall, twell_engine
from sparsebench.results.record import Problem


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why the kernels cannot run the problem on the device, or None."""
    n, k = problem["n"], problem["k"]
    if n % 8 or k % 8:
        return f"expected n and k to be multiples of 8, found n {n} and k {k}"
    return triton_unsupported(problem, device)


def prepare(operands: Operands, *, slots: int | None = None) -> Launch:
    """Copy Wd.T, which the launch keeps. Raises Unsupported."""
    x, dy = operands.activations["x"], operands.activations["dy"]
    wg, wu, wd = (_values(operands, name) for name in ("wg", "wu", "wd"))
    n, squared = len(wg), operands.problem["activation"] == "relu2"
    slots = -(-n // SHARE) if slots is None else slots
    if not 0 < slots <= n:
        raise Unsupported(f"option slots: expected 1 to {n}, the hidden units, found {slots}")
    wd_t, no_l1 = wd.t().contiguous(), x.new_zeros(len(x), dtype=torch.float32)

    def run() -> Tensor:
        y, _, *packed = gated_mlp(x, wg, wu, wd_t, squared, slots)
        gradients = gated_mlp_backward(dy, no_l1, x, wg, wu, wd_t, packed, squared)
        return torch.cat((y, *gradients))

    return Launch(run, {"slots": slots})


def _values(operands: Operands, name: str) -> Tensor:
    weight = operands.weights[name]
    assert isinstance(weight, Dense)
    return weight.values


def plan(device: torch.device, call: TwellCall, config: NoConfig) -> Product:
    """Plan the forward pass alone, for layers without gradients."""
    require_kernels(*call[:3], call.dtype, device)

    def run(*operands: Tensor, out: Tensor | None = None) -> Tensor:
        on_tape(complete=False)
        y: Tensor = gated_mlp(*operands, call.squared, call.slots)[0]
        return y if out is None else out.copy_(y)

    return Product(run)


KERNEL = Kernel("ffn_step", "active_csr", "cuda", prepare, unsupported)

FORWARD = twell_engine("ffn_step_sparse", lambda call: [NoConfig()], plan, unsupported)
