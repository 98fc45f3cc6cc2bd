"""A decoding step as a list of launches, for weights of any format.

    S, Z = norm(X)                                   _decoder_glue.py
    in each layer:
        q | k | v = Z Wqkv.T                         a contender's product
        O = attention(q | k | v)                     _decoder_glue.py
        D = O Wo.T                                   a contender's product
        S, Z = S + D, norm                           _decoder_glue.py
        H = act(Z Wg.T) * (Z Wu.T), D = H Wd.T       a contender's layer
        S, Z = S + D, norm
    Y = Z Wh.T                                       the head, dense

A contender builds a part, such as "down", for all layers at once (`Build`), each with a separate
copy of the weights: it searches for the first layer and takes the result for the others. All
contenders share the kernels between the products. In fp8 these write e4m3, so no launch only
rounds; the kernel of act writes H.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.device import free_bytes
from sparsebench.kernels._common.elementwise import hidden, scale_of
from sparsebench.kernels._common.search import lines_of, part_of
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels._common.triton import unsupported as triton_unsupported
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Launch, Operands
from sparsebench.kernels.dense import _cublaslt, cublas
from sparsebench.kernels.dense._decoder_glue import Attention, attended, fastest_attention, normed
from sparsebench.kernels.dense._gemm import DenseProduct, fastest_way
from sparsebench.kernels.dense._layers import in_turn
from sparsebench.results.record import Problem

EPSILON, ROTARY = 1e-6, 1e6  # as in harness/ops/decoder.py
SPARE = 1 << 30  # bytes beside weights: working memory of products and attention, at most
LAYER = "wqkv", "wo", "wg", "wu", "wd"
MLP_IN = "wg", "wu"
WEIGHTS = {"qkv": "wqkv", "o": "wo", "down": "wd", "head": "wh"}  # the parts that are one product

Stored = TypeVar("Stored", bound=Format)


@dataclass(frozen=True)
class DecoderPart:
    """A part of the step in every layer: calls, their outputs, and choices by product."""

    calls: Sequence[Callable[[], object]]
    outs: Sequence[Tensor]
    choice: Mapping[str, Any]
    candidates: Sequence[Mapping[str, Any]] = ()
    code: str | None = None


class Build(Protocol):
    """Build a part (qkv, o, mlp or head) from existing inputs, one for each layer."""

    def __call__(self, name: str, inputs: Sequence[Tensor]) -> DecoderPart: ...


def prepare(operands: Operands, build: Build) -> Launch:
    """Return the launch of the step with a contender's parts. Raises Unsupported."""
    problem, activations = operands.problem, operands.activations
    x, gains, layers = activations["x"], activations["gains"], problem["layers"]
    require_room(operands)
    stream = torch.empty_like(x)
    rounded = x.new_empty(x.shape, dtype=DTYPES[problem["dtype"]])
    last = torch.empty_like(x)

    def norm(number: int, added: Tensor | None) -> BoundKernel:
        source = x if added is None else stream
        z = rounded if number < 2 * layers else last
        return normed(source, added, gains[number], EPSILON, stream, z)

    first = norm(0, None)
    first()
    qkv = run_once(build("qkv", [rounded] * layers))
    attention, config, timed = _attention(operands, qkv.outs)
    o = run_once(build("o", [attention[0].out] * layers))
    mlp = run_once(build("mlp", [rounded] * layers))
    norm(2 * layers, mlp.outs[-1])()
    head = build("head", [last])
    calls: list[Callable[[], object]] = [first]
    for layer in range(layers):
        calls += [qkv.calls[layer], attention[layer], o.calls[layer]]
        calls += [norm(2 * layer + 1, o.outs[layer]), mlp.calls[layer]]
        calls += [norm(2 * layer + 2, mlp.outs[layer])]
    calls += head.calls
    parts = qkv, o, mlp, head
    choice = {name: each for part in parts for name, each in part.choice.items()}
    candidates = [*timed, *(line for part in parts for line in part.candidates)]

    def run() -> Tensor:
        for call in calls:
            call()
        return head.outs[0]

    return Launch(run, {**choice, "attention": config}, mlp.code, candidates)


def _attention(
    operands: Operands, projected: Sequence[Tensor]
) -> tuple[list[BoundKernel], dict[str, Any], list[dict[str, Any]]]:
    """Return each layer's attention into one tensor, the configuration, and what was timed."""
    problem, activations, pinned = operands.problem, operands.activations, operands.pinned or {}
    m, width, kv_heads = problem["m"], problem["head_dim"], problem["kv_heads"]
    shape = problem["caches"], m, kv_heads, problem["context"], width
    keys, values = (activations[name].view(shape) for name in ("keys", "values"))
    turn = turned(width, problem["context"]).to(operands.device)
    abouts = [
        Attention(problem["heads"], *each, turn, EPSILON) for each in zip(keys, values, strict=True)
    ]
    columns = problem["heads"] * width
    out = projected[0].new_empty(m, columns, dtype=DTYPES[problem["dtype"]])
    page = [projected[0].new_empty(m, kv_heads, width) for _ in range(2)]
    config, candidates = fastest_attention(
        projected[0], abouts[0], out, page, pinned.get("attention")
    )
    launches = [
        attended(each, abouts[layer % len(abouts)], out, config, page)
        for layer, each in enumerate(projected)
    ]
    launches[0]()
    return launches, asdict(config), candidates


