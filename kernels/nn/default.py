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
    ffn, mlp   2:4      SpenseGatedMLP: gate, up and act in one launch, and down
               blocks   BlockSparseGatedMLP: gate and up in one product, act, and down
               others   a product for each weight, and act in torch between them, as in a Hugging
                        Face model after `sparsify_`; also an mlp in blocks
               few active units: SparseGatedMLP (ffn only)
    experts_ffn         SparseExperts, of 2:4 or of blocks (_experts_default.py)
    attention           sparsebench.attention
    decoder             the step of dense/_decoder.py, whose pruned products run the kernels and the
                        configurations that the layers choose, into fixed buffers as in a CUDA graph
    experts_decoder     the same with SparseExperts
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.block_mask import BlockMask
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.elementwise import hidden as hidden_of
from sparsebench.kernels._common.elementwise import scale_of
from sparsebench.kernels._common.gated_layer import launch_of_layer
from sparsebench.kernels._common.operator import Earlier, ahead, bucket, launch_of
from sparsebench.kernels._common.product import Selected
from sparsebench.kernels._common.search import lines_of
from sparsebench.kernels._kernel import Kernel, Launch, Operands
from sparsebench.kernels.attention._call import bind
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.kernels.bsr.experts_ffn_triton import gate_above_up
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.dense._decoder import (
    WEIGHTS,
    DecoderPart,
    append_kernels,
    copy_of,
    dense_part,
    is_pruned,
)
from sparsebench.kernels.dense._layers import in_turn
from sparsebench.kernels.nn import _frozen_op, _spense_op
from sparsebench.kernels.nn._attention_op import ENGINES, plans_of
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from sparsebench.kernels.nn._experts_default import launch_of_mixture, mixture_part
from sparsebench.kernels.nn.attention import attention
from sparsebench.kernels.nn.block_sparse_mlp import (
    ACTIVATIONS,
    BlockSparseGatedMLP,
    hidden,
    layer_of,
)
from sparsebench.kernels.nn.matmul import matmul
from sparsebench.kernels.nn.sparse_gated_mlp import SparseGatedMLP, plan_of
from sparsebench.kernels.nn.spense import SpenseGatedMLP
from sparsebench.kernels.spense.spense_ffn import joined
from sparsebench.results.record import Problem

DECODERS = "decoder", "experts_decoder"
OPS = "linear", "linear_dgrad", "linear_wgrad", "ffn", "mlp", "experts_ffn", "attention", *DECODERS


def prepare(operands: Operands, *, cache: bool = False) -> Launch:
    """Plan the product of the format's weight. Raises Unsupported.

    cache  take what the user's cache has, too, as a user's own call does (`sparsebench tune`)
    """
    if not cache:
        return _prepare(operands, Earlier(operands.pinned, operands.timed))
    with ahead(search=True):
        return _prepare(operands, None)


def _prepare(operands: Operands, earlier: Earlier | None) -> Launch:
    op, a = operands.problem.op, operands.activations
    if op in ("ffn", "mlp", *DECODERS):
        return (decoder if op in DECODERS else layer)(operands, earlier)
    if op in ("attention", "experts_ffn"):
        return (_attention if op == "attention" else launch_of_mixture)(operands, earlier)
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


