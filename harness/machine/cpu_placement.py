"""The host: what tells it from others, and which of its CPUs are near which of its GPUs.

    GPU ─ PCI address ─ /sys/bus/pci/devices/ADDRESS/local_cpulist ─> CPUs of its NUMA node
    core ─ topology/thread_siblings_list ─> the hyperthreads of one core stay together

Processes that measure side by side get cores of their own, near their GPUs.
"""

import hashlib
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from sparsebench.harness.machine.device import simulated

BOOT = Path("/proc/sys/kernel/random/boot_id")
CPUS = Path("/sys/devices/system/cpu")
PCI = Path("/sys/bus/pci/devices")


def boot() -> str:
    """Return a digest that is the same in all processes of a host until it starts again.

    The kernel draws the number at each start: it says nothing of the host's name.
    """
    try:
        return hashlib.sha256(BOOT.read_bytes()).hexdigest()[:12]
    except OSError:
        return "unknown"


def apart(devices: Sequence[str]) -> list[set[int]]:
    """Return CPUs for each device: near it, and none of two devices where there are enough."""
    here = os.sched_getaffinity(0)
    return shared_out([_near(device) & here or here for device in devices], _cores(here))


def draw_near(process: int) -> None:
    """Let a process that is there already run on the CPUs of this thread alone, all of it."""
    here = os.sched_getaffinity(0)
    for task in Path(f"/proc/{process}/task").iterdir() if process else ():
        with suppress(OSError):  # a thread that has just ended
            os.sched_setaffinity(int(task.name), here)


def shared_out(near: Sequence[set[int]], cores: Sequence[frozenset[int]]) -> list[set[int]]:
    """Give each core to one of the devices that it is near, the one with the fewest so far.

    A device that gets none may take all that are near it.
    """
    given: list[set[int]] = [set() for _ in near]
    for core in cores:
        wanting = [number for number, own in enumerate(near) if core & own]
        if wanting:
            given[min(wanting, key=lambda number: len(given[number]))] |= core
    return [own or near[number] for number, own in enumerate(given)]


def read_list(text: str) -> set[int]:
    """Return the numbers of a list as the kernel writes it: 0-3,8,10-11."""
    parts = [part.partition("-") for part in text.strip().split(",") if part.strip()]
    return {n for low, _, high in parts for n in range(int(low), int(high or low) + 1)}


def _cores(cpus: set[int]) -> list[frozenset[int]]:
    """Return the CPUs by core."""
    found = {}
    for cpu in sorted(cpus):
        file = CPUS / f"cpu{cpu}/topology/thread_siblings_list"
        siblings = frozenset(_read(file) & cpus) or frozenset({cpu})
        found[min(siblings)] = siblings
    return list(found.values())


def _near(device: str) -> set[int]:
    """Return the CPUs of a GPU's NUMA node; none where they are not known."""
    if simulated(device) or not device.startswith("cuda"):
        return set()
    address = _address(int(device.partition(":")[2] or "0"), os.environ)
    return _read(PCI / address / "local_cpulist") if address else set()


def _address(number: int, environment: Mapping[str, str]) -> str:
    """Return the PCI address of a GPU as sysfs writes it: 0000:1b:00.0; "" where NVML has none.

    NVML is asked, and not CUDA: this process stays off the GPUs.
    """
    try:
        import pynvml
    except ModuleNotFoundError:
        return ""
    try:
        pynvml.nvmlInit()
        try:
            seen = [name for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
            name = seen[number] if seen else str(number)
            handle = (
                pynvml.nvmlDeviceGetHandleByIndex(int(name))
                if name.isdigit()
                else pynvml.nvmlDeviceGetHandleByUUID(name)
            )
            found = pynvml.nvmlDeviceGetPciInfo_v3(handle).busId
        finally:
            pynvml.nvmlShutdown()
    except (pynvml.NVMLError, IndexError):
        return ""
    text = found.decode() if isinstance(found, bytes) else str(found)
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _read(file: Path) -> set[int]:
    try:
        return read_list(file.read_text())
    except (OSError, ValueError):
        return set()
