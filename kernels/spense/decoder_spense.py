"""A decoding step of a whole model on Hopper; spense_wgmma multiplies the pruned weights.

kernels/dense/_decoder.py draws the step and has the rest: norms, attention, the head, and, if only
the MLP is pruned (the problem's `pruned`), the projections as their fastest dense products. Gate
and up are one launch that writes H (spense_ffn.py), in e4m3 for fp8.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.elementwise import scale_of
from sparsebench.kernels._common.scales import Scales
from sparsebench.kernels._common.search import lines_of
from sparsebench.kernels._common.tuned_table import Tuned
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.dense._decoder import WEIGHTS, Part, copy_of, dense_part, is_pruned
from sparsebench.kernels.spense import spense_ffn, spense_wgmma
from sparsebench.kernels.spense._operands import weight_of
from sparsebench.kernels.spense.spense_wgmma import Config
from sparsebench.results.record import Problem


def prepare(operands: Operands, *, tuned: Tuned = True) -> Launch:
    """Choose a configuration for each product; `tuned` is that of spense_wgmma."""
    return _decoder.prepare(operands, partial(_part, operands, tuned))


def _part(operands: Operands, tuned: Tuned, name: str, inputs: Sequence[Tensor]) -> Part:
    if not is_pruned(operands.problem, name):
        return dense_part(operands, name, inputs)
    if name != "mlp":
        w = weight_of(operands.weights, WEIGHTS[name])
        return _product(operands, name, w, inputs, None, tuned)
    wg, wu, wd = (weight_of(operands.weights, name) for name in ("wg", "wu", "wd"))
    both = spense_ffn.joined(wg, wu)
    activation = operands.problem["activation"]
    gated = _product(operands, "gate_up", both, inputs, activation, tuned)
    down = _product(operands, "down", wd, _decoder.run_once(gated).outs, None, tuned)
    return _decoder.join(gated, down)


def _product(
    operands: Operands,
    name: str,
    w: Spense,
    inputs: Sequence[Tensor],
    activation: str | None,
    tuned: Tuned,
) -> Part:
    """Search for the first layer; bind its configuration to the others, with copies of W."""
    (n, k), x = w.shape, inputs[0]
    fp8 = operands.problem["dtype"] == "fp8"
    of_y = torch.full((n,), scale_of(operands.problem, k), device=x.device) if fp8 else None
    product: dict[str, Any] = {
        "weights": {"w": w},
        "activations": {"x": x},
        "pinned": (operands.pinned or {}).get(name),
    }
    first = spense_wgmma.prepare(
        replace(operands, **product), activation, Scales(of_y), tuned=tuned
    )
    config = Config(
        **{f.name: first.choice[f.name] for f in fields(Config) if f.name in first.choice}
    )
    plan = spense_wgmma.plan(w, len(x), config, activation=activation)
    rest = [spense_wgmma.bind(plan, x, copy_of(w), Scales(of_y)) for x in inputs[1:]]
    y = first()
    assert isinstance(y, Tensor)
    outs = [y, *(launch.out for launch in rest)]
    return Part([first, *rest], outs, {name: first.choice}, lines_of(name, first), first.code)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    return spense_wgmma.KERNEL.unsupported(problem, device) or _decoder.unsupported_pruned(
        problem, device
    )


KERNEL = Kernel("decoder", "spense", "cuda", prepare, unsupported)
