"""Claims about training: cells of trainings, which no suite runs."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from sparsebench.errors import ResultError, SuiteError
from sparsebench.harness.claims.checking import evidence
from sparsebench.results.claims.decision import Word
from sparsebench.results.claims.model_cells import model_cells, read_model_file
from sparsebench.results.claims.schema import Claim, ClaimFile, parse
from sparsebench.results.model_files import (
    MlpTiming,
    ModelTimings,
    PatternTraining,
    PatternTrainings,
)
from sparsebench.results.run.store import write_json
from tests.results.claim_examples import CLAIM

TEST = {
    **{"name": "at equal cost", "trained": "parameters", "metric": "loss_saved", "at_least": 1},
    **{"subject": {"format": "bsr"}, "baseline": {"format": "dense"}, "unit": "%"},
    "quantifier": "typical",
}


WAYS = [
    MlpTiming("step", "plain", 64, [11.0, 10.0, 12.0], 1000, 3.0, 0.0),
    MlpTiming("step", "compiled", 64, [9.0, 10.0, 9.0], 900, 2.5, 0.0),
    MlpTiming("step", "SparseGatedMLP", 64, [6.0, 6.0, 7.0], 600, 2.0, 0.01),
    MlpTiming("step", "slow", 64, detail="no"),
    MlpTiming("forward", "SparseGatedMLP", 64, [1.0], 600, None, 0.01),
]
WHOLE = ModelTimings(
    "sparsebench/whole@1", "NVIDIA H200", "bf16", {"layers": 2, "active": 3}, 3.2, WAYS
)
OF_WHOLE = {
    **{"trained": None, "whole": "step", "metric": "speedup", "unit": "x", "at_least": 1.2},
    **{"subject": {"kernel": "SparseGatedMLP"}, "baseline": {"kernel": ["plain", "compiled"]}},
}


def written(**changed: Any) -> ClaimFile:
    data = yaml.safe_load(CLAIM)
    del data["measure"]
    data["tests"] = [{**TEST, **changed}]
    return parse("made-up.yaml", yaml.safe_dump(data))


def claim(**changed: Any) -> Claim:
    return written(**changed).claim


def trainings(seeds: int, gain: float = 0.02) -> PatternTrainings:
    """Return trainings whose sparse models have so much less loss than dense at equal cost."""
    rows = []
    for seed in range(seeds):
        noise = 1 + 0.001 * (seed % 3)
        wide = PatternTraining("dense", 1, 0.0, 512, 400, seed, 1.0 * noise, 90.0, 900, 1.0)
        narrow = replace(wide, width=256, parameters=100, loss=1.1 * noise, step_us=30.0)
        less = 1.1 * (1 - gain - 0.0001 * seed) * noise
        rows += [
            wide,
            narrow,
            PatternTraining("uniform", 32, 0.75, 512, 99, seed, less, 40.0, 400, 1.0),
        ]
        rows += [PatternTraining("small_world", 32, 0.75, 512, 500, seed, 0.9, 40.0, 400, 1.0)]
    return PatternTrainings("sparsebench/widths@1", "a text", "0", 1, 1, "NVIDIA H200", {}, rows)


def test_a_cell_is_a_sparse_model_beside_its_dense_equal() -> None:
    (test,) = claim().tests
    even, more = model_cells(test, trainings(3), "a-file")
    assert (even.run, even.device, even.processes) == ("a-file", "NVIDIA H200", 3)
    assert even.low <= even.value <= even.high
    assert even.value == pytest.approx(2, abs=0.05)
    assert even.baseline == "dense, 256 wide"
    assert more.reason == "no dense model of equal parameters"
    assert "uniform" in even.label


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ({"trained": "width"}, 100 * (1 - 1.1 * 0.98)),
        ({"metric": "speedup", "unit": "x", "trained": "width"}, 90 / 40),
        ({"metric": "memory_saved", "trained": "width"}, 100 * (1 - 400 / 900)),
    ],
)
def test_metrics_are_those_of_a_training(changed: dict[str, Any], value: float) -> None:
    (test,) = claim(**changed, at={"pattern": "uniform", "block": [32, 64]}).tests
    (cell,) = model_cells(test, trainings(2), "a-file")
    assert cell.value == pytest.approx(value, rel=0.01)


def test_a_dense_model_of_equal_time_takes_at_most_15_percent_longer() -> None:
    (test,) = claim(trained="time", at={"pattern": "uniform"}).tests
    file = trainings(1)
    (cell,) = model_cells(test, file, "a-file")
    assert cell.reason
    between = PatternTraining("dense", 1, 0.0, 320, 150, 0, 1.2, 42.0, 400, 1.0)
    (cell,) = model_cells(test, replace(file, trained=[*file.trained, between]), "a-file")
    assert cell.baseline == "dense, 320 wide"


@pytest.mark.parametrize(
    ("seeds", "gain", "word", "tendency"),
    [
        (8, 0.02, Word.HOLDS, None),
        (8, 0.005, Word.FALLS_SHORT, None),
        (8, -0.02, Word.FALLS_SHORT, None),
        (3, 0.02, Word.NOT_SETTLED, Word.HOLDS),
    ],
)
def test_trainings_are_judged_as_runs_are(seeds, gain, word, tendency, tmp_path) -> None:
    file = tmp_path / "a-file.json"
    write_json(file, asdict(trainings(seeds, gain)))
    claim = written(at={"pattern": "uniform"})
    cells = evidence([claim], [file])
    (verdict,) = cells.verdicts()[claim.name]
    assert (verdict.word, verdict.tendency) == (word, tendency)
    (planned,) = cells.planned()
    assert [cell.run for cell in planned.model_cells] == ["a-file"]
    assert not cells.cells[claim.name]


@pytest.mark.parametrize(
    ("step_us", "width"), [(90.0, 512), (86.0, 512), (60.0, None), (30.0, 256), (91.0, None)]
)
def test_a_dense_match_of_equal_time_is_never_faster(step_us: float, width: int | None) -> None:
    wide, narrow, sparse, _ = trainings(1).trained
    sparse = replace(sparse, step_us=step_us)
    file = replace(trainings(1), trained=[wide, narrow, sparse])
    match = file.dense_match(sparse, "time")
    assert (match and match.width) == width


@pytest.mark.parametrize(("change", "place"), [({"loss": -1}, "loss"), ({"more": 1}, "more")])
def test_an_invalid_file_is_a_line(change: dict[str, Any], place: str, tmp_path: Path) -> None:
    file, data = tmp_path / "a.json", asdict(trainings(1))
    data["trained"][0] |= change
    write_json(file, data)
    with pytest.raises(ResultError, match=rf"a\.json: .*trained\.0\.{place}: "):
        read_model_file(file)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"trained": None}, "expected trained, for a metric of the loss"),
        ({"metric": "of_ideal"}, "expected a metric of training, speedup or memory_saved or"),
        ({"at": {"m": 4}}, "some of data, pattern, block, width, not m"),
        ({"whole": "step"}, "expected one of measure, trained and whole, not two"),
        ({**OF_WHOLE, "at": {"m": 1}}, "expected fields of a whole model, some of none, not m"),
        ({"measure": {"suite": "quick"}}, "expected one of measure, trained and whole, not two"),
    ],
)
def test_what_a_training_does_not_have_is_a_line(changed: dict[str, Any], message: str) -> None:
    data = yaml.safe_load(CLAIM)
    data["tests"] = [{**TEST, **changed}]
    with pytest.raises(SuiteError, match=r"made-up.yaml:\d+: tests.0: ") as refused:
        parse("made-up.yaml", yaml.safe_dump(data))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("changed", "value"),
    [
        ({}, 9 / 6),
        ({"metric": "memory_saved", "unit": "%"}, 100 * (1 - 600 / 900)),
        ({"metric": "energy_saved", "unit": "%"}, 100 * (1 - 2.0 / 2.5)),
    ],
)
def test_a_whole_model_is_a_cell_a_file(changed, value, tmp_path) -> None:
    file = tmp_path / "whole.json"
    write_json(file, asdict(WHOLE))
    claim = written(**{**OF_WHOLE, **changed})
    cells = evidence([claim], [file])
    (cell,) = cells.files[claim.name]
    assert (cell.subject, cell.baseline, cell.processes) == ("SparseGatedMLP", "compiled", 1)
    assert cell.value == pytest.approx(value)
    assert "2 layers" in cell.label
    (verdict,) = cells.verdicts()[claim.name]
    assert verdict.word is Word.NOT_SETTLED
    assert verdict.tendency is not None


def test_a_way_without_times_is_a_reason() -> None:
    (test,) = claim(**{**OF_WHOLE, "subject": {"kernel": "slow"}}).tests
    (cell,) = model_cells(test, WHOLE, "a-file")
    assert cell.reason == "no subject ran: slow: no"
    (test,) = claim(**{**OF_WHOLE, "subject": {"kernel": "other"}}).tests
    assert not [*model_cells(test, WHOLE, "a-file")]


def test_a_file_of_no_known_schema_is_a_line(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    for text, message in (("{}", "no schema"), ('{"schema": "x"}', "'x'")):
        file.write_text(text)
        with pytest.raises(ResultError, match="expected sparsebench/widths@1 or") as refused:
            read_model_file(file)
        assert message in str(refused.value)
    with pytest.raises(ResultError, match="expected a readable file, found none"):
        read_model_file(tmp_path / "b.json")
