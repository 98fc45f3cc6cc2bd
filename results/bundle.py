"""A run as a bundle: files that prove themselves unchanged wherever they were copied to.

    lock.txt        every distribution that was installed where it ran: pip install -r lock.txt
    manifest.json   {"schema": ..., "files": {"rows.jsonl": SHA-256, "suite.yaml": SHA-256, ...}}

The manifest names every file of the run but itself and what is no evidence: the report, which can
be written again, and what kernels printed. Rows count by their text: gzip -9 leaves it true.
The manifest's own SHA-256 names the bundle.
"""

import gzip
import hashlib
import json
import platform
import re
import zlib
from importlib.metadata import distributions
from pathlib import Path, PurePosixPath
from typing import Any

from sparsebench.errors import ResultError
from sparsebench.results.record import ROWS_SCHEMA

MANIFEST_SCHEMA = "sparsebench/manifest@1"
MANIFEST, LOCK, ROWS = "manifest.json", "lock.txt", "rows.jsonl"
REQUIRED = {"suite.yaml", "environment.json", "run.json", ROWS, LOCK}
UNSEALED = {MANIFEST, "report.html", "worker.log"}
TORCH_INDEX = "https://download.pytorch.org/whl"  # has what PyPI has not: torch==2.13.0+cpu


def seal(path: Path) -> None:
    """Write lock.txt and manifest.json: the last thing done to a run, again after a resume."""
    (path / LOCK).write_text(lock())
    found = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    names = sorted({ROWS if name == f"{ROWS}.gz" else name for name in found} - UNSEALED)
    files = {name: _sha256(_content(path, name)) for name in names}
    sealed = json.dumps({"schema": MANIFEST_SCHEMA, "files": files}, indent=1)
    (path / MANIFEST).write_text(sealed + "\n")


def unseal(path: Path) -> None:
    """Take the manifest away: the run is about to be written to."""
    (path / MANIFEST).unlink(missing_ok=True)


def identity(path: Path) -> str:
    """Return what names a bundle, wherever it lies: the SHA-256 of its manifest."""
    _manifest(path)
    return _sha256(_content(path, MANIFEST))


def verify(path: Path) -> list[str]:
    """Hold every file against the manifest and return their names; ResultError at the first."""
    files = _manifest(path)
    for name, expected in files.items():
        found = _sha256(_content(path, name))
        if found != expected:
            raise ResultError(f"{path / name}: expected SHA-256 {expected}, found {found}")
    _require_whole_lines(path)
    return sorted(files)


def lock() -> str:
    """Return what is installed, a `name==version` a line; sparsebench itself is its commit."""
    found: dict[str, str] = {}
    for distribution in distributions():
        if distribution.name:  # the first of a name is the one that is imported
            found.setdefault(
                re.sub(r"[-_.]+", "-", distribution.name).lower(), distribution.version
            )
    found.pop("sparsebench", None)
    build = found.get("torch", "").partition("+")[2]
    index = [f"--extra-index-url {TORCH_INDEX}/{build}"] if build else []
    pins = [f"{name}=={version}" for name, version in sorted(found.items())]
    return "\n".join([f"# Python {platform.python_version()}", *index, *pins]) + "\n"


def _manifest(path: Path) -> dict[str, str]:
    """Read manifest.json: relative names of files below the run, and all that a run consists of."""
    file = path / MANIFEST
    if not file.is_file():
        raise ResultError(f"{path}: expected {MANIFEST}, which seals a run; found none")
    try:
        data: dict[str, Any] = json.loads(_content(path, MANIFEST))
        schema, files = data["schema"], dict(data["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ResultError(f"{file}: expected a schema and files, found {error!r}") from error
    if schema != MANIFEST_SCHEMA:
        raise ResultError(f"{file}: expected schema {MANIFEST_SCHEMA}, found {schema}")
    for name in files:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise ResultError(f"{file}: expected names of files in the run, found {name}")
    for name in sorted(REQUIRED - files.keys()):
        raise ResultError(f"{file}: expected {name} among its files, found {', '.join(files)}")
    return files


def _require_whole_lines(path: Path) -> None:
    """Refuse rows of an older schema, whose reader fills in defaults, and a torn last line."""
    first, *_, last = _content(path, ROWS).decode().split("\n")
    expected = json.dumps({"schema": ROWS_SCHEMA})
    if first != expected or last:
        found = f"a torn last line {last[:40]}" if last else first[:80]
        raise ResultError(f"{path / ROWS}: expected {expected} and whole lines, found {found}")


def _content(path: Path, name: str) -> bytes:
    """Return a file's bytes; of the rows their text, where they were compressed since."""
    file, zipped = path / name, path / f"{ROWS}.gz"
    try:
        if name == ROWS and not file.exists() and zipped.exists():
            return gzip.decompress(zipped.read_bytes())
        return file.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise ResultError(f"{file}: expected a readable file, found {error}") from error


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
