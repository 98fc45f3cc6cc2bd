"""Where a run ran, and which process chose the configurations of its kernels.

The device comes from environment.json. Code reads only `gpu.name`, `gpu.uuid`, `cpu.name`,
`versions.<package>`, `commit`, `dirty` and `ceilings`; reports show every other field unchanged.

The choices come from run.json. A kernel that tunes itself picks one of several configurations,
partly by chance. In a verdict every process picks anew, so the intervals cover this chance. If the
processes share a choice, the intervals do not cover it, and reports say so. harness/NOTES.md has
the figures.

    verdict   process 0           all candidates, hundreds ─> finalists: within 10 %, 24 at most
              processes 1 to 7    the finalists, timed again ─> a choice per process
    look      process 0           all candidates ─> one choice, which the other processes reuse
"""

import re
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.results.files import from_json
from sparsebench.results.statistics.ratio import FEWEST

COMMITS = "commits.json"
KIND = "name", "compute_capability", "multiprocessors", "memory_bytes", "l2_bytes"
LIMITS = "driver", "power_limit_w", "sm_clock_max_mhz"  # may differ between GPUs of one name


class Choices(StrEnum):
    """The process that chose the configurations; the value is the word in run.json.

    AMONG   every process, by its own search; later ones among the finalists of the first
    EARLIER every process, by its own search among the finalists of an earlier run
    FIRST   the first process; the others reused its choices (also if run.json names none)
    BUNDLE  another run: process p reused the choices of its process p (before 0.4)
    """

    AMONG = "each process, among the finalists of the first"
    EARLIER = "each process, among the finalists of an earlier run"
    FIRST = "first process"
    BUNDLE = "bundle"

    @property
    def sentence(self) -> str:
        """Say whether the intervals of the run cover the choice of configurations."""
        return {
            Choices.AMONG: "Each process searched for configurations, after the first only among "
            "its best, so the intervals cover this choice.",
            Choices.EARLIER: "Each process searched among the best configurations of an earlier "
            "run, so the intervals cover this choice.",
            Choices.FIRST: "The first process searched for configurations, and the others reused "
            "them: the intervals hold for these, and do not cover the choice.",
            Choices.BUNDLE: "The run reused the configurations of the earlier run without a "
            "search: the result holds for these configurations only.",
        }[self]


def choices_of(state: Mapping[str, Any]) -> Choices:
    """Return which process chose in a run, from its run.json."""
    return Choices(state.get("choices", Choices.FIRST))


def planned_choices(replicates: int, searched: bool) -> Choices:
    """Return which process will choose in a new run; `searched`: it has the finalists of a run."""
    if replicates < FEWEST:
        return Choices.FIRST
    return Choices.EARLIER if searched else Choices.AMONG


def commit_of(run: Path, environment: Mapping[str, Any]) -> str:
    """Return the commit of a run; "" if it is unknown.

    A machine without the history records a digest of the code. COMMITS has the commit of each such
    digest; it lies beside the folders that hold the runs of each GPU.
    """
    commit, digest = environment.get("commit"), environment.get("code_sha256")
    table = run.resolve().parents[1] / COMMITS
    commits = from_json(table) if not commit and table.exists() else {}
    return str(commit or commits.get(str(digest), ""))


def device_name(environment: Mapping[str, Any]) -> str:
    """Return the name of the GPU, or of the CPU if there was none."""
    facts = flat(environment)
    return facts.get("gpu.name") or facts.get("cpu.name") or "an unnamed device"


def folder_name(device: str) -> str:
    """Return a device's name for a folder: `nvidia-h100-80gb-hbm3`."""
    return re.sub(r"[^a-z0-9]+", "-", device.lower()).strip("-") or "device"


def on_gpu(environment: Mapping[str, Any]) -> bool:
    """Return whether the device is a GPU."""
    return bool(environment.get("gpu"))


def device_title(environment: Mapping[str, Any]) -> str:
    """Return the device's name for a reader, with the count of a merged run: 2 × NVIDIA H200."""
    count = len(environment.get("devices", []))
    return f"{count} × {device_name(environment)}" if count > 1 else device_name(environment)


def device_id(environment: Mapping[str, Any]) -> str:
    """Return the UUID of the GPU, or the name of the CPU if there was none, as rows hold it."""
    facts = flat(environment)
    uuid = facts.get("gpu.uuid") or facts.get("cpu.name")
    if not uuid:
        raise ResultError("environment.json: expected gpu.uuid or cpu.name, found neither")
    return uuid


def device_id_at(run: Path) -> str:
    """Return the `device_id` of a run on disk without reading its rows."""
    return device_id(from_json(run / "environment.json"))


def shared_facts(environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return what all parts of one run must share: kind of GPU, code and versions."""
    gpu = environment.get("gpu") or {}
    return {
        "code_sha256": environment.get("code_sha256"),
        "tuned": environment.get("tuned"),
        **{f"gpu.{name}": gpu.get(name) for name in (*KIND, *LIMITS)},
        "cpu.name": (environment.get("cpu") or {}).get("name"),
        **{f"versions.{name}": version for name, version in environment["versions"].items()},
    }


def require_equal_facts(where: str, first: Mapping[str, Any], other: Mapping[str, Any]) -> None:
    """Raise a ResultError that names the first of the `shared_facts` in which two parts differ."""
    for name in {**first, **other}:
        if (expected := first.get(name)) != (actual := other.get(name)):
            message = f"{where}: expected {name} {_short(expected)} as in the first part"
            raise ResultError(f"{message}, found {_short(actual)}")


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


def _short(value: Any) -> str:
    return str(value) if len(str(value)) <= 100 else f"{str(value)[:100]}..."
