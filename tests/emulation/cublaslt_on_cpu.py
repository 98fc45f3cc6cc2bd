"""The functions of cuBLASLt that _cublaslt.py calls, on the CPU: products from addresses.

A handle, a descriptor or a preference is a number, and `contents` holds what was said of it.
Matrices are column-major, as in the library. The heuristics propose three algorithms: ANY, TILED
for as many columns as were asked for, and NONE, which no product accepts.
"""

import ctypes
import enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.kernels.dense._cublaslt import TYPES

DTYPES = {code: dtype for dtype, code in TYPES.items()}
COMPUTES = 68, 72, 77  # cublasComputeType_t: fp32, int32, tf32
FIELDS = [np.int32, np.uint32, np.int32, *[np.uint32] * 4, np.uint16, np.uint16]
ANY, TILED, NONE = 11, 66, 99
VERSION = 130100


class cuBLASLtError(Exception):
    """What the library raises."""


class MatmulDescAttribute(enum.IntEnum):
    """As in the library."""

    TRANSA, TRANSB, EPILOGUE, FAST_ACCUM = 3, 4, 7, 25


class Epilogue(enum.IntEnum):
    """As in the library."""

    RELU = 2


class MatmulPreferenceAttribute(enum.IntEnum):
    """As in the library."""

    MAX_WORKSPACE_BYTES, REDUCTION_SCHEME_MASK = 1, 3
    MIN_ALIGNMENT_A_BYTES, MIN_ALIGNMENT_B_BYTES = 5, 6
    MIN_ALIGNMENT_C_BYTES, MIN_ALIGNMENT_D_BYTES = 7, 8


matmul_heuristic_result_dtype = np.dtype([("algo", np.int64, (9,)), ("workspace_size", np.uint64)])


class MatmulHeuristicResult:
    """The `size` results that were requested."""

    def __init__(self, size: int = 1) -> None:
        self.data = np.zeros(size, matmul_heuristic_result_dtype)
        self.ptr = self.data.ctypes.data

    @property
    def workspace_size(self) -> int:
        return int(self.data["workspace_size"][0])


class MatmulAlgo(MatmulHeuristicResult):
    """One algorithm: the first member of a result."""


contents: dict[int, dict[Any, Any]] = {}


def new(**fields: Any) -> int:
    contents[len(contents) + 1] = fields
    return len(contents)


def get_version() -> int:
    return VERSION


def matmul_desc_create(compute: int, scale: int) -> int:
    return new(compute=compute, scale=scale)


def matmul_preference_create() -> int:
    return new()


def matmul_preference_destroy(preference: int) -> None:
    assert preference in contents


def matrix_layout_create(dtype: int, rows: int, columns: int, leading: int) -> int:
    assert leading >= rows
    return new(dtype=dtype, rows=rows, columns=columns, leading=leading)


def get_matmul_algo_config_attribute_dtype(attribute: int) -> type:
    return FIELDS[attribute]


def get_matmul_desc_attribute_dtype(attribute: int) -> type:
    return np.int8 if attribute == MatmulDescAttribute.FAST_ACCUM else np.int32


def get_matmul_preference_attribute_dtype(attribute: int) -> type:
    return np.uint64 if attribute == MatmulPreferenceAttribute.MAX_WORKSPACE_BYTES else np.uint32


def at(address: int, dtype: Any, count: int = 1) -> Any:
    size = np.dtype(dtype).itemsize * count
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def matmul_desc_set_attribute(operation: int, name: int, value: int, size: int) -> None:
    contents[operation][name] = int(at(value, get_matmul_desc_attribute_dtype(name))[0])


def matmul_preference_set_attribute(preference: int, name: int, value: int, size: int) -> None:
    contents[preference][name] = int(at(value, get_matmul_preference_attribute_dtype(name))[0])


def matmul_algo_init(
    handle: int, compute: int, scale: int, a: int, b: int, c: int, d: int, id: int, algo: int
) -> None:
    at(algo, np.int64, 9)[:] = [id, *[0] * 8]


def matmul_algo_config_set_attribute(algo: int, name: int, value: int, size: int) -> None:
    assert size == np.dtype(FIELDS[name]).itemsize
    at(algo, np.int64, 9)[name] = at(value, FIELDS[name])[0]


def matmul_algo_config_get_attribute(
    algo: int, name: int, value: int, size: int, written: int
) -> None:
    at(value, FIELDS[name])[0] = at(algo, np.int64, 9)[name]


def matmul_algo_get_heuristic(
    handle: int, operation: int, a: int, b: int, c: int, d: int, limit: int, count: int, *at_: int
) -> None:
    """Propose nothing for a product of 8 bits but of rows by columns, as on Hopper."""
    results, count_at = at_
    said = contents[operation]
    turned = said[MatmulDescAttribute.TRANSA], said[MatmulDescAttribute.TRANSB]
    if DTYPES[contents[a]["dtype"]].itemsize == 1 and turned != (1, 0):
        raise cuBLASLtError("NOT_SUPPORTED (15)")
    assert contents[limit][MatmulPreferenceAttribute.REDUCTION_SCHEME_MASK] == 2
    proposed = at(results, matmul_heuristic_result_dtype, count)
    tile = contents[d]["columns"]
    answers = [(ANY, 0, 0), (TILED, tile, tile // 16 % 2), (NONE, 0, 0), (ANY, 0, 0)][:count]
    for i, (id, tile, option) in enumerate(answers):
        proposed["algo"][i] = [id, tile, 1, 0, 0, option, 5, 2, 3]
    at(count_at, np.int32)[0] = len(answers)


def matmul_algo_check(
    handle: int, operation: int, a: int, b: int, c: int, d: int, algo: int, result: int
) -> None:
    id, tile = at(algo, np.int64, 9)[:2]
    if id not in (ANY, TILED) or (id == TILED and tile < contents[d]["columns"]):
        raise cuBLASLtError("NOT_SUPPORTED (15)")
    at(result, matmul_heuristic_result_dtype)["workspace_size"] = 64 if id == TILED else 0


def matmul(handle: int, operation: int, alpha: int, *rest: int) -> None:
    a, of_a, b, of_b, beta, c, of_c, d, of_d, algo, _, size, _ = rest
    fields = contents[operation]
    assert fields["compute"] in COMPUTES
    assert fields["scale"] == 0
    assert (c, of_c, at(beta, np.float32)[0]) == (d, of_d, 0.0)
    assert size >= (64 if at(algo, np.int64)[0] == TILED else 0)
    left, right, out = _matrix(a, of_a), _matrix(b, of_b), _matrix(d, of_d)
    left = left.t() if fields[MatmulDescAttribute.TRANSA] else left
    right = right.t() if fields[MatmulDescAttribute.TRANSB] else right
    integers = left.dtype == torch.int8
    assert integers == (fields["compute"] == 72)
    sums = at(alpha, np.float32)[0].item() * (left.double() @ right.double())
    sums = sums.round().clamp(-128, 127) if out.dtype == torch.int8 else sums
    out.copy_(sums.relu() if MatmulDescAttribute.EPILOGUE in fields else sums)


def _matrix(address: int, layout: int) -> Tensor:
    """Return the matrix [rows, columns] at an address, which lies by columns."""
    fields = contents[layout]
    dtype, rows, columns, leading = (fields[n] for n in ("dtype", "rows", "columns", "leading"))
    count = leading * (columns - 1) + rows
    flat = at(address, np.uint8, count * DTYPES[dtype].itemsize)
    return torch.from_numpy(flat).view(DTYPES[dtype]).as_strided((rows, columns), (1, leading))
