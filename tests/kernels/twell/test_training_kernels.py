"""The Triton kernels of SparseGatedMLP: the index of active units, their programs, their code."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu

from sparsebench.errors import Unsupported
from sparsebench.formats.active_csr import ActiveCsr
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels.twell import _autograd, _gather, _index, _overflow
from tests.compiling.triton_kernels import complaint_about_launch
from tests.tools.marks import sampled

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 2**16 + 8, 64), "65544"),
        ((2**19, 4096, 64), "2147483648"),
        ((2**16, 64, 2**15), "2147483136"),
        ((2**14, 2**16, 2**15), "2147483648"),
    ],
)
def test_sizes_beyond_the_index_types_are_unsupported(sizes, message):
    with pytest.raises(Unsupported, match=message):
        _index.require_room(*sizes)


def test_the_largest_sizes_of_the_index_types_are_supported():
    _index.require_room(2**10, 2**16, 2**14)  # units by units would be 2^32


@pytest.mark.interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", sampled([[7, 40], [130, 72], [300, 8], [5, 33000]], 1))
def test_interpreted_index_lists_each_unit_twice(shape):
    g = torch.where(torch.rand(shape) < 0.2, torch.rand(shape), -torch.rand(shape))
    g[2], g[3], g[4, 5] = 1.0, 0.0, float("nan")
    rows, columns = (~(g <= 0)).nonzero(as_tuple=True)
    active = _index.index_of(g, len(rows) + 3)
    of = slice(0, len(rows))
    assert torch.equal(active.offsets.diff(), (~(g <= 0)).sum(1).int())
    assert torch.equal(active.unit_offsets.diff(), (~(g <= 0)).sum(0).int())
    assert torch.equal(active.columns[of].long() & 0xFFFF, columns)
    assert torch.equal(active.values[of].nan_to_num(9), g[rows, columns].nan_to_num(9))
    by_unit = (~(g.T <= 0)).nonzero(as_tuple=True)
    assert torch.equal(active.tokens[of].long(), by_unit[1])
    place = active.places[of].long()
    assert torch.equal(by_unit[0][place], columns)
    assert torch.equal(by_unit[1][place], rows)


@pytest.mark.interpreted
def test_interpreted_index_without_room_writes_nothing():
    g = torch.ones(5, 40)
    programs, active = _index.listing(g, 199)
    lists = active.columns, active.values, active.tokens, active.places
    for values in lists:
        values.fill_(7)
    for program in programs:
        program()
    assert active.offsets[-1] == active.unit_offsets[-1] == 200
    for values in lists:
        assert values.eq(7).all()


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def programs(m: int, n: int, k: int, dtype: torch.dtype) -> Iterator[BoundKernel]:
    x, w, g, norms = (empty(*s, dtype=dtype) for s in ((m, k), (n, k), (m, n), (m,)))
    norms = norms.float()
    packed = _autograd.gated_mlp(x, w, w, w, False, 88)[2:]
    offsets, columns, values, u, unit_offsets, tokens, places = packed
    active = ActiveCsr((m, n), offsets, columns, values, unit_offsets, tokens, places)
    yield from _index.listing(g, active.capacity)[0]
    for squared in (False, True):
        yield _gather.up(x, w, active, squared=squared)[0]
        yield _gather.slopes(x, w, active, u, norms, squared=squared)[0]
        yield from _overflow.forward(x, w, w, g, x, norms, active, squared=squared, device=CPU)
        out = x, w, w, w
        yield from _overflow.backward(
            x, x, (w, w, w), norms, out, active, squared=squared, device=CPU
        )
    h, by_unit = places.float(), (unit_offsets, tokens)
    dsd = _gather.dsd
    yield dsd("norms", (offsets, columns), (h,), (w,), (x, norms))
    yield dsd("two_products", (offsets, columns), (h, h), (w, w), (x,))
    yield dsd("two_outputs", by_unit, (h, h), (x,), (w, w))
    yield dsd("plain", by_unit, (h,), (x,), (w,))


@pytest.mark.parametrize("sizes", [(2**24, 8, 8), (8, 2**16, 8), (8, 8, 2**23)])
def test_grids_are_within_the_limits_of_a_launch(sizes, monkeypatch):
    monkeypatch.setattr(_overflow, "before_hopper", lambda device: False)
    _index.require_room(*sizes)
    for program in programs(*sizes, torch.bfloat16):
        first, *others = program.grid
        assert first < 2**31, program.kernel
        assert max(others, default=0) < 2**16, program.kernel


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("capability", "dtype"),
    sampled([(90, "bfloat16"), (80, "bfloat16"), (90, "float32"), (100, "bfloat16")]),
)
def test_every_kernel_compiles_without_a_spill(capability, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile, ignoring the cache
    old = capability < 90
    monkeypatch.setattr(_overflow, "before_hopper", lambda device: old)
    for program in programs(16384, 5632, 2048, getattr(torch, dtype)):
        assert complaint_about_launch(program, capability) is None, program


@pytest.mark.gpu
def test_a_gpu_is_correct_at_the_last_slot_and_beyond() -> None:
    options: dict[str, Any] = {"dtype": torch.float16, "device": GPU}
    gate, w = torch.randn(300, 1024, **options) - 1.5, torch.randn(1024, 512, **options)
    y, norms = torch.full((300, 512), 7.0, **options), torch.full((300,), 7.0, device=GPU)
    count = int((gate > 0).sum())
    exact, short = (_index.index_of(gate, room) for room in (count, count - 1))
    rows, columns = (gate > 0).nonzero(as_tuple=True)
    assert int(exact.offsets[-1]) == int(short.offsets[-1]) == int(exact.unit_offsets[-1]) == count
    assert torch.equal(exact.columns.long() & 0xFFFF, columns)
    assert torch.equal(exact.tokens[exact.places.long()].long(), rows)
    h = exact.values.float()
    for active, is_written in ((short, False), (exact, True)):
        lists = active.offsets, active.columns
        _gather.dsd("norms", lists, (h,), (w,), (y, norms))()
        assert bool((y != 7).any()) == bool((norms != 7).any()) == is_written
    exact = relu(gate).double() @ w.double()
    assert (y.double() - exact).norm() <= 1e-2 * exact.norm()


@pytest.mark.gpu
def test_a_gpu_lists_more_tokens_than_a_second_axis_has() -> None:
    m, n = 2**21 + 40, 8
    gate = torch.randn(m, n, device=GPU)
    active = _index.index_of(gate, count := int((gate > 0).sum()))
    by_unit = (gate.T > 0).nonzero(as_tuple=True)
    assert int(active.unit_offsets[-1]) == count
    assert torch.equal(active.tokens.long(), by_unit[1])
    assert torch.equal(active.values, gate[gate > 0])
