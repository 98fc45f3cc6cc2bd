"""The dense baseline: its ways, what is asked of cuBLASLt, and what the row says, on the CPU.

cuBLASLt itself is emulated (cublaslt_on_cpu.py). Tests marked gpu call the library.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import cublaslt_on_cpu
import pytest
import torch
from torch import Tensor

from sparsebench.kernels._kernel import DTYPES, OUTPUTS
from sparsebench.kernels.dense import _cublaslt, cublas
from sparsebench.kernels.dense.cublas import Product, Way

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
SHAPES = [(1, 16, 32), (3, 1, 5), (17, 9, 1), (1, 1, 1), (16, 40, 24)]
UNAVAILABLE = "needs nvmath-python: pip install 'sparsebench[gpu]'"


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let products on the CPU call the emulation as they call cuBLASLt on a GPU."""
    bindings = SimpleNamespace(cublasLt=cublaslt_on_cpu)
    monkeypatch.setitem(sys.modules, "nvmath", SimpleNamespace(bindings=bindings))
    monkeypatch.setitem(sys.modules, "nvmath.bindings", bindings)
    monkeypatch.setattr(_cublaslt, "unavailable", lambda: None)
    monkeypatch.setattr(_cublaslt, "_handle", lambda device: 1)
    monkeypatch.setattr(cublas, "_on_gpu", lambda product: True)
    monkeypatch.setattr(cublas, "preferred", lambda library: nullcontext())
    stream = SimpleNamespace(cuda_stream=7)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)


def drawn(*shape: int, dtype: str) -> Tensor:
    return torch.randn(shape).to(DTYPES[dtype])


def product_of(op: str, m: int, n: int, k: int, dtype: str = "fp32", **more: Any) -> Product:
    arguments = {
        "linear": {"w": (n, k), "x": (m, k)},
        "linear_dgrad": {"w": (n, k), "dy": (m, n)},
        "linear_wgrad": {"dy": (m, n), "x": (m, k)},
    }[op]
    a, b = cublas.PRODUCTS[op](**{name: drawn(*s, dtype=dtype) for name, s in arguments.items()})
    out = torch.full((len(a), b.shape[1]), torch.nan, dtype=OUTPUTS[dtype])
    return Product(a, b, out, op != "linear_wgrad", **more)


def right(product: Product) -> Tensor:
    return product.scale * (product.a.double() @ product.b.double())


def taking(monkeypatch: pytest.MonkeyPatch, wanted: Callable[[Way], bool]) -> list[Way]:
    """Let the search keep the first way that is wanted; return the list of those that it times."""
    seen: list[Way] = []
    found = cublas.ways_of

    def noted(product: Product, layout: Any) -> list[Way]:
        ways = found(product, layout)
        seen.extend(ways)
        return ways

    def chosen(calls: Sequence[object], device: torch.device) -> int:
        assert len(calls) == len(seen)
        return next(i for i, way in enumerate(seen) if wanted(way))

    monkeypatch.setattr(cublas, "ways_of", noted)
    monkeypatch.setattr(cublas, "fastest_product", chosen)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("op", cublas.PRODUCTS)
@pytest.mark.usefixtures("emulated")
def test_every_way_computes_the_product_of_redrawn_activations(
    op: str, shape: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    product = product_of(op, *shape)
    seen = taking(monkeypatch, lambda way: True)
    cublas.fastest_way(product)
    assert {way.library for way in seen} == {"cublas", "cublaslt"}
    for way in seen:
        launch = cublas.fastest_way(product, cublas._choice(way, product))
        product.a.normal_()
        product.out.fill_(torch.nan)
        assert launch() is product.out
        torch.testing.assert_close(product.out.double(), right(product), rtol=1e-5, atol=1e-5)
