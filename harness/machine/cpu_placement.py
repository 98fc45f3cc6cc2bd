"""Identify the host, and place processes on CPUs near their GPUs.

    GPU ─ PCI address ─ /sys/bus/pci/devices/ADDRESS/local_cpulist ─> CPUs of its NUMA node
    core ─ topology/thread_siblings_list ─> the hyperthreads of one core stay together

Processes that measure at the same time get separate cores, near their GPUs.
"""

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from sparsebench.harness.machine.nvml import NoNvml, library

BOOT = Path("/proc/sys/kernel/random/boot_id")
CPUS = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")


def boot() -> str:
    """Return a digest that all processes of a host share until it restarts.

    The kernel draws the number at each start, so the digest does not reveal the host's name.
    """
    try:
        return hashlib.sha256(BOOT.read_bytes()).hexdigest()[:12]
    except OSError:
        return "unknown"


def apart(devices: Sequence[str]) -> list[set[int]]:
    """Return the CPUs for each device: near it, and disjoint if there are enough."""
    here, near = os.sched_getaffinity(0), list[set[int]]()
    for device in devices:
        cpus = set[int]()  # cores of its NUMA node, if known
        if device.startswith("cuda"):
            address = _address(int(device.partition(":")[2] or "0"))
            cpus = _read_cpus(PCI / address / "local_cpulist") if address else cpus
        near.append(cpus & here or here)
    return shared_out(near, _cores(here))


def draw_near(process: int) -> None:
    """Move all threads of a running process to the CPUs of this thread."""
    here = os.sched_getaffinity(0)
    for task in Path(f"/proc/{process}/task").iterdir() if process else ():
        with suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), here)


def shared_out(near: Sequence[set[int]], cores: Sequence[frozenset[int]]) -> list[set[int]]:
    """Give each core to the device near it that has the fewest so far.

    A device that gets no core may use all that are near it.
    """
    assigned: list[set[int]] = [set() for _ in near]
    for core in cores:
        close = [number for number, cpus in enumerate(near) if core & cpus]
        if close:
            assigned[min(close, key=lambda number: len(assigned[number]))] |= core
    return [cpus or near[number] for number, cpus in enumerate(assigned)]


def read_list(text: str) -> set[int]:
    """Parse a list of numbers as the kernel writes it: 0-3,8,10-11."""
    parts = [part.partition("-") for part in text.strip().split(",") if part.strip()]
    return {n for low, _, high in parts for n in range(int(low), int(high or low) + 1)}


def _cores(cpus: set[int]) -> list[frozenset[int]]:
    cores = {}
    for cpu in sorted(cpus):
        file = CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        siblings = frozenset(_read_cpus(file) & cpus) or frozenset({cpu})
        cores[min(siblings)] = siblings
    return list(cores.values())


def _address(number: int) -> str:
    """Return the PCI address of a GPU as sysfs writes it, 0000:1b:00.0; "" if NVML has none.

    NVML is used instead of CUDA because this process must not open the GPUs.
    """
    visible = [*filter(None, os.environ.get("CUDA_VISIBLE_DEVICES", "").split(","))]
    with suppress(NoNvml, IndexError), library() as nvml, suppress(nvml.NVMLError):
        name = visible[number] if visible else str(number)
        if name.isdigit():
            handle = nvml.nvmlDeviceGetHandleByIndex(int(name))
        else:
            handle = nvml.nvmlDeviceGetHandleByUUID(name)
        bus_id = nvml.nvmlDeviceGetPciInfo_v3(handle).busId
        text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
        domain, _, rest = text.lower().partition(":")
        return f"{domain[-4:]}:{rest}"
    return ""


def _read_cpus(file: Path) -> set[int]:
    try:
        return read_list(file.read_text("utf-8"))
    except (OSError, ValueError):
        return set()
