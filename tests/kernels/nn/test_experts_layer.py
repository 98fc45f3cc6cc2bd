"""The experts of a mixture as a layer: results, bad input, graphs, and what a state dict holds."""

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.kernels._common.experts_gate import CLAMPED
from sparsebench.kernels.nn._experts_gate import GATES
from sparsebench.kernels.nn._spense_engines import ACTIVATIONS
from sparsebench.nn import BlockSparseLinear, SparseExperts, SpenseLinear
from tests.tools.marks import crossed

BF16, FP32 = torch.bfloat16, torch.float32
E, H, UNITS, TOP_K = 6, 256, 288, 2  # a matrix of whole tiles, and one that ends inside one
KINDS: dict[str, dict[str, Any]] = {
    "2:4": {},
    "half 2:4": {"dense_fraction": 0.5},
    "blocks": {"block": 32},
}


@cache
def weights_of(kind: str, e: int = E, h: int = H, i: int = UNITS) -> tuple[Tensor, Tensor]:
    """Return gate_up [e, 2 i, h] and down [e, h, i] in bf16, pruned for a kind."""
    random = torch.Generator().manual_seed(0)
    both = []
    for n, k in ((2 * i, h), (h, i)):
        w = torch.randn(e, n, k, generator=random) / k**0.5
        if kind == "blocks":
            kept = torch.rand(e, n // 32, k // 32, generator=random) < 0.5
            w *= kept.repeat_interleave(32, 1).repeat_interleave(32, 2)
        else:
            sparse = k if kind == "2:4" else k // 2 // 128 * 128
            order = torch.rand(e, n, k // 4, 4, generator=random).argsort(-1).flatten(2)
            w[..., :sparse] *= order[..., :sparse] < 2
        both.append(w.to(BF16))
    return both[0], both[1]


def layer_of(kind: str, activation: str = "silu", dtype: torch.dtype = BF16) -> SparseExperts:
    options = {"top_k": TOP_K, "activation": activation}
    weights = (w.to(dtype) for w in weights_of(kind))
    return SparseExperts.from_dense(*weights, **options, **KINDS[kind])


def inputs(m: int, top_k: int = TOP_K, dtype: torch.dtype = BF16) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, experts from -1 to one beyond the last, and weights."""
    random = torch.Generator().manual_seed(m)
    ids = torch.randint(-1, E + 1, (m, top_k), generator=random)
    return (
        torch.randn(m, H, generator=random).to(dtype),
        ids,
        torch.rand(m, top_k, generator=random),
    )


def right(kind: str, activation: str, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """Return the sums in fp64."""
    gate_up, down = (w.double() for w in weights_of(kind))
    return summed(gate_up, down, activation, x.double(), ids, weights.double())


def summed(
    gate_up: Tensor,
    down: Tensor,
    activation: str,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    biases: Any = None,
) -> Tensor:
    """Return the sums by a loop over the choices of each token."""
    sums = [torch.zeros_like(row) for row in x]
    for token, choice in ((ids >= 0) & (ids < E)).nonzero().tolist():
        expert = ids[token, choice]
        of_gate_up, of_down = (0, 0) if biases is None else (bias[expert] for bias in biases)
        gate, up = (linear(x[token], gate_up[expert]) + of_gate_up).chunk(2)
        if activation == CLAMPED:  # as in transformers' GptOssExperts
            gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
            h = (up + 1) * gate * torch.sigmoid(1.702 * gate)
        else:
            h = ACTIVATIONS[activation](gate) * up
        sums[token] = sums[token] + (linear(h, down[expert]) + of_down) * weights[token, choice]
    return torch.stack(sums) if sums else x.clone()


@pytest.mark.parametrize(("kind", "activation"), crossed([*KINDS], [*GATES]))
def test_the_layer_sums_what_the_experts_of_a_token_compute(kind, activation) -> None:
    layer = layer_of(kind, activation)
    for m in (1, 9, 0):
        x, ids, weights = inputs(m)
        y = layer(x, ids, weights)
        assert y.dtype == BF16
        expected = right(kind, activation, x, ids, weights)
        torch.testing.assert_close(y.double(), expected, rtol=0.05, atol=0.02)
    if kind == "blocks":
        x, ids, weights = inputs(9, dtype=FP32)
        y = layer_of(kind, activation, FP32)(x, ids.int(), weights.to(BF16))
        expected = right(kind, activation, x, ids, weights.to(BF16))
        torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_packed_exactly(kind) -> None:
    layer = layer_of(kind)
    assert [type(layer.gate_up), type(layer.down)] == (
        [BlockSparseLinear] * 2 if kind == "blocks" else [SpenseLinear] * 2
    )
    for actual, expected in zip(layer.to_dense(), weights_of(kind), strict=True):
        assert torch.equal(actual, expected)
    trained = [name for name, p in layer.named_parameters() if p.requires_grad]
    assert trained == (["gate_up.values", "down.values"] if kind == "blocks" else [])
    assert not any(p.requires_grad for p in layer.freeze().parameters())
    size = sum(t.nbytes for t in (*layer.parameters(), *layer.buffers()))
    assert size < 0.95 * sum(w.nbytes for w in weights_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_state_dict_and_safetensors_hold_the_layer(kind, tmp_path: Path) -> None:
    layer, other = layer_of(kind), layer_of(kind)
    for part in other.buffers():
        part.zero_() if part.dtype == torch.uint8 else None
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    x = inputs(5)
    for twin in (other, copy.deepcopy(layer)):
        assert torch.equal(twin(*x), layer(*x))


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_compiles_whole_and_counts_flops(kind) -> None:
    layer = layer_of(kind)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for m in (2, 3):  # the second is compiled for any number
            assert torch.equal(compiled(*inputs(m)), layer(*inputs(m)))
    with FlopCounterMode(display=False) as counter:
        layer(*inputs(5))
    stored = {"2:4": 3 * H * UNITS / 2, "half 2:4": 2 * UNITS * (H - 64) + H * (UNITS - 64)}
    stored["blocks"] = sum(int((w != 0).sum()) for w in weights_of("blocks")) / E
    assert counter.get_total_flops() == int(2 * 5 * TOP_K * stored[kind])


@pytest.mark.parametrize("kind", KINDS)
def test_the_operator_keeps_torchs_rules_and_is_exported_for_any_number_of_tokens(kind) -> None:
    layer, x = layer_of(kind).eval(), inputs(3)
    batch = torch.export.Dim("batch", max=1000)
    program = torch.export.export(layer, x, dynamic_shapes=({0: batch},) * 3)
    assert torch.equal(program.module()(*inputs(7)), layer(*inputs(7)))
    names = ("values", "columns", "offsets") if kind == "blocks" else ("sparse", "dense")
    parts = layer.gate_up, layer.down
    tensors = [[getattr(part, name).detach() for name in names] for part in parts]
    columns = None if kind == "blocks" else [part.sparse_shape[1] for part in parts]
    operands = *x, *tensors, E, UNITS, H, columns, "silu"
    torch.library.opcheck(torch.ops.sparsebench.sparse_experts, operands)
    needed = [True, True, *[kind == "blocks"] * 2]
    gradients = torch.ops.sparsebench.sparse_experts_gradients
    torch.library.opcheck(gradients, (x[0], *operands, needed))


# ---- gradients ----


def gradients_of(layer: SparseExperts, x: Tensor, ids: Tensor, weights: Tensor) -> list[Tensor]:
    """Return dX, the gradient of the shares, and those of the blocks, for one dY."""
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x)
    x, weights = (t.clone().requires_grad_() for t in (x, weights))
    trained = [p for p in layer.parameters() if p.requires_grad]
    layer(x, ids, weights).backward(dy)
    leaves = [x, weights, *trained]
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def right_gradients(kind: str, activation: str, *operands: Tensor) -> list[Tensor]:
    """Return the same in fp64: autograd's, of a loop over the choices of each token."""
    x, ids, weights = operands
    both = [w.double().requires_grad_() for w in weights_of(kind)]
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(x.dtype).double()
    x, shares = (t.double().requires_grad_() for t in (x, weights))
    y = summed(*both, activation, x, ids, shares)
    dx, dshares, *dense = torch.autograd.grad(y, [x, shares, *both], dy)
    if kind != "blocks":
        return [dx, dshares]
    blocks = [
        Bsr.from_dense(w.detach().flatten(0, 1), block=32).sample(dw.flatten(0, 1)).values
        for w, dw in zip(both, dense, strict=True)
    ]
    return [dx, dshares, *blocks]


def assert_gradients_near(actual: list[Tensor], expected: list[Tensor], most: float) -> None:
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.shape == e.shape
        error = (a.double().cpu() - e).norm() / e.norm().clamp_min(1e-30)
        assert error < most, error


@pytest.mark.parametrize(("kind", "activation"), crossed([*KINDS], [*GATES]))
def test_gradients_are_those_of_a_loop_in_fp64(kind, activation) -> None:
    for m, top_k in ((1, 2), (9, 3), (40, 1)):
        operands = inputs(m, top_k)
        expected = right_gradients(kind, activation, *operands)
        assert_gradients_near(gradients_of(layer_of(kind, activation), *operands), expected, 0.02)
    if kind == "blocks":
        x, ids, weights = inputs(9, dtype=FP32)
        expected = right_gradients(kind, activation, x, ids, weights)
        layer = layer_of(kind, activation, FP32)
        assert_gradients_near(gradients_of(layer, x, ids, weights), expected, 1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_choices_without_an_expert_have_no_gradient(kind) -> None:
    layer, (x, _, weights) = layer_of(kind), inputs(5)
    weights[0] = torch.nan
    dx, dshares, *of_blocks = gradients_of(layer, x, torch.full((5, TOP_K), -1), weights)
    assert not any(gradient.any() for gradient in (dx, dshares, *of_blocks))
    no_token = gradients_of(layer, *(t[:0] for t in inputs(5)))
    assert [g.shape for g in no_token[2:]] == [g.shape for g in of_blocks]
    assert not any(gradient.any() for gradient in no_token)


def test_only_what_needs_a_gradient_gets_one() -> None:
    x, ids, weights = inputs(4)
    layer = layer_of("blocks")
    layer.gate_up.values.requires_grad_(False)
    layer(x, ids, weights).float().sum().backward()
    assert layer.gate_up.values.grad is None
    assert layer.down.values.grad is not None
    assert not layer.freeze()(x, ids, weights).requires_grad


def test_values_in_fp32_train_under_autocast() -> None:
    x, ids, weights = inputs(9)
    layer = layer_of("blocks", dtype=FP32)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x.float(), ids, weights)
    y.float().square().sum().backward()
    assert y.dtype == BF16
    for part in (layer.gate_up, layer.down):
        assert part.values.grad is not None
        assert part.values.grad.dtype == FP32


@pytest.mark.parametrize("kind", KINDS)
def test_a_gradient_compiles_whole_and_counts_flops(kind) -> None:
    layer, operands = layer_of(kind), inputs(5)
    expected = gradients_of(layer, *operands)
    compiled: Any = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for actual, other in zip(gradients_of(compiled, *operands), expected, strict=True):
        assert torch.equal(actual, other)
    with FlopCounterMode(display=False) as counter:
        layer(*operands)
    forward = counter.get_total_flops()
    with FlopCounterMode(display=False) as counter:
        gradients_of(layer, *operands)
    backward = counter.get_total_flops() - forward
    if kind == "blocks":  # G and U again; gate and up are 2 of 3 parts
        assert backward == pytest.approx((2 + 2 / 3) * forward, rel=0.1)
    else:  # V and dX of weights that are written out
        again = forward - 2 * 5 * TOP_K * (H * UNITS // 2 if kind == "2:4" else H * (UNITS - 64))
        assert backward == again + 2 * 5 * TOP_K * 3 * H * UNITS


# ---- biases, padding, and rows of all experts ----


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_with_biases_computes_as_gpt_oss_does(kind, tmp_path: Path) -> None:
    random = torch.Generator().manual_seed(3)
    biases = tuple(torch.randn(E, n, generator=random).to(BF16) for n in (2 * UNITS, H))
    options: dict[str, Any] = {"top_k": TOP_K, "activation": CLAMPED, **KINDS[kind]}
    layer = SparseExperts.from_dense(*weights_of(kind), **options, biases=biases)
    x, ids, weights = inputs(9)
    x *= 8  # so that some of G and U are clamped
    both = [w.double() for w in weights_of(kind)]
    x64, shares = x.double().requires_grad_(), weights.double().requires_grad_()
    y = summed(*both, CLAMPED, x64, ids, shares, [bias.double() for bias in biases])
    torch.testing.assert_close(layer(x, ids, weights).double(), y, rtol=0.05, atol=0.1)
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(1)).to(BF16).double()
    expected = torch.autograd.grad(y, [x64, shares], dy)
    actual = gradients_of(layer.freeze(), x, ids, weights)
    assert_gradients_near(actual, [*expected], 0.15)  # a rounded G or U may pass the limit
    for actual, bias in zip(layer.biases() or (), biases, strict=True):
        assert torch.equal(actual, bias)
    save_file(layer.state_dict(), tmp_path / "layer.safetensors")
    other = SparseExperts.from_dense(
        *weights_of(kind), **options, biases=(biases[0] * 0, biases[1])
    )
    other.load_state_dict(load_file(tmp_path / "layer.safetensors"))
    assert torch.equal(other(x, ids, weights), layer(x, ids, weights))


def test_blocks_that_do_not_divide_the_features_are_padded() -> None:
    x, ids, weights = inputs(9)
    for block, padded in ((64, (256, 320)), (128, (256, 384))):
        layer = SparseExperts.from_dense(*weights_of("blocks"), top_k=TOP_K, block=block)
        assert (layer.gate_up.in_features, layer.down.in_features) == padded
        assert f"features=(256, 288) of {padded}" in repr(layer)
        for packed, w in zip(layer.to_dense(), weights_of("blocks"), strict=True):
            assert torch.equal(packed, w)
        expected = right("blocks", "silu", x, ids, weights)
        torch.testing.assert_close(layer(x, ids, weights).double(), expected, rtol=0.05, atol=0.02)
    gate_up, down = (w[:, :, :240] for w in weights_of("blocks"))  # as many features, and units
    gate_up, down = gate_up.unflatten(1, (2, -1))[:, :, :240].flatten(1, 2), down[:, :240]
    layer = SparseExperts.from_dense(gate_up, down, top_k=TOP_K, block=64)
    assert (layer.gate_up.in_features, layer.down.in_features) == (256, 256)
    x64 = x[:, :240].double().requires_grad_()
    y = summed(gate_up.double(), down.double(), "silu", x64, ids, weights.double())
    narrow = x[:, :240].clone().requires_grad_()
    actual = layer(narrow, ids, weights)
    torch.testing.assert_close(actual.double(), y, rtol=0.05, atol=0.02)
    y.sum().backward()
    actual.sum().backward()
    assert_gradients_near([narrow.grad], [x64.grad], 0.02)  # type: ignore[list-item]


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_all_experts_give_what_the_chosen_ones_compute(kind) -> None:
    layer, (x, ids, _) = layer_of(kind), inputs(7)
    ids = torch.stack((torch.arange(7) % E, (torch.arange(7) + 2) % E), 1)
    scores = torch.zeros(7, E, dtype=BF16).scatter_(1, ids, torch.rand(7, TOP_K).to(BF16))
    rows = (x.repeat(E, 1) * scores.T.reshape(-1, 1)).requires_grad_()
    y = layer(rows)
    gate_up, down = (w.float() for w in weights_of(kind))
    gate, up = (rows.view(E, 7, H).float() @ gate_up.transpose(1, 2)).chunk(2, -1)
    expected = ((torch.nn.functional.silu(gate) * up) @ down.transpose(1, 2)).flatten(0, 1)
    torch.testing.assert_close(y.float(), expected, rtol=0.05, atol=0.02)
    assert not y.view(E, 7, H).transpose(0, 1)[scores == 0].any()
    (dx,) = torch.autograd.grad(y.float().square().sum(), rows)
    assert bool(dx.any())
    assert layer(rows[:0]).shape == (0, H)
    with pytest.raises(Unsupported, match="hidden_states: expected rows of 6 experts"):
        layer(x)


X, IDS, WEIGHTS = inputs(3)
BAD_INPUTS = [
    ((X[:, 1:], IDS, WEIGHTS), r"hidden_states: expected \[m, 256\] in torch.bfloat16, found"),
    ((X.float(), IDS, WEIGHTS), "found .* in torch.float32"),
    ((X, IDS[1:], WEIGHTS), r"top_k_index: expected integers \[3, k\], found \[2, 2\]"),
    ((X, IDS.float(), WEIGHTS), "found .* in torch.float32"),
    ((X, IDS, WEIGHTS[:, 1:]), r"top_k_weights: expected floats \[3, 2\], found \[3, 1\]"),
    ((X, IDS.to("meta"), WEIGHTS), "expected inputs on cpu, found meta"),
    ((X, IDS), "top_k_weights: expected it beside the other one, found None"),
    ((X, None, WEIGHTS), "top_k_index: expected it beside the other one, found None"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_INPUTS, ids=[i[1][:30] for i in BAD_INPUTS])
def test_inputs_that_do_not_fit_are_refused(bad, message) -> None:
    with pytest.raises(Unsupported, match=message):
        layer_of("2:4")(*bad)


def test_layers_and_weights_that_do_not_fit_are_refused() -> None:
    gate_up, down = weights_of("2:4")
    make = SparseExperts.from_dense
    many = (w[:1].expand(1025, -1, -1) for w in (gate_up[:, :64, :64], down[:, :64, :32]))
    for weights, options, message in (
        ((gate_up, down), {"top_k": 0}, "top_k: expected an integer of at least 1, found 0"),
        ((gate_up, down), {"top_k": 2, "block": 0}, "block: expected an integer of at least 1"),
        ((gate_up, down), {"top_k": 1.5}, "top_k: expected an integer of at least 1, found 1.5"),
        ((gate_up[:0], down[:0]), {"top_k": 2}, r"gate_up: expected .*, found \[0, 576, 256\]"),
        ((gate_up, down.half()), {"top_k": 2}, "expected weights of one dtype, found"),
        ((gate_up, down), {"top_k": 2, "activation": "tanh"}, "activation: expected one of silu"),
        ((gate_up[0], down), {"top_k": 2}, "gate_up: expected .experts, rows, columns., found"),
        ((gate_up[1:], down), {"top_k": 2}, "expected gate_up and down of"),
        ((gate_up[..., :72], down[:, :72]), {"top_k": 2}, "of 64 features, found 288 and 72"),
        ((gate_up, down.abs() + 1), {"top_k": 2}, "down of expert 0: expected at most 2 of 4"),
        ((gate_up, down), {"top_k": 2, "biases": (gate_up[..., 0], down[1:, :, 0])}, "of down"),
        (many, {"top_k": 2, "dense_fraction": 1.0}, "experts: expected at most 1024, found 1025"),
    ):
        with pytest.raises(FormatError, match=message):
            make(*weights, **options)
    layer, rest = layer_of("2:4"), {"experts": E, "top_k": 2}
    with pytest.raises(FormatError, match="two SpenseLinear or two BlockSparseLinear"):
        SparseExperts(layer.gate_up, layer_of("blocks").down, **rest)
    by_rows = SpenseLinear(UNITS, E * H, dense_fraction=0.5, bias=False)
    with pytest.raises(FormatError, match="split by columns"):
        SparseExperts(layer.gate_up, by_rows, **rest)
    wrapper = nn.Module()
    wrapper.base_layer = layer.down
    layer.down = wrapper
    with pytest.raises(Unsupported, match="down: expected no adapter"):
        layer(*inputs(2))


# ---- on a GPU ----


def kinds_here() -> list[str]:
    hopper = torch.cuda.get_device_capability() == (9, 0)
    return [*KINDS] if hopper else ["blocks"]


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gpu_computes_what_a_cpu_does(activation: str) -> None:
    for kind in kinds_here():
        layer = layer_of(kind, activation).cuda()
        for m in (1, 16, 300):
            x, ids, weights = inputs(m)
            y = layer(x.cuda(), ids.cuda(), weights.cuda())
            expected = right(kind, activation, x, ids, weights)
            torch.testing.assert_close(y.double().cpu(), expected, rtol=0.05, atol=0.02)


@pytest.mark.gpu
def test_a_captured_call_takes_other_routings() -> None:
    for kind in kinds_here():
        layer = layer_of(kind).cuda().plan([64], search=False)
        x, ids, weights = (t.cuda() for t in inputs(64))
        layer(x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = layer(x, ids, weights)
        for other in (ids.flip(0), torch.zeros_like(ids), torch.full_like(ids, E)):
            ids.copy_(other)
            graph.replay()
            assert torch.equal(y, layer(x, ids, weights)), kind
        assert not y.any()  # no token had an expert


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["silu", CLAMPED])
def test_gradients_on_a_gpu_are_those_of_a_loop_in_fp64(activation: str) -> None:
    for kind in kinds_here():
        layer = layer_of(kind, activation).cuda()
        for m, top_k in ((1, 2), (17, 3), (300, 1)):
            operands = inputs(m, top_k)
            expected = right_gradients(kind, activation, *operands)
            actual = gradients_of(layer, *(t.cuda() for t in operands))
            assert_gradients_near(actual, expected, 0.02)


@pytest.mark.gpu
def test_a_captured_training_step_takes_other_routings() -> None:
    for kind in kinds_here():
        layer = layer_of(kind).cuda()
        x, ids, weights = (t.cuda() for t in inputs(64))
        for _ in range(2):
            gradients_of(layer, x, ids, weights)
        graph = torch.cuda.CUDAGraph()
        dy = torch.ones_like(x)
        x.requires_grad_()
        trained = [x, *(p for p in layer.parameters() if p.requires_grad)]
        torch.autograd.grad(layer(x, ids, weights), trained, dy)
        with torch.cuda.graph(graph):
            captured = torch.autograd.grad(layer(x, ids, weights), trained, dy)
        for other in (ids.flip(0), torch.zeros_like(ids), torch.full_like(ids, E)):
            ids.copy_(other)
            graph.replay()
            expected = torch.autograd.grad(layer(x, ids, weights), trained, dy)
            for a, e in zip(captured, expected, strict=True):
                assert torch.equal(a, e), kind


@pytest.mark.gpu
def test_hundreds_of_experts_run_on_a_gpu() -> None:
    for kind in kinds_here():
        gate_up, down = (w[:1].expand(600, -1, -1) for w in weights_of(kind))
        layer = SparseExperts.from_dense(gate_up, down, top_k=8, **KINDS[kind]).cuda()
        x, _, _ = inputs(50)
        ids = (torch.arange(400) * 7 % 600).view(50, 8)
        y = layer(x.cuda(), ids.cuda(), torch.ones(50, 8).cuda())
        one = right(kind, "silu", x, torch.zeros(50, 1, dtype=torch.long), torch.ones(50, 1))
        torch.testing.assert_close(y.double().cpu() / 8, one, rtol=0.05, atol=0.02)
