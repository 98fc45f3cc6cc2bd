"""What the GPU did meanwhile: a child process reads NVML while contests run.

    parent   > a line                      at the end of a window
    child    < {"seconds": ..., ...}       what it read since it was last asked

    sm_mhz, memory_mhz                     median while something ran; sm_mhz_min the least
    power_w, temperature_c                 mean of the power drawn now; highest
    power_capped_us, thermal_us            for how long NVML says that the SM clock was held down:
    hardware_us, sync_boost_us             by the power limit, by heat, by the hardware itself (heat
                                           or power brake: half the clock or less), by its group
    energy_j                               of the whole board

What the GPU does not report is absent. The driver updates its counters about every 100 ms: they say
little of a shorter window. The child is a process of its own, so that reading costs the
measuring one nothing; no torch is in it.

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
INTERVAL_S = 0.1  # NVML's sensors are read by the driver about as often (arXiv:2312.02741)
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
    """The child of one GPU. Where it cannot read, or dies, the run goes on and `log` has a line."""

    def __init__(self, uuid: str, log: Callable[[str], None]) -> None:
        """Start the child; it is ready when it is."""
        self._log = log
        self._child: subprocess.Popen[str] | None = subprocess.Popen(
            [*COMMAND, uuid],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent
        )

    def window(self) -> dict[str, float]:
        """Return what was read since the last call, or {} where there is no child any more."""
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
        found: dict[str, float] = json.loads(answer)
        return found

    def close(self) -> None:
        """End the child."""
        self._end()

    def _lost(self) -> dict[str, float]:
        words = self._end().strip().splitlines() or ["the child process gave no answer"]
        self._log(f"telemetry: {words[-1]}; rows go without it\n")
        return {}

    def _end(self) -> str:
        """End the child and return what it said on stderr."""
        if self._child is None:
            return ""
        child, self._child = self._child, None
        child.kill()
        return child.communicate()[1]


@contextmanager
def telemetry(
    identity: str, log: Callable[[str], None]
) -> Iterator[Callable[[], dict[str, float]]]:
    """Watch a device for as long as the block runs; of what is no GPU there is nothing to tell."""
    if not identity.startswith("GPU-"):
        yield lambda: {}
        return
    child = Telemetry(identity, log)
    try:
        yield child.window
    finally:
        child.close()


def summary(readings: Sequence[dict[str, float]]) -> dict[str, float]:
    """Sum up the readings of a window (Board.reading), in order; the first is the last one's end.

    A counter must be in both ends, and gives the difference.
    """
    first, last = readings[0], readings[-1]
    found = {"seconds": last["at_s"] - first["at_s"]}
    for name, (source, how) in GAUGES.items():
        values = [reading[source] for reading in readings if source in reading]
        if values:
            found[name] = how(values)
    found |= {name: last[name] - first[name] for name in COUNTERS if name in first and name in last}
    return {name: round(value, DIGITS) for name, value in found.items()}


def main() -> int:
    """Answer until stdin closes; without NVML say so on stderr."""
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
        asked = select.select([sys.stdin], [], [], max(0.0, left_s))[0]
        if asked and not sys.stdin.readline():
            return
        readings.append(gpu.reading())
        if asked:
            print(json.dumps(summary(readings)), flush=True)
            readings = readings[-1:]


if __name__ == "__main__":
    sys.exit(main())
