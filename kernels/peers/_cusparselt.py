"""Call cuSPARSELt directly: D[n, m] = W[n, k] @ B[k, m], W 2:4, with plans that are made once.

    once    library ─> handle ─> descriptors of W, B, D ─> product ─> algorithm ─> plan
            W compressed, for all plans of its layout
    a call  cusparseLtMatmul only; torch plans in each call, which takes 0.3 ms and more

nvmath-python also binds the library, but uses the copy that torch has loaded. This module uses:

    1. libcusparseLt.so.0 of the newest installed wheel, nvidia-cusparselt-cu13 or -cu12
    2. without a wheel, the one that torch has loaded, or that the system's loader finds

`Library.version` comes from the loaded library. Its structures are opaque: 512 bytes, aligned to
16, in the headers of 0.8.0 and of 0.10.0. Older libraries have other functions and are refused.
Source: cusparseLt.h of the wheels; docs.nvidia.com/cuda/cusparselt.
"""

import ctypes
import os
import re
import weakref
from collections.abc import Callable, Mapping
from ctypes import byref, c_int, c_int32, c_int64, c_size_t, c_uint32, c_void_p
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, files, version
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from sparsebench.errors import Unsupported

Order = Literal["rows", "columns"]
"""Which elements of a matrix are contiguous: those of its rows, or of its columns."""

NAME = "libcusparseLt.so.0"
WHEELS = "nvidia-cusparselt-cu13", "nvidia-cusparselt-cu12"
OLDEST = 0, 8
STRUCT_BYTES = 16384  # 512 in 0.8.0 and 0.10.0: room for any other
ALIGNMENT = 16  # bytes: of structures, and of matrices
MOST_WORKSPACE = 2**30  # bytes; k in parts with many tokens would need up to 7 GB

# library_types.h, cusparse.h, cusparseLt.h
TYPES = {torch.int8: 3, torch.float16: 2, torch.bfloat16: 14, torch.float8_e4m3fn: 28}
ORDERS: Mapping[Order, int] = {"columns": 1, "rows": 2}
HALF_SPARSE, DEFAULT, IS_A, AS_IT_IS, TRANSPOSED = 0, 0, 1, 0, 1
INT32_SUMS, FP32_SUMS = 0, 2
CONFIG, LAST_CONFIG, SPLIT_K, SPLIT_K_MODE = 0, 1, 3, 4  # cusparseLtMatmulAlgAttribute_t

P = c_void_p
SIGNATURES: Mapping[str, tuple[Any, ...]] = {
    "Init": (P,),
    "GetProperty": (c_int, P),
    "DenseDescriptorInit": (P, P, c_int64, c_int64, c_int64, c_uint32, c_int, c_int),
    "StructuredDescriptorInit": (P, P, c_int64, c_int64, c_int64, c_uint32, c_int, c_int, c_int),
    "MatDescriptorDestroy": (P,),
    "MatmulDescriptorInit": (P, P, c_int, c_int, P, P, P, P, c_int),
    "MatmulAlgSelectionInit": (P, P, P, c_int),
    "MatmulAlgSelectionDestroy": (P,),
    "MatmulAlgSetAttribute": (P, P, c_int, P, c_size_t),
    "MatmulAlgGetAttribute": (P, P, c_int, P, c_size_t),
    "MatmulPlanInit": (P, P, P, P),
    "MatmulPlanDestroy": (P,),
    "MatmulGetWorkspace": (P, P, P),
    "Matmul": (P, P, P, P, P, P, P, P, P, P, c_int32),
    "SpMMACompressedSize2": (P, P, P, P),
    "SpMMACompress2": (P, P, c_int, c_int, P, P, P, P),
}


class CusparseLtError(Exception):
    """A function of the library failed, or needs too large a workspace."""


@dataclass(frozen=True)
class Library:
    """A loaded library: its path, version, and functions by their name without the prefix."""

    path: str
    version: str
    functions: Mapping[str, Callable[..., int]]
    describe: Callable[[int], bytes]

    def __call__(self, name: str, *arguments: Any) -> None:
        """Call a function. Raises CusparseLtError with the library's message."""
        status = self.functions[name](*arguments)
        if status:
            message = self.describe(status).decode()
            raise CusparseLtError(f"cusparseLt{name}: status {status}, {message}")


@dataclass(frozen=True)
class LtAlgorithm:
    """One of the library's algorithms for a product; None leaves a setting to the library."""

    algorithm: int | None = None
    split_k: int | None = None
    split_k_mode: int | None = None


