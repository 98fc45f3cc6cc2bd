"""Rows of a small run on a CPU whose outputs are right: what a bundle is made of."""

from collections.abc import Iterable
from itertools import count, product

from sparsebench.harness.bench.sampling import MIN_SAMPLES
from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Case, Row, Status


def right_rows(contests: Iterable[Contest]) -> list[Row]:
    """Return a row of every contender in each of two processes, with samples of 8 ms."""
    listed, number = list(contests), count()
    return [
        Row(
            Case(contest.problem, contender),
            Status.OK,
            replicate,
            reference=contest.reference,
            device="a CPU",
            cache="hot",
            error=1e-7,
            error_of_bound=0.5,
            digest=contest.problem.id,
            draws=(2 * place, 2 * place + 1),
            samples_us=tuple(8000.0 + next(number) for _ in range(MIN_SAMPLES)),
        )
        for place, (replicate, contest) in enumerate(product(range(2), listed))
        for contender in contest.contenders
    ]
