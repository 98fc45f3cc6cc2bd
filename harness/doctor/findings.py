"""Judge readings of a GPU and its host: are they fit to measure? This file reads nothing itself.

    ok         nothing to report
    note       numbers are right, but differ from those of a GPU without this; or no reading
    warning    do not trust numbers that are measured here now

Each check is a function of its readings, which examination.py takes. A reading is None if the
driver does not report it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from sparsebench.results.record import POWER_LIMITED

FAILED = "a case failed"
BUSY_PERCENT = 5.0  # utilization in the second before anything ran here
NEAR_C = 5.0  # distance from the highest temperature
HELD_DOWN = 0.9  # fraction of the highest clock
RUNNABLE = 0.5, 1.0  # processes a core of the host: a note, a warning

# Reasons for a low SM clock, by the bits of nvmlClocksEventReason...; 0x1 is idle.
HARMFUL = {0x08: "hardware", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
HARMLESS = {0x02: "application clocks", 0x04: "power limit", 0x10: "sync boost", 0x100: "display"}

# What a finding means, and what to do.
OTHERS = "It slows down what is measured, and heats the GPU.", "End it, or wait until it ends."
HEAT = "Times depend on heat, air flow and power supply.", "Let it cool; check air flow and cables."
CAPPED = "Work of seconds runs slower, short samples hardly do. Rows of such samples are marked."
BROKEN = "The memory has errors, so results may be wrong.", "Reset the GPU, or have it replaced."


class Level(StrEnum):
    """How bad a finding is; a warning makes the machine unfit."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True)
class DoctorFinding:
    """The result of a check: the reading, what it means for numbers, and what to do."""

    level: Level
    check: str
    found: str
    means: str = ""
    do: str = ""


ok, note, warning = (partial(DoctorFinding, level) for level in Level)


def grade(
    value: float, limits: tuple[float, float], check: str, reading: str, means: str, do: str
) -> DoctorFinding:
    """Return ok below both limits, a note from the first one on, a warning from the second on."""
    if value < limits[0]:
        return ok(check, reading)
    return (warning if value >= limits[1] else note)(check, reading, means, do)


def unknown(check: str) -> DoctorFinding:
    """Return the finding for a reading that the driver does not report."""
    return note(check, "not reported by the driver", "Its state is unknown.")


def failure(reason: str, traceback: str) -> DoctorFinding:
    """Return the reason why a case failed, in the form of a finding."""
    return warning(FAILED, reason, traceback, "Its traceback is in failures.log.")


def no_commit() -> DoctorFinding:
    """Return the finding that git does not name the commit of a checkout."""
    means = "The run records only a digest of the code."
    do = "`git config --global --add safe.directory DIR` trusts a checkout of another user; "
    return note("commit", "git names none here", means, do + "SPARSEBENCH_COMMIT names one.")


def unfit(findings: Sequence[DoctorFinding]) -> bool:
    """Return whether any finding is a warning."""
    return any(finding.level is Level.WARNING for finding in findings)


def conclusion(findings: Sequence[DoctorFinding]) -> str:
    """Return the answer of the doctor: whether this machine is fit to measure, and why not."""
    checks = [finding.check for finding in findings if finding.level is Level.WARNING]
    if not checks:
        return "This machine is fit to measure."
    return f"This machine is not fit to measure: {', '.join(checks)}."


def others(pids: Sequence[int] | None, busy_percent: float | None) -> DoctorFinding:
    """Judge other processes on the GPU, and its utilization before anything ran here."""
    check, busy = "other work on the GPU", f"{busy_percent or 0:g} % busy"
    if pids:
        return warning(check, f"processes {', '.join(map(str, pids))}; {busy} before", *OTHERS)
    if busy_percent is not None and busy_percent >= BUSY_PERCENT:
        reading = f"{busy} before anything ran here; a container does not list other processes"
        return warning(check, reading, *OTHERS)
    return unknown(check) if pids is None else ok(check, f"none, {busy}")


def reasons(bits: int | None) -> DoctorFinding:
    """Judge the reasons for a low clock at the end of the load."""
    check = "clock limited now by"
    if bits is None:
        return unknown(check)
    harmful = [name for bit, name in HARMFUL.items() if bits & bit]
    harmless = [name for bit, name in HARMLESS.items() if bits & bit]
    if harmful:
        return warning(check, ", ".join(harmful + harmless), *HEAT)
    means = "The clock is below its highest rate, for all contenders alike."
    return note(check, ", ".join(harmless), means) if harmless else ok(check, "nothing")


def slowed_down(window: Mapping[str, float]) -> DoctorFinding:
    """Judge the counters of the load (a window of machine/nvml.py)."""
    check = "slowed down under load"
    names = {"power": "power_capped_us", "heat": "thermal_us", "hardware": "hardware_us"}
    share = {name: window[k] / window["seconds"] / 1e6 for name, k in names.items() if k in window}
    if not share:
        return unknown(check)
    reading = ", ".join(f"by {name} {100 * part:.0f} % of the time" for name, part in share.items())
    if share.get("heat", 0) > 0 or share.get("hardware", 0) > 0:
        return warning(check, reading, *HEAT)
    capped = share.get("power", 0) > POWER_LIMITED
    return note(check, reading, CAPPED) if capped else ok(check, reading)


