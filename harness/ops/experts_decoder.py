"""One decoding step of a mixture: op decoder (decoder.py), whose MLPs are op experts_ffn.

    in each of the layers, after attention:
        Z = norm(S)
        S[t] += sum over j of shares[t, j] * (act(Z[t] Wg_e.T) * (Z[t] Wu_e.T)) Wd_e.T,
                e = ids[t, j]

    Wg, Wu [experts intermediate, hidden]    Wd [experts hidden, intermediate]
    ids, shares [layers m, top_k]            each layer shuffles the tokens and relabels the
                                             experts, as each draw of op experts does

The experts of a token are drawn and not computed from Z: a rounding could turn a close choice, and
then two right kernels would give other logits. So the router's product is left out, which has a
thousandth of a layer's weights. The shares are scaled by a power of two, so that the sum of top_k
experts adds about as much to the stream as an MLP does.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import log2
from typing import Any, Literal, Self

import torch
from pydantic import PositiveInt, model_validator
from torch import Tensor

from sparsebench.harness.ops import decoder, experts_ffn
from sparsebench.harness.ops._op import Operand, Values, require_field
from sparsebench.harness.ops._varied import Varied, fine_of, gated
from sparsebench.harness.ops.experts import Routing, experts_hit, routes
from sparsebench.kernels._kernel import DTYPES, OUTPUTS
from sparsebench.results.record import Problem


class ExpertsDecoderFields(decoder.DecoderFields):
    """A problem of this op; an expert has `intermediate` hidden units."""

    dtype: Literal["fp16", "bf16", "fp32"]
    experts: PositiveInt
    top_k: PositiveInt
    routing: Routing = "measured"

    @model_validator(mode="after")
    def _routes(self) -> Self:
        few = self.top_k <= self.experts
        require_field(few, f"top_k of at most experts, {self.experts}", self.top_k)
        require_field(self.active is None, "no active units", self.active)
        require_field(self.pruned == "mlp", "pruned mlp", self.pruned)
        return self


def sizes(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes of op decoder, and those of the experts and of their routing."""
    count = fields["experts"]
    units, model = count * fields["intermediate"], count * fields["hidden"]
    choices = fields["layers"] * fields["m"]
    return {**decoder.sizes(fields), "units": units, "model": model, "choices": choices}


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Write the experts of each token, or scale an operand by a power of two."""
    if name == "ids":
        layers = problem["layers"]
        operand.copy_(torch.cat([routes(problem, draw * layers + i) for i in range(layers)]))
    elif name == "shares":
        operand.copy_(operand.float() * 2.0 ** round(-log2(problem["top_k"]) / 2))
    else:
        decoder.adjust(problem, name, operand, draw)


def definition(*, fields: Values, **operands: Tensor) -> Tensor:
    """Return Y [m, vocab] in the operands' dtype."""
    ids, shares = (operands.pop(name).split(fields["m"]) for name in ("ids", "shares"))
    wg, wu, wd = (operands[name] for name in decoder.MLP)
    about: dict[str, Any] = {name: fields[name] for name in ("experts", "activation")}

    def mlp(layer: int, z: Tensor) -> Tensor:
        return experts_ffn.definition(wg, wu, wd, z, shares[layer], ids[layer], **about)

    return decoder.logits(fields, operands, mlp)


def spread(*, fields: Values, **operands: Tensor) -> Tensor:
    """Carry variances as op decoder does; a row of an expert and its share of it are rounded."""
    ids, shares = (operands.pop(name).split(fields["m"]) for name in ("ids", "shares"))
    of_experts = [
        *zip(*(operands[name].chunk(fields["experts"]) for name in decoder.MLP), strict=True)
    ]
    activation, fine = fields["activation"], fine_of(fields)

    def mlp(layer: int, z: Tensor, var: Tensor) -> Varied:
        y, total = torch.zeros_like(z), torch.zeros_like(z)
        for e, weights in enumerate(of_experts):
            token, choice = (ids[layer] == e).nonzero(as_tuple=True)
            rows, of_rows = gated(z[token], var[token], weights, activation, fine)
            share = shares[layer][token, choice, None]
            y.index_add_(0, token, share * rows)
            total.index_add_(0, token, share.square() * (of_rows + 2 * fine * rows.square()))
        return y, total

    return decoder.spread_of_logits(fields, operands, mlp)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return those of op decoder with the experts that a token takes, of equal density."""
    return decoder.flops(problem, _scaled(problem, nnz, problem["top_k"]))


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return those of op decoder with the experts that the tokens of a layer hit."""
    hit = experts_hit(problem)
    return decoder.fewest_bytes(problem, _scaled(problem, nnz, hit), itemsize)


def _scaled(problem: Problem, nnz: Mapping[str, int], count: int) -> dict[str, int]:
    """Return the non-zeros if there were so many experts."""
    return {**nnz, **{name: nnz[name] * count // problem["experts"] for name in decoder.MLP}}


OP = replace(
    decoder.OP,
    fields=ExpertsDecoderFields,
    operands={
        **decoder.OP.operands,
        "wg": Operand("weight", ("units", "hidden")),
        "wu": Operand("weight", ("units", "hidden")),
        "wd": Operand("weight", ("model", "intermediate")),
        "shares": Operand("activation", ("choices", "top_k"), OUTPUTS),
        "ids": Operand("routing", ("choices", "top_k"), dict.fromkeys(DTYPES, torch.int64)),
    },
    definition=definition,
    spread=spread,
    intermediates=(*decoder.OP.intermediates, "rows"),
    flops=flops,
    fewest_bytes=fewest_bytes,
    dense=lambda problem: problem,
    derive=lambda *_: None,
    adjust=adjust,
    sizes=sizes,
    example={**decoder.EXAMPLE, "experts": 3, "top_k": 2, "routing": "uniform"},
)
