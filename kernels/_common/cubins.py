"""Machine code that an earlier process compiled: NVRTC takes seconds for a kernel, this 1 ms.

    $XDG_CACHE_HOME/sparsebench/cubins/KEY      SHA-256 of the code, 32 bytes, then the code
                                  KEY           SHA-256 of all that the code depends on

A file that is torn or changed is compiled anew. Where the folder cannot be written, every process
compiles. Triton has such a folder of its own.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import NamedTemporaryFile

DIGEST_BYTES = 32


def folder() -> Path:
    """Return where machine code is kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sparsebench" / "cubins"


def kept(asked: tuple[object, ...], compiled: Callable[[], bytes]) -> bytes:
    """Return the code of what was asked for, whose `repr` says it all; compile it at first."""
    file = folder() / hashlib.sha256(repr(asked).encode()).hexdigest()
    with suppress(OSError):
        data = file.read_bytes()
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    code = compiled()
    with suppress(OSError):
        _write(file, hashlib.sha256(code).digest() + code)
    return code


def _write(file: Path, data: bytes) -> None:
    """Write a file whole, by one rename: several processes may compile the same."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with NamedTemporaryFile(dir=file.parent, delete=False) as fresh:
        fresh.write(data)
    Path(fresh.name).replace(file)
