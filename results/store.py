"""A run on disk: a directory that is valid at every moment and can be moved.

    suite.yaml        the suite, byte for byte: what reproduces the run
    environment.json  GPU, driver, clocks, library versions, commit, host
    run.json          flags, status (running, finished, interrupted), seconds by phase
    rows.jsonl        a schema line, then one row per line; appended and synced per contest
    worker.log        whatever kernels and compilers printed
    lock.txt          every installed distribution; written when the run is sealed (bundle.py)
    manifest.json     the SHA-256 of every file, likewise

Published runs hold rows.jsonl.gz. Every JSON file names its schema and version. A row has exactly
the fields of Row; in rows of an older schema a missing field has its default.
"""

import gzip
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from sparsebench.errors import ResultError
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA, Row

ENVIRONMENT_SCHEMA = "sparsebench/environment@1"
RUN_SCHEMA = "sparsebench/run@1"


@dataclass(frozen=True)
class Run:
    """A run as read from disk.

    `rows` are of the suite, `reference` of the noise-floor contests that every run has.
    """

    path: Path
    suite: dict[str, Any]
    suite_text: str
    environment: dict[str, Any]
    state: dict[str, Any]
    rows: list[Row]
    reference: list[Row] = field(default_factory=list)


def create(path: Path, suite_text: str, environment: Mapping[str, Any]) -> None:
    """Make a new run directory; ResultError if it exists."""
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
    """Replace run.json atomically: a reader sees the old file or the new one."""
    _write_json(path / "run.json", {"schema": RUN_SCHEMA, **state})


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Rewrite rows.jsonl with these rows alone, before a run is resumed."""
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
    found = rows(path)
    return Run(
        path=path,
        suite=yaml.safe_load(suite_text),
        suite_text=suite_text,
        environment=_read_json(path / "environment.json", ENVIRONMENT_SCHEMA),
        state=_read_json(path / "run.json", RUN_SCHEMA),
        rows=[row for row in found if not row.reference],
        reference=[row for row in found if row.reference],
    )


def rows(path: Path) -> list[Row]:
    """Return all rows on disk, reference rows included, without an incomplete last line."""
    plain, zipped = path / "rows.jsonl", path / "rows.jsonl.gz"
    if zipped.exists() and not plain.exists():
        with gzip.open(zipped, "rt") as file:
            text = file.read()
        plain = zipped
    else:
        text = _text(plain)
    first, *lines = text[: text.rfind("\n") + 1].splitlines() or [""]
    current = json.dumps({"schema": ROWS_SCHEMA})
    if first not in (current, *(json.dumps({"schema": older}) for older in OLDER_ROWS)):
        found = first[:80] or "an empty file"
        raise ResultError(f"{plain}: expected a first line {current}, found {found}")
    whole = first == current
    return [_row(plain, number, line, whole) for number, line in enumerate(lines, start=2)]


def _row(file: Path, number: int, line: str, whole: bool) -> Row:
    try:
        data = json.loads(line)
        missing = [f.name for f in fields(Row) if f.name not in data] if whole else []
        unknown = sorted(data.keys() - {f.name for f in fields(Row)})
        if not missing and not unknown:
            return Row.from_json(data)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found = f"{type(error).__name__}: {error}"
        raise ResultError(f"{file}: line {number}: expected a row, found {found}") from error
    found = f"no {missing[0]}" if missing else f"an unknown field {unknown[0]}"
    raise ResultError(
        f"{file}: line {number}: expected a row with the fields of Row, found {found}"
    )


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
