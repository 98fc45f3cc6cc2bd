"""What users get: the kernel that `sparsebench.matmul` and the layers choose for a format.

A suite gets it by a contender without a kernel: `{format: bsr, params: {block: $block}}`. `prepare`
plans the product as the first call of a layer does, with a search, and every timed call is a call
as users make it. `Launch.choice` names the kernel and the configuration that ran. On a CPU, layers
multiply by torch, which says nothing about a format, so suites do not run it there.

A user's later process takes the choice from the user's cache. A process of a run does not: it takes
the package's list, or else it searches anew, in a verdict among the finalists of the first process.
So the intervals cover the choice, as those of the other kernels do.

    linear              a frozen weight (BlockSparseLinear.freeze): packed once
    linear_dgrad        a weight in training: packed at every call
    linear_wgrad        blocks of the gradient
    ffn, mlp, decoder   layers, and a step of a model (_default_layers.py)
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.selection import Earlier, Selected, bucket
from sparsebench.kernels._kernel import Kernel, Launch, Operands, Output
from sparsebench.kernels.nn import _frozen_op, _spense_op
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.kernels.nn._bsr_plans import Call
from sparsebench.kernels.nn._default_layers import decoder, layer, unsupported_step
from sparsebench.kernels.nn.matmul import matmul
from sparsebench.results.record import Problem

LAYERS = {"ffn": layer, "mlp": layer, "decoder": decoder}
OPS = "linear", "linear_dgrad", "linear_wgrad", *LAYERS


def prepare(operands: Operands, *, cache: bool = False) -> Launch:
    """Plan the product of the format's weight. Raises Unsupported.

    cache  take what the user's cache has, too, as a user's own call does (`sparsebench tune`)
    """
    op = operands.problem.op
    earlier = None if cache else Earlier(operands.pinned, operands.timed)
    if op in LAYERS:
        return LAYERS[op](operands, _select, earlier)
    weight = operands.pattern if op == "linear_wgrad" else operands.weights["w"]
    selected: Selected | None
    run: Callable[[], Output]
    if isinstance(weight, Bsr):
        selected, run = _bsr(operands, weight, earlier)
    elif op != "linear" or weight is None:
        raise Unsupported(f"expected op linear for {type(weight).__name__}, found {op}")
    elif isinstance(weight, Dense) and operands.problem["dtype"] == "fp8":
        raise Unsupported("expected a dense weight in 16 or 32 bits, found fp8")
    else:
        x = operands.activations["x"]
        selected, run = _select(weight, x, earlier), partial(matmul, x, weight)
    if selected is None:
        return Launch(run, {"kernel": "torch"})
    return Launch(run, selected.row, selected.product.code, selected.lines)


def _bsr(
    operands: Operands, w: Bsr, earlier: Earlier | None
) -> tuple[Selected, Callable[[], Output]]:
    """Return the plan of a block-sparse product, and the call that a layer makes."""
    op, activations = operands.problem.op, operands.activations
    pattern, sizes = pattern_of(w.offsets, w.columns), (w.shape, w.block, w.values.dtype)
    if op == "linear":
        x = activations["x"]
        return _frozen(w, x, earlier), partial(matmul, x, w)
    dy = activations["dy"]
    if op == "linear_dgrad":
        call = Call("dgrad", len(dy), *sizes)
        selected = pattern.select(call._replace(m=bucket(len(dy))), dy, w.values, earlier)
        return selected, partial(pattern.run, call, dy, w.values)
    x = activations["x"]
    call = Call("wgrad", len(dy), *sizes)
    selected = pattern.select(call._replace(m=bucket(len(dy))), dy, x, earlier)
    return selected, lambda: replace(w, values=pattern.run(call, dy, x))


def _frozen(w: Bsr, x: Tensor, earlier: Earlier | None) -> Selected:
    """Return the plan of Y for blocks that are not trained."""
    pattern = pattern_of(w.offsets, w.columns)
    pattern.frozen = True
    call = Call("linear", bucket(len(x)), w.shape, w.block, w.values.dtype, live=False)
    return pattern.select(call, x, w.values, earlier)


def _select(w: Format, x: Tensor, earlier: Earlier | None) -> Selected | None:
    """Return the plan of a frozen weight; None if torch multiplies it."""
    m = bucket(len(x))
    if isinstance(w, Bsr):
        return _frozen(w, x, earlier)
    if isinstance(w, Spense) and x.is_cuda:
        return _spense_op.planned_product(x, w, None, None, earlier)[1]
    if isinstance(w, Bitmap | Csr) and x.is_cuda:
        return _frozen_op.plans_of(w).operator.select(m, lambda p: partial(p.run, x), earlier)
    return None


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why no layer computes the op, or None; `prepare` asks the format's kernels."""
    if problem.op == "decoder":
        return unsupported_step(problem, device)
    return None if problem.op in OPS else f"expected one of {', '.join(OPS)}, found {problem.op}"


KERNEL = Kernel("any", "any", "cuda", prepare, unsupported)
