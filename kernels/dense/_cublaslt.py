"""Direct calls of cuBLASLt: the algorithms that it proposes for a product, and a call of one.

    out [m, n] = scale * a [m, k] @ b [k, n]       out is row-major; a and b may also be transposed
                                                   views, whose columns are contiguous

torch requests one algorithm from cuBLASLt's heuristics and takes it. This module requests one and
COUNT (at most 8 come back, and not always the one), and the caller times them. It also queries the
heuristics for other numbers of rows of `a`: an algorithm for 32 tokens also computes 16, with the
rest of its tile empty, and is sometimes faster than those proposed for 16. No operand is padded for
that. `combined` adds combinations that the heuristics never propose.

`bind_weight` multiplies any X by weights of one shape; a call may be recorded (front.py).

An Algorithm is the nine fields from which the library finds it again. Every call is built from
them, also in a search: a process that has the fields makes the same call.

The library is column-major: it gets out.T [n, m] = b.T @ a.T. Sums stay in fp32, in int8 in int32,
between the parts of a split k. int8 operands give int8, scaled in fp32. Calls go through
nvmath-python's bindings to the libcublasLt that torch has loaded.
Source: docs.nvidia.com/cuda/cublas, cublasLtMatmul and cublasLtMatmulAlgoGetHeuristic.
"""

import ctypes
import os
import struct
from collections.abc import Callable, Sequence
from dataclasses import asdict, astuple, dataclass, replace
from functools import cache, cached_property
from importlib import import_module
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.kernels._common import scratch
from sparsebench.kernels._common.capture import is_capturing, keep
from sparsebench.kernels._common.requirements import GPU_EXTRA, unsupported_without
from sparsebench.kernels._common.tape import LibraryCall, on_tape

COUNT = 32  # algorithms to request from the heuristics
WORKSPACE = 32 << 20  # bytes, as NVIDIA recommends for Hopper

# library_types.h and cublas_api.h
TYPES = {
    torch.float32: 0,
    torch.float16: 2,
    torch.int8: 3,
    torch.bfloat16: 14,
    torch.float8_e4m3fn: 28,
}
FP32, COMPUTE_FP32, COMPUTE_INT32, COMPUTE_TF32 = 0, 68, 72, 77
SUMS_AS_COMPUTED = 2  # cublasLtReductionScheme_t: parts of a split k are added in fp32 or int32
ALIGNMENT = 256  # bytes; the heuristics consider no more


@dataclass(frozen=True)
class Algorithm:
    """The fields of cublasLtMatmulAlgoConfigAttributes_t, in that order."""

    id: int
    tile: int = 0
    split_k: int = 1
    reduction: int = 0
    swizzle: int = 0
    option: int = 0
    stages: int = 0
    inner_shape: int = 0
    cluster_shape: int = 0


@dataclass(frozen=True, eq=False)
class Gemm:
    """One product: its operands, and how it is computed.

    out    [m, n], row-major, of the output's dtype
    scale  multiplies the sums
    tf32   fp32 is multiplied with 10 bits of mantissa
    fast   in fp8: sums keep 13 bits; otherwise they are added to fp32 every few instructions
    relu   out is relu of that
    """

    a: Tensor
    b: Tensor
    out: Tensor
    scale: float = 1.0
    tf32: bool = False
    fast: bool = False
    relu: bool = False

    @cached_property
    def descriptors(self) -> tuple[int, int, int, int, int]:
        """Describe the operation, b.T, a.T, and out.T twice; all calls share these."""
        return _descriptors(self, len(self.a))


@cache
def unavailable() -> str | None:
    """Return why the library cannot be called directly here, or None."""
    if reason := unsupported_without("nvmath", GPU_EXTRA):
        return reason
    try:
        import_module("nvmath.bindings.cublasLt")
    except ImportError as error:
        return f"nvmath-python does not load: {error}"
    return None


def workspace(device: torch.device) -> Tensor:
    """Return a workspace that several calls share."""
    return torch.empty(WORKSPACE, dtype=torch.uint8, device=device)


def version() -> int:
    """Return the version of the loaded library, such as 130100 for 13.1.0."""
    from nvmath.bindings import cublasLt

    return int(cublasLt.get_version())


