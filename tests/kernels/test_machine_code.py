"""The digest of a compiled kernel covers its instructions, but no paths or file names."""

import struct

from sparsebench.kernels._common.machine_code import digest


def elf(**sections: bytes) -> bytes:
    """Return an ELF64 file with these sections; `__` in a name stands for a dot."""
    names, bodies, headers = b"\0", b"", [struct.pack("<IIQQQQQQII", *[0] * 10)]
    listed = {name.replace("__", "."): body for name, body in sections.items()}
    places = {}
    for name in [*listed, ".shstrtab"]:
        places[name] = len(names)
        names += name.encode() + b"\0"
    for name, body in [*listed.items(), (".shstrtab", names)]:
        at = 64 + len(bodies)
        headers.append(struct.pack("<IIQQQQQQII", places[name], 1, 0, 0, at, len(body), *[0] * 4))
        bodies += body
    head = struct.pack(
        "<16sHHIQQQIHHHHHH",
        b"\x7fELF",
        2,
        190,
        1,
        0,
        0,
        64 + len(bodies),
        0,
        64,
        0,
        0,
        64,
        len(headers),
        len(headers) - 1,
    )
    return head + bodies + b"".join(headers)


def test_a_path_or_a_name_does_not_change_the_digest() -> None:
    here = elf(__text__kernel=b"add", __debug_line=b"/here", __nv__global__init=b"12")
    there = elf(__debug_line=b"/there/further", __text__kernel=b"add", __nv__info=b"1")
    assert digest(here) == digest(there)
    assert digest(here).startswith("sass:")
    assert len(digest(here)) == 21


def test_an_instruction_a_constant_or_one_more_kernel_changes_it() -> None:
    code = elf(__text__kernel=b"add")
    others = [
        digest(elf(__text__kernel=b"mul")),
        digest(elf(__text__kernel=b"add", __nv__constant3=b"1")),
        digest(code, code),
    ]
    assert len({digest(code), *others}) == 4
