"""Telemetry of the GPU: a thread reads NVML while contests run in their workers.

    sm_mhz, memory_mhz                     median while something ran; sm_mhz_min is the least
    power_w, temperature_c                 mean power; highest temperature
    power_capped_us, thermal_us            how long NVML reports that the SM clock was limited: by
    hardware_us, sync_boost_us             the power limit, by heat, by the hardware itself (heat or
                                           power brake: half the clock or less), by its sync group
    energy_j                               of the whole board

A window has the readings since the last one. A value that the GPU does not report is absent. The
driver updates its counters about every 100 ms, so they say little about a shorter window. Contests
run in other processes, so reading costs them nothing.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from threading import Condition, Thread

from sparsebench.harness.machine._nvml import NoNvml, board

INTERVAL_S = 0.1  # about as often as the driver reads the sensors (arXiv:2312.02741)
TIMEOUT_S = 30.0  # a driver without persistence takes seconds to start
GAUGES: dict[str, tuple[str, Callable[[list[float]], float]]] = {
    "sm_mhz": ("sm_mhz", median),
    "sm_mhz_min": ("sm_mhz", min),
    "memory_mhz": ("memory_mhz", median),
    "power_w": ("power_w", fmean),
    "temperature_c": ("temperature_c", max),
}
COUNTERS = "power_capped_us", "thermal_us", "hardware_us", "sync_boost_us", "energy_j"
DIGITS = 6

Window = Callable[[], dict[str, float]]
"""Returns the telemetry since its last call."""


@contextmanager
def telemetry(identity: str, log: Callable[[str], None]) -> Iterator[Window]:
    """Watch a GPU while the block runs; any other device gives {}.

    If NVML fails or does not answer, `log` gets a line, and further windows are {}.
    """
    readings: list[dict[str, float]] = []
    changed, alive, requested = Condition(), identity.startswith("GPU-"), False

    def woken() -> bool:
        return requested or not alive

    def read() -> None:
        nonlocal alive, requested
        try:
            with board(identity) as gpu:
                while alive:
                    answers, reading = requested, gpu.reading()
                    with changed:
                        readings.append(reading)
                        if answers:
                            requested = False
                            changed.notify_all()
                        changed.wait_for(woken, INTERVAL_S)
        except NoNvml as error:
            log(f"telemetry: {error}; no row has it\n")
            with changed:
                alive = False
                changed.notify_all()

    def window() -> dict[str, float]:
        nonlocal alive, requested
        with changed:
            if not alive:
                return {}
            requested = True
            changed.notify_all()
            if not changed.wait_for(lambda: not (requested and alive), TIMEOUT_S):
                alive = False
                log("telemetry: NVML did not answer; no more rows have it\n")
            result = summary(readings) if alive else {}
            del readings[:-1]
        return result

    if alive:
        Thread(target=read, daemon=True).start()
    try:
        yield window
    finally:
        with changed:
            alive = False
            changed.notify_all()


def summary(readings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Summarize the readings (Board.reading) of a window, which starts where the last one ended.

    A counter gives the difference of the ends, and must be in both.
    """
    first, last = readings[0], readings[-1]
    window = {"seconds": last["at_s"] - first["at_s"]}
    for name, (source, how) in GAUGES.items():
        values = [reading[source] for reading in readings if source in reading]
        if values:
            window[name] = how(values)
    window |= {n: last[n] - first[n] for n in COUNTERS if n in first and n in last}
    return {name: round(value, DIGITS) for name, value in window.items()}
