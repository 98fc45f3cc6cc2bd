"""Bundles: sealed, moved, compressed, damaged. Rows are made up; nothing is measured."""

import gzip
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sparsebench.errors import ResultError
from sparsebench.harness.plan.suite import read
from sparsebench.harness.run.validate import validate
from sparsebench.results import bundle, store
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA, Case, Row, Status

SUITE = """
schema: sparsebench/suite@1
title: small
problems:
  - {op: linear, m: [4, 8], n: 32, k: 64, dtype: fp32, pattern: blocks, block: 8, sparsity: 0.5}
contenders:
  - {format: csr, kernel: scipy_csr}
baselines:
  - {format: dense, kernel: torch_dense}
"""
FLAGS = {"device": "cpu", "data": None, "timeout_s": 60.0, "replicates": 2, "only": ""}
STATE = {"suite": "small", "status": "finished", "flags": FLAGS}
CPU = {"cpu": {"name": "a CPU"}, "gpu": None}


def rows(suite: Path, data: Path | None = None) -> list[Row]:
    """Return what a run of the suite in two processes gives."""
    return [
        Row(
            Case(contest.problem, contender),
            Status.OK,
            replicate,
            device="a CPU",
            cache="hot",
            digest=contest.problem.id,
            samples_us=(1.5, 2.5),
        )
        for replicate in range(2)
        for contest in read(str(suite), data).contests
        for contender in contest.contenders
    ]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    store.create(path, SUITE, CPU)
    store.append(path, rows(path / "suite.yaml"))
    store.set_state(path, STATE)
    bundle.seal(path)
    return path


def said(path: Path) -> str:
    """Return the one line that validating a damaged bundle ends with."""
    with pytest.raises(ResultError) as error:
        list(validate(path))
    message = str(error.value)
    assert message.startswith(str(path))
    assert "\n" not in message
    return message.removeprefix(str(path))


def damaged(path: Path, change: Callable[[list[Row]], list[Row]]) -> str:
    """Change the rows, seal them again, and return what is said."""
    store.keep(path, change(store.rows(path)))
    bundle.seal(path)
    return said(path)


def test_a_sealed_run_is_valid_and_each_check_is_a_line(run: Path) -> None:
    assert list(validate(run)) == [
        "files: environment.json, lock.txt, rows.jsonl, run.json, suite.yaml: as they were sealed",
        "rows: 8, complete, all of a CPU",
        "replicates: 2, the same cases in each, none twice: a look; a verdict takes 6",
        "samples: 16, all in ok rows, finite and positive",
        "operands: of 2 problems, the same bits in every replicate",
        "plan: 4 rows a replicate, all that suite.yaml asks for",
    ]


def test_a_part_of_a_suite_is_said_to_be_a_part(run: Path) -> None:
    store.keep(run, [row for row in store.rows(run) if row.case.problem["m"] == 4])
    store.set_state(run, STATE | {"flags": FLAGS | {"only": "m=4"}})
    bundle.seal(run)
    plan = "plan: 2 rows a replicate, all that suite.yaml asks for with --only 'm=4'"
    assert list(validate(run))[-1] == plan


def test_a_bundle_moves_and_keeps_its_name(run: Path, tmp_path: Path) -> None:
    name = bundle.identity(run)
    moved = Path(shutil.move(run, tmp_path / "elsewhere"))
    assert len(list(validate(moved))) == 6
    assert bundle.identity(moved) == name


def test_compressed_rows_are_the_same_rows(run: Path) -> None:
    name, plain = bundle.identity(run), run / "rows.jsonl"
    (run / "rows.jsonl.gz").write_bytes(gzip.compress(plain.read_bytes(), 9))
    plain.unlink()
    assert len(list(validate(run))) == 6
    bundle.seal(run)
    assert bundle.identity(run) == name


def test_reports_and_logs_are_no_evidence(run: Path) -> None:
    (run / "report.html").write_text("written again")
    (run / "worker.log").write_text("chatter")
    assert len(list(validate(run))) == 6


def test_the_lock_can_be_installed_and_leaves_us_out() -> None:
    pins = [line for line in bundle.lock().splitlines() if line[0] not in "#-"]
    named = {Requirement(pin).name: Requirement(pin).specifier for pin in pins}
    assert all(str(version).startswith("==") for version in named.values())
    assert {"torch", "numpy", "pytest"} <= named.keys()
    assert "sparsebench" not in named
    assert list(named) == sorted(named)


