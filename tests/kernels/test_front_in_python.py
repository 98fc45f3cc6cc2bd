"""Calls that are repeated without a compiler: what must not change while they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.kernels._common import front
from sparsebench.kernels._common.front_in_python import MOST, Repeats

X = torch.arange(32.0).view(4, 8)


def repeats(w: Tensor, holder: dict[str, Any], limit: int = 0, content: bool = True) -> Repeats:
    record = Repeats(limit)
    record.guard(holder, "w", w, content)
    record.add(X, lambda rows: rows * w)
    return record


def result(record: Repeats, x: Tensor) -> Tensor:
    y = record(x)
    assert y is not None
    return y


def test_a_call_is_repeated_for_tensors_of_the_same_layout() -> None:
    w = torch.full((8,), 2.0)
    record = repeats(w, {"w": w})
    assert torch.equal(result(record, X.clone()), 2 * X)
    assert (
        record(X.half())
        is record(X[:2])
        is record(X.T)
        is record(torch.zeros(33)[1:].view(4, 8))
        is None
    )
    record.add(X.view(2, 2, 8), lambda rows: 3 * rows)
    assert torch.equal(result(record, X.view(2, 2, 8)), 3 * X.view(2, 2, 8))


CHANGES: dict[str, Callable[[Tensor, dict[str, Any]], object]] = {
    "replaced": lambda w, holder: holder.update(w=w.clone()),
    "removed": lambda w, holder: holder.clear(),
    "written": lambda w, holder: w.mul_(2),
    "moved": lambda w, holder: setattr(w, "data", w.clone()),
    "trained": lambda w, holder: w.requires_grad_(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_weight_that_changes_ends_the_repeats(change: str) -> None:
    w = torch.ones(8)
    holder = {"w": w}
    record = repeats(w, holder)
    assert record(X) is not None
    CHANGES[change](w, holder)
    assert record(X) is None
    assert record.stale


def test_a_weight_that_every_call_reads_may_be_written() -> None:
    w = torch.ones(8)
    record = repeats(w, {"w": w}, content=False)
    w.mul_(3)
    assert torch.equal(result(record, X), 3 * X)


def test_a_call_that_torch_must_see_is_not_repeated() -> None:
    w = torch.ones(8, requires_grad=True)
    record = repeats(w, {"w": w})
    assert record(X) is None
    with torch.no_grad():
        assert record(X) is not None
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert record(X) is None
    frozen = torch.ones(8)
    other = repeats(frozen, {"w": frozen})
    assert other(X.clone().requires_grad_()) is None
    seen: list[object] = []

    def mapped(row: Tensor) -> Tensor:
        seen.append(other(row))
        return row

    torch.func.vmap(mapped)(X)
    assert seen == [None]
    assert not record.stale
    assert not other.stale


def test_a_limited_number_of_calls_is_repeated() -> None:
    w = torch.ones(8)
    record = repeats(w, {"w": w}, limit=3)
    assert [record(X) is None for _ in range(4)] == [False, False, True, True]
    assert record.due()
    assert not record.due()
    assert record(X) is not None


def test_the_oldest_call_makes_room_and_copies_are_empty() -> None:
    w = torch.ones(8)
    record = repeats(w, {"w": w})
    for m in range(5, 5 + MOST):
        record.add(torch.ones(m, 8), lambda rows: rows)
    assert record(X) is None
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
