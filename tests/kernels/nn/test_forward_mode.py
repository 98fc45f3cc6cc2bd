"""Forward-mode AD: a product by torch has a tangent, and every operator of ours refuses one."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import sparsebench
from sparsebench.errors import Unsupported
from sparsebench.formats.bitmap import Bitmap
from sparsebench.formats.block_mask import BlockMask
from sparsebench.formats.bsr import Bsr
from sparsebench.formats.csr import Csr
from sparsebench.formats.spense import Spense
from sparsebench.kernels._common.transforms import has_mode, is_traced
from sparsebench.nn import SparseExperts
from tests.kernels.nn.examples import BF16, KINDS, two_four

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")  # by make_dual
ERRORS = Unsupported, NotImplementedError, RuntimeError
REASON = r"forward[- ](mode )?AD|jvp|torch\.func"  # of our operators, or of torch
TOKENS, HEADS, D = 64, 2, 32
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

Call = tuple[Callable[..., Tensor], list[Tensor]]
"""A function, and its operands."""


def attention_of(name: str, device: str) -> Call:
    q, k, v = (torch.randn(1, TOKENS, HEADS, D, device=device).to(BF16) for _ in range(3))
    if name == "attention":
        allowed = torch.ones(1, 1, TOKENS, TOKENS, device=device).tril().bool()
        mask = BlockMask.from_elements(allowed, [16, 16])
        return lambda *qkv: sparsebench.attention(*qkv, mask), [q, k, v]
    if name == "nsa":
        gates = [torch.rand(1, TOKENS, HEADS, device=device) for _ in range(3)]
        options = {"keep": 4, "block": 16, "window": 16}
        return lambda *each: sparsebench.nsa_attention(*each, **options), [q, k, v, *gates]
    if name == "moba":
        return lambda *qkv: sparsebench.moba_attention(*qkv, keep=2, block=16), [q, k, v]
    options = {"method": name, "keep": 2, "block": 16, "causal": True}
    return lambda *qkv: sparsebench.select_attention(*qkv, **options), [q, k, v]


def matmul_of(name: str, device: str) -> Call:
    w = two_four(128, 64).to(device)
    packed = {
        "bsr": lambda: Bsr.from_dense(w, block=16),
        "csr": lambda: Csr.from_dense(w),
        "bitmap": lambda: Bitmap.from_dense(w),
        "spense": lambda: Spense.from_dense(w),
    }[name]()
    x = torch.randn(16, 64, device=device).to(BF16)
    return lambda x: sparsebench.matmul(x, packed), [x]


def experts_of(name: str, device: str) -> Call:
    gate_up, down = (torch.randn(4, n, k).to(BF16) for n, k in ((128, 64), (64, 64)))
    layer = SparseExperts.from_dense(gate_up, down, top_k=2, activation="silu", block=32)
    layer = layer.to(device).requires_grad_(name == "trained")
    ids = torch.randint(4, (8, 2), device=device)
    x, shares = (torch.randn(8, n, device=device) for n in (64, 2))
    return lambda x, shares: layer(x, ids, shares), [x.to(BF16), shares]


def layer_of(name: str, device: str) -> Call:
    layer = KINDS[name].drawn().to(device).requires_grad_(False)
    return layer, [KINDS[name].x(16).to(device)]


CALLS: dict[str, Callable[[str, str], Call]] = {
    **dict.fromkeys(("attention", "pooled", "xattention", "nsa", "moba"), attention_of),
    **dict.fromkeys(("bsr", "csr", "bitmap", "spense"), matmul_of),
    **dict.fromkeys(("trained", "frozen"), experts_of),
    **dict.fromkeys(KINDS, layer_of),
}


def require_reason(error: Exception) -> None:
    """Require an error that names what it refuses, and no other one of the call."""
    assert re.search(REASON, str(error)), error


def require_derivative(
    call: Callable[..., Tensor], operands: list[Tensor], at: int, tangent: Tensor | None
) -> None:
    """Require the derivative by one operand, in which the call must then be linear."""
    moved = [*operands]
    moved[at] = operands[at] + torch.ones_like(operands[at])
    with torch.no_grad():
        expected = call(*moved).float() - call(*operands).float()
    assert tangent is not None
    torch.testing.assert_close(tangent.float(), expected, rtol=0.05, atol=0.5)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graded", [True, False])
@pytest.mark.parametrize("name", CALLS)
def test_a_tangent_is_right_or_refused(name: str, graded: bool, device: str) -> None:
    torch.manual_seed(0)
    call, operands = CALLS[name](name, device)
    for at in range(len(operands)):
        with forward_ad.dual_level(), torch.set_grad_enabled(graded):
            dual: list[Any] = [*operands]
            dual[at] = forward_ad.make_dual(operands[at], torch.ones_like(operands[at]))
            try:
                tangent = forward_ad.unpack_dual(call(*dual)).tangent
            except ERRORS as error:
                require_reason(error)
                continue
        require_derivative(call, operands, at, tangent)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", CALLS)
def test_torch_func_jvp_is_right_or_refused(name: str, device: str) -> None:
    torch.manual_seed(0)
    call, operands = CALLS[name](name, device)
    for at in range(len(operands)):

        def of_one(x: Tensor, at: int = at) -> Tensor:
            return call(*operands[:at], x, *operands[at + 1 :])

        one = (operands[at],)
        try:
            _, tangent = torch.func.jvp(of_one, one, (torch.ones_like(operands[at]),))
        except ERRORS as error:
            require_reason(error)
            continue
        require_derivative(call, operands, at, tangent)


@pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")  # in torch's thread of backward
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in CALLS if "fp8" not in name])  # no gradient
def test_a_tangent_of_a_gradient_is_right_or_refused(name: str, device: str) -> None:
    torch.manual_seed(0)
    call, operands = CALLS[name](name, device)
    x = operands[0].requires_grad_()

    def gradient(dy: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, dy, retain_graph=True)[0]

    for _ in range(3):  # the front repeats the third call
        y = call(*operands)
        gradient(torch.ones_like(y))
    with forward_ad.dual_level():
        try:
            dual = gradient(forward_ad.make_dual(torch.ones_like(y), torch.ones_like(y)))
        except ERRORS as error:
            require_reason(error)
        else:
            tangent = forward_ad.unpack_dual(dual).tangent
            require_derivative(gradient, [torch.ones_like(y)], 0, tangent)


def test_a_mode_is_traced_and_forward_ad_is_traced_without_a_mode() -> None:
    seen = list[tuple[bool, bool]]()

    def look() -> None:
        seen.append((is_traced(), has_mode()))

    look()
    with FlopCounterMode(display=False):
        look()
    with forward_ad.dual_level():
        look()
    assert seen == [(False, False), (True, True), (True, False)]


def test_a_bitmap_layer_has_a_tangent_on_a_cpu_because_forward_ad_is_no_mode() -> None:
    layer, (x,) = layer_of("BitmapLinear", "cpu")
    with forward_ad.dual_level():
        dual = layer(forward_ad.make_dual(x, torch.ones_like(x)))
        require_derivative(layer, [x], 0, forward_ad.unpack_dual(dual).tangent)


def test_a_dual_level_without_a_tangent_changes_nothing() -> None:
    for name, make in CALLS.items():
        call, operands = make(name, "cpu")
        expected = call(*operands)
        with forward_ad.dual_level():
            torch.testing.assert_close(call(*operands), expected, rtol=0.02, atol=0.02)
