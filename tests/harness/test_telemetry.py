"""Telemetry of a GPU: windows over given readings, and a thread that reads a fake NVML."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import torch

from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.nvml import (
    BEFORE,
    SINCE,
    Board,
    NoNvml,
    Window,
    board,
    summary,
    telemetry,
)
from tests.emulation.fake_nvml import pynvml

COUNTERS = {"power_capped_us", "thermal_us", "hardware_us", "sync_boost_us", "energy_j"}

Start = Callable[..., tuple[Window, list[str]]]


@pytest.fixture
def start(fake_nvml: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Return a function that watches a fake GPU; it returns the window and the log."""
    with ExitStack() as stack:

        def watch(uuid: str = "GPU-fake", **fake: object) -> tuple[Window, list[str]]:
            monkeypatch.setenv("FAKE_NVML", json.dumps(fake))
            log: list[str] = []
            return stack.enter_context(telemetry(uuid, log.append)), log

        yield watch


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setattr(pynvml, "readings", [])


def test_a_window_sums_up_its_readings() -> None:
    readings = [
        {"at_s": 10.0, "sm_mhz": 1980.0, "power_w": 100.0, "temperature_c": 40.0, "energy_j": 5.0},
        {"at_s": 10.1, "sm_mhz": 1200.0, "power_w": 300.0, "temperature_c": 44.0},
        {"at_s": 10.2, "sm_mhz": 1980.0, "power_w": 200.0, "temperature_c": 43.0, "energy_j": 45.0},
    ]
    assert summary(readings) == {
        "seconds": 0.2,
        "sm_mhz": 1980.0,
        "sm_mhz_min": 1200.0,
        "power_w": 200.0,
        "temperature_c": 44.0,
        "energy_j": 40.0,
    }


def test_a_counter_that_only_one_end_has_is_absent() -> None:
    result = summary([{"at_s": 1.0, "thermal_us": 3.0}, {"at_s": 2.0, "power_capped_us": 5.0}])
    assert result == {"seconds": 1.0}


def test_a_window_has_the_readings_since_the_last_one(start: Start) -> None:
    window, log = start()
    began = time.perf_counter()
    window()
    time.sleep(0.5)
    result = window()
    assert 0.5 <= result["seconds"] <= time.perf_counter() - began
    fake_s = result["energy_j"] / pynvml.WATT  # by the clock of fake_nvml
    assert fake_s / pynvml.STEP_S == pytest.approx(round(fake_s / pynvml.STEP_S))
    assert fake_s > 0
    assert result["power_capped_us"] == pytest.approx(1e6 * fake_s / 2)
    assert result["thermal_us"] == pytest.approx(1e6 * fake_s / 10)
    assert result["hardware_us"] == pytest.approx(2e6 * fake_s / 10)
    assert (result["sm_mhz"], result["sm_mhz_min"], result["memory_mhz"]) == (1980, 1980, 3201)
    assert (result["power_w"], result["temperature_c"], result["sync_boost_us"]) == (300, 45, 0)
    assert not log


def test_unreported_values_are_absent(start: Start) -> None:
    window, log = start(untold=["TotalEnergyConsumption", "Temperature", 74, 76, 186, *SINCE])
    result = window()
    assert result.keys() == {"seconds", "sm_mhz", "sm_mhz_min", "memory_mhz"}
    assert not log


def test_a_gpu_that_is_idle_has_no_clock(start: Start) -> None:
    window, _ = start(tell={"CurrentClocksEventReasons": 1})
    result = window()
    assert result.keys() > COUNTERS
    assert not {"sm_mhz", "sm_mhz_min", "memory_mhz"} & result.keys()


def test_the_ids_of_the_counters_are_those_of_the_driver(fake_nvml, monkeypatch) -> None:
    for driver, ids in (("575.51.03", BEFORE), ("580.65.06", BEFORE), ("580.82.07", SINCE)):
        monkeypatch.setenv("FAKE_NVML", json.dumps({"driver": driver}))
        with board("GPU-fake") as gpu:
            assert {"thermal_us", "hardware_us"} < gpu.reading().keys(), driver
            ids_read = gpu.nvml.readings[-1]
        assert set(ids) < set(ids_read), driver
        assert not {*BEFORE, *SINCE} - set(ids) & set(ids_read), driver


@pytest.mark.parametrize(
    ("uuid", "fake", "token"),
    [
        ("GPU-fake", {"init": "Driver Not Loaded"}, "Driver Not Loaded"),
        ("GPU-other", {}, "expected a GPU GPU-other, found: Not Found"),
        ("A CPU", {}, None),
    ],
)
def test_a_device_without_telemetry_has_one_line_at_most(start, uuid, fake, token) -> None:
    window, log = start(uuid, **fake)
    assert [window(), window()] == [{}, {}]
    assert len(log) == (token is not None)
    assert all(token in line for line in log)


def test_without_the_package_the_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoNvml, match="nvidia-ml-py"), board("GPU-fake"):
        pass


def test_an_nvml_that_hangs_ends_the_telemetry(start, monkeypatch) -> None:
    monkeypatch.setattr("sparsebench.harness.machine.nvml.TIMEOUT_S", 0.1)
    monkeypatch.setattr(Board, "reading", lambda board: time.sleep(1.0))
    window, log = start()
    assert [window(), window()] == [{}, {}]
    assert len(log) == 1


@pytest.mark.gpu
def test_a_gpu_reports_clock_power_energy_and_limits() -> None:
    log: list[str] = []
    x = torch.randn(4096, 4096, device="cuda").bfloat16()
    with telemetry(identity(torch.device("cuda:0")), log.append) as window:
        window()
        end = time.perf_counter() + 1.0
        while time.perf_counter() < end:
            x @ x
            torch.cuda.synchronize()
        result = window()
    assert result.keys() >= {"sm_mhz", "memory_mhz", "power_w", "temperature_c", *COUNTERS}
    assert 0 <= result["power_capped_us"] <= 1.5e6 * result["seconds"]
    assert 0.3 < result["energy_j"] / result["seconds"] / result["power_w"] < 3
    assert not log
