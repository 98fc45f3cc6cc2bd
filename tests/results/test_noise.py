"""results/tables/noise.py and cases.py: what A/A pairs say, and what follows for every case."""

from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.tables.analysis import analyse
from sparsebench.results.tables.frame import frame
from sparsebench.results.tables.noise import Noise, classes, floors, pairs
from tests.results.made_up import DENSE as A
from tests.results.made_up import TWIN as A_TWIN
from tests.results.made_up import WOBBLE, stored

B = Contender("bsr", "bsr_triton", {"block": 16})
B_TWIN = replace(B, twin=True)


def contest(*us: tuple[Contender, Any], m: int = 64, **changes: Any) -> list[Row]:
    """Return the rows of a problem: contenders with a time for all eight processes, or for each."""
    problem = Problem("linear", {"m": m, "n": 64, "k": 64, "dtype": "bf16", "sparsity": 0.9})
    facts = {"bound_by": "memory", "dense_bytes": 8192 if changes.get("reference") else 10**7}
    return [
        Row(Case(problem, c), Status.OK, p, samples_us=(t,), **(facts | changes))
        for c, times in us
        for p, t in enumerate(np.broadcast_to(times, 8).tolist())
    ]


def noisy(us: float, scale: float = 1.0) -> list[float]:
    return [us * float(np.exp(scale * d)) for d in WOBBLE]


PAIR = contest((A, 100.0), (A_TWIN, noisy(100.0)), m=1, reference=True)


def test_a_twin_is_held_against_its_own_original_in_its_own_contest() -> None:
    table = frame(contest((A, 100.0), (B, 50.0), (B_TWIN, noisy(50.0)), (A_TWIN, 100.0)))
    logs = table[table.label == "bsr/bsr_triton (twin)"].aa_log
    assert list(logs) == pytest.approx([-d for d in WOBBLE])
    assert (table[table.label == "dense/cublas (twin)"].aa_log == 0).all()
    assert table[~table.twin].aa_log.isna().all()


def test_a_pair_of_eight_processes_has_an_interval() -> None:
    apart = contest((A, 100.0), (B, 50.0), (B_TWIN, noisy(49.0)))
    twins = pairs(frame(apart), frame(PAIR))
    assert list(twins.label) == ["bsr/bsr_triton (twin)", "dense/cublas (twin)"]
    assert list(twins.different) == [True, False]
    assert twins.problem[1] == "linear m=1 n=64 k=64 dtype=bf16 sparsity=0.9"
    assert twins.ratio[0] == pytest.approx(50 / 49)
    assert twins.low[1] < 1 < twins.high[1]


def test_the_length_of_a_call_is_its_class() -> None:
    times = 7.9, 8.0, 19.9, 20.0, 99.9, 100.0
    rows = [row for us in times for row in contest((A, us))] + contest((A, 19.0), scope="op")
    names = ["below 8 µs", "8 to 20 µs", "8 to 20 µs", "20 to 100 µs", "20 to 100 µs"]
    assert list(classes(frame(rows)))[::8] == [*names, "above 100 µs", "op"]


def test_the_floor_is_the_95th_percentile_of_single_processes() -> None:
    twins = pairs(frame(contest((A, 100.0), (A_TWIN, noisy(100.0, scale=10)))))
    expected = np.expm1(np.quantile(np.abs(WOBBLE), 0.95) * 10)
    assert floors(twins) == {"above 100 µs": pytest.approx(expected)}


def test_few_pairs_do_not_lower_a_floor_below_what_many_had() -> None:
    short = contest((A, 10.0), (A_TWIN, noisy(10.0)))
    assert floors(pairs(frame(short))) == {"8 to 20 µs": 0.038}
    many = [r for m in range(3) for r in contest((A, 10.0), (A_TWIN, noisy(10.0)), m=m + 1)]
    assert floors(pairs(frame(many))) == {"8 to 20 µs": 0.005}  # 24 of them; never less


def test_a_class_without_a_pair_takes_the_largest_floor() -> None:
    rows = contest((A, 10.0), (A_TWIN, noisy(10.0, scale=10)))
    noise = analyse(stored(rows, reference=PAIR)).noise
    assert list(noise.floors) == ["8 to 20 µs", "above 100 µs"]
    other = frame(contest((A, 50.0)))
    assert set(noise.floor(other)) == {noise.floors["8 to 20 µs"]}
    assert "4.1 % (8 to 20 µs), 0.5 % (above 100 µs)." in noise.sentence


def test_the_floor_of_what_is_no_kernel_time_says_what_was_timed() -> None:
    cold = Noise(pd.DataFrame(), {"above 100 µs": 0.01, "cold": 0.56})
    assert "1 % (above 100 µs), 56 % (first token after the start)." in cold.sentence


