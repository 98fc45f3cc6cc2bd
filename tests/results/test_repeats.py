"""The variation between cards: its estimate, its place in intervals, how often a card agrees."""

import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from sparsebench.errors import ResultError
from sparsebench.results.comparison.repeats import repeats, variation
from sparsebench.results.record import Case, Contender, Problem, Row, Status
from sparsebench.results.statistics import between_cards
from sparsebench.results.statistics.between_cards import SCHEMA, State, packaged_variation
from sparsebench.results.statistics.outcome import Outcome
from sparsebench.results.statistics.ratio import hodges_lehmann, ratio, widen
from sparsebench.results.tables.cases import summary
from sparsebench.results.tables.frame import frame
from sparsebench.results.tables.noise import Noise
from tests.simulated.two_cards import World, agreement, campaign
from tests.tools.paths import PUBLISHED

H200 = PUBLISHED / "nvidia-h200"
FIELDS = {"m": 64, "n": 64, "k": 64, "dtype": "bf16", "pattern": "blocks", "sparsity": 0.9}
PROBLEM = Problem("linear", {**FIELDS, "block": 16})
DENSE, BSR = Contender("dense", "cublas", baseline=True), Contender("bsr", "bsr_triton")


def rows(
    gains: Sequence[float], cards: Sequence[str], capped_us: float = 0.0, seconds: float = 1.0
) -> list[Row]:
    """Return rows of a contest in a process for each gain and card."""
    telemetry = {"seconds": seconds, "power_capped_us": capped_us, "thermal_us": 0.0}
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


def line(*args: object, inherited: bool = False, **more: float) -> "pd.Series[object]":
    return summary(frame(rows(*args, **more)), None, inherited).iloc[1]  # type: ignore[arg-type]


GAINS = [1.1, 1.101, 1.102, 1.103, 1.104, 1.105, 1.106, 1.107]


@pytest.mark.parametrize(
    ("capped_us", "inherited", "state"),
    [(0.0, False, State.FREE), (3e5, False, State.LIMITED), (3e5, True, State.INHERITED)],
)
def test_an_interval_includes_the_variation_between_cards(capped_us, inherited, state) -> None:
    case = line(GAINS, ["GPU-1"] * 8, capped_us=capped_us, inherited=inherited)
    alone = hodges_lehmann(np.log(GAINS))
    half = packaged_variation()[state].half()
    assert case["between"] == pytest.approx(half)
    assert case["limited"] == pytest.approx(capped_us / 1e6)
    ends = widen(alone.estimate, alone.low, alone.high, half)
    assert np.log([case["speedup_low"], case["speedup_high"]]) == pytest.approx(ends)
    assert case["t_low"] > case["speedup_low"]
    assert str(case["interval"]).endswith("between runs")


def test_several_cards_divide_the_variation_and_add_what_they_measured() -> None:
    cards = ["GPU-1", "GPU-2"] * 4
    equal, apart = line(GAINS, cards), line([1.1, 1.2] * 4, cards)
    one = packaged_variation()[State.FREE]
    assert equal["on_cards"] == 2
    assert equal["between"] < one.half() / np.sqrt(2)  # they measured no difference
    assert apart["between"] > one.half()
    pooled = one.pooled_with(np.log([1.1, 1.2] * 4).tolist(), cards)
    assert pooled.freedom == one.freedom + 1
    assert pooled.sd > one.sd


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


def test_the_variation_is_estimated_again() -> None:
    world, draw = World("", card=0.01, process=0.003), np.random.default_rng(1)
    actual = variation(repeats(campaign(world, draw)))
    assert actual[State.FREE].sd == pytest.approx(0.01, rel=0.5)
    assert actual[State.FREE].pairs == 8


@pytest.mark.parametrize("card", [0.0, 0.005])
def test_intervals_with_the_variation_cover_a_second_card(card: float) -> None:
    shares = agreement(World("", card=card), 3, np.random.default_rng(2))
    assert shares["covers_cards"] >= 0.93
    assert (shares["covers"] < 0.85) == bool(card)


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
    (line,) = re.findall(r"\| all \| all \| both searched \| (.*) \|", page)
    cases, *_, covers = (int(cell.split()[0]) for cell in line.split(" | "))
    assert covers >= 0.93 * cases


def test_only_runs_with_the_same_libraries_on_different_cards_repeat_a_case() -> None:
    a, b = campaign(World(""), np.random.default_rng(3))[:2]
    assert len(repeats([a, b])) == len(a.cases)
    assert repeats([a, replace(b, ran=["other"])]).empty
    same = [dict(case) | {"cards": a.cases[0]["cards"]} for case in b.cases]
    assert repeats([a, replace(b, cases=same)]).empty
    inherited = [dict(case) | {"state": "inherited"} for case in a.cases]
    assert repeats([replace(a, cases=inherited), b]).empty  # only a second run may inherit


@pytest.mark.parametrize("text", ["{}", '{"schema": "other"}', "[", f'{{"schema": "{SCHEMA}"}}'])
def test_an_unusable_file_is_one_clear_line(text, tmp_path, monkeypatch) -> None:
    (tmp_path / between_cards.FILE).write_text(text)
    monkeypatch.setattr(between_cards, "files", lambda package: tmp_path)
    packaged_variation.cache_clear()
    with pytest.raises(ResultError, match="between-cards@1"):
        packaged_variation()
    monkeypatch.undo()
    assert packaged_variation()[State.FREE].sd > 0


def test_a_look_is_not_widened() -> None:
    case = line(GAINS[:3], ["GPU-1"] * 3)
    assert (case["between"], case["speedup_low"]) == (0.0, pytest.approx(1.1))
