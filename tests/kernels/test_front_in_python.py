"""Calls that are repeated, in Python and by front.cpp: what must not change while they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import front
from sparsebench.kernels._common.front_in_python import MOST, Repeats
from tests.kernels.test_front import DOUBLE, kind  # noqa: F401
from tests.kernels.test_front import pytestmark as extension

X = torch.arange(32.0).view(4, 8)
Record = Callable[..., Any]


def by_extension(record: Any, x: Tensor) -> None:
    """Record a launch that writes 2 X."""
    step: Any = (DOUBLE, len(x), 32, 0, [], b"\0" * 16, [0, 8], [(0, 0, 0), (1, 0, 8)], None)
    record.add(0, [x], [torch.empty_like(x)], [step], [], None, [], None)


@pytest.fixture(params=["Python", pytest.param("extension", marks=extension)])
def doubling(request: pytest.FixtureRequest) -> Record:
    """Return a function that records calls of 2 X, for as many tokens as each X has."""
    in_python = request.param == "Python"
    new = Repeats if in_python else request.getfixturevalue("kind")

    def recorded(holder: dict[str, Any], *xs: Tensor, limit: int = 0, content: bool = True) -> Any:
        record = new(limit)
        record.guard(holder, "w", holder["w"], content)
        record.guard(holder, "bias", holder.get("bias"), False)
        for x in xs or (X,):
            if in_python:
                record.add(x, lambda rows: 2 * rows)
            else:
                by_extension(record, x)
        return record

    return recorded


def test_a_call_is_repeated_for_tensors_of_the_same_layout(doubling: Record) -> None:
    record = doubling({"w": torch.ones(8)}, X, X[:2])
    for x in (X, X.clone(), X[:2] + 1):
        assert torch.equal(record(x), 2 * x)
    for other in (X.half(), X[:3], X.T):
        assert record(other) is None
    assert not record.stale


CHANGES: dict[str, Callable[[Tensor, dict[str, Any]], object]] = {
    "replaced": lambda w, holder: holder.update(w=w.clone()),
    "removed": lambda w, holder: holder.clear(),
    "written": lambda w, holder: w.mul_(2),
    "moved": lambda w, holder: setattr(w, "data", w.clone()),
    "trained": lambda w, holder: w.requires_grad_(),
    "biased": lambda w, holder: holder.update(bias=w),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_ends_the_repeats(doubling: Record, change: str) -> None:
    holder = {"w": torch.ones(8)}
    record = doubling(holder)
    assert record(X) is not None
    CHANGES[change](holder["w"], holder)
    with torch.no_grad():
        assert record(X) is None
    assert record.stale


def test_a_weight_that_every_call_reads_may_be_written(doubling: Record) -> None:
    w = torch.ones(8)
    record = doubling({"w": w}, content=False)
    w.mul_(3)
    assert torch.equal(record(X), 2 * X)


def test_a_call_that_torch_must_see_is_not_repeated(doubling: Record) -> None:
    record = doubling({"w": torch.nn.Parameter(torch.ones(8))})
    assert record(X) is None
    with torch.no_grad():
        assert record(X) is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert record(X) is None
        assert record(X.as_subclass(type("Other", (Tensor,), {}))) is None
    frozen = doubling({"w": torch.ones(8)})
    assert frozen(X.clone().requires_grad_()) is None
    seen: list[object] = []

    def mapped(row: Tensor) -> Tensor:
        seen.append(frozen(row))
        return row

    torch.func.vmap(mapped)(X)
    assert seen == [None]
    assert not record.stale
    assert not frozen.stale


def test_a_limited_number_of_calls_is_repeated(doubling: Record) -> None:
    record = doubling({"w": torch.ones(8)}, limit=3)
    repeated = [record(X) is not None for _ in range(5)]
    assert repeated[0]
    assert not repeated[-1]
    assert record.due()
    assert not record.due()
    assert record(X) is not None


def test_the_oldest_call_makes_room_and_copies_are_empty(doubling: Record) -> None:
    later = [torch.ones(m, 8) for m in range(5, 5 + max(MOST, 70))]
    record = doubling({"w": torch.ones(8)}, X, *later)
    assert record(X) is None
    assert torch.equal(record(later[-1]), 2 * later[-1])
    assert copy.deepcopy(record) is None


def test_the_third_call_of_an_unchanged_weight_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPARSEBENCH_FRONT", "0")
    w, bias = torch.full((8,), 2.0), torch.ones(8)
    record: Any = None
    guards = [front.Guard({"w": w}, "w", w)]
    for _ in range(3):
        y, record = front.recorded(record, X, lambda rows: rows * w, guards, bias=bias)
        assert torch.equal(y, 2 * X + 1)
    assert torch.equal(record(X), 2 * X + 1)
    w.mul_(2)
    assert record(X) is None
