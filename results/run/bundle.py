"""A bundle: a sealed run directory whose manifest shows whether a file was changed since.

    lock.txt        every distribution that was installed when it ran: pip install -r lock.txt
    manifest.json   {"schema": ..., "files": {"rows.jsonl": SHA-256, "suite.yaml": SHA-256, ...}}

The manifest names every file of the run but four: itself, the report (it can be written again),
worker.log (what kernels printed) and failures.log (tracebacks). The digest of the rows is that of
their text, so they may be compressed later. The SHA-256 of the manifest identifies the bundle.

`redact` copies a bundle without names of users, hosts and folders, for publishing:

    /home/ada/models/gate.safetensors  ─>  gate.safetensors    paths become their last part
    "hostname": "node17"               ─>  (removed)           fields that name a user or host
    ada, node17 anywhere else          ─>  user, host          names found in paths and fields
    worker.log, failures.log           ─>  (not copied)        they hold whatever kernels print

Ids of cases and problems stay the same because they hash no path. A file without such names is
copied byte for byte. If a file changed, the copy is sealed again. removed.json, beside the copy,
holds the SHA-256 of the original manifest and all that was removed.
"""

import gzip
import hashlib
import json
import platform
import re
from collections import Counter
from dataclasses import asdict, dataclass
from functools import cache
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath

from sparsebench._writing import write_file
from sparsebench.errors import ResultError
from sparsebench.results import files
from sparsebench.results.record import OLDER_ROWS, ROWS_SCHEMA

MANIFEST_SCHEMA = "sparsebench/manifest@1"
MANIFEST, LOCK, ROWS = "manifest.json", "lock.txt", "rows.jsonl"
EARLIER = "earlier"  # the folder of a GPU's published runs that newer ones replaced
SURVEY = "survey.json"  # of a folder with the runs of a survey: decide, screen (harness/new_gpu)
REQUIRED = {"suite.yaml", "environment.json", "run.json", ROWS, LOCK}
UNSEALED = {MANIFEST, "report.html", "worker.log", "failures.log"}
UNFINISHED = ".new"  # suffix of a replacement that a killed process left
TORCH_INDEX = "https://download.pytorch.org/whl"  # PyPI lacks builds such as torch==2.13.0+cpu


def seal(path: Path) -> None:
    """Write lock.txt and manifest.json: the last step of a run, also of a resumed one."""
    write_file(path / LOCK, lock())
    names = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    names = {name for name in names if not name.endswith(UNFINISHED)}
    seal_files(path, sorted({ROWS if name == f"{ROWS}.gz" else name for name in names} - UNSEALED))


def seal_files(path: Path, names: list[str]) -> None:
    """Write manifest.json for these files."""
    files = {name: _sha256(content(path, name)) for name in names}
    text = json.dumps({"schema": MANIFEST_SCHEMA, "files": files}, indent=1)
    write_file(path / MANIFEST, text + "\n")


def unseal(path: Path) -> None:
    """Remove the manifest, before the run is written to again."""
    (path / MANIFEST).unlink(missing_ok=True)
    for file in path.glob(f"*{UNFINISHED}"):
        file.unlink()


def identity(path: Path) -> str:
    """Return the SHA-256 of the manifest, which identifies the bundle."""
    _manifest(path)
    return _sha256(content(path, MANIFEST))


def verify(path: Path) -> list[str]:
    """Check the digest of every file and return the names.

    Raises ResultError if one differs, or is a link out of the run, which no copy would hold.
    """
    digests = _manifest(path)
    for name in (MANIFEST, *digests):
        place = path / (f"{ROWS}.gz" if name == ROWS and not (path / ROWS).exists() else name)
        if not place.resolve().is_relative_to(path.resolve()):
            raise ResultError(f"{place}: expected a file of the run, found a link out of it")
    rows = b""  # unzipped once
    for name, expected in digests.items():
        data = content(path, name)
        rows = data if name == ROWS else rows
        if (actual := _sha256(data)) != expected:
            raise ResultError(f"{path / name}: expected SHA-256 {expected}, found {actual}")
    if torn := _lines(path, rows)[2]:
        raise ResultError(
            f"{path / ROWS}: expected whole lines, found a torn last line {torn[:40]}"
        )
    return sorted(digests)


def first_change(path: Path) -> str:
    """Return the first difference between a run and its seal; "" if it is not sealed yet."""
    try:
        is_finished = files.from_json(path / "run.json").get("status") == "finished"
        if is_finished or (path / MANIFEST).exists():
            verify(path)
    except ResultError as error:
        return str(error)
    return ""