@dataclass(frozen=True)
class Matrix:
    """A dense matrix of the library: sizes, the stride between its rows or columns, and its order.

    If `transposed`, the library reads op(B) = B.T; rows and columns are those in memory.
    """

    rows: int
    columns: int
    stride: int
    order: Order
    dtype: torch.dtype
    transposed: bool = False


@dataclass(frozen=True)
class CompressedWeight:
    """W compressed, and its descriptor; `dense` is its layout before."""

    dense: Matrix
    descriptor: Any
    compressed: Tensor


def find() -> str:
    """Return the path of the library in the newest installed wheel, or its name for the loader."""
    installed: list[tuple[list[int], str]] = []
    for wheel in WHEELS:
        try:
            libraries = [file for file in files(wheel) or () if file.name == NAME]
        except PackageNotFoundError:
            continue
        numbers = [int(part) for part in re.findall(r"\d+", version(wheel))]
        paths = [Path(str(file.locate())) for file in libraries]
        installed += [(numbers, str(path)) for path in paths if path.exists()]
    return max(installed)[1] if installed else NAME


def load(path: str) -> Library:
    """Load a library. Raises Unsupported if there is none, or if it is too old.

    torch may have loaded another version. DEEPBIND makes this copy call its own functions.
    """
    try:
        loaded = ctypes.CDLL(path, mode=os.RTLD_NOW | os.RTLD_LOCAL | os.RTLD_DEEPBIND)
        return bind(path, loaded)
    except (OSError, AttributeError) as error:
        reason = f"needs cuSPARSELt 0.8.0 or newer (pip install {WHEELS[0]}): {error}"
        raise Unsupported(reason) from error


def bind(path: str, loaded: Any) -> Library:
    """Return the functions of a loaded library, with their signatures. Raises Unsupported."""
    functions = {}
    for name, arguments in SIGNATURES.items():
        function = getattr(loaded, f"cusparseLt{name}")
        function.argtypes, function.restype = arguments, c_int
        functions[name] = function
    describe = loaded.cusparseLtGetErrorString
    describe.argtypes, describe.restype = (c_int,), ctypes.c_char_p
    numbers = []
    for part in range(3):  # libraryPropertyType: major, minor, patch
        value = c_int()
        functions["GetProperty"](part, byref(value))
        numbers.append(value.value)
    version = ".".join(map(str, numbers))
    if tuple(numbers[:2]) < OLDEST:
        raise Unsupported(f"expected cuSPARSELt 0.8.0 or newer, found {version} at {path}")
    return Library(path, version, functions, describe)


@cache
def library() -> Library:
    """Return the cuSPARSELt of this process. Raises Unsupported."""
    return load(find())


@cache
def handle_on(device: torch.device) -> Any:
    handle = opaque()
    with torch.cuda.device(device):
        library()("Init", handle)
    return handle


def opaque() -> Any:
    """Return an aligned structure of the library, zeroed."""
    room = ctypes.create_string_buffer(STRUCT_BYTES + ALIGNMENT)
    start = -ctypes.addressof(room) % ALIGNMENT
    return (ctypes.c_uint8 * STRUCT_BYTES).from_buffer(room, start)


def compress(w: Tensor) -> CompressedWeight:
    """Compress W [n, k], which must be 2:4 and contiguous by rows or by columns.

    The library does not check that, and returns wrong products if W is not 2:4.
    """
    lt, handle, descriptor = library(), handle_on(w.device), opaque()
    order: Order = "rows" if w.is_contiguous() else "columns"
    n, k = w.shape
    dense = Matrix(n, k, k if order == "rows" else n, order, w.dtype)
    lt("StructuredDescriptorInit", handle, descriptor, *_described(dense), HALF_SPARSE)
    size, scratch = c_size_t(), c_size_t()
    lt("SpMMACompressedSize2", handle, descriptor, byref(size), byref(scratch))
    compressed = torch.empty(size.value, dtype=torch.uint8, device=w.device)
    room = torch.empty(max(scratch.value, 1), dtype=torch.uint8, device=w.device)
    stream = torch.cuda.current_stream(w.device)
    arguments = w.data_ptr(), compressed.data_ptr(), room.data_ptr(), stream.cuda_stream
    lt("SpMMACompress2", handle, descriptor, IS_A, AS_IT_IS, *arguments)
    stream.synchronize()  # then `room` and the caller's W may be freed
    weight = CompressedWeight(dense, descriptor, compressed)
    weakref.finalize(weight, lt.functions["MatDescriptorDestroy"], descriptor).atexit = False
    return weight


