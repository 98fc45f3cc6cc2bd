"""NVML, the driver's own library: one GPU by its UUID, and what it says of itself.

    gauges      clocks, power and temperature, as they are now
    counters    energy, and for how long the SM clock was held down, by reason; they only grow, and
                the driver moves them about every 100 ms

What a GPU does not tell is absent, never 0. A slice of one (MIG) has a UUID of its own, which NVML
finds as MIG-..., and tells little. Needs nvidia-ml-py (the `gpu` extra), and no torch.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from time import perf_counter
from typing import Any

# Field ids. Power now is in mW; the others are ns for which a reason held the clock down (so says
# NVIDIA's dcgm_fields.h of the same counters; NVML's documents name no unit).
POWER = 186
POWER_CAP, SYNC_BOOST = 74, 76
# Software for heat, hardware for heat, hardware for its power brake: these ids moved within the 580
# branch (nvidia-ml-py 13.580.65 has the old ones, 13.580.82 the new), and the old ones then stood
# for other quantities. So the driver decides which to ask for, not the package.
MOVED_IN = (580, 82)
BEFORE, SINCE = (251, 252, 253), (269, 270, 271)

# The member of a field's union that holds its value, by value type (nvmlValueType_t).
MEMBERS = "dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal"


class NoNvml(RuntimeError):
    """NVML is not here, or knows no such GPU; the message is one line."""


class Board:
    """One GPU, or a slice of one; `nvml` is the module, for its constants."""

    def __init__(self, nvml: Any, uuid: str) -> None:
        """Find the GPU; NVMLError where NVML does not know it."""
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
        """Return nvmlDeviceGet{what}, or None where this GPU or driver does not tell."""
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self._handle, *arguments)
        except self.nvml.NVMLError:
            return None

    def fields(self, ids: tuple[int, ...]) -> Mapping[int, float]:
        """Return the values of fields by their ids, in NVML's units; those that it tells."""
        found = self.ask("FieldValues", ids) or ()
        return {
            field.fieldId: float(getattr(field.value, MEMBERS[field.valueType]))
            for field in found
            if field.nvmlReturn == self.nvml.NVML_SUCCESS
        }

    def energy_j(self) -> float | None:
        """Return the energy that the board took since the driver was loaded."""
        energy_mj = self.ask("TotalEnergyConsumption")
        return None if energy_mj is None else energy_mj / 1e3

    def reasons(self) -> int | None:
        """Return what decides the SM clock now, as nvmlClocksEventReason... bits."""
        bits: int | None = self.ask("CurrentClocksEventReasons")
        return bits

    def reading(self) -> dict[str, float]:
        """Return the time in s, and the gauges and counters that are told (telemetry.py).

        Clocks are left out while nothing runs: they drop then, and say nothing of the work.
        """
        heat, slowdown, brake = SINCE if _version(self.driver) >= MOVED_IN else BEFORE
        told = self.fields((POWER, POWER_CAP, SYNC_BOOST, heat, slowdown, brake))
        by_hardware = [told[id] for id in (slowdown, brake) if id in told]
        running = not (self.reasons() or 0) & self.nvml.nvmlClocksEventReasonGpuIdle
        found = {
            "sm_mhz": self.ask("ClockInfo", self.nvml.NVML_CLOCK_SM) if running else None,
            "memory_mhz": self.ask("ClockInfo", self.nvml.NVML_CLOCK_MEM) if running else None,
            "power_w": _thousandth(told.get(POWER)),
            "temperature_c": self.ask("Temperature", self.nvml.NVML_TEMPERATURE_GPU),
            "power_capped_us": _thousandth(told.get(POWER_CAP)),
            "thermal_us": _thousandth(told.get(heat)),
            "hardware_us": _thousandth(sum(by_hardware)) if by_hardware else None,
            "sync_boost_us": _thousandth(told.get(SYNC_BOOST)),
            "energy_j": self.energy_j(),
        }
        known = {name: float(value) for name, value in found.items() if value is not None}
        return {"at_s": perf_counter(), **known}


@contextmanager
def board(uuid: str) -> Iterator[Board]:
    """Open NVML for one GPU; NoNvml says why that cannot be."""
    try:
        import pynvml
    except ModuleNotFoundError as error:
        raise NoNvml("NVML: expected nvidia-ml-py (the gpu extra), found none") from error
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        raise NoNvml(f"NVML: expected NVIDIA's driver, found: {error}") from error
    try:
        try:
            found = Board(pynvml, uuid)
        except pynvml.NVMLError as error:
            raise NoNvml(f"NVML: expected a GPU {uuid}, found: {error}") from error
        yield found
    finally:
        pynvml.nvmlShutdown()


def _version(driver: str) -> tuple[int, ...]:
    return tuple(int(part) for part in driver.split(".") if part.isdecimal())


def _thousandth(value: float | None) -> float | None:
    return None if value is None else value / 1e3
