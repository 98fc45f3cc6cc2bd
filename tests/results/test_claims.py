"""Claims as files and cells as numbers: refusals, and each verdict on each basis."""

import json
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import yaml

from sparsebench.errors import SuiteError
from sparsebench.results.claims.cells import (
    ClaimCell,
    covers,
    file_problems,
    over_op,
    value_text,
)
from sparsebench.results.claims.decision import Word, cell_state
from sparsebench.results.claims.metrics import METRICS
from sparsebench.results.claims.schema import Claim, parse
from sparsebench.results.claims.verdict import Basis, Verdict, basis_of, judge
from sparsebench.results.run.store import read
from tests.results.claim_examples import CLAIM, DEVICES, cell, claimed, spread
from tests.tools.paths import PUBLISHED


def verdict(claim: Claim, *cells: ClaimCell, of: int = 0) -> Verdict:
    """Judge cells; `of` problems were wanted, those of the cells by default."""
    problems = {each.problem for each in cells} | {f"other {i}" for i in range(of)}
    (outcome,) = judge("mine", claim, cells, {"over dense": problems})
    return outcome


def test_what_a_claim_says_is_read_and_given_back() -> None:
    claim = parse("mine.yaml", CLAIM).claim
    assert claim.tests[0].sentence == "speedup ≥ 2× in a cell"
    assert Claim.model_validate(claim.model_dump(by_alias=True)) == claim


