"""Whole layers and models with the kernels that users get, for default.py.

ffn, mlp   2:4              SpenseGatedMLP: gate, up and act in one launch, and down
           blocks           BlockSparseGatedMLP: gate and up in one product, act, and down
           others           a product for each weight, and act in torch between them, as in a
                            Hugging Face model after `sparsify_`; also an mlp in blocks
           few active units SparseGatedMLP (ffn only)
decoder    the step of dense/_decoder.py, whose pruned products run the kernels and the
           configurations that the layers choose. A step has fixed buffers, as in a CUDA graph,
           so plans are bound to them instead of being called
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import relu, silu

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.elementwise import scale_of
from sparsebench.kernels._common.selection import Earlier, Selected, config_of
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.bitmap import bitmap_mma
from sparsebench.kernels.bsr import _launch, bsr_resident, bsr_triton
from sparsebench.kernels.bsr.bsr_ffn import stacked, weight_of
from sparsebench.kernels.dense import _decoder
from sparsebench.kernels.dense._decoder import WEIGHTS, Part, copy_of, dense_part, is_pruned
from sparsebench.kernels.nn._frozen_op import DenseCopy, Padded
from sparsebench.kernels.nn._sparse_mlp_op import plan_of
from sparsebench.kernels.nn._spense_op import planned_product
from sparsebench.kernels.nn.block_sparse_mlp import BlockSparseGatedMLP, hidden, layer_of
from sparsebench.kernels.nn.matmul import matmul
from sparsebench.kernels.nn.sparse_gated_mlp import SparseGatedMLP
from sparsebench.kernels.nn.spense import SpenseGatedMLP, SpenseLinear
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense.spense_ffn import joined
from sparsebench.results.record import Problem

Select = Callable[[Format, Tensor, Earlier | None], Selected | None]
"""Return the plan of X @ W.T that a layer chooses; None if torch multiplies."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": silu,
    "relu": relu,
    "relu2": lambda x: relu(x).square(),
}


def layer(operands: Operands, select: Select, earlier: Earlier | None) -> Launch:
    """Return the launch of an ffn or mlp. Raises Unsupported."""
    w, gated = operands.weights, "wg" in operands.weights
    if all(isinstance(weight, Spense) for weight in w.values()) and gated:
        return _spense(operands, earlier)
    if all(isinstance(weight, Bsr) for weight in w.values()) and gated:
        return _blocks(operands, select, earlier)
    if all(not isinstance(weight, Dense) for weight in w.values()):
        return _products(operands, select, earlier)
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
    plan = plan_of(tensors, mlp.activation == "relu2", mlp.slots, earlier)
    return Launch(call, plan.row, plan.product.code, plan.lines)


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
    (n, k), dtype = wg.shape, wg.dtype
    of_h = of_y = None
    if dtype.itemsize == 1:
        of_h = torch.full((2 * n,), scale_of(problem, k), device=x.device)
        of_y = torch.full((k,), scale_of(problem, n), device=x.device)
    options: dict[str, Any] = {"dtype": dtype, "device": "meta"}
    try:
        mlp = SpenseGatedMLP(k, n, dense=0, activation=problem["activation"], **options)
    except FormatError as error:
        raise Unsupported(str(error)) from error
    mlp.gate_up = SpenseLinear.from_spense(joined(wg, wu), scale=of_h)
    mlp.down = SpenseLinear.from_spense(wd, scale=of_y)
    choice: dict[str, Any] = {}
    lines, code, h = [], None, x
    for name, part, activation in (
        ("gate_up", mlp.gate_up, mlp.activation),
        ("down", mlp.down, None),
    ):
        if x.is_cuda:
            previous = earlier and earlier.part(name)
            h, plan = planned_product(h, part.spense, activation, part.scale, previous)
            choice[name] = plan.row
            lines += [{"of": name, **line} for line in plan.lines]
            code = code or plan.product.code
    return Launch(_frozen(mlp, x), choice or {"kernel": "torch"}, code, lines)


def _blocks(operands: Operands, select: Select, earlier: Earlier | None) -> Launch:
    """Return a call of BlockSparseGatedMLP, frozen."""
    wg, wu, wd = (weight_of(operands, name) for name in ("wg", "wu", "wd"))
    activation, h = operands.problem["activation"], operands.activations["x"]
    try:
        layers = layer_of(stacked(wg, wu)), layer_of(wd)
        mlp = BlockSparseGatedMLP(*layers, activation=activation).freeze()
    except FormatError as error:
        raise Unsupported(str(error)) from error
    choice: dict[str, Any] = {}
    lines, code = [], None
    for name, part in (("gate_up", mlp.gate_up), ("down", mlp.down)):
        selected = select(part.bsr, h, earlier and earlier.part(name))
        assert selected is not None
        choice[name] = selected.row
        lines += [{"of": name, **line} for line in selected.lines]
        code = code or selected.product.code
        h = hidden(part(h), activation) if name == "gate_up" else h
    return Launch(_frozen(mlp, operands.activations["x"]), choice, code, lines)


