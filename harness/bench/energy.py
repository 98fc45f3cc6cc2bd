"""Energy and time of a call under load: NVML's counter over seconds of the same call.

    full   calls calls calls calls calls calls      back to back
    half   calls pause calls pause calls pause      each batch of calls, then as long a pause

    ... | tick   batches of about BATCH_S   tick |
        E0, t0        window_s or more      E1, t1  j_per_call = (E1 - E0) / calls

In a contest a GPU rests for much of the time, so it meets its power limit later than a model that
keeps it busy. The two loads show how much longer the same call then takes, and at which SM clock.

The driver updates the counter about every 100 ms. A window begins and ends at an update, so its
length is known to within a batch of calls, BATCH_S. How to read the numbers:

    - Energy is that of the board, with idle power, memory and converters, but not of the host.
      Under half load it includes that of the pauses.
    - The time of a call leaves pauses out, but not the wait for the end of a batch.
    - A call is hot: it finds in the L2 cache what the call before left there.
    - A call that is shorter than its launch by the host includes the gap to the next call.
    - On A100 and H100 the sensor samples 25 % of the time (arXiv:2312.02741): seconds of the same
      work average that out, a few calls do not. No power limit or TDP enters the number.
    - The board warms up from call to call: compare calls that one run measured in turn.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from statistics import fmean
from time import perf_counter, sleep
from typing import Any, Protocol

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench.contest_state import synchronize
from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.nvml import NoNvml, board

WINDOW_S = 3.0
WARM_UP_S = 0.5
BATCH_S = 0.01  # 0.3 % of the window
CLOCK_S = 0.1  # between two readings of the clock, about as often as the driver updates it
NO_COUNTER = "energy: expected a counter of the board's energy, found none"
STUCK_S = 5.0  # a counter that does not change for so long is useless


class NoMeter(SuiteError):
    """The device does not count its energy."""


class Meter(Protocol):
    """What a board reports: its energy in J, which grows, and its SM clock in MHz, or None."""

    def energy_j(self) -> float | None: ...

    def sm_mhz(self) -> float | None: ...


@dataclass(frozen=True)
class Energy:
    """Means over a window in s and in calls; `sm_mhz` is None if the board does not report it."""

    us_per_call: float
    j_per_call: float
    window_s: float
    calls: int
    sm_mhz: float | None = None

    def to_json(self) -> dict[str, float]:
        return {name: value for name, value in asdict(self).items() if value is not None}


def require_meter(identity: str) -> None:
    """Raise NoMeter unless the device of this identity (device.py) counts its energy."""
    with _meter(identity) as meter:
        if meter.energy_j() is None:
            raise NoMeter(NO_COUNTER)


@contextmanager
def _meter(identity: str) -> Iterator[Meter]:
    """Yield the meter of a device. Raises NoMeter."""
    if not identity.startswith("GPU-"):
        raise NoMeter(f"energy: expected an NVIDIA GPU, found {identity}")
    try:
        with board(identity) as gpu:
            yield gpu
    except NoNvml as error:
        raise NoMeter(f"energy: {error}") from error


def facts_under_load(call: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Return the fields of a row about a call under each load, in about 8 s. Raises NoMeter."""
    return facts_of_loads(*(energy(call, device, half=half) for half in (True, False)))


def facts_of_loads(half: Energy, full: Energy) -> dict[str, Any]:
    loads = {"half": half.to_json(), "full": full.to_json()}
    return {"loads": loads, "energy_j": full.j_per_call, "energy_window_s": full.window_s}


def energy(
    call: Callable[[], Any], device: torch.device, window_s: float = WINDOW_S, half: bool = False
) -> Energy:
    """Return the energy of a call on a GPU, in about 1 s more than the window. Raises NoMeter."""
    with _meter(identity(device)) as meter:
        return metered_energy(call, partial(synchronize, device), meter, window_s, half)


def metered_energy(
    call: Callable[[], Any],
    wait: Callable[[], None],
    meter: Meter,
    window_s: float = WINDOW_S,
    half: bool = False,
) -> Energy:
    """Return the energy of a call by a meter; `wait` returns when all calls have run."""
    if meter.energy_j() is None:
        raise NoMeter(NO_COUNTER)
    load = _Load(call, wait, meter, half)
    load.find_size()
    load.run_for(WARM_UP_S)
    first_j = load.run_until_update()
    load.calls, load.busy_s, load.clocks = 0, 0.0, []
    began = perf_counter()
    load.run_for(window_s)
    last_j = load.run_until_update()
    return Energy(
        us_per_call=1e6 * load.busy_s / load.calls,
        j_per_call=(last_j - first_j) / load.calls,
        sm_mhz=fmean(load.clocks) if load.clocks else None,
        window_s=perf_counter() - began,
        calls=load.calls,
    )


@dataclass
class _Load:
    """Batches of `size` calls, each followed by as long a pause if `half`, and what they took."""

    call: Callable[[], Any]
    wait: Callable[[], None]
    meter: Meter
    half: bool
    size: int = 1
    calls: int = 0
    busy_s: float = 0.0
    clocks: list[float] = field(default_factory=list)
    clock_read_s: float = 0.0

    def find_size(self) -> None:
        """Double the size until a batch takes BATCH_S."""
        while self._batch() < BATCH_S:
            self.size *= 2

    def run_for(self, seconds: float) -> None:
        end = perf_counter() + seconds
        self._turn()
        while perf_counter() < end:
            self._turn()

    def run_until_update(self) -> float:
        """Run batches until the counter changes, and return its new value."""
        before, end = self.meter.energy_j(), perf_counter() + STUCK_S
        while perf_counter() < end:
            self._turn()
            now = self.meter.energy_j()
            if now is not None and now != before:
                return now
        expected = "energy: expected a counter that changes"
        raise NoMeter(f"{expected}, found {before} J for {STUCK_S:g} s")

    def _batch(self) -> float:
        began = perf_counter()
        for _ in range(self.size):
            self.call()
        self.wait()
        return perf_counter() - began

    def _turn(self) -> None:
        """Run a batch, read the clock while it is that of the batch, and pause."""
        took_s = self._batch()
        self.calls += self.size
        self.busy_s += took_s
        if (now_s := perf_counter()) >= self.clock_read_s + CLOCK_S:
            self.clock_read_s, mhz = now_s, self.meter.sm_mhz()
            self.clocks += [] if mhz is None else [mhz]
        if self.half:
            sleep(took_s)
