"""The dense, scipy and torch peers are right where they run, and have a reason elsewhere."""

import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.dense import Dense
from sparsebench.harness.catalog import names
from sparsebench.harness.ops.linear import definition
from sparsebench.kernels._kernel import DTYPES, Operands
from sparsebench.kernels.dense import _gemm, cublas
from sparsebench.kernels.peers import torch_bsr
from sparsebench.results.record import Problem
from tests.kernels.layers import assert_correct as assert_right

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def problem_of(dtype: str = "fp32") -> Problem:
    return Problem("linear", {"m": 1, "n": 1, "k": 1, "dtype": dtype})


def operands_of(
    shape: tuple[int, int, int],
    form: Any = Bsr,
    density: float = 0.4,
    dtype: str = "fp32",
    **params: Any,
) -> Operands:
    m, n, k = shape
    torch.manual_seed(0)
    dense = (torch.randn(n, k) * (torch.rand(n, k) < density)).to(DTYPES[dtype])
    problem = Problem("linear", {"m": m, "n": n, "k": k, "dtype": dtype})
    x = torch.randn(m, k).to(DTYPES[dtype])
    return Operands(problem, {"w": form.from_dense(dense, **params)}, {"x": x}, definition)


def test_fp32_is_unsupported_by_cublas_where_torch_uses_tf32(monkeypatch) -> None:
    assert cublas.unsupported(problem_of("fp32"), CUDA) is None
    monkeypatch.setattr(torch.backends.cuda, "matmul", SimpleNamespace(fp32_precision="tf32"))
    assert "found torch.backends.cuda.matmul.fp32_precision = 'tf32'" in str(
        cublas.unsupported(problem_of("fp32"), CUDA)
    )
    assert cublas.unsupported(problem_of("bf16"), CUDA) is None
    assert cublas.unsupported(problem_of("tf32"), CUDA) is None


@pytest.mark.parametrize("dtype", ["fp32", "tf32"])
def test_cublas_uses_tf32_only_during_the_calls_of_a_tf32_problem(dtype, monkeypatch) -> None:
    seen, settings, multiply = [], torch.backends.cuda.matmul, torch.mm
    before = settings.fp32_precision, torch.backends.cuda.preferred_blas_library()

    def noted(a: Tensor, b: Tensor, out: Tensor) -> Tensor:
        seen.append(settings.fp32_precision)
        return multiply(a, b, out=out)

    monkeypatch.setattr(torch, "mm", noted)
    operands = operands_of((5, 9, 64), Dense, dtype=dtype)
    launch = cublas.prepare(operands)
    assert_right(launch(), operands)
    assert set(seen) == ({"tf32"} if dtype == "tf32" else {before[0]})
    assert (settings.fp32_precision, torch.backends.cuda.preferred_blas_library()) == before
    assert launch.choice.get("fp32_precision") == ("tf32" if dtype == "tf32" else None)


def test_cublas_restores_the_precision_after_an_error() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    with pytest.raises(RuntimeError, match="mat1"), _gemm.in_tf32():
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert torch.backends.cuda.matmul.fp32_precision == before


@pytest.mark.parametrize(
    ("m", "block", "path"),
    [
        (64, 32, "Triton"),
        (37, 32, "gather, fp32"),
        (64, 8, "gather, fp32"),
        (40, 10, "gather, fp32"),
    ],
)
def test_the_row_of_torchs_call_names_how_it_multiplies(m: int, block: int, path: str) -> None:
    w = operands_of((m, 320, 320), block=block).weights["w"]
    assert isinstance(w, Bsr)
    assert torch_bsr.unsupported_as_shipped(w) is None
    assert torch_bsr.path_of(w, m) == path


def test_a_tuned_product_pads_tokens_to_a_multiple_of_its_tile(monkeypatch) -> None:
    from torch.sparse import _triton_ops

    tokens = 48

    def multiply(y: Tensor, bsr: Tensor, x: Tensor, *, meta: Any, out: Tensor, **_: Any) -> None:
        assert x.shape[1] == tokens
        assert x.shape[1] % meta["SPLIT_N"] == 0
        out.copy_(bsr.to_dense() @ x)

    monkeypatch.setattr(_triton_ops, "bsr_dense_addmm", multiply)
    operands = operands_of((37, 128, 128), block=64)
    pinned = {"SPLIT_N": 1, "GROUP_SIZE_ROW": 1, "num_stages": 1, "num_warps": 4, "tokens": tokens}
    for _ in range(2):
        assert_right(torch_bsr.prepare(replace(operands, pinned=pinned), tuned=True)(), operands)
        operands.activations["x"].neg_().add_(1)


def test_the_peers_import_without_any_gpu_package() -> None:
    peers = "cublas cusparse_bell cusparse_bsr cusparse_csr reference scipy_bsr scipy_csr torch_bsr"
    gradients = [name for name in names("kernels") if re.search("grad|sampled|masked", name)]
    loaded = [*peers.split(), "torch_dense", *(n for n in gradients if "triton" not in n)]
    assert len(loaded) >= 17
    program = (
        "import sys\n"
        "from sparsebench.harness.catalog import load_kernel\n"
        "for name in 'nvmath', 'cupy', 'triton': sys.modules[name] = None\n"
        f"for name in {loaded!r}:\n"
        "    load_kernel(name)\n"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True)
