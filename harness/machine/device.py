"""The device under test, and the facts of its machine that affect times."""

import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.machine.code import code_sha256, commit
from sparsebench.harness.machine.nvml import NoNvml, board
from sparsebench.harness.machine.stand_in import stand_in
from sparsebench.kernels._common import choices

GPU_LIBRARIES = "torch", "triton", "cupy-cuda13x", "nvmath-python", "stanford-stk"
LIBRARIES = *GPU_LIBRARIES, "numpy", "scipy", "pandas"
CUDA_LIBRARIES = "cublas", "cusparse", "cusparselt"  # absent from the record if not installed
SWITCHES = "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "NVIDIA_TF32_OVERRIDE", "TRITON_INTERPRET"


def pick(name: str | None) -> torch.device:
    """Return the named device, or the best one. Raises SuiteError if it does not exist."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if name is None:
        return torch.device("cuda:0" if count else "cpu")
    gone = "; the simulated GPU is gone since 0.4" if name.partition(":")[0] == "sim" else ""
    unknown = SuiteError(f"--device: expected cpu, cuda or cuda:N; found {name!r}{gone}")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise unknown from error
    number = name.partition(":")[2] or "0"  # torch keeps 8 bits of it: cuda:256 would be cuda:0
    if device.type not in ("cpu", "cuda") or (device.type == "cpu" and int(number)):
        raise unknown
    if device.type == "cuda" and int(number) >= count:
        raise SuiteError(f"--device: expected an NVIDIA GPU for {name!r}, found {count} here")
    return torch.device("cuda", device.index or 0) if device.type == "cuda" else device


def full_name(name: str | None) -> str:
    """Return the name of the device that `pick` returns; a stand-in keeps its name."""
    return name if name and stand_in(name) else str(pick(name))


def identity(device: torch.device) -> str:
    """Return the GPU's UUID, or the CPU's name."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return _cpu_name()


def slug(device: torch.device) -> str:
    """Return a short name for a directory: `h200`, `cpu`."""
    if device.type == "cpu":
        return "cpu"
    name = torch.cuda.get_device_name(device).lower()
    return "-".join(word for word in name.split() if word not in ("nvidia", "geforce"))


def environment(device: torch.device) -> dict[str, Any]:
    """Return environment.json. It names no host and no user, so it can be published."""
    matmul = torch.backends.cuda.matmul
    return {
        "device": str(device),
        "gpu": _gpu(device) if device.type == "cuda" else None,
        "cpu": {
            "name": _cpu_name(),
            "cores": os.cpu_count(),
            "torch_threads": torch.get_num_threads(),
        },
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "system": {"kernel": platform.release(), "libc": "-".join(platform.libc_ver())},
        "versions": _versions(),
        "sparsebench": version("sparsebench"),
        **commit(),
        "code_sha256": code_sha256(),
        "tuned": choices.package_summary(device),
        "switches": {name: os.environ[name] for name in SWITCHES if name in os.environ},
        "torch_settings": {
            "fp32_precision": matmul.fp32_precision,
            "bf16_reduced_reduction": matmul.allow_bf16_reduced_precision_reduction,
            "fp16_reduced_reduction": matmul.allow_fp16_reduced_precision_reduction,
        },
    }


def _gpu(device: torch.device) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(device)
    return {
        "name": properties.name,
        "uuid": identity(device),
        "compute_capability": f"{properties.major}.{properties.minor}",
        "multiprocessors": properties.multi_processor_count,
        "memory_bytes": properties.total_memory,
        "l2_bytes": properties.L2_cache_size,
        **_nvml(identity(device)),
    }


def _nvml(uuid: str) -> dict[str, Any]:
    """Return the driver and the present clocks and limits, or why NVML cannot be read."""
    try:
        with board(uuid) as gpu:
            nvml, ask = gpu.nvml, gpu.ask
            limit_mw = ask("PowerManagementLimit")
            return {
                "driver": gpu.driver,
                "sm_clock_mhz": ask("ClockInfo", nvml.NVML_CLOCK_SM),
                "sm_clock_max_mhz": ask("MaxClockInfo", nvml.NVML_CLOCK_SM),
                "memory_clock_mhz": ask("ClockInfo", nvml.NVML_CLOCK_MEM),
                "power_limit_w": limit_mw and limit_mw / 1e3,
                "temperature_c": ask("Temperature", nvml.NVML_TEMPERATURE_GPU),
            }
    except NoNvml as error:
        return {"nvml": str(error)}


@cache
def _versions() -> dict[str, str | None]:
    versions = {"python": platform.python_version(), "cuda": torch.version.cuda}
    versions |= {name: _version(name) for name in LIBRARIES}
    for library in CUDA_LIBRARIES:
        for suffix in ("", "-cu12", "-cu13"):
            if number := _version(f"nvidia-{library}{suffix}"):
                versions[library] = number
    return versions


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
