"""Dense contenders with the weights as they were before pruning: of the layer that is replaced.

    FLOPs / bytes of the dense product >= BOUND, and the pattern prunes its weights
        ─> every dense contender competes twice: with unpruned weights, then on the same zeros

A product with zeros draws less power, so a GPU at its power limit runs it at a higher clock. A
product that memory limits takes as long with any values, so its contest has one dense row.

Attention and gradients of weights are left out: their dense contenders multiply no pruned weight.
"""

from collections.abc import Iterable
from dataclasses import replace

from sparsebench.harness.bench.operands import level_of
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Problem

BOUND = 100.0
"""FLOPs per byte above which a dense product counts as bound by FLOPs, on every device.

In 16 bits, FLOPs limit a product from 139 per byte on with a V100, 153 with an A100, 188 with an
H200 (measured) and 295 with an H100. Below all of these, so that no such contest is missed. One
between BOUND and the device's own limit has a row more than it needs.
"""


def with_unpruned(contests: Iterable[Contest]) -> list[Contest]:
    """Add the second dense contenders; that of a baseline is a baseline, and comes first."""
    return [_with_unpruned(contest) for contest in contests]


def _with_unpruned(contest: Contest) -> Contest:
    if not (prunes_weights(contest.problem) and intensity(contest.problem) >= BOUND):
        return contest
    dense = [c for c in contest.contenders if c.format == "dense"]
    every = [*(replace(c, weights="original") for c in dense), *contest.contenders]
    every.sort(key=lambda contender: not contender.baseline)
    return replace(contest, contenders=tuple(every))


def prunes_weights(problem: Problem) -> bool:
    """Return whether a dense contender of the problem multiplies zeros that a pattern made."""
    op = load_op(problem.op)
    weights = [name for name, operand in op.operands.items() if operand.role == "weight"]
    return any(level_of(op, problem.fields, name) > 0 for name in weights)


def intensity(problem: Problem) -> float:
    """Return the FLOPs of the dense product per byte that it has to move."""
    op = load_op(problem.op)
    dense = op.dense(problem)
    work = op.work(dense, op.elements(dense))
    return float(work["flops"] / work["fewest_bytes"])
