"""Small worlds, checked by hand where they are small and by their laws where they are not."""

import networkx
import numpy as np
import pytest
from scipy.sparse.csgraph import shortest_path

from sparsebench.harness.inputs.grid import ValueGrid
from sparsebench.harness.patterns.block_diagonal import clique_cells, cliques
from sparsebench.harness.patterns.scale_free import hub_cells, hubs
from sparsebench.harness.patterns.small_world import MOVED, ring, ring_cells

SIZES = [(3, 1), (10, 1), (10, 4), (64, 5), (101, 20)]


def dice(nodes: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**31, (nodes, nodes), dtype=np.int32)


@pytest.mark.parametrize(("nodes", "m"), SIZES)
def test_a_ring_has_the_cells_of_its_level(nodes: int, m: int) -> None:
    result = ring(dice(nodes), m)
    assert result.sum() == ring_cells(nodes)[m - 1] == nodes * (2 * m + 1)
    assert (result == result.T).all()
    assert result.diagonal().all()


def test_a_small_world_is_small() -> None:
    """Watts and Strogatz 1998: paths as short as a random graph's, neighbours that know another."""
    nodes, m = 400, 4
    ours = networkx.from_numpy_array(ring(dice(nodes), m) & ~np.eye(nodes, dtype=bool))
    theirs = networkx.watts_strogatz_graph(nodes, 2 * m, MOVED, seed=1)
    for measure in (networkx.average_shortest_path_length, networkx.average_clustering):
        assert measure(ours) == pytest.approx(measure(theirs), rel=0.1)
    regular = networkx.watts_strogatz_graph(nodes, 2 * m, 0)
    lengths = [shortest_path(networkx.to_scipy_sparse_array(g)).mean() for g in (ours, regular)]
    assert lengths[0] < lengths[1] / 4


@pytest.mark.parametrize(("nodes", "m"), [*SIZES, (10, 9)])
def test_hubs_have_the_cells_of_their_level(nodes: int, m: int) -> None:
    result = hubs(dice(nodes), m)
    links = 2 * m * (nodes - m)
    assert result.sum() == hub_cells(nodes)[m - 1] == links + m * m + nodes - m
    assert (result == result.T).all()
    assert result.diagonal().all()
    assert result[:m, :m].all()


@pytest.mark.parametrize(("nodes", "m"), [(3, 1), (3, 2), (9, 2), (9, 8), (33, 5)])
@pytest.mark.parametrize("most", [1, 2, 2**31])
def test_a_link_goes_to_the_node_whose_share_of_the_links_holds_its_die(nodes, m, most) -> None:
    """Each older node that a new one has not reached yet has as many numbers as links."""
    dice = np.random.default_rng(m).integers(0, most, (nodes, nodes))
    links = [0] * nodes
    linked = np.eye(nodes, dtype=bool)
    linked[:m, :m] = True
    for new in range(m, nodes):
        reached: list[int] = []
        for die in dice[new, :m]:
            left = [old for old in range(new) if old not in reached]
            share = [old for old in left for _ in range(links[old] if new > m else 1)]
            reached.append(share[die % len(share)])
        links[new] = m
        for old in reached:
            links[old] += 1
            linked[new, old] = linked[old, new] = True
    assert np.array_equal(hubs(dice, m), linked)


def test_the_largest_hubs_are_as_large_as_a_library_s() -> None:
    """Barabasi and Albert 1999: the few oldest nodes have many times the typical links."""
    nodes, m = 400, 4
    ours, theirs = [], []
    for seed in range(10):
        linked = hubs(dice(nodes, seed), m) & ~np.eye(nodes, dtype=bool)
        linked[:m, :m] = False
        ours.append(linked.sum(1).max())
        start = networkx.star_graph(m)
        graph = networkx.barabasi_albert_graph(nodes, m, seed=seed, initial_graph=start)
        theirs.append(max(degree for _, degree in graph.degree))
    assert np.mean(ours) == pytest.approx(np.mean(theirs), rel=0.25)
    assert np.mean(ours) > 5 * 2 * m


@pytest.mark.parametrize("shape", [(1, 1), (6, 6), (7, 4), (5, 12)])
def test_cliques_share_rows_and_columns_evenly(shape: tuple[int, int]) -> None:
    for parts, cells in enumerate(clique_cells(ValueGrid(*shape)), start=1):
        result = cliques(np.zeros(shape, np.int32), parts)
        assert result.sum() == cells
        assert len(np.unique(result, axis=0)) == parts
        assert np.ptp(result.sum(1)) <= 1
