"""Digest a compiled kernel; the digest is the same on every machine that compiles the same code.

A cubin is an ELF file. The digest covers two kinds of its sections:

    .text.NAME          instructions
    .nv.constant2, 3    constants of the code

Other sections may differ although the code is equal. Triton writes the path of the kernel's source
(.debug_line), so two installations of one version would differ. NVRTC writes every constexpr value,
used or not (.nv.global.init), so a constant that became a macro would change the digest.
"""

import hashlib
from collections.abc import Iterator
from struct import unpack_from

COUNTED = b".text.", b".nv.constant2", b".nv.constant3"
SECTION_NUMBERS = 0x3A  # in an ELF64 header: size of a section header, their count, index of names
NO_BITS = 8  # type of a section without bytes in the file


def digest(*cubins: bytes) -> str:
    """Return `sass:` and the first 16 digits of the SHA-256 of these sections."""
    found = hashlib.sha256()
    for cubin in cubins:
        for name, content in sorted(_sections(cubin)):
            if name.startswith(COUNTED):
                found.update(name + b"\0" + content)
    return f"sass:{found.hexdigest()[:16]}"


def _sections(elf: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield name and content of each section of an ELF64 file (man 5 elf)."""
    (table,) = unpack_from("<Q", elf, 0x28)
    size, count, names = unpack_from("<HHH", elf, SECTION_NUMBERS)
    headers = [unpack_from("<IIQQQQ", elf, table + i * size) for i in range(count)]
    names_at = headers[names][4]
    for name_at, kind, _, _, start, length in headers:
        end = elf.index(b"\0", names_at + name_at)
        yield elf[names_at + name_at : end], b"" if kind == NO_BITS else elf[start : start + length]
