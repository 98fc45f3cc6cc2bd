"""Energy of a call: NVML's counter over seconds of the same call, back to back.

    calls ... | tick   calls calls calls calls ...   tick |
              E0, t0           window_s or more      E1, t1        j_per_call = (E1 - E0) / calls

The driver updates the counter about every 100 ms. A window begins and ends at an update, so its
length is known to a batch of calls, BATCH_S. What the number is and is not:

    - The energy of the board, idle power, memory and converters included; not that of the host.
    - Hot: a call finds in the L2 cache what the one before left there.
    - A call that is shorter than the host needs to launch it pays for the gap to the next.
    - On A100 and H100 the sensor looks at 25 % of the time (arXiv:2312.02741): seconds of the same
      work average that out, a few calls do not. Nothing is computed from a power limit or a TDP.
    - One call after the other warms the board up: compare calls measured in one run, in turn.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.contest_state import synchronize
from sparsebench.harness.machine._nvml import NoNvml, board
from sparsebench.harness.machine.device import identity

WINDOW_S = 2.0
WARM_UP_S = 0.5
BATCH_S = 0.01  # 0.5 % of the window
STUCK_S = 5.0  # without a move: the counter is none


class NoMeter(SuiteError):
    """This device has no counter of its energy; the message is one line."""


@dataclass(frozen=True)
class Energy:
    """The energy of one call in J, and the window in s and in calls that it is the mean of."""

    j_per_call: float
    window_s: float
    calls: int


def require_meter(identity: str) -> None:
    """Raise NoMeter where the device of this identity (device.py) does not count its energy."""
    if not identity.startswith("GPU-"):
        raise NoMeter(f"energy: expected an NVIDIA GPU, found {identity}")
    try:
        with board(identity) as gpu:
            if gpu.energy_j() is None:
                raise NoMeter("energy: expected a counter of the board's energy, found none")
    except NoNvml as error:
        raise NoMeter(f"energy: {error}") from error


def require_meter_on(device: torch.device) -> None:
    """Raise NoMeter where a device does not count its energy."""
    require_meter(identity(device))


def energy(call: Callable[[], Any], device: torch.device, window_s: float = WINDOW_S) -> Energy:
    """Return the energy of a call on a GPU; about window_s + 1 s. NoMeter where none is counted."""
    return pieces(call, device, window_s, 1)[0]


def pieces(
    call: Callable[[], Any], device: torch.device, window_s: float, count: int
) -> list[Energy]:
    """Return the energies of a call in `count` pieces of a window, one on end of the other."""
    gpu_id = identity(device)
    if not gpu_id.startswith("GPU-"):
        raise NoMeter(f"energy: expected an NVIDIA GPU, found {device}")
    try:
        with board(gpu_id) as gpu:
            wait = partial(synchronize, device)
            return counted(call, wait, gpu.energy_j, window_s, count)
    except NoNvml as error:
        raise NoMeter(f"energy: {error}") from error


def counted(
    call: Callable[[], Any],
    wait: Callable[[], None],
    meter_j: Callable[[], float | None],
    window_s: float,
    count: int = 1,
) -> list[Energy]:
    """Return `count` energies of a call by a meter in J; `wait` returns when all calls have run.

    A piece begins where the one before it ended: the replay is as long as the window, and unbroken.
    """
    if meter_j() is None:
        raise NoMeter("energy: expected a counter of the board's energy, found none on this GPU")
    batch = _batch(call, wait)
    _for(WARM_UP_S, batch)
    first_j, _ = _until_move(batch, meter_j)
    found = []
    for _ in range(count):
        began = perf_counter()
        calls = _for(window_s / count, batch)
        last_j, more = _until_move(batch, meter_j)
        calls += more
        found.append(Energy((last_j - first_j) / calls, perf_counter() - began, calls))
        first_j = last_j
    return found


Batch = Callable[[], int]
"""Runs calls for about BATCH_S, waits for them and returns how many they were."""


def _batch(call: Callable[[], Any], wait: Callable[[], None]) -> Batch:
    def run(size: int) -> int:
        for _ in range(size):
            call()
        wait()
        return size

    size, took_s = 1, 0.0
    while True:
        began = perf_counter()
        run(size)
        took_s = perf_counter() - began
        if took_s >= BATCH_S:
            return lambda: run(size)
        size *= 2


def _for(seconds: float, batch: Batch) -> int:
    """Run batches for so long, at least one, and return the calls."""
    end = perf_counter() + seconds
    calls = batch()
    while perf_counter() < end:
        calls += batch()
    return calls


def _until_move(batch: Batch, meter_j: Callable[[], float | None]) -> tuple[float, int]:
    """Run batches until the counter moves; return where it is then, and the calls."""
    before, calls, end = meter_j(), 0, perf_counter() + STUCK_S
    while perf_counter() < end:
        calls += batch()
        now = meter_j()
        if now is not None and now != before:
            return now, calls
    raise NoMeter(f"energy: expected a counter that moves, found {before} J for {STUCK_S:g} s")
