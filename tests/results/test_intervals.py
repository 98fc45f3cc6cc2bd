"""What verdicts and looks promise, on simulated clocks; harness/NOTES.md has the whole tables."""

import numpy as np
import pytest

from sparsebench.results.statistics.outcome import DIFFERENT, Outcome
from tests.simulated.runs import (
    DESIGNS,
    LENGTHS_US,
    among_finalists,
    apart,
    covered,
    different,
    interval,
    outcomes,
    simulated,
)
from tests.tools.marks import exhaustive

RUNS = 1000
SLACK = 0.015  # two standard errors of 5 % of RUNS
BY_NAME = {design.name: design for design in DESIGNS}


def draw(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("process", [0.003, 0.01])
@pytest.mark.parametrize("processes", [8, exhaustive(6), exhaustive(20)])
def test_with_regret_the_interval_holds_another_runs_truth(process: float, processes: int) -> None:
    same = {"process": process, "regret": 0.01, "processes": processes}
    runs = simulated(RUNS, draw(1), groups=processes, **same)
    bounds = interval(runs.logs, BY_NAME["every process"], 0.01)
    assert covered(bounds, runs.another) >= 0.93
    assert different(bounds) <= 0.05 + SLACK


@pytest.mark.parametrize("process", [0.003, 0.01])
def test_searching_among_the_first_processs_finalists_keeps_that(process: float) -> None:
    runs = among_finalists(RUNS, draw(12), process=process, regret=0.01)
    bounds = interval(runs.logs, BY_NAME["every process"], 0.01)
    assert covered(bounds, runs.another) >= 0.93
    assert different(bounds) <= 0.05 + SLACK


def test_a_search_that_all_processes_share_is_outside_the_interval() -> None:
    runs = simulated(RUNS, draw(2), process=0.003, regret=0.01, groups=1)
    assert covered(interval(runs.logs, DESIGNS[0], 0.01), runs.another) < 0.2
    fixed = simulated(RUNS, draw(3), process=0.003, regret=0.01, groups=0)
    assert covered(interval(fixed.logs, DESIGNS[-1], 0.01), fixed.another) >= 0.93


@pytest.mark.parametrize("call_us", [4.5, 14.0, 200.0])
@pytest.mark.parametrize("process", [0.003, 0.01])
def test_equal_things_are_called_different_in_at_most_5_percent(call_us, process) -> None:
    verdicts = outcomes(simulated(RUNS, draw(4), process=process, call_us=call_us).logs)
    assert sum(verdicts[word] for word in DIFFERENT) <= 0.05 + SLACK


@pytest.mark.parametrize("call_us", [4.5, 14.0, 200.0])
@pytest.mark.parametrize("process", [0.001, 0.003])
def test_one_percent_is_found_in_90_percent(call_us: float, process: float) -> None:
    verdicts = outcomes(simulated(RUNS, draw(5), ratio=1.01, process=process, call_us=call_us).logs)
    assert verdicts[Outcome.FASTER] >= 0.9
    lost = outcomes(simulated(RUNS, draw(6), ratio=0.99, process=process, call_us=call_us).logs)
    assert lost[Outcome.SLOWER] >= 0.9


@pytest.mark.parametrize("process", [0.003, 0.01, exhaustive(0.02)])
@pytest.mark.parametrize("ratio", [1.01, 1.02, 1 / 1.01, exhaustive(1.03)])
def test_no_difference_is_wrong_in_at_most_5_percent(ratio: float, process: float) -> None:
    verdicts = outcomes(simulated(RUNS, draw(7), ratio=ratio, process=process).logs)
    assert verdicts[Outcome.EQUAL] <= 0.05


@pytest.mark.parametrize("length", LENGTHS_US)
@pytest.mark.parametrize("processes", [1, 3])
def test_looks_at_equal_things_disagree_in_at_most_5_percent(length: str, processes: int) -> None:
    assert apart(length, processes, 1.0, RUNS, draw(9)) <= 0.05
    assert apart(length, processes, 1.25, RUNS, draw(10)) >= 0.9
