"""sparsebench.matmul: formats, named kernels, errors, gradients and memory."""

import gc
import pickle
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsebench
from sparsebench.errors import SuiteError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.formats.twell import Twell
from sparsebench.kernels.nn import _frozen_op, _named_kernel
from sparsebench.kernels.peers import scipy_csr
from tests.kernels.contract import Example, run_engine

N, K = 96, 64
BY_KERNEL: list[tuple[Any, str | None]] = [
    (Dense, None),
    (Dense, "torch_dense"),
    (Bsr, None),
    (Bsr, "scipy_bsr"),
    (Bsr, "reference"),
    (Csr, None),
    (Csr, "scipy_csr"),
    (Twell, "reference"),
    (Bitmap, None),
]


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    mask = torch.rand(N // 16, K // 16) > 0.5
    dense = torch.randn(N, K) * mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return dense.to(dtype)


def packed(kind: Any, dense: Tensor) -> Format:
    return kind.from_dense(dense, **({"block": 16} if kind is Bsr else {}))  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "kernel"), BY_KERNEL)
def test_every_format_is_multiplied(kind: Any, kernel: str | None) -> None:
    dense = weight()
    w = packed(kind, dense)
    for shape in ((5, K), (2, 3, K), (K,), (0, K)):
        for scale in (1.0, 2.0):  # the second call of a size has another X
            x = scale * torch.randn(shape)
            torch.testing.assert_close(sparsebench.matmul(x, w, kernel), x @ dense.T)