def algorithms(gemm: Gemm, rows: int) -> list[Algorithm]:
    """Return the algorithms proposed for `rows` rows that the product accepts, best guess first.

    There are none for operands of types and layouts that the library cannot multiply.
    """
    proposed = [each for count in (1, COUNT) for each in _proposed(gemm, rows, count)]
    return _accepted(gemm, proposed)


def combined(gemm: Gemm, proposed: Sequence[Algorithm]) -> list[Algorithm]:
    """Return the combinations of tile, cluster and option of these that the product accepts.

    Combines within each algorithm (id), with k in one part. On an H200 this gains up to 8 % for 16
    tokens (NOTES.md).
    """
    combinations = []
    for like in {each.id: each for each in proposed}.values():
        same = [each for each in proposed if each.id == like.id]
        values = [
            sorted({getattr(each, name) for each in same})
            for name in ("tile", "cluster_shape", "option")
        ]
        whole = replace(like, split_k=1, reduction=0)
        combinations += [
            replace(whole, tile=tile, cluster_shape=cluster, option=option)
            for tile, cluster, option in product(*values)
        ]
    return _accepted(gemm, combinations)


def _accepted(gemm: Gemm, proposed: Sequence[Algorithm]) -> list[Algorithm]:
    """Return each algorithm once, if the product accepts it."""
    return [each for each in dict.fromkeys(proposed) if _built(gemm, each)]


def _proposed(gemm: Gemm, rows: int, count: int) -> list[Algorithm]:
    """Return the answer of the heuristics to a request for `count` algorithms."""
    from nvmath.bindings import cublasLt

    results, returned = cublasLt.MatmulHeuristicResult(count), np.zeros(1, np.int32)
    preference = _preference(gemm)
    try:
        cublasLt.matmul_algo_get_heuristic(
            *(_handle(gemm.out.device), *_descriptors(gemm, rows)),
            *(preference, count, results.ptr, returned.ctypes.data),
        )
    except cublasLt.cuBLASLtError:  # CUBLAS_STATUS_NOT_SUPPORTED
        return []
    finally:
        cublasLt.matmul_preference_destroy(preference)
    size = cublasLt.matmul_heuristic_result_dtype.itemsize  # the algorithm is its first member
    return [_fields(results.ptr + i * size) for i in range(int(returned[0]))]


def bind(gemm: Gemm, algorithm: Algorithm, space: Tensor | None = None) -> Callable[[], Tensor]:
    """Return a call that computes `gemm.out` on the current stream.

    space  from `workspace`; None allocates one that is no larger than needed

    Raises Unsupported if the library cannot be called or does not accept the algorithm.
    """
    if reason := unavailable():
        raise Unsupported(f"cuBLASLt called directly: {reason}")
    from nvmath.bindings import cublasLt

    device, built = gemm.out.device, _built(gemm, algorithm)
    if built is None:
        raise Unsupported(f"cuBLASLt {version()} does not accept the algorithm {asdict(algorithm)}")
    algo, size = built
    room = torch.empty(size, dtype=torch.uint8, device=device) if space is None else space
    operation, of_b, of_a, of_out, _ = gemm.descriptors
    factors = np.array([gemm.scale, 0], np.float32)
    one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    b, a, out = gemm.b.data_ptr(), gemm.a.data_ptr(), gemm.out.data_ptr()
    before = _handle(device), operation, one, b, of_b, a, of_a, zero, out, of_out, out, of_out
    alive = gemm, room, factors, algo  # must live as long as the call, which points to them

    def run() -> Tensor:
        stream = torch.cuda.current_stream(device).cuda_stream
        cublasLt.matmul(*before, algo.ptr, room.data_ptr(), room.numel(), stream)
        return alive[0].out

    return run


