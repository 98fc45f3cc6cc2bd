"""sparsebench.matmul: formats, named kernels, errors, gradients and memory."""

import copy
import gc
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

import sparsebench
from sparsebench.errors import FormatError, SuiteError, Unsupported
from sparsebench.formats._format import Format
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.formats.twell import Twell
from sparsebench.kernels.bsr._launch import Packing
from sparsebench.kernels.nn import _dense_copy, _frozen_op
from sparsebench.kernels.nn._bsr_pattern import pattern_of
from tests.kernels.contract import Example, run_engine

N, K = 96, 64


def weight(dtype: torch.dtype = torch.float32) -> Tensor:
    mask = torch.rand(N // 16, K // 16) > 0.5
    dense = torch.randn(N, K) * mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    return dense.to(dtype)


def packed(kind: Any, dense: Tensor) -> Format:
    return kind.from_dense(dense, **({"block": 16} if kind is Bsr else {}))  # type: ignore[no-any-return]


@pytest.mark.parametrize("kind", [Dense, Bsr, Csr, Bitmap])
def test_every_format_is_multiplied(kind: Any) -> None:
    dense = weight()
    w = packed(kind, dense)
    for shape in ((5, K), (2, 3, K), (K,), (0, K)):
        for scale in (1.0, 2.0):  # the second call of a size has another X
            x = scale * torch.randn(shape)
            torch.testing.assert_close(sparsebench.matmul(x, w), x @ dense.T)


@pytest.mark.parametrize("kind", [Dense, Bsr, Csr, Spense, Bitmap])
def test_gradients_are_those_of_a_dense_product(kind: Any) -> None:
    """The dense weight gets a gradient through from_dense, with zeros outside stored blocks."""
    dense, x = weight(), torch.randn(7, K)
    if kind is Spense:
        dense, x = (dense * torch.tensor([1, 0, 0, 1]).repeat(K // 4)).bfloat16(), x.bfloat16()
    trained = kind in (Dense, Bsr, Csr)
    leaves, dy = [x.requires_grad_(), *([dense.requires_grad_()] if trained else [])], x @ dense.T
    y = sparsebench.matmul(x, packed(kind, dense))
    torch.testing.assert_close(y, dy)
    gradients = torch.autograd.grad(y, leaves, dy.detach())
    dx, *dw = torch.autograd.grad(dy, leaves, dy.detach())
    torch.testing.assert_close(gradients[0], dx)
    if trained:
        stored = torch.ones_like(dense) if kind is Dense else dense != 0
        torch.testing.assert_close(gradients[1], dw[0] * stored)


@pytest.mark.interpreted
def test_a_named_kernel_and_its_gradients_are_planned_again_after_a_write() -> None:
    dense, x, dy = weight(), torch.randn(7, K, requires_grad=True), torch.randn(7, N)
    w = Bsr.from_dense(dense, block=16)
    w.values.requires_grad_()
    for scale in (1, 1, 2):
        w.values.data.mul_(scale)
        dense *= scale
        y = sparsebench.matmul(x, w, "bsr_triton")
        torch.testing.assert_close(y, x @ dense.T)
        dx, dw = torch.autograd.grad(y, [x, w.values], dy)
        torch.testing.assert_close(dx, dy @ dense)
        torch.testing.assert_close(dw, w.sample(dy.T @ x.detach()).values)
    assert sparsebench.matmul(x[:0], w, "bsr_triton").shape == (0, N)


def write(array: Tensor, other: Tensor) -> None:
    array.copy_(other)


def move(array: Tensor, other: Tensor) -> None:
    array.data = other.clone()  # torch counts no write


@pytest.mark.parametrize("change", [write, move])
@pytest.mark.parametrize("kind", [Bsr, Csr, Bitmap])
def test_a_weight_that_is_written_or_moved_after_planning_is_read_anew(kind, change):
    dense, x = weight(), torch.randn(7, K)
    w, other = packed(kind, dense), packed(kind, 2 * dense)
    for _ in range(3):
        torch.testing.assert_close(sparsebench.matmul(x, w), x @ dense.T)
    for name, array in w.arrays().items():
        change(array, other.arrays()[name])
    for _ in range(3):
        torch.testing.assert_close(sparsebench.matmul(x, w), 2 * x @ dense.T)


def refused(match: str, x: Any, w: Any, *kernel: Any) -> None:
    with pytest.raises((Unsupported, SuiteError), match=match) as raised:
        sparsebench.matmul(x, w, *kernel)
    assert "\n" not in str(raised.value)


def test_an_impossible_call_raises_with_the_reason() -> None:
    w, x = Bsr.from_dense(weight(), block=16), torch.randn(7, K)
    refused("63", x[:, 1:], w)
    refused("torch.float16 and torch.float32", x.half(), w)
    refused("float64", x.double(), Csr.from_dense(weight(torch.float64)))
    refused("bsr_wgmma: .*cpu", x, w, "bsr_wgmma")
    refused("csr_cuda: .*Bsr", x, w, "csr_cuda")
    refused("bsr_triton_dgrad: .*linear_dgrad", x, w, "bsr_triton_dgrad")
    refused("scipy_bsr: .*0.4", x, w, "scipy_bsr")
    refused("did you mean bsr_triton", x, w, "bsr_trito")
    refused("kernel=NAME.*Twell", x, Twell.from_dense(weight()))
    with torch.inference_mode():
        unseen = Bitmap.from_dense(weight())
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


@pytest.mark.parametrize(("engine", "tokens"), [("BITMAP", 0), ("BITMAP", 8), ("CSR", 0)])
def test_a_dense_copy_is_exact_also_for_padded_tokens(engine: str, tokens: int) -> None:
    copied, config = getattr(_dense_copy, f"OF_{engine}"), _dense_copy.DenseConfig(tokens)
    assert run_engine(copied, Example(7, N, K, 0.5), torch.float32, configs=[config])


@pytest.mark.parametrize(
    ("rows", "nonzeros", "dtype", "names"),
    [
        (64, 40, torch.float32, ["csr_cuda", "dense"]),
        (64, 2000, torch.float32, ["dense", "csr_cuda"]),
        (64, 40, torch.bfloat16, ["dense", "csr_cuda"]),
        (2**20, 40, torch.bfloat16, ["csr_cuda"]),
    ],
)
def test_csr_takes_a_dense_copy_unless_it_is_much_larger(rows, nonzeros, dtype, names) -> None:
    values, columns = torch.ones(nonzeros, dtype=dtype), torch.zeros(nonzeros, dtype=torch.int32)
    offsets = torch.full((rows + 1,), nonzeros, dtype=torch.int32)
    w = Csr((rows, K), offsets, columns, values)
    assert [engine.name for engine in _frozen_op._of_csr(w)] == names


@pytest.mark.parametrize("name", ["values", "columns", "offsets"])
def test_a_frozen_weight_is_multiplied_until_it_is_written(name: str) -> None:
    dense, x = weight(), torch.randn(7, K, requires_grad=True)
    w = Bsr.from_dense(dense.requires_grad_(), block=16)
    frozen = w.freeze()
    assert frozen.is_frozen
    assert not w.is_frozen
    for _ in range(2):
        y = sparsebench.matmul(x, frozen)
        torch.testing.assert_close(y, x @ dense.T)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], dense.sum(0).expand(7, K))
    array = w.arrays()[name].detach()
    array.copy_(array.clone())  # through the weight that was frozen, which shares its memory
    for kernel in (None, "bsr_triton"):
        with pytest.raises(FormatError, match=f"{name}: .*freeze"):
            sparsebench.matmul(x, frozen, kernel)
    torch.testing.assert_close(sparsebench.matmul(x, frozen.freeze()), x @ dense.T)


def test_copies_of_a_frozen_weight_and_weights_of_inference_mode_are_not_frozen() -> None:
    w, x = Bsr.from_dense(weight(), block=16), torch.randn(7, K)
    w.values.mul_(2)
    frozen = w.freeze()
    y = sparsebench.matmul(x, frozen)
    for other in (copy.deepcopy(frozen), pickle.loads(pickle.dumps(frozen)), copy.copy(frozen)):
        assert not other.is_frozen
        assert torch.equal(sparsebench.matmul(x, other), y)
    with torch.inference_mode():
        unseen = Bsr.from_dense(weight(), block=16)
    with pytest.raises(FormatError, match="inference mode"):
        unseen.freeze()


@pytest.mark.gpu
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize(("block", "kernel"), [(16, None), (28, None), (16, "bsr_small")])
def test_no_graph_packs_a_frozen_weight(
    block: int, kernel: str | None, first: bool, monkeypatch
) -> None:
    """Its packed copy is alive in the graph, which replays with other activations.

    first  the captured call is the first one
    """
    mask = torch.rand(560 // block, 448 // block, device="cuda") < 0.3
    mask = mask.repeat_interleave(block, 0).repeat_interleave(block, 1)
    dense = (torch.randn(560, 448, device="cuda") * mask).bfloat16()
    w, x = Bsr.from_dense(dense, block=block).freeze(), torch.randn(70, 448).cuda().bfloat16()
    pack = Packing.__call__

    def pack_outside(self: Packing, values: Tensor) -> Tensor:
        assert not torch.cuda.is_current_stream_capturing()
        return pack(self, values)

    monkeypatch.setattr(Packing, "__call__", pack_outside)
    if not first:
        sparsebench.matmul(x, w, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparsebench.matmul(x, w, kernel=kernel)
    del w
    gc.collect()
    x.normal_()
    y.fill_(float("nan"))
    graph.replay()
    torch.testing.assert_close(y, x @ dense.T, rtol=2e-2, atol=2e-2)


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Csr, Bsr])
def test_a_graph_reads_the_dense_copy_that_it_captured(kind: Any, dtype: torch.dtype) -> None:
    """With other activations, after a write to W has replaced the copy."""
    dense = torch.randint(-2, 3, (N, K), device="cuda").to(dtype)
    w = Csr.from_dense(dense) if kind is Csr else Bsr.from_dense(dense, block=4).freeze()
    x = torch.randint(-2, 3, (33, K), device="cuda").to(dtype)
    assert torch.equal(sparsebench.matmul(x, w), x @ dense.T)
    operator = _frozen_op.plans_of(w) if kind is Csr else pattern_of(w.offsets, w.columns).operator
    assert {selected.row["kernel"] for selected in operator.plans.values()} == {"dense"}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparsebench.matmul(x, w)
    if kind is Csr:
        w.values.mul_(2)
        assert torch.equal(sparsebench.matmul(x, w), 2 * (x @ dense.T))
    garbage = [torch.full((2**12,), 0xFF, dtype=torch.uint8, device="cuda") for _ in range(200)]
    x.copy_(torch.randint(-2, 3, x.shape, device="cuda"))
    graph.replay()
    assert torch.equal(y, x @ dense.T)
    del garbage


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
