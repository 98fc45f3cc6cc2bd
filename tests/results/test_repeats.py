"""The variation between cards: its estimate, its place in intervals, how often a card agrees."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import pytest

from sparsebench.errors import ResultError
from sparsebench.reports.grids import gain_text
from sparsebench.results.comparison.compare import outcomes, ratio_of_means
from sparsebench.results.comparison.repeats import (
    INSIDE,
    TESTS,
    Verdicts,
    repeats,
    strata,
    variation,
    with_tests,
)
from sparsebench.results.formatting import brackets, conditions
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.statistics import between_cards
from sparsebench.results.statistics.between_cards import (
    CLASSES,
    SCHEMA,
    BetweenCards,
    Variation,
    packaged_variation,
)
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.statistics.ratio import IntervalKind, hodges_lehmann, ratio, widen
from sparsebench.results.tables.cases import summary
from sparsebench.results.tables.contests import with_gains
from sparsebench.results.tables.frame import frame
from sparsebench.results.tables.noise import Noise
from tests.results.made_up import BSR, DENSE
from tests.simulated.two_cards import World, agreement, campaign
from tests.tools.paths import PUBLISHED

H200 = PUBLISHED / "nvidia-h200"
FIELDS = {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks", "sparsity": 0.9}
PROBLEM = Problem("linear", {**FIELDS, "block": 16})


def rows(gains: Sequence[float], cards: Sequence[str]) -> list[Row]:
    """Return rows of a contest in a process for each gain and card."""
    telemetry = {"seconds": 1.0, "power_capped_us": 0.0, "thermal_us": 0.0}
    return [
        Row(
            Case(PROBLEM, contender),
            Status.OK,
            process,
            device=card,
            samples_us=(us,) * 4,
            samples_per_block=2,
            telemetry=telemetry,
        )
        for process, (gain, card) in enumerate(zip(gains, cards, strict=True))
        for contender, us in ((DENSE, 100.0), (BSR, 100.0 / gain))
    ]


def line(gains: Sequence[float], cards: Sequence[str]) -> "pd.Series[Any]":
    return summary(frame(rows(gains, cards))).iloc[1]


GAINS = [1.1, 1.101, 1.102, 1.103, 1.104, 1.105, 1.106, 1.107]


def test_an_interval_includes_the_variation_between_cards() -> None:
    case = line(GAINS, ["GPU-1"] * 8)
    alone = hodges_lehmann(np.log(GAINS))
    half = packaged_variation().of("bsr_triton", 90.0).half()
    assert case["between"] == pytest.approx(half)
    ends = widen(alone.estimate, alone.low, alone.high, half)
    assert np.log([case["speedup_low"], case["speedup_high"]]) == pytest.approx(ends)
    assert case["t_low"] > case["speedup_low"]
    assert str(case["interval"]).endswith("between runs")


def test_the_limited_processes_are_counted_and_the_share_is_kept() -> None:
    table = rows(GAINS, ["GPU-1"] * 8)
    slow = {"seconds": 1.0, "power_capped_us": 2.1e5, "thermal_us": 0.0}
    table[5] = replace(table[5], telemetry=slow)
    case = summary(frame(table)).iloc[1]
    assert (case["limited_processes"], case["limited"]) == (1, 0.0)
    assert conditions(case) == "one card, limited by power or heat in 1 of 8 processes"
    assert conditions(line(GAINS, ["GPU-1"] * 8)) == "one card, not limited by power or heat"
    unknown = [replace(row, telemetry={}) for row in table]
    assert conditions(summary(frame(unknown)).iloc[1]) == "one card"
    assert conditions(line(GAINS, ["cpu"] * 8)) == ""


def test_a_chain_has_an_interval_only_if_two_cards_measured_one_of_its_kernel() -> None:
    for kernel, cards, kind in (
        ("bsr_small", ["GPU-1"] * 8, IntervalKind.CONFIDENCE),
        ("bsr_triton", ["GPU-1", "GPU-2"] * 4, IntervalKind.CONFIDENCE),
        ("bsr_triton", ["GPU-1"] * 8, IntervalKind.NONE),
    ):
        case = Case(PROBLEM, Contender("bsr", kernel))
        chains = [
            replace(row, scope="chain", case=row.case if row.case.contender.baseline else case)
            for row in rows(GAINS, cards)
        ]
        table = summary(frame(chains), Noise(pd.DataFrame(), {"chain": 0.005}))
        assert table.iloc[1].interval_kind == kind
        assert (table.iloc[1].outcome == "") == (kind is IntervalKind.NONE)
        gain = gain_text(with_gains(table).iloc[1].to_dict())
        assert gain.endswith("× (measured on one card)") == (kind is IntervalKind.NONE)
        text = brackets([table.iloc[1].interval])
        assert ("none (measured on one card)" in text) == (kind is IntervalKind.NONE)


def test_several_cards_divide_the_variation_and_add_what_they_measured() -> None:
    cards = ["GPU-1", "GPU-2"] * 4
    equal, apart = line(GAINS, cards), line([1.1, 1.3] * 4, cards)
    one = packaged_variation().of("bsr_triton", 90.0)
    assert equal["on_cards"] == 2
    assert equal["between"] < one.half() / np.sqrt(2)  # they measured no difference
    assert apart["between"] > one.half()


def test_a_stratum_counts_by_its_freedom() -> None:
    usual, of_wgrad = Variation(0.01, 6.0, 9, 9), Variation(0.04, 2.0, 3, 3)
    classes = dict.fromkeys(CLASSES, usual) | {"below 12 µs": replace(usual, sd=0.02)}
    both = BetweenCards(classes, {"bsr_wgrad, 12 to 50 µs": of_wgrad}, [])
    for kernel, us, sd in (("bsr_wgrad", 50.0, 0.01), ("bsr_wgmma", 20.0, 0.01), ("x", 9.0, 0.02)):
        assert both.of(kernel, us).sd == pytest.approx(sd)
        assert both.of(kernel, us).freedom == 6
    assert both.of("bsr_wgrad", 12.0).freedom == 8
    assert both.of("bsr_wgrad", 12.0).sd == pytest.approx(np.sqrt((6 * 1e-4 + 2 * 16e-4) / 8))


def test_cards_can_unsettle_a_verdict_but_not_a_large_one() -> None:
    noise = Noise(pd.DataFrame(), {"above 100 µs": 0.005})
    for gain, outcome in ((1.006, Outcome.NOT_SETTLED), (1.2, Outcome.FASTER)):
        table = frame(rows([gain * (1 + 1e-4 * n) for n in range(8)], ["GPU-1"] * 8))
        assert summary(table, noise).iloc[1].outcome == outcome
        simulated = frame(rows([gain * (1 + 1e-4 * n) for n in range(8)], ["sim-0"] * 8))
        assert summary(simulated, noise).iloc[1].outcome != Outcome.NOT_SETTLED


def test_a_ratio_is_widened_by_squares_and_a_range_is_not() -> None:
    logs = [np.array([0.1 + 0.001 * n]) for n in range(8)]
    alone, cards = ratio(logs), ratio(logs, 0.03)
    assert cards.value == alone.value
    sides = np.log([alone.high / alone.value, cards.high / cards.value])
    assert sides[1] == pytest.approx(np.hypot(sides[0], 0.03))
    assert ratio(logs[:3], 0.03) == ratio(logs[:3])


def test_the_variation_is_estimated_again_by_kernel() -> None:
    world, draw = World("", card=0.01, process=0.003, wider=4.0), np.random.default_rng(1)
    actual = variation(repeats(campaign(world, draw)))
    assert actual.strata["bsr_triton, above 50 µs"].sd == pytest.approx(0.01, rel=0.5)
    assert actual.strata["bsr_wgrad, above 50 µs"].sd == pytest.approx(0.04, rel=0.5)
    assert {(each.cases, each.cards) for each in actual.classes.values()} == {(64, 16)}


def test_the_freedom_is_that_of_a_jackknife_over_cards() -> None:
    effects = {"A": 0.0, "B": 0.02, "C": -0.01, "D": 0.03}
    exact = [0.001, -0.001] * 3
    runs = [
        verdicts_of(card, [{"cards": [card], "speedups": np.exp(np.add(effect, exact)).tolist()}])
        for card, effect in effects.items()
    ]
    table = repeats(runs)
    left = [
        (group.excess.sum() / 2 / len(group))
        for card in effects
        for group in [table[(table.run_a != card) & (table.run_b != card)]]
    ]
    mean = table.excess.sum() / 2 / len(table)
    freedom = 2 * mean**2 / (3 / 4 * np.sum((left - np.mean(left)) ** 2))
    actual = variation(table).classes["above 50 µs"]
    assert (len(table), actual.cards) == (6, 4)
    assert actual.sd == pytest.approx(np.sqrt(mean), abs=1e-6)
    assert actual.freedom == pytest.approx(min(3, freedom), abs=1e-3)


def verdicts_of(name: str, cases: list[dict[str, object]]) -> Verdicts:
    """Return verdicts on the case of a campaign with other values."""
    (first, *_) = campaign(World(""), np.random.default_rng(3))
    return replace(first, run=name, started=name, cases=[{**first.cases[0], **c} for c in cases])


@pytest.mark.parametrize(("card", "wider"), [(0.0, 1.0), (0.005, 1.0), (0.005, 4.0)])
def test_intervals_with_the_variation_cover_a_second_card(card: float, wider: float) -> None:
    shares = agreement(World("", card=card, wider=wider), 3, np.random.default_rng(2))
    assert shares["covers_cards"] >= 0.93
    assert shares["inside"] >= INSIDE
    assert (shares["covers"] < 0.85) == bool(card)


def test_no_repeat_is_tested_with_what_its_own_cards_measured() -> None:
    table = repeats(campaign(World("", card=0.01, process=0.001), np.random.default_rng(5)))
    wild = table.assign(excess=table.excess.where(table.run_a != "0a", 1.0))
    first = table.run_a == "0a"
    assert with_tests(wild, published=True)[first].equals(wild[first].join(_tests(table)[first]))
    assert with_tests(wild, published=True)[~first].covers_cards.all()


def _tests(table: pd.DataFrame) -> pd.DataFrame:
    return with_tests(table, published=True)[TESTS]


def test_holms_correction_makes_a_stratum_with_few_inside_stand_out() -> None:
    table = repeats(campaign(World("", card=0.01), np.random.default_rng(5)))
    inside = np.arange(len(table)) >= 32
    table = table.assign(op=["linear_wgrad"] * 32 + ["linear"] * 32, inside=inside)
    by = strata(table.assign(covers=True, covers_cards=True)).set_index("stratum")
    assert list(by.index) == ["linear", "linear_wgrad", "above 50 µs"]
    assert by.p["linear_wgrad"] == pytest.approx(3 * 0.15**32)
    assert by.p["linear"] == 1


@pytest.mark.parametrize(
    ("first", "second", "repeated"), [([], [], 1), (["x", "y"], ["y"], 1), (["x"], ["y"], 0)]
)
def test_versions_of_the_code_repeat_a_case_if_its_kernel_is_the_same(
    first, second, repeated
) -> None:
    a, b = campaign(World(""), np.random.default_rng(3))[:2]
    ends = [
        replace(run, code=run.run, cases=[{**run.cases[0], "compiled": compiled}])
        for run, compiled in ((a, first), (b, second))
    ]
    assert len(repeats(ends)) == repeated


def test_published_intervals_hold_what_another_card_measures() -> None:
    page = (PUBLISHED / "README.md").read_text("utf-8")
    table = page.partition("| stratum |")[2].partition("\n\n")[0].splitlines()[2:]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table]
    cases, inside, _, covers = (int(cell.split()[0]) for cell in lines[0][1:5])
    assert inside >= INSIDE * cases
    assert covers >= 0.93 * cases
    assert {"linear_wgrad", "below 12 µs"} < {line[0] for line in lines[1:]}
    assert min(float(line[-1]) for line in lines[1:]) > 0.05


def test_only_runs_with_the_same_libraries_on_different_cards_repeat_a_case() -> None:
    a, b = campaign(World(""), np.random.default_rng(3))[:2]
    assert len(repeats([a, b])) == len(a.cases)
    assert repeats([a, replace(b, ran=["other"])]).empty
    same = [dict(case) | {"cards": a.cases[0]["cards"]} for case in b.cases]
    assert repeats([a, replace(b, cases=same)]).empty


@pytest.mark.parametrize("text", ["{}", '{"schema": "other"}', "[", f'{{"schema": "{SCHEMA}"}}'])
def test_an_unusable_file_is_one_clear_line(text, tmp_path, monkeypatch) -> None:
    (tmp_path / between_cards.FILE).write_text(text)
    monkeypatch.setattr(between_cards, "files", lambda package: tmp_path)
    packaged_variation.cache_clear()
    with pytest.raises(ResultError, match="between-cards@3"):
        packaged_variation()
    monkeypatch.undo()
    assert packaged_variation().classes["below 12 µs"].sd > 0


def test_two_chains_of_unknown_variation_are_not_settled() -> None:
    line = {"cards_a": ["GPU-1"], "cards_b": ["GPU-2"], "between_a": np.nan, "between_b": 0.02}
    value, low, high, p = ratio_of_means(np.log([1.0] * 6), np.log([1.5] * 6), line)
    assert (value, p) == (pytest.approx(1.5), 1.0)
    assert np.isnan([low, high]).all()
    tests = pd.DataFrame([(value, low, high, p)], columns=["ratio", "low", "high", "p"])
    assert outcomes(tests) == [Outcome.NOT_SETTLED]


def test_a_look_is_not_widened() -> None:
    case = line(GAINS[:3], ["GPU-1"] * 3)
    assert (case["between"], case["speedup_low"]) == (0.0, pytest.approx(1.1))
