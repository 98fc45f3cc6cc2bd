"""Who was not at their best: found in synthetic rows, and in the bundles that are published."""

from dataclasses import replace
from functools import cache
from typing import Any

import pandas as pd
import pytest
from places import PUBLISHED

from sparsebench.results import peers, store
from sparsebench.results.frame import frame
from sparsebench.results.record import Case, Contender, Problem, Row, Status

PROBLEM = Problem("linear", {"m": 64, "n": 512, "k": 512, "dtype": "bf16"})
H200 = PUBLISHED / "nvidia-h200"


def row(us: float, kernel: str = "torch_bsr", **changed: Any) -> Row:
    contender = Contender("bsr", kernel, options=changed.pop("options", {}))
    return replace(Row(Case(PROBLEM, contender), Status.OK, samples_us=(us,)), **changed)


def found(*rows: Row) -> list[str]:
    return [f"{doubt.expected}; {doubt.found}" for doubt in peers.doubts(frame(rows))]


@pytest.mark.parametrize(
    ("tuned", "default"),
    [
        ({"tuned": True}, {"tuned": False}),
        ({"tuned": True}, {}),
        ({}, {"tuned": False}),
        ({"search": True, "way": "best"}, {"search": False, "way": "best"}),
    ],
)
def test_a_tuned_contender_that_is_slower_than_its_default_is_found(
    tuned: dict[str, Any], default: dict[str, Any]
) -> None:
    slow = row(20.0, options=tuned), row(18.0, options=default)
    (doubt,) = found(*slow)
    assert doubt.startswith("at most 18.0 µs, as bsr/torch_bsr")
    assert doubt.endswith("; 20.0 µs")
    assert not found(row(18.5, options=tuned), row(18.0, options=default))


def test_contenders_of_other_kernels_or_options_are_not_each_others_defaults() -> None:
    assert not found(row(20.0, options={"tuned": True}), row(18.0, "bsr_triton"))
    ways = {"tuned": True, "way": "a"}, {"tuned": False, "way": "b"}
    assert not found(*(row(us, options=way) for us, way in zip((20.0, 18.0), ways, strict=True)))


def test_the_times_of_a_search_are_no_judge() -> None:
    lines = {"choice": {}, "median_us": 10.0}, {"choice": {"warps": 4}, "median_us": 9.0}
    assert not found(row(12.0, candidates=lines))


def test_a_case_that_took_another_time_in_another_run_is_found_at_the_slower_one() -> None:
    tables = {name: frame([row(us)]) for name, us in (("a", 165.0), ("b", 331.0), ("c", 166.0))}
    (finding,) = peers.apart(tables)
    assert (finding.run, finding.beside) == ("b", "a")
    assert str(finding).endswith("expected about 165.0 µs, as in a, found 331.0 µs")
    assert not peers.apart({name: tables[name] for name in "ac"})


@cache
def tables() -> dict[str, pd.DataFrame]:
    names = "sparsity-4096", "sparsity-64", "training", "untuned"
    return {name: frame(store.read(H200 / name).rows) for name in names}


def test_torch_bsr_tuned_is_slower_than_as_shipped_in_four_published_cells_at_64_tokens() -> None:
    doubts = peers.doubts(tables()["sparsity-64"], "sparsity-64")
    assert len(doubts) == 4
    assert all("bsr/torch_bsr tuned=True" in doubt.case for doubt in doubts)


def test_the_published_run_that_took_331_us_for_165_is_found() -> None:
    found = [finding for finding in peers.apart(tables()) if finding.found == "331.1 µs"]
    (finding,) = found
    assert finding.run == "sparsity-4096"
    assert "block=32 bsr/torch_bsr tuned=True" in finding.case
    assert finding.expected == "about 164.9 µs, as in untuned"


def test_a_run_is_told_of_those_beside_it_and_of_one_that_cannot_be_read() -> None:
    run = store.read(H200 / "untuned")
    said = list(peers.told(run, [H200 / "training", H200 / "nowhere"]))
    assert all(line.startswith("warning: ") for line in said)
    assert any("nowhere is not compared: " in line for line in said)
    assert any("as in training, found 111.4 µs" in line for line in said)
    assert H200 / "training" in peers.siblings(H200 / "untuned")
    assert H200 / "untuned" not in peers.siblings(H200 / "untuned")