@cache  # parsing the metadata of 120 packages takes 0.1 s
def lock() -> str:
    """Return a `name==version` line per distribution, except sparsebench: its commit is known."""
    versions: dict[str, str] = {}
    for distribution in distributions():
        if distribution.name:  # the first of a name is the one that is imported
            versions.setdefault(
                re.sub(r"[-_.]+", "-", distribution.name).lower(), distribution.version
            )
    versions.pop("sparsebench", None)
    build = versions.get("torch", "").partition("+")[2]
    index = [f"--extra-index-url {TORCH_INDEX}/{build}"] if build else []
    pins = [f"{name}=={version}" for name, version in sorted(versions.items())]
    return "\n".join([f"# Python {platform.python_version()}", *index, *pins]) + "\n"


def require_directory(run: Path) -> None:
    """Raise ResultError unless the directory of a run exists."""
    if not run.is_dir():
        raise ResultError(f"{run}: expected the directory of a run, found none")
    if (run / SURVEY).is_file():
        runs = " or ".join(str(each) for each in runs_of(run))
        raise ResultError(f"{run}: expected the directory of one run, found a survey; name {runs}")


def runs_of(path: Path) -> list[Path]:
    """Return the runs of a survey, the one with verdicts first, or the directory of a run alone.

    Raises ResultError if there is no directory, or if a survey stopped before its first run.
    """
    if not (path / SURVEY).is_file():
        require_directory(path)
        return [path]
    runs = sorted(file.parent for file in path.glob("*/run.json"))
    if not runs:
        raise ResultError(f"{path}: expected a survey with a run, found none; its time was over")
    return runs


def _manifest(path: Path) -> dict[str, str]:
    """Return the SHA-256 of each file by name; raises ResultError if a required one is missing."""
    file = path / MANIFEST
    require_directory(path)
    if not file.is_file():
        expected = f"{path}: expected {MANIFEST}, which seals a run; found none"
        raise ResultError(expected + _how_to_end(path))
    entries = files.from_json(file, MANIFEST_SCHEMA).get("files")
    if not isinstance(entries, dict) or not all(isinstance(sha, str) for sha in entries.values()):
        raise ResultError(f"{file}: expected the SHA-256 of files, found {str(entries)[:80]}")
    for name in entries:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ResultError(f"{file}: expected names of files in the run, found {name}")
    for name in sorted(REQUIRED - entries.keys()):
        raise ResultError(f"{file}: expected {name} among its files, found {', '.join(entries)}")
    digests: dict[str, str] = entries
    return digests


def _how_to_end(path: Path) -> str:
    """Say how to finish a run that has not ended, for instance because it was killed."""
    state = path / "run.json"
    if not state.exists() or files.from_json(state).get("status") != "running":
        return ""
    again = f"`sparsebench run --resume {path}`"
    return f". The run has not ended; on the machine that began it, {again} finishes it"


def row_lines(path: Path) -> tuple[str, list[str], str]:
    """Return the schema of a run's rows, their whole lines, and a last line that is torn, or "".

    Raises ResultError if the first line names no known schema.
    """
    return _lines(path, content(path, ROWS))


def _lines(path: Path, rows: bytes) -> tuple[str, list[str], str]:
    file = path / ROWS
    first, *lines = files.decode_utf8(file, rows).split("\n")
    schemas = {json.dumps({"schema": name}): name for name in (ROWS_SCHEMA, *OLDER_ROWS)}
    if first not in schemas or not lines:
        current, actual = next(iter(schemas)), first[:80] or "an empty file"
        raise ResultError(f"{file}: expected a first line {current}, found {actual}")
    return schemas[first], lines[:-1], lines[-1]


def content(path: Path, name: str) -> bytes:
    """Return the bytes of a file; for compressed rows, the bytes of their text."""
    file, zipped = path / name, path / f"{ROWS}.gz"
    if name == ROWS and not file.exists() and zipped.exists():
        return files.unzip(zipped, files.ROWS_BYTES)
    return files.content(file, files.ROWS_BYTES)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


