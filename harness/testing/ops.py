"""The contract of an op: definition, spread, depth and work agree with each other."""

import inspect
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any, get_args

import torch
from torch import Tensor

from sparsebench.harness.catalog import load_op
from sparsebench.harness.inputs.bits import fill
from sparsebench.harness.ops._op import Fields, Op, with_fields
from sparsebench.harness.testing.contract import Check, checker, expect
from sparsebench.results.record import Problem

SIZES = {"m": 3, "n": 6, "k": 5}
DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
FEWEST_BITS = 4  # times a dtype's epsilon: an upper limit of rounding errors over the spread


def op_checks(name: str) -> list[Check]:
    """Return the contract of an op, sentence by sentence, for its name in a suite."""
    about: dict[str, Callable[[str], None]] = {
        "has fields, weights and activations": _fields,
        "takes operands in order and fields by name": _signatures,
        "has a definition that keeps the dtype, and a spread of its shape": _shapes,
        "gives the same definition and spread together": _together,
        "gives bf16 of sums in fp32 for fp8 operands": _fp8,
        "has a spread that is finite, and zero only without terms": _spread,
        "has a spread of the size of rounding errors": _rounding,
        "counts work that grows with the non-zeros": _work,
    }
    return [Check(f"{name} {message}", partial(holds, name)) for message, holds in about.items()]


check_op = checker(op_checks)


def sizes(op: Op) -> dict[str, int]:
    """Return a small value for each size: SIZES, and 7, 8, ... for other names.

    An op with an example has its own, and those that follow from them.
    """
    if op.example:
        return dict(op.sizes(op.example))
    names = {size for operand in op.operands.values() for size in operand.shape}
    other = count(7)
    return SIZES | {name: next(other) for name in sorted(names - SIZES.keys())}


def drawn(name: str, dtype: torch.dtype = torch.float64) -> dict[str, Tensor]:
    """Return small operands of an op's definition, the same ones each time."""
    op, actual = load_op(name), dict[str, Tensor]()
    for operand in op.arguments:
        actual[operand] = torch.empty([sizes(op)[size] for size in op.operands[operand].shape])
        fill(actual[operand], 0, operand)
        if not op.is_multiplied(operand):
            op.adjust(_example(name, "bf16"), operand, actual[operand], 0)
    return {operand: tensor.to(dtype) for operand, tensor in actual.items()}


def pinned(name: str, function: Callable[..., Any], dtype: str = "bf16") -> Callable[..., Any]:
    """Set the arguments that are no operands to the op's defaults or example, and a dtype."""
    return with_fields(function, _example(name, dtype))


def _example(name: str, dtype: str) -> Problem:
    op = load_op(name)
    return Problem(name, op.defaults | dict(op.example) | {"dtype": dtype})


def _fields(name: str) -> None:
    op = load_op(name)
    expect(issubclass(op.fields, Fields), f"expected fields of {Fields}, found {op.fields}")
    names = {*op.fields.model_fields, *(op.sizes(op.example) if op.example else ())}
    used = {size for operand in op.operands.values() for size in operand.shape}
    expect(used <= names, f"expected sizes to be fields, found {sorted(used - names)}")
    expect(op.weights, "expected an operand with the role weight or mask, found none")
    expect(op.activations, "expected an operand with the role activation, found none")
    patterns = [n for n, operand in op.operands.items() if operand.role == "pattern"]
    expect(len(patterns) <= 1, f"expected at most one pattern, found {patterns}")


def _signatures(name: str) -> None:
    op = load_op(name)
    for function in filter(None, (op.definition, op.spread, op.both, op.depth)):
        written = inspect.getfullargspec(function)
        expected = op.arguments[: len(written.args)] if written.varkw else op.arguments
        message = f"{function.__name__}: expected arguments {op.arguments}, found {written.args}"
        expect(written.args == expected, message)
        unknown = {*written.kwonlyargs} - {"fields", *op.fields.model_fields}
        expect(not unknown, f"{function.__name__}: expected fields, found {sorted(unknown)}")


def _shapes(name: str) -> None:
    op = load_op(name)
    for dtype in DTYPES:
        out = pinned(name, op.definition)(**drawn(name, dtype))
        spread = pinned(name, op.spread)(**drawn(name, dtype))
        expect(out.dtype == dtype, f"expected an output of {dtype}, found {out.dtype}")
        shapes = f"{list(out.shape)}, found {list(spread.shape)}"
        expect(spread.shape == out.shape, f"expected a spread {shapes}")
    rows = op.operands[op.pattern].shape[0] if op.pattern else "m"
    parts = op.parts(Problem(name, dict(sizes(op))))
    expected = sum(parts) if parts else sizes(op).get(rows)
    expect(out.shape[0] == expected, f"expected {expected} rows of output, found {out.shape[0]}")


def _together(name: str) -> None:
    op, operands = load_op(name), drawn(name)
    each = (pinned(name, function)(**operands) for function in (op.definition, op.spread))
    both = op.answer(_example(name, "bf16"), operands)
    same = not op.both or all(map(torch.equal, both, each))
    expect(same, "expected `both` to give the definition and the spread, found others")


def _fp8(name: str) -> None:
    op = load_op(name)
    if "fp8" in get_args(op.fields.model_fields["dtype"].annotation):
        operands = {n: t.to(op.operands[n].dtypes["fp8"]) for n, t in drawn(name).items()}
        single = {operand: tensor.float() for operand, tensor in operands.items()}
        run = pinned(name, op.definition, "fp8")
        same = torch.equal(run(**operands), run(**single).bfloat16())
        expect(same, "expected the definition in fp32, rounded to bf16; found another output")


def _spread(name: str) -> None:
    op, operands = load_op(name), drawn(name)
    actual = pinned(name, op.spread)(**operands)
    expect(actual.isfinite().all(), "expected a finite spread")
    off = pinned(name, op.definition)(**operands) == 0  # a unit that is on for no token
    expect((actual > 0)[~off].all(), "expected a spread above 0 wherever the output is not 0")
    expect(not off.all(), "expected outputs that are not 0")
    empty = {operand: torch.zeros_like(tensor) for operand, tensor in operands.items()}
    none = pinned(name, op.spread)(**empty)
    expect(not none.any(), "expected a spread of 0 where every operand is 0")


def _rounding(name: str) -> None:
    op = load_op(name)
    run, spread = pinned(name, op.definition), pinned(name, op.spread)
    for dtype in DTYPES[:3]:
        operands = drawn(name, dtype)
        exact = {operand: tensor.double() for operand, tensor in operands.items()}
        ratio = (run(**operands).double() - run(**exact)).abs() / spread(**exact)
        actual, most = float(ratio.nan_to_num(0).max()), FEWEST_BITS * torch.finfo(dtype).eps
        message = f"expected errors above 0 and below {most:g} of the spread, found {actual:g}"
        expect(0 < actual < most, f"{dtype}: {message}")


def _work(name: str) -> None:
    op = load_op(name)
    at = sizes(op)
    problem = Problem(name, {**op.defaults, **at, "dtype": "bf16"})
    full = op.elements(problem)
    none = dict.fromkeys(full, 0)
    least, most = op.flops(problem, none), op.flops(problem, full)
    expect(most > least == 0, f"expected operations from 0 to more, found {least} to {most}")
    more = op.fewest_bytes(problem, full, 2) - op.fewest_bytes(problem, none, 2)
    expected = more if op.mask else 2 * sum(full.values())  # a mask may also spare activations
    expect(more == expected, f"expected {expected} bytes more for all non-zeros, found {more}")
