"""Read untrusted files within limits; every problem is an error of one line.

    not a regular file (a FIFO, a device)   refused: reading it may never end
    too many bytes, also when unzipped      refused before they are in memory
    too many values in YAML                 refused: ten aliases can expand to a billion values
    a repeated key in a YAML mapping        refused: one of the two would be ignored silently
    a number in base 8 or 60 in YAML        refused: 0100 would be 64 without a word
    an integer beyond 64 bits               refused: no column of a table can hold it
    a long title or description             refused: pages and terminals show it whole

Each function takes the error class to raise: SuiteError or ResultError.
"""

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from sparsebench._discovery import did_you_mean
from sparsebench.errors import ResultError, SparsebenchError

YAML_BYTES = 2**18  # the largest packaged suite has 4 KiB
YAML_DEPTH = 32
YAML_NODES = 100_000
OTHER_BASE = re.compile(r"[-+]?0[0-9_]+|[-+]?[0-9_]+(:[0-9_.]+)+")
LARGEST = 2**63 - 1  # an integer; the smallest is -LARGEST - 1
LARGEST_LENGTH = len(str(LARGEST))
INTEGER_LENGTH = 100  # characters; int() takes quadratic time
JSON_BYTES = 2**24  # run.json, environment.json, manifest.json
UNKNOWN_KEY = "extra_forbidden", "unexpected_keyword_argument"  # of a model, of a dataclass
ROWS_BYTES = 2**27  # unzipped; the largest published run has 6 MB

Title = Annotated[str, Field(max_length=200)]  # the longest published one has 98 characters
Description = Annotated[str, Field(max_length=4000)]  # the longest has 729

Model = TypeVar("Model")
ErrorType = type[SparsebenchError]
_Base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml is 30 times as fast


def content(file: Path, most: int, error_type: ErrorType = ResultError) -> bytes:
    """Return the bytes of a regular file; raises if there are more than `most`."""
    try:
        if file.exists() and not file.is_file():
            raise error_type(f"{file}: expected a readable file, found no regular file")
        with file.open("rb") as opened:
            data = opened.read(most + 1)
    except (OSError, ValueError) as error:
        if isinstance(error, SparsebenchError):
            raise
        raise error_type(f"{file}: expected a readable file, found {fault(error)}") from error
    return _within(file, data, most, error_type)


def fault(error: Exception) -> str:
    """Return what was found instead of a file, in one line: `none`, or the error."""
    return "none" if isinstance(error, FileNotFoundError) else " ".join(str(error).split())


