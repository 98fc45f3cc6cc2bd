"""Read operands from files: patterns (with drawn values) and real weights (to be pruned).

    .smtx            text, as in the Deep Learning Matrix Collection       pattern
                         rows, columns, non-zeros
                         row offsets, rows + 1 of them
                         column indices, one per non-zero
    .npz             scipy.sparse.save_npz; every stored entry counts      pattern
    .safetensors     one of its tensors, fp16, bf16 or fp32                weights
                     its tensors `group.wg`, `group.wu` ... `group.x`      all operands of an op

A bad file raises a SuiteError with the file, what was expected and what was found.
"""

import hashlib
from collections.abc import Collection
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import scipy
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor

from sparsebench._discovery import did_you_mean
from sparsebench.errors import SuiteError
from sparsebench.results.record import Source

FILE = "file"
"""The name of the pattern that a source determines."""

DTYPES = ("F16", "BF16", "F32")
"""Element types that weights may have, as safetensors names them."""

Indices = NDArray[np.int64]


def locate(source: Source, data: Path | None) -> Path:
    """Return the path of the source's file."""
    if data is None:
        raise SuiteError(f"source {source.path}: expected --data DIR, found none")
    return data / source.path


def agree(pattern: str, source: Source | None) -> None:
    """Raise SuiteError unless the pattern is `file` exactly if the source is a pattern file."""
    if (pattern == FILE) != (source is not None and source.tensor is None):
        actual = f"{pattern!r} with {source.path if source else 'no source'}"
        raise SuiteError(
            f"pattern: expected 'file' exactly if the source is a pattern file, found {actual}"
        )


def shape_and_level(path: Path, tensor: str | None = None) -> tuple[int, int, float | None]:
    """Return n, k and a pattern's sparsity (None for weights), reading as little as possible."""
    if tensor is not None:
        return *_weight_shape(path, tensor), None
    if path.suffix == ".smtx":
        n, k, nnz = _smtx_header(path, _content(path, 100).partition(b"\n")[0].rstrip(b"\r"))
    else:
        n, k, rows, _ = _scipy_pattern(path)
        nnz = len(rows)
    return n, k, 1 - nnz / (n * k)


def load_pattern(path: Path) -> Tensor:
    """Return a bool matrix [n, k] that is True where the file has an entry."""
    n, k, rows, columns = _smtx(path) if path.suffix == ".smtx" else _scipy_pattern(path)
    mask = np.zeros((n, k), dtype=np.bool_)
    mask[rows, columns] = True
    return torch.from_numpy(mask)


def load_weights(path: Path, tensor: str) -> Tensor:
    """Return one tensor [n, k] of a safetensors file, in its own dtype."""
    _weight_shape(path, tensor)
    return load_tensor(path, tensor)


def load_tensor(path: Path, tensor: str) -> Tensor:
    """Return any tensor of a safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            values: Tensor = file.get_tensor(tensor)
    except (OSError, SafetensorError, RuntimeError, AttributeError) as error:
        raise _unusable(path, f"a tensor {tensor!r} that can be loaded", error) from error
    return values


def member(source: Source, name: str) -> str:
    """Return the name of an operand's tensor in a source that is a group."""
    return f"{source.tensor}.{name}"


def groups(path: Path, names: Collection[str]) -> list[str]:
    """List the groups of a safetensors file that have a tensor for each name."""
    members: dict[str, set[str]] = {}
    for tensor in tensor_names(path):
        group, _, name = tensor.rpartition(".")
        members.setdefault(group, set()).add(name)
    return sorted(group for group, there in members.items() if group and there >= {*names})


def tensor_names(path: Path) -> list[str]:
    """List the tensors of a safetensors file that can be weights."""
    return [name for name, (shape, dtype) in header(path).items() if _is_weight(shape, dtype)]


def sha256(path: Path) -> str:
    """Hash a file's content, once per size and modification time."""
    require_regular(path)
    try:
        status = path.stat()
        return _sha256(path, status.st_size, status.st_mtime_ns)
    except OSError as error:
        raise _unusable(path, "a readable file", error) from error


