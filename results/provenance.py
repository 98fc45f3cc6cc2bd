"""Where a run ran, as read from its environment.json.

Code reads `gpu.name`, `gpu.uuid`, `cpu.name`, `versions.<package>`, `commit`, `dirty` and
`ceilings`. Reports show every other field as it is.

Who chose the configurations of a run: what its intervals hold, and what they do not.

A kernel that tunes itself settles on one of several configurations, in part by chance. In a verdict
every process chooses for itself, so what a search settles on is inside the interval. Whatever the
processes share instead is no part of it, and is named beside it. harness/NOTES.md has the figures.

    verdict   process 0    all candidates, hundreds ─> finalists: within 10 %, 24 at most
              processes 1 to 7    the finalists, timed anew ─> a choice of its own
    look      process 0    all candidates ─> its choice, which the others take
"""

from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.results.files import from_json
from sparsebench.results.statistics import FEWEST

KIND = "name", "compute_capability", "multiprocessors", "memory_bytes", "l2_bytes"
LIMITS = "driver", "power_limit_w", "sm_clock_max_mhz"  # GPUs of one name may be set otherwise
SIMULATED = "seed", "faults"  # of a simulated GPU: what two of a kind may have of their own


def device_name(environment: Mapping[str, Any]) -> str:
    """Name the GPU, or the CPU where there was none."""
    facts = flat(environment)
    return facts.get("gpu.name") or facts.get("cpu.name") or "an unnamed device"


def identity_of(environment: Mapping[str, Any]) -> str:
    """Return the UUID of the GPU, or the name of the CPU where there was none, as a row has it."""
    facts = flat(environment)
    found = facts.get("gpu.uuid") or facts.get("cpu.name")
    if not found:
        raise ResultError("environment.json: expected gpu.uuid or cpu.name, found neither")
    return found


def identity_at(run: Path) -> str:
    """Return `identity_of` a run on disk, and read none of its rows."""
    return identity_of(from_json(run / "environment.json"))


def devices_named(environment: Mapping[str, Any]) -> str:
    """Name the GPU for a reader; of a merged run also how many there were: 2 × NVIDIA H200."""
    count = len(environment.get("devices", []))
    return f"{count} × {device_name(environment)}" if count > 1 else device_name(environment)


def alike(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what runs on several GPUs must share to be parts of one: kind, code, versions."""
    gpu, sim = environment.get("gpu") or {}, environment.get("sim") or {}
    return {
        "code_sha256": environment.get("code_sha256"),
        "tuned": environment.get("tuned"),
        **{f"gpu.{name}": gpu.get(name) for name in (*KIND, *LIMITS)},
        "cpu.name": (environment.get("cpu") or {}).get("name"),
        "sim": {name: value for name, value in sim.items() if name not in SIMULATED},
        **{f"versions.{name}": found for name, found in environment["versions"].items()},
    }


def require_alike(where: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise a ResultError that names the first thing in which two differ, as `alike` returns it."""
    for name in {**first, **other}:
        if (expected := first.get(name)) != (found := other.get(name)):
            said = f"{where}: expected {name} {_short(expected)} as in the first part"
            raise ResultError(f"{said}, found {_short(found)}")


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 100 else f"{str(value)[:100]}..."


def flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested data as text by dotted name, without empty values and None."""
    facts: dict[str, str] = {}
    for name, value in data.items():
        if isinstance(value, Mapping):
            facts |= flat(value, f"{prefix}{name}.")
        elif isinstance(value, list):
            facts |= flat({str(i): item for i, item in enumerate(value)}, f"{prefix}{name}.")
        elif value is not None and value != "":
            facts[prefix + name] = str(value)
    return facts


class Choices(StrEnum):
    """Who chose; the value is the word in run.json. Runs without the word are FIRST.

    AMONG   every process, by a search of its own; later ones among the first's finalists
    EACH    likewise, but every process among all candidates: runs before AMONG
    FIRST   the first process; the others took what it had settled on
    BUNDLE  another run: process p took what its process p had settled on
    """

    AMONG = "each process, among the finalists of the first"
    EACH = "each process"
    FIRST = "first process"
    BUNDLE = "bundle"

    @property
    def sentence(self) -> str:
        """Say what an interval of the run holds."""
        return {
            Choices.AMONG: "Each process tuned anew, and later ones among the first's finalists: "
            "intervals hold what a search settles on.",
            Choices.EACH: "Each process tuned anew: intervals hold what a search settles on.",
            Choices.FIRST: "The first process tuned, and the others took its choices: "
            "intervals are of these configurations, and leave out what a search settles on.",
            Choices.BUNDLE: "Configurations are those of the earlier run, taken without a search: "
            "the result is about them, and not about what a search would settle on.",
        }[self]


def choices(state: Mapping[str, Any]) -> Choices:
    """Return who chose in a run, by its run.json."""
    return Choices(state.get("choices", Choices.FIRST))


def planned(replicates: int, pinned: bool) -> Choices:
    """Return who is to choose in a run of so many processes; `pinned`: choices of a bundle."""
    if pinned:
        return Choices.BUNDLE
    return Choices.AMONG if replicates >= FEWEST else Choices.FIRST
