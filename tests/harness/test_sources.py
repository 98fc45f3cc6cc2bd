import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import scipy.sparse
import torch
from safetensors.torch import save_file

from sparsebench.errors import SuiteError
from sparsebench.harness.inputs import sources

MASK = np.array([[1, 0, 0, 1, 0], [0, 0, 0, 0, 0], [0, 1, 1, 0, 1]], dtype=bool)


def write_pattern(path: Path, mask: np.ndarray = MASK) -> Path:
    """Write a pattern in the format that the file's name says."""
    matrix = scipy.sparse.csr_array(mask.astype(np.float64))
    if path.suffix == ".smtx":
        sizes = f"{mask.shape[0]}, {mask.shape[1]}, {matrix.nnz}"
        lines = [sizes, " ".join(map(str, matrix.indptr)), " ".join(map(str, matrix.indices))]
        path.write_text("\n".join(lines) + "\n")
    else:
        scipy.sparse.save_npz(path, matrix)
    return path


@pytest.mark.parametrize("name", ["p.smtx", "p.npz"])
def test_a_written_pattern_is_read_back(name: str, tmp_path: Path) -> None:
    path = write_pattern(tmp_path / name)
    assert np.array_equal(sources.load_pattern(path).numpy(), MASK)
    assert sources.shape_and_level(path) == (3, 5, 1 - 5 / 15)


@pytest.mark.parametrize("name", ["p.smtx", "p.npz"])
def test_a_pattern_may_be_empty(name: str, tmp_path: Path) -> None:
    path = write_pattern(tmp_path / name, np.zeros((2, 3), dtype=bool))
    assert not sources.load_pattern(path).any()
    assert sources.shape_and_level(path) == (2, 3, 1.0)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected 3 lines: sizes, row offsets, column indices; found 0"),
        ("2, 2\n0 1 1\n0\n", "expected 3 rows, columns, non-zeros; found 2"),
        ("-2, 2, 1\n0 1 1\n0\n", "as non-negative integers; found '-'"),
        ("0, 2, 0\n0\n\n", "a matrix of at least 1x1"),
        ("2, 2, 5\n0 1 1\n0\n", "that can hold its non-zeros"),
        ("2, 2, 1\n0 1\n0\n", "expected 3 row offsets; found 2"),
        ("2, 2, 2\n0 1 2\n0\n", "expected 2 column indices; found 1"),
        ("2, 2, 1\n1 1 1\n0\n", "expected row offsets that rise from 0 to 1; found 1 to 1"),
        ("2, 2, 1\n0 2 1\n0\n", "found 0 to 1, decreasing 1 times"),
        ("2, 2, 1\n0 1 1\n2\n", "expected column indices below 2; found 2"),
        ("2, 2, 2\n0 2 2\n1 1\n", "expected each column once in a row; found a column twice"),
        ("\x89HDF\n\x00\n\x01\n", "as non-negative integers; found"),
    ],
)
def test_a_malformed_smtx_is_refused_in_one_line(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.smtx"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(SuiteError) as raised:
        sources.load_pattern(path)
    assert str(raised.value).startswith(f"{path}: expected ")
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def saved(path: Path) -> bytes:
    """Write a matrix whose last column index is outside it, and return the file."""
    bad = {"data": np.ones(2), "indices": np.array([0, 7]), "indptr": np.array([0, 1, 2])}
    np.savez(path, format=b"csr", shape=np.array([2, 2]), **bad)
    return path.read_bytes()


def cut(path: Path) -> bytes:
    return write_pattern(path).read_bytes()[:-12]


NAMES = ("bad.npz", "bad.safetensors")
MALFORMED: list[tuple[str, Callable[[Path], bytes], str]] = [
    *(
        (name, lambda path, text=text: text, "; found ")
        for name in NAMES
        for text in (b"", b"garbage\n1 2 3\n", b"\xff\xfe\x00")
    ),
    ("p.npz", cut, "expected a sparse matrix"),
    ("p.npz", saved, "expected a sparse matrix"),
    ("p.mtx.gz", lambda path: b"", "which scipy.io.mmread and scipy.sparse.save_npz convert"),
    ("p.csv", lambda path: b"", "; found .csv"),
]


@pytest.mark.parametrize(("name", "content", "token"), MALFORMED)
def test_a_malformed_file_is_refused_in_one_line(name, content, token, tmp_path) -> None:
    path = tmp_path / name
    path.write_bytes(content(path))
    weights = name.endswith("safetensors")
    read = partial(sources.load_weights, tensor="w") if weights else sources.load_pattern
    with pytest.raises(SuiteError) as raised:
        read(path)
    assert token in str(raised.value)
    assert "\n" not in str(raised.value)
    path.unlink()
    for read in (sources.load_pattern, sources.sha256):
        with pytest.raises(SuiteError, match=f"{name}: expected"):
            read(path)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    tensors = {
        "layers.0.up": torch.arange(6, dtype=torch.bfloat16).view(2, 3),
        "layers.0.bias": torch.zeros(3),
        "layers.0.ids": torch.zeros(2, 3, dtype=torch.int64),
    }
    save_file(tensors, tmp_path / "m.safetensors")
    return tmp_path / "m.safetensors"


def test_weights_are_read_in_their_own_dtype(model: Path) -> None:
    assert sources.shape_and_level(model, "layers.0.up") == (2, 3, None)
    result = sources.load_weights(model, "layers.0.up")
    assert torch.equal(result, torch.arange(6, dtype=torch.bfloat16).view(2, 3))
    assert sources.tensor_names(model) == ["layers.0.up"]


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ("layers.0.upp", r"expected a tensor 'layers.0.upp'; .* \(did you mean layers.0.up\?\)"),
        ("layers.0.bias", r"as a matrix of F16, BF16, F32; found F32 \[3\]"),
        ("layers.0.ids", r"as a matrix of F16, BF16, F32; found I64 \[2, 3\]"),
    ],
)
def test_unusable_tensors_are_refused_as_weights(model: Path, tensor: str, message: str) -> None:
    with pytest.raises(SuiteError, match=message):
        sources.load_weights(model, tensor)


def test_a_changed_file_is_hashed_again(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"one")
    first = sources.sha256(path)
    path.write_bytes(b"two")
    os.utime(path, ns=(1, 1))
    assert sources.sha256(path) != first
