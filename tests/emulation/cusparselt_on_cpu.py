"""A stand-in for cuSPARSELt on the CPU: its functions, through ctypes, with its own rules.

Each function is a C callback with the signature of cusparseLt.h, so that what the binding passes is
converted as for the real library. Structures are known by address. The product is computed densely
in fp32, or exactly in int8, from the pointers, sizes, strides and orders that the binding gave.
"""

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sparsebench.kernels.peers import _cusparselt

DTYPES = {code: dtype for dtype, code in _cusparselt.TYPES.items()}
SUCCESS, INVALID = 0, 3
WORDS = {
    INVALID: ctypes.create_string_buffer(b"invalid value"),
}
ALGORITHMS = 5
DEFAULT = {_cusparselt.CONFIG: 0, _cusparselt.SPLIT_K: 1, _cusparselt.SPLIT_K_MODE: 0}


class Refused(Exception):
    """A function returns this status."""


class OnCpu:
    """The library: the names of its functions as they are called, and the structures alive."""

    def __init__(self, version: tuple[int, int, int] = (0, 8, 0)) -> None:
        self.version, self.called = version, list[str]()
        self.alive: dict[int, Any] = {}
        self.planned: list[dict[str, Any]] = []
        self.errors: list[Exception] = []
        for name, arguments in _cusparselt.SIGNATURES.items():
            kind = ctypes.CFUNCTYPE(ctypes.c_int, *arguments)
            setattr(self, f"cusparseLt{name}", kind(partial(self._call, name)))
        words = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)  # of a char *, it would leak
        self.cusparseLtGetErrorString = words(lambda status: ctypes.addressof(WORDS[status]))

    def _call(self, name: str, *arguments: Any) -> int:
        self.called.append(name)
        function: Callable[..., None] = getattr(self, name)
        try:
            function(*arguments)
        except Refused as refused:
            return int(refused.args[0])
        except Exception as error:  # a callback cannot raise
            self.errors.append(error)
            return INVALID
        return SUCCESS

    def Init(self, handle: int) -> None:
        assert handle % _cusparselt.ALIGNMENT == 0
        self.alive[handle] = "handle"

    def GetProperty(self, part: int, value: int) -> None:
        ctypes.c_int.from_address(value).value = self.version[part]

    def DenseDescriptorInit(self, handle: int, descriptor: int, *matrix: int) -> None:
        assert self.alive[handle] == "handle"
        assert descriptor % _cusparselt.ALIGNMENT == 0
        rows, columns, stride, alignment, dtype, order = matrix
        least = columns if order == _cusparselt.ORDERS["rows"] else rows
        if alignment % 16 or stride < least or stride * DTYPES[dtype].itemsize % 16:
            raise Refused(INVALID)
        self.alive[descriptor] = matrix

    def StructuredDescriptorInit(self, handle: int, descriptor: int, *matrix: int) -> None:
        *matrix_alone, sparsity = matrix
        assert sparsity == 0
        self.DenseDescriptorInit(handle, descriptor, *matrix_alone)

    def MatDescriptorDestroy(self, descriptor: int) -> None:
        del self.alive[descriptor]

    def MatmulDescriptorInit(self, handle: int, product: int, *rest: int) -> None:
        op_a, op_b, *matrices, sums = rest
        a, b, c, d = (self.alive[matrix] for matrix in matrices)
        integers = a[4] == _cusparselt.TYPES[torch.int8]
        assert (op_a, sums, c) == (0, 0 if integers else 2, d)
        depth, tokens = (b[1], b[0]) if op_b else b[:2]
        if (a[1], a[0], tokens) != (depth, *d[:2]):
            raise Refused(INVALID)
        self.alive[product] = a, b, d, op_b

    def MatmulAlgSelectionInit(self, handle: int, selection: int, product: int, alg: int) -> None:
        assert alg == 0
        assert product in self.alive
        self.alive[selection] = dict(DEFAULT)

    def MatmulAlgSelectionDestroy(self, selection: int) -> None:
        del self.alive[selection]

    def MatmulAlgSetAttribute(self, handle: int, selection: int, *rest: int) -> None:
        attribute, data, size = rest
        value = self._int(data, size).value
        if attribute == _cusparselt.CONFIG and value >= ALGORITHMS:
            raise Refused(INVALID)
        self.alive[selection][attribute] = value

    def MatmulAlgGetAttribute(self, handle: int, selection: int, *rest: int) -> None:
        attribute, data, size = rest
        values = {**self.alive[selection], _cusparselt.LAST_CONFIG: ALGORITHMS}
        self._int(data, size).value = values[attribute]

    def MatmulPlanInit(self, handle: int, plan: int, product: int, selection: int) -> None:
        a, b, d, op_b = self.alive[product]
        chosen = self.alive[selection]
        self.alive[plan] = a, b, d, op_b, chosen
        self.planned.append(dict(chosen))

    def MatmulPlanDestroy(self, plan: int) -> None:
        del self.alive[plan]

    def MatmulGetWorkspace(self, handle: int, plan: int, size: int) -> None:
        assert plan in self.alive
        ctypes.c_size_t.from_address(size).value = 64

    def SpMMACompressedSize2(self, handle: int, descriptor: int, size: int, scratch: int) -> None:
        rows, columns, _, _, dtype, _ = self.alive[descriptor]
        ctypes.c_size_t.from_address(size).value = rows * columns * DTYPES[dtype].itemsize
        ctypes.c_size_t.from_address(scratch).value = 32

    def SpMMACompress2(self, handle: int, descriptor: int, *rest: int) -> None:
        is_a, op, dense, compressed, _, _ = rest
        assert (is_a, op) == (1, 0)
        rows, columns, _, _, dtype, order = self.alive[descriptor]
        assert DTYPES[dtype].itemsize > 1 or order == _cusparselt.ORDERS["rows"]
        ctypes.memmove(compressed, dense, rows * columns * DTYPES[dtype].itemsize)

    def Matmul(self, handle: int, plan: int, *rest: int) -> None:
        alpha, a, b, beta, c, d, workspace, _, streams = rest
        described_a, described_b, described_d, op_b, _ = self.alive[plan]
        assert (c, streams) == (d, 1)
        assert workspace
        left, right, out = read(a, described_a), read(b, described_b), read(d, described_d)
        integers = out.dtype == torch.int8
        wide = torch.float64 if integers else torch.float32
        result = left.to(wide) @ (right.t() if op_b else right).to(wide)
        scale, factor = (ctypes.c_float.from_address(scalar).value for scalar in (alpha, beta))
        result = scale * result + factor * out.to(wide) if factor else scale * result
        out.copy_(result.round().clamp(-128, 127) if integers else result)

    @staticmethod
    def _int(address: int, size: int) -> Any:
        assert size == ctypes.sizeof(ctypes.c_int)
        return ctypes.c_int.from_address(address)


def read(pointer: int, matrix: tuple[int, ...]) -> Tensor:
    """Return the matrix at a pointer, sharing its memory."""
    rows, columns, stride, _, code, order = matrix
    dtype = DTYPES[code]
    by_rows = order == _cusparselt.ORDERS["rows"]
    lines, length = (rows, columns) if by_rows else (columns, rows)
    count = (lines - 1) * stride + length
    room = (ctypes.c_uint8 * (count * dtype.itemsize)).from_address(pointer)
    flat = torch.frombuffer(room, dtype=dtype)
    matrix_by_lines = flat.as_strided((lines, length), (stride, 1))
    return matrix_by_lines if by_rows else matrix_by_lines.t()
