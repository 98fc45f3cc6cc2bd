"""Ceilings that this process measured lately: the runs of one sitting share them, card by card.

    a run asks for dtypes ─> known of its GPU, at most KEPT_S old, with all of these ─> taken
                          ─> else measured, with the dtypes that were known       ─> known

They take 10 s on an H200, and a campaign has 45 runs. `age_s` of a run's ceilings says how old they
were (results/ceilings.py). A CPU's are measured for every run: others may keep it busy.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from time import monotonic
from typing import Any

KEPT_S = 600.0  # clocks and temperature settle within a minute; other users come and go

Measure = Callable[[Collection[str]], dict[str, Any]]
"""Returns the ceilings of a device, those of products of some dtypes, as JSON."""


@dataclass(frozen=True)
class _Known:
    at: float
    dtypes: frozenset[str]
    ceilings: Mapping[str, Any]


_known: dict[str, _Known] = {}


def ceilings(card: str, dtypes: Collection[str], measure: Measure) -> dict[str, Any]:
    """Return a GPU's ceilings, its name being `card`: known ones, or those that `measure` finds."""
    asked, now = frozenset(dtypes), monotonic()
    known = _known.get(card)
    if known and now - known.at > KEPT_S:
        known = None
    if known and asked <= known.dtypes:
        return {**known.ceilings, "age_s": round(now - known.at, 1)}
    wanted = asked | known.dtypes if known else asked
    found = measure(wanted)
    _known[card] = _Known(monotonic(), wanted, found)
    return found
