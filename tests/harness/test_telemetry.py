"""What the GPU did meanwhile: windows over made-up readings, and a child with a made-up NVML."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch

from sparsebench.harness.machine._nvml import BEFORE, SINCE, NoNvml, board
from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.telemetry import COMMAND, Telemetry, summary, telemetry
from tests.emulation.fake_nvml import pynvml
from tests.tools.paths import TESTS

FAKE = TESTS / "emulation" / "fake_nvml"
COUNTERS = {"power_capped_us", "thermal_us", "hardware_us", "sync_boost_us", "energy_j"}

Start = Callable[..., tuple[Telemetry, list[str]]]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a child whose NVML is made up, and the log it writes to; it has time to start."""
    monkeypatch.setattr("sparsebench.harness.machine.telemetry.TIMEOUT_S", None)
    children = []

    def child(uuid: str = "GPU-fake", **fake: object) -> tuple[Telemetry, list[str]]:
        monkeypatch.setenv("PYTHONPATH", str(FAKE))
        monkeypatch.setenv("FAKE_NVML", json.dumps(fake))
        log: list[str] = []
        children.append(Telemetry(uuid, log.append))
        return children[-1], log

    yield child
    for made in children:
        made.end()


@pytest.fixture
def fake_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)


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
    found = summary([{"at_s": 1.0, "thermal_us": 3.0}, {"at_s": 2.0, "power_capped_us": 5.0}])
    assert found == {"seconds": 1.0}


def test_the_child_answers_with_the_window_since_the_last_request(start: Start) -> None:
    child, log = start()
    began = time.perf_counter()
    child.window()  # until it is up
    time.sleep(0.5)
    found = child.window()
    assert 0.5 <= found["seconds"] <= time.perf_counter() - began
    made_up_s = found["energy_j"] / pynvml.WATT  # by the clock of fake_nvml
    assert made_up_s / pynvml.STEP_S == pytest.approx(round(made_up_s / pynvml.STEP_S))
    assert made_up_s > 0
    assert found["power_capped_us"] == pytest.approx(1e6 * made_up_s / 2)
    assert found["thermal_us"] == pytest.approx(1e6 * made_up_s / 10)
    assert found["hardware_us"] == pytest.approx(2e6 * made_up_s / 10)
    assert (found["sm_mhz"], found["sm_mhz_min"], found["memory_mhz"]) == (1980, 1980, 3201)
    assert (found["power_w"], found["temperature_c"], found["sync_boost_us"]) == (300, 45, 0)
    assert not log


def test_unreported_values_are_absent(start: Start) -> None:
    child, log = start(untold=["TotalEnergyConsumption", "Temperature", 74, 76, 186, *SINCE])
    found = child.window()
    assert found.keys() == {"seconds", "sm_mhz", "sm_mhz_min", "memory_mhz"}
    assert not log


def test_a_gpu_that_is_idle_has_no_clock(start: Start) -> None:
    child, _ = start(tell={"CurrentClocksEventReasons": 1})
    found = child.window()
    assert found.keys() > COUNTERS
    assert not {"sm_mhz", "sm_mhz_min", "memory_mhz"} & found.keys()


def test_the_ids_of_the_counters_are_those_of_the_driver(
    fake_nvml: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for driver, ids in (("575.51.03", BEFORE), ("580.65.06", BEFORE), ("580.82.07", SINCE)):
        monkeypatch.setenv("FAKE_NVML", json.dumps({"driver": driver}))
        with board("GPU-fake") as gpu:
            assert {"thermal_us", "hardware_us"} < gpu.reading().keys(), driver
            asked = gpu.nvml.readings[-1]
        assert set(ids) < set(asked), driver
        assert not {*BEFORE, *SINCE} - set(ids) & set(asked), driver


def test_without_a_driver_there_is_one_line_and_nothing_more(start: Start) -> None:
    child, log = start(init="Driver Not Loaded")
    assert [child.window(), child.window()] == [{}, {}]
    (line,) = log
    assert "Driver Not Loaded" in line


def test_a_gpu_that_nvml_does_not_know_is_one_line(start: Start) -> None:
    child, log = start("GPU-other")
    assert child.window() == {}
    assert "expected a GPU GPU-other, found: Not Found" in log[0]


def test_a_child_that_dies_gives_nothing_from_then_on(start: Start) -> None:
    child, log = start(dies_after=1)
    assert [child.window(), child.window()] == [{}, {}]
    assert len(log) == 1


def test_other_devices_have_no_telemetry_child() -> None:
    log: list[str] = []
    with telemetry("Made-up CPU", log.append) as window:
        assert window() == {}
    assert not log


def test_without_the_package_the_line_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(NoNvml, match="nvidia-ml-py"), board("GPU-fake"):
        pass


def test_the_child_ends_with_its_parent(start: Start) -> None:
    start()  # sets the environment
    child = subprocess.Popen([*COMMAND, "GPU-fake"], stdin=subprocess.PIPE)
    child.communicate()
    assert child.returncode == 0


def test_there_is_no_torch_in_the_child() -> None:
    code = "import sys, sparsebench.harness.machine.telemetry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


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
        found = window()
    assert found.keys() >= {"sm_mhz", "memory_mhz", "power_w", "temperature_c", *COUNTERS}
    assert 0 <= found["power_capped_us"] <= 1.5e6 * found["seconds"]
    assert 0.3 < found["energy_j"] / found["seconds"] / found["power_w"] < 3
    assert not log
