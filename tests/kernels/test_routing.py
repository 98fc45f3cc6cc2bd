"""Tokens sorted by expert, and sums of what their experts computed."""

from typing import Any

import pytest
import torch
from torch import Tensor
from triton import knobs

from sparsebench.kernels._common import routing
from tests.compiling.triton_kernels import complaint_about_launch

FP32, BF16 = torch.float32, torch.bfloat16
ROUTES = [  # tokens, choices, experts; ids from -1 on, and up to two beyond the experts
    (1, 1, 1),
    (1, 8, 128),
    (5, 2, 8),
    (64, 4, 32),
    (300, 8, 128),  # three chunks of ids
]


def drawn(m: int, top_k: int, experts: int, dtype: torch.dtype = torch.int64) -> Tensor:
    random = torch.Generator().manual_seed(m)
    return torch.randint(-1, experts + 2, (m, top_k), generator=random).to(dtype)


def assert_routed(route: Any, ids: Tensor, experts: int) -> None:
    """Compare with a loop over the experts and their tokens, in order."""
    m, top_k = ids.shape
    rows: list[tuple[int, int]] = []
    ends = []
    for expert in range(experts):
        rows += (ids == expert).nonzero().tolist()
        ends.append(len(rows))
    source, place, actual_ends = (t.cpu() for t in route)
    assert actual_ends.tolist() == [ends]
    assert source[: len(rows)].tolist() == [token for token, _ in rows]
    assert ((source >= 0) & (source < m)).all()  # a row without an expert is read, too
    expected = torch.full((m, top_k), -1)
    for row, (token, choice) in enumerate(rows):
        expected[token, choice] = row
    assert place.tolist() == expected.tolist()


def operands(h: int, of_weights: torch.dtype, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return rows, places and weights; a row that no place names is NaN."""
    ids = drawn(9, 3, 4)
    place = routing.route(ids, 4).place
    y = torch.randn(27, h, generator=torch.Generator().manual_seed(h)).to(dtype)
    y[int(place.max()) + 1 :] = torch.nan
    return y, place, torch.rand(9, 3, generator=torch.Generator().manual_seed(1)).to(of_weights)


def sums(y: Tensor, place: Tensor, weights: Tensor) -> Tensor:
    """Return what `combine` computes, by a loop."""
    out = torch.zeros(len(place), y.shape[1])
    for token, choice in (place >= 0).nonzero().tolist():
        out[token] += y[place[token, choice]].float() * weights[token, choice].float()
    return out.to(y.dtype)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("sizes", ROUTES)
def test_rows_of_an_expert_keep_the_order_of_tokens(sizes, dtype) -> None:
    ids = drawn(*sizes, dtype)
    assert_routed(routing.route(ids, sizes[2]), ids, sizes[2])


def test_no_tokens_have_no_rows() -> None:
    source, place, ends = routing.route(torch.zeros(0, 2, dtype=torch.int64), 3)
    assert (len(source), place.shape, ends.tolist()) == (0, (0, 2), [[0, 0, 0]])
    y = routing.combine(torch.zeros(0, 8), place, torch.zeros(0, 2))
    assert y.shape == (0, 8)


@pytest.mark.parametrize("of_weights", [FP32, BF16])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_a_sum_is_rounded_once_and_reads_no_row_without_a_place(dtype, of_weights) -> None:
    y, place, weights = operands(40, of_weights, dtype)
    assert torch.equal(routing.combine(y, place, weights), sums(y, place, weights))


@pytest.mark.interpreted
@pytest.mark.parametrize("sizes", ROUTES[:4])
def test_the_kernels_are_right_in_the_interpreter(sizes, monkeypatch) -> None:
    assert knobs.runtime.interpret
    monkeypatch.setattr(routing, "CHUNK", 64)
    ids = drawn(*sizes)
    program, written = routing.routing_of(ids, sizes[2])
    program()
    assert_routed(written, ids, sizes[2])
    y, place, weights = operands(40, FP32, FP32)
    torch.testing.assert_close(
        routing.combining_of(y, place, weights)(), sums(y, place, weights), rtol=1e-6, atol=1e-6
    )


@pytest.mark.compiles
@pytest.mark.parametrize("capability", [80, 90, 100])
def test_every_generation_compiles_the_kernels(capability) -> None:
    ids = torch.empty(300, 8, dtype=torch.int64, device="meta")
    place = torch.empty(300, 8, dtype=torch.int32, device="meta")
    for dtype, of_weights in ((BF16, FP32), (BF16, BF16)):
        y = torch.empty(2400, 2048, dtype=dtype, device="meta")
        weights = torch.empty(300, 8, dtype=of_weights, device="meta")
        for program in (
            routing.routing_of(ids, 128)[0],
            routing.combining_of(y, place, weights),
        ):
            assert complaint_about_launch(program, capability) is None


@pytest.mark.gpu
def test_the_kernels_are_right_on_a_gpu_and_in_a_graph() -> None:
    for sizes in ROUTES:
        for dtype in (torch.int64, torch.int32):
            ids = drawn(*sizes, dtype).cuda()
            assert_routed(routing.route(ids, sizes[2]), ids.cpu(), sizes[2])
    for dtype in (FP32, BF16):
        y, place, weights = (t.cuda() for t in operands(1500, FP32, dtype))
        expected = sums(*(t.cpu() for t in (y, place, weights)))
        torch.testing.assert_close(routing.combine(y, place, weights).cpu(), expected)
    ids = drawn(64, 4, 32).cuda()
    routing.route(ids, 32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        routed = routing.route(ids, 32)
    ids.copy_(ids.flip(0))
    graph.replay()
    assert_routed(routed, ids.cpu(), 32)
