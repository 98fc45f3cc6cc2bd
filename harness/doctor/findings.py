"""What readings of a GPU mean for measuring on it. Nothing is read here.

    ok         nothing to say
    note       numbers are right, but differ from those of a GPU without it; or the driver gave none
    warning    numbers measured here now are not to be trusted

Each check is a function of its readings, which doctor.py takes. A reading is None where the driver
gave none.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from sparsebench.results.record import POWER_LIMITED

FAILED = "a case failed"
BUSY_PERCENT = 5.0  # of the second before anything ran here
NEAR_C = 5.0  # to the highest temperature
HELD_DOWN = 0.9  # of the highest clock

# What holds the SM clock down, by the bits of nvmlClocksEventReason...; 0x1 is idle.
HARMFUL = {0x08: "hardware", 0x20: "heat (software)", 0x40: "heat (hardware)", 0x80: "power brake"}
HARMLESS = {0x02: "application clocks", 0x04: "power limit", 0x10: "sync boost", 0x100: "display"}

# What it means, and what to do.
OTHERS = (
    "What is measured takes turns with it, and is heated by it.",
    "End it, or wait for its end.",
)
HEAT = "Times depend on heat, air and power supply.", "Let it cool; look after air flow and cables."
CAPPED = (
    "Seconds of the same work slow down; short samples in turn hardly do. Rows of it are marked."
)
BROKEN = "Memory fails, and results may be wrong.", "Reset the GPU, or have it replaced."


class Level(StrEnum):
    """How bad it is; a warning makes the machine unfit."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One check: what was found, what that means for numbers, and what can be done."""

    level: Level
    check: str
    found: str
    means: str = ""
    do: str = ""


def ok(check: str, found: str) -> Finding:
    """Return a finding that asks for nothing."""
    return Finding(Level.OK, check, found)


def failure(reason: str, traceback: str) -> Finding:
    """Return why a case failed in a run: not a matter of the machine, but told likewise."""
    return Finding(Level.WARNING, FAILED, reason, traceback, "Its traceback is in failures.log.")


def nothing_compared(suite: str, device: str) -> Finding:
    """Return that of a suite nothing but baselines is supported on a device."""
    found = f"nothing but the baselines of {suite} is supported on {device}"
    do = "`sparsebench check` names the reasons."
    return Finding(Level.WARNING, "suite", found, "So nothing will be compared.", do)


def untold(check: str) -> Finding:
    """Return the finding where the driver does not tell."""
    return Finding(Level.NOTE, check, "not told by the driver", "It may be well or not.")


def unfit(findings: Sequence[Finding]) -> bool:
    """Say whether numbers measured here now are not to be trusted."""
    return any(finding.level is Level.WARNING for finding in findings)


def others(pids: Sequence[int] | None, busy_percent: float | None) -> Finding:
    """Judge who else is on the GPU, by name and by how busy it was before anything ran here."""
    check, busy = "other work on the GPU", f"{busy_percent or 0:g} % busy"
    if pids:
        named = ", ".join(str(pid) for pid in pids)
        return Finding(Level.WARNING, check, f"processes {named}; {busy} before", *OTHERS)
    if busy_percent is not None and busy_percent >= BUSY_PERCENT:
        found = f"{busy} before anything ran here; a container does not list others' processes"
        return Finding(Level.WARNING, check, found, *OTHERS)
    return untold(check) if pids is None else ok(check, f"none, {busy}")


def reasons(bits: int | None) -> Finding:
    """Judge what holds the clock down at the end of the load."""
    check = "clock held down now by"
    if bits is None:
        return untold(check)
    harmful = [name for bit, name in HARMFUL.items() if bits & bit]
    harmless = [name for bit, name in HARMLESS.items() if bits & bit]
    if harmful:
        return Finding(Level.WARNING, check, ", ".join(harmful + harmless), *HEAT)
    if harmless:
        means = "The clock is below its highest, for all contenders alike."
        return Finding(Level.NOTE, check, ", ".join(harmless), means)
    return ok(check, "nothing")


def slowed_down(window: Mapping[str, float]) -> Finding:
    """Judge what the counters say of the load (telemetry.py's window)."""
    check = "slowed down under load"
    names = {"power": "power_capped_us", "heat": "thermal_us", "hardware": "hardware_us"}
    share = {
        name: window[key] / window["seconds"] / 1e6 for name, key in names.items() if key in window
    }
    if not share:
        return untold(check)
    found = ", ".join(f"by {name} {100 * part:.0f} % of the time" for name, part in share.items())
    if share.get("heat", 0) > 0 or share.get("hardware", 0) > 0:
        return Finding(Level.WARNING, check, found, *HEAT)
    if share.get("power", 0) > POWER_LIMITED:
        return Finding(Level.NOTE, check, found, CAPPED)
    return ok(check, found)