def test_a_speed_up_is_as_uncertain_as_its_interval_and_at_least_as_equal_kernels_are() -> None:
    rows = contest((A, 100.0), (B, noisy(50.0, scale=10)), m=2) + contest((A, 100.0), (B, 50.0))
    wide, narrow = analyse(stored(rows, reference=PAIR)).cases.iloc[[1, 3]].itertuples()
    ends = wide.speedup_high - wide.speedup, wide.speedup - wide.speedup_low
    assert wide.uncertainty == pytest.approx(max(ends))
    assert narrow.uncertainty == pytest.approx(2 * 0.013 / np.sqrt(8))  # 50 µs


def test_a_run_without_a_pair_has_no_floor_and_its_outcomes_say_so() -> None:
    cases = analyse(stored(contest((A, 100.0), (B, 50.0)))).cases
    assert list(cases.outcome) == ["", ""]
    assert cases.floor.isna().all()
    assert "has no A/A pair" in analyse(stored([])).noise.sentence


@pytest.mark.parametrize(
    ("different", "of", "word"), [(0, 3, "reliable"), (1, 3, "reliable"), (2, 3, "unreliable")]
)
def test_too_many_different_pairs_make_a_run_unreliable(different: int, of: int, word: str) -> None:
    rows = []
    for number in range(of):
        shifted = 99.0 if number < different else 100.0
        rows += contest((A, 100.0), (A_TWIN, noisy(shifted)), m=number + 1)
    reliability, reason = analyse(stored(rows)).noise.reliability
    assert reliability == word
    assert f"{different} of {of}" in reason


def test_a_reliable_run_with_many_different_pairs_says_how_often_chance_does_that() -> None:
    rows = [
        row
        for number, time in enumerate([99.0, 99.0, *[100.0] * 6])
        for row in contest((A, 100.0), (A_TWIN, noisy(time)), m=number + 1)
    ]
    reliability, reason = analyse(stored(rows)).noise.reliability
    assert reliability == "reliable"
    assert "5.7 % of runs" in reason  # 1 - 0.95^8 - 8 x 0.05 x 0.95^7


def test_every_outcome_comes_out_of_a_run() -> None:
    rows = contest((A, 100.0), (B, noisy(50.0)), m=1) + contest((A, 100.0), (B, noisy(200.0)), m=2)
    rows += contest((A, 100.0), (B, noisy(100.0)), m=3)
    rows += contest((A, 100.0), (B, noisy(99.4, scale=4)), m=4)
    cases = analyse(stored(rows, reference=PAIR)).cases
    of_bsr = cases[cases.label == "bsr/bsr_triton"]
    assert list(of_bsr.outcome) == ["faster", "slower", "equal", "not settled"]
    assert list(of_bsr.interval.unique()) == ["95 % interval over 8 processes"]
    assert of_bsr.speedup.iloc[0] == pytest.approx(2)
    assert (of_bsr.t_low < of_bsr.speedup).all()
    assert of_bsr.more_processes.notna().tolist() == [False, False, False, True]
    assert (cases[cases.baseline].outcome == "").all()


def test_one_lucky_case_among_many_is_not_called_faster() -> None:
    lucky = [0.012 - d for d in (0.016, 0.002, -0.004, 0.008, 0.011, 0.003, -0.006, 0.0)]
    rows = contest((A, 100.0), (B, [100 * float(np.exp(-d)) for d in lucky]), m=1)
    alone = analyse(stored(rows, reference=PAIR)).cases
    assert alone.outcome[1] == "faster"
    assert 0.0005 < alone.q[1] <= 0.05
    for m in range(2, 52):
        rows += contest((A, 100.0), (B, noisy(100.0)), m=m)
    among = analyse(stored(rows, reference=PAIR)).cases
    assert among.q[1] > 0.05
    assert among.outcome[1] == "not settled"


def test_five_processes_are_a_look_without_an_outcome_and_of_unknown_reliability() -> None:
    five = [row for row in [*contest((A, 100.0), (B, 50.0)), *PAIR] if row.replicate < 5]
    pair = [r for r in five if r.reference]
    analysis = analyse(stored([r for r in five if not r.reference], reference=pair))
    line = analysis.cases.iloc[1]
    assert (line.outcome, line.interval) == ("", "range over 5 processes")
    assert np.isnan(line.q)
    assert analysis.noise.reliability[0] == "unknown"


def test_a_pair_that_is_apart_by_rounding_is_not_different() -> None:
    below = [50.0 * (1 + 1e-15 + max(d, 0.0)) for d in WOBBLE]
    apart = contest((A, 100.0), (B, 50.0), (B_TWIN, below), (A_TWIN, 100.0))
    assert not pairs(frame(apart)).different.any()


def test_twins_and_reference_rows_have_no_outcome() -> None:
    rows = contest((A, 100.0), (B, 50.0), (B_TWIN, 49.0), (A_TWIN, 1.0))
    cases = analyse(stored(rows, reference=PAIR)).cases
    assert len(cases) == 4
    assert (cases[cases.twin].outcome == "").all()
