"""Which rows are compared: those of one contest, block by block.

    A  baseline      speed-up of B = exp(median over blocks of log(A_i / B_i))
    B  contender
    b  its twin      A/A log       =     median over blocks of log(B_i / b_i)

Rows are of one contest if they share problem, process, attempt, scope and cache state.
"""

from collections.abc import Hashable, Mapping, Sequence

import numpy as np

from sparsebench.results.record import Contender, Row, Status
from sparsebench.results.statistics import Floats, Ratio, block_logs, by_block, ratio

Blocks = Mapping[tuple[int, int], Floats]
"""Median times of a case by block, µs, of each (replicate, attempt)."""


def opponents(rows: Sequence[Row], problems: Sequence[str]) -> list[tuple[Row | None, Row | None]]:
    """Return, for each row, its baseline and (where it is a twin) its original.

    `problems` are the ids of the rows' problems. The baseline is the first baseline row that is
    ok, the original the first ok row of the same format, kernel, parameters and options; None if
    the contest has no such row.
    """
    baselines: dict[Hashable, Row] = {}
    originals: dict[Hashable, Row] = {}
    contests = [
        (problem, row.reference, row.replicate, row.attempt, row.scope, row.cache)
        for problem, row in zip(problems, rows, strict=True)
    ]
    for contest, row in zip(contests, rows, strict=True):
        contender = row.case.contender
        if row.status is Status.OK and contender.baseline:
            baselines.setdefault(contest, row)
        if row.status is Status.OK and not contender.twin:
            originals.setdefault((contest, _recipe(contender)), row)
    return [
        (baselines.get(contest), _original(originals, contest, row.case.contender))
        for contest, row in zip(contests, rows, strict=True)
    ]


def logs_over(row: Row, base: Row) -> Floats:
    """Return log(time of base / time of row) of each block that both have."""
    blocks = (by_block(each.samples_us, each.samples_per_block) for each in (base, row))
    return block_logs(*blocks)


def blocks_us(row: Row) -> Floats:
    """Return the median time of each block, µs."""
    medians: Floats = np.median(by_block(row.samples_us, row.samples_per_block), axis=-1)
    return medians


def between(ours: Blocks, over: Blocks) -> Ratio | None:
    """Return how many times as fast `ours` is as `over`, two cases of the same contests.

    It is the definition of a speed-up, with `over` in the place of the baseline. None if they
    share no contest.
    """
    logs = logs_between(ours, over)
    return ratio(list(logs.values())) if logs else None


def logs_between(ours: Blocks, over: Blocks) -> dict[tuple[int, int], Floats]:
    """Return log(time of `over` / time of `ours`) by block, of each contest that they share."""
    shared = [contest for contest in ours if contest in over]
    return {each: block_logs(over[each][:, None], ours[each][:, None]) for each in shared}


def _original(
    originals: dict[Hashable, Row], contest: Hashable, contender: Contender
) -> Row | None:
    return originals.get((contest, _recipe(contender))) if contender.twin else None


def _recipe(contender: Contender) -> Hashable:
    """Return what the two halves of an A/A pair have in common."""
    given = contender.params, contender.options
    return contender.format, contender.kernel, *(str(sorted(g.items())) for g in given)