def turned(width: int, position: int) -> Tensor:
    """Return fp32 [2, width / 2]: cosine and sine of the angle of each pair at a position."""
    pair = torch.arange(0, width, 2, dtype=torch.float64)
    angle = position * ROTARY ** (-pair / width)
    return torch.stack((angle.cos(), angle.sin())).float()


# ---- dense parts, which every contender has ----


def is_pruned(problem: Problem, name: str) -> bool:
    """Return whether the problem's pattern applies to the weights of a part."""
    return name in (("mlp",) if problem["pruned"] == "mlp" else ("mlp", "qkv", "o"))


def dense_part(operands: Operands, name: str, inputs: Sequence[Tensor]) -> DecoderPart:
    """Build a part of dense weights, from any format."""
    if name != "mlp":
        return _dense_product(operands, name, operands.weights[WEIGHTS[name]].to_dense(), inputs)
    gated = _dense_gated(operands, inputs)
    return join(gated, dense_part(operands, "down", run_once(gated).outs))


def _dense_product(
    operands: Operands, name: str, w: Tensor, inputs: Sequence[Tensor]
) -> DecoderPart:
    """Return X @ W.T of each layer into one tensor, by the fastest call."""
    x, pinned = inputs[0], (operands.pinned or {}).get(name)
    scale = scale_of(operands.problem, w.shape[1]) if name in ("qkv", "o", "down") else 1.0
    out = x.new_empty(len(x), len(w), dtype=OUTPUTS[operands.problem["dtype"]])
    timed = part_of(name, operands.timed)
    first = fastest_way(DenseProduct(x, w.t(), out, scale=scale), pinned, timed=timed)
    shared = _cublaslt.workspace(out.device) if out.is_cuda and len(inputs) > 1 else None
    rest = [
        fastest_way(DenseProduct(x, w.clone().t(), out, scale=scale), first.choice, shared)
        for x in inputs[1:]
    ]
    candidates = lines_of(name, first)
    return DecoderPart([first, *rest], [out] * len(inputs), {name: first.choice}, candidates)


def _dense_gated(operands: Operands, inputs: Sequence[Tensor]) -> DecoderPart:
    """Return H = act(X @ Wg.T) * (X @ Wu.T): one product, and act, which scales its input."""
    problem, (gate, up) = operands.problem, (operands.weights[name].to_dense() for name in MLP_IN)
    part = _dense_product(operands, "gate_up", torch.cat((gate, up)), inputs)
    scale = scale_of(problem, gate.shape[1])
    between = hidden(part.outs[0], problem["activation"], inputs[0].dtype, scale)
    return append_kernels(part, [between] * len(inputs))


def experts_part(
    operands: Operands,
    inputs: Sequence[Tensor],
    layers: Sequence[Callable[[Tensor, Tensor, Tensor], Tensor]],
    choice: Mapping[str, Any],
    candidates: Sequence[Mapping[str, Any]] = (),
) -> DecoderPart:
    """Build the experts of all layers of op experts_decoder, which map X, ids and shares to Y."""
    ids, shares = (operands.activations[name].split(len(inputs[0])) for name in ("ids", "shares"))
    out = torch.empty_like(inputs[0])

    def call(layer: Callable[..., Tensor], *activations: Tensor) -> None:
        out.copy_(layer(*activations))

    parts = zip(layers, inputs, ids, shares, strict=True)
    calls = [partial(call, *each) for each in parts]
    return DecoderPart(calls, [out] * len(inputs), choice, candidates)


def run_once(part: DecoderPart) -> DecoderPart:
    """Run each layer's call of a part: the next part is timed on their outputs."""
    for call in part.calls:
        call()
    return part


def append_kernels(part: DecoderPart, after: Sequence[BoundKernel]) -> DecoderPart:
    """Return a part with one more kernel in each layer, which reads the part's output."""
    calls = [in_turn(*both) for both in zip(part.calls, after, strict=True)]
    outs, code = [each.out for each in after], part.code or after[0].code
    return replace(part, calls=calls, outs=outs, code=code)


def join(gated: DecoderPart, down: DecoderPart) -> DecoderPart:
    calls = [in_turn(*both) for both in zip(gated.calls, down.calls, strict=True)]
    choice = {**gated.choice, **down.choice}
    return DecoderPart(calls, down.outs, choice, [*gated.candidates, *down.candidates], gated.code)


def copy_of(weight: Stored) -> Stored:
    """Return a copy of a weight; blocks share their index, which the plans of all layers read."""
    shared = ("offsets", "columns") if isinstance(weight, Bsr) else ()
    arrays = {name: a.clone() for name, a in weight.arrays().items() if name not in shared}
    return replace(weight, **arrays)  # type: ignore[type-var]


# ---- what cannot run ----


def unsupported(problem: Problem, device: torch.device) -> str | None:
    if problem["dtype"] == "fp8":
        return cublas.unsupported_8_bits("fp8", device)
    return cublas.unsupported(problem, device) or triton_unsupported(problem, device)


def require_room(operands: Operands) -> None:
    """Raise Unsupported unless the copies of the weights fit into the free memory."""
    if operands.device.type != "cuda":
        return
    stored = sum(operands.weights[name].stored_bytes for name in LAYER)
    needed, room = operands.problem["layers"] * stored + SPARE, free_bytes(operands.device)
    if needed > room:
        actual = f"found a device that has room for {room / 1e9:.1f} GB"
        raise Unsupported(
            f"needs at least {needed / 1e9:.1f} GB for the weights of all layers, {actual}"
        )
