"""A run on disk: a directory that is valid at every moment and can be moved.

    suite.yaml        the suite, byte for byte: what reproduces the run
    environment.json  GPU, driver, clocks, library versions, commit, host
    run.json          flags, status (running, finished, interrupted), seconds by phase
    rows.jsonl        a schema line, then one row per line; appended and synced per contest
    worker.log        whatever kernels and compilers printed
    failures.log      the traceback of every case that failed, where there is one
    lock.txt          every installed distribution; written when the run is sealed (bundle.py)
    manifest.json     the SHA-256 of every file, likewise

Published runs hold rows.jsonl.gz. Every JSON file names its schema and version. A row has exactly
the fields of Row, of their types; in rows of an older schema a missing field has its default.

A run directory appears whole, by one rename. One process at a time writes to it: `locked`. No file
names the host, the user or an absolute path: `without_paths`.
"""

import fcntl
import json
import os
import re
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from sparsebench.errors import ResultError
from sparsebench.results import files
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA, Row

ENVIRONMENT_SCHEMA = "sparsebench/environment@1"
RUN_SCHEMA = "sparsebench/run@1"
REPLICATES = 1000  # at most
_PART = r"[^\s/:;,'\"`()\[\]<>|]"  # a character of a file's name
_PATH = re.compile(rf"(?<![\w/])(?:~|\.{{1,2}})?/(?:{_PART}+/)+({_PART}*)")
_ROW = TypeAdapter(Row)


class _Typed(BaseModel):
    """Fields that are read again, where they are there; others are anything."""

    model_config = ConfigDict(strict=True)


class _Flags(_Typed):
    device: str
    data: str | None = None
    timeout_s: float = 0.0
    replicates: Annotated[int, Field(ge=1, le=REPLICATES)]
    only: str
    energy: bool = False
    shard: str = ""


class _Part(_Typed):
    number: int = 0
    host: str = ""


class _Shard(_Typed):
    device: str
    host: int
    manifest_sha256: str


class _State(_Typed):
    suite: str
    status: Literal["running", "finished", "interrupted"]
    flags: _Flags
    started: str = ""
    seconds: float = 0.0
    contests: dict[str, int] = {}
    cases: dict[str, int] = {}
    spent_s: dict[str, float] = {}
    confirms: dict[str, Any] = {}
    reproduces: dict[str, Any] = {}
    part: _Part | None = None
    shards: list[_Shard] = []


class _Device(_Typed):
    name: str | None = None
    uuid: str | None = None


class _Plugin(_Typed):
    distribution: str | None
    version: str | None
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Environment(_Typed):
    gpu: _Device | None = None
    cpu: _Device | None = None
    versions: dict[str, str | None] = {}
    commit: str | None = None
    dirty: bool | None = None
    ceilings: dict[str, Any] = {}
    devices: list[dict[str, Any]] = []
    plugins: dict[Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")], _Plugin] = {}


class _Suite(_Typed):
    title: str
    description: str = ""


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


def create(
    path: Path,
    suite_text: str,
    environment: Mapping[str, Any],
    state: Mapping[str, Any],
) -> None:
    """Make a new run directory, whole or not at all; ResultError where one is in its place."""
    with made(path) as fresh:
        fill(fresh, suite_text, environment, state)


def fill(
    fresh: Path,
    suite_text: str,
    environment: Mapping[str, Any],
    state: Mapping[str, Any],
    rows: Iterable[Row] = (),
) -> None:
    """Write the files of a run into an empty directory."""
    (fresh / "suite.yaml").write_text(suite_text)
    write_json(fresh / "environment.json", {"schema": ENVIRONMENT_SCHEMA, **environment})
    keep(fresh, rows)
    set_state(fresh, state)


@contextmanager
def made(path: Path) -> Iterator[Path]:
    """Give a hidden directory, which gets its name at the end; ResultError where one has it.

    An empty directory is taken. A process that is killed meanwhile leaves a hidden one beside it.
    """
    said = f"{path}: expected a new directory, found one; --resume continues a run"
    if not is_new(path):
        raise ResultError(said)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ResultError(f"{path}: expected a directory to write, found {error}") from error
    try:
        fresh.chmod(0o755)  # mkdtemp's are the owner's alone
        yield fresh
        fresh.rename(path)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, OSError):
            taken = path.exists() and not is_new(path)
            found = said if taken else f"{path}: expected a directory to write, found {error}"
            raise ResultError(found) from error
        raise


def is_new(path: Path) -> bool:
    """Say whether a run can be made here: nothing is, or an empty directory."""
    try:
        return not path.is_symlink() and (not path.exists() or not any(path.iterdir()))
    except OSError:
        return False


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other processes from writing to a run; ResultError where one does.

    The lock is on suite.yaml, which is never replaced. It ends with the process, however that ends.
    """
    file = path / "suite.yaml"
    try:
        held = file.open("r+b")
    except OSError as error:
        raise ResultError(f"{file}: expected a file to write, found {error}") from error
    with held:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            found = "another one that writes to it"
            raise ResultError(f"{path}: expected no other process, found {found}") from error
        yield


def without_paths(said: str) -> str:
    """Return a text without paths, of which the file's name stays, and without the host's name."""
    hidden = _PATH.sub(lambda path: path[1] if "." in path[1] else "PATH", said)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", hidden) if len(host) > 3 else hidden


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add one contest's rows in one write, and wait until the disk has them."""
    with (path / "rows.jsonl").open("a") as file:
        file.write("".join(map(_line, rows)))
        file.flush()
        os.fsync(file.fileno())


