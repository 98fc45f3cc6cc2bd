"""Machine code is compiled once for all processes, and again if anything it depends on changes."""

from pathlib import Path

import pytest

from sparsebench.kernels._common.machine_code import cache_folder, cached


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return []


def code(compiled: list[int], *key: object) -> bytes:
    """Return the code for a key, and count compilations."""
    return cached(key, lambda: compiled.append(1) or b"code")


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
