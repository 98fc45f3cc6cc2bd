"""Counters of streams and graphs: no two of them have one row at a time."""

import gc
from typing import Any

import pytest
import torch

from sparsebench.kernels._common import scratch
from sparsebench.kernels._common.capture import capturing


@pytest.fixture
def owners(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    """Return what graphs keep, by graph; graph 0 is the one that is being captured."""
    of_graphs: dict[int, list[Any]] = {0: []}
    monkeypatch.setattr(scratch, "keep", lambda owner: of_graphs[0].append(owner))
    return of_graphs


def row(arena: scratch._Arena, stream: int, graph: int | None) -> int | None:
    counters = arena.row(stream, graph)
    return None if counters is None else int(counters[0])


def arena_of(rows: int) -> scratch._Arena:
    return scratch._Arena(torch.arange(rows)[:, None], [*range(rows)])


def test_streams_and_graphs_have_a_row_each(owners) -> None:
    arena = arena_of(8)
    places = [(1, None), (2, None), (1, 7), (2, 7), (1, 8)]
    rows = [row(arena, *place) for place in places]
    assert rows == [*range(5)]
    assert [row(arena, *place) for place in places] == rows


def test_the_row_of_a_deleted_graph_is_used_again_last(owners) -> None:
    arena = arena_of(3)
    assert row(arena, 1, 7) == 0
    owners[0].clear()
    assert [row(arena, stream, None) for stream in (1, 2, 3, 4)] == [1, 2, 0, None]


@pytest.mark.gpu
@pytest.mark.parametrize("context", [torch.cuda.graph, capturing])
def test_a_graph_has_its_own_row_until_it_is_deleted(context: Any) -> None:
    def places(graph: torch.cuda.CUDAGraph) -> set[int]:
        with context(graph):
            rows = [scratch.counters(x, 4) for _ in range(3)]
            x.add_(1)
        return {row.data_ptr() for row in rows}

    x = torch.zeros(8, device="cuda")
    outside = scratch.counters(x, 4).data_ptr()
    graphs = [torch.cuda.CUDAGraph() for _ in range(3)]
    seen = [places(graph) for graph in graphs]
    assert [len(rows) for rows in seen] == [1, 1, 1]
    assert len({outside}.union(*seen)) == 4
    gc.collect()
    unused = len(scratch._ARENAS[x.device.index].unused)
    del graphs
    gc.collect()
    assert len(scratch._ARENAS[x.device.index].unused) == unused + 3
