"""A run on disk: a directory that is valid at every moment and can be moved.

    suite.yaml        the suite, byte for byte, from which the run can be reproduced
    environment.json  GPU, driver, clocks, library versions, commit, host
    run.json          flags, status (running, finished, interrupted), seconds by phase; `ended_by`
                      if an interrupted run has what its time budget allowed
    rows.jsonl        a schema line, then one row per line; appended and synced per contest
    worker.log        output of kernels and compilers
    failures.log      traceback of every failed case, if any failed
    lock.txt          every installed distribution; written when the run is sealed (bundle.py)
    manifest.json     SHA-256 of every file; written when the run is sealed

Published runs hold rows.jsonl.gz. Every JSON file names its schema and version. A row has exactly
the fields of Row, with their types; in rows of an older schema a missing field has its default.

A run directory appears complete, by one rename. Only one process at a time writes to it
(`lock_run`). No file names the host, the user or an absolute path (`without_paths`).
"""

import fcntl
import json
import re
import shutil
import socket
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from tempfile import mkdtemp
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from sparsebench._writing import append_to, write_file
from sparsebench.errors import LeftOut, ResultError
from sparsebench.results import files
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA, Case, Problem, Row
from sparsebench.results.run import bundle

ENVIRONMENT_SCHEMA = "sparsebench/environment@1"
RUN_SCHEMA = "sparsebench/run@1"
ROW_BYTES = 2**20  # the longest published row has 49 KB
REPLICATES = 1000  # most processes of a run
BUDGET = "budget"  # ended an interrupted run, in place of a signal or a crash
CASE = '{"case":'  # the beginning of a row
_PART = r"[^\s/:;,'\"`()\[\]<>|]"  # a character of a file's name
_PATH = re.compile(rf"(?<![\w/])(?:~|\.{{1,2}})?/(?:{_PART}+/)+({_PART}*)")
_ROW = TypeAdapter(Row)

Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Finding = dict[Literal["level", "check", "found", "means", "do"], str]


class _Typed(BaseModel):
    """The fields that later code reads, checked if present; all other fields are free."""

    model_config = ConfigDict(strict=True)


class _Flags(_Typed):
    device: str
    data: str | None = None
    timeout_s: Seconds = 0.0
    replicates: Annotated[int, Field(ge=1, le=REPLICATES)]
    only: str
    energy: bool = False
    shard: str = ""
    unpruned: bool = False


class _Part(_Typed):
    number: Count = 0
    host: str = ""


class _Shard(_Typed):
    device: str
    host: Count
    manifest_sha256: str


class _State(_Typed):
    suite: str
    status: Literal["running", "finished", "interrupted"]
    flags: _Flags
    started: str = ""
    seconds: Seconds = 0.0
    wall_s: Seconds = 0.0
    contests: dict[str, Count] = {}
    ended_by: Literal["budget"] | None = None
    cases: dict[str, Count] = {}
    spent_s: dict[str, Seconds] = {}
    confirms: dict[str, Any] = {}
    reproduces: dict[str, Any] = {}
    part: _Part | None = None
    shards: list[_Shard] = []
    fitness: dict[Literal["before", "during"], list[Annotated[Finding, Field(min_length=5)]]] = {}


class _Device(_Typed):
    name: str | None = None
    uuid: str | None = None
    sm_clock_max_mhz: Rate | None = None


class _Plugin(_Typed):
    distribution: str | None
    version: str | None
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class _Ceilings(_Typed, extra="forbid"):
    read_gb_per_s: Rate
    copy_gb_per_s: Rate
    write_gb_per_s: Rate | None = None
    matrix_tflops: dict[str, Rate]
    launch_us: Rate
    l2_bytes: Count
    by: dict[str, str] = {}
    age_s: Seconds = 0.0


class _Environment(_Typed):
    gpu: _Device | None = None
    cpu: _Device | None = None
    versions: dict[str, str | None] = {}
    commit: str | None = None
    dirty: bool | None = None
    ceilings: Annotated[_Ceilings | None, BeforeValidator(lambda each: each or None)] = None
    devices: list[dict[str, Any]] = []
    plugins: dict[Annotated[str, Field(pattern=r"^\w+(\.\w+)*$")], _Plugin] = {}


class _Suite(_Typed):
    title: files.Title
    description: files.Description = ""


@dataclass(frozen=True)
class StoredRun:
    """A run as read from disk; `reference` are the rows of its noise-floor contests."""

    path: Path
    suite: dict[str, Any]
    suite_text: str
    environment: dict[str, Any]
    state: dict[str, Any]
    rows: list[Row]
    reference: list[Row] = field(default_factory=list)


