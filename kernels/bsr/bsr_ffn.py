"""Gated feed-forward layer with block-sparse weights, of two products.

    G | U = X @ [Wg, Wu].T     bsr_wgmma, bsr_small or bsr_triton: one product of 2 n features
    H = act(G) * U             Triton (_common/elementwise.py)
    Y = H @ Wd.T               bsr_wgmma, bsr_small or bsr_triton

It is the ffn of dense/_layers.py with another format: one product reads X, G and U are read once,
and act(G) is never written. `prepare` prepares every kernel that can run a product, times them all,
and keeps the fastest. The step between the products moves 6 bytes per token and hidden unit: 0.55
GB, or 0.13 ms, at m = 16384 and n = 5632.

Wg and Wu are stacked into one matrix. If n is not a multiple of r, the blocks of Wu are cut again,
starting at the row where Wg ends.
"""

from dataclasses import replace

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.elementwise import hidden
from sparsebench.kernels._common.search import lines_of, search
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr import bsr_small, bsr_triton, bsr_wgmma

PRODUCTS = {"bsr_wgmma": bsr_wgmma, "bsr_small": bsr_small, "bsr_triton": bsr_triton}


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Choose a kernel for each product; `tuned` is passed on to it. Raises Unsupported."""
    wg, wu, wd = (weight_of(operands, name) for name in ("wg", "wu", "wd"))
    both, x = stacked(wg, wu), operands.activations["x"]
    gate_up = fastest(operands, "gate_up", both, x, tuned)
    between = hidden(output_of(gate_up), operands.problem["activation"])
    down = fastest(operands, "down", wd, between(), tuned)

    def run() -> Tensor:
        gate_up()
        between()
        return output_of(down)

    choice = {"gate_up": gate_up.choice, "down": down.choice}
    return Launch(run, choice, gate_up.code, [*gate_up.candidates, *down.candidates])


def stacked(gate: Bsr, up: Bsr) -> Bsr:
    """Return gate and up [n, k] as one matrix [2 n, k] of the same blocks. Raises Unsupported."""
    if gate.block != up.block:
        actual = " and ".join("x".join(map(str, w.block)) for w in (gate, up))
        raise Unsupported(f"expected gate and up of the same blocks, found {actual}")
    return Bsr.from_dense(torch.cat((gate.to_dense(), up.to_dense())), block=[*gate.block])


def fastest(operands: Operands, name: str, w: Bsr, x: Tensor, tuned: Tuned) -> Launch:
    pinned = operands.pinned and operands.pinned[name]
    operands_of_product = replace(operands, weights={"w": w}, activations={"x": x}, pinned=pinned)
    launches: list[Launch] = []
    reasons = []
    for kernel in [pinned["kernel"]] if pinned else PRODUCTS:
        module = PRODUCTS[kernel]
        reason = module.KERNEL.unsupported(operands.problem, x.device)
        try:
            if reason:
                raise Unsupported(reason)
            launch = module.KERNEL.prepare(operands_of_product, tuned=tuned)
        except Unsupported as error:
            reasons.append(f"{kernel}: {error}")
        else:
            launches.append(replace(launch, choice={"kernel": kernel, **launch.choice}))
    if not launches:
        raise Unsupported(f"{name}: {'; '.join(reasons)}")
    result = search(launches, x.device)
    best = launches[result.best]
    kernels = result.lines([{"kernel": launch.choice["kernel"]} for launch in launches], of=name)
    configurations = lines_of(f"{name}, {best.choice['kernel']}", best)
    return replace(best, candidates=[*kernels, *configurations])


def output_of(launch: Launch) -> Tensor:
    """Run a launch and return its dense output."""
    y = launch()
    assert isinstance(y, Tensor)
    return y


def weight_of(operands: Operands, name: str) -> Bsr:
    weight = operands.weights[name]
    assert isinstance(weight, Bsr)
    return weight


KERNEL = Kernel("ffn", "bsr", "cuda", prepare, triton_unsupported)
