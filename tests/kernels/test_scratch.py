"""Counters of streams and graphs: no two of them have one row at a time."""

from typing import Any

import pytest
import torch

from sparsebench.kernels._common import scratch


@pytest.fixture
def kept(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    """Return what graphs keep, by graph; graph 0 is the one that is being captured."""
    owners: dict[int, list[Any]] = {0: []}
    monkeypatch.setattr(scratch, "keep", lambda owner: owners[0].append(owner))
    return owners


def row(arena: scratch._Arena, stream: int, graph: int | None) -> int | None:
    counters = arena.row(stream, graph)
    return None if counters is None else int(counters[0])


def arena_of(rows: int) -> scratch._Arena:
    return scratch._Arena(torch.arange(rows)[:, None], [*range(rows)])


def test_streams_and_graphs_have_a_row_each(kept) -> None:
    arena = arena_of(8)
    places = [(1, None), (2, None), (1, 7), (2, 7), (1, 8)]
    rows = [row(arena, *place) for place in places]
    assert rows == [*range(5)]
    assert [row(arena, *place) for place in places] == rows


def test_the_row_of_a_deleted_graph_is_used_again_last(kept) -> None:
    arena = arena_of(3)
    assert row(arena, 1, 7) == 0
    kept[0].clear()
    assert [row(arena, stream, None) for stream in (1, 2, 3, 4)] == [1, 2, 0, None]
