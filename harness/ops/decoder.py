"""One decoding step of a transformer: Y[m, vocab], the logits of m sequences, one token each.

    S = X                                             the stream [m, hidden]
    in each of the layers:
        q | k | v = norm(S) Wqkv.T                    heads, kv_heads, kv_heads times head_dim
        q, k = turned(unit(q)), turned(unit(k))       RMS norm of each head; rotary embedding
        p = softmax(q (keys and k).T / sqrt(head_dim))
        S += p (values and v) Wo.T
        Z = norm(S)
        S += (act(Z Wg.T) * (Z Wu.T)) Wd.T
    Y = norm(S) Wh.T                                  the head

norm is RMS norm times a row of gains [2 layers + 1, hidden]. A head of the cache serves
heads / kv_heads heads of queries. It holds `context` tokens of each sequence, with keys already
turned. The step's token follows them and also attends to itself. Qwen3 is such a model.

All layers have the values of one drawn layer, because fp64 has room for one only. A kernel keeps a
copy of it for each layer, so that memory is read as if all were different. Each layer has its own
gains. There are `caches` caches, which layers take in turn: a large model's layer evicts them from
the L2 cache. Weights drawn with zeros, and cached values, are scaled by a power of two, such that
attention and MLP each add about as much to the stream as it holds.

With `active`, that many units of a layer are on for a sequence, on average, and only those count as
work (ffn.py). Column 0 of S is 1 in every layer: row 0 of Wo and Wd is zero. Column 0 of Wg is -1,
so the sum of the other columns must exceed gains[2 layer + 1, 0]. That gain follows from the
operands, layer by layer in fp64 (`derive`), and is then rounded to the dtype, which moves the mean
by up to 3 %. Wd is scaled up by a power of two, because few units add little.

    pruned  mlp: the pattern applies to Wg, Wu and Wd; all: also to Wqkv and Wo; never to Wh
    fp8     Wqkv, Wo, Wg, Wu, Wd as in ffn.py; all else in bf16. A kernel rounds what it multiplies
            with them to e4m3, at a scale of 1

Errors are carried from layer to layer (`spread`). In bf16 the bound is 4 to 5 times the error of a
correct kernel, in fp8 1.3 to 2.3 times (harness/NOTES.md). So an omission in one layer of many is
found in bf16, or with few layers.
"""

from collections.abc import Callable, Mapping
from math import log2
from statistics import NormalDist
from typing import Any, Literal, NamedTuple, Self

import torch
from pydantic import Field, PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from sparsebench.harness.ops._active import all_active, share
from sparsebench.harness.ops._op import Fields, Op, Operand, Values, require_field, require_groups
from sparsebench.harness.ops._varied import Varied, by_squares, fine_of, gated, product
from sparsebench.harness.ops.ffn import _with_scale, act_of, require_values_of_e4m3
from sparsebench.kernels._kernel import OUTPUTS, unit_scale
from sparsebench.results.record import Problem

LAYER = "wqkv", "wo", "wg", "wu", "wd"  # the weights of a layer; the other one is the head's
REST = "wh", "gains", "keys", "values", "x"
MLP, UNITS = ("wg", "wu", "wd"), "intermediate"
EXAMPLE = {
    "hidden": 6, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 7, "vocab": 5,
    "m": 3, "layers": 1, "context": 5, "caches": 1,
}  # fmt: skip
EPSILON = 1e-6  # added in RMS norms
ROTARY = 1e6  # base of the rotary embedding, as Qwen3 has it


class DecoderFields(Fields):
    """A problem of this op; m is the number of sequences."""

    dtype: Literal["fp16", "bf16", "fp32", "fp8"]
    m: PositiveInt
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate: PositiveInt
    vocab: PositiveInt
    layers: PositiveInt
    context: PositiveInt
    caches: PositiveInt = 1
    activation: Literal["silu", "relu", "relu2"] = "silu"
    pruned: Literal["mlp", "all"] = "mlp"
    active: float | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        """Raise ValueError for impossible heads, and for values that e4m3 cannot hold."""
        require_groups(self.heads, self.kv_heads)
        require_field(self.head_dim % 2 == 0, "an even head_dim", self.head_dim)
        few = self.caches <= self.layers
        require_field(few, f"caches up to layers, {self.layers}", self.caches)
        require_values_of_e4m3(self.dtype, self.sparsity)
        if self.active is None:
            return self
        if self.activation == "silu" or self.dtype == "fp8" or self.pattern != "dense":
            expected = "relu or relu2, 16 or 32 bits and the pattern dense with active"
            raise ValueError(f"{expected}, not {self.activation}, {self.dtype}, {self.pattern}")
        few = self.active < self.intermediate
        require_field(few, f"active below intermediate, {self.intermediate}", self.active)
        return self


def sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields and the derived columns of projections and rows of caches."""
    heads, of_cache, width = fields["heads"], fields["kv_heads"], fields["head_dim"]
    rows = fields.get("caches", 1) * fields["m"] * of_cache * fields["context"]
    return {
        **fields,
        "projected": (heads + 2 * of_cache) * width,
        "attended": heads * width,
        "norms": 2 * fields["layers"] + 1,
        "cache_rows": rows,
    }


def definition(*, fields: Values, **operands: Tensor) -> Tensor:
    """Return Y [m, vocab] in the operands' dtype; weights stored in fp8 are computed in fp32."""
    activation = fields["activation"]
    wg, wu, wd = (_with_scale(operands[name], fields["dtype"]) for name in MLP)

    def mlp(layer: int, z: Tensor) -> Tensor:
        return linear(act_of(linear(z, wg), activation) * linear(z, wu), wd)

    y = logits(fields, operands, mlp)
    return y.bfloat16() if operands["wg"].dtype == torch.float8_e4m3fn else y


def logits(
    fields: Values, operands: Mapping[str, Tensor], mlp: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """Return Y [m, vocab]; `mlp` maps a layer and the stream's norm to a summand of the stream."""
    wqkv, wo = (_with_scale(operands[name], fields["dtype"]) for name in ("wqkv", "wo"))
    wh, gains, keys, values, s = (operands[name].to(wo.dtype) for name in REST)
    keys, values = (by_sequence(t, fields) for t in (keys, values))
    for layer in range(len(gains) // 2):
        z, cache = _norm(s, gains[2 * layer]), layer % fields["caches"]
        s = s + attended(z, wqkv, wo, keys[cache], values[cache])
        s = s + mlp(layer, _norm(s, gains[2 * layer + 1]))
    return linear(_norm(s, gains[-1]), wh)


def derive(
    problem: Problem, weights: Mapping[str, Tensor], activations: Mapping[str, Tensor]
) -> None:
    """Write the gains of column 0 before each MLP, if `active` is set."""
    if problem.fields.get("active") is None:
        return
    wqkv, wo, wg, wu, wd = (weights[name].double() for name in LAYER)
    gains, count = activations["gains"], round(problem["active"] * problem["m"])
    keys, values, s = (activations[name].double() for name in ("keys", "values", "x"))
    keys, values = (by_sequence(t, problem.fields) for t in (keys, values))
    for layer in range(problem["layers"]):
        z, cache = _norm(s, gains[2 * layer].double()), layer % problem["caches"]
        s = s + attended(z, wqkv, wo, keys[cache], values[cache])
        z = _norm(s, gains[2 * layer + 1].double())
        z[:, 0] = 0
        unit = (s.square().mean(1, True) + EPSILON).sqrt()  # inverse of what a gain of 1 makes of 1
        last = (linear(z, wg) * unit).flatten().topk(count + 1).values[-2:]
        gains[2 * layer + 1, 0] = last.mean()
        z = _norm(s, gains[2 * layer + 1].double())
        s = s + linear(act_of(linear(z, wg), problem["activation"]) * linear(z, wu), wd)


def spread(*, fields: Values, **operands: Tensor) -> Tensor:
    """Carry the variance of every value through the layers, in units of eps², to that of Y.

    The operands of a product were rounded, and so were its result and the stream after each sum.
    Errors of different values count as independent, and each step as linear in them.
    """
    wg, wu, wd = (_with_scale(operands[name], fields["dtype"]) for name in MLP)
    fine = fine_of(fields)

    def mlp(layer: int, z: Tensor, var: Tensor) -> Varied:
        return gated(z, var, (wg, wu, wd), fields["activation"], fine)

    return spread_of_logits(fields, operands, mlp)


def spread_of_logits(
    fields: Values,
    operands: Mapping[str, Tensor],
    mlp: Callable[[int, Tensor, Tensor], Varied],
) -> Tensor:
    """Return the spread of Y; `mlp` maps a layer and a varied input to its varied summand."""
    wqkv, wo = (_with_scale(operands[name], fields["dtype"]) for name in ("wqkv", "wo"))
    wh, gains, keys, values, s = (operands[name] for name in REST)
    keys, values = (by_sequence(t, fields) for t in (keys, values))
    fine, var_s, caches = fine_of(fields), torch.zeros_like(s), fields["caches"]

    def added(y: Tensor, var: Tensor) -> Varied:
        return s + y, var_s + var + fine * (s + y).square()

    for layer in range(len(gains) // 2):
        z, var = _norm(s, gains[2 * layer]), _norm_of(var_s, s, gains[2 * layer])
        projected, var = product(z, var, wqkv, fine)
        cache = keys[layer % caches], values[layer % caches]
        o, var = attention_and_variance(projected, var, *cache, fine)
        s, var_s = added(*product(o, var, wo, fine))
        z, var = _norm(s, gains[2 * layer + 1]), _norm_of(var_s, s, gains[2 * layer + 1])
        s, var_s = added(*mlp(layer, z, var))
    z, var = _norm(s, gains[-1]), _norm_of(var_s, s, gains[-1])
    return by_squares(var + fine * z.square(), wh).sqrt()


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per sequence and non-zero, and those of attention.

    If Wo has no non-zero, attention is not needed.
    """
    off = (1 - share(problem, UNITS)) * (nnz["wu"] + nnz["wd"])
    multiplied = problem["layers"] * (sum(nnz[name] for name in LAYER) - off) + nnz["wh"]
    tokens = problem["context"] + 1 if nnz["wo"] else 0
    attended = problem["heads"] * problem["head_dim"] * tokens
    return float(2 * problem["m"] * (multiplied + 2 * problem["layers"] * attended))


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of each layer's non-zeros and cache, of the head, of X and of Y."""
    wide, m = OUTPUTS[problem["dtype"]].itemsize, problem["m"]
    off = (1 - share(problem, UNITS)) ** m * (nnz["wu"] + nnz["wd"])  # for all sequences
    weights = itemsize * (sum(nnz[name] for name in LAYER) - off)
    cache = 2 * m * problem["kv_heads"] * problem["head_dim"] * problem["context"]
    rest = nnz["wh"] + m * (problem["hidden"] + problem["vocab"])
    return int(problem["layers"] * (weights + wide * cache) + wide * rest)


def prunes(fields: Mapping[str, Any], weight: str) -> bool:
    """Return whether the pattern applies to a weight."""
    return weight in (MLP if fields["pruned"] == "mlp" else LAYER)


def copies(fields: Mapping[str, Any], operand: str) -> int:
    """Return how many copies of an operand a kernel holds: one per layer for weights."""
    return int(fields["layers"]) if operand in LAYER else 1


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Scale drawn operands by powers of two, so that each part of the model matters."""
    power = 0
    if name == "keys":
        power = 1  # scores with a deviation near 2, so that a query prefers some tokens
    elif name == "values":
        power = round(log2(problem["context"]) / 2) - 3  # the mean of many values is small
    elif name in LAYER and prunes(problem.fields, name):
        power = round(-log2(1 - problem["sparsity"]) / 2)
    elif name == "wh" and problem["dtype"] == "fp8":  # drawn as if it were stored in fp8
        power = round(log2(unit_scale(problem["hidden"])))
    active = problem.fields.get("active") is not None
    if name == "wd" and active:
        power += round(-log2(_square_of_few(share(problem, UNITS)) / 0.5) / 2)
    if power:
        operand.copy_(operand.float() * 2.0**power)
    if active:
        if name in ("wo", "wd"):
            operand[0] = 0
        elif name in ("wg", "x"):
            operand[:, 0] = -1 if name == "wg" else 1


def _square_of_few(part: float) -> float:
    """Return the mean square of max(g - c, 0) for normal g, where P(g > c) is `part`."""
    c = NormalDist().inv_cdf(1 - part)
    return (1 + c * c) * part - c * NormalDist().pdf(c)


def _norm(x: Tensor, gain: Tensor | None = None) -> Tensor:
    return rms_norm(x, (x.shape[-1],), gain, EPSILON)


def _norm_of(variance: Tensor, x: Tensor, gain: Tensor | None = None) -> Tensor:
    """Carry the variance of x through its norm."""
    scaled = variance if gain is None else variance * gain.square()
    return scaled / (x.square().mean(-1, True) + EPSILON)


class _Heads(NamedTuple):
    """Queries [m, kv_heads, group, head_dim]; key and value of the token [m, kv_heads, 1, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor


def attended(z: Tensor, wqkv: Tensor, wo: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the summand of the stream [m, hidden], from the stream's norm."""
    heads = _heads(linear(z, wqkv), keys)
    q, k = (_rotate(_norm(t), keys.shape[2]) for t in (heads.q, heads.k))
    p, p_token = _attention(q, k, keys)
    return linear((p @ values + p_token * heads.v).flatten(1), wo)


def attention_and_variance(
    projected: Tensor, variance: Tensor, keys: Tensor, values: Tensor, fine: float
) -> tuple[Tensor, Tensor]:
    """Return O [m, attended] for rows q | k | v, and the variance of O.

    `fine` is the variance of a rounding, relative to the square of the rounded value.
    """
    heads, by_head, cache = _heads(projected, keys), _heads(variance, keys), keys.shape[2]
    q, k = (_rotate(_norm(t), cache) for t in (heads.q, heads.k))
    var_q, var_k = (
        _rotate(_norm_of(var, t), cache, variance=True) + fine * turned.square()
        for var, t, turned in ((by_head.q, heads.q, q), (by_head.k, heads.k, k))
    )
    p, p_token = _attention(q, k, keys)
    o = p @ values + p_token * heads.v
    width = q.shape[-1]
    moved = p.square() * (var_q @ keys.square().mT) / width  # p² times the variance of a score
    own_moved = p_token.square() * (
        (var_q * k.square()).sum(-1, True) + (q.square() * var_k).sum(-1, True)
    )
    own_moved = own_moved / width
    var = moved @ values.square() - 2 * o * (moved @ values) + o.square() * moved.sum(-1, True)
    var = var.clamp(min=0) + own_moved * (heads.v - o).square()
    var = var + p_token.square() * by_head.v
    var = var + fine * (p.square() @ values.square() + (p_token * heads.v).square())
    return o.flatten(1), var.flatten(1)


def by_sequence(cached: Tensor, fields: Values) -> Tensor:
    """Return keys or values as [caches, m, kv_heads, cache, head_dim]."""
    caches, m, kv_heads = (fields[name] for name in ("caches", "m", "kv_heads"))
    return cached.view(caches, m, kv_heads, -1, cached.shape[1])


def _heads(projected: Tensor, keys: Tensor) -> _Heads:
    m, kv_heads, _, width = keys.shape
    of_cache = kv_heads * width
    q, k, v = projected.split((projected.shape[1] - 2 * of_cache, of_cache, of_cache), 1)
    q = q.view(m, kv_heads, -1, width)
    return _Heads(q, k.reshape(m, kv_heads, 1, width), v.reshape(m, kv_heads, 1, width))


def _rotate(x: Tensor, position: int, *, variance: bool = False) -> Tensor:
    """Turn elements i and i + width / 2 of each head as a pair; or carry their `variance`."""
    width = x.shape[-1]
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=x.device)
    angle = position * ROTARY ** (-pair / width)
    cos, sin, sign = angle.cos(), angle.sin(), -1
    if variance:
        cos, sin, sign = cos.square(), sin.square(), 1
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + sign * (b * sin), b * cos + a * sin), -1)


def _attention(q: Tensor, k: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the softmax weights of the cached tokens [m, kv_heads, group, cache] and the token."""
    scores = torch.cat((q @ keys.mT, (q * k).sum(-1, True)), -1) / q.shape[-1] ** 0.5
    p = scores.softmax(-1)
    return p[..., :-1], p[..., -1:]


OP = Op(
    fields=DecoderFields,
    operands={
        "wqkv": Operand("weight", ("projected", "hidden")),
        "wo": Operand("weight", ("hidden", "attended")),
        "wg": Operand("weight", ("intermediate", "hidden")),
        "wu": Operand("weight", ("intermediate", "hidden")),
        "wd": Operand("weight", ("hidden", "intermediate")),
        "wh": Operand("weight", ("vocab", "hidden"), OUTPUTS),
        "gains": Operand("activation", ("norms", "hidden"), OUTPUTS),
        "keys": Operand("activation", ("cache_rows", "head_dim"), OUTPUTS),
        "values": Operand("activation", ("cache_rows", "head_dim"), OUTPUTS),
        "x": Operand("activation", ("m", "hidden"), OUTPUTS),
    },
    definition=definition,
    spread=spread,
    intermediates=("q", "k", "p", "o", "g", "u", "h", "the stream", "norms"),
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=all_active,
    derive=derive,
    adjust=adjust,
    sizes=sizes,
    example=EXAMPLE,
    prunes=prunes,
    copies=copies,
)