REMOVED = "removed.json"
QUOTED = re.compile(r'(?<=")(?:~|/)[^"\\\n]*/[^"\\\n]*(?=")')  # a path, maybe with spaces
START = r"(?:file://|(?<=\\[nt])|(?<![\w.~/\\]))"  # not within a word, a ratio or a URL
PATH = re.compile(START + r"(?:~|/[\w.+@=-]+)(?:/[\w.+@=-]+)+/?")
WINDOWS = re.compile(r"\b[A-Za-z]:\\{1,2}(?:[\w.+@ -]+\\{1,2})+[\w.+@-]*")
HOME = re.compile(r"/(?:home|Users)/([\w.-]{2,})/")
NAMING = "user", "username", "login", "host", "hostname", "node"
FIELD = re.compile(rf'(,\s*)?"({"|".join(NAMING)})":\s*"([^"]*)"(?(1)|\s*,?\s*)')
SIGNS = "/~\\"  # every path has one of them, so lines of rows without any need no search
SHORTEST = 3  # shorter names of users and hosts also occur within words


@dataclass(frozen=True)
class Redaction:
    """A record of what a published copy lacks.

    of     SHA-256 of the original manifest, which identifies the bundle as measured
    texts  counts by kind of text, without the names themselves: {"a path: gate.safetensors": 2}
    files  files that were not copied
    """

    of: str
    texts: dict[str, int]
    files: list[str]


def redact(run: Path, to: Path) -> Redaction:
    """Copy a bundle into an empty folder without names and paths; seal it again if it changed."""
    names, counts = verify(run), Counter[str]()
    texts = {name: content(run, name).decode("utf-8", "replace") for name in names}
    private = _names(texts)
    changed = False
    for name, text in texts.items():
        clean = _clean(text, private, counts)
        changed |= clean != text
        _write(to / name, clean.encode() if clean != text else content(run, name))
    if changed:
        seal_files(to, names)
    else:
        write_file(to / MANIFEST, content(run, MANIFEST))
    left = [name for name in ("worker.log", "failures.log") if (run / name).exists()]
    removed = Redaction(identity(run), dict(sorted(counts.items())), left)
    write_file(to / REMOVED, json.dumps(asdict(removed), indent=1) + "\n")
    return removed


def _names(texts: dict[str, str]) -> dict[str, str]:
    """Return the names of users and hosts that occur in a bundle, with the word for each."""
    homes = [text for text in texts.values() if "/home/" in text or "/Users/" in text]
    users = {name for text in homes for name in HOME.findall(text)}
    naming = [t for t in texts.values() if any(f'"{name}":' in t for name in NAMING)]
    fields = [match for text in naming for match in FIELD.findall(text)]
    users |= {value for _, name, value in fields if name in ("user", "username", "login")}
    hosts = {value for _, name, value in fields if name in ("host", "hostname", "node")}
    named = dict.fromkeys(hosts, "host") | dict.fromkeys(users - {"root"}, "user")
    return {name: word for name, word in named.items() if len(name) >= SHORTEST}


def _clean(text: str, private: dict[str, str], counts: Counter[str]) -> str:
    def without_field(match: re.Match[str]) -> str:
        counts[f"a field: {match[2]}"] += 1
        return ""

    def last_part(match: re.Match[str]) -> str:
        last = re.split(r"[/\\]+", match[0].rstrip("/\\"))[-1]
        last = private.get(last, last)
        counts[f"a path: {last}"] += 1
        return last

    def without_paths(line: str) -> str:
        if not any(sign in line for sign in SIGNS):
            return line
        for pattern in (QUOTED, PATH, WINDOWS):
            line = pattern.sub(last_part, line)
        return line

    if any(f'"{name}":' in text for name in NAMING):  # "clock":"host" is in most rows
        text = FIELD.sub(without_field, text)
    text = "\n".join(map(without_paths, text.split("\n")))
    for name, word in private.items():
        text, count = re.subn(rf"(?<![\w]){re.escape(name)}(?![\w])", word, text)
        if count:
            counts[f"a name: of a {word}"] += count
    return text


def _write(file: Path, data: bytes) -> None:
    """Write a file of a bundle; rows are compressed reproducibly."""
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.name == ROWS:
        write_file(file.with_name(f"{ROWS}.gz"), gzip.compress(data, 9, mtime=0))
    else:
        write_file(file, data)


def link_name(gpu: str, suite: str, digest: str) -> str:
    """Return a run's name in a link: GPU, suite and the first 10 digits of its digest.

    It is permanent, because it does not depend on which other runs are published.
    """
    words = re.sub(r"[^a-z0-9]+", "-", f"{gpu} {suite}".lower()).strip("-")[:60].strip("-")
    return "-".join(filter(None, [words, digest[:10]]))
