"""Readings of the host, and what they mean for numbers.

Functions that begin with `read_` take readings; the others judge them. The host launches every
kernel, and for a CPU run it is the device itself.
"""

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from time import perf_counter_ns

from sparsebench.harness.doctor.findings import Finding, grade, note, ok, warning

BUSY = 0.5, 1.0  # runnable processes a core: a note, a warning
COARSE_NS = 1000
TICKS = 1000
GOVERNOR = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")
LIBRARIES = "torch", "triton", "cupy-cuda13x", "nvmath-python", "nvidia-ml-py", "numpy", "scipy"


def read_governor() -> str | None:
    """Return the policy of the CPU's clock, or None if the system does not report it."""
    try:
        return GOVERNOR.read_text("utf-8").strip()
    except OSError:
        return None


def read_tick_ns() -> int:
    """Return the smallest step of the host's clock, including the cost of a reading."""
    times = [perf_counter_ns() for _ in range(TICKS)]
    return min(b - a for a, b in pairwise(times) if b > a)


def read_version(library: str) -> str | None:
    """Return the installed version of a library, or None."""
    try:
        return version(library).partition("+")[0]
    except PackageNotFoundError:
        return None


def read_pins() -> dict[str, str]:
    """Return the versions that the tests ran with; {} outside a checkout."""
    file = Path(str(files("sparsebench.harness"))).resolve().parent / "constraints.txt"
    lines = file.read_text("utf-8").splitlines() if file.exists() else []
    pinned = (line.split("==") for line in lines if "==" in line and not line.startswith("#"))
    return {name.strip(): pin.strip() for name, pin in pinned}


def load(runnable: float, cores: int) -> Finding:
    """Judge how busy the host is."""
    reading = f"{runnable:.2f} runnable processes on {cores} cores"
    means = "Other work delays calls from Python, so their times and all times on a CPU vary."
    limits = BUSY[0] * cores, BUSY[1] * cores
    return grade(runnable, limits, "host load", reading, means, "End other work, or wait.")


def governor(name: str | None) -> Finding:
    """Judge the policy of the CPU's clock."""
    if name in ("performance", None):
        return ok("CPU governor", name or "not reported")
    means = "The CPU's clock follows its load, so the cost of a launch and times on a CPU vary."
    return note("CPU governor", str(name), means, "As root, set it to performance.")


def threads(count: int, cores: int) -> Finding:
    """Compare the number of torch's threads with that of the cores."""
    reading = f"torch uses {count} threads on {cores} cores"
    if count <= cores:
        return ok("threads", reading)
    means = "Threads wait for each other, so times on a CPU are too long and vary."
    return warning("threads", reading, means, f"Set OMP_NUM_THREADS={cores}.")


def timer(tick_ns: int) -> Finding:
    """Judge the smallest step of the host's clock."""
    reading, means = f"steps of {tick_ns} ns", "Times of short calls are rounded to these steps."
    coarse = warning("host clock", reading, means)
    return ok("host clock", reading) if tick_ns <= COARSE_NS else coarse


def versions(installed: Mapping[str, str | None], pins: Mapping[str, str]) -> Finding:
    """Compare the libraries with the versions that the tests ran with."""
    check = "library versions"
    listed = ", ".join(f"{name} {version}" for name, version in installed.items() if version)
    if not pins:
        return note(check, listed, "There is no constraints.txt to compare them with.")
    other = {name: pin for name, pin in pins.items() if installed.get(name) not in (None, pin)}
    if not other:
        return ok(check, listed)
    differing = (f"{name} {installed[name]} (tested: {pin})" for name, pin in other.items())
    means = "Other versions may have other kernels: compare only runs with equal versions."
    return note(check, ", ".join(differing), means)


def cuda(driver: int, built_for: str) -> Finding:
    """Compare the newest CUDA that the driver supports (13000 is 13.0) with torch's."""
    supported = driver // 1000, driver % 1000 // 10
    major, minor = (int(part) for part in built_for.split(".")[:2])
    reading = f"the driver supports {supported[0]}.{supported[1]}, torch is built for {built_for}"
    if supported >= (major, minor):
        return ok("CUDA", reading)
    means = "Kernels in PTX cannot be compiled, and some libraries do not start."
    return note("CUDA", reading, means, "Install a newer driver, or an older torch.")