def unzip(file: Path, most: int) -> bytes:
    """Return the unzipped bytes of a gzip file; uses at most `most` bytes of memory."""
    content(file, most)
    try:
        with gzip.open(file) as opened:
            data = opened.read(most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise ResultError(f"{file}: expected a readable file, found {error}") from error
    return _within(file, data, most, ResultError)


def text(file: Path, most: int, error_type: ErrorType = ResultError) -> str:
    """Return the text of a regular file in UTF-8."""
    return decode_utf8(file, content(file, most, error_type), error_type)


def decode_utf8(file: Path, data: bytes, error_type: ErrorType = ResultError) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise error_type(f"{file}: expected a readable text file, found {error}") from error


def from_json(file: Path, schema: str = "") -> dict[str, Any]:
    """Return the JSON object in a file; with a schema, it must be one of it."""
    return _object(file, text(file, JSON_BYTES), schema)


def _object(file: Path, written: str, schema: str = "") -> dict[str, Any]:
    """Return the JSON object in the text of a file, as `from_json` does."""
    try:
        data = parse_json(written)
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{file}: expected JSON, found {error}") from error
    if not isinstance(data, dict):
        raise ResultError(f"{file}: expected a JSON object, found {type(data).__name__}")
    if schema and data.get("schema") != schema:
        raise ResultError(
            f"{file}: expected schema {schema}, found {str(data.get('schema', 'none'))[:80]}"
        )
    return data


def parse_json(written: str) -> Any:
    """Return the data of a JSON text.

    Raises ValueError, also for an object with a key twice and for an integer beyond 64 bits.
    """
    beyond: list[str] = []

    def whole(text: str) -> int | None:
        if len(text) < LARGEST_LENGTH:  # a row has 40 integers, nearly all of a few digits
            return int(text)
        if (number := _whole(text)) is None:
            beyond.append(text)
        return number

    data = json.loads(written, object_pairs_hook=_each_once, parse_int=whole)
    if beyond:
        place = _place_of(beyond[0], json.loads(written, parse_int=_Digits)) or "top"
        raise ValueError(f"{place}, an integer beyond 64 bits: {shortened(beyond[0])}")
    return data


def _whole(text: str) -> int | None:
    """Return an integer; None if it is beyond 64 bits."""
    if len(text) > INTEGER_LENGTH:
        return None
    number = int(text.replace("_", ""), 0)
    return number if -LARGEST - 1 <= number <= LARGEST else None


class _Digits(str):
    """An integer as it is written, in place of its value."""


def _place_of(digits: str, data: Any) -> str:
    """Return the place of an integer in a document of `_Digits`: case.problem.fields.m, or ""."""
    parts = data.items() if isinstance(data, dict) else enumerate(data)
    for name, part in parts:
        if isinstance(part, _Digits) and part == digits:
            return str(name)
        if isinstance(part, dict | list) and (inside := _place_of(digits, part)):
            return f"{name}.{inside}"
    return ""


def shortened(text: str, most: int = 40) -> str:
    """Return the first characters of a text, which may be of any length."""
    return text if len(text) <= most else f"{text[:most]}..."


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        twice = next(name for name, count in Counter(n for n, _ in pairs).items() if count > 1)
        raise ValueError(f"expected each key once, found {twice[:40]!r} twice")
    return data


def read_model(file: Path, model: type[Model], schema: str) -> Model:
    """Return a JSON file as a model; the error names the schema and the first invalid field."""
    written = text(file, JSON_BYTES)
    _object(file, written)  # refuses a key that is written twice, and an integer beyond 64 bits
    try:
        return TypeAdapter(model).validate_json(written)
    except ValidationError as error:
        raise ResultError(f"{file}: expected {schema}; {first_error(error)}") from error


def first_error(
    error: ValidationError, keys: Collection[str] = (), root: yaml.Node | None = None
) -> str:
    """Describe the first error of pydantic: its place, what was expected and what was found.

    An unknown key comes before a missing one, because it may be that key misspelt. `keys` are all
    that a document may have. With the `root` of a YAML document, the text begins with the line.
    """
    first = min(error.errors(), key=lambda fault: fault["type"] not in UNKNOWN_KEY)
    path = [part for part in first["loc"] if not _is_branch(part)]
    line = f"{line_of(root, path)}: " if root else ""
    place = line + (".".join(map(str, path)) or "top")
    if first["type"] in UNKNOWN_KEY:
        return f"{place}: unknown key{did_you_mean(str(path[-1]), keys)}"
    if first["type"] == "missing":
        return f"{place}: expected a value, found none"
    if first["type"] == "json_invalid":
        return str(first["msg"])
    empty = first["type"] == "too_short" and not first["input"]
    message = re.sub("^(Input should be|String should have|Value error,) ", "", first["msg"])
    expected = "at least one value" if empty else message
    actual = "" if first["type"] == "value_error" else f"; found {repr(first['input'])[:60]}"
    return f"{place}: expected {expected}{actual}"


def _is_branch(part: str | int) -> bool:
    """Return whether pydantic added this part to a place to name a type of a union."""
    name = str(part)
    return name in ("str", "int", "float", "bool") or "[" in name or name[:12] == "constrained-"


def line_of(node: yaml.Node, path: Sequence[str | int]) -> int:
    """Return the line of a part of a document; if it is missing, of its nearest parent."""
    line = node.start_mark.line
    for part in path:
        parts: Mapping[Any, tuple[int, yaml.Node]] = {}
        if isinstance(node, yaml.MappingNode):
            parts = {key.value: (key.start_mark.line, value) for key, value in node.value}
        elif isinstance(node, yaml.SequenceNode):
            parts = {i: (item.start_mark.line, item) for i, item in enumerate(node.value)}
        if part not in parts:
            break
        line, node = parts[part]
    return line + 1


def from_yaml(where: str, written: str, error_type: ErrorType = ResultError) -> Any:
    """Return the data of a YAML text; error messages begin with `where`."""
    size = len(written.encode(errors="replace"))
    if size > YAML_BYTES:
        raise error_type(f"{where}: expected at most {YAML_BYTES} bytes (YAML_BYTES), found {size}")
    try:
        _require_small(written)
        return yaml.load(written, _Loader)
    except SparsebenchError as error:
        raise error_type(f"{where}: {error}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" in line {mark.line + 1}" if mark else ""
        raise error_type(
            f"{where}: expected YAML, found an error{line}: {error.problem}"
        ) from error
    except Exception as error:  # SafeLoader's constructors raise a dozen types on bad scalars
        actual = " ".join(str(error).split())
        raise error_type(f"{where}: expected YAML, found {actual}") from error


def utf8(name: str) -> bool:
    """Return whether a text can be encoded; file names may hold bytes that are not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def _within(file: Path, data: bytes, most: int, error_type: ErrorType) -> bytes:
    if len(data) > most:
        names = {YAML_BYTES: "YAML_BYTES", JSON_BYTES: "JSON_BYTES", ROWS_BYTES: "ROWS_BYTES"}
        limit = f"{most} bytes ({names.get(most, 'the limit of such a file')})"
        raise error_type(f"{file}: expected at most {limit}, found more")
    return data


def _require_small(written: str) -> None:
    """Count nodes, with aliases expanded, and levels, before any data is built."""
    sizes: dict[str, int] = {}
    open_: list[tuple[str | None, int]] = [(None, 0)]  # anchor and nodes of each open collection
    for event in yaml.parse(written, _Base):
        line = event.start_mark.line + 1 if event.start_mark else 0
        anchor, nodes = getattr(event, "anchor", None), 0
        if isinstance(event, yaml.CollectionStartEvent):
            open_.append((anchor, 1))
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, nodes = open_.pop()
        elif isinstance(event, yaml.ScalarEvent):
            nodes = 1
        elif isinstance(event, yaml.AliasEvent):
            if anchor not in sizes:
                raise SparsebenchError(f"line {line}: expected an anchor before *{anchor}")
            nodes, anchor = sizes[anchor], None
        if anchor and nodes:
            sizes[anchor] = nodes
        open_[-1] = open_[-1][0], open_[-1][1] + nodes
        _at_most(line, "levels", len(open_) - 1, "YAML_DEPTH", YAML_DEPTH)
        _at_most(line, "values", open_[-1][1], "YAML_NODES", YAML_NODES)


def _at_most(line: int, what: str, actual: int, name: str, most: int) -> None:
    if actual > most:
        raise SparsebenchError(f"line {line}: expected at most {most} {what} ({name}), found more")


class _Loader(_Base):  # type: ignore[misc]
    """Safe YAML with merge keys (<<: *base), in which a key is written once and numbers are plain.

    YAML 1.1 reads 0100 as 64 in base 8 and 1:04 as 64 in base 60; either is refused.
    """

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        """Replace merge keys by what they name; before it, a mapping has the keys as written."""
        if not hasattr(node, "checked"):
            vars(node)["checked"] = True
            self._require_once(node)
        super().flatten_mapping(node)

    def _require_once(self, node: yaml.MappingNode) -> None:
        seen: set[Any] = set()
        for written, _ in node.value:
            merge = written.tag == "tag:yaml.org,2002:merge"
            key = "<<" if merge else self.construct_object(written, deep=True)
            if isinstance(key, (list, dict)):
                continue  # SafeLoader reports it
            if key in seen:
                line = node.start_mark.line + 1
                raise SparsebenchError(f"line {line}: expected each key once, found {key!r} twice")
            seen.add(key)

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        value, line = super().construct_scalar(node), node.start_mark.line + 1
        if node.tag.endswith((":int", ":float")) and OTHER_BASE.fullmatch(value):
            raise SparsebenchError(f"line {line}: expected a decimal number, found {value}")
        if node.tag.endswith(":int") and _whole(value) is None:
            expected = "expected an integer of at most 64 bits"
            raise SparsebenchError(f"line {line}: {expected}, found {shortened(value)}")
        if isinstance(value, str) and not utf8(value):
            raise SparsebenchError(f"line {line}: expected text in Unicode, found {value!a}")
        return value
