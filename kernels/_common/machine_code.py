"""Digest compiled kernels, and cache those that NVRTC compiles.

The digest is the same on every machine that compiles the same code. A cubin is an ELF file, and the
digest covers two kinds of its sections:

    .text.NAME          instructions
    .nv.constant2, 3    constants of the code

Other sections may differ although the code is equal. Triton writes the path of the kernel's source
(.debug_line), so two installations of one version would differ. NVRTC writes every constexpr value,
used or not (.nv.global.init), so a constant that became a macro would change the digest.

NVRTC takes seconds to compile a kernel, and reading a file 1 ms. Triton has its own cache.

    $XDG_CACHE_HOME/sparsebench/cubins/KEY      SHA-256 of the code, 32 bytes, then the code
                                  KEY           SHA-256 of all that the code depends on

If a file is torn or changed, the kernel is compiled again. If the folder cannot be written, every
process compiles.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from struct import unpack_from

from sparsebench._writing import cache_folder, write_file

DIGEST_BYTES = 32
COUNTED = b".text.", b".nv.constant2", b".nv.constant3"
SECTION_NUMBERS = 0x3A  # in an ELF64 header: size of a section header, their count, index of names
NO_BITS = 8  # type of a section without bytes in the file


def digest(*cubins: bytes) -> str:
    """Return `sass:` and the first 16 digits of the SHA-256 of these sections."""
    sections = hashlib.sha256()
    for cubin in cubins:
        for name, content in sorted(_sections(cubin)):
            if name.startswith(COUNTED):
                sections.update(name + b"\0" + content)
    return f"sass:{sections.hexdigest()[:16]}"


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of each section of an ELF64 file (man 5 elf)."""
    (table,) = unpack_from("<Q", elf, 0x28)
    size, count, names = unpack_from("<HHH", elf, SECTION_NUMBERS)
    headers = [unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names_at = headers[names][4]
    for name_at, kind, _, _, start, length in headers:
        end = elf.index(b"\0", names_at + name_at)
        yield elf[names_at + name_at : end], b"" if kind == NO_BITS else elf[start : start + length]


def is_cached(key: tuple[object, ...]) -> bool:
    """Return whether the cache has code for a key, without checking it."""
    return _file_of(key).exists()


def _file_of(key: tuple[object, ...]) -> Path:
    return cache_folder("cubins") / hashlib.sha256(repr(key).encode()).hexdigest()


def read_or_compile(key: tuple[object, ...], compile_code: Callable[[], bytes]) -> bytes:
    """Return the code for a key, from the cache or by `compile_code`; `repr(key)` identifies it."""
    file = _file_of(key)
    with suppress(OSError):
        data = file.read_bytes()
        digest, code = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
        if hashlib.sha256(code).digest() == digest:
            return code
    code = compile_code()
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_file(file, hashlib.sha256(code).digest() + code)
    return code
