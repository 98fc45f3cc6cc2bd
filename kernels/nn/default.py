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

from dataclasses import replace
from functools import partial

import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.kernels._common.operator import Earlier, bucket, launch_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.kernels.nn._default_layers import decoder, layer, plan, unsupported_step
from sparsebench.kernels.nn.matmul import matmul
from sparsebench.results.record import Problem

LAYERS = {"ffn": layer, "mlp": layer, "decoder": decoder}
OPS = "linear", "linear_dgrad", "linear_wgrad", *LAYERS


def prepare(operands: Operands, *, cache: bool = False) -> Launch:
    """Plan the product of the format's weight. Raises Unsupported.

    cache  take what the user's cache has, too, as a user's own call does (`sparsebench tune`)
    """
    op, a = operands.problem.op, operands.activations
    earlier = None if cache else Earlier(operands.pinned, operands.timed)
    if op in LAYERS:
        return LAYERS[op](operands, earlier)
    w = operands.pattern if op == "linear_wgrad" else operands.weights["w"]
    if isinstance(w, Bsr) and op != "linear":
        return _gradient(operands, w, earlier)
    if op != "linear" or w is None:
        raise Unsupported(f"expected op linear for {type(w).__name__}, found {op}")
    if isinstance(w, Dense) and operands.problem["dtype"] == "fp8":
        raise Unsupported("expected a dense weight in 16 or 32 bits, found fp8")
    planned, run = plan(w, a["x"], earlier), partial(matmul, a["x"], w)
    return launch_of(planned[0], run) if planned else Launch(run, {"kernel": "torch"})


def _gradient(operands: Operands, w: Bsr, earlier: Earlier | None) -> Launch:
    """Return the launch of dX or of dW, as a layer in training calls it."""
    dy, pattern = operands.activations["dy"], pattern_of(w.offsets, w.columns)
    is_dx = operands.problem.op == "linear_dgrad"
    other = w.values if is_dx else operands.activations["x"]
    call = BsrCall("dgrad" if is_dx else "wgrad", len(dy), w.shape, w.block, w.values.dtype)
    selected = pattern.select(call._replace(m=bucket(len(dy))), dy, other, earlier)
    run = partial(pattern.run, call, dy, other)
    return launch_of(selected, run if is_dx else lambda: replace(w, values=run()))


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why no layer computes the op, or None; `prepare` asks the format's kernels."""
    if problem.op == "decoder":
        return unsupported_step(problem, device)
    return None if problem.op in OPS else f"expected one of {', '.join(OPS)}, found {problem.op}"


KERNEL = Kernel("any", "any", "cuda", prepare, unsupported)
