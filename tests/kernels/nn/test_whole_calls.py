"""Calls that are recorded whole: what is replayed, by front.cpp on a CPU, and what never is."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial, reduce
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from sparsebench import moba_attention, nsa_attention, select_attention
from sparsebench.errors import SparsebenchError, Unsupported
from sparsebench.formats.block_mask import BlockMask
from sparsebench.kernels._common import front
from sparsebench.kernels._common.tape import on_tape
from sparsebench.kernels.nn import _whole_calls
from sparsebench.kernels.nn._whole_calls import _recordings, replay_or_record
from tests.kernels.conftest import COLUMNS, launch, on_a_cpu

SEEN: list[dict[str, Any]] = []  # options of the calls in Python
BOUND: set[Any] = set()  # strides for which the launch is bound


def add(*operands: Tensor, **options: Any) -> Tensor:
    """Return the sum of the operands by a launch, or by torch if it is differentiated."""
    SEEN.append(options)
    if type(options.get("keep", 1)) is not int:
        raise Unsupported("keep: expected a whole number")
    if torch.is_grad_enabled() and operands[0].requires_grad:
        return operands[0] + operands[1]
    total, strides = torch.empty_like(operands[0]), tuple([x.stride() for x in operands])
    launch(*operands, total)
    on_tape(total, complete="pool" not in options and strides in BOUND)
    BOUND.add(strides)
    return total


def draw(count: int = 2) -> list[Tensor]:
    return [torch.randint(-9, 9, (2, 3, COLUMNS)).float() for _ in range(count)]


def views() -> list[Tensor]:
    return [x.mT.contiguous().mT for x in draw()]


def calls_in_python(times: int, operands: Callable[[], list[Tensor]] = draw, **options: Any) -> int:
    """Return how many of some calls ran in Python, and check the result of each."""
    SEEN.clear()
    for _ in range(times):
        inputs = operands()
        assert torch.equal(replay_or_record(add, tuple(inputs), options), sum(inputs))
    return len(SEEN)


def replays(test: Any) -> Any:
    """Mark a test of calls that front.cpp replays without a GPU."""
    return reduce(lambda result, mark: mark(result), on_a_cpu, test)


@pytest.fixture(autouse=True)
def forget_recordings() -> None:
    _recordings.cache_clear()
    BOUND.clear()


@replays
def test_a_call_that_repeats_runs_no_python() -> None:
    assert calls_in_python(6, keep=3) == 2  # one that plans, one on a tape
    assert calls_in_python(6, keep=3) == 0
    assert calls_in_python(6, keep=4) == 2
    assert calls_in_python(6, partial(draw, 3), keep=3) == 2
    assert calls_in_python(3, keep=3) == 0


@replays
def test_bad_options_are_refused_in_each_call() -> None:
    calls_in_python(4, keep=1)
    for _ in range(3):
        for keep in (True, 1.0, torch.tensor(1), [1]):  # the first three equal 1
            with pytest.raises(Unsupported):
                replay_or_record(add, tuple(draw()), {"keep": keep})
    assert calls_in_python(4, keep=1) == 0


@replays
def test_operands_of_other_sizes_or_layouts_are_not_mixed_up() -> None:
    calls_in_python(4)
    assert calls_in_python(4, lambda: [x.flatten(0, 1) for x in draw()]) == 2
    assert calls_in_python(4, views) == 0
    assert calls_in_python(4, lambda: draw(1) * 2) == 0  # one tensor for both


@replays
def test_views_that_no_kernel_reads_are_recorded_as_copies() -> None:
    assert calls_in_python(6, views) == 2
    assert calls_in_python(6) == 0


@replays
def test_a_recording_keeps_no_operand_and_no_result() -> None:
    for _ in range(4):
        operands = draw()
        tensors = [*operands, replay_or_record(add, tuple(operands), {})]
        alive = [*map(ref, tensors)]
        del operands, tensors
        assert not any(t() is not None for t in alive)
    SEEN.clear()
    assert calls_in_python(1) == 0


@replays
def test_a_result_that_is_written_changes_no_later_one() -> None:
    a, b = draw()
    for _ in range(5):
        o = replay_or_record(add, (a, b), {})
        assert torch.equal(o, a + b)
        a.copy_(o.mul_(2) - 1)


@replays
def test_a_call_too_large_to_record_runs_in_python(monkeypatch) -> None:
    def allocate(*_: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("expected more memory")

    calls_in_python(1)
    with monkeypatch.context() as patch:
        patch.setattr(front, "_add", allocate)
        assert calls_in_python(3) == 3
    assert calls_in_python(3) == 3


@replays
def test_a_call_that_torch_must_see_runs_in_python() -> None:
    calls_in_python(4)
    for _ in range(3):
        a, b = (x.requires_grad_() for x in draw())
        o = replay_or_record(add, (a, b), {})
        assert torch.equal(torch.autograd.grad(o.sum(), a)[0], torch.ones_like(a))
    with FlopCounterMode(display=False):
        assert calls_in_python(4) == 4
    with torch.no_grad():
        assert calls_in_python(4, lambda: [x.requires_grad_() for x in draw()]) < 4
    with torch.inference_mode():
        assert calls_in_python(4) < 4
        assert calls_in_python(4) == 0
    assert calls_in_python(4) == 0


@replays
def test_a_call_whose_tape_is_not_complete_is_never_replayed() -> None:
    assert calls_in_python(4, pool="max") >= 4


@replays
def test_a_thread_has_recordings_of_its_own() -> None:
    calls_in_python(4)
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(calls_in_python, 6).result() == 2
    assert calls_in_python(4) == 0


# ---- with kernels ----

CALLS: dict[str, Callable[..., Tensor]] = {
    "pooled": partial(select_attention, keep=4, block=64, causal=True),
    "mass": partial(select_attention, mass=0.8, block=64),
    "max": partial(select_attention, keep=4, block=64, pool="max"),
    "xattention": partial(select_attention, keep=4, block=64, causal=True, method="xattention"),
    "vsa": partial(select_attention, keep=4, method="vsa"),
    "selected": partial(select_attention, keep=6, causal=True, method="nsa"),
    "nsa": lambda q, k, v: nsa_attention(q, k, v, q[..., 0], q[..., 1], keep=6),
    "window": lambda q, k, v: nsa_attention(q, k, v, *q.unbind(3)[:3], keep=6, window=100),
    "moba": partial(moba_attention, keep=3, block=128),
    "by head": partial(select_attention, keep=3, causal=True, block=128, method="moba"),
    "short": partial(moba_attention, keep=9, block=128),
}
IN_TORCH = "max", "vsa"  # a step of these is computed by torch


def on_gpu(tokens: int = 1024) -> list[Tensor]:
    sizes = (2, tokens, 8, 128), (2, tokens, 2, 128), (2, tokens, 2, 128)
    return [torch.randn(size, device="cuda").bfloat16() for size in sizes]


def compute(function: Callable[..., Tensor], operands: Any, options: Any) -> Tensor:
    """Take the place of `replay_or_record`: make the call in Python."""
    return function(*operands, **options)


def in_python(call: Callable[..., Tensor], *operands: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_whole_calls, "replay_or_record", compute)
        return call(*operands)


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(7), b.nan_to_num(7))


@pytest.fixture
def selections(monkeypatch) -> list[Any]:
    """Return a list that gets an item for each mask that Python makes from scores."""
    items, from_scores = [], BlockMask.from_scores

    def count(cls: Any, *args: Any, **options: Any) -> BlockMask:
        items.append(args)
        return from_scores(*args, **options)

    monkeypatch.setattr(BlockMask, "from_scores", classmethod(count))
    return items


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_whole_calls_equal_those_in_python_on_a_gpu(name: str, selections) -> None:
    call = CALLS[name]
    with torch.no_grad():
        for number in range(8):
            operands = on_gpu()
            if number == 5:  # views that no kernel reads
                operands = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in operands]
            if number == 6:
                operands[1][:, 200] = torch.nan
            selections.clear()
            actual = call(*operands)
            assert number < 2 or name in IN_TORCH or not selections
            right = in_python(call, *operands)
            assert equal(actual, right)
            with torch.autocast("cuda", torch.bfloat16):
                assert equal(call(*(x.float() for x in operands)), right)
            with torch.inference_mode():
                assert equal(call(*(x.clone() for x in operands)), right)
    leaves = [x.requires_grad_() for x in operands]
    gradients = torch.autograd.grad(call(*leaves).sum(), leaves)
    expected = torch.autograd.grad(in_python(call, *leaves).sum(), leaves)
    assert all(map(torch.equal, gradients, expected))


# queries and keys of two sequences, heads and KV heads, D
SHAPES = [
    ((1000, 1000), (6, 2), 64, torch.float16),
    ((333, 1500), (8, 8), 80, torch.bfloat16),
    ((300, 300), (4, 1), 128, torch.float32),
    ((9, 2000), (8, 2), 128, torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled", "mass", "xattention", "window", "moba"])
@pytest.mark.parametrize(("tokens", "heads", "d", "dtype"), SHAPES)
def test_other_sizes_are_replayed_on_a_gpu(
    tokens: tuple[int, int], heads: tuple[int, int], d: int, dtype: torch.dtype, name: str,
    selections,
) -> None:  # fmt: skip
    (queries, keys), (many, few) = tokens, heads
    call = torch.no_grad()(CALLS[name])
    for number in range(5):
        q = torch.randn(2, queries, many, d, device="cuda", dtype=dtype)
        both = torch.randn(2, keys, few, 2 * d, device="cuda", dtype=dtype)
        operands = q, *both.split(d, 3)  # no kernel of attention reads these views
        selections.clear()
        actual = call(*operands)
        assert number < 2 or not selections
        assert equal(actual, in_python(call, *operands))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled", "nsa", "moba"])
def test_a_replay_needs_no_more_memory_than_python_on_a_gpu(name: str, selections) -> None:
    call, operands = torch.no_grad()(CALLS[name]), on_gpu(4096)

    def peak(run: Callable[[], Tensor]) -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before

    for _ in range(3):
        call(*operands)
        in_python(call, *operands)
    selections.clear()
    peak_of_replay = peak(lambda: call(*operands))
    assert not selections
    assert peak_of_replay <= 1.05 * peak(lambda: in_python(call, *operands))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled", "nsa", "moba"])
def test_streams_and_early_captures_are_kept_apart_on_a_gpu(name: str) -> None:
    call, several = torch.no_grad()(CALLS[name]), [on_gpu(640) for _ in range(6)]
    right = [in_python(call, *operands) for operands in several]
    streams, graph = [torch.cuda.Stream() for _ in range(3)], torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=streams[2]):  # before any call is recorded
        output = call(*several[0])
    torch.cuda.synchronize()
    results = []
    for i in range(24):
        with torch.cuda.stream(streams[i % 3]):
            results.append(call(*several[i % 6]))
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(output, right[0])
    assert all(torch.equal(o, right[i % 6]) for i, o in enumerate(results))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled", "window", "moba"])
def test_threads_and_graphs_keep_whole_calls_apart_on_a_gpu(name: str) -> None:
    call = torch.no_grad()(CALLS[name])

    def repeat(operands: list[Tensor]) -> list[Tensor]:
        return [call(*operands) for _ in range(12)]

    several = [on_gpu() for _ in range(4)]
    right = [in_python(call, *operands) for operands in several]
    for _ in range(2):  # later threads may have the numbers, so the recordings, of earlier ones
        with ThreadPoolExecutor(4) as threads:
            for results, o in zip(threads.map(repeat, several), right, strict=True):
                assert all(torch.equal(result, o) for result in results)
    operands, graph = [x.clone() for x in several[0]], torch.cuda.CUDAGraph()
    repeat(operands)
    with torch.cuda.graph(graph):
        output = call(*operands)
    for other, o in zip(several[::-1], right[::-1], strict=True):
        for x, y in zip(operands, other, strict=True):
            x.copy_(y)
        graph.replay()
        assert torch.equal(output, o)
        assert torch.equal(call(*other), o)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["pooled", "nsa", "moba"])
def test_bad_input_of_whole_calls_is_refused_again_on_a_gpu(name: str) -> None:
    call, (q, k, v) = CALLS[name], on_gpu()
    with torch.no_grad():
        for _ in range(4):
            call(q, k, v)
        for _ in range(3):
            for operands in ((q, k, v[:, 1:]), (q, k.half(), v), (q, k.cpu(), v), (q[0], k, v)):
                with pytest.raises(SparsebenchError):
                    call(*operands)