def set_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace run.json atomically: a reader sees the old file or the new one."""
    write_json(path / "run.json", {"schema": RUN_SCHEMA, **state})


def keep(path: Path, rows: Iterable[Row]) -> None:
    """Write rows.jsonl with these rows alone: none at first, or those that a resumed run keeps."""
    first = json.dumps({"schema": ROWS_SCHEMA}) + "\n"
    _replace(path / "rows.jsonl", first + "".join(map(_line, rows)))


def read(path: Path | str) -> Run:
    """Read a run directory; a torn last line is dropped, anything else that is wrong is said."""
    path = Path(path)
    if not path.is_dir():
        raise ResultError(f"{path}: expected the directory of a run, found none")
    suite_text = files.text(path / "suite.yaml", files.YAML_BYTES)
    suite = files.from_yaml(str(path / "suite.yaml"), suite_text)
    found = rows(path)
    return Run(
        path=path,
        suite=_typed(path / "suite.yaml", suite, _Suite),
        suite_text=suite_text,
        environment=_read_json(path / "environment.json", ENVIRONMENT_SCHEMA, _Environment),
        state=_read_json(path / "run.json", RUN_SCHEMA, _State),
        rows=[row for row in found if not row.reference],
        reference=[row for row in found if row.reference],
    )


def rows(path: Path) -> list[Row]:
    """Return all rows on disk, reference rows included, without an incomplete last line."""
    plain, zipped = path / "rows.jsonl", path / "rows.jsonl.gz"
    if zipped.exists() and not plain.exists():
        plain = zipped
        text = files.decoded(zipped, files.unzipped(zipped, files.ROWS_BYTES))
    else:
        text = files.text(plain, files.ROWS_BYTES)
    first, *lines = text[: text.rfind("\n") + 1].split("\n")[:-1] or [""]
    current = json.dumps({"schema": ROWS_SCHEMA})
    if first not in (current, *(json.dumps({"schema": older}) for older in OLDER_ROWS)):
        found = first[:80] or "an empty file"
        raise ResultError(f"{plain}: expected a first line {current}, found {found}")
    whole = first == current
    read = [_row(plain, number, line, whole) for number, line in enumerate(lines, start=2)]
    _each_once(plain, read)
    return read


def _each_once(file: Path, rows: Iterable[Row]) -> None:
    """Refuse a case that is there twice in one process: two runs wrote into one directory."""
    seen: dict[tuple[Any, ...], int] = {}
    for number, row in enumerate(rows, start=2):
        key = row.reference, row.replicate, row.case.id, row.scope, row.cache
        if (before := seen.setdefault(key, number)) != number:
            said = f"expected one row of {row.case.contender.label} in replicate {row.replicate}"
            raise ResultError(f"{file}: line {number}: {said}, found another in line {before}")


def _row(file: Path, number: int, line: str, whole: bool) -> Row:
    try:
        data = json.loads(line)
        missing = [f.name for f in fields(Row) if f.name not in data] if whole else []
        unknown = sorted(data.keys() - {f.name for f in fields(Row)})
        if not missing and not unknown:
            row = Row.from_json(data)
            _ROW.validate_json(line, strict=True)
            return row
        found = f"no {missing[0]}" if missing else f"an unknown field {unknown[0]}"
        expected = "a row with the fields of Row"
    except ValidationError as error:
        expected, found = "a row", _first(error)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        expected, found = "a row", f"{type(error).__name__}: {error}"
    raise ResultError(f"{file}: line {number}: expected {expected}, found {found}")


def _line(row: Row) -> str:
    """Write a row; what a kernel said may hold paths of this machine."""
    choice = json.loads(without_paths(json.dumps(row.choice)))
    row = replace(row, detail=without_paths(row.detail), choice=choice)
    return json.dumps(asdict(row), separators=(",", ":")) + "\n"


def _read_json(file: Path, schema: str, model: type[_Typed]) -> dict[str, Any]:
    data = files.from_json(file)
    if data.get("schema") != schema:
        raise ResultError(f"{file}: expected schema {schema}, found {str(data.get('schema'))[:80]}")
    return _typed(file, data, model)


def _typed(file: Path, data: Any, model: type[_Typed]) -> dict[str, Any]:
    """Return the data as it is, once the fields that are read again have their types."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        raise ResultError(f"{file}: expected the fields of a run, found {_first(error)}") from error
    checked: dict[str, Any] = data
    return checked


def _first(error: ValidationError) -> str:
    """Name the first thing that is wrong, and its place."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"]) or "top"
    return f"{place}: {first['msg']}; {str(first['input'])[:60]!r}"


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file by one rename."""
    _replace(file, json.dumps(data, indent=1) + "\n")


def _replace(file: Path, text: str) -> None:
    """Replace a file by one rename, once the disk has the new one; a full disk leaves the old."""
    fresh = file.with_name(file.name + ".new")
    try:
        with fresh.open("w") as opened:
            opened.write(text)
            opened.flush()
            os.fsync(opened.fileno())
        fresh.replace(file)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
