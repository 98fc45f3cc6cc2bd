"""Doubts about tuning in synthetic rows; test_published.py looks for them in every bundle."""

from dataclasses import replace
from typing import Any

import pytest

from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables import tuning_doubts
from sparsebench.results.tables.frame import frame
from tests.tools.paths import PUBLISHED

PROBLEM = Problem("linear", {"m": 64, "n": 512, "k": 512, "dtype": "bf16"})
H200 = PUBLISHED / "nvidia-h200"


def row(us: float, kernel: str = "torch_bsr", **changed: Any) -> Row:
    contender = Contender("bsr", kernel, options=changed.pop("options", {}))
    return replace(Row(Case(PROBLEM, contender), Status.OK, samples_us=(us,)), **changed)


def doubts(*rows: Row) -> list[str]:
    return tuning_doubts.doubts(frame(rows))


@pytest.mark.parametrize(
    ("tuned", "default"),
    [
        ({"tuned": True}, {"tuned": False}),
        ({"tuned": True}, {}),
        ({}, {"tuned": False}),
        ({"search": True, "way": "best"}, {"search": False, "way": "best"}),
    ],
)
def test_a_tuned_contender_that_is_slower_than_its_default_is_found(tuned, default) -> None:
    slow = row(20.0, options=tuned), row(18.0, options=default)
    (doubt,) = doubts(*slow)
    assert "expected at most 18.0 µs, as bsr/torch_bsr" in doubt
    assert doubt.endswith("found 20.0 µs")
    assert not doubts(row(18.5, options=tuned), row(18.0, options=default))


def test_contenders_of_other_kernels_or_options_are_not_each_others_defaults() -> None:
    assert not doubts(row(20.0, options={"tuned": True}), row(18.0, "bsr_triton"))
    ways = {"tuned": True, "way": "a"}, {"tuned": False, "way": "b"}
    assert not doubts(*(row(us, options=way) for us, way in zip((20.0, 18.0), ways, strict=True)))


def test_the_times_of_a_search_are_no_judge() -> None:
    lines = {"choice": {}, "median_us": 10.0}, {"choice": {"warps": 4}, "median_us": 9.0}
    assert not doubts(row(12.0, candidates=lines))
