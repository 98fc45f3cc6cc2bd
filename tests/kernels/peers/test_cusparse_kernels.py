"""The cuSPARSE peers on a fake cuSPARSE in numpy: sizes, orders, strides, padding; no GPU."""

import ctypes
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from scipy import sparse

from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.harness.catalog import load_op
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.peers import _cusparse, cusparse_bell, cusparse_bsr, cusparse_csr
from sparsebench.results.record import Problem

WGRAD_PEERS = [(cusparse_csr, None), (cusparse_bsr, 4), (cusparse_bsr, 3)]
PEERS = [(cusparse_csr, None), (cusparse_bsr, 4), (cusparse_bell, 4), (cusparse_bsr, 3)]


class RefusedError(Exception):
    pass


class HostCusparse:
    """A fake nvmath.bindings.cusparse on host pointers, in fp32, after the library's manual."""

    cuSPARSEError = RefusedError
    Order = SimpleNamespace(COL=1, ROW=2)
    IndexType = SimpleNamespace(INDEX_32I=2)
    IndexBase = SimpleNamespace(ZERO=0)
    SDDMMAlg = SimpleNamespace(DEFAULT=0)
    SpMMAlg = dict.fromkeys(["CSR_ALG1", "CSR_ALG2", "CSR_ALG3", "BSR_ALG1", "BLOCKED_ELL_ALG1"], 0)

    def __init__(self) -> None:
        self.described: list[Any] = []
        self.values: dict[int, int] = {}
        self.refuses = False

    def create(self) -> int:
        return 1

    def get_version(self, handle: int) -> int:
        return 12603

    def set_stream(self, handle: int, stream: int) -> None:
        pass

    def create_csr(self, n: int, k: int, nnz: int, *rest: int) -> int:
        offsets, columns, values, *_ = rest
        arrays = floats(values, nnz), ints(columns, nnz), ints(offsets, n + 1)
        return self.keep(sparse.csr_array(arrays, shape=(n, k)))

    def create_bsr(self, rows: int, columns: int, count: int, r: int, c: int, *rest: int) -> int:
        offsets, indices, values, *_, order = rest
        assert order == self.Order.ROW
        data = floats(values, count * r * c).reshape(count, r, c)
        arrays = data, ints(indices, count), ints(offsets, rows + 1)
        return self.keep(sparse.bsr_array(arrays, shape=(rows * r, columns * c)))

    def create_blocked_ell(self, n: int, k: int, b: int, ell_columns: int, *rest: int) -> int:
        indices, values, *_ = rest
        assert n % b == k % b == ell_columns % b == 0
        panels = floats(values, n * ell_columns).reshape(n, ell_columns)
        columns = ints(indices, n // b * (ell_columns // b)).reshape(n // b, -1)
        dense = np.zeros((n, k), np.float32)
        for (row, slot), column in np.ndenumerate(columns):
            if column >= 0:
                block = panels[row * b : row * b + b, slot * b : slot * b + b]
                dense[row * b : row * b + b, column * b : column * b + b] = block
        return self.keep(dense)

    def create_dn_mat(
        self, rows: int, columns: int, ld: int, at: int, dtype: int, order: int
    ) -> int:
        return self.keep([rows, columns, ld, at, order])

    def dn_mat_set_values(self, descriptor: int, at: int) -> None:
        self.described[descriptor][3] = at

    def sp_mm_buffer_size(self, *arguments: int) -> int:
        if self.refuses:
            raise RefusedError("NOT_SUPPORTED")
        return 0

    def sp_mm_preprocess(self, *arguments: int) -> None:
        pass

    def sp_mm(self, *arguments: int) -> None:
        _, flip_a, flip_b, alpha, a, b, beta, c, *_ = arguments
        assert (flip_a, *floats(alpha, 1), *floats(beta, 1)) == (0, 1.0, 0.0)
        right = self.dense(b).T if flip_b else self.dense(b)
        self.dense(c)[:] = self.described[a] @ np.ascontiguousarray(right)

    def sp_mat_set_values(self, descriptor: int, at: int) -> None:
        self.values[descriptor] = at

    def sddmm_buffer_size(self, *arguments: int) -> None:
        *_, alg, at = arguments
        assert alg == self.SDDMMAlg.DEFAULT
        array(at, 1, ctypes.c_uint64)[0] = self.sp_mm_buffer_size()

    def sddmm_preprocess(self, *arguments: int) -> None:
        pass

    def sddmm(self, *arguments: int) -> None:
        _, flip_a, flip_b, alpha, a, b, beta, c, *_ = arguments
        assert (*floats(alpha, 1), *floats(beta, 1)) == (1.0, 0.0)
        left = self.dense(a).T if flip_a else self.dense(a)
        product = left @ (self.dense(b).T if flip_b else self.dense(b))
        pattern = self.described[c]
        assert product.shape == pattern.shape
        out = floats(self.values[c], pattern.data.size).reshape(pattern.data.shape)
        rows = np.arange(len(pattern.indptr) - 1).repeat(np.diff(pattern.indptr))
        for at, (row, column) in enumerate(zip(rows, pattern.indices, strict=True)):
            r, s = pattern.data.shape[1:] or (1, 1)
            block = product[row * r : row * r + r, column * s : column * s + s]
            out[at] = block if pattern.data.ndim > 1 else block[0, 0]

    def dense(self, descriptor: int) -> Any:
        rows, columns, ld, at, order = self.described[descriptor]
        if order == self.Order.ROW:
            return floats(at, rows * ld).reshape(rows, ld)[:, :columns]
        return floats(at, columns * ld).reshape(columns, ld)[:, :rows].T

    def keep(self, described: Any) -> int:
        self.described.append(described)
        return len(self.described) - 1


def floats(at: int, count: int) -> Any:
    return array(at, count, ctypes.c_float)


def ints(at: int, count: int) -> Any:
    return array(at, count, ctypes.c_int32)


def array(at: int, count: int, kind: Any) -> Any:
    if not count:
        return np.empty(0, kind)
    return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(kind)), (count,))


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> HostCusparse:
    host = HostCusparse()
    monkeypatch.setitem(sys.modules, "nvmath", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "nvmath.bindings", SimpleNamespace(cusparse=host))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(_cusparse, "HOPELESS", float("inf"))
    return host


