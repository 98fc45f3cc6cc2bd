"""The gated layer of a mixture with block-sparse experts, in six launches beside the gather.

The steps are those of _common/gated_layer.py. Gate is above up in each expert, and the first
product writes H = act(G) * U. Each product has two launches, of which the first lists the tiles.
"""

from functools import partial
from typing import Any

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.gated_layer import launch_of_experts
from sparsebench.kernels._common.operator import Earlier
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr import experts_triton


def gate_above_up(gate: Format, up: Format, experts: int = 1) -> Bsr:
    """Return gate above up of each expert [experts 2 n, k], in their blocks. Raises Unsupported.

    If n is not a multiple of r, the blocks of up are cut again, starting where gate ends.
    """
    if not isinstance(gate, Bsr) or not isinstance(up, Bsr):
        actual = " and ".join(type(w).__name__ for w in (gate, up))
        raise Unsupported(f"expected gate and up in bsr, found {actual}")
    if gate.block != up.block:
        actual = " and ".join("x".join(map(str, w.block)) for w in (gate, up))
        raise Unsupported(f"expected gate and up of the same blocks, found {actual}")
    parts = [w.to_dense().unflatten(0, (experts, -1)) for w in (gate, up)]
    return Bsr.from_dense(torch.cat(parts, 1).flatten(0, 1), block=[*gate.block])


def prepare(operands: Operands) -> Launch:
    """Plan both products, each with a search of its own. Raises Unsupported."""
    experts, wd = operands.problem["experts"], operands.weights["wd"]
    both = gate_above_up(operands.weights["wg"], operands.weights["wu"], experts)
    if not isinstance(wd, Bsr):
        raise Unsupported(f"expected a weight in bsr, found {type(wd).__name__}")
    options: dict[str, Any] = {"experts": experts, "engines": (experts_triton.KERNEL,)}
    gate_up, down = (partial(experts_triton.bound, w, **options) for w in (both, wd))
    gate_up = partial(gate_up, activation=operands.problem["activation"])
    earlier = Earlier(operands.pinned, operands.timed)
    return launch_of_experts(operands, earlier, gate_up, down)


KERNEL = Kernel("experts_ffn", "bsr", "cuda", prepare, experts_triton.KERNEL.unsupported)
