"""A fake NVML with one GPU, `GPU-fake`, that draws 300 W and is power-capped half of the time.

Its clock moves on by STEP_S with every reading of the fields.

FAKE_NVML changes it, as JSON: {"driver": "580.65.06"}, {"untold": [a field id, or the end of a
function's name]}, {"tell": {the end of a function's name: what it returns}}, {"init": why it
fails}, {"sliced": true}: it is a slice of a GPU, MIG-fake.
"""

import json
import os
from types import SimpleNamespace
from typing import Any

NVML_SUCCESS, NOT_SUPPORTED = 0, 3
NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
NVML_MEMORY_ERROR_TYPE_CORRECTED, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 0
NVML_TEMPERATURE_THRESHOLD_GPU_MAX = 3
nvmlClocksEventReasonGpuIdle = 1

WATT, STEP_S = 300.0, 0.125
OLD_DRIVERS = "575.51.03", "580.65.06"
CLOCKS = {NVML_CLOCK_SM: 1980, NVML_CLOCK_MEM: 3201}
TOLD = {
    "Temperature": 45,
    "CurrentClocksEventReasons": 0,
    "ComputeRunningProcesses_v3": [],
    "GraphicsRunningProcesses_v3": [],
    "UtilizationRates": SimpleNamespace(gpu=0, memory=0),
    "TotalEccErrors": 0,
    "EccMode": [1, 1],
    "MigMode": [0, 0],
    "PersistenceMode": 1,
    "TemperatureThreshold": 87,
    "PowerManagementLimit": 700_000,
    "PowerManagementDefaultLimit": 700_000,
}
POWER, SINCE_580_82, BEFORE = 186, (269, 270, 271), (251, 252, 253)
readings: list[tuple[int, ...]] = []


class NVMLError(Exception):
    """Any error of NVML."""


def setting(name: str, default: Any) -> Any:
    return json.loads(os.environ.get("FAKE_NVML", "{}")).get(name, default)


def nvmlInit() -> None:
    if why := setting("init", ""):
        raise NVMLError(why)


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetDriverVersion() -> str:
    return str(setting("driver", "580.159.04"))


def nvmlSystemGetCudaDriverVersion() -> int:
    return 13000


def nvmlDeviceGetHandleByUUID(uuid: str) -> str:
    if uuid != ("MIG-fake" if setting("sliced", False) else "GPU-fake"):
        raise NVMLError("Not Found")
    return uuid


def nvmlDeviceGetFieldValues(handle: str, ids: tuple[int, ...]) -> list[SimpleNamespace]:
    readings.append(ids)
    ran_ns = int(1e9 * STEP_S * len(readings))
    old = nvmlSystemGetDriverVersion() in OLD_DRIVERS
    slowdowns = dict.fromkeys(BEFORE if old else SINCE_580_82, ran_ns // 10)
    return [_field(id, {74: ran_ns // 2, 76: 0, **slowdowns}) for id in ids]


def _field(id: int, counters: dict[int, int]) -> SimpleNamespace:
    support = id in {POWER, *counters} and id not in setting("untold", [])
    value = SimpleNamespace(uiVal=int(1e3 * WATT), ullVal=counters.get(id, 77))
    kind, code = (1 if id == POWER else 3), (NVML_SUCCESS if support else NOT_SUPPORTED)
    return SimpleNamespace(fieldId=id, valueType=kind, nvmlReturn=code, value=value)


def __getattr__(name: str) -> Any:
    """Return the function that answers an nvmlDeviceGet..., unless it is untold."""
    what = name.removeprefix("nvmlDeviceGet")
    if what == name:
        raise AttributeError(name)

    def answer(handle: str, *arguments: Any) -> Any:
        tell = {**TOLD, **setting("tell", {})}
        if what == "TotalEnergyConsumption" and what not in setting("untold", []):
            return int(1e3 * WATT * STEP_S * len(readings))
        if what.endswith("ClockInfo") and what not in setting("untold", []):
            return CLOCKS[arguments[0]]
        if what in setting("untold", []) or what not in tell:
            raise NVMLError("Not Supported")
        return tell[what]

    return answer
