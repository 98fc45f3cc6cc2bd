"""Where a run ran, as read from its environment.json.

Code reads `gpu.name`, `gpu.uuid`, `cpu.name`, `versions.<package>`, `commit`, `dirty` and
`ceilings`. Reports show every other field as it is.
"""

from collections.abc import Mapping
from typing import Any


def device_name(environment: Mapping[str, Any]) -> str:
    """Name the GPU, or the CPU where there was none."""
    facts = flat(environment)
    return facts.get("gpu.name") or facts.get("cpu.name") or "an unnamed device"


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