def clock(window: Mapping[str, float], highest_mhz: float | None) -> DoctorFinding:
    """Judge the SM clock under load. A locked clock shows only as low without a reason."""
    check, mhz = "SM clock under load", window.get("sm_mhz")
    if mhz is None or highest_mhz is None:
        return unknown(check)
    reading = f"{mhz:.0f} of {highest_mhz:.0f} MHz"
    if mhz >= HELD_DOWN * highest_mhz:
        return ok(check, reading)
    if window.get("power_capped_us", 0) > 0:
        return note(check, reading, CAPPED)
    means = "Power does not explain the low clock; it may be locked. All times depend on it."
    return note(check, reading, means, "See nvidia-smi -q -d CLOCK.")


def temperature(window: Mapping[str, float], highest_c: float | None) -> DoctorFinding:
    """Compare the temperature under load with the highest that the GPU allows."""
    check, found_c = "temperature under load", window.get("temperature_c")
    if found_c is None:
        return unknown(check)
    if highest_c is None:
        return ok(check, f"{found_c:g} °C; the limit is not reported")
    reading = f"{found_c:g} of {highest_c:g} °C"
    near = found_c > highest_c - NEAR_C
    return warning(check, reading, *HEAT) if near else ok(check, reading)


def power_limit(limit_w: float | None, default_w: float | None) -> DoctorFinding:
    check, means = "power limit", "The clock in long work differs from the default's."
    if limit_w is None or default_w is None:
        return unknown(check)
    reading = f"{limit_w:g} W, default {default_w:g}"
    if limit_w == default_w:
        return ok(check, reading)
    return note(check, reading, means, "To restore the default, use nvidia-smi -pl.")


def memory_errors(
    enabled: bool | None, corrected: int | None, uncorrected: int | None
) -> DoctorFinding:
    """Judge ECC, and its errors since the driver was loaded."""
    check = "memory errors (ECC)"
    if enabled is None:
        return unknown(check)
    if not enabled:
        means = "The GPU does not detect flipped bits. On GDDR memory, ECC would cost bandwidth."
        return note(check, "ECC is off", means)
    reading = f"{uncorrected} uncorrected, {corrected} corrected since the driver was loaded"
    if uncorrected:
        return warning(check, reading, *BROKEN)
    return note(check, reading) if corrected else ok(check, reading)


def slices(enabled: bool | None) -> DoctorFinding:
    """Judge MIG: a GPU in slices."""
    if not enabled:
        return ok("MIG", "off" if enabled is not None else "this GPU has none")
    means = "A slice shares power and clock with other slices, and is slower than the whole GPU."
    return warning("MIG", "on", means, "Measure on a whole GPU.")


def l2(size: int) -> DoctorFinding:
    """Judge the L2 cache: a flush is a multiple of its size (kernels/_common/gpu_clock.py)."""
    if size > 0:
        return ok("L2 cache", f"{size / 2**20:g} MiB")
    means = "The harness cannot flush the cache, so samples called cold are hot."
    return warning("L2 cache", "size not reported", means)


def load(runnable: float, cores: int) -> DoctorFinding:
    """Judge how busy the host is."""
    reading = f"{runnable:.2f} runnable processes on {cores} cores"
    means = "Other work delays calls from Python, so their times and all times on a CPU vary."
    limits = RUNNABLE[0] * cores, RUNNABLE[1] * cores
    return grade(runnable, limits, "host load", reading, means, "End other work, or wait.")


def governor(name: str | None) -> DoctorFinding:
    """Judge the policy of the CPU's clock."""
    if name in ("performance", None):
        return ok("CPU governor", name or "not reported")
    means = "The CPU's clock follows its load, so the cost of a launch and times on a CPU vary."
    return note("CPU governor", str(name), means, "As root, set it to performance.")


def threads(count: int, cores: int) -> DoctorFinding:
    """Compare the number of torch's threads with that of the cores."""
    reading = f"torch uses {count} threads on {cores} cores"
    if count <= cores:
        return ok("threads", reading)
    means = "Threads wait for each other, so times on a CPU are too long and vary."
    return warning("threads", reading, means, f"Set OMP_NUM_THREADS={cores}.")


def launches(holds: bool) -> DoctorFinding:
    """Judge whether a stream can be held, so that the GPU never waits for the host."""
    check = "launches"
    if holds:
        return ok(check, "return before their kernel has ended")
    means = "The GPU waits for the host in every sample, so every row is marked `host late`."
    do = "Unset CUDA_LAUNCH_BLOCKING, and do not measure under a profiler."
    return warning(check, "return only after their kernel has ended", means, do)
