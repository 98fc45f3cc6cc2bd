"""How many samples a contender gives, and of what: known without a device, and checked by validate.

A slow contender gets fewer samples: BUDGET_MS of its own time, at least MIN_SAMPLES.
"""

from collections.abc import Iterable

BLOCKS = 48
SAMPLES_PER_BLOCK = 8
MIN_SAMPLES = 5
BUDGET_MS = 40.0

CHAIN, LAYERS = "chain", 8  # a scope, and how many layers follow each other in it (timing.py)

Measure = tuple[str, str]
"""A scope (kernel, op, chain) and a state of the cache (cold, hot)."""


def budgeted(time_us: float) -> tuple[int, int]:
    """Return blocks and samples a block for a contender that takes about this long."""
    affordable = int(1e3 * BUDGET_MS / max(time_us, 1e-3))
    per_block = min(SAMPLES_PER_BLOCK, max(1, affordable // BLOCKS))
    return min(BLOCKS, max(MIN_SAMPLES, affordable // per_block)), per_block


def possible(measures: Iterable[Measure], device: str) -> tuple[Measure, ...]:
    """Return the measures that a device tells apart: on the CPU there is one."""
    return (("kernel", "hot"),) if device == "cpu" else tuple(measures)


def layers_of(scope: str) -> int:
    """Return how many layers a call of a scope goes through; a sample is the time of one."""
    return LAYERS if scope == CHAIN else 1


def chained(measures: Iterable[Measure]) -> bool:
    """Say whether layers that follow each other are asked for."""
    return CHAIN in dict(measures)
