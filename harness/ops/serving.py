"""A server of a transformer: Y[requests, vocab], the logits of the last step of each request.

    request r    tokens[r] = prompt, answer       lengths[r] = tokens of the prompt, and new ones,
                                                  from inputs/request_lengths.py
    the model    of op decoder, without gains and with an embedding: S = We[token]
    a step       the next token of some requests, or a part of a prompt; each token attends to
                 itself and to all before it

`concurrency` requests are served at once; when one ends, the next one begins. Which token follows
is fixed (teacher forcing), so that all servers do the same work and have one right answer:

    token = (requests + 1) u + r + 1      0 <= u < vocab / (requests + 1); its remainder is r + 1
    u after position p = (5 u + p + 1) mod (vocab / (requests + 1))

A server computes the logits of every step, puts the highest at the token that follows, and returns
the logits, before that, of the last step. They depend on keys and values of all steps before.

All layers have the values of one drawn layer, as in op decoder, and a kernel keeps a copy for each.
`of_layers` are those of the model that is meant: more than `layers`, if only a part is served.

    steps        a reading: device time of all steps of a call, without the host's share
    first_token  from the start of a request to its first token, on average
    per_token    between later tokens of a request, on average over requests
    cold         first token of the first request after the server has started, once in a process
"""

from collections.abc import Mapping
from math import log2
from typing import Any, Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.formats._format import is_stored
from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.inputs.request_lengths import lengths_of
from sparsebench.harness.ops._op import Fields, Op, Operand, Values, require_field, require_groups
from sparsebench.harness.ops._varied import Varied, by_squares, fine_of, gated, product
from sparsebench.harness.ops.decoder import LAYER, MLP, ROTARY, _norm, _norm_of
from sparsebench.harness.ops.ffn import act_of
from sparsebench.kernels._kernel import DTYPES, OUTPUTS
from sparsebench.results.record import Problem

READINGS = "steps", "first_token", "per_token", "cold"
INTEGERS = dict.fromkeys(DTYPES, torch.int32)
CPU = torch.device("cpu")
EXAMPLE = {
    "hidden": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "intermediate": 24, "vocab": 12,
    "layers": 1, "of_layers": 1, "concurrency": 2, "requests": 2, "lengths": "one",
}  # fmt: skip


class ServingFields(Fields):
    """A problem of this op."""

    dtype: Literal["fp16", "bf16", "fp32"]
    hidden: PositiveInt
    heads: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    intermediate: PositiveInt
    vocab: PositiveInt
    layers: PositiveInt
    of_layers: PositiveInt
    concurrency: PositiveInt
    requests: PositiveInt
    lengths: Literal["short", "one"] = "short"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        require_groups(self.heads, self.kv_heads)
        require_field(self.head_dim % 2 == 0, "an even head_dim", self.head_dim)
        least = 2 * (self.requests + 1)
        require_field(self.vocab >= least, f"a vocab of at least {least}", self.vocab)
        whole = self.layers <= self.of_layers
        require_field(whole, f"layers up to of_layers, {self.of_layers}", self.layers)
        few = self.concurrency <= self.requests
        require_field(few, f"concurrency up to requests, {self.requests}", self.concurrency)
        return self


def inputs_of(fields: Mapping[str, Any]) -> list[int]:
    """Return the tokens of each request that a server reads: all but the last new one."""
    return [p + n - 1 for p, n in lengths_of(fields.get("lengths", "short"), fields["requests"])]


def sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields and the derived columns of projections and of the table of tokens."""
    heads, of_cache, width = fields["heads"], fields["kv_heads"], fields["head_dim"]
    return {
        **fields,
        "projected": (heads + 2 * of_cache) * width,
        "attended": heads * width,
        "longest": max(inputs_of(fields)),
        "two": 2,
    }


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Write tokens and lengths; scale drawn weights by powers of two."""
    if name == "lengths":
        operand.copy_(torch.tensor(lengths_of(problem["lengths"], problem["requests"])))
    elif name == "tokens":
        _write_tokens(problem, operand, draw)
    elif name in MLP or name == "we":  # weights with zeros as in op decoder, embeddings near 1
        power = log2(problem["hidden"]) if name == "we" else -log2(1 - problem["sparsity"])
        operand.copy_(operand.float() * 2.0 ** round(power / 2))


