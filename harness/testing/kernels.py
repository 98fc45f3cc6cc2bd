"""The contract of a kernel: its results are right, and it refuses what it cannot compute.

Contests check it as in a run: poisoned output, activations redrawn in place, spot checks while
timing, operands and harness compared after each step (bench/contest.py). A second contest pins the
choice of the first.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.contest_state import ContestOptions
from sparsebench.harness.catalog import load_format, load_kernel, load_op
from sparsebench.harness.run.try_kernel import plan
from sparsebench.harness.testing.contract import Check, checker, expect
from sparsebench.results.record import Case, Row, Status

DTYPES = "fp32", "bf16", "fp16"
SIZES = {"m": 16, "n": 128, "k": 128}
PROBLEMS = (
    "pattern=unstructured sparsity=0.5",
    "pattern=blocks block=16 sparsity=0.5",
    "pattern=two_four sparsity=0.5",
    "activation=relu",
    "",
)
"""The problems to try if no words are given: a format holds some of them, and refuses others."""


def kernel_checks(name: str, *words: str, device: str = "cpu") -> list[Check]:
    """Return the contract of a kernel, sentence by sentence.

    `name` is the kernel's name in a suite. Each of `words` is a problem in the words of
    `sparsebench try`, such as `m=16 n=64 k=64 sparsity=0.9`, and the kernel must run every one, in
    at least one of DTYPES. Without words it must run one of PROBLEMS.
    """
    problems: dict[str, Sequence[str]] = {f"is right: {w}": [w] for w in words}
    problems = problems or {"is right wherever it runs": PROBLEMS}
    return [
        Check(f"{name} has an op and a format that exist", partial(_names, name)),
        Check(f"{name} takes operands, and options by keyword", partial(_signature, name)),
        *(Check(f"{name} {s}", partial(_right, name, p, device)) for s, p in problems.items()),
    ]


check_kernel = checker(kernel_checks)


def _names(name: str) -> None:
    kernel = load_kernel(name)
    if kernel.op != "any":
        load_op(kernel.op)
    if kernel.consumes != "any":
        load_format(kernel.consumes)
    devices = "cuda", "cpu", "any"
    expect(kernel.device in devices, f"expected a device of {devices}, found {kernel.device!r}")


def _signature(name: str) -> None:
    parameters = [*inspect.signature(load_kernel(name).prepare).parameters.values()]
    options = [p for p in parameters[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    signature = ", ".join(str(parameter) for parameter in parameters)
    fits = parameters and len(options) == len(parameters) - 1
    expect(fits, f"expected prepare(operands, *, options), found ({signature})")
    unset = [p.name for p in options if p.default is p.empty]
    expect(not unset, f"expected a default of every option, found none of {unset}")


def _right(name: str, problems: Sequence[str], device: str) -> None:
    """Run every problem; at least one row must be ok, and none may be wrong.

    The first problem that runs is tried in every dtype, the others in the first dtype that ran.
    The first row's choice is pinned in a second contest, which must use it again.
    """
    refused: list[str] = []
    first: tuple[str, str] | None = None
    for words in problems:
        for dtype in DTYPES if first is None else [first[1]]:
            what = f"{words} {dtype}".strip()
            try:
                row = _row(name, words, dtype, device)
            except SuiteError as error:  # an unknown field, or an impossible level
                refused.append(f"{what}: {error}")
                continue
            if row.status is Status.UNSUPPORTED:
                refused.append(f"{what}: {row.detail}")
                continue
            message = f"expected a right output, found {row.status}: {row.detail}"
            expect(row.status is Status.OK, f"{what}: {message}")
            if first is None:
                again = _row(name, words, dtype, device, row.choice)
                message = f"expected a pinned choice to be used again, found {again.choice}"
                expect(again.choice == row.choice, f"{what}: {message}; pinned {row.choice}")
                first = words, dtype
    expect(first, f"expected a problem that it runs, found none: {'; '.join(refused)}")


def _row(
    name: str, words: str, dtype: str, device: str, pinned: Mapping[str, Any] | None = None
) -> Row:
    chosen = {field: value for field, _, value in (word.partition("=") for word in words.split())}
    op = load_kernel(name).op
    loaded = load_op(chosen.get("op", "linear" if op == "any" else op))
    names, example = loaded.fields.model_fields, loaded.example or SIZES
    sizes = {n: str(value) for n, value in example.items() if n in names and value is not None}
    fields = {**sizes, "dtype": dtype, **chosen}
    where = torch.device(device)
    planned = plan(name, [f"{field}={value}" for field, value in fields.items()], where)
    alone = replace(next(c for c in planned.contenders if c.kernel == name), baseline=False)
    choices = {Case(planned.problem, alone).id: pinned} if pinned else {}
    (row,), _ = contest.run(planned.problem, [alone], where, None, ContestOptions(pinned=choices))
    return row