def operands_of(
    m: int, n: int, k: int, block: Any, density: float = 0.4, op: str = "linear", **more: Any
) -> Operands:
    torch.manual_seed(0)
    dense = torch.randn(n, k) * (torch.rand(n, k) < density)
    w: Any = Csr.from_dense(dense) if block is None else Bsr.from_dense(dense, block=block)
    problem = Problem(op, {"m": m, "n": n, "k": k, "dtype": "fp32"})
    sizes, about = {"x": (m, k), "dy": (m, n)}, load_op(op)
    activations = {name: torch.randn(sizes[name]) for name in about.activations}
    weights, more = ({}, {**more, "pattern": w}) if about.pattern else ({"w": w}, more)
    return Operands(problem, weights, activations, about.definition, **more)


SIZES = [(5, 9, 14), (1, 8, 8), (130, 7, 3)]


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("y_layout", _cusparse.SPMM_LAYOUTS[1])
@pytest.mark.parametrize("x_layout", _cusparse.SPMM_LAYOUTS[0])
@pytest.mark.parametrize(("peer", "block"), PEERS)
def test_every_layout_describes_the_same_product(
    library, monkeypatch, peer, block, x_layout, y_layout, shape
) -> None:
    monkeypatch.setattr(_cusparse, "SPMM_LAYOUTS", ((x_layout,), (y_layout,)))
    operands = operands_of(*shape, block)
    launch = peer.KERNEL.prepare(operands)
    assert (launch.choice["x_layout"], launch.choice["y_layout"]) == (x_layout, y_layout)
    x = operands.activations["x"].normal_()
    y = launch()
    torch.testing.assert_close(y, operands.definition(operands.weights["w"].to_dense(), x))
    assert y.is_contiguous()


@pytest.mark.parametrize("shape", SIZES)
@pytest.mark.parametrize("x_layout", _cusparse.SDDMM_LAYOUTS[1])
@pytest.mark.parametrize("dy_layout", _cusparse.SDDMM_LAYOUTS[0])
@pytest.mark.parametrize(("peer", "block"), WGRAD_PEERS)
def test_every_layout_describes_the_same_weight_gradient_and_can_be_pinned(
    library, peer, block, dy_layout, x_layout, shape
) -> None:
    pinned = {"dy_layout": dy_layout, "x_layout": x_layout}
    operands = operands_of(*shape, block, op="linear_wgrad", pinned=pinned)
    launch = peer.WGRAD.prepare(operands)
    assert pinned.items() <= launch.choice.items()
    dy, x = (tensor.normal_() for tensor in operands.activations.values())
    result, expected = launch(), operands.pattern.sample(dy.t() @ x)
    torch.testing.assert_close(result.values, expected.values)
    assert torch.equal(result.columns, operands.pattern.columns)
    assert launch().values.data_ptr() != result.values.data_ptr()


@pytest.mark.parametrize(("peer", "block"), [(cusparse_bell, 4), (cusparse_csr, None)])
def test_input_gradients_multiply_by_the_transposed_weight(library, peer, block) -> None:
    operands = operands_of(5, 9, 14, block, op="linear_dgrad")
    launch, dy = peer.DGRAD.prepare(operands), operands.activations["dy"].normal_()
    torch.testing.assert_close(launch(), dy @ operands.weights["w"].to_dense())


@pytest.mark.parametrize(("peer", "block"), PEERS)
def test_weights_without_a_non_zero_give_zeros(library, peer, block) -> None:
    assert not peer.KERNEL.prepare(operands_of(5, 9, 14, block, density=0.0))().any()


@pytest.mark.parametrize(("peer", "block"), PEERS)
def test_a_refusal_of_the_library_is_the_reason(library, peer, block) -> None:
    library.refuses = True
    with pytest.raises(Unsupported, match="NOT_SUPPORTED"):
        peer.KERNEL.prepare(operands_of(5, 9, 14, block))


@pytest.mark.parametrize("peer", [cusparse_bsr, cusparse_bell])
def test_rectangular_blocks_are_unsupported(library: HostCusparse, peer: Any) -> None:
    with pytest.raises(Unsupported, match="square blocks, found 4x2"):
        peer.KERNEL.prepare(operands_of(1, 8, 8, [4, 2]))


def test_padding_is_recorded(library: HostCusparse) -> None:
    dense = torch.eye(16)
    dense[0] = 1.0
    w = Bsr.from_dense(dense, block=4)
    launch = cusparse_bell.prepare(replace(operands_of(1, 16, 16, 4), weights={"w": w}))
    assert launch.choice["padding"] == 16 / 7
