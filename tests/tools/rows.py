"""Rows of a small run on a CPU whose outputs are right: what a bundle is made of."""

from collections.abc import Iterable

from sparsebench.harness.plan.suite import Contest
from sparsebench.results.record import Case, Row, Status


def right_rows(contests: Iterable[Contest]) -> list[Row]:
    """Return a row of every contender in each of two processes."""
    listed = list(contests)
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
            samples_us=(1.5, 2.5),
        )
        for replicate in range(2)
        for contest in listed
        for contender in contest.contenders
    ]