class MatmulPlan:
    """A product that is ready to run: `plan(b, d)` enqueues D = scale * W @ B + beta * D.

    weight     compressed W, which the plan keeps alive
    b, d       layouts of B and D; each call passes their pointers
    algorithm  requested algorithm; `actual` is that of the plan
    workspace  bytes on the device, from torch's allocator in each call
    """

    def __init__(
        self,
        weight: CompressedWeight,
        b: Matrix,
        d: Matrix,
        algorithm: LtAlgorithm,
        beta: float = 0.0,
        scale: float = 1.0,
    ) -> None:
        """Describe, choose the algorithm and plan. Raises CusparseLtError if refused."""
        self.weight, device = weight, weight.compressed.device
        self.library, self.handle, self.device = library(), handle_on(device), device
        self.product, self.selection, self.plan = opaque(), opaque(), opaque()
        self.matrices = [opaque(), opaque()]
        lt, handle = self.library, self.handle
        structures: list[tuple[str, Any]] = []  # destroyed in reverse
        weakref.finalize(self, _destroy, lt, structures).atexit = False
        for matrix, descriptor in zip((b, d), self.matrices, strict=True):
            lt("DenseDescriptorInit", handle, descriptor, *_described(matrix))
            structures.append(("MatDescriptorDestroy", descriptor))
        ops = AS_IT_IS, TRANSPOSED if b.transposed else AS_IT_IS
        of_b, of_d = self.matrices
        operands = weight.descriptor, of_b, of_d, of_d
        sums = INT32_SUMS if b.dtype == torch.int8 else FP32_SUMS
        lt("MatmulDescriptorInit", handle, self.product, *ops, *operands, sums)
        lt("MatmulAlgSelectionInit", handle, self.selection, self.product, DEFAULT)
        structures.append(("MatmulAlgSelectionDestroy", self.selection))
        for attribute, value in (
            (CONFIG, algorithm.algorithm),
            (SPLIT_K, algorithm.split_k),
            (SPLIT_K_MODE, algorithm.split_k_mode),
        ):
            if value not in (None, self._get(attribute)):
                self._set(attribute, value)
        lt("MatmulPlanInit", handle, self.plan, self.product, self.selection)
        structures.append(("MatmulPlanDestroy", self.plan))
        self.scalars = ctypes.c_float(scale), ctypes.c_float(beta)
        self.workspace = self._workspace()

    def __call__(self, b: Tensor, d: Tensor) -> None:
        """Enqueue the product on the current stream."""
        room = torch.empty(max(self.workspace, 1), dtype=torch.uint8, device=self.device)
        stream = c_void_p(torch.cuda.current_stream(self.device).cuda_stream)
        scale, beta = self.scalars
        matrices = self.weight.compressed.data_ptr(), b.data_ptr()
        self.library(
            "Matmul",
            *(self.handle, self.plan, byref(scale), *matrices, byref(beta)),
            *(d.data_ptr(), d.data_ptr(), room.data_ptr(), byref(stream), 1),
        )

    @property
    def actual(self) -> LtAlgorithm:
        return LtAlgorithm(*(self._get(a) for a in (CONFIG, SPLIT_K, SPLIT_K_MODE)))

    @property
    def algorithms(self) -> int:
        """Return the number of algorithms that the library has for this product."""
        return self._get(LAST_CONFIG)

    def _workspace(self) -> int:
        size = c_size_t()
        self.library("MatmulGetWorkspace", self.handle, self.plan, byref(size))
        if size.value > MOST_WORKSPACE:
            expected = f"a workspace of at most {MOST_WORKSPACE} bytes"
            raise CusparseLtError(f"expected {expected}, found {size.value}")
        return size.value

    def _set(self, attribute: int, value: int) -> None:
        data, size = c_int(value), ctypes.sizeof(c_int)
        arguments = attribute, byref(data), size
        self.library("MatmulAlgSetAttribute", self.handle, self.selection, *arguments)

    def _get(self, attribute: int) -> int:
        data, size = c_int(), ctypes.sizeof(c_int)
        arguments = attribute, byref(data), size
        self.library("MatmulAlgGetAttribute", self.handle, self.selection, *arguments)
        return data.value


def _destroy(lt: Library, structures: list[tuple[str, Any]]) -> None:
    for name, structure in reversed(structures):
        lt.functions[name](structure)


def _described(m: Matrix) -> tuple[int, ...]:
    return m.rows, m.columns, m.stride, ALIGNMENT, TYPES[m.dtype], ORDERS[m.order]
