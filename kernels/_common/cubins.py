"""Cache machine code on disk: NVRTC takes seconds to compile a kernel, and reading a file 1 ms.

    $XDG_CACHE_HOME/sparsebench/cubins/KEY      SHA-256 of the code, 32 bytes, then the code
                                  KEY           SHA-256 of all that the code depends on

If a file is torn or changed, the kernel is compiled again. If the folder cannot be written, every
process compiles. Triton has a cache of its own.
"""

import hashlib
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from sparsebench._writing import write_file

DIGEST_BYTES = 32


def folder() -> Path:
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "sparsebench" / "cubins"


def cached(key: tuple[object, ...], compiled: Callable[[], bytes]) -> bytes:
    """Return the code for a key, from the cache or by `compiled`; `repr(key)` identifies it."""
    file = folder() / hashlib.sha256(repr(key).encode()).hexdigest()
    with suppress(OSError):
        data = file.read_bytes()
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    code = compiled()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, hashlib.sha256(code).digest() + code)
    return code
