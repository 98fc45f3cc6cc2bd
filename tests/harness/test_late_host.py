"""A host that is slow: late samples are repeated, then counted; on a GPU, times stay the same."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from time import sleep
from typing import Any

import pytest
import torch

from sparsebench.harness.bench import timing
from sparsebench.harness.bench.sampling import ROUNDS, SAMPLES_PER_ROUND
from sparsebench.harness.bench.timing import TimedCall, TimedSample, ready, time_together
from sparsebench.kernels._common import gpu_clock
from sparsebench.kernels._common.gpu_clock import LIMIT_S, GpuClock
from sparsebench.kernels._kernel import Launch

GPU = torch.device("cuda", 0)


def fake_clock(monkeypatch: pytest.MonkeyPatch, late: Callable[[int], bool]) -> list[int]:
    """Replace the GPU's clock by one that is late in some rounds; return the calls per round."""
    log: list[int] = []

    def take(order: Any) -> list[TimedSample]:
        log.append(len(order))
        return [TimedSample(i, 10.0, late(len(log) - 3)) for i, _, _ in order]  # after two trials

    monkeypatch.setattr(timing, "gpu_rounds", lambda *args, **options: take)
    return log


def timed(clock: str = "graph", scope: str = "kernel") -> timing.Samples:
    call = TimedCall(lambda: torch.empty(0), clock)
    (samples,) = time_together([call], GPU, "seed", scope=scope)
    return samples


@pytest.mark.parametrize(
    ("late_rounds", "calls", "share"),
    [
        (set(), ROUNDS, 0.0),
        ({5, 6}, ROUNDS + 2, 0.0),  # the third attempt is in time
        ({5, 6, 7}, ROUNDS + 2, 1 / ROUNDS),
        (set(range(1000)), ROUNDS + timing.MOST_REPEATS, 1.0),
    ],
)
def test_late_rounds_are_repeated_and_then_counted(late_rounds, calls, share, monkeypatch) -> None:
    log = fake_clock(monkeypatch, late_rounds.__contains__)
    samples = timed()
    assert samples.late == pytest.approx(share)
    assert len(log) == 2 + calls
    assert len(samples.times_us) == ROUNDS * SAMPLES_PER_ROUND


def test_a_call_that_cannot_be_held_is_counted_but_not_repeated(monkeypatch) -> None:
    log = fake_clock(monkeypatch, lambda number: True)
    assert timed(clock="events").late == 1.0
    assert len(log) == 2 + ROUNDS


def test_a_call_from_python_includes_its_host_and_has_no_share(monkeypatch) -> None:
    fake_clock(monkeypatch, lambda number: False)
    assert timed(scope="op").late is None
    call = TimedCall(lambda: torch.empty(0), "host")
    (samples,) = time_together([call], torch.device("cpu"), "seed")
    assert samples.late is None


@contextmanager
def gil_holder() -> Iterator[None]:
    """Run a thread that hardly ever lets go of the interpreter."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(1000))

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@contextmanager
def busy_core() -> Iterator[None]:
    """Share the only core of this process with another one that is always busy."""
    cores = os.sched_getaffinity(0)
    core = min(cores)
    os.sched_setaffinity(0, {core})
    spin = f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"
    other = subprocess.Popen([sys.executable, "-c", spin])
    try:
        yield
    finally:
        other.kill()
        other.wait()
        os.sched_setaffinity(0, cores)


@pytest.mark.gpu
@pytest.mark.parametrize("slow", [gil_holder, busy_core], ids=lambda make: make.__name__)
def test_a_slow_host_moves_no_time_that_is_not_marked(slow: Any) -> None:
    x, w = (torch.randn(rows, 4096, device=GPU, dtype=torch.bfloat16) for rows in (64, 14336))
    call = lambda: torch.nn.functional.linear(x, w)  # noqa: E731
    call()
    graph = ready(Launch(call), GPU)
    quiet = [time_together([graph], GPU, "quiet")[0] for _ in range(2)]
    with slow():
        (slowed,) = time_together([graph], GPU, "slow")
    print([median(s.times_us) for s in (*quiet, slowed)], slowed.late)
    ratio = median(slowed.times_us) / median(quiet[0].times_us + quiet[1].times_us)
    assert abs(ratio - 1) < 0.01 or slowed.late


@pytest.mark.gpu
def test_a_hold_ends_by_itself_and_gives_up() -> None:
    clock, x = GpuClock(GPU), torch.zeros(8, device=GPU)
    x.add_(1)
    for _ in range(gpu_clock.EXPIRED):
        assert clock.holds
        began = torch.cuda.Event(enable_timing=True)
        began.record()
        with clock.hold():
            torch.cuda.synchronize()  # waits for the hold, which waits for the end of this block
            # The host sleeps, because a GPU that others use reaches `begin` late itself.
            late = clock.sample(lambda: (x.add_(1), sleep(0.1))).late
        torch.cuda.synchronize()
        assert late
        ended = torch.cuda.Event(enable_timing=True)
        ended.record()
        ended.synchronize()
        assert 0.9 * LIMIT_S < began.elapsed_time(ended) / 1e3 < 2 * LIMIT_S
    assert not clock.holds


@pytest.mark.gpu
def test_a_stream_is_not_held_where_launches_block() -> None:
    code = "from sparsebench.kernels._common.gpu_clock import GpuClock, torch\n"
    code += "print(GpuClock(torch.device('cuda', 0)).holds)"
    for blocking in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "CUDA_LAUNCH_BLOCKING": blocking},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == [str(blocking == "0")]
