"""Draw the operands of a whole op, run a kernel on them, and check it as the harness does."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sparsebench.formats._format import Format
from sparsebench.formats.dense import Dense
from sparsebench.harness.bench.correctness import Expected, check, roundings
from sparsebench.harness.bench.operands import operands as drawn
from sparsebench.harness.bench.operands import redraw
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops._op import with_fields
from sparsebench.kernels._kernel import OUTPUTS, Launch, Lossy, Operands
from sparsebench.results.record import Problem
from tests.tools.devices import CPU


def problem_of(op: str, **fields: Any) -> Problem:
    """Return a problem with the op's defaults."""
    defaults = load_op(op).defaults
    return Problem(op, {**defaults, **fields}, 0, defaults=defaults)


def operands_for(
    problem: Problem, device: torch.device = CPU, formats: Mapping[str, Callable[..., Format]] = {}
) -> Operands:
    """Draw the operands of a problem; `formats` packs some weights, others stay dense."""
    op = load_op(problem.op)
    dense = drawn(problem, op, device, None)
    weights = {name: formats.get(name, Dense.from_dense)(w) for name, w in dense.weights.items()}
    return Operands(problem, weights, dense.activations, with_fields(op.definition, problem))


def expected_of(operands: Operands) -> Expected:
    """Return the output that the harness expects for the present activations."""
    problem, op = operands.problem, load_op(operands.problem.op)
    plain = {name: w.to_dense() for name, w in operands.weights.items()} | {**operands.activations}
    exact = {name: tensor.double() for name, tensor in plain.items()}
    right, spread = (with_fields(f, problem)(**exact) for f in (op.definition, op.spread))
    dtype, torchs_own = problem["dtype"], with_fields(op.definition, problem)(**plain)
    rest = OUTPUTS[dtype], op.longest_sum(problem, exact), *roundings(dtype, op.rounds(dtype))
    parts, rounded = op.parts(problem), bool(op.intermediates)
    return Expected(right, spread, *rest, parts=parts, rounded=rounded, plain=torchs_own)


def assert_correct(out: object, operands: Operands, lossy: Lossy | None = None) -> None:
    """Assert that an output is right, as the harness judges it."""
    allowed = lossy.at_most.get(operands.problem["dtype"]) if lossy else None
    right = replace(expected_of(operands), allowed=allowed)
    assert (error := check(out, right).reason) is None, error


def error_of(launch: Launch, operands: Operands) -> str | None:
    """Redraw the activations, poison the output, and return what is wrong with the next output."""
    weights = {name: w.to_dense() for name, w in operands.weights.items()}
    redraw(operands.problem, load_op(operands.problem.op), operands.activations, 7, weights=weights)
    out = launch()
    assert isinstance(out, Tensor)
    out.fill_(torch.nan)
    return check(launch(), expected_of(operands)).reason


def assert_right(launch: Launch, operands: Operands) -> None:
    """Assert that a launch follows redrawn activations and is right."""
    assert (error := error_of(launch, operands)) is None, error


def assert_right_twice(operands: Operands, prepare: Callable[[Operands], Launch]) -> Launch:
    """Assert that a searched launch is right, and one from its pinned choice; return the first."""
    launch = prepare(operands)
    assert_right(launch, operands)
    again = prepare(replace(operands, pinned=json.loads(json.dumps(launch.choice))))
    assert (again.choice, again.code) == (launch.choice, launch.code)
    assert_right(again, operands)
    return launch