def _products(operands: Operands, select: Select, earlier: Earlier | None) -> Launch:
    """Return the products of a layer, one for each weight, with act in torch between them."""
    w, x = operands.weights, operands.activations["x"]
    act = ACTIVATIONS[operands.problem["activation"]]

    def hidden() -> Tensor:
        up = matmul(x, w["wu"])
        return act(matmul(x, w["wg"])) * up if "wg" in w else act(up)

    choice: dict[str, Any] = {}
    lines, code = [], None
    for name in w:
        previous = earlier and earlier.part(name)
        selected = select(w[name], hidden() if name == "wd" else x, previous)
        if selected is not None:
            choice[name] = selected.row
            lines += [{"of": name, **line} for line in selected.lines]
            code = code or selected.product.code
    call = partial(_second, hidden, w["wd"])
    return Launch(call, choice or {"kernel": "torch"}, code, lines)


def _second(hidden: Callable[[], Tensor], wd: Format) -> Tensor:
    return matmul(hidden(), wd)


# ---- a decoding step ----


def decoder(operands: Operands, select: Select, earlier: Earlier | None) -> Launch:
    """Return the launch of a decoding step. Raises Unsupported."""
    return _decoder.prepare(operands, partial(_part, operands, partial(_product, select, earlier)))


def unsupported_step(problem: Problem, device: torch.device) -> str | None:
    """Return why a decoding step cannot run here, or None."""
    if problem["dtype"] == "fp8":
        return "expected 16 bits: fp8 layers round X, and the norms of a step round it, too"
    return _decoder.unsupported_pruned(problem, device)


def _part(
    operands: Operands, build: Callable[..., Part], name: str, inputs: Sequence[Tensor]
) -> Part:
    w, activation = operands.weights, operands.problem["activation"]
    if not is_pruned(operands.problem, name):
        return dense_part(operands, name, inputs)
    if name != "mlp":
        return build(name, w[WEIGHTS[name]], inputs)
    gate, up = w["wg"], w["wu"]
    if isinstance(gate, Spense) and isinstance(up, Spense):
        gated = build("gate_up", joined(gate, up), inputs, activation)
    else:
        gated = _gated(build("gate", gate, inputs), build("up", up, inputs), activation)
    return _decoder.join(gated, build("down", w["wd"], _decoder.run_once(gated).outs))


def _gated(gate: Part, up: Part, activation: str) -> Part:
    """Return both products, and H = act(G) * U in torch, as a Hugging Face model computes it."""
    act, outs = ACTIVATIONS[activation], [torch.empty_like(out) for out in gate.outs]
    calls: list[Callable[[], object]] = [
        partial(_between, first, second, act, g, u, h)
        for first, second, g, u, h in zip(
            gate.calls, up.calls, gate.outs, up.outs, outs, strict=True
        )
    ]
    candidates = [*gate.candidates, *up.candidates]
    return Part(calls, outs, {**gate.choice, **up.choice}, candidates, gate.code)


def _between(
    gate: Callable[[], object],
    up: Callable[[], object],
    act: Callable[[Tensor], Tensor],
    g: Tensor,
    u: Tensor,
    h: Tensor,
) -> None:
    gate()
    up()
    torch.mul(act(g), u, out=h)


def _product(
    select: Select,
    earlier: Earlier | None,
    name: str,
    w: Format,
    inputs: Sequence[Tensor],
    activation: str | None = None,
) -> Part:
    """Bind the plan that a layer chooses to the inputs of every layer, with copies of W."""
    x, previous = inputs[0], earlier and earlier.part(name)
    if isinstance(w, Spense):
        selected = planned_product(x, w, activation, None, previous)[1]
    elif isinstance(w, Bsr | Bitmap) and (plan := select(w, x, previous)) is not None:
        selected = plan
    else:
        expected = "expected weights in blocks, in 2:4 or as a bitmap"
        raise Unsupported(f"{expected}, found {type(w).__name__}")
    bound = [_bound(selected, x, w), *(_bound(selected, other, copy_of(w)) for other in inputs[1:])]
    choice = {name: selected.row}
    lines = [{"of": name, **line} for line in selected.lines]
    return Part(bound, [part.out for part in bound], choice, lines, selected.product.code)


class _DenseCall(NamedTuple):
    """torch's product with a dense copy of a bitmap, in the same output."""

    x: Tensor
    product: DenseCopy
    out: Tensor

    def __call__(self) -> Tensor:
        if self.product.tokens > len(self.x):  # X is padded
            return self.out.copy_(self.product.run(self.x))
        return torch.mm(self.x, self.product.dense.T, out=self.out)


def _bound(selected: Selected, x: Tensor, w: Format) -> Any:
    """Return a plan on these operands, with a separate output."""
    product, choice = selected.product, selected.choice
    if isinstance(product, spense_wgmma.Product):
        assert isinstance(w, Spense)
        return spense_wgmma.bind(product.plan, x, w)
    if isinstance(w, Bitmap):
        if isinstance(product, DenseCopy):
            copied = DenseCopy(w, Padded(product.tokens))
            return _DenseCall(x, copied, x.new_empty(len(x), w.shape[0]))
        return bitmap_mma.launch(x, w, config_of(bitmap_mma, choice))
    assert isinstance(w, Bsr)
    if isinstance(product, _launch.Product):
        return _launch.bind(product.plan, x, w.values)
    if isinstance(product, bsr_resident.Product):
        return bsr_resident.launch(x, w, product.config)
    return bsr_triton.launch(x, w, config_of(bsr_triton, choice))
