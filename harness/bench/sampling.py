"""How many samples a contender gives, and in which scopes; `validate` checks it without a device.

A slow contender gives fewer samples: BUDGET_MS of its time, but at least MIN_SAMPLES.
"""

from collections.abc import Collection, Iterable

ROUNDS = 48
SAMPLES_PER_ROUND = 8
MIN_SAMPLES = 5
BUDGET_MS = 40.0

CAPTURED = 2.0  # the estimate of a captured call over its median, or the reverse; published: 1.3
INTERRUPTED = 8.0  # that of a call which the host makes, in the best process; published: 3.8

SCOPES = "kernel", "op", "chain"  # what is timed (timing.py); other scopes are readings of an op
CHAIN, LAYERS = "chain", 8  # the scope chain, and its number of layers (timing.py)

Measure = tuple[str, str]
"""A scope (kernel, op, chain) and a state of the cache (cold, hot)."""


def sample_budget(time_us: float) -> tuple[int, int]:
    """Return rounds and samples per round for a contender that takes about this long."""
    affordable = int(1e3 * BUDGET_MS / max(time_us, 1e-3))
    per_round = min(SAMPLES_PER_ROUND, max(1, affordable // ROUNDS))
    return min(ROUNDS, max(MIN_SAMPLES, affordable // per_round)), per_round


def distinct_measures(
    measures: Iterable[Measure], device: str, readings: Collection[str] = ()
) -> tuple[Measure, ...]:
    """Return the measures that a device distinguishes, and the `readings` among them of an op.

    On a CPU there is one measure of a call.
    """
    here = [m for m in measures if m[0] in SCOPES or m[0] in readings]
    if device == "cpu":
        here = [("kernel" if scope in SCOPES else scope, "hot") for scope, _ in here]
    return tuple(dict.fromkeys(here))


def call_of(scope: str) -> str:
    """Return the call that a scope times: the chain, or the launch alone (kernel)."""
    return CHAIN if scope == CHAIN else "kernel"


def layers_of(scope: str) -> int:
    """Return how many layers a call of a scope runs; a sample is the time of one layer."""
    return LAYERS if scope == CHAIN else 1
