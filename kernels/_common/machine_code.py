"""A digest of a compiled kernel that is equal on every machine that compiled the same code.

A cubin is an ELF file. Triton's also holds the path of the kernel's source (.debug_line), so two
installations of one version would differ. The digest covers only the sections that a GPU runs or
is configured by:

    .text.NAME        instructions
    .nv.constant*     constants
    .nv.info*         registers, barriers, shared memory
"""

import hashlib
from collections.abc import Iterator
from struct import unpack_from

COUNTED = b".text.", b".nv.constant2", b".nv.constant3"
SECTION_NUMBERS = 0x3A  # in an ELF64 header: size of a section header, their count, index of names
NO_BITS = 8  # type of a section without bytes in the file


def digest(*cubins: bytes) -> str:
    """Return the first 16 digits of the SHA-256 of the sections that count."""
    found = hashlib.sha256()
    for cubin in cubins:
        for name, content in sorted(_sections(cubin)):
            if name.startswith(COUNTED):
                found.update(name + b"\0" + content)
    return found.hexdigest()[:16]


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of each section of an ELF64 file (man 5 elf)."""
    (table,) = unpack_from("<Q", elf, 0x28)
    size, count, names = unpack_from("<HHH", elf, SECTION_NUMBERS)
    headers = [unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names_at = headers[names][4]
    for name_at, kind, _, _, start, length in headers:
        end = elf.index(b"\0", names_at + name_at)
        yield elf[names_at + name_at : end], b"" if kind == NO_BITS else elf[start : start + length]
