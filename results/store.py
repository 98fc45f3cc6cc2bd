"""A run on disk: a directory that is valid at every moment, and that can be moved.

    suite.yaml        the suite, byte for byte: a run is reproduced by its own copy
    environment.json  GPU, driver, clocks, library versions, commit, host
    run.json          flags in force, status (running, finished, interrupted), where the time went
    rows.jsonl        a schema line, then a row a line, appended contest by contest and synced
    worker.log        whatever kernels and compilers printed

Published runs hold rows.jsonl.gz. Every file says its schema and version.
"""

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from sparsebench.results._errors import ResultError
from sparsebench.results.record import ROWS_SCHEMA, Row

ENVIRONMENT_SCHEMA = "sparsebench/environment@1"
RUN_SCHEMA = "sparsebench/run@1"


@dataclass(frozen=True)
class Run:
    """A run as read from disk."""

    path: Path
    suite: dict[str, Any]
    suite_text: str
    environment: dict[str, Any]
    state: dict[str, Any]
    rows: list[Row]


def create(path: Path, suite_text: str, environment: Mapping[str, Any]) -> None:
    """Make a new run directory; refuse one that is there."""
    if path.exists():
        raise ResultError(f"{path}: expected a new directory, found one; --resume continues a run")
    path.mkdir(parents=True)
    (path / "suite.yaml").write_text(suite_text)
    _write_json(path / "environment.json", {"schema": ENVIRONMENT_SCHEMA, **environment})
    (path / "rows.jsonl").write_text(json.dumps({"schema": ROWS_SCHEMA}) + "\n")


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add one contest's rows in one write, and wait until the disk has them."""
    with (path / "rows.jsonl").open("a") as file:
        file.write("".join(json.dumps(asdict(row), separators=(",", ":")) + "\n" for row in rows))
        file.flush()
        os.fsync(file.fileno())


def set_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace run.json at once, so that a reader sees the old or the new."""
    _write_json(path / "run.json", {"schema": RUN_SCHEMA, **state})


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Rewrite rows.jsonl with these rows alone: what a resumed run starts from."""
    whole = path / "rows.jsonl"
    fresh = path / "rows.jsonl.new"
    fresh.write_text(json.dumps({"schema": ROWS_SCHEMA}) + "\n")
    with fresh.open("a") as file:
        for row in rows:
            file.write(json.dumps(asdict(row), separators=(",", ":")) + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(whole)


def read(path: Path | str) -> Run:
    """Read a run directory; a torn last line is dropped, anything else that is wrong is said."""
    path = Path(path)
    if not path.is_dir():
        raise ResultError(f"{path}: expected the directory of a run, found none")
    suite_text = _text(path / "suite.yaml")
    return Run(
        path=path,
        suite=yaml.safe_load(suite_text),
        suite_text=suite_text,
        environment=_read_json(path / "environment.json", ENVIRONMENT_SCHEMA),
        state=_read_json(path / "run.json", RUN_SCHEMA),
        rows=rows(path),
    )


def rows(path: Path) -> list[Row]:
    """Return the rows that are on disk, whole ones only."""
    plain, zipped = path / "rows.jsonl", path / "rows.jsonl.gz"
    if zipped.exists() and not plain.exists():
        with gzip.open(zipped, "rt") as file:
            text = file.read()
        plain = zipped
    else:
        text = _text(plain)
    complete = text[: text.rfind("\n") + 1].splitlines()
    if not complete or json.loads(complete[0]).get("schema") != ROWS_SCHEMA:
        found = complete[0][:80] if complete else "an empty file"
        raise ResultError(
            f'{plain}: expected a first line {{"schema": "{ROWS_SCHEMA}"}}, found {found}'
        )
    return [_row(plain, number, line) for number, line in enumerate(complete[1:], start=2)]


def _row(file: Path, number: int, line: str) -> Row:
    try:
        return Row.from_json(json.loads(line))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ResultError(f"{file}: line {number}: expected a row, found {error}") from error


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ResultError(f"{file}: expected a readable text file, found {error}") from error


def _read_json(file: Path, schema: str) -> dict[str, Any]:
    try:
        data: dict[str, Any] = json.loads(_text(file))
    except json.JSONDecodeError as error:
        raise ResultError(f"{file}: expected JSON, found {error}") from error
    if data.get("schema") != schema:
        raise ResultError(f"{file}: expected schema {schema}, found {data.get('schema')}")
    return data


def _write_json(file: Path, data: Mapping[str, Any]) -> None:
    fresh = file.with_name(file.name + ".new")
    fresh.write_text(json.dumps(data, indent=1) + "\n")
    fresh.replace(file)
