"""The gated feed-forward layer of a mixture: each token goes through top_k of the experts.

    Y[t] = sum over j of shares[t, j] * (act(X[t] @ Wg_e.T) * (X[t] @ Wu_e.T)) @ Wd_e.T,
           e = ids[t, j]

    X, Y [m, k]    ids [m, top_k]    Wg, Wu [experts n, k]    Wd [experts k, n]

There are m tokens, k is the width of the model, and an expert has n hidden units. The experts lie
one below the other. A router has already chosen the experts of each token, `ids`, and their weights
in its sum, `shares`. What is timed starts from these. Routing is drawn as in op experts.
"""

from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor

from sparsebench.harness.ops import experts, ffn
from sparsebench.harness.ops._op import Op, Operand
from sparsebench.kernels._kernel import DTYPES
from sparsebench.results.record import Problem


class ExpertsFfnFields(experts.ExpertsFields):
    """A problem of this op: m tokens, model width k, and n hidden units of each expert."""

    dtype: Literal["fp16", "bf16", "fp32"]
    n: PositiveInt
    activation: Literal["silu", "relu", "relu2"] = "silu"


def sizes(fields: Mapping[str, int]) -> dict[str, int]:
    """Return the fields, and the rows of the weights."""
    count = fields["experts"]
    return {**fields, "hidden": count * fields["n"], "model": count * fields["k"]}


def adjust(problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Write the experts of each token."""
    if name == "ids":
        operand.copy_(experts.routes(problem, draw))


def definition(
    wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, shares: Tensor, ids: Tensor, *,
    experts: int, activation: str,
) -> Tensor:  # fmt: skip
    """Return Y [m, k] for Wg and Wu [experts n, k], Wd [experts k, n] and X [m, k]."""
    y = torch.zeros_like(x)
    for e, (gate, up, down) in enumerate(_of_experts(experts, wg, wu, wd)):
        token, choice = (ids == e).nonzero(as_tuple=True)
        rows = ffn.definition(gate, up, down, x[token], activation=activation)
        y.index_add_(0, token, shares[token, choice, None] * rows)
    return y


def spread(
    wg: Tensor, wu: Tensor, wd: Tensor, x: Tensor, shares: Tensor, ids: Tensor, *,
    experts: int, activation: str,
) -> Tensor:  # fmt: skip
    """Carry the spread of each expert's rows, which may be rounded, through the sum of op ffn.

    S(y)² = sum over j of shares² (S(row)² + 2 row²): a row and its product with a share.
    """
    total = torch.zeros_like(x)
    for e, (gate, up, down) in enumerate(_of_experts(experts, wg, wu, wd)):
        token, choice = (ids == e).nonzero(as_tuple=True)
        operands = gate, up, down, x[token]
        rows = ffn.definition(*operands, activation=activation)
        of_rows = ffn.spread(*operands, activation=activation)
        share = shares[token, choice, None]
        total.index_add_(0, token, share.square() * (of_rows.square() + 2 * rows.square()))
    return total.sqrt()


def _of_experts(
    experts: int, wg: Tensor, wu: Tensor, wd: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    return zip(*(w.chunk(experts) for w in (wg, wu, wd)), strict=True)


def flops(problem: Problem, nnz: Mapping[str, int]) -> float:
    """Return one multiply and one add per row and non-zero of its expert, of equal density."""
    rows = problem["m"] * problem["top_k"]
    return float(2 * rows * sum(nnz[w] for w in ("wg", "wu", "wd")) / problem["experts"])


def fewest_bytes(problem: Problem, nnz: Mapping[str, int], itemsize: int) -> int:
    """Return the bytes of the non-zeros of experts that have tokens, X, Y, shares and ids."""
    weights = sum(nnz[w] for w in ("wg", "wu", "wd")) * experts.experts_hit(problem)
    routed = problem["m"] * problem["top_k"]
    values = weights // problem["experts"] + 2 * problem["m"] * problem["k"] + routed
    return int(itemsize * values + 4 * routed)


OP = Op(
    fields=ExpertsFfnFields,
    operands={
        "wg": Operand("weight", ("hidden", "k")),
        "wu": Operand("weight", ("hidden", "k")),
        "wd": Operand("weight", ("model", "n")),
        "x": Operand("activation", ("m", "k")),
        "shares": Operand("activation", ("m", "top_k")),
        "ids": Operand("routing", ("m", "top_k"), dict.fromkeys(DTYPES, torch.int64)),
    },
    definition=definition,
    spread=spread,
    intermediates=("g", "u", "act(g)", "h", "rows"),
    flops=flops,
    fewest_bytes=fewest_bytes,
    adjust=adjust,
    sizes=sizes,
    example={"m": 3, "n": 6, "k": 5, "experts": 2, "top_k": 2, "routing": "uniform"},
)
