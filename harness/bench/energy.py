"""Energy of a call: NVML's counter over seconds of the same call, back to back.

    calls ... | tick   calls calls calls calls ...   tick |
              E0, t0           window_s or more      E1, t1        j_per_call = (E1 - E0) / calls

The driver updates the counter about every 100 ms. A window begins and ends at an update, so its
length is known to within a batch of calls, BATCH_S. How to read the number:

    - It is the energy of the board, with idle power, memory and converters, but not of the host.
    - It is hot: a call finds in the L2 cache what the call before left there.
    - A call that is shorter than its launch by the host includes the gap to the next call.
    - On A100 and H100 the sensor samples 25 % of the time (arXiv:2312.02741): seconds of the same
      work average that out, a few calls do not. No power limit or TDP enters the number.
    - The board warms up from call to call: compare calls that one run measured in turn.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.contest_state import synchronize
from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.nvml import NoNvml, board

WINDOW_S = 2.0
WARM_UP_S = 0.5
BATCH_S = 0.01  # 0.5 % of the window
NO_COUNTER = "energy: expected a counter of the board's energy, found none"
STUCK_S = 5.0  # a counter that does not change for so long is useless


class NoMeter(SuiteError):
    """The device does not count its energy."""


@dataclass(frozen=True)
class Energy:
    """Mean energy of a call in J, over a window in s and in calls."""

    j_per_call: float
    window_s: float
    calls: int


def require_meter(identity: str) -> None:
    """Raise NoMeter unless the device of this identity (device.py) counts its energy."""
    with _meter(identity) as meter_j:
        if meter_j() is None:
            raise NoMeter(NO_COUNTER)


@contextmanager
def _meter(identity: str) -> Iterator[Callable[[], float | None]]:
    """Yield a function that reads the counter of a device in J. Raises NoMeter."""
    if not identity.startswith("GPU-"):
        raise NoMeter(f"energy: expected an NVIDIA GPU, found {identity}")
    try:
        with board(identity) as gpu:
            yield gpu.energy_j
    except NoNvml as error:
        raise NoMeter(f"energy: {error}") from error


def energy(call: Callable[[], Any], device: torch.device, window_s: float = WINDOW_S) -> Energy:
    """Return the energy of a call on a GPU, in about 1 s more than the window. Raises NoMeter."""
    with _meter(identity(device)) as meter_j:
        return metered_energy(call, partial(synchronize, device), meter_j, window_s)


def metered_energy(
    call: Callable[[], Any],
    wait: Callable[[], None],
    meter_j: Callable[[], float | None],
    window_s: float = WINDOW_S,
) -> Energy:
    """Return the energy of a call by a meter in J; `wait` returns when all calls have run."""
    if meter_j() is None:
        raise NoMeter(NO_COUNTER)
    size, took_s = 1, 0.0

    def batch() -> int:
        for _ in range(size):
            call()
        wait()
        return size

    while took_s < BATCH_S:
        began = perf_counter()
        batch()
        took_s = perf_counter() - began
        size *= 1 if took_s >= BATCH_S else 2
    _run_for(WARM_UP_S, batch)
    first_j, _ = _until_update(batch, meter_j)
    began = perf_counter()
    calls = _run_for(window_s, batch)
    last_j, more = _until_update(batch, meter_j)
    calls += more
    return Energy((last_j - first_j) / calls, perf_counter() - began, calls)


Batch = Callable[[], int]
"""Runs calls for about BATCH_S, waits for them and returns their number."""


def _run_for(seconds: float, batch: Batch) -> int:
    end = perf_counter() + seconds
    calls = batch()
    while perf_counter() < end:
        calls += batch()
    return calls


def _until_update(batch: Batch, meter_j: Callable[[], float | None]) -> tuple[float, int]:
    """Run batches until the counter changes; return its new value and the number of calls."""
    before, calls, end = meter_j(), 0, perf_counter() + STUCK_S
    while perf_counter() < end:
        calls += batch()
        now = meter_j()
        if now is not None and now != before:
            return now, calls
    raise NoMeter(f"energy: expected a counter that changes, found {before} J for {STUCK_S:g} s")
