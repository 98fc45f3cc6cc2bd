"""Attention of a decoding step: one token of m sequences attends to those in a cache and to itself.

    q | k | v = Z Wqkv.T                              heads, kv_heads, kv_heads times head_dim
    q, k = turned(unit(q)), turned(unit(k))           RMS norm of each head; rotary embedding
    p = softmax(q (keys and k).T / sqrt(head_dim))
    O = p (values and v)                              O Wo.T is added to the stream

`attended` computes this; `attention_and_variance` also carries the variance of q | k | v to that of
O, for the op's `spread` (decoder.py). Both take the keys and values of one cache, an element of
what `by_sequence` returns.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm

from sparsebench.harness.ops._op import Values

EPSILON = 1e-6  # of RMS norms
ROTARY = 1e6  # base of the rotary embedding, as Qwen3 has it


class _Heads(NamedTuple):
    """Queries [m, kv_heads, group, head_dim]; key and value of the token [m, kv_heads, 1, ...]."""

    q: Tensor
    k: Tensor
    v: Tensor


def attended(z: Tensor, wqkv: Tensor, wo: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Return the summand of the stream [m, hidden], from the stream's norm."""
    heads = _heads(linear(z, wqkv), keys)
    q, k = (_turned(_unit(t), keys.shape[2]) for t in (heads.q, heads.k))
    p, p_token = _attention(q, k, keys)
    return linear((p @ values + p_token * heads.v).flatten(1), wo)


def attention_and_variance(
    projected: Tensor, variance: Tensor, keys: Tensor, values: Tensor, fine: float
) -> tuple[Tensor, Tensor]:
    """Return O [m, attended] for rows q | k | v, and the variance of O.

    `fine` is the variance of a rounding, relative to the square of the rounded value.
    """
    heads, by_head, cache = _heads(projected, keys), _heads(variance, keys), keys.shape[2]
    q, k = (_turned(_unit(t), cache) for t in (heads.q, heads.k))
    var_q, var_k = (
        _turned(_unit_of(var, t), cache, variance=True) + fine * turned.square()
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


def by_sequence(cached: Tensor, fields: Values, wqkv: Tensor, wo: Tensor) -> Tensor:
    """Return keys or values as [caches, m, kv_heads, cache, head_dim]."""
    width = cached.shape[1]
    kv_heads = (wqkv.shape[0] - wo.shape[1]) // (2 * width)
    return cached.view(fields["caches"], fields["m"], kv_heads, -1, width)


def _heads(projected: Tensor, keys: Tensor) -> _Heads:
    m, kv_heads, _, width = keys.shape
    of_cache = kv_heads * width
    q, k, v = projected.split((projected.shape[1] - 2 * of_cache, of_cache, of_cache), 1)
    q = q.view(m, kv_heads, -1, width)
    return _Heads(q, k.reshape(m, kv_heads, 1, width), v.reshape(m, kv_heads, 1, width))


def _turned(x: Tensor, position: int, *, variance: bool = False) -> Tensor:
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


def _unit(x: Tensor) -> Tensor:
    return rms_norm(x, (x.shape[-1],), None, EPSILON)


def _unit_of(variance: Tensor, x: Tensor) -> Tensor:
    return variance / (x.square().mean(-1, True) + EPSILON)
