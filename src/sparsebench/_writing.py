"""Write files: every file of sparsebench, whether text or not, is written by one of these.

    folder/.4f1c2a9be0d37756.new ─ write, sync ─> rename ─> folder/report.html

The new content is written beside the file and then renamed. A reader sees the old content or the
new, and after a full disk, an error or an interrupt the old file is still there. Text is UTF-8, in
every locale. A link keeps pointing where it did. A device or a pipe, such as /dev/stdout, cannot be
replaced and is written to directly, and rows and logs grow at their end (`append_to`). Every
OSError names the file.
"""

import errno
import fcntl
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from sparsebench.errors import SparsebenchError

DEVICES = Path("/dev"), Path("/dev/fd")


def cache_folder(name: str, variable: str = "") -> Path:
    """Return the folder that an environment variable names, or the cache's folder NAME."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get(variable) or Path(home) / "sparsebench" / name)


def write_file(file: Path, content: str | bytes) -> None:
    """Replace a file's content; characters that UTF-8 cannot hold are written as escapes."""
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    with replacing(file) as fresh:
        fresh.write_bytes(data)


def append_to(file: Path, text: str, *, sync: bool = False) -> None:
    """Add text to a file in one write; with `sync`, wait until it is on disk."""
    with _named(file, file), file.open("ab") as end:
        end.write(text.encode(errors="backslashreplace"))
        end.flush()
        if sync:
            os.fsync(end.fileno())


def require_apart(outputs: Iterable[Path | None], inputs: Iterable[Path | None]) -> None:
    """Raise SparsebenchError if an output would replace an input or another output."""
    taken = {path.resolve(): path for path in inputs if path}
    for path in filter(None, outputs):
        if path.resolve() in taken and path.parent not in DEVICES:
            raise SparsebenchError(f"{path}: expected an output file of its own, found it in use")
        taken[path.resolve()] = path


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made, and removed if it stays empty.

    Raises SparsebenchError if another process has it. The lock ends with the process.
    """
    if folder.exists() and not folder.is_dir():
        raise SparsebenchError(f"{folder}: expected a folder, found a file")
    new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        found = "found one that writes to it"
        raise SparsebenchError(f"{folder}: expected no other process, {found}") from error
    finally:
        os.close(held)
        if new:
            with suppress(OSError):
                folder.rmdir()  # fails unless it is empty


@contextmanager
def replacing(file: Path) -> Iterator[Path]:
    """Yield a path beside `file` to write to, and rename it to `file` at the end.

    An exception of the block leaves `file` as it was. Raises OSError, with the name of `file`.
    """
    special = file.exists() and not file.is_file() and not file.is_dir()
    if special or file.parent in DEVICES:
        with _named(file, file):
            yield file
        return
    target = Path(os.path.realpath(file))
    fresh = target.with_name(f".{secrets.token_hex(8)}.new")  # short: names have 255 bytes
    try:
        with _named(file, fresh):
            if target.exists() and not os.access(target, os.W_OK):
                raise OSError(errno.EACCES, os.strerror(errno.EACCES))
            yield fresh
            with fresh.open("rb") as written:
                os.fsync(written.fileno())
            if target.exists():
                shutil.copymode(target, fresh)
            fresh.replace(target)
    except BaseException:
        with suppress(OSError):
            fresh.unlink()
        raise


@contextmanager
def _named(file: Path, fresh: Path) -> Iterator[None]:
    """Let an OSError about `fresh`, or about no file, name `file`."""
    try:
        yield
    except OSError as error:
        if error.errno and error.filename in (None, str(fresh)):
            raise OSError(error.errno, os.strerror(error.errno), str(file)) from error
        raise