def _write_tokens(problem: Problem, operand: Tensor, draw: int) -> None:
    requests, longest = operand.shape
    kinds = problem["vocab"] // (requests + 1)
    drawn = scores(problem.seed, f"prompts {draw}", operand.numel(), CPU).view(operand.shape)
    u = drawn.long() % kinds
    prompts = [prompt for prompt, _ in lengths_of(problem["lengths"], requests)]
    for position in range(1, longest):
        forced = torch.tensor([position >= prompt for prompt in prompts])
        u[:, position] = torch.where(
            forced, (5 * u[:, position - 1] + position) % kinds, u[:, position]
        )
    tokens = (requests + 1) * u + torch.arange(1, requests + 1)[:, None]
    beyond = torch.arange(longest) >= torch.tensor(inputs_of(problem.fields))[:, None]
    operand.copy_(tokens.masked_fill(beyond, 0))


def definition(*, fields: Values, **operands: Tensor) -> Tensor:
    """Return Y [requests, vocab] in the weights' dtype."""
    wqkv, wo, wg, wu, wd, wh, we = (operands[name] for name in (*LAYER, "wh", "we"))
    counts = inputs_of(fields)
    s = _packed(operands["tokens"], we, counts)
    for _ in range(fields["layers"]):
        projected = linear(_norm(s), wqkv).split(counts)
        o = torch.cat([_attention(each, fields) for each in projected])
        s = s + linear(o, wo)
        z = _norm(s)
        s = s + linear(act_of(linear(z, wg), "silu") * linear(z, wu), wd)
    return linear(_norm(s[_last(counts, s)]), wh)


def spread(*, fields: Values, **operands: Tensor) -> Tensor:
    """Carry the variance of every value through the layers, as op decoder does."""
    wqkv, wo, wg, wu, wd, wh, we = (operands[name] for name in (*LAYER, "wh", "we"))
    counts = inputs_of(fields)
    s = _packed(operands["tokens"], we, counts)
    var_s, fine = torch.zeros_like(s), fine_of(fields)

    def added(y: Tensor, var: Tensor) -> Varied:
        return s + y, var_s + var + (s + y).square()

    for _ in range(fields["layers"]):
        y, var = product(_norm(s), _norm_of(var_s, s), wqkv, fine)
        each = zip(y.split(counts), var.split(counts), strict=True)
        parts = [_attention_and_variance(y, var, fields) for y, var in each]
        o, var = (torch.cat(of_all) for of_all in zip(*parts, strict=True))
        s, var_s = added(*product(o, var, wo, fine))
        z, var = _norm(s), _norm_of(var_s, s)
        s, var_s = added(*gated(z, var, (wg, wu, wd), "silu", fine))
    last = _last(counts, s)
    s, var_s = s[last], var_s[last]
    z = _norm(s)
    return by_squares(_norm_of(var_s, s) + z.square(), wh).sqrt()


def _packed(tokens: Tensor, we: Tensor, counts: list[int]) -> Tensor:
    """Return the embeddings of all tokens of request 0, then of request 1, ..."""
    each = zip(tokens, counts, strict=True)
    return we[torch.cat([row[:count] for row, count in each]).long()]


def _last(counts: list[int], s: Tensor) -> Tensor:
    return torch.tensor(counts, device=s.device).cumsum(0) - 1


def _heads(projected: Tensor, fields: Values) -> tuple[Tensor, Tensor, Tensor]:
    """Return q [heads, tokens, width], and k and v [kv_heads, tokens, width]."""
    of_cache, width = fields["kv_heads"] * fields["head_dim"], fields["head_dim"]
    parts = projected.split((projected.shape[1] - 2 * of_cache, of_cache, of_cache), 1)
    q, k, v = (part.unflatten(1, (-1, width)).transpose(0, 1) for part in parts)
    return q, k, v


def _turned(x: Tensor, *, variance: bool = False) -> Tensor:
    """Turn elements i and i + width / 2 of a token's heads by its position; or their variance."""
    tokens, width = x.shape[1:]
    pair = torch.arange(0, width, 2, dtype=torch.float64, device=x.device)
    position = torch.arange(tokens, dtype=torch.float64, device=x.device)
    angle = position[:, None] * ROTARY ** (-pair / width)
    cos, sin, sign = angle.cos(), angle.sin(), -1
    if variance:
        cos, sin, sign = cos.square(), sin.square(), 1
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos + sign * b * sin, b * cos + a * sin), -1)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    """Return softmax(q k.T / sqrt(width)) of each token over itself and those before."""
    later = torch.ones(q.shape[1], q.shape[1], dtype=torch.bool, device=q.device).triu(1)
    scored: Tensor = (q @ k.mT) / q.shape[-1] ** 0.5
    return scored.masked_fill(later, -torch.inf).softmax(-1)


