"""Claims as files, cells as numbers: what is refused, and each verdict on each basis."""

import json
from dataclasses import replace
from itertools import product

import numpy as np
import pytest
import yaml
from made_up_claims import CLAIM, DEVICES, cell, claimed, spread
from places import ROOT

from sparsebench.errors import SuiteError
from sparsebench.results.claims.cells import Cell, united
from sparsebench.results.claims.metrics import METRICS
from sparsebench.results.claims.schema import Bound, Claim, json_schema, parse
from sparsebench.results.claims.verdict import Basis, Verdict, Word, basis, judge, state


def verdict(claim: Claim, *cells: Cell, of: int = 0) -> Verdict:
    """Judge cells; `of` problems were wanted, those of the cells by default."""
    wanted = {each.problem for each in cells} | {f"other {i}" for i in range(of)}
    (found,) = judge("mine", claim, cells, {"over dense": wanted})
    return found


def test_what_a_claim_says_is_read_and_given_back() -> None:
    claim = parse("mine.yaml", CLAIM).claim
    assert claim.tests[0].sentence == "speedup ≥ 2 x in a cell"
    assert Claim.model_validate(claim.model_dump(by_alias=True)) == claim


WRONG = {  # what is replaced, by what, and what is said of which line
    "no unit": ("    unit: x\n", "", "18: tests.0.unit: expected a value, found none"),
    "no threshold": ("    at_least: 2\n", "", "18: tests.0: expected a threshold"),
    "two thresholds": ("at_least: 2", "at_least: 2\n    at_most: 3", "at_most, not both"),
    "another unit": ("unit: x", 'unit: "%"', "18: tests.0: expected unit x of speedup, not %"),
    "no such metric": ("metric: speedup", "metric: joy", "21: tests.0.metric: expected 'speedup'"),
    "no such key": ("title: B", "tilte: B", "2: tilte: unknown key (did you mean title?)"),
    "half of it first": ("unit: x", "unit: x\n    partly_at: 3", "partly_at below at_least, not 3"),
    "equal kernels meet it": ("unit: x", "unit: x\n    tolerance: 1.5", "no equal contender meets"),
    "both ours": ("field: dtype}", "field: dtype, ours: bf16}", "field or ours, not both"),
    "named, no name": (", gpus: [H200]", "", "6: hardware: expected gpus where the scope is named"),
    "a long quote": ("as dense", "as dense" * 0 + "a " * 30, "at most 25 words, not 35"),
    "a proxy alone": ("unit: x", "unit: x\n    proxy: a kernel", "missing, where every test is"),
    "missing, yet whole": ("title: B", "missing: a GPU\ntitle: B", "over dense is none"),
    "no suite": ("measure:", "measured:", "measured: unknown key"),
    "a suite twice": ("measure:\n", "measure:\n  suite: quick\n", "and not both"),
    "no number": ("at_least: 2", "at_least: two", "22: tests.0.at_least: expected a valid number"),
    "no date": ('"2026"', '"soon"', "5: source.date: expected String should match pattern"),
    "a key twice": ("title: B", "title: A\ntitle: B", "expected each key once"),
    "no claim": (CLAIM, "[]", "1: expected a claim, found list"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_claim_that_is_incomplete_or_contradicts_itself_is_an_error_with_its_line(
    what: str,
) -> None:
    old, new, said = WRONG[what]
    assert old in CLAIM
    with pytest.raises(SuiteError) as error:
        parse("mine.yaml", CLAIM.replace(old, new, 1))
    assert str(error.value).startswith("mine.yaml:")
    assert said in str(error.value)


def test_the_schema_for_editors_is_that_of_the_model() -> None:
    file = ROOT / "suites" / "claims" / "claim.schema.json"
    assert json.loads(file.read_text()) == json_schema()


@pytest.mark.parametrize("name", METRICS)
def test_a_metric_rises_with_its_ratio_and_has_an_inverse(name: str) -> None:
    metric, ratios = METRICS[name], [0.5, 1.0, 1.7, 30.0]
    values = [metric.of(ratio, 0.1) for ratio in ratios]
    assert values == sorted(values)
    assert [metric.back(value, 0.1) for value in values] == pytest.approx(ratios)
    assert metric.none is None or metric.of(1.0, 0.1) == pytest.approx(metric.none)


def test_bounds_are_bytes_and_multiplications_and_amdahl() -> None:
    bound = Bound(of="2:4 in 16 bits", density=0.5, bits_per_element=1)
    assert bound.most == pytest.approx(1.778, abs=1e-3)
    assert Bound(of="half dense, fp8", density=0.75, bits=8, bits_per_element=0.5).most == (
        pytest.approx(1.2308, abs=1e-4)
    )
    assert Bound(of="a fifth", density=0.2).most == pytest.approx(5)
    assert Bound(of="of half the whole", density=0.2, share=0.5).most == pytest.approx(1 / 0.6)


@pytest.mark.parametrize(("near", "device"), DEVICES.items())
def test_a_basis_is_how_near_the_device_is(near: Basis, device: str) -> None:
    hardware = claimed().hardware
    assert basis(hardware, device, near is Basis.KERNEL_PROXY) is near


def each_way(claim: Claim, device: str) -> dict[Word, Verdict]:
    """Return a verdict of each kind that cells can bring about on a device."""
    there = {"device": device}
    sure = [cell(claim, spread(2.5), p, **there) for p in "ab"]
    again = cell(claim, spread(2.5), "a", confirms=True, **there)
    short = cell(claim, spread(1.5), "a", **there)
    none = cell(claim, spread(0.9), "a", **there)
    astride = cell(claim, spread(2.0, 5.0), "a", **there)
    broken = cell(claim, [1.0], "a", reason="no subject ran: it needs a GPU", **there)
    return {
        Word.REPRODUCED: verdict(claim, *sure, again),
        Word.PARTLY: verdict(claim, short),
        Word.REFUTED: verdict(claim, none),
        Word.INCONCLUSIVE: verdict(claim, astride),
        Word.NOT_TESTABLE: verdict(claim, broken),
    }


@pytest.mark.parametrize("near", DEVICES)
def test_each_verdict_on_each_basis(near: Basis) -> None:
    proxy = {"proxy": "a kernel", "missing": "the rest"} if near is Basis.KERNEL_PROXY else {}
    found = each_way(claimed(**proxy), DEVICES[near])
    carried = {word: each.word for word, each in found.items()}
    expected = {word: word for word in carried}
    if near is not Basis.AS_PUBLISHED:
        expected[Word.REFUTED] = Word.NOT_CARRIED_OVER
    if near is Basis.KERNEL_PROXY:
        expected[Word.REPRODUCED] = Word.PARTLY
    assert carried == expected
    assert {each.basis for each in found.values()} == {near}
    assert all(each.why for each in found.values())


def test_a_general_claim_is_refuted_on_any_gpu_but_by_no_proxy() -> None:
    general = {"scope": "general", "gpus": ["V100"]}
    for device in DEVICES.values():
        claim = claimed(hardware=general)
        found = verdict(claim, cell(claim, spread(0.9), device=device))
        assert (found.word, found.basis) == (Word.REFUTED, Basis.OTHER_GPU)
    claim = claimed(hardware=general, proxy="a kernel", missing="the rest")
    assert verdict(claim, cell(claim, spread(0.9))).word is Word.NOT_CARRIED_OVER


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
        found = verdict(claim, *cells)
        assert found.word in Word
        assert not (proxy and found.word is Word.REPRODUCED)
        assert not ((proxy or scope == "named") and found.word is Word.REFUTED)


def test_an_interval_astride_the_threshold_is_inconclusive_and_says_what_would_decide() -> None:
    claim = claimed()
    found = verdict(claim, cell(claim, spread(2.02, 4.0)))
    assert found.word is Word.INCONCLUSIVE
    assert "astride 2 x" in found.why
    assert "more processes would decide" in found.why


def test_fewer_than_six_processes_are_a_look_that_leans() -> None:
    claim = claimed(quantifier="typical")
    found = verdict(claim, cell(claim, spread(2.5, processes=3)))
    assert (found.word, found.leans) == (Word.INCONCLUSIVE, Word.REPRODUCED)
    assert "3 of the 6 processes" in found.why
    claim = claimed()  # exists: chosen among two, so not confirmed either
    looks = [cell(claim, spread(v, processes=3), p) for v, p in ((2.5, "a"), (1.0, "b"))]
    assert verdict(claim, *looks).leans is Word.REPRODUCED


def test_the_best_of_several_cells_is_nothing_until_a_run_was_made_for_it() -> None:
    claim = claimed()
    cells = [cell(claim, spread(v), p) for v, p in ((2.5, "a"), (1.0, "b"))]
    found = verdict(claim, *cells)
    assert found.word is Word.INCONCLUSIVE
    assert found.tests[0].confirm == cells[0]
    failed = cell(claim, spread(1.9), "a", confirms=True)
    assert verdict(claim, *cells, failed).word is Word.PARTLY
    held = cell(claim, spread(2.4), "a", confirms=True)
    assert verdict(claim, *cells, held).word is Word.REPRODUCED


def test_a_hundred_equal_kernels_never_reproduce_a_gain_of_five_percent() -> None:
    claim, draw = claimed(at_least=1.05), np.random.default_rng(3)
    for _ in range(20):
        noise = np.exp(draw.normal(0, 0.02, (101, 8)))
        cells = [cell(claim, ratios, f"p{i}") for i, ratios in enumerate(noise[:100].tolist())]
        luckiest = max(cells, key=lambda each: each.value)
        again = cell(claim, noise[100].tolist(), luckiest.problem, confirms=True)
        assert verdict(claim, *cells).word is not Word.REPRODUCED
        assert verdict(claim, *cells, again).word is not Word.REPRODUCED


def test_every_cell_or_all_together() -> None:
    mixed = spread(2.5), spread(1.9)
    claim = claimed(quantifier="for_all")
    assert verdict(claim, *(cell(claim, r, str(i)) for i, r in enumerate(mixed))).word is (
        Word.PARTLY
    )
    claim = claimed(quantifier="typical")
    cells = [cell(claim, r, str(i)) for i, r in enumerate(mixed)]
    assert united(cells, claim.tests[0]).value == pytest.approx((2.5 * 1.9) ** 0.5, rel=1e-3)
    assert verdict(claim, *cells).word is Word.REPRODUCED


@pytest.mark.parametrize("quantifier", ["exists", "typical", "for_all"])
def test_cells_that_are_not_measured_leave_it_open(quantifier: str) -> None:
    claim = claimed(quantifier=quantifier)
    assert verdict(claim, cell(claim, spread(1.2)), of=3).word is Word.INCONCLUSIVE
    assert verdict(claim).word is Word.INCONCLUSIVE


def test_partly_is_what_the_claim_says_it_is() -> None:
    claim = claimed(at_least=100, partly_at=10)
    values = {8.0: Word.REFUTED, 20.0: Word.PARTLY, 200.0: Word.REPRODUCED}
    assert {v: verdict(claim, cell(claim, spread(v))).word for v in values} == values


def test_a_claim_of_at_most_is_judged_from_the_other_side() -> None:
    claim = claimed(at_most=1, quantifier="for_all")
    values = {0.5: Word.REPRODUCED, 1.5: Word.REFUTED, 1.0: Word.INCONCLUSIVE}
    assert {v: verdict(claim, cell(claim, spread(v))).word for v in values} == values


def test_an_unreliable_run_decides_nothing() -> None:
    claim = claimed()
    found = verdict(claim, cell(claim, spread(3.0), reliable=False))
    assert found.word is Word.INCONCLUSIVE
    assert "equal kernels came out different in a-run" in found.why


def test_a_claim_without_a_test_says_what_is_missing() -> None:
    (found,) = judge("mine", claimed(tests=[], missing="a kernel of it"), [], {})
    assert (found.word, found.basis) == (Word.NOT_TESTABLE, Basis.NONE)
    assert found.sentence == "Not testable, nothing measured: a kernel of it."


def test_tests_unite_and_one_that_cannot_matter_leaves_nothing_open() -> None:
    first = yaml.safe_load(CLAIM)["tests"][0]
    claim = claimed(tests=[first | {"name": name} for name in ("one", "two")])
    wanted = {name: {"p"} for name in ("one", "two")}
    met, missed, astride = (
        cell(claim, spread(v, 4.0 if v == 2.0 else 1.0)) for v in (3.0, 0.9, 2.0)
    )

    def both(one: Cell, two: Cell) -> Word:
        cells = [replace(one, test="one"), replace(two, test="two")]
        (found,) = judge("mine", claim, cells, wanted)
        return found.word

    assert both(met, met) is Word.REPRODUCED
    assert both(met, missed) is Word.PARTLY
    assert both(missed, missed) is Word.REFUTED
    assert both(met, astride) is Word.INCONCLUSIVE
    (half,) = judge("mine", claim, [replace(met, test="one")], wanted)
    (whole,) = judge("mine", claim, [replace(met, test=name) for name in wanted], wanted)
    assert half.basis is whole.basis is not Basis.NONE  # that of what is measured


def test_devices_are_judged_apart_and_cells_survive_json() -> None:
    claim = claimed()
    cells = [cell(claim, spread(3.0), device=device) for device in DEVICES.values()]
    found = judge("mine", claim, cells, {"over dense": {"p"}})
    assert [each.device for each in found] == list(DEVICES.values())
    assert [Cell.from_json(json.loads(json.dumps(c.to_json()))) for c in cells] == cells
    assert state(claim.tests[0], cells[0]) == "met"
