"""Is this machine fit to measure? Readings are taken here, and judged by the other modules.

    GPU     other processes and utilization, before anything of ours runs
            a second of load: slowdowns, clocks, temperature, power; settings and memory errors
    host    load, governor; for a CPU also threads
            whether launches block

The doctor changes no setting. Conditions may differ during a run; its rows are marked one by one.
"""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch.nn.functional import linear

from sparsebench.harness.doctor import findings, other_work
from sparsebench.harness.doctor.findings import DoctorFinding
from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.nvml import Board, NoNvml, board, summary
from sparsebench.kernels._common.gpu_clock import GpuClock

LOAD_S = 1.0
SIDE, CALLS = 4096, 250  # size of the product used as load, and its calls between readings
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


def examine(device: torch.device) -> list[DoctorFinding]:
    """Return every finding; this keeps a GPU busy for some seconds."""
    runnable = os.getloadavg()[0]  # the mean over the last minute, before our own load
    results = _on_gpu(device) if device.type == "cuda" else []
    results += _on_host(device, runnable)
    if device.type == "cuda":
        results.append(findings.launches(GpuClock(device).holds))
    return results


def _on_gpu(device: torch.device) -> list[DoctorFinding]:
    try:
        with board(identity(device)) as gpu:
            torch.zeros(1, device=device)  # from now on NVML lists this process
            before = other_work.gpu(identity(device), os.getpid())
            window, bits = _under_load(gpu, device)
            on_gpu = [before, *load_findings(gpu, window, bits), *settings(gpu)]
    except NoNvml as error:
        means = "The GPU's state cannot be checked, and rows have no telemetry."
        on_gpu = [findings.note("NVML", str(error), means)]
    return [*on_gpu, findings.l2(torch.cuda.get_device_properties(device).L2_cache_size)]


def _under_load(gpu: Board, device: torch.device) -> tuple[dict[str, float], int | None]:
    """Multiply random matrices for LOAD_S; return the telemetry, and the bits of reasons."""
    x, w = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
    readings = [gpu.reading()]
    while readings[-1]["at_s"] < readings[0]["at_s"] + LOAD_S:
        for _ in range(CALLS):
            linear(x, w)
        readings.append(gpu.reading())  # while they run
        bits = gpu.reasons()
        torch.cuda.synchronize(device)
    return summary(readings), bits


def load_findings(gpu: Board, window: Mapping[str, float], bits: int | None) -> list[DoctorFinding]:
    highest_mhz = gpu.ask("MaxClockInfo", gpu.nvml.NVML_CLOCK_SM)
    highest_c = gpu.ask("TemperatureThreshold", gpu.nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX)
    return [
        findings.slowed_down(window),
        findings.reasons(bits),
        findings.clock(window, highest_mhz),
        findings.temperature(window, highest_c),
    ]


def settings(gpu: Board) -> list[DoctorFinding]:
    nvml, ask = gpu.nvml, gpu.ask
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    errors = [ask("TotalEccErrors", kind, nvml.NVML_VOLATILE_ECC) for kind in kinds]
    limits_mw = [ask(f"PowerManagement{which}Limit") for which in ("", "Default")]
    ecc, mig = ask("EccMode"), ask("MigMode")  # now, and after the next reset
    return [
        findings.power_limit(*(mw and mw / 1e3 for mw in limits_mw)),
        findings.memory_errors(ecc and bool(ecc[0]), *errors),
        findings.slices(gpu.slice or (mig and bool(mig[0]))),
    ]


def _on_host(device: torch.device, runnable: float) -> list[DoctorFinding]:
    cores = len(os.sched_getaffinity(0))
    governor = GOVERNOR.read_text("utf-8").strip() if GOVERNOR.exists() else None
    results = [findings.load(runnable, cores), findings.governor(governor)]
    if device.type == "cpu":
        results.append(findings.threads(torch.get_num_threads(), cores))
    return results
