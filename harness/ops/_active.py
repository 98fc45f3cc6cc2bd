"""Sparse activations: operands for which `active` of n hidden units are on, on average over tokens.

    g[t, j]  =  sum over i > 0 of x[t, i] w[j, i]  +  b[j]         x[t, 0] = 1,  w[j, 0] = b[j]

    b[j] = -c[j] s, where s is the sum's standard deviation: P(g > 0) = Q(c[j]) = p[j], the normal
    tail

    skew         p[j]                   tokens
    iid          active / n             independent
    zipf         q / (q + rank[j])      independent; Zipf and Mandelbrot's law, ranks by a hash
    correlated   active / n             in sequences: x = z + e / 2, where z is that of its sequence
    recorded     as trained             weights and tokens from a file, where `active` is counted

Weights are dense, as training leaves them: a kernel finds the active units at every call. Biases
are rounded to the dtype, which in bf16 moves the mean by up to 3 %. Independent tokens share units
only by chance, which is a kernel's worst case. Gates of tokens in one sequence correlate by 4/5:
with 0.5 % of the units on, two tokens share 40 % of theirs.

Weights may also be pruned. The pattern then keeps the cells of column 0 first, without keeping more
cells, and s counts the terms that remain in a row.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from statistics import NormalDist
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor
from torch.nn.functional import linear

from sparsebench.harness.inputs.bits import fill, scores
from sparsebench.harness.ops._op import Fields, require_field
from sparsebench.kernels._kernel import unit_scale
from sparsebench.results.record import Problem

SEQUENCE = 128  # tokens
DEVIATION = 0.8819  # standard deviation of what bits.fill draws at a scale of UNIT
CPU = torch.device("cpu")

IN_BLOCKS = "blocks", "balanced_blocks"
PATTERNS = "dense", "unstructured", *IN_BLOCKS, "two_four", "spense_hidden"
"""Patterns that choose by score, and so can keep column 0."""

RECORDED = "recorded"

Skew = Literal["iid", "zipf", "correlated", "recorded"]


class ActiveFields(Fields):
    """`active` is the mean number of active units for a token; None leaves it to chance."""

    active: float | None = Field(default=None, gt=0)
    skew: Skew = "iid"

    @model_validator(mode="after")
    def _fits(self) -> Self:
        fields = self.model_dump()
        if self.active is None:
            require_field(self.skew == "iid", "active with a skew", "none")
            return self
        activation, n = fields["activation"], fields["n"]
        require_field(activation != "silu", "activation relu or relu2 with active", activation)
        require_field(self.dtype != "fp8", "a dtype of 16 or 32 bits with active", self.dtype)
        allowed = PATTERNS if self.skew != RECORDED else PATTERNS[:1]
        expected = f"pattern {' or '.join(allowed)} with skew {self.skew}"
        require_field(self.pattern in allowed, expected, self.pattern)
        width = self.block if isinstance(self.block, int) else self.block[1]
        cells = -(-fields["k"] // (width if self.pattern in IN_BLOCKS else 1))
        room = (1 - self.sparsity) * cells
        require_field(
            room >= 1, "at least one block per row, for the bias, with active", f"{room:.3g}"
        )
        require_field(self.active < n, f"active below n, {n}", self.active)
        return self


def adjust(gate: str, problem: Problem, name: str, operand: Tensor, draw: int) -> None:
    """Write the biases into column 0 of `gate`, and ones into that of x; form sequences."""
    drawn = problem.fields.get("active") is not None and problem["skew"] != RECORDED
    if not drawn or name not in (gate, "x"):
        return
    if name == "x":
        if problem["skew"] == "correlated":
            shared = operand.new_empty(-(-len(operand) // SEQUENCE), operand.shape[1])
            fill(shared, problem.seed, "x of sequences", draw)
            operand.mul_(0.5).add_(shared.repeat_interleave(SEQUENCE, 0)[: len(operand)])
        operand[:, 0] = 1
    else:
        pruned = problem["pattern"] != "dense"
        terms = (operand[:, 1:] != 0).sum(1).to(CPU) if pruned else problem["k"] - 1
        operand[:, 0] = biases(problem, terms).to(operand.dtype).to(operand.device)


def keeps_first(gate: str, problem: Problem, name: str) -> bool:
    """Return whether pruning keeps column 0 of a weight, for the biases."""
    return name == gate and problem.fields.get("active") is not None


def biases(problem: Problem, terms: Tensor | int) -> Tensor:
    """Return the biases, fp64 [n]; `terms` counts those of a row beside its bias."""
    n, k = problem["n"], problem["k"]
    of_x = DEVIATION * (1.25 if problem["skew"] == "correlated" else 1) ** 0.5
    of_w = DEVIATION * unit_scale(k)  # operands.py's
    terms = terms.clamp(min=1).double() if isinstance(terms, Tensor) else terms
    s = of_x * of_w * terms**0.5
    quantile = NormalDist().inv_cdf
    by_rank = [quantile(p) for p in probabilities(problem["active"], n, problem["skew"])]
    rank = scores(problem.seed, "rank of units", n, CPU).argsort(stable=True).argsort()
    return torch.tensor(by_rank, dtype=torch.float64)[rank] * s


@cache
def probabilities(active: float, n: int, skew: Skew) -> tuple[float, ...]:
    """Return the probability that each unit is on, in descending order."""
    if skew != "zipf":
        return (active / n,) * n
    low, high = 0.0, float(n) * n  # q, by bisection: at n² all units are on
    for _ in range(60):
        q = (low + high) / 2
        low, high = (q, high) if sum(q / (q + r) for r in range(1, n + 1)) < active else (low, q)
    return tuple(low / (low + r) for r in range(1, n + 1))


def count_active(gate: str, operands: Mapping[str, Tensor]) -> dict[str, float | str]:
    """Count the mean number of active units for a token of a file; a draw may have fewer."""
    on = linear(operands["x"].float(), operands[gate].float()) > 0
    return {"active": float(f"{on.sum(1).double().mean():.4g}"), "skew": RECORDED}


def share(problem: Problem, units: str = "n") -> float:
    """Return the fraction of the units that are on for a token; 1 if it is left to chance.

    `units` is the field that has their number.
    """
    active = problem.fields.get("active")
    return 1.0 if active is None else float(active / problem[units])


def all_active(problem: Problem) -> Problem:
    """Return the problem with every unit on, as a dense product computes it."""
    skew = {"skew": "iid"} if "skew" in problem.fields else {}
    return replace(problem, fields={**problem.fields, "active": None, **skew})


def share_of_any(problem: Problem) -> float:
    """Return a lower bound of the fraction of units that are on for any token.

    Tokens of a sequence count as one, and recorded tokens may all share their units.
    """
    if problem.fields.get("active") is None or problem["skew"] == RECORDED:
        return share(problem)
    n, skew = problem["n"], problem["skew"]
    tokens = -(-problem["m"] // SEQUENCE) if skew == "correlated" else problem["m"]
    any_on = sum(1 - (1 - p) ** tokens for p in probabilities(problem["active"], n, skew))
    return float(any_on / n)
