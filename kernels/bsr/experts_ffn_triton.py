"""The gated layer of a mixture with block-sparse experts, in seven launches.

The steps of a layer are those of kernels/spense/experts_ffn_wgmma.py, but gate and up of an expert
are one product, which writes G | U, and act(G) * U is a launch of its own (_common/elementwise.py).
Each product has two launches, of which the first lists the tiles.
"""

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.elementwise import gated
from sparsebench.kernels._common.operator import Earlier
from sparsebench.kernels._common.routing import combine, route
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr import experts_triton

PRODUCT = experts_triton.KERNEL


def joined(gate: Format, up: Format, experts: int) -> Bsr:
    """Return gate above up of each expert [experts 2 n, k], in blocks. Raises Unsupported."""
    if not isinstance(gate, Bsr) or not isinstance(up, Bsr) or gate.block != up.block:
        raise Unsupported("expected gate and up in blocks of one size, found others")
    parts = [w.to_dense().unflatten(0, (experts, -1)) for w in (gate, up)]
    return Bsr.from_dense(torch.cat(parts, 1).flatten(0, 1), block=[*gate.block])


def prepare(operands: Operands) -> Launch:
    """Plan both products, each with a search of its own. Raises Unsupported."""
    problem, earlier = operands.problem, Earlier(operands.pinned, operands.timed)
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    experts, activation, wd = problem["experts"], problem["activation"], operands.weights["wd"]
    both = joined(operands.weights["wg"], operands.weights["wu"], experts)
    if not isinstance(wd, Bsr):
        raise Unsupported(f"expected a weight in bsr, found {type(wd).__name__}")
    of_both, of_down = ((w.values, w.columns, w.offsets) for w in (both, wd))
    rows = route(ids, experts)
    gathered = x.index_select(0, rows.source)
    first = experts_triton.bound(both, gathered, rows.ends, experts, (PRODUCT,))
    gate_up = first.select(earlier.part("gate_up"))
    h = gated(gate_up.product.run(gathered, rows.ends, *of_both), activation)
    down = experts_triton.bound(wd, h, rows.ends, experts, (PRODUCT,)).select(earlier.part("down"))

    def run() -> Tensor:
        rows = route(ids, experts)
        gathered = x.index_select(0, rows.source)
        h = gated(gate_up.product.run(gathered, rows.ends, *of_both), activation)
        return combine(down.product.run(h, rows.ends, *of_down), rows.place, shares)

    plans = {"gate_up": gate_up, "down": down}
    choice = {name: plan.row for name, plan in plans.items()}
    lines = [{"of": name, **line} for name, plan in plans.items() for line in plan.lines]
    return Launch(run, choice, gate_up.product.code, lines)


KERNEL = Kernel("experts_ffn", "bsr", "cuda", prepare, experts_triton.KERNEL.unsupported)
