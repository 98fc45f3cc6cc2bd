"""The gated layer of a mixture with 2:4 hybrid experts on Hopper, in five launches.

    route, gather                                         _common/gated_layer.py
    gate, up  H = act(X_e @ Wg_e.T) * (X_e @ Wu_e.T)      experts_wgmma: 8 rows of an expert's gate
                                                          and 8 of its up alternate (spense_ffn.py)
    down      H @ Wd_e.T                                  experts_wgmma
    combine                                               _common/gated_layer.py

    experts_ffn_dense   the same with dense tiles

G and U never leave registers. A launch of its own gathers the rows, because TMA cannot gather rows
before compute capability 10.0. It writes m top_k k elements, which gate_up reads: 3 % of the bytes
of Qwen3-30B-A3B at 1,024 tokens.
"""

from functools import partial
from typing import Any

from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.gated_layer import launch_of_experts
from sparsebench.kernels._common.operator import Earlier
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.spense import experts_wgmma
from sparsebench.kernels.spense._call import weight_of
from sparsebench.kernels.spense.spense_ffn import joined


def prepare(operands: Operands) -> Launch:
    """Plan both products, each with a search of its own. Raises Unsupported."""
    return launch_of(operands, *(weight_of(operands.weights, name) for name in ("wg", "wu", "wd")))


def launch_of(operands: Operands, wg: Spense, wu: Spense, wd: Spense) -> Launch:
    """Return the launch of a layer with these weights. Raises Unsupported."""
    problem, both = operands.problem, joined(wg, wu, split="columns")
    options: dict[str, Any] = {"experts": problem["experts"], "engines": (experts_wgmma.KERNEL,)}
    gate_up = partial(experts_wgmma.bound, both, **options, activation=problem["activation"])
    earlier = Earlier(operands.pinned, operands.timed)
    down = partial(experts_wgmma.bound, wd, **options)
    return launch_of_experts(operands, earlier, gate_up, down)


KERNEL = Kernel("experts_ffn", "spense", "cuda", prepare, experts_wgmma.unsupported)
