"""NVML, the driver's own library: find one GPU by its UUID, and read its state; telemetry of runs.

    gauges      present clocks, power and temperature
    counters    energy, and how long the SM clock was limited, by reason; they only grow, and the
                driver updates them about every 100 ms

A value that a GPU does not report is absent, never 0. A slice of a GPU (MIG) has its own UUID,
which NVML knows as MIG-..., and reports little. Needs nvidia-ml-py (the `gpu` extra), but no torch.

A thread reads NVML while contests run in other processes, so reading costs them nothing:

    sm_mhz, memory_mhz                     median while something ran; sm_mhz_min is the least
    power_w, temperature_c                 mean power; highest temperature
    power_capped_us, thermal_us            how long NVML reports that the SM clock was limited: by
    hardware_us, sync_boost_us             the power limit, by heat, by the hardware itself (heat or
                                           power brake: half the clock or less), by its sync group
    energy_j                               of the whole board

A window has the readings since the last one; counters say little about one of less than 100 ms.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from statistics import fmean, median
from threading import Event, Thread
from time import perf_counter
from typing import Any

# Field ids. Present power is in mW; the others are ns for which a reason limited the clock (the
# unit is that of the same counters in NVIDIA's dcgm_fields.h; NVML's documentation names none).
POWER = 186
POWER_CAP, SYNC_BOOST = 74, 76
# Limits by software for heat, by hardware for heat, by the power brake: these ids changed within
# the 580 branch (nvidia-ml-py 13.580.65 has the old ones, 13.580.82 the new), and the old ones then
# meant other quantities. So the driver's version decides which ids are read, not the package's.
MOVED_IN = (580, 82)
BEFORE, SINCE = (251, 252, 253), (269, 270, 271)

# The member of a field's union that holds its value, by value type (nvmlValueType_t).
MEMBERS = "dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"


class NoNvml(RuntimeError):
    """NVML is not available, or does not know the GPU."""


class Board:
    """One GPU, or a slice of one; `nvml` is the module, for its constants."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        self.nvml, self.slice = nvml, False
        self.driver: str = nvml.nvmlSystemGetDriverVersion()
        try:
            self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid)
        except nvml.NVMLError as error:
            with suppress(nvml.NVMLError):
                self._handle = nvml.nvmlDeviceGetHandleByUUID(uuid.replace("GPU-", "MIG-", 1))
                self.slice = True
            if not self.slice:
                raise error

    def ask(self, what: str, *arguments: Any) -> Any:
        """Return nvmlDeviceGet{what}, or None if the GPU or driver does not report it."""
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self._handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def fields(self, ids: tuple[int, ...]) -> Mapping[int, float]:
        fields = self.ask("FieldValues", ids) or ()
        return {
            field.fieldId: float(getattr(field.value, MEMBERS[field.valueType]))
            for field in fields
            if field.nvmlReturn == self.nvml.NVML_SUCCESS
        }

    def energy_j(self) -> float | None:
        energy_mj = self.ask("TotalEnergyConsumption")
        return None if energy_mj is None else energy_mj / 1e3

    def sm_mhz(self) -> float | None:
        """Return the present SM clock."""
        mhz: float | None = self.ask("ClockInfo", self.nvml.NVML_CLOCK_SM)
        return mhz

    def reasons(self) -> int | None:
        """Return what limits the SM clock now, as nvmlClocksEventReason... bits."""
        bits: int | None = self.ask("CurrentClocksEventReasons")
        return bits

    def reading(self) -> dict[str, float]:
        """Return the time in s, and the reported gauges and counters.

        Clocks are left out while nothing runs, because they drop then.
        """
        heat, slowdown, brake = SINCE if _version(self.driver) >= MOVED_IN else BEFORE
        counters = self.fields((POWER, POWER_CAP, SYNC_BOOST, heat, slowdown, brake))
        by_hardware = [counters[id] for id in (slowdown, brake) if id in counters]
        running = not (self.reasons() or 0) & self.nvml.nvmlClocksEventReasonGpuIdle
        values = {
            "sm_mhz": self.ask("ClockInfo", self.nvml.NVML_CLOCK_SM) if running else None,
            "memory_mhz": self.ask("ClockInfo", self.nvml.NVML_CLOCK_MEM) if running else None,
            "power_w": _thousandth(counters.get(POWER)),
            "temperature_c": self.ask("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            "power_capped_us": _thousandth(counters.get(POWER_CAP)),
            "thermal_us": _thousandth(counters.get(heat)),
            "hardware_us": _thousandth(sum(by_hardware)) if by_hardware else None,
            "sync_boost_us": _thousandth(counters.get(SYNC_BOOST)),
            "energy_j": self.energy_j(),
        }
        reported = {name: float(value) for name, value in values.items() if value is not None}
        return {"at_s": perf_counter(), **reported}


@contextmanager
def library() -> Iterator[Any]:
    """Open NVML, and yield its module. Raises NoNvml."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise NoNvml("NVML: expected nvidia-ml-py (the gpu extra), found none") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(f"NVML: expected NVIDIA's driver, found: {error}") from error
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


@contextmanager
def board(uuid: str) -> Iterator[Board]:
    """Open NVML for one GPU. Raises NoNvml."""
    with library() as nvml:
        try:
            card = Board(nvml, uuid)
        except nvml.NVMLError as error:
            raise NoNvml(f"NVML: expected a GPU {uuid}, found: {error}") from error
        yield card


def _version(driver: str) -> tuple[int, ...]:
    return tuple(int(part) for part in driver.split(".") if part.isdecimal())


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1e3


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
    requests, alive = SimpleQueue[Callable[[], None] | None](), identity.startswith("GPU-")

    def read() -> None:
        nonlocal alive
        answer: Callable[[], None] | None = None
        try:
            with board(identity) as gpu:
                while alive:
                    readings.append(gpu.reading())
                    if answer:
                        answer()
                    answer = None
                    with suppress(Empty):
                        answer = requests.get(timeout=INTERVAL_S)
        except NoNvml as error:
            log(f"telemetry: {error}; no row has it\n")
            alive = False
            while answer := requests.get():
                answer()

    def window() -> dict[str, float]:
        nonlocal alive
        if not alive:
            return {}
        answered = Event()
        requests.put(answered.set)
        if not answered.wait(TIMEOUT_S):
            alive = False
            log("telemetry: NVML did not answer; no more rows have it\n")
        count = len(readings)  # the thread may add others meanwhile
        result = summary(readings[:count]) if alive else {}
        del readings[: count - 1]
        return result

    if alive:
        Thread(target=read, daemon=True).start()
    try:
        yield window
    finally:
        alive = False
        requests.put(None)


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