@pytest.mark.parametrize("kind", [Dense, Bsr, Spense, Bitmap])
def test_gradients_are_those_of_a_dense_product(kind: Any) -> None:
    """The dense weight gets a gradient through from_dense, with zeros outside stored blocks."""
    dense, x = weight(), torch.randn(7, K)
    if kind is Spense:
        dense, x = (dense * torch.tensor([1, 0, 0, 1]).repeat(K // 4)).bfloat16(), x.bfloat16()
    trained = kind in (Dense, Bsr)
    leaves, dy = [x.requires_grad_(), *([dense.requires_grad_()] if trained else [])], x @ dense.T
    y = sparsebench.matmul(x, packed(kind, dense))
    torch.testing.assert_close(y, dy)
    gradients = torch.autograd.grad(y, leaves, dy.detach())
    dx, *dw = torch.autograd.grad(dy, leaves, dy.detach())
    torch.testing.assert_close(gradients[0], dx)
    if trained:
        stored = dense != 0 if kind is Bsr else torch.ones_like(dense)
        torch.testing.assert_close(gradients[1], dw[0] * stored)


def test_a_named_kernel_has_gradients_by_its_dgrad_kernel() -> None:
    dense, x = weight(), torch.randn(7, K, requires_grad=True)
    dy = torch.randn(7, N)
    for w in (Csr.from_dense(dense), Bsr.from_dense(dense, block=16)):
        kernel = "scipy_csr" if isinstance(w, Csr) else "scipy_bsr"
        (dx,) = torch.autograd.grad(sparsebench.matmul(x, w, kernel), [x], dy)
        torch.testing.assert_close(dx, dy @ dense)


def test_a_gradient_that_is_unsupported_raises_before_the_product(monkeypatch) -> None:
    w = Csr.from_dense(weight().requires_grad_())
    with pytest.raises(Unsupported, match="scipy_csr_wgrad"):
        sparsebench.matmul(torch.randn(7, K), w)
    with torch.no_grad():
        assert sparsebench.matmul(torch.randn(7, K), w).shape == (7, N)

    def refuses(*_: Any) -> None:
        raise Unsupported("no such type")

    monkeypatch.setattr(scipy_csr, "DGRAD", replace(scipy_csr.DGRAD, prepare=refuses))
    with pytest.raises(Unsupported, match="no such type"):
        sparsebench.matmul(torch.randn(7, K, requires_grad=True), Csr.from_dense(weight()))


def write(array: Tensor, other: Tensor) -> None:
    array.copy_(other)


def move(array: Tensor, other: Tensor) -> None:
    array.data = other.clone()  # torch counts no write


@pytest.mark.parametrize("change", [write, move])
@pytest.mark.parametrize(
    ("kind", "kernel"), [(k, n) for k, n in BY_KERNEL if k in (Bsr, Csr, Bitmap)]
)
def test_a_weight_that_is_written_or_moved_after_planning_is_read_anew(kind, kernel, change):
    dense, x = weight(), torch.randn(7, K)
    w, other = packed(kind, dense), packed(kind, 2 * dense)
    for _ in range(3):
        torch.testing.assert_close(sparsebench.matmul(x, w, kernel), x @ dense.T)
    for name, array in w.arrays().items():
        change(array, other.arrays()[name])
    for _ in range(3):
        torch.testing.assert_close(sparsebench.matmul(x, w, kernel), 2 * x @ dense.T)


def refused(match: str, x: Any, w: Any, *kernel: Any, **options: Any) -> None:
    with pytest.raises((Unsupported, SuiteError), match=match) as raised:
        sparsebench.matmul(x, w, *kernel, **options)
    assert "\n" not in str(raised.value)


def test_an_impossible_call_raises_with_the_reason() -> None:
    w, x = Bsr.from_dense(weight(), block=16), torch.randn(7, K)
    refused("63", x[:, 1:], w)
    refused("torch.float16 and torch.float32", x.half(), w)
    refused("float64", x.double(), Csr.from_dense(weight(torch.float64)))
    refused("bsr_wgmma: .*cuda", x, w, "bsr_wgmma")
    refused("scipy_csr: .*Bsr", x, w, "scipy_csr")
    refused("scipy_bsr_dgrad: .*linear_dgrad", x, w, "scipy_bsr_dgrad")
    refused("'tuned'", x, w, "scipy_bsr", tuned=True)
    refused("none; found 'tuned'", x, w, "bsr_triton", tuned=True)
    refused("kernel=NAME.*tuned", x, w, tuned=True)
    refused("did you mean scipy_bsr", x, w, "scipy_bs")
    refused("kernel=NAME.*Twell", x, Twell.from_dense(weight()))
    half = Csr.from_dense(weight(torch.float16))
    refused("fp16", x.half(), half)
    with torch.inference_mode():
        unseen = Csr.from_dense(weight())
    refused("inference_mode", x, unseen)
    wrong = [(x.numpy(), w), (None, w), (x.to_sparse(), w), (x, weight()), (x, Bsr), (x, w, 3)]
    for arguments in wrong:
        refused("^matmul: expected .*found ", *arguments)


@pytest.mark.parametrize("kind", [Bsr, Bitmap, Csr])
def test_a_weight_with_plans_is_pickled_without_them(kind: Any) -> None:
    w, x = packed(kind, weight()), torch.randn(7, K)
    y = sparsebench.matmul(x, w)
    if kind is Csr:
        _frozen_op.plans_of(w)  # as a call on a GPU makes them
    assert torch.equal(sparsebench.matmul(x, pickle.loads(pickle.dumps(w))), y)


@pytest.mark.parametrize("tokens", [0, 8])
def test_a_dense_copy_multiplies_padded_tokens(tokens: int) -> None:
    config = _frozen_op.Padding(tokens)
    assert run_engine(_frozen_op.DENSE, Example(7, N, K, 0.5), torch.float32, configs=[config])


def test_launches_are_freed_with_their_weight() -> None:
    w = Csr.from_dense(weight())
    sparsebench.matmul(torch.randn(7, K), w)
    array = weakref.ref(w.offsets)  # which the launch reads
    del w
    gc.collect()
    assert array() is None


def test_a_kernel_of_others_is_not_captured_into_a_graph(monkeypatch) -> None:
    w, x = Csr.from_dense(weight()), torch.randn(7, K)
    sparsebench.matmul(x, w, "scipy_csr")
    monkeypatch.setattr(_named_kernel, "is_capturing", lambda x: True)
    with pytest.raises(RuntimeError, match="found a capture"):
        sparsebench.matmul(x, w, "scipy_csr")


E4M3 = torch.float8_e4m3fn


def test_blocks_of_fp8_give_bf16_and_have_no_gradient() -> None:
    dense, x = weight().to(E4M3), torch.randn(5, K).to(E4M3)
    w = Bsr.from_dense(dense, block=16)
    right = (x.float() @ dense.float().T).bfloat16()
    assert torch.equal(sparsebench.matmul(x, w), right)
    assert sparsebench.matmul(x[:0], w).dtype == torch.bfloat16
    compiled = torch.compile(lambda x: sparsebench.matmul(x, w), backend="eager")
    assert torch.equal(compiled(x), right)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [None, "bsr_triton"])
def test_a_captured_graph_is_correct_after_the_weight_was_deleted(kernel: str | None) -> None:
    dense = weight(torch.bfloat16).cuda()
    w, x = Bsr.from_dense(dense, block=16), torch.randn(32, K, device="cuda").bfloat16()
    sparsebench.matmul(x, w, kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparsebench.matmul(x, w, kernel)
    del w
    gc.collect()
    garbage = [torch.full((2**12,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(200)]
    graph.replay()
    torch.testing.assert_close(y, x @ dense.T, rtol=2e-2, atol=2e-2)
    del garbage
