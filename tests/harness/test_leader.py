"""harness/run/measure.py: the leader of a contest, for a line of progress."""

from sparsebench.harness.run.measure import leader
from sparsebench.results.record import Case, Contender, Problem, Row, Status

PROBLEM = Problem("linear", {"m": 1, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks"})


def row(kernel: str, *samples_us: float, baseline: bool = False) -> Row:
    contender = Contender("dense", kernel, baseline=baseline)
    return Row(Case(PROBLEM, contender), Status.OK, samples_us=samples_us, samples_per_block=1)


def test_the_leader_is_decided_by_ratios_within_blocks() -> None:
    """The clock doubles from block to block, for both."""
    base = row("cublas", 400.0, 200.0, 100.0, baseline=True)
    assert leader([base, row("fast", 200.0, 100.0, 50.0)]) == "; last: fast, 2.0 x cublas"
    assert leader([base, row("slow", 800.0, 400.0, 200.0)]) == "; last: cublas, the baseline"
    assert leader([base]) == leader([row("fast", 1.0), row("slow", 2.0)]) == ""