@cache
def _sha256(path: Path, size: int, changed_ns: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_regular(path: Path) -> None:
    """Raise SuiteError unless a file is regular: reading a FIFO or a device may never end."""
    if path.exists() and not path.is_file():
        raise _unusable(path, "a readable file", "no regular file")


def _content(path: Path, most: int = -1) -> bytes:
    require_regular(path)
    try:
        with path.open("rb") as file:
            return file.read(most)
    except OSError as error:
        raise _unusable(path, "a readable file", error) from error


def _smtx(path: Path) -> tuple[int, int, Indices, Indices]:
    """Return n, k and the row and column of every entry."""
    lines = _content(path).splitlines()
    if len(lines) == 2:
        lines.append(b"")  # the third line may be missing if there are no entries
    if len(lines) != 3:
        raise _unusable(path, "3 lines: sizes, row offsets, column indices", f"{len(lines)}")
    n, k, nnz = _smtx_header(path, lines[0])
    offsets = _integers(path, "row offsets", lines[1], n + 1)
    columns = _integers(path, "column indices", lines[2], nnz)
    counts = np.diff(offsets)
    if offsets[0] != 0 or offsets[-1] != nnz or (counts < 0).any():
        ends = f"{offsets[0]} to {offsets[-1]}, decreasing {(counts < 0).sum()} times"
        raise _unusable(path, f"row offsets that rise from 0 to {nnz}", ends)
    if nnz and columns.max() >= k:
        raise _unusable(path, f"column indices below {k}", columns.max())
    rows = np.repeat(np.arange(n), counts)
    cells = np.sort(rows * k + columns)
    if (cells[1:] == cells[:-1]).any():
        raise _unusable(path, "each column once in a row", "a column twice")
    return n, k, rows, columns


def _smtx_header(path: Path, line: bytes) -> tuple[int, int, int]:
    n, k, nnz = map(int, _integers(path, "rows, columns, non-zeros", line.replace(b",", b" "), 3))
    if n < 1 or k < 1 or nnz > n * k:
        raise _unusable(path, "a matrix of at least 1x1 that can hold its non-zeros", (n, k, nnz))
    return n, k, nnz


def _integers(path: Path, what: str, line: bytes, count: int) -> Indices:
    """Parse non-negative integers separated by blanks: 3 million in under a second."""
    other = line.translate(None, b"0123456789 \t\r")
    if other:
        actual = other[:20].decode("ascii", "backslashreplace")
        raise _unusable(path, f"{what} as non-negative integers", repr(actual))
    numbers: Indices = np.fromstring(line.decode(), dtype=np.int64, sep=" ")
    if len(numbers) != count:
        raise _unusable(path, f"{count} {what}", len(numbers))
    return numbers


def _scipy_pattern(path: Path) -> tuple[int, int, Indices, Indices]:
    if path.suffix != ".npz":
        market = path.name.endswith((".mtx", ".mtx.gz"))
        hint = ", which scipy.io.mmread and scipy.sparse.save_npz convert" if market else ""
        raise _unusable(path, "a .smtx, .npz or .safetensors file", f"{path.suffix}{hint}")
    require_regular(path)
    try:
        entries = scipy.sparse.coo_array(_npz(path))
    except Exception as error:  # the readers raise a dozen types for bad files
        raise _unusable(path, "a sparse matrix", error) from error
    if entries.ndim != 2 or 0 in entries.shape:
        raise _unusable(path, "a matrix of at least 1x1", f"shape {list(entries.shape)}")
    entries.sum_duplicates()
    n, k = entries.shape
    rows, columns = (index.astype(np.int64) for index in entries.coords)
    return n, k, rows, columns


def _npz(path: Path) -> Any:
    with path.open("rb") as file:  # by path, load_npz leaves a bad file open
        matrix = scipy.sparse.load_npz(file)
    if hasattr(matrix, "check_format"):
        matrix.check_format(full_check=True)  # load_npz accepts any index, even one out of range
    return matrix


def _weight_shape(path: Path, tensor: str) -> tuple[int, int]:
    tensors = header(path)
    if tensor not in tensors:
        hint = did_you_mean(tensor, list(tensors))
        raise _unusable(path, f"a tensor {tensor!r}", f"{len(tensors)} others{hint}")
    shape, dtype = tensors[tensor]
    if not _is_weight(shape, dtype):
        expected = f"{tensor} as a matrix of {', '.join(DTYPES)}"
        raise _unusable(path, expected, f"{dtype} {list(shape)}")
    return shape[0], shape[1]


def _is_weight(shape: list[int], dtype: str) -> bool:
    return len(shape) == 2 and 0 not in shape and dtype in DTYPES


def header(path: Path) -> dict[str, tuple[list[int], str]]:
    """Return the shape and the dtype of every tensor in a safetensors file, by name."""
    require_regular(path)
    try:
        with safe_open(path, framework="pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 (no dict)
            return {name: (s.get_shape(), s.get_dtype()) for name, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise _unusable(path, "a safetensors file", error) from error


def _unusable(path: Path, expected: str, actual: object) -> SuiteError:
    return SuiteError(f"{path}: expected {expected}; found {actual}")
