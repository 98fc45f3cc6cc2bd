"""Is this machine fit to measure? Readings here, judgement in findings.py, host.py, crosscheck.py.

    GPU     who else is on it, before anything of ours runs
            a second of load: slowdowns, clocks, temperature, power; its settings and memory errors
    host    load, governor, libraries; for a CPU also threads and the clock's step
    times   A/A pairs; on a GPU also a sample of nothing, and one op by several clocks

It changes no setting. What a run itself will find can differ: its rows are marked one by one.
"""

import os
from collections.abc import Mapping

import torch
from rich.markup import escape
from rich.table import Table
from torch.nn.functional import linear

from sparsebench.harness.bench import device_ceilings as ceilings
from sparsebench.harness.doctor import findings
from sparsebench.harness.doctor import host_checks as host
from sparsebench.harness.doctor import timing_checks as crosscheck
from sparsebench.harness.doctor.findings import Finding, Level
from sparsebench.harness.machine._nvml import Board, NoNvml, board
from sparsebench.harness.machine.device import identity
from sparsebench.harness.machine.telemetry import summary

LOAD_S = 1.0
SIDE, CALLS = 4096, 250  # of the product that is the load, and how many between two readings
APPLICATION = "Applications", "DefaultApplications"
STYLES = {Level.OK: "green", Level.NOTE: "yellow", Level.WARNING: "bold red"}


def examine(device: torch.device) -> list[Finding]:
    """Return every finding; about ten seconds on a GPU, and that the GPU is busy meanwhile."""
    runnable = host.read_load()  # before ours is in it
    found = _on_gpu(device) if device.type == "cuda" else []
    found += _on_host(device, runnable)
    found += [crosscheck.floor(*pairs) for pairs in crosscheck.read_pairs(device).items()]
    if device.type == "cuda":
        nothing_us = ceilings.nothing_us(device)
        found.append(crosscheck.nothing(nothing_us))
        clocks = crosscheck.read_clocks(device)
        found += [crosscheck.agreement(times_us, nothing_us) for times_us in clocks]
    return found


def table(found: list[Finding]) -> Table:
    """Return the findings for a terminal."""
    shown = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("", "check", "found", "what it means, and what to do"):
        shown.add_column(name, overflow="fold")
    for finding in found:
        advice = " ".join(filter(None, [finding.means, finding.do]))
        level = f"[{STYLES[finding.level]}]{finding.level}[/]"
        shown.add_row(level, finding.check, escape(finding.found), escape(advice))
    return shown


def _on_gpu(device: torch.device) -> list[Finding]:
    try:
        with board(identity(device)) as gpu:
            before = findings.others(_others(gpu), _busy_percent(gpu))
            window, bits = _under_load(gpu, device)
            driver = gpu.nvml.nvmlSystemGetCudaDriverVersion()
            versions = host.cuda(driver, str(torch.version.cuda))
            told = [before, *_shown(gpu, window, bits), *_set(gpu), versions]
    except NoNvml as error:
        means = "Of the GPU's state nothing can be checked, and rows have no telemetry."
        told = [Finding(Level.NOTE, "NVML", str(error), means)]
    return [*told, findings.l2(torch.cuda.get_device_properties(device).L2_cache_size)]


def _others(gpu: Board) -> list[int] | None:
    """Return the other processes that have the GPU open."""
    lists = [gpu.ask(f"{kind}RunningProcesses_v3") for kind in ("Compute", "Graphics")]
    if lists == [None, None]:
        return None
    pids = {process.pid for listed in lists for process in listed or ()}
    return sorted(pids - {os.getpid()})


def _busy_percent(gpu: Board) -> float | None:
    """Return for how much of the last second or less something ran on the GPU."""
    rates = gpu.ask("UtilizationRates")
    return None if rates is None else float(rates.gpu)


def _under_load(gpu: Board, device: torch.device) -> tuple[dict[str, float], int | None]:
    """Multiply random matrices for LOAD_S; return telemetry.py's window, and the reasons' bits."""
    x, w = (torch.randn(SIDE, SIDE, device=device).bfloat16() for _ in range(2))
    readings = [gpu.reading()]
    while readings[-1]["at_s"] < readings[0]["at_s"] + LOAD_S:
        for _ in range(CALLS):
            linear(x, w)
        readings.append(gpu.reading())  # while they run
        bits = gpu.reasons()
        torch.cuda.synchronize(device)
    return summary(readings), bits


def _shown(gpu: Board, window: Mapping[str, float], bits: int | None) -> list[Finding]:
    """Judge what the load showed."""
    highest_mhz = gpu.ask("MaxClockInfo", gpu.nvml.NVML_CLOCK_SM)
    highest_c = gpu.ask("TemperatureThreshold", gpu.nvml.NVML_TEMPERATURE_THRESHOLD_GPU_MAX)
    return [
        findings.slowed_down(window),
        findings.reasons(bits),
        findings.clock(window, highest_mhz),
        findings.temperature(window, highest_c),
    ]


def _set(gpu: Board) -> list[Finding]:
    """Judge how the GPU is set, and its memory errors."""
    nvml, ask = gpu.nvml, gpu.ask
    kinds = nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
    errors = [ask("TotalEccErrors", kind, nvml.NVML_VOLATILE_ECC) for kind in kinds]
    clocks = [ask(f"{which}Clock", nvml.NVML_CLOCK_SM) for which in APPLICATION]
    limits_mw = [ask(f"PowerManagement{which}Limit") for which in ("", "Default")]
    ecc, mig = ask("EccMode"), ask("MigMode")  # now, and after the next reset
    return [
        findings.application_clock(*clocks),
        findings.power_limit(*(mw and mw / 1e3 for mw in limits_mw)),
        findings.memory_errors(ecc and bool(ecc[0]), *errors),
        findings.slices(gpu.slice or (mig and bool(mig[0]))),
        findings.persistence(ask("PersistenceMode")),
    ]


def _on_host(device: torch.device, runnable: float) -> list[Finding]:
    cores = host.read_cores()
    found = [
        host.load(runnable, cores),
        host.governor(host.read_governor()),
        host.timer(host.read_tick_ns()),
        host.versions(host.read_versions(), host.read_pins()),
    ]
    return found + ([host.threads(torch.get_num_threads(), cores)] if device.type == "cpu" else [])