def _shared(x: Tensor, fields: Values) -> Tensor:
    """Repeat the heads of keys or values for the queries that they serve."""
    return x.repeat_interleave(fields["heads"] // fields["kv_heads"], 0)


def _attention(projected: Tensor, fields: Values) -> Tensor:
    """Return O [tokens, attended] of one request, from its rows q | k | v."""
    q, k, v = _heads(projected, fields)
    q, k, v = _turned(_norm(q)), *(_shared(x, fields) for x in (_turned(_norm(k)), v))
    o: Tensor = _weights(q, k) @ v
    return o.transpose(0, 1).flatten(1)


def _attention_and_variance(
    projected: Tensor, variance: Tensor, fields: Values
) -> tuple[Tensor, Tensor]:
    """Return O [tokens, attended] of one request, and the variance of O."""
    plain, moved = _heads(projected, fields), _heads(variance, fields)
    (q, var_q), (k, var_k) = (
        ((y := _turned(_norm(x))), _turned(_norm_of(var, x), variance=True) + y.square())
        for x, var in zip(plain[:2], moved[:2], strict=True)
    )
    k, var_k, v, var_v = (_shared(x, fields) for x in (k, var_k, plain[2], moved[2]))
    p = _weights(q, k)
    o = p @ v
    of_scores = (var_q @ k.square().mT + q.square() @ var_k.mT) / q.shape[-1]
    part = p.square() * of_scores
    var = part @ v.square() - 2 * o * (part @ v) + o.square() * part.sum(-1, True)
    var = var.clamp(min=0) + p.square() @ (var_v + v.square())
    return tuple(x.transpose(0, 1).flatten(1) for x in (o, var))  # type: ignore[return-value]


def counts(problem: Problem, weights: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the non-zeros of each weight; none of the embedding, of which a token reads a row."""
    multiplied = {name: int(is_stored(weight).sum()) for name, weight in weights.items()}
    return multiplied | {"we": 0}


def full(problem: Problem) -> dict[str, int]:
    """Return the elements of each weight that is multiplied."""
    of = sizes(problem.fields)
    shapes = {name: OP.operands[name].shape for name in OP.weights}
    return {name: of[rows] * of[columns] for name, (rows, columns) in shapes.items()} | {"we": 0}


def steps_of(problem: Problem) -> int:
    """Return the fewest steps: each gives a request one token, to `concurrency` of them at most."""
    new = [count for _, count in lengths_of(problem["lengths"], problem["requests"])]
    concurrency: int = problem["concurrency"]
    return max(*new, -(-sum(new) // concurrency))


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per token and non-zero, and those of causal attention."""
    counts = inputs_of(problem.fields)
    new = sum(n for _, n in lengths_of(problem["lengths"], problem["requests"]))
    products = problem["layers"] * sum(counts) * sum(nnz[name] for name in LAYER)
    attended = sum(count * (count + 1) // 2 for count in counts) if nnz["wo"] else 0
    attended *= 2 * problem["layers"] * problem["heads"] * problem["head_dim"]
    return float(2 * (products + attended + new * nnz["wh"]))


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the non-zeros in each of the fewest steps, and of tokens and Y."""
    weights = problem["layers"] * sum(nnz[name] for name in LAYER) + nnz["wh"]
    moved = steps_of(problem) * itemsize * weights
    tokens = 4 * problem["requests"] * max(inputs_of(problem.fields))
    wide = OUTPUTS[problem["dtype"]].itemsize
    return int(moved + tokens + wide * problem["requests"] * problem["vocab"])


OP = Op(
    fields=ServingFields,
    operands={
        "wqkv": Operand("weight", ("projected", "hidden"), dense=True),
        "wo": Operand("weight", ("hidden", "attended"), dense=True),
        "wg": Operand("weight", ("intermediate", "hidden")),
        "wu": Operand("weight", ("intermediate", "hidden")),
        "wd": Operand("weight", ("hidden", "intermediate")),
        "wh": Operand("weight", ("vocab", "hidden"), dense=True),
        "we": Operand("weight", ("vocab", "hidden"), dense=True),
        "tokens": Operand("routing", ("requests", "longest"), INTEGERS),
        "lengths": Operand("routing", ("requests", "two"), INTEGERS),
    },
    definition=definition,
    spread=spread,
    intermediates=("q", "k", "v", "p", "o", "g", "u", "h", "the stream", "norms"),
    flops=flops,
    fewest_bytes=fewest_bytes,
    adjust=adjust,
    sizes=sizes,
    parts=lambda problem: (problem["requests"],),
    counts=counts,
    full=full,
    example=EXAMPLE,
    prunes=lambda fields, weight: weight in MLP,
    copies=lambda fields, operand: int(fields["layers"]) if operand in LAYER else 1,
    readings=READINGS,
)
