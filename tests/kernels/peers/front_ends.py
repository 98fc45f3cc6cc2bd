"""What a library's public Python front end answers, and that its kernel has a time there."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from sparsebench.harness.bench import contest
from sparsebench.harness.catalog import load_kernel, load_op
from sparsebench.results.record import Contender, Problem, Status

PATTERNS = {"bsr": "blocks", "csr": "unstructured", "spense": "two_four"}
ANY_TOKENS = 3, 50


@dataclass(frozen=True)
class Answers:
    """The sizes (m, n, k) and dtypes that a front end answers, for a contender of a peer."""

    front: str
    dtypes: tuple[str, ...]
    sizes: tuple[tuple[int, int, int], ...]
    block: int = 1
    options: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)


def tokens(n: int, k: int, *counts: int) -> tuple[tuple[int, int, int], ...]:
    return tuple((m, n, k) for m in counts or ANY_TOKENS)


def cases(name: str, answers: Answers) -> list[tuple[Problem, Contender]]:
    """Return the problems of a peer's answers, each with its contender."""
    kernel = load_kernel(name)
    op = "linear" if kernel.op == "any" else kernel.op
    form, defaults = (
        ("dense" if kernel.consumes == "any" else kernel.consumes),
        load_op(op).defaults,
    )
    pattern = {"pattern": PATTERNS.get(form, "dense"), "block": answers.block}
    pattern |= {"sparsity": 0.5 if form in PATTERNS else 0.0} if op != "ffn_step" else {}
    params = {"block": answers.block} if form == "bsr" else {}
    contender = Contender(form, name, params, answers.options)
    return [
        (
            Problem(
                op,
                defaults | pattern | {"m": m, "n": n, "k": k, "dtype": dtype} | answers.fields,
                defaults=defaults,
            ),
            contender,
        )
        for dtype in answers.dtypes
        for m, n, k in answers.sizes
    ]


def assert_timed(name: str, answers: Answers, device: torch.device) -> None:
    """Run every case; skip those whose package or checkout is not installed."""
    for problem, contender in cases(name, answers):
        (row, *_), _ = contest.run(problem, [contender], device, None)
        if row.status is Status.UNSUPPORTED and row.detail.startswith("needs"):
            pytest.skip(row.detail)
        assert row.status is Status.OK, f"{dict(problem.fields)}: {row.detail}"
        assert row.samples_us
