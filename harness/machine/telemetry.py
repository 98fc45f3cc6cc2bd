"""Telemetry of the GPU: a child process reads NVML while contests run.

    parent   > a line                      at the end of a window
    child    < {"seconds": ..., ...}       its readings since the last request

    sm_mhz, memory_mhz                     median while something ran; sm_mhz_min is the least
    power_w, temperature_c                 mean power; highest temperature
    power_capped_us, thermal_us            how long NVML reports that the SM clock was limited: by
    hardware_us, sync_boost_us             the power limit, by heat, by the hardware itself (heat or
                                           power brake: half the clock or less), by its sync group
    energy_j                               of the whole board

A value that the GPU does not report is absent. The driver updates its counters about every 100 ms,
so they say little about a shorter window. The child is a process of its own, so that reading costs
the measuring process nothing, and it does not import torch.

Usage: python -P -m sparsebench.harness.machine.telemetry UUID
"""

import json
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import fmean, median
from time import perf_counter

from sparsebench.harness.machine._nvml import Board, NoNvml, board

COMMAND = (sys.executable, "-P", "-m", "sparsebench.harness.machine.telemetry")
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


class Telemetry:
    """The child process of one GPU. If it fails, `log` gets a line and the run continues."""

    def __init__(self, uuid: str, log: Callable[[str], None]) -> None:
        self._log = log
        self._child: subprocess.Popen[str] | None = subprocess.Popen(
            [*COMMAND, uuid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def window(self) -> dict[str, float]:
        """Return the telemetry since the last call, or {} if the child has ended."""
        if self._child is None:
            return {}
        assert self._child.stdin
        assert self._child.stdout
        try:
            self._child.stdin.write("\n")
            self._child.stdin.flush()
        except BrokenPipeError:
            return self._lost()
        if not select.select([self._child.stdout], [], [], TIMEOUT_S)[0]:
            return self._lost()
        answer = self._child.stdout.readline()
        if not answer.endswith("\n"):
            return self._lost()
        window: dict[str, float] = json.loads(answer)
        return window

    def _lost(self) -> dict[str, float]:
        words = self.end().strip().splitlines() or ["the child process did not answer"]
        self._log(f"telemetry: {words[-1]}; no more rows have it\n")
        return {}

    def end(self) -> str:
        """End the child and return its stderr."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        child.kill()
        return child.communicate()[1]


@contextmanager
def telemetry(
    identity: str, log: Callable[[str], None]
) -> Iterator[Callable[[], dict[str, float]]]:
    """Watch a GPU while the block runs; any other device gives {}."""
    if not identity.startswith("GPU-"):
        yield lambda: {}
        return
    child = Telemetry(identity, log)
    try:
        yield child.window
    finally:
        child.end()


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
    window |= {
        name: last[name] - first[name] for name in COUNTERS if name in first and name in last
    }
    return {name: round(value, DIGITS) for name, value in window.items()}


def main() -> int:
    """Answer until stdin closes; report a missing NVML on stderr."""
    try:
        with board(sys.argv[1]) as gpu:
            _answer(gpu)
    except NoNvml as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _answer(gpu: Board) -> None:
    readings = [gpu.reading()]
    while True:
        left_s = readings[-1]["at_s"] + INTERVAL_S - perf_counter()
        requested = select.select([sys.stdin], [], [], max(0.0, left_s))[0]
        if requested and not sys.stdin.readline():
            return
        readings.append(gpu.reading())
        if requested:
            print(json.dumps(summary(readings)), flush=True)
            readings = readings[-1:]


if __name__ == "__main__":
    sys.exit(main())
