import json
from dataclasses import replace
from pathlib import Path

import pytest

from sparsebench.errors import ResultError
from sparsebench.results.record import ROWS_SCHEMA, Case, Contender, Problem, Row, Source, Status
from sparsebench.results.run import store

PROBLEM = Problem("linear", {"m": 2, "block": [2, 4]}, 3, Source("a.smtx", "00ff"))
ROWS = [
    Row(Case(PROBLEM, Contender("dense", "cublas", baseline=True)), Status.OK, samples_us=(1.5, 2)),
    Row(
        Case(PROBLEM, Contender("bsr", "x", {"block": 2}, {"tuned": True})),
        Status.WRONG,
        detail="é",
    ),
]


FLAGS = {"device": "cpu", "replicates": 1, "only": ""}
STATE = {"suite": "t", "status": "running", "flags": FLAGS}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    store.create(path, "title: t\n", {"commit": None}, STATE)
    store.append(path, ROWS)
    return path


def test_what_was_written_is_read(run: Path) -> None:
    result = store.read(run)
    assert result.rows == ROWS
    assert result.suite == {"title": "t"}
    assert result.state["status"] == "running"


def test_a_torn_last_line_is_dropped(run: Path) -> None:
    with (run / "rows.jsonl").open("a") as file:
        file.write('{"case": {"prob')
    assert store.read(run).rows == ROWS


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("code"), "found no code"),
        (lambda row: row.update(colour=1), "found an unknown field colour"),
        (lambda row: row["case"].pop("problem"), "found KeyError: 'problem'"),
    ],
)
def test_a_row_has_every_field_and_no_other(run, change, message) -> None:
    lines = (run / "rows.jsonl").read_text().splitlines()
    row = json.loads(lines[2])
    change(row)
    (run / "rows.jsonl").write_text("\n".join([*lines[:2], json.dumps(row)]) + "\n")
    with pytest.raises(ResultError, match=rf"rows\.jsonl: line 3: expected a row.*{message}"):
        store.read(run)


@pytest.mark.parametrize(("right", "wrong"), [('"m":', '"m"'), ('"problem"', '"problems"')])
def test_a_case_that_cannot_be_read_is_an_error_of_its_line_for_chosen_rows(run, right, wrong):
    file = run / "rows.jsonl"
    first, *lines = file.read_text().splitlines(keepends=True)
    file.write_text("".join([first, lines[0], lines[1].replace(right, wrong, 1)]))
    with pytest.raises(ResultError, match=r"rows\.jsonl: line 3: expected a row"):
        store.read(run, lambda problem: False)


@pytest.mark.parametrize(
    ("field", "known"), [("late", True), ("judged_part", True), ("draws", False)]
)
def test_rows_of_the_previous_schema_lack_only_what_was_added(field, known, run) -> None:
    lines = (run / "rows.jsonl").read_text().replace(ROWS_SCHEMA, "sparsebench/rows@3").splitlines()
    rows = [json.loads(line) for line in lines]
    older = [json.dumps({k: v for k, v in row.items() if k != field}) + "\n" for row in rows]
    (run / "rows.jsonl").write_text("".join(older))
    if known:
        assert store.read(run).rows == ROWS
    else:
        with pytest.raises(ResultError, match=f"no {field}"):
            store.read(run)


def test_reference_rows_are_kept_apart(run: Path) -> None:
    reference = replace(ROWS[0], reference=True)
    store.append(run, [reference])
    assert store.read(run).rows == ROWS
    assert store.read(run).reference == [reference]
    assert store.rows(run) == [*ROWS, reference]


def test_a_folder_without_a_run_or_of_another_schema_is_refused(run: Path) -> None:
    with pytest.raises(ResultError, match="expected the directory of a run"):
        store.read(run / "nothing")
    (run / "run.json").write_text(json.dumps({"schema": "sparsebench/run@99"}))
    with pytest.raises(ResultError, match="found sparsebench/run@99"):
        store.read(run)


def test_a_directory_that_is_there_is_left_alone(run: Path) -> None:
    with pytest.raises(ResultError, match="expected a new directory"):
        store.create(run, "", {}, STATE)
    assert store.read(run).rows == ROWS


def test_an_id_is_equal_exactly_when_the_case_is() -> None:
    same = Problem("linear", {"block": [2, 4], "m": 2}, 3, Source("elsewhere/a.smtx", "00ff"))
    other = Problem("linear", {"block": [2, 4], "m": 2}, 3, Source("a.smtx", "00fe"))
    assert same.id == PROBLEM.id != other.id
    plain, baseline = Contender("dense", "cublas"), Contender("dense", "cublas", baseline=True)
    assert Case(same, plain).id == Case(PROBLEM, baseline).id
    assert Case(same, Contender("dense", "cublas", twin=True)).id != Case(PROBLEM, plain).id