@pytest.mark.parametrize("name", sorted(bundle.REQUIRED))
def test_a_changed_byte_is_one_clear_line(name: str, run: Path) -> None:
    content = bytearray((run / name).read_bytes())
    content[len(content) // 2] ^= 1
    (run / name).write_bytes(content)
    assert said(run).startswith(f"/{name}: expected SHA-256 ")


@pytest.mark.parametrize("name", sorted(bundle.REQUIRED))
def test_a_missing_file_is_one_clear_line(name: str, run: Path) -> None:
    (run / name).unlink()
    assert said(run).startswith(f"/{name}: expected a readable file, found ")


def test_an_unsealed_run_is_refused(run: Path) -> None:
    bundle.unseal(run)
    assert said(run) == ": expected manifest.json, which seals a run; found none"


def test_rows_of_an_older_schema_stay_valid_and_of_a_newer_one_are_refused(run: Path) -> None:
    text = (run / "rows.jsonl").read_text()
    for schema in OLDER_ROWS:
        (run / "rows.jsonl").write_text(text.replace(ROWS_SCHEMA, schema))
        bundle.seal(run)
        assert len(list(validate(run))) == 6
    (run / "rows.jsonl").write_text(text.replace(ROWS_SCHEMA, "sparsebench/rows@99"))
    bundle.seal(run)
    assert said(run).endswith('and whole lines, found {"schema": "sparsebench/rows@99"}')


def test_a_torn_last_line_is_refused(run: Path) -> None:
    with (run / "rows.jsonl").open("a") as file:
        file.write('{"case": {')
    bundle.seal(run)
    assert said(run).endswith('found a torn last line {"case": {')


@pytest.mark.parametrize("name", ["../rows.jsonl", "/etc/hostname"])
def test_a_manifest_that_names_files_elsewhere_is_refused(name: str, run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    manifest["files"][name] = "0" * 64
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert said(run) == f"/manifest.json: expected names of files in the run, found {name}"


def test_a_manifest_that_leaves_the_rows_out_is_refused(run: Path) -> None:
    manifest = json.loads((run / "manifest.json").read_text())
    del manifest["files"]["rows.jsonl"]
    (run / "manifest.json").write_text(json.dumps(manifest))
    assert said(run).startswith("/manifest.json: expected rows.jsonl among its files")


def test_a_row_without_a_field_is_refused(run: Path) -> None:
    lines = (run / "rows.jsonl").read_text().splitlines()
    row = json.loads(lines[3])
    del row["digest"]
    lines[3] = json.dumps(row)
    (run / "rows.jsonl").write_text("\n".join(lines) + "\n")
    bundle.seal(run)
    message = said(run)
    assert message.startswith("/rows.jsonl: line 4: ")
    assert "digest" in message


def test_rows_of_two_devices_are_refused(run: Path) -> None:
    message = damaged(run, lambda r: [*r[:-1], replace(r[-1], device="GPU-2")])
    assert message.endswith("expected device a CPU (environment.json), found GPU-2")


def test_a_row_that_is_there_twice_is_refused(run: Path) -> None:
    message = damaged(run, lambda r: [*r, r[0]])
    assert message.endswith("in replicate 0: expected one row, found two")


def test_a_row_that_one_replicate_has_not_is_refused(run: Path) -> None:
    message = damaged(run, lambda r: r[:-1])
    assert message.endswith("in replicate 1: expected a row as in other replicates, found none")


def test_a_replicate_too_many_is_refused(run: Path) -> None:
    message = damaged(run, lambda r: r + [replace(row, replicate=2) for row in r[:4]])
    assert message.endswith("in replicate 2: expected 2 replicates, found another")


def test_samples_in_a_row_that_is_not_ok_are_refused(run: Path) -> None:
    message = damaged(run, lambda r: [replace(r[0], status=Status.WRONG), *r[1:]])
    assert message.endswith("expected samples exactly where ok, found 2, wrong")


@pytest.mark.parametrize("sample", [0.0, -1.0, float("nan"), float("inf")])
def test_a_sample_that_is_no_time_is_refused(sample: float, run: Path) -> None:
    message = damaged(run, lambda r: [replace(r[0], samples_us=(1.0, sample)), *r[1:]])
    assert message.endswith(f"expected a time in µs, found {sample}")


def test_other_operands_in_another_replicate_are_refused(run: Path) -> None:
    message = damaged(run, lambda r: [*r[:-1], replace(r[-1], digest="other")])
    assert message.endswith("found other")


def test_a_case_that_the_suite_asks_for_is_missed(run: Path) -> None:
    message = damaged(run, lambda r: [row for row in r if row.case.id != r[1].case.id])
    assert "csr/scipy_csr kernel hot: expected a row, found none" in message


def test_a_case_that_the_suite_does_not_ask_for_is_refused(run: Path) -> None:
    suite = (run / "suite.yaml").read_text()
    (run / "suite.yaml").write_text(suite.replace("m: [4, 8]", "m: [4]"))
    bundle.seal(run)
    assert said(run).endswith("expected none (suite.yaml), found a row")


def test_an_interrupted_run_is_sealed_but_not_whole(run: Path) -> None:
    store.set_state(run, {**STATE, "status": "interrupted"})
    bundle.seal(run)
    assert said(run) == "/run.json: expected a finished run, found interrupted with 8 rows"


def test_a_suite_that_cannot_be_expanded_here_is_said(run: Path) -> None:
    suite = (run / "suite.yaml").read_text()
    (run / "suite.yaml").write_text(suite.replace("scipy_csr", "someone.elses"))
    bundle.seal(run)
    assert list(validate(run))[-1].startswith("plan: not checked, the suite cannot be expanded")


def test_sources_that_have_changed_since_are_said(run: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    (data / "a.smtx").write_text("2, 4, 3\n0 2 3\n0 3 1\n")
    (run / "suite.yaml").write_text(
        SUITE.replace("m: [4, 8], n: 32, k: 64", "m: 4, source: {file: '*.smtx'}")
        .replace("blocks, block: 8, sparsity: 0.5", "file")
    )  # fmt: skip
    store.set_state(run, {**STATE, "flags": {**FLAGS, "data": str(data)}})
    store.keep(run, rows(run / "suite.yaml", data))
    bundle.seal(run)
    assert list(validate(run))[-1].startswith("plan: 2 rows a replicate")
    (data / "a.smtx").write_text("2, 4, 3\n0 2 3\n0 3 2\n")
    assert "expected a.smtx with SHA-256 " in list(validate(run))[-1]
    shutil.move(data, tmp_path / "moved")
    assert list(validate(run))[-1].startswith("plan: not checked")
    data = tmp_path / "moved"
    (data / "a.smtx").write_text("2, 4, 3\n0 2 3\n0 3 1\n")
    assert list(validate(run, data))[-1].startswith("plan: 2 rows a replicate")
    (data / "b.smtx").write_text("2, 4, 3\n0 2 3\n0 3 2\n")
    assert list(validate(run, data))[-1].endswith("measured, found b.smtx beside them")
