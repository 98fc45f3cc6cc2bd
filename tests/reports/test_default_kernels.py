"""What users get: cliffs in the number of tokens, and the names of the kernels of a layer."""

from typing import Any

import pytest

from sparsebench.reports.figures import remarks
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.families import by_default
from tests.reports.test_report import DENSE, run

FIELDS: dict[str, Any] = {"n": 512, "k": 512, "dtype": "bf16", "pattern": "blocks", "block": 64}
BSR = {"block": 64}
USERS = Contender("bsr", "default", BSR)


def rows(problem: Problem, *timed: tuple[Contender, float]) -> list[Row]:
    """Return the rows of eight processes; all times of a process drift alike."""
    choices = {"default": {"kernel": "bsr_small"}, "best_of": {"chosen": "dense, cublas"}}
    return [
        Row(
            Case(problem, contender),
            Status.OK,
            replicate=replicate,
            samples_us=(time * (1 + replicate / 100),) * 3,
            sparsity=0.9,
            choice=choices.get(contender.kernel, {}),
        )
        for replicate in range(8)
        for contender, time in timed
    ]


@pytest.mark.parametrize(("slow", "cases"), [(1.04, 0), (1.2, 1)])
def test_a_case_that_takes_longer_than_one_of_more_tokens_is_listed(slow, cases) -> None:
    table = []
    for m in range(1, 16):
        time = 100.0 + m if m != 7 else slow * 108.0
        problem = Problem("linear", {**FIELDS, "m": m, "sparsity": 0.9})
        table += rows(problem, (USERS, time), (DENSE, 150.0))
    text = str(remarks.draw(analyse(run(table))))
    assert f"{cases} of 28 cases" in text
    assert ("m 7" in text, "and m 8 takes" in text) == (bool(cases), bool(cases))


def test_a_layer_is_named_by_the_kernels_of_all_its_products() -> None:
    gate, up = {"kernel": "bsr_wgmma"}, {"kernel": "bsr_small"}
    assert by_default("bsr", {"wg": gate, "wu": up, "wd": gate}) == (
        "bsr_wgmma + bsr_small (by default)"
    )
    assert by_default("bsr", {}) == "BSR (by default)"
