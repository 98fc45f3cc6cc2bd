"""The experts of a mixture as a layer: results, bad input, graphs, and what a state dict holds."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.utils.flop_counter import FlopCounterMode

from sparsebench.errors import FormatError, Unsupported
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
    """Return the sums in fp64, by a loop over the choices of each token."""
    gate_up, down = (w.double() for w in weights_of(kind))
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, choice in ((ids >= 0) & (ids < E)).nonzero().tolist():
        expert = ids[token, choice]
        gate, up = linear(x[token].double(), gate_up[expert]).chunk(2)
        of_expert = linear(ACTIVATIONS[activation](gate) * up, down[expert])
        y[token] += of_expert * weights[token, choice].double()
    return y


@pytest.mark.parametrize(("kind", "activation"), crossed([*KINDS], [*ACTIVATIONS]))
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
def test_weights_are_packed_exactly_and_frozen(kind) -> None:
    layer = layer_of(kind)
    assert [type(layer.gate_up), type(layer.down)] == (
        [BlockSparseLinear] * 2 if kind == "blocks" else [SpenseLinear] * 2
    )
    for actual, expected in zip(layer.to_dense(), weights_of(kind), strict=True):
        assert torch.equal(actual, expected)
    assert not any(p.requires_grad for p in layer.parameters())
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
    columns = [] if kind == "blocks" else [part.sparse_shape[1] for part in parts]
    operands = *x, *tensors, E, UNITS, columns, "silu"
    torch.library.opcheck(torch.ops.sparsebench.sparse_experts, operands)


def test_a_gradient_is_refused_by_backward_alone() -> None:
    x, ids, weights = inputs(3)
    for layer in (layer_of("2:4"), layer_of("blocks")):
        y = layer(x.clone().requires_grad_(), ids, weights)
        assert torch.equal(y.detach(), layer(x, ids, weights))
        with pytest.raises(Unsupported, match="expected no gradient"):
            y.sum().backward()


X, IDS, WEIGHTS = inputs(3)
BAD_INPUTS = [
    ((X[:, 1:], IDS, WEIGHTS), r"hidden_states: expected \[m, 256\] in torch.bfloat16, found"),
    ((X.float(), IDS, WEIGHTS), "found .* in torch.float32"),
    ((X, IDS[1:], WEIGHTS), r"top_k_index: expected integers \[3, k\], found \[2, 2\]"),
    ((X, IDS.float(), WEIGHTS), "found .* in torch.float32"),
    ((X, IDS, WEIGHTS[:, 1:]), r"top_k_weights: expected floats \[3, 2\], found \[3, 1\]"),
    ((X, IDS.to("meta"), WEIGHTS), "expected inputs on cpu, found meta"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_INPUTS, ids=[i[1][:30] for i in BAD_INPUTS])
def test_inputs_that_do_not_fit_are_refused(bad, message) -> None:
    with pytest.raises(Unsupported, match=message):
        layer_of("2:4")(*bad)


def test_layers_and_weights_that_do_not_fit_are_refused() -> None:
    gate_up, down = weights_of("2:4")
    make = SparseExperts.from_dense
    for weights, options, message in (
        ((gate_up, down), {"top_k": 0}, "top_k: expected an integer of at least 1, found 0"),
        ((gate_up, down), {"top_k": 1.5}, "top_k: expected an integer of at least 1, found 1.5"),
        ((gate_up[:0], down[:0]), {"top_k": 2}, r"gate_up: expected .*, found \[0, 576, 256\]"),
        ((gate_up, down.half()), {"top_k": 2}, "expected weights of one dtype, found"),
        ((gate_up, down), {"top_k": 2, "activation": "tanh"}, "activation: expected one of silu"),
        ((gate_up[0], down), {"top_k": 2}, "gate_up: expected .experts, rows, columns., found"),
        ((gate_up[1:], down), {"top_k": 2}, "expected gate_up and down of"),
        ((gate_up[..., :72], down[:, :72]), {"top_k": 2}, "of 64 features, found 288 and 72"),
        ((gate_up, down.abs() + 1), {"top_k": 2}, "down of expert 0: expected at most 2 of 4"),
        ((gate_up, down), {"top_k": 2, "block": 64}, "gate_up: expected a multiple of 64"),
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
