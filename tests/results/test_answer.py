"""results/answer.py: who wins, from which sparsity on, by how much, in sentences."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.results.answer import (
    answers,
    break_evens,
    evidence,
    other_dtypes,
    sentences,
    variants,
    where,
)
from sparsebench.results.badges import Badge, badges
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.run import store
from sparsebench.results.run.store import Run
from sparsebench.results.tables.analysis import Analysis, analyse
from sparsebench.results.tables.contests import View
from tests.tools.paths import PUBLISHED

DENSE = Contender("dense", "cublas", baseline=True)
OURS, PEER = Contender("bsr", "bsr_wgmma"), Contender("bsr", "torch_bsr")
WOBBLE = [0.001, -0.001, 0.002, -0.002, 0.003, -0.003, 0.004, -0.004]  # of the log, by process
PLACE: dict[str, Any] = {"m": 16, "n": 4096, "k": 4096, "dtype": "bf16", "pattern": "blocks"}


def rows(processes: int, us: list[tuple[Contender, float]], **fields: Any) -> list[Row]:
    problem = Problem("linear", PLACE | {"sparsity": 0.9, "block": 64} | fields)
    return [
        Row(Case(problem, contender), Status.OK, p, samples_us=(time * np.exp(effect),))
        for p, d in enumerate(WOBBLE[:processes])
        for contender, time in us
        for effect in [0.0 if contender == DENSE else d]
    ]


def analysed(measured_rows: list[Row]) -> Analysis:
    return analyse(Run(Path("one"), {}, "", {}, {"status": "finished"}, measured_rows))


def view(measured_rows: list[Row]) -> View:
    return analysed(measured_rows).views[0]


def swept(ratios: dict[float, float], processes: int = 8, **fields: Any) -> list[Row]:
    """Return a run in which ours is so many times as fast as dense at each level."""
    return [
        row
        for level, ratio in ratios.items()
        for row in rows(
            processes, [(DENSE, 100.0), (OURS, 100.0 / ratio)], sparsity=level, **fields
        )
    ]


def test_the_winner_stands_with_its_interval_time_and_best_peer() -> None:
    measured_rows = swept({0.5: 0.8}) + rows(8, [(DENSE, 100.0), (OURS, 20.0), (PEER, 50.0)])
    text = sentences(view(measured_rows))
    assert text[1].startswith("At 50 %: dense (cublas, 100 µs) wins")
    assert "0.800× [0.798, 0.802]" in text[1]
    assert text[2].startswith(
        "At 90 %: BSR with 64 × 64 blocks, bsr_wgmma, 5.00× [4.99, 5.02], 20.0 µs"
    )
    assert text[2].endswith("torch_bsr, 2.000× [1.994, 2.006].")
    assert where(view(measured_rows)).endswith("64 × 64 blocks · against dense (cublas, 100 µs)")


@pytest.mark.parametrize(
    ("ratios", "slower", "faster", "sentence"),
    [
        ({0.5: 0.7, 0.75: 1.4}, 0.5, 0.75, "dense above some point between 50 % and 75 %"),
        ({0.5: 0.5, 0.75: 1.0001, 0.875: 2.0}, 0.5, 0.75, "not settled"),
        ({0.5: 0.9995, 0.75: 1.5}, 0.5, 0.75, "not settled"),
        ({0.5: 1.5, 0.75: 0.8, 0.875: 2.0, 0.9: 3.0}, 0.75, 0.875, "between 75 % and 87.5 %"),
        ({0.5: 1.5, 0.75: 2.0}, np.nan, 0.5, "BSR beats dense at 50 % sparsity and above."),
        ({0.5: 1.0001, 0.75: 2.0}, np.nan, 0.5, "at 75 % sparsity and above (at 50 % it is not"),
        ({0.5: 1.5, 0.75: 0.8}, 0.75, np.nan, ""),
        ({0.9: 4.0}, np.nan, 0.9, "BSR beats dense at 90 % sparsity."),
    ],
)
def test_a_break_even_is_the_last_slower_level_and_the_next(ratios, slower, faster, sentence):
    answer = view(swept(ratios))
    (even,) = break_evens(answer)
    assert (even.slower, even.faster) == pytest.approx((slower, faster), nan_ok=True)
    assert sentence in sentences(answer)[0]


def test_the_better_of_two_variants_is_said_to_be_one() -> None:
    few, many = (Contender("bsr", "bsr_wgmma", options={"slots": n}) for n in (88, 176))
    analysis = analysed(rows(8, [(DENSE, 100.0), (few, 20.0), (many, 25.0), (PEER, 50.0)]))
    (first,) = analysis.views
    assert variants(first, analysis.cases) == "bsr_wgmma: the faster of slots=88 and slots=176"
    alone = analysed(rows(8, [(DENSE, 100.0), (few, 20.0), (PEER, 50.0)]))
    assert variants(alone.views[0], alone.cases) == ""


def test_nothing_that_beats_dense_is_the_sentence() -> None:
    (sentence,) = sentences(view(swept({0.5: 0.5, 0.9: 0.8})))
    assert sentence.startswith(
        "Nothing beats dense (cublas) at any measured point. The nearest is BSR"
    )
    assert "0.800×" in sentence


def test_rows_of_one_kind_are_said_together() -> None:
    answers = [
        row
        for block, gain in ((16, 0.5), (32, 1.2), (64, 1.4))
        for row in swept({0.5: gain, 0.9: 4 * gain}, block=block)
    ]
    assert sentences(view(answers))[0] == (
        "BSR beats dense with 16 × 16 blocks above some point between 50 % and 90 % sparsity; "
        "with 32 × 32 and 64 × 64 blocks at 50 % sparsity and above."
    )


def test_gains_are_over_the_fastest_dense_contender_and_no_win_of_a_portfolio_s_dense_choice():
    portfolio = Contender("cvse", "ffn_sparse", options={"way": "best"})
    compiled = Contender("dense", "torch_compile")
    answersred_rows = rows(8, [(DENSE, 100.0), (compiled, 80.0), (portfolio, 79.0), (OURS, 40.0)])
    answersred_rows = [
        replace(row, choice={"chosen": "dense, ffn_dense_triton"})
        if row.case.contender == portfolio
        else row
        for row in answersred_rows
    ]
    cells = view(answersred_rows).cells
    assert cells.best_kernel.tolist() == ["bsr_wgmma"]
    assert cells.dense_name.tolist() == ["ffn_dense_triton"]
    assert cells.best_gain.iloc[0] == pytest.approx(79 / 40, rel=0.01)


def test_m_is_chosen_or_along_the_rows() -> None:
    answers = [
        row
        for m in (16, 64, 4096)
        for block in (32, 64)
        for row in swept({0.5: 0.7, 0.9: 3.0}, m=m, block=block)
    ]
    ways = analysed(answers).views
    assert (ways[0].x, ways[0].y) == ("level", "m")
    chosen = {tuple(way.choice.items()) for way in ways}
    assert (("m", "16"), ("block", "all")) in chosen
    assert (("m", "all"), ("block", "any")) in chosen
    assert (("m", "all"), ("block", "32")) in chosen


def test_contests_that_are_beside_no_others_have_a_view_of_their_own() -> None:
    places: list[dict[str, Any]] = [
        {"m": 1, "n": 64}, {"m": 16, "n": 64}, {"m": 32, "n": 128}, {"m": 4096, "n": 256},
    ]  # fmt: skip
    ways = analysed([row for place in places for row in swept({0.5: 0.7, 0.9: 3.0}, **place)]).views
    seen = {(int(line.m), int(line.n)) for way in ways for _, line in way.cells.iterrows()}
    assert seen == {(place["m"], place["n"]) for place in places}
    alone = {"m": "32", "shape": "128 × 4096"}
    assert [(way.y, len(way.cells)) for way in ways if way.choice == alone] == [("", 2)]
    assert {way.choice["m"] for way in ways if way.choice["shape"] == "64 × 4096"} == {"all"}


@pytest.mark.parametrize("name", ["announced", "blocks"])
def test_every_problem_of_a_run_is_in_a_view(name: str) -> None:
    analysis = analyse(store.read(PUBLISHED / "nvidia-h200" / name))
    sparse = analysis.timed[analysis.timed.side != "dense"]
    shown = {case for way in analysis.views for case in way.cells.problem_id}
    assert shown == {*sparse.problem_id}


def test_each_dtype_has_its_own_answer_and_bf16_comes_first() -> None:
    single = swept({0.5: 1.2, 0.8: 1.6, 0.9: 2.0}, dtype="fp32")
    ways = analysed(single + swept({0.5: 0.5, 0.9: 0.8})).views
    (_, half), (_, full) = answers(ways)
    assert half[0].startswith("bf16: Nothing beats dense (cublas)")
    assert full[0].startswith("fp32: BSR beats dense at 50 % sparsity and above.")
    assert evidence(ways[0])[0].startswith("Dense wins, best sparse 0.800×")
    assert evidence(ways[0])[1].startswith("in bf16, at 90 %: BSR")
    (other,) = other_dtypes(ways)
    assert other.startswith("In fp32: 2.000× [1.994, 2.006] at 90 %: BSR")
    assert not other_dtypes(analysed(single).views)


@pytest.mark.parametrize(
    ("sparsity", "name"), [(0.5, "2:4"), (0.25, "Half 2:4"), (0.375, "Partly 2:4")]
)
def test_two_four_beside_dense_weights_is_not_called_two_four(sparsity: float, name: str) -> None:
    half = {"pattern": "spense_hidden", "sparsity": sparsity, "block": 1}
    times = [(DENSE, 100.0), (Contender("spense", "spense_wgmma"), 50.0)]
    by_m = [row for m in (1, 16) for row in rows(8, times, m=m, **half)]
    first, *examples = sentences(view(by_m))
    assert first == f"{name} beats dense at every m."
    assert all(f": {name[0].lower()}{name[1:]}, spense_wgmma" in each for each in examples)


@pytest.mark.parametrize(
    ("spread", "word", "said"),
    [
        (1.0, "Equal", "the best sparse contender is equal to dense"),
        (20.0, "Not settled", "it is not settled whether a sparse contender beats dense"),
    ],
)
def test_a_gain_within_the_noise_is_no_win(spread: float, word: str, said: str) -> None:
    """A view without levels says so of a row, beside a row that wins and one that loses."""
    half = {"pattern": "spense_hidden", "sparsity": 0.25, "block": 1}
    measured = [
        row
        for n, near in ((1024, 1.0005), (2048, 2.0), (4096, 0.5))
        for m in (1, 16)
        for row in rows(
            8, [(DENSE, 100.0), (Contender("spense", "mine"), 100.0 / near)], m=m, n=n, **half
        )
    ]
    measured = [
        replace(row, samples_us=(row.samples_us[0] * np.exp((spread - 1) * WOBBLE[row.replicate]),))
        if row.case.contender != DENSE
        else row
        for row in measured
    ]
    first = sentences(view(measured))
    assert first[0] == "Half 2:4 beats dense at n × k = 2048 × 4096 at every m."
    assert f"At n × k = 1024 × 4096, at every m {said}." in first
    assert "At n × k = 4096 × 4096 no sparse contender beats dense." in first
    near = [row for row in measured if row.case.problem.fields["n"] == 1024]
    assert evidence(view(near))[0].startswith(f"{word}, best sparse 1.00")
    assert where(view(near)).count("25 % sparsity") == 1


def test_badges_say_what_a_run_can_say() -> None:
    for processes, badge in ((8, Badge.VERDICT), (3, Badge.LOOK)):
        analysis = analysed(rows(processes, [(DENSE, 100.0), (OURS, 50.0)]))
        assert [label.badge for label in badges(analysis)] == [badge]
    none = analysed([])
    assert [label.badge for label in badges(none)] == [Badge.EMPTY]
    assert none.views == []


def test_a_run_without_dense_times_or_sparse_ones_says_so() -> None:
    only = view(rows(8, [(DENSE, 100.0)]))
    assert sentences(only)[0].startswith("No sparse contender has a time here")
    alone = view(rows(8, [(OURS, 100.0)]))
    assert sentences(alone)[0].startswith("No dense contender has a time here")
    assert isinstance(only.cells, pd.DataFrame)


def test_units_that_are_off_have_their_fraction_in_every_sentence() -> None:
    views = analyse(store.read(PUBLISHED / "nvidia-h200" / "ffn-step")).views
    said = [line for _, lines in answers(views) for line in lines if "of units off" in line]
    assert said
    assert all(line.count("% of units off") == line.count("of units off") for line in said)