WRONG = {  # the text to replace, its replacement, and a part of the error
    "no unit": ("    unit: x\n", "", "18: tests.0.unit: expected a value, found none"),
    "no threshold": ("    at_least: 2\n", "", "18: tests.0: expected a threshold"),
    "two thresholds": ("at_least: 2", "at_least: 2\n    at_most: 3", "at_most, not both"),
    "another unit": ("unit: x", 'unit: "%"', "18: tests.0: expected unit x of speedup, not %"),
    "no such metric": ("metric: speedup", "metric: joy", "21: tests.0.metric: expected 'speedup'"),
    "no such key": ("title: B", "tilte: B", "2: tilte: unknown key (did you mean title?)"),
    "a part of it": ("unit: x", "unit: x\n    partly_at: 1", "partly_at: unknown key"),
    "a field": ("ours: bf16}", "field: dtype}", "field: unknown key"),
    "named, no name": (", gpus: [H200]", "", "6: hardware: expected gpus"),
    "a long quote": ("as dense", "as dense" * 0 + "a " * 30, "at most 25 words, not 35"),
    "a proxy alone": (
        "unit: x",
        "unit: x\n    proxy: a kernel",
        "exactly if every",
    ),
    "missing, yet whole": (
        "title: B",
        "missing: a GPU\ntitle: B",
        "exactly if every",
    ),
    "no suite": ("measure:", "measured:", "measured: unknown key"),
    "a suite twice": ("measure:\n", "measure:\n  suite: quick\n", "and not both"),
    "no number": ("at_least: 2", "at_least: two", "22: tests.0.at_least: expected a valid number"),
    "no date": ('"2026"', '"soon"', "5: source.date: expected String should match pattern"),
    "over in one cell": ("unit: x", "unit: x\n    over: linear", "typical or for_all"),
    "files, and only": (
        CLAIM[CLAIM.index("measure:") : CLAIM.index("tests:")],
        "measure: {suite: dlmc, data: true, only: m=64}\n",
        "instead of only",
    ),
    "removed": ("title: B", "tables: []\ntitle: B", "tables: unknown key"),
    "a key twice": ("title: B", "title: A\ntitle: B", "expected each key once"),
    "no claim": (CLAIM, "[]", "1: expected a claim, found list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_incomplete_or_contradictory_claim_is_an_error_with_its_line(what: str) -> None:
    old, new, token = WRONG[what]
    assert old in CLAIM
    with pytest.raises(SuiteError) as error:
        parse("mine.yaml", CLAIM.replace(old, new, 1))
    assert str(error.value).startswith("mine.yaml:")
    assert token in str(error.value)


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_rises_with_its_ratio_and_has_an_inverse(name: str) -> None:
    metric, ratios = METRICS[name], [0.5, 1.0, 1.7, 30.0]
    values = [metric.of(ratio, 0.1) for ratio in ratios]
    assert values == sorted(values)
    assert [metric.back(value, 0.1) for value in values] == pytest.approx(ratios)


@pytest.mark.parametrize(("near", "device"), DEVICES.items())
def test_a_basis_is_how_near_the_device_is(near: Basis, device: str) -> None:
    hardware = claimed().hardware
    assert basis_of(hardware, device, near is Basis.PROXY) is near


EACH, ALL = {"quantifier": "for_all"}, {"quantifier": "typical"}
A100, MOST = {"at_least": 100}, {"at_most": 1, "quantifier": "for_all"}
GENERAL = {"hardware": {"scope": "general", "gpus": ["V100"]}}
CONFIRMED, DOUBTFUL, LOOK = {"confirms": True}, {"reliable": False}, {"processes": 3}
PROXY = {"proxy": "a kernel", "missing": "the rest"}
BROKEN = {"reason": "no baseline ran: wrong"}
Part = tuple[float, str, dict[str, Any]]  # the middle of a cell's ratios, its problem, its facts


JUDGED: list[tuple[dict[str, Any], list[Part], Word, str]] = [
    (A100, [(8.0, "a", {})], Word.FALLS_SHORT, ""),
    (A100, [(20.0, "a", {})], Word.FALLS_SHORT, ""),
    (EACH, [(1.5, "a", {}), (1.6, "b", {})], Word.FALLS_SHORT, "0 of 2 cells are ≥ 2×"),
    (A100, [(200.0, "a", {})], Word.HOLDS, ""),
    (MOST, [(0.5, "a", {})], Word.HOLDS, ""),
    (MOST, [(1.5, "a", {})], Word.FALLS_SHORT, ""),
    (MOST, [(1.0, "a", {})], Word.NOT_SETTLED, ""),
    ({"hardware": {"scope": "general"}}, [(0.9, "a", {})], Word.FALLS_SHORT, ""),
    (
        GENERAL,
        [(0.9, "a", {"device": "NVIDIA B200"})],
        Word.FALLS_SHORT,
        "so any GPU can refute it",
    ),
    ({}, [(0.9, "a", {"device": "NVIDIA B200"})], Word.OTHER_CONDITIONS, "The claim is about"),
    (PROXY, [(2.5, "a", {})], Word.OTHER_CONDITIONS, "A proxy neither"),
    (PROXY, [(0.9, "a", {})], Word.OTHER_CONDITIONS, "A proxy neither"),
    ({}, [(1.0, "a", {"reason": "it needs a GPU"})], Word.NOT_TESTABLE, "It needs a GPU."),
    ({}, [(2.02, "a", {"percent": 4.0})], Word.NOT_SETTLED, "in place of 8 would settle it"),
    # What cards add does not shrink with the number of processes.
    ({}, [(2.02, "a", {"between": 0.02})], Word.NOT_SETTLED, "would not settle it, but another"),
    ({}, [(3.0, "a", DOUBTFUL)], Word.NOT_SETTLED, "Equal kernels came out different in a-run"),
    ({}, [(1.5, "a", {}), (3.0, "a", CONFIRMED | DOUBTFUL)], Word.FALLS_SHORT, ""),
    ({}, [(2.5, "a", {}), (1.0, "b", {})], Word.NOT_SETTLED, ""),  # chosen, not confirmed
    ({}, [(2.5, "a", {}), (1.0, "b", {}), (1.9, "a", CONFIRMED)], Word.FALLS_SHORT, ""),
    ({}, [(2.5, "a", {}), (1.0, "b", {}), (2.4, "a", CONFIRMED)], Word.HOLDS, ""),
    (ALL, [(2.5, "a", LOOK)], Word.NOT_SETTLED, "3 of the 6 processes"),
    (EACH, [(2.5, "a", {}), (1.9, "b", {})], Word.HOLDS_IN_PART, ""),
    (
        EACH,
        [(2.5, "a", {}), (1.9, "b", {}), (1, "c", BROKEN)],
        Word.HOLDS_IN_PART,
        "1 without a value;",
    ),
    (ALL, [(2.5, "a", {}), (1.9, "b", {})], Word.HOLDS, "2.18"),
    # A bound below the threshold: other conditions, unless another cell could reach it.
    ({}, [(0.9, "a", {"bound": 1.8}), (0.9, "b", {"bound": 1.8})], Word.OTHER_CONDITIONS, "1.8×"),
    ({}, [(0.9, "a", {"bound": 1.8}), (0.9, "b", {"bound": 2.5})], Word.FALLS_SHORT, ""),
    ({}, [(0.9, "a", {"bound": 1.8}), (0.9, "b", {})], Word.FALLS_SHORT, ""),
    ({}, [(0.9, "a", {"bound": 1.8}), (1.5, "b", {"bound": 1.8})], Word.OTHER_CONDITIONS, ""),
    (EACH, [(0.9, "a", {"bound": 1.8}), (0.9, "b", {"bound": 1.8})], Word.OTHER_CONDITIONS, "1.8×"),
    (ALL, [(0.9, "a", {"bound": 1.0}), (0.9, "b", {"bound": 3.0})], Word.OTHER_CONDITIONS, "1.73×"),
    (ALL, [(0.9, "a", {"bound": 1.0}), (0.9, "b", {"bound": 5.0})], Word.FALLS_SHORT, ""),
    (ALL, [(0.9, "a", {"bound": 1.0}), (0.9, "b", {"bound": 0.0})], Word.FALLS_SHORT, ""),
]


@pytest.mark.parametrize(("changed", "parts", "word", "why"), JUDGED)
def test_cells_give_a_verdict_and_its_reason(changed, parts, word, why) -> None:
    claim, cells = claimed(**changed), []
    for middle, problem, facts in parts:
        shape = {name: facts[name] for name in ("percent", "processes") if name in facts}
        facts = {name: value for name, value in facts.items() if name not in shape}
        cells.append(cell(claim, spread(middle, **shape), problem, **facts))
    outcome = verdict(claim, *cells)
    assert outcome.word is word
    assert why in outcome.why


@pytest.mark.parametrize("quantifier", ["exists", "typical", "for_all"])
def test_cells_that_are_not_measured_leave_it_open(quantifier: str) -> None:
    claim = claimed(quantifier=quantifier)
    assert verdict(claim, cell(claim, spread(1.2)), of=3).word is Word.NOT_SETTLED
    assert verdict(claim).word is Word.NOT_MEASURED


def test_the_cell_to_confirm_is_the_best_and_looks_have_a_tendency() -> None:
    claim = claimed()
    cells = [cell(claim, spread(v), p) for v, p in ((2.5, "a"), (1.0, "b"))]
    assert verdict(claim, *cells).tests[0].confirm == cells[0]
    looks = [cell(claim, spread(v, processes=3), p) for v, p in ((2.5, "a"), (1.0, "b"))]
    assert verdict(claim, *looks).tendency is Word.HOLDS
    test = yaml.safe_load(CLAIM)["tests"][0] | ALL
    two = claimed(tests=[test | {"name": name} for name in ("one", "two")])
    look, short = cell(two, spread(2.5, processes=3)), cell(two, spread(1.5))
    both = [replace(look, test="one"), replace(short, test="two")]
    (outcome,) = judge("mine", two, both, {name: {"p"} for name in ("one", "two")})
    assert (outcome.word, outcome.tendency) == (Word.NOT_SETTLED, Word.HOLDS_IN_PART)


def test_no_proxy_reproduces_and_no_other_gpu_refutes_whatever_the_cells() -> None:
    for quantifier, proxy, scope, values in product(
        ("exists", "typical", "for_all"),
        (False, True),
        ("named", "general"),
        product((0.8, 1.4, 2.0, 2.6), repeat=2),
    ):
        rest = {"proxy": "a kernel", "missing": "the rest"} if proxy else {}
        hardware = {"scope": scope, "gpus": ["B200"]}
        claim = claimed(quantifier=quantifier, hardware=hardware, **rest)
        cells = [cell(claim, spread(v, 3.0), f"p{i}") for i, v in enumerate(values)]
        outcome = verdict(claim, *cells)
        assert outcome.word in Word
        assert not (proxy and outcome.word is Word.HOLDS)
        assert not ((proxy or scope == "named") and outcome.word is Word.FALLS_SHORT)


def test_a_hundred_equal_kernels_never_reproduce_a_gain_of_five_percent() -> None:
    claim, draw = claimed(at_least=1.05), np.random.default_rng(3)
    for _ in range(20):
        noise = np.exp(draw.normal(0, 0.02, (101, 8)))
        cells = [cell(claim, ratios, f"p{i}") for i, ratios in enumerate(noise[:100].tolist())]
        luckiest = max(cells, key=lambda each: each.value)
        again = cell(claim, noise[100].tolist(), luckiest.problem, confirms=True)
        assert verdict(claim, *cells).word is not Word.HOLDS
        assert verdict(claim, *cells, again).word is not Word.HOLDS


def test_the_cell_that_counts_does_not_depend_on_the_order_of_runs() -> None:
    claim = claimed()
    wide, narrow = (cell(claim, [v - w, v + w] * 4) for v, w in ((1.5, 0.2), (1.4, 0.01)))
    searched, reused = (cell(claim, spread(v)) for v in (1.5, 3.0))
    reused = replace(reused, searched=False, logs=reused.logs * 2)
    for counts, other in ((narrow, wide), (searched, reused)):
        for order in ((counts, other), (other, counts)):
            assert verdict(claim, *order).tests[0].deciding[0].value == counts.value


def test_a_claim_without_a_test_says_what_is_missing() -> None:
    (outcome,) = judge("mine", claimed(tests=[], missing="a kernel of it"), [], {})
    assert (outcome.word, outcome.basis) == (Word.NOT_TESTABLE, Basis.NONE)
    assert outcome.sentence == "Not testable (nothing measured). A test needs a kernel of it."


def test_tests_unite_and_one_that_cannot_matter_leaves_nothing_open() -> None:
    first = yaml.safe_load(CLAIM)["tests"][0]
    claim = claimed(tests=[first | {"name": name} for name in ("one", "two")])
    problems = {name: {"p"} for name in ("one", "two")}
    hit, missed, around = (
        cell(claim, spread(v, 4.0 if v == 2.0 else 1.0)) for v in (3.0, 0.9, 2.0)
    )

    def both(one: ClaimCell, two: ClaimCell) -> Word:
        cells = [replace(one, test="one"), replace(two, test="two")]
        (outcome,) = judge("mine", claim, cells, problems)
        return outcome.word

    assert both(hit, hit) is Word.HOLDS
    assert both(hit, missed) is Word.HOLDS_IN_PART
    assert both(missed, missed) is Word.FALLS_SHORT
    assert both(hit, around) is Word.NOT_SETTLED
    (half,) = judge("mine", claim, [replace(hit, test="one")], problems)
    (whole,) = judge("mine", claim, [replace(hit, test=name) for name in problems], problems)
    assert half.basis is whole.basis is not Basis.NONE  # that of what is measured


def test_a_value_is_written_alike_everywhere_and_one_process_has_no_interval() -> None:
    claim = claimed(quantifier="typical")
    alone = cell(claim, [1.106])
    assert value_text(claim.tests[0], alone) == "1.11×, one process"
    assert value_text(claim.tests[0], alone) in verdict(claim, alone).why
    eight = cell(claim, spread(1.106, 0.1))
    assert value_text(claim.tests[0], eight) in verdict(claim, eight).why
    assert "range" not in value_text(claim.tests[0], eight)
    look = cell(claim, spread(1.106, 0.1, processes=3))
    assert value_text(claim.tests[0], look).endswith("], range over 3 processes")
    every = claimed(quantifier="for_all")
    outcome = verdict(every, cell(every, spread(2.5)), of=1)
    assert outcome.why == "1 of 1 cell is ≥ 2×; 1 cell is not measured."


def test_a_problem_that_several_runs_measured_is_one_cell() -> None:
    claim = claimed(quantifier="for_all")
    many, few = (cell(claim, spread(2.5, processes=n), run=f"of-{n}") for n in (8, 2))
    broken = cell(claim, [1.0], reason="it needs a GPU", run="broken")
    (judged,) = verdict(claim, few, many, broken).tests
    assert (judged.word, judged.cells) == (Word.HOLDS, (many,))
    assert judged.others == (few, broken)


def test_a_run_without_the_fastest_subject_or_baseline_counts_after_one_that_has_it() -> None:
    claim = claimed()
    several = ("fast", "dense", "slow")
    whole = cell(claim, spread(9.2), case_ids=several, run="whole")
    without = cell(claim, spread(8.4), case_ids=("slow", "dense"), run="part", confirms=True)
    assert verdict(claim, whole, without).tests[0].cells == (whole,)
    same = replace(without, case_ids=several)  # it also timed the other subject: it confirms
    assert verdict(claim, whole, same).tests[0].cells == (same,)
    near = cell(claim, spread(9.15), case_ids=("slow", "dense"), confirms=True)
    assert verdict(claim, whole, near).tests[0].cells == (near,)
    look = cell(claim, spread(9.2, processes=1), case_ids=several)
    assert verdict(claim, look, without).tests[0].cells == (without,)
    easy = cell(claim, spread(12.0), case_ids=("fast", "slow dense"), confirms=True)
    assert verdict(claim, whole, easy).tests[0].cells == (whole,)


def test_a_larger_cell_that_was_not_measured_again_is_named() -> None:
    claim = claimed()
    confirmed = cell(claim, spread(2.5), "a", confirms=True)
    larger = cell(claim, spread(3.0), "b", fields={"op": "linear", "m": 64, "level": 0.9})
    outcome = verdict(claim, confirmed, larger)
    assert outcome.word is Word.HOLDS
    assert "best cell that was measured again alone, linear, m 4, 50 %" in outcome.why
    assert "of linear, m 64, 90 % would count if confirmed" in outcome.why


def test_a_test_over_an_op_has_the_ratio_of_two_speed_ups() -> None:
    claim = claimed(
        tests=[
            {
                **yaml.safe_load(CLAIM)["tests"][0],
                "over": "linear",
                "at_least": 0.85,
                "quantifier": "for_all",
            }
        ]
    )
    (test,) = claim.tests
    fields = {"m": 4, "sparsity": 0.5, "level": 0.5}
    forward, elsewhere, gradient, lonely = (
        cell(claim, ratios, name, run=run, fields={**fields, "op": op, **more})
        for name, ratios, run, op, more in (
            ("y", spread(2.0), "a-run", "linear", {}),
            ("y", spread(4.0), "another", "linear", {}),
            ("dx", spread(1.8), "a-run", "linear_dgrad", {"level": 0.501}),
            ("dw", spread(1.8), "a-run", "linear_wgrad", {"m": 8}),
        )
    )
    (outcome,) = over_op(test, [forward, elsewhere, gradient, lonely])
    assert (outcome.problem, outcome.run, outcome.processes) == ("dx", "a-run", 8)
    assert outcome.value == pytest.approx(0.9)
    (apart,) = over_op(test, [elsewhere, gradient])
    assert (apart.run, apart.value) == ("a-run over another", pytest.approx(0.45))
    doubted = replace(forward, run="doubted", reliable=False)
    (sure,) = over_op(test, [elsewhere, doubted, gradient])
    assert sure.run == "a-run over another"
    problems = {test.name: {"y", "dx"}}
    (outcome,) = judge("mine", claim, [forward, gradient], problems)
    assert outcome.word is Word.HOLDS
    assert "0.9" in outcome.why
    (open_,) = judge("mine", claim, [gradient], problems)
    assert open_.word is Word.NOT_MEASURED


def test_cells_of_files_are_those_of_the_runs_of_their_suite() -> None:
    run = read(PUBLISHED / "nvidia-h200" / "dlmc")
    first = {**yaml.safe_load(CLAIM)["tests"][0], "at": {"dtype": "fp32"}, "levels": [0.5, 0.95]}
    claim = claimed(tests=[first], measure={"suite": "dlmc", "data": True})
    (test,) = claim.tests
    ids = file_problems(test, claim.measured(test), run)
    levels = {r.case.problem["sparsity"] for r in run.rows if r.case.problem.id in ids}
    assert (min(levels), max(levels)) == (0.5, pytest.approx(0.952, abs=1e-3))
    assert not file_problems(test, claim.measured(test), read(PUBLISHED / "nvidia-h200" / "quick"))
    assert covers(test, {"dtype": "fp32", "sparsity": 0.954})
    assert not covers(test, {"dtype": "fp32", "sparsity": 0.98})
    assert not covers(test, {"dtype": "tf32", "sparsity": 0.9})


def test_devices_are_judged_apart_and_cells_survive_json() -> None:
    claim = claimed()
    cells = [cell(claim, spread(3.0), device=device) for device in DEVICES.values()]
    outcome = judge("mine", claim, cells, {"over dense": {"p"}})
    assert {each.device for each in outcome} == {*DEVICES.values()}
    assert [each.basis for each in outcome] == sorted(
        (v.basis for v in outcome), key=[*Basis].index
    )
    assert [ClaimCell.from_json(json.loads(json.dumps(c.to_json()))) for c in cells] == cells
    assert cell_state(claim.tests[0], cells[0]) == "met"
