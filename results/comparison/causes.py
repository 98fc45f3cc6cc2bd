"""Where a change comes from, as far as the runs record it.

The baseline is the control: it ran beside the kernel, so if its library and its search are the
same, a change of its time comes from the card, and a change of the gain from the kernel.

    gain changed, and the baseline is a control        ─> the kernel: our code, its configuration,
    time changed, and the baseline is no control       ─> or the version of its library
    only the baseline changed, and it is no control    ─> the baseline
    kernel and baseline changed together               ─> the card, or its clock; the machine,
                                                          if the device is a CPU
"""

from collections.abc import Collection, Mapping
from enum import StrEnum
from typing import Any

from sparsebench.results.comparison.sides import short_card
from sparsebench.results.record import Status
from sparsebench.results.statistics.outcome import DIFFERENT
from sparsebench.results.tables.families import is_ours

FACTS = "versions.", "gpu.driver", "commit", "code_sha256", "plugins.", "tuned", "switches."
LIBRARIES = "versions.", "gpu.driver"

Line = Mapping[Any, Any]
Facts = Mapping[str, str]
"""An environment.json as text by dotted name."""


class Cause(StrEnum):
    """What a change comes from."""

    KERNEL = "our kernel"
    CONFIGURATION = "the configuration"
    LIBRARY = "the library's version"
    BASELINE = "the baseline"
    CARD = "the card"
    MACHINE = "the machine"
    UNKNOWN = "no recorded cause"
    NONE = ""


OUTSIDE = (Cause.BASELINE, Cause.CARD, Cause.MACHINE)
"""Causes outside the kernel."""


def cause(line: Line, before: Facts, now: Facts, same_device: bool) -> tuple[bool, Cause, str]:
    """Return whether the baseline is a control, the cause of a change, and the reason for it."""
    for end, other in ("ba", "ab"):
        if line[f"status_{end}"] != Status.OK == line[f"status_{other}"]:
            status = str(line[f"status_{end}"]).replace("_", " ")
            return False, Cause.NONE, f"{status}: {line[f'detail_{end}']}"
    # a case that ran on both sides does not use a library that one side lacks
    differ = [each for each in differences(before, now, LIBRARIES) if "none" not in each]
    libraries = ", ".join(f"{name} {first} > {second}" for name, first, second in differ)
    searched = line["searched_a"] and line["searched_b"]
    control = bool(same_device and line["by_speedup"] and searched and not libraries)
    time, gain = line["word"] in DIFFERENT, line["gain"] in DIFFERENT
    if not same_device or not (time or gain):
        return control, Cause.NONE, ""
    of_kernel = not line["is_baseline"] and (gain if control else time)
    source = before.get("code_sha256") != now.get("code_sha256")
    same = same_code(line["codes_a"], line["codes_b"])
    found, why = _device(line, "gpu.name" in now)
    if of_kernel and source and is_ours(line["kernel"]) and not same:
        found, why = Cause.KERNEL, "other source" if same is None else "other compiled code"
        why += f", or {libraries}" if libraries else ""
    elif libraries:
        found, why = Cause.LIBRARY, libraries
    elif not searched:
        found = Cause.CONFIGURATION if time else Cause.BASELINE
        why = "taken from another run"
    elif of_kernel and line["choice_a"] != line["choice_b"]:
        found, why = Cause.CONFIGURATION, "another choice"
    elif of_kernel and source:
        found, why = Cause.UNKNOWN, "other source, the same compiled code"
    elif of_kernel and line["cards_a"] == line["cards_b"]:
        found = Cause.UNKNOWN
    marks = [line[f"mark_{end}"] or "not marked" for end in "ab"]
    return control, found, why + (f"; {', then '.join(marks)}" if marks[0] != marks[1] else "")


def differences(
    before: Facts, now: Facts, of: tuple[str, ...] = FACTS
) -> list[tuple[str, str, str]]:
    """Return what differs between two environments: name, before, now."""
    return [
        (name.removeprefix("versions."), before.get(name, "none"), now.get(name, "none"))
        for name in {**before, **now}
        if name.startswith(of) and before.get(name) != now.get(name)
    ]


def same_code(a: Collection[str], b: Collection[str]) -> bool | None:
    """Return whether two sides compiled a case to equal code; None if that is unknown.

    A case has several digests if its processes searched. A prefix (`sass:`) names what a digest
    covers; only digests with equal prefixes are comparable.
    """
    covered = [{code.rpartition(":")[0] for code in codes} for codes in (a, b)]
    return {*a} == {*b} if a and b and covered[0] == covered[1] else None


def _device(line: Line, gpu: bool) -> tuple[Cause, str]:
    """Return the card or the machine as a cause, and whether both sides ran on the same."""
    cause, kind = (Cause.CARD, "card") if gpu else (Cause.MACHINE, "CPU")
    if line["cards_a"] == line["cards_b"]:
        return cause, f"the same {kind}"
    ends = ("+".join(map(short_card, line[f"cards_{end}"])) for end in "ab")
    return cause, f"another {kind}, {' > '.join(ends)}"