def bind_weight(w: Tensor, algorithm: Algorithm, most: int) -> Callable[..., Tensor]:
    """Return a call (X [m, k], W, out [m, n] or None) -> X @ W.T for W [n, k], m up to `most`.

    A call's W has the sizes, the strides and the alignment of this one. X has rows of any stride.
    Raises Unsupported if the library cannot be called, or does not accept the algorithm for one row
    and for `most`; a call, for its own.
    """
    if reason := unavailable():
        raise Unsupported(f"cuBLASLt called directly: {reason}")
    from nvmath.bindings import cublasLt

    def built(x: Tensor, w: Tensor, y: Tensor) -> tuple[tuple[int, ...], Any, int]:
        if (result := _built(gemm := Gemm(x, w.t(), y), algorithm)) is None:
            accepted = f"cuBLASLt {version()} does not accept {asdict(algorithm)}"
            raise Unsupported(f"{accepted} for {len(x)} rows of {list(w.t().shape)}")
        return gemm.descriptors, *result

    handle, address, factors = _handle(w.device), _address(), np.array([1, 0], np.float32)
    one, zero = factors.ctypes.data, factors.ctypes.data + factors.itemsize
    y, x = (w.new_empty(most, side) for side in w.shape)
    plans = {(m, x.stride(0)): built(x[:m], w, y[:m]) for m in {1, most}}

    def run(x: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        y = x.new_empty(x.shape[0], w.shape[0]) if out is None else out
        if (key := (x.shape[0], x.stride(0))) not in plans:
            plans[key] = built(x, w, y)
        (operation, of_w, of_x, of_y, _), algo, size = plans[key]
        room = scratch.workspace(x, -(-size // 4))
        alive = w, room, factors, plans  # what the call points to
        at_y, at_room = y.data_ptr(), 0 if room is None else room.data_ptr()
        before = handle, operation, one, w.data_ptr(), of_w, x.data_ptr(), of_x, zero
        words = *before, at_y, of_y, at_y, of_y, algo.ptr, at_room, size
        cublasLt.matmul(*words, torch.cuda.current_stream(w.device).cuda_stream)
        if is_capturing(y):
            keep((w, factors, plans))  # the graph's pool has the workspace, and lends it again
        on_tape(y, owners=(alive,), call=LibraryCall(address, struct.pack("16Q", *words, 0)))
        return y

    return run


@cache
def _address() -> int:
    """Return the address of cublasLtMatmul in the loaded library. Raises Unsupported."""
    name = f"libcublasLt.so.{version() // 10_000}"
    try:
        library = ctypes.CDLL(name, os.RTLD_NOW | os.RTLD_NOLOAD)
    except OSError as error:
        raise Unsupported(f"cuBLASLt called directly: expected {name}, found {error}") from None
    return int(ctypes.cast(library.cublasLtMatmul, ctypes.c_void_p).value or 0)


def _built(gemm: Gemm, algorithm: Algorithm) -> tuple[Any, int] | None:
    """Return the algorithm in the library's form and the bytes it needs, or None if refused."""
    from nvmath.bindings import cublasLt

    handle, output = _handle(gemm.out.device), TYPES[gemm.out.dtype]
    types = FP32, TYPES[gemm.b.dtype], TYPES[gemm.a.dtype], output, output
    algo, result = cublasLt.MatmulAlgo(), cublasLt.MatmulHeuristicResult()
    try:
        cublasLt.matmul_algo_init(handle, _compute(gemm), *types, algorithm.id, algo.ptr)
        for attribute, value in list(enumerate(astuple(algorithm)))[1:]:  # 0 is the id
            dtype = cublasLt.get_matmul_algo_config_attribute_dtype(attribute)
            field = np.array([value], dtype)
            cublasLt.matmul_algo_config_set_attribute(
                algo.ptr, attribute, field.ctypes.data, field.nbytes
            )
        cublasLt.matmul_algo_check(handle, *gemm.descriptors, algo.ptr, result.ptr)
    except cublasLt.cuBLASLtError:
        return None
    size = int(result.workspace_size)
    return (algo, size) if size <= WORKSPACE else None


def _fields(algo: int) -> Algorithm:
    """Read the fields of the algorithm at an address."""
    from nvmath.bindings import cublasLt

    values, written = [], np.zeros(1, np.uint64)
    for attribute in range(len(Algorithm.__dataclass_fields__)):
        field = np.zeros(1, cublasLt.get_matmul_algo_config_attribute_dtype(attribute))
        cublasLt.matmul_algo_config_get_attribute(
            algo, attribute, field.ctypes.data, field.nbytes, written.ctypes.data
        )
        values.append(int(field[0]))
    return Algorithm(*values)


def _descriptors(gemm: Gemm, rows: int) -> tuple[int, int, int, int, int]:
    """Describe the product of `rows` rows of a: the operation, b.T, a.T, and out.T twice.

    A description is some hundred bytes of host memory, and lives as long as the process. Products
    of one layout share it.
    """
    fast = gemm.fast if gemm.a.dtype == torch.float8_e4m3fn else None
    turned = not _by_rows(gemm.b), not _by_rows(gemm.a)
    operation = _operation(_compute(gemm), *turned, fast, gemm.relu)
    (_, k), n = gemm.a.shape, gemm.b.shape[1]
    out = _layout(gemm.out, rows, n)
    return operation, _layout(gemm.b, k, n), _layout(gemm.a, rows, k), out, out


@cache
def _operation(compute: int, turned_b: bool, turned_a: bool, fast: bool | None, relu: bool) -> int:
    from nvmath.bindings import cublasLt

    operation = int(cublasLt.matmul_desc_create(compute, FP32))
    names = cublasLt.MatmulDescAttribute
    attributes = [(names.TRANSA, turned_b), (names.TRANSB, turned_a)]
    if fast is not None:
        attributes.append((names.FAST_ACCUM, fast))
    if relu:
        attributes.append((names.EPILOGUE, cublasLt.Epilogue.RELU))
    for name, value in attributes:
        field = np.array([value], cublasLt.get_matmul_desc_attribute_dtype(name))
        cublasLt.matmul_desc_set_attribute(operation, name, field.ctypes.data, field.nbytes)
    return operation


def _layout(matrix: Tensor, rows: int, columns: int) -> int:
    """Describe the transpose of a matrix in memory, as if it had these sizes."""
    inner, outer = (columns, rows) if _by_rows(matrix) else (rows, columns)
    leading = max(matrix.stride(0 if _by_rows(matrix) else 1), inner)
    return _matrix(TYPES[matrix.dtype], inner, outer, leading)


@cache
def _matrix(kind: int, inner: int, outer: int, leading: int) -> int:
    from nvmath.bindings import cublasLt

    return int(cublasLt.matrix_layout_create(kind, inner, outer, leading))


def _by_rows(matrix: Tensor) -> bool:
    """Return whether the elements of a row are contiguous; if not, those of a column are."""
    return matrix.stride(1) == 1 or (matrix.shape[1] == 1 and matrix.stride(0) != 1)


def _preference(gemm: Gemm) -> int:
    """Return the constraints on the heuristics: workspace, sums as computed, alignment."""
    from nvmath.bindings import cublasLt

    names, preference = cublasLt.MatmulPreferenceAttribute, int(cublasLt.matmul_preference_create())
    attributes = {
        names.MAX_WORKSPACE_BYTES: WORKSPACE,
        names.REDUCTION_SCHEME_MASK: SUMS_AS_COMPUTED,
        names.MIN_ALIGNMENT_A_BYTES: alignment(gemm.b),
        names.MIN_ALIGNMENT_B_BYTES: alignment(gemm.a),
        names.MIN_ALIGNMENT_C_BYTES: alignment(gemm.out),
        names.MIN_ALIGNMENT_D_BYTES: alignment(gemm.out),
    }
    for name, value in attributes.items():
        field = np.array([value], cublasLt.get_matmul_preference_attribute_dtype(name))
        cublasLt.matmul_preference_set_attribute(preference, name, field.ctypes.data, field.nbytes)
    return preference


def alignment(tensor: Tensor) -> int:
    """Return the largest power of two, up to ALIGNMENT, that divides the address."""
    address = tensor.data_ptr() | ALIGNMENT
    return address & -address


def _compute(gemm: Gemm) -> int:
    if gemm.a.dtype == torch.int8:
        return COMPUTE_INT32
    return COMPUTE_TF32 if gemm.tf32 else COMPUTE_FP32


@cache
def _handle(device: torch.device) -> int:
    from nvmath.bindings import cublasLt

    with torch.cuda.device(device):
        return int(cublasLt.create())
