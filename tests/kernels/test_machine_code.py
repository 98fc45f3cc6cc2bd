"""Machine code: its digest covers instructions but no paths, and it is compiled once.

All processes share what one has compiled, until anything that it depends on changes.
"""

import struct
from pathlib import Path

import pytest
import torch

from sparsebench._writing import cache_folder
from sparsebench.errors import Unsupported
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.machine_code import digest, read_or_compile


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
    counts = 64 + len(bodies), 0, 64, 0, 0, 64, len(headers), len(headers) - 1
    head = struct.pack("<16sHHIQQQIHHHHHH", b"\x7fELF", 2, 190, 1, 0, 0, *counts)
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


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return []


def code(compiled: list[int], *key: object) -> bytes:
    """Return the code for a key, and count compilations."""
    return read_or_compile(key, lambda: compiled.append(1) or b"code")


def test_code_is_compiled_once_and_anew_for_other_constants(compiled: list[int]) -> None:
    for key in (("source", 1), ("source", 1), ("source", 2), ("source", 1)):
        assert code(compiled, *key) == b"code"
    assert len(compiled) == 2


@pytest.mark.parametrize("left", [b"", b"x" * 40])
def test_a_torn_or_changed_file_is_compiled_anew(left: bytes, compiled: list[int]) -> None:
    code(compiled, "source")
    (file,) = cache_folder("cubins").iterdir()
    file.write_bytes(left)
    assert code(compiled, "source") == b"code"
    assert code(compiled, "source") == b"code"
    assert len(compiled) == 2


def test_without_a_folder_to_write_every_process_compiles(compiled, tmp_path) -> None:
    (tmp_path / "sparsebench").write_text("a file")
    assert code(compiled, "source") == code(compiled, "source") == b"code"
    assert len(compiled) == 2


def test_without_a_compiler_a_kernel_must_be_loaded_or_in_the_cache(compiled, monkeypatch) -> None:
    monkeypatch.setattr(cuda, "_KERNELS", {})
    monkeypatch.setattr(cuda, "shared_bytes_of", lambda device: 1)
    monkeypatch.setattr(cuda, "_key", lambda *what: what)
    monkeypatch.setattr(cuda, "arguments_of", lambda *what: None)
    monkeypatch.setattr(cuda, "_loaded", lambda *what: (None, "sass:1"))

    def load() -> str:
        return cuda.load("bsr_small", "multiply_blocks", (), 1, torch.device("cuda")).code

    with cuda.without_compiler(), pytest.raises(Unsupported, match="expected a kernel that is com"):
        load()
    assert load() == "sass:1"
    with cuda.without_compiler():
        assert load() == "sass:1"  # although no cache has it