def create(
    path: Path, suite_text: str, environment: Mapping[str, Any], state: Mapping[str, Any]
) -> None:
    """Make a new run directory, complete or not at all; raises ResultError if one exists."""
    with new_directory(path) as fresh:
        write_run(fresh, suite_text, environment, state)


def write_run(
    fresh: Path,
    suite_text: str,
    environment: Mapping[str, Any],
    state: Mapping[str, Any],
    rows: Iterable[Row] = (),
) -> None:
    """Write the files of a run into an empty directory."""
    write_file(fresh / "suite.yaml", suite_text)
    write_json(fresh / "environment.json", {"schema": ENVIRONMENT_SCHEMA, **environment})
    replace_rows(fresh, rows)
    set_state(fresh, state)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """Yield a hidden directory and rename it to `path` at the end; raises ResultError if it exists.

    An empty directory at `path` is replaced. A killed process leaves a hidden directory behind.
    """
    exists = f"{path}: expected a new directory, found one; --resume continues a run"
    if not is_new(path):
        raise ResultError(exists)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    except OSError as error:
        raise ResultError(f"{path}: expected a directory to write, found {error}") from error
    try:
        fresh.chmod(0o755)  # mkdtemp gives access to the owner only
        yield fresh
        fresh.rename(path)
    except BaseException as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if isinstance(error, OSError):
            taken = path.exists() and not is_new(path)
            message = exists if taken else f"{path}: expected a directory to write, found {error}"
            raise ResultError(message) from error
        raise


def is_new(path: Path) -> bool:
    """Return whether a run can be created here: the path is free or an empty directory."""
    try:
        return not path.is_symlink() and (not path.exists() or not any(path.iterdir()))
    except OSError:
        return False


@contextmanager
def lock_run(path: Path) -> Iterator[None]:
    """Keep other processes from writing to a run; raises ResultError if one holds the lock.

    The lock is on suite.yaml, which is never replaced. It ends with the process, even if killed.
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
            message = f"{path}: expected no other process, found one that writes to it"
            raise ResultError(message) from error
        yield


def without_paths(text: str) -> str:
    """Return a text in which file names replace paths, and HOST replaces the host's name."""
    hidden = _PATH.sub(lambda path: path[1] if "." in path[1] else "PATH", text)
    host = socket.gethostname()
    return re.sub(rf"\b{re.escape(host)}\b", "HOST", hidden) if len(host) > 3 else hidden


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add the rows of one contest in one write, and wait until they are on disk."""
    append_to(path / "rows.jsonl", "".join(map(_line, rows)), sync=True)


def set_state(path: Path, state: Mapping[str, Any]) -> None:
    """Replace run.json atomically: a reader sees the old file or the new one."""
    write_json(path / "run.json", {"schema": RUN_SCHEMA, **state})


def replace_rows(path: Path, rows: Iterable[Row]) -> None:
    """Replace rows.jsonl: with no rows at the start, or with those that a resumed run keeps."""
    first = json.dumps({"schema": ROWS_SCHEMA}) + "\n"
    write_file(path / "rows.jsonl", first + "".join(map(_line, rows)))


def runs_in(folder: Path) -> list[Path]:
    """Return the run directories in a folder, sorted by name."""
    return sorted(file.parent for file in folder.glob("*/run.json"))


@contextmanager
def neighbour() -> Iterator[None]:
    """Leave out, with a warning, a run that was found beside others and cannot be read."""
    try:
        yield
    except ResultError as error:
        warnings.warn(f"left out: {error}", LeftOut, stacklevel=3)


def facts(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the environment and the state of a run without its rows. Raises ResultError."""
    environment = _read_json(path / "environment.json", ENVIRONMENT_SCHEMA, _Environment)
    return environment, _read_json(path / "run.json", RUN_SCHEMA, _State)


def read(path: Path | str, needed: Callable[[Problem], bool] | None = None) -> StoredRun:
    """Read a run directory and drop a torn last row; raises ResultError for anything else.

    With `needed`, other problems are left out, but for those with A/A pairs, which the noise of the
    run needs; without any needed one there are no rows.
    """
    path = Path(path)
    bundle.require_directory(path)
    suite_text = files.text(path / "suite.yaml", files.YAML_BYTES)
    suite = files.from_yaml(str(path / "suite.yaml"), suite_text)
    environment, state = facts(path)
    if "sim" in environment:
        expected = "expected times of a device, found those of a simulated GPU"
        raise ResultError(f"{path}: {expected}, which 0.4 no longer reads")
    every_row = rows(path, needed)
    return StoredRun(
        path=path,
        suite=_check_types(path / "suite.yaml", suite, _Suite),
        suite_text=suite_text,
        environment=environment,
        state=state,
        rows=[row for row in every_row if not row.reference],
        reference=[row for row in every_row if row.reference],
    )


