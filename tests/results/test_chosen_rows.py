"""A report of claims reads the rows of its problems, and the A/A pairs of the run, alone."""

from sparsebench.results.run import store
from sparsebench.results.tables.analysis import analyse
from tests.tools.paths import PUBLISHED

RUN = PUBLISHED / "nvidia-h200/core"


def test_rows_of_other_problems_are_left_out_and_the_noise_stays() -> None:
    whole = store.read(RUN)
    wanted = whole.rows[0].case.problem.id
    part = store.read(RUN, lambda problem: problem.id == wanted)
    assert [row for row in whole.rows if row.case.problem.id == wanted] == [
        row for row in part.rows if row.case.problem.id == wanted
    ]
    assert len(part.rows) < len(whole.rows)
    assert part.reference == whole.reference
    assert analyse(part).noise.reliability == analyse(whole).noise.reliability


def test_a_run_without_a_needed_problem_has_no_rows() -> None:
    part = store.read(RUN, lambda problem: False)
    assert (part.rows, part.reference) == ([], [])