def clock(window: Mapping[str, float], highest_mhz: float | None) -> Finding:
    """Judge the SM clock under load. A lock is not told; a low clock with no reason betrays it."""
    check, mhz = "SM clock under load", window.get("sm_mhz")
    if mhz is None or highest_mhz is None:
        return untold(check)
    found = f"{mhz:.0f} of {highest_mhz:.0f} MHz"
    if mhz >= HELD_DOWN * highest_mhz:
        return ok(check, found)
    if window.get("power_capped_us", 0) > 0:
        return Finding(Level.NOTE, check, found, CAPPED)
    means = "Held down, and not by power: locked? Times are those of this clock."
    return Finding(Level.NOTE, check, found, means, "See nvidia-smi -q -d CLOCK.")


def application_clock(mhz: float | None, default_mhz: float | None) -> Finding:
    """Judge the application clock, where the GPU still has one, against its default."""
    check = "application clock"
    if mhz is None or default_mhz is None:
        return ok(check, "this GPU has none, or does not tell")
    found = f"{mhz:g} MHz, default {default_mhz:g}"
    if mhz == default_mhz:
        return ok(check, found)
    means = "Times are those of this setting, not of the GPU as sold."
    return Finding(Level.NOTE, check, found, means, "nvidia-smi -rac, if it should be the default.")


def temperature(window: Mapping[str, float], highest_c: float | None) -> Finding:
    """Judge the temperature under load against the highest that the GPU allows."""
    check, found_c = "temperature under load", window.get("temperature_c")
    if found_c is None:
        return untold(check)
    if highest_c is None:
        return ok(check, f"{found_c:g} °C; how high it may be is not told")
    found = f"{found_c:g} of {highest_c:g} °C"
    if found_c > highest_c - NEAR_C:
        return Finding(Level.WARNING, check, found, *HEAT)
    return ok(check, found)


def power_limit(limit_w: float | None, default_w: float | None) -> Finding:
    """Judge the power limit against the default."""
    check = "power limit"
    if limit_w is None or default_w is None:
        return untold(check)
    found = f"{limit_w:g} W, default {default_w:g}"
    if limit_w == default_w:
        return ok(check, found)
    means = "Long work runs at another clock than on a GPU with the default."
    return Finding(Level.NOTE, check, found, means, "nvidia-smi -pl, if it should be the default.")


def memory_errors(enabled: bool | None, corrected: int | None, uncorrected: int | None) -> Finding:
    """Judge ECC: whether it is on, and its errors since the driver was loaded."""
    check = "memory errors (ECC)"
    if enabled is None:
        return untold(check)
    if not enabled:
        means = "A wrong bit goes unseen; on GDDR memory, ECC would also cost bandwidth."
        return Finding(Level.NOTE, check, "ECC is off", means)
    found = f"{uncorrected} uncorrected, {corrected} corrected since the driver was loaded"
    if uncorrected:
        return Finding(Level.WARNING, check, found, *BROKEN)
    return Finding(Level.NOTE if corrected else Level.OK, check, found)


def slices(enabled: bool | None) -> Finding:
    """Judge MIG: a GPU in slices."""
    if enabled:
        means = "A slice shares power and clock with its neighbours; ceilings are not the GPU's."
        return Finding(Level.WARNING, "MIG", "on", means, "Measure on a whole GPU.")
    return ok("MIG", "off" if enabled is not None else "this GPU has none")


def persistence(enabled: bool | None) -> Finding:
    """Judge persistence mode: whether the driver stays when nobody uses the GPU."""
    if enabled is None:
        return untold("persistence mode")
    if enabled:
        return ok("persistence mode", "on")
    means = "The driver starts anew with each process: seconds each, and settings are lost."
    return Finding(Level.NOTE, "persistence mode", "off", means, "nvidia-smi -pm 1 (root).")


def l2(size: int) -> Finding:
    """Judge the L2 cache: a flush is a multiple of its size (kernels/_common/l2_flush.py)."""
    if size > 0:
        return ok("L2 cache", f"{size / 2**20:g} MiB")
    means = "Nothing is flushed: cold samples are hot ones."
    return Finding(Level.WARNING, "L2 cache", "size not told", means)