def rows(path: Path, needed: Callable[[Problem], bool] | None = None) -> list[Row]:
    """Return all rows on disk, or those that `read` needs, without a torn last line."""
    file, (schema, lines, _) = path / bundle.ROWS, bundle.row_lines(path)
    names = frozenset(f.name for f in fields(Row)) - OLDER_ROWS.get(schema, frozenset())
    heads = [line.partition(',"status":')[0] if line.startswith(CASE) else "" for line in lines]
    cases = _cases(heads)
    selection = {head for head, case in cases.items() if not needed or needed(case.problem)}
    if not selection and cases.keys() >= {*heads}:
        return []
    paired = {case.problem.id for case in cases.values() if case.contender.twin}
    selection |= {head for head, case in cases.items() if case.problem.id in paired}
    read = {
        number: _row(f"{file}: line {number}: ", line, names, cases.get(head))
        for number, (line, head) in enumerate(zip(lines, heads, strict=True), start=2)
        if head in selection or head not in cases
    }
    _each_once(file, read)
    return [*read.values()]


def _cases(heads: Iterable[str]) -> dict[str, Case]:
    """Return the case at the beginning of each row; a row that begins otherwise is read whole."""
    cases = {}
    for head in {*heads}:
        with suppress(ValueError, KeyError, TypeError, AttributeError, RecursionError):
            cases[head] = Case.from_json(json.loads(head[len(CASE) :]))
    return cases


def _each_once(file: Path, rows: Mapping[int, Row]) -> None:
    """Raise if one process has two rows of a case: then two runs wrote into one directory."""
    seen: dict[tuple[Any, ...], int] = {}
    for number, row in rows.items():
        key = row.reference, row.replicate, row.case.id, row.scope, row.cache
        if (before := seen.setdefault(key, number)) != number:
            expected = f"one row of {row.case.contender.label} in replicate {row.replicate}"
            where = f"{file}: line {number}"
            raise ResultError(f"{where}: expected {expected}, found another in line {before}")


def unreadable(row: Row) -> str:
    """Return "" or why no reader would take the row as it is written."""
    try:
        _row("", _line(row), frozenset())
    except (ResultError, RecursionError, TypeError, ValueError) as error:
        return str(error)[:400]
    return ""


def _row(place: str, line: str, needed: frozenset[str], case: Case | None = None) -> Row:
    where = f"{place}expected a row"
    try:
        if len(line) > ROW_BYTES:
            raise ValueError(f"more than {ROW_BYTES} characters (ROW_BYTES)")
        data = files.parse_json(line)
        if absent := sorted(needed - data.keys()):
            raise ValueError(f"no {absent[0]}")
        if unknown := sorted(data.keys() - {f.name for f in fields(Row)}):
            raise ValueError(f"an unknown field {unknown[0]}")
        row = Row.from_json(data, case)
        _ROW.validate_json(line, strict=True)
        return row
    except ValidationError as error:
        raise ResultError(f"{where}; {files.first_error(error)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        kind = "" if type(error) is ValueError else f"{type(error).__name__}: "
        raise ResultError(f"{where}, found {kind}{error}") from error


def _line(row: Row) -> str:
    """Write a row without the paths of this machine that a kernel's messages may hold."""
    choice = json.loads(without_paths(json.dumps(row.choice)))
    row = replace(row, detail=without_paths(row.detail), choice=choice)
    return json.dumps(_fields(row), default=_fields, separators=(",", ":")) + "\n"


def _fields(data: Any) -> dict[str, Any]:
    """Return the fields of a dataclass. asdict would also copy every sample, one by one."""
    return {f.name: getattr(data, f.name) for f in fields(data)}


def _read_json(file: Path, schema: str, model: type[_Typed]) -> dict[str, Any]:
    return _check_types(file, files.from_json(file, schema), model)


def _check_types(file: Path, data: dict[str, Any], model: type[_Typed]) -> dict[str, Any]:
    """Return the data unchanged after checking the types of the fields that are read again."""
    try:
        model.model_validate(data)
    except ValidationError as error:
        first = files.first_error(error)
        raise ResultError(f"{file}: expected the fields of a run; {first}") from error
    return data


def write_json(file: Path, data: Any) -> None:
    """Replace a JSON file by one rename."""
    write_file(file, json.dumps(data, indent=1) + "\n")