def _attention(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return a call of sparsebench.attention without a gradient."""
    mask, problem = operands.weights["mask"], operands.problem
    assert isinstance(mask, BlockMask)
    flat = [operands.activations[name] for name in ("q", "k", "v")]
    q, k, v = (
        x.view(mask.batch, -1, x.shape[1] // problem["head_dim"], problem["head_dim"]) for x in flat
    )

    def run() -> Tensor:
        return attention(q, k, v, mask, scale=problem["scale"]).view_as(flat[0])

    if not q.is_cuda:
        return Launch(run, {"kernel": "torch"})
    bound = bind(operands, ENGINES)
    selected = plans_of(mask).select(bound.call, bound.run, earlier)
    return launch_of(selected, run)


def unsupported(problem: Problem, device: torch.device) -> str | None:
    """Return why no layer computes the op, or None; `prepare` asks the format's kernels."""
    if problem.op in DECODERS:
        return _decoder.unsupported(problem, device)
    return None if problem.op in OPS else f"expected one of {', '.join(OPS)}, found {problem.op}"


def plan(
    w: Format,
    x: Tensor,
    earlier: Earlier | None,
    activation: str | None = None,
    scale: Tensor | None = None,
) -> tuple[Selected, tuple[Tensor | None, ...]] | None:
    """Return the plan of a frozen weight on a GPU, and what its product reads of the weight.

    None if torch multiplies. An activation and the scales [n] of fp8 are for 2:4. Raises
    Unsupported.
    """
    if isinstance(w, Bsr):
        selected = frozen_plan(w, x, earlier)
        return selected, (selected.product.packed(w.values),)
    if isinstance(w, Spense) and x.is_cuda:
        selected = _spense_op.planned_product(x, w, activation, scale, earlier)[1]
        return selected, (w.sparse, w.dense, scale, None)
    if isinstance(w, Bitmap | Csr) and x.is_cuda:
        return _frozen_op.select(x, w, earlier), ()
    return None


def frozen_plan(w: Bsr, x: Tensor, earlier: Earlier | None) -> Selected:
    """Return the plan of Y for blocks that are not trained."""
    pattern = pattern_of(w.offsets, w.columns)
    pattern.frozen = True
    call = BsrCall("linear", bucket(len(x)), w.shape, w.block, w.values.dtype, live=False)
    return pattern.select(call, x, w.values, earlier)


def layer(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return the launch of an ffn or mlp. Raises Unsupported."""
    w, gated = operands.weights, "wg" in operands.weights
    if all(isinstance(weight, Spense) for weight in w.values()) and gated:
        return _spense(operands, earlier)
    if all(isinstance(weight, Bsr) for weight in w.values()) and gated:
        return _blocks(operands, earlier)
    if all(not isinstance(weight, Dense) for weight in w.values()):
        return _products(operands, earlier)
    if not gated:
        raise Unsupported("expected an ffn: no layer computes an mlp with few active units")
    try:
        weights = (w[name].to_dense() for name in ("wg", "wu", "wd"))
        mlp = SparseGatedMLP.from_dense(*weights, activation=operands.problem["activation"])
    except FormatError as error:
        raise Unsupported(str(error)) from error
    x = operands.activations["x"]
    call = _frozen(mlp, x)
    if not x.is_cuda:
        return Launch(call, {"kernel": "torch"})
    tensors: list[Tensor] = [x, mlp.gate.weight, mlp.up.weight, mlp.down.weight_t]
    return launch_of(plan_of(tensors, mlp.activation == "relu2", mlp.slots, earlier), call)


def _frozen(mlp: torch.nn.Module, x: Tensor) -> Callable[[], Tensor]:
    """Return a call of a layer without gradients."""
    mlp.requires_grad_(False)

    def call() -> Tensor:
        y: Tensor = mlp(x)
        return y

    return call


def _spense(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return a call of SpenseGatedMLP."""
    problem, x = operands.problem, operands.activations["x"]
    wg, wu, wd = (operands.weights[name] for name in ("wg", "wu", "wd"))
    assert isinstance(wg, Spense)
    assert isinstance(wu, Spense)
    assert isinstance(wd, Spense)
    n, k = wg.shape
    scales: tuple[Tensor | None, Tensor | None] = None, None
    if wg.dtype.itemsize == 1:
        full = partial(torch.full, device=x.device)
        scales = full((2 * n,), scale_of(problem, k)), full((k,), scale_of(problem, n))
    try:
        mlp = SpenseGatedMLP.from_spense(joined(wg, wu), wd, problem["activation"], scales)
    except FormatError as error:
        raise Unsupported(str(error)) from error
    parts: dict[str, Selected | None] = {}
    for name, activation in {"gate_up": mlp.activation, "down": None}.items():
        if operands.device.type == "cuda":
            part, previous = getattr(mlp, name), earlier and earlier.part(name)
            x, parts[name] = _spense_op.planned_product(
                x, part.spense, activation, part.scale, previous
            )
    return launch_of_layer(_frozen(mlp, operands.activations["x"]), parts)


def _blocks(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return a call of BlockSparseGatedMLP, frozen."""
    wg, wu, wd = (operands.weights[name] for name in ("wg", "wu", "wd"))
    assert isinstance(wg, Bsr)
    assert isinstance(wu, Bsr)
    assert isinstance(wd, Bsr)
    x, activation = operands.activations["x"], operands.problem["activation"]
    try:
        layers = layer_of(gate_above_up(wg, wu)), layer_of(wd)
        mlp = BlockSparseGatedMLP(*layers, activation=activation).freeze()
    except FormatError as error:
        raise Unsupported(str(error)) from error
    parts: dict[str, Selected | None] = {}
    for name in ("gate_up", "down"):
        a = x if name == "gate_up" else hidden(mlp.gate_up(x), activation)
        parts[name] = frozen_plan(getattr(mlp, name).bsr, a, earlier and earlier.part(name))
    return launch_of_layer(_frozen(mlp, x), parts)


def _products(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return the products of a layer, one for each weight, with act in torch between them."""
    w, x = operands.weights, operands.activations["x"]
    act = ACTIVATIONS[operands.problem["activation"]]

    def hidden_units() -> Tensor:
        up = matmul(x, w["wu"])
        return act(matmul(x, w["wg"])) * up if "wg" in w else act(up)

    parts: dict[str, Selected | None] = {}
    for name in w:
        a, previous = hidden_units() if name == "wd" else x, earlier and earlier.part(name)
        planned = plan(w[name], a, previous)
        parts[name] = planned and planned[0]
    return launch_of_layer(lambda: matmul(hidden_units(), w["wd"]), parts)


# ---- a decoding step ----


def decoder(operands: Operands, earlier: Earlier | None) -> Launch:
    """Return the launch of a decoding step. Raises Unsupported."""
    return _decoder.prepare(operands, partial(_part, operands, earlier))


def _part(
    operands: Operands, earlier: Earlier | None, name: str, inputs: Sequence[Tensor]
) -> DecoderPart:
    w, problem = operands.weights, operands.problem
    if not is_pruned(problem, name):
        return dense_part(operands, name, inputs)
    if problem.op == "experts_decoder":
        return mixture_part(operands, earlier, inputs)
    product = partial(_product, problem, earlier)
    if name != "mlp":
        return product(name, w[WEIGHTS[name]], inputs)
    gate, up, activation = w["wg"], w["wu"], problem["activation"]
    if isinstance(gate, Spense) and isinstance(up, Spense):
        gated = product("gate_up", joined(gate, up), inputs, activation)
    elif isinstance(gate, Bsr) and isinstance(up, Bsr):
        both = product("gate_up", gate_above_up(gate, up), inputs)
        gated = append_kernels(both, [hidden_of(y, activation) for y in both.outs])
    else:
        gated = _gated(product("gate", gate, inputs), product("up", up, inputs), activation)
    return _decoder.join(gated, product("down", w["wd"], _decoder.run_once(gated).outs))


def _gated(gate: DecoderPart, up: DecoderPart, activation: str) -> DecoderPart:
    """Return both products, and H = act(G) * U in torch, as a Hugging Face model computes it."""
    act, outs = ACTIVATIONS[activation], [torch.empty_like(out) for out in gate.outs]

    def between(g: Tensor, u: Tensor, h: Tensor) -> None:
        torch.mul(act(g), u, out=h)

    thirds = [partial(between, *each) for each in zip(gate.outs, up.outs, outs, strict=True)]
    calls = [in_turn(*each) for each in zip(gate.calls, up.calls, thirds, strict=True)]
    candidates = [*gate.candidates, *up.candidates]
    return DecoderPart(calls, outs, {**gate.choice, **up.choice}, candidates, gate.code)


def _product(
    problem: Problem,
    earlier: Earlier | None,
    name: str,
    w: Format,
    inputs: Sequence[Tensor],
    activation: str | None = None,
) -> DecoderPart:
    """Plan the product that a layer chooses, for each layer's input, with a copy of W."""
    fp8 = problem["dtype"] == "fp8"
    if fp8 and not isinstance(w, Spense):
        raise Unsupported(f"expected 16 bits or weights in 2:4, found {type(w).__name__} in fp8")
    scale = torch.full((w.shape[0],), scale_of(problem, w.shape[1]), device=inputs[0].device)
    previous, calls, outs = earlier and earlier.part(name), [], []
    for number, x in enumerate(inputs):
        layer = w if number == 0 else copy_of(w)
        planned = plan(layer, x, previous, activation, scale if fp8 else None)
        if planned is None:
            raise Unsupported(f"expected weights that our kernels read, found {type(w).__name__}")
        selected, stored = planned
        out = selected.product.run(x, *stored)
        calls.append(partial(selected.product.run, x, *stored, out=out))
        outs.append(out)
        if number == 0:
            first, previous = launch_of(selected, calls[0]), Earlier(selected.row, ())
    return DecoderPart(calls, outs, {name: first.choice}, lines_of(name, first), first.code)


KERNEL = Kernel("any", "any", "cuda", prepare, unsupported)
