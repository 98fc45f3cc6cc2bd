"""The doctor: fake readings with their levels, other work on the host, and this machine."""

import json
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.harness.doctor import examination, findings, other_work
from sparsebench.harness.doctor.findings import DoctorFinding, Level
from sparsebench.harness.doctor.other_work import Spent, host
from sparsebench.harness.machine.nvml import board
from tests.emulation.fake_nvml import pynvml
from tests.tools.command_line import sparsebench

OK, NOTE, WARNING = Level.OK, Level.NOTE, Level.WARNING
LOAD = {"seconds": 1.0, "sm_mhz": 1980.0, "temperature_c": 60.0}
LOAD |= {"power_capped_us": 0.0, "thermal_us": 0.0, "hardware_us": 0.0}

READINGS: list[tuple[DoctorFinding, Level]] = [
    (findings.others([4711], 0), WARNING),
    (findings.others(None, 40), WARNING),
    (findings.others(None, None), NOTE),
    (findings.reasons(0x4), NOTE),  # power limit
    (findings.reasons(0x4 | 0x40), WARNING),  # and heat
    (findings.reasons(None), NOTE),
    (findings.slowed_down(LOAD | {"power_capped_us": 9e5}), NOTE),
    (findings.slowed_down(LOAD | {"thermal_us": 1.0}), WARNING),
    (findings.slowed_down({"seconds": 1.0}), NOTE),
    (findings.clock(LOAD | {"sm_mhz": 1200.0}, 1980), NOTE),
    (findings.temperature(LOAD | {"temperature_c": 84.0}, 87), WARNING),
    (findings.power_limit(450, 700), NOTE),
    (findings.power_limit(None, 700), NOTE),
    (findings.memory_errors(True, 3, 0), NOTE),
    (findings.memory_errors(True, 0, 1), WARNING),
    (findings.memory_errors(False, None, None), NOTE),
    (findings.slices(True), WARNING),
    (findings.l2(60 * 2**20), OK),
    (findings.l2(0), WARNING),
    (findings.load(0.1, 2), OK),
    (findings.load(1.2, 2), NOTE),
    (findings.load(2.0, 2), WARNING),
    (findings.governor("performance"), OK),
    (findings.governor(None), OK),
    (findings.governor("powersave"), NOTE),
    (findings.threads(2, 2), OK),
    (findings.threads(8, 2), WARNING),
    (findings.launches(holds=True), OK),
    (findings.launches(holds=False), WARNING),
]


@pytest.mark.parametrize(("finding", "level"), READINGS, ids=lambda value: str(value)[:100])
def test_readings_have_their_level(finding: DoctorFinding, level: Level) -> None:
    assert finding.level is level
    assert level is OK or finding.means or "corrected" in finding.found


def fake(monkeypatch: pytest.MonkeyPatch, **readings: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    monkeypatch.setenv("FAKE_NVML", json.dumps(readings))


def test_a_healthy_gpu_has_only_ok_findings(monkeypatch: pytest.MonkeyPatch) -> None:
    fake(monkeypatch)
    with board("GPU-fake") as gpu:
        result = [*examination.load_findings(gpu, LOAD, gpu.reasons()), *examination.settings(gpu)]
    result.append(other_work.gpu("GPU-fake", 7))
    assert len(result) == 8
    assert {finding.level for finding in result} == {OK}, result


def test_the_command_prints_findings_and_says_whether_the_machine_is_fit() -> None:
    done = sparsebench("doctor", "--device", "cpu", "--json")
    answer = json.loads(done.stdout)
    assert done.returncode == (0 if answer["fit"] else 4)
    assert "not fit" in findings.conclusion([findings.others([4711], 0)])
    assert "not fit" not in findings.conclusion([findings.others([], 0)])
    names = [finding["check"] for finding in answer["findings"]]
    assert names == ["host load", "CPU governor", "threads"]


@pytest.mark.gpu
def test_a_gpu_is_examined() -> None:
    result = {finding.check: finding for finding in examination.examine(torch.device("cuda:0"))}
    assert {"other work on the GPU", "slowed down under load", "SM clock under load"} < set(result)
    assert result["launches"].level is OK


BEGAN = Spent(at_s=0.0, busy_s=100.0, own_s=5.0, cores=2)


@pytest.mark.parametrize(
    ("kind", "others_s", "level"),
    [
        ("cpu", 0.1, Level.OK),
        ("cpu", 3.0, Level.NOTE),
        ("cpu", 8.0, Level.WARNING),
        ("cuda", 8.0, Level.OK),
        ("cuda", 19.0, Level.WARNING),
    ],
)
def test_other_work_on_the_cores_is_judged(kind: str, others_s: float, level: Level) -> None:
    now = Spent(at_s=10.0, busy_s=100.0 + 7.0 + others_s, own_s=5.0 + 7.0, cores=2)
    result = host(BEGAN, now, kind)
    assert result.level is level
    assert f"{others_s / 10:.1f} of 2 cores" in result.found


def test_a_system_without_counters_is_a_note() -> None:
    assert host(None, None, "cpu").level is Level.NOTE


@pytest.mark.parametrize(
    ("listed", "level"), [([], OK), ([7], OK), ([7, 8], WARNING), ([11], OK), ([11, 12], WARNING)]
)
def test_our_own_worker_is_none_of_the_others(listed: list[int], level: Level, monkeypatch) -> None:
    """If its id is of another namespace, one of the listed processes is the worker."""
    fake(monkeypatch)
    processes = [SimpleNamespace(pid=pid) for pid in listed]
    monkeypatch.setitem(pynvml.TOLD, "ComputeRunningProcesses_v3", processes)
    assert other_work.gpu("GPU-fake", 7).level is level


def test_a_gpu_without_nvml_is_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    result = other_work.gpu("GPU-1", 7)
    assert result.level is Level.NOTE
