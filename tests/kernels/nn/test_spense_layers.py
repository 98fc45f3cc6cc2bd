"""Layers with 2:4 hybrid weights compared with dense layers."""

from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch.nn.functional import linear
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from sparsebench.errors import FormatError, Unsupported
from sparsebench.harness.models.pruning.layer import GatedMLP
from sparsebench.kernels.nn import SpenseGatedMLP, SpenseLinear
from sparsebench.kernels.nn import _spense_op as layers
from sparsebench.kernels.spense import _written_out
from sparsebench.kernels.spense._gated_gradient import gated_gradient
from sparsebench.kernels.spense._written_out import written_out
from sparsebench.kernels.spense.spense_ffn import interleaved, parted
from tests.compiling.nvcc import hopper
from tests.kernels.spense.examples import pruned
from tests.tools.marks import crossed, sampled

BF16, FP16, E4M3 = torch.bfloat16, torch.float16, torch.float8_e4m3fn


# n, k, dense fraction, split, shape of X before k: edges inside tiles, no sparse part, or no dense
# part, a vector, no tokens.
LAYERS: list[tuple[int, int, float, str, tuple[int, ...]]] = [
    (200, 144, 0.0, "rows", (7,)),
    (328, 136, 0.5, "rows", (2, 3)),
    (72, 400, 0.4, "columns", (5,)),
    (192, 264, 1.0, "rows", ()),
    (64, 264, 1.0, "columns", (0,)),
]


def layer_of(
    n: int, k: int, fraction: float, split: str, dtype: torch.dtype = BF16, bias: bool = True
) -> tuple[SpenseLinear, Tensor, Tensor | None]:
    rows = int(n * (1 - fraction)) if split == "rows" else n
    columns = int(k * (1 - fraction)) if split == "columns" else k
    w, b = pruned(n, k, rows, columns, dtype), torch.randn(n).to(dtype) if bias else None
    layer = SpenseLinear.from_dense(w, dense_fraction=fraction, split=split, bias=b)
    return layer, w, b


@pytest.mark.parametrize(("sizes", "kind"), crossed(LAYERS, [(BF16, True), (FP16, False)]))
def test_a_layer_and_its_dx_equal_those_of_nn_linear(sizes, kind):
    (n, k, fraction, split, tokens), (dtype, bias) = sizes, kind
    layer, w, b = layer_of(n, k, fraction, split, dtype, bias)
    x = torch.randn(*tokens, k).to(dtype).requires_grad_()
    y, expected = layer(x), linear(x, w) if b is None else linear(x, w) + b
    torch.testing.assert_close(y, expected)
    dense, dy = layer.to_dense(), torch.randn_like(y)
    dx, right = (torch.autograd.grad(each, [x], dy) for each in (y, expected))
    torch.testing.assert_close(dx, right)
    assert torch.equal(dense.weight, w)
    assert (dense.bias is not None) == bias
    torch.testing.assert_close(dense(x), linear(x, w, b))


def test_a_state_dict_of_another_layout_or_dtype_is_refused():
    make = SpenseLinear
    for other, saved in (
        (make(144, 256, dense_fraction=0.5, dtype=FP16), make(144, 256, dense_fraction=0.5)),
        (make(144, 256), make(144, 256, dense_fraction=0.5)),
        (make(144, 256), make(144, 256, dense_fraction=0.5, dtype=E4M3)),
    ):
        position = {BF16: 1, E4M3: 2}[saved.dtype]
        with pytest.raises(FormatError, match=f"256, 144, 128, 144, {position}"):
            other.load_state_dict(saved.state_dict(), strict=False)


def mlp_of(
    h: int = 328, k: int = 136, dense: int = 200, activation: str = "silu", dtype=BF16
) -> tuple[SpenseGatedMLP, GatedMLP]:
    gate, up = (2 * pruned(h, k, h - dense, k, dtype) for _ in range(2))
    down = pruned(k, h, k, h - dense, dtype)
    packed = SpenseGatedMLP.from_dense(gate, up, down, dense=dense, activation=activation)
    return packed, GatedMLP(gate, up, down, activation)


# h, k, dense: whole and partial tiles, all dense, all sparse.
MLPS = [(328, 136, 200), (512, 72, 128), (200, 136, 200), (200, 144, 0), (320, 64, 100)]


@pytest.mark.parametrize(("sizes", "activation"), crossed(MLPS, [*layers.ACTIVATIONS]))
def test_an_mlp_equals_three_dense_products(sizes, activation):
    h, k, dense = sizes
    packed, right = mlp_of(h, k, dense, activation)
    for weight, expected in zip(packed.to_dense(), (right.gate, right.up, right.down), strict=True):
        assert torch.equal(weight, expected)
    for tokens in ((5,), (2, 3), (), (0,)):
        x = torch.randn(*tokens, k).to(BF16)
        torch.testing.assert_close(packed(x), right(x))


# ---- fp8 ----


def by_row(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix rounded to e4m3, in fp64, and the scale of each row."""
    scale = (matrix.float().abs().amax(-1, keepdim=True) / 448).clamp_min(1e-30)
    return (matrix.float() / scale).to(E4M3).double(), scale.double()


@pytest.mark.parametrize(("n", "k", "fraction", "split", "tokens"), LAYERS[:4])
def test_a_layer_in_fp8_computes_the_scaled_product(n, k, fraction, split, tokens):
    w, b = layer_of(n, k, fraction, split)[1:]
    options = {"dense_fraction": fraction, "split": split, "bias": b}
    w[0] = 0
    layer = SpenseLinear.from_dense(w, dtype=E4M3, **options)
    x = torch.randn(*tokens, k).to(BF16)
    (of_x, token), (of_w, row) = by_row(x), by_row(w)
    product = (of_x @ of_w.T * row[:, 0] * token).to(BF16)
    y = layer(x)
    assert y.dtype == BF16
    torch.testing.assert_close(y, product + b)
    exact = linear(x.double(), w.double())
    assert (product.double() - exact).square().mean() < 0.05**2 * exact.square().mean()
    torch.testing.assert_close(layer.to_dense().weight.double(), of_w * row, rtol=2**-8, atol=0)
    # As in a checkpoint in fp8: one scale per row, in two shapes, or a single scale.
    stored = of_w.float().to(E4M3)
    for scale in (row.float(), row.float()[:, 0]):
        again = SpenseLinear.from_dense(stored, scale=scale, **options)
        assert torch.equal(again(x), y)
    options["bias"] = None
    of_one = SpenseLinear.from_dense(stored, scale=torch.tensor(0.25), **options)
    assert torch.equal(of_one(x), SpenseLinear.from_dense(stored, **options)(x) / 4)
    # X in e4m3 is not rounded.
    rounded = SpenseLinear.from_dense(w, dtype=E4M3, **options)
    as_it_is = rounded(of_x.float().to(E4M3))
    torch.testing.assert_close(as_it_is, (of_x @ of_w.T * row[:, 0]).to(BF16))


@pytest.mark.parametrize(("sizes", "activation"), crossed(MLPS, [*layers.ACTIVATIONS]))
def test_an_mlp_in_fp8_rounds_x_and_h(sizes, activation):
    h, k, dense = sizes
    _, right = mlp_of(h, k, dense, activation)
    weights, x = (right.gate, right.up, right.down), torch.randn(2, 3, k).to(BF16)
    (gate, up, down), (of_gate, of_up, of_down) = zip(*map(by_row, weights), strict=True)
    of_x, token = by_row(x)
    g, u = (of_x @ w.T * row[:, 0] * token for w, row in ((gate, of_gate), (up, of_up)))
    hidden = layers.ACTIVATIONS[activation](g) * u
    most = float(hidden.abs().max())
    for largest in (most, most / 4):  # some values exceed the second
        rounded = (hidden / largest * 448).clamp(-448, 448).float().to(E4M3).double()
        product = rounded @ down.T * of_down[:, 0] * largest / 448
        packed = SpenseGatedMLP.from_dense(
            *weights, dense=dense, activation=activation, dtype=E4M3, largest=largest
        )
        y = packed(x).double()
        assert (y - product).square().mean() < 0.01**2 * product.square().mean()
        with torch.autocast("cpu", BF16):
            assert torch.equal(packed(x).double(), y)
        stored = [w.float().to(E4M3) for w in (gate, up, down)]
        options = {"scales": (of_gate.float(), of_up.float(), of_down.float())}
        again = SpenseGatedMLP.from_dense(
            *stored, dense=dense, activation=activation, largest=largest, **options
        )
        assert torch.equal(again(x).double(), y)
    dense_gate, dense_up, dense_down = (w.double() for w in packed.to_dense())
    of_dense = (
        layers.ACTIVATIONS[activation](x.double() @ dense_gate.T) * (x.double() @ dense_up.T)
    ) @ dense_down.T
    exact = hidden @ (down * of_down).T
    assert (of_dense - exact).square().mean() < 0.05**2 * exact.square().mean()


def test_operators_pass_opcheck():
    layer, x = layer_of(72, 400, 0.4, "columns")[0], torch.randn(3, 400).to(BF16)
    torch.library.opcheck(
        torch.ops.sparsebench.spense_linear, (x, layer.sparse, layer.dense, 72, 400, 72, 128)
    )
    gate_up = mlp_of(200, 400, 72)[0].gate_up
    sizes = 400, 400, *gate_up.sparse_shape, "silu"
    torch.library.opcheck(
        torch.ops.sparsebench.spense_linear, (x, gate_up.sparse, gate_up.dense, *sizes)
    )
    layer = SpenseLinear.from_dense(pruned(72, 400, 72, 400), dtype=E4M3)
    sizes = 72, 400, *layer.sparse_shape, None
    torch.library.opcheck(
        torch.ops.sparsebench.spense_linear, (x, layer.sparse, layer.dense, *sizes, layer.scale)
    )


def test_autocast_casts_inputs_to_the_dtype_of_the_weights():
    layer, w, b = layer_of(200, 144, 0.0, "rows")
    x = torch.randn(3, 144)
    with torch.autocast("cpu", BF16):
        torch.testing.assert_close(layer(x), linear(x.to(BF16), w) + b)


def test_wrong_weights_dtypes_and_scales_are_refused():
    w, make = pruned(256, 64, 256, 64), SpenseLinear.from_dense
    odd, ones = w.clone(), torch.ones(64)
    odd[3, 4:7] = 1
    for message, weight, options in (
        ("weight: .*row 3, group 1", odd, {}),
        ("weight: .*torch.float32", w.float(), {}),
        ("weight: .*split", w, {"split": "both"}),
        ("bias", w, {"bias": w[0]}),
        ("weight: .*found Linear", torch.nn.Linear(64, 256), {}),
        ("weight: .*scale", w.to(E4M3), {"scale": ones}),
        ("weight: .*scale", w, {"dtype": E4M3, "scale": ones}),
        ("weight: .*torch.float16", w, {"dtype": FP16}),
        ("weight: .*torch.int8", w.to(torch.int8), {"dtype": E4M3}),
    ):
        with pytest.raises(FormatError, match=f"^{message}"):
            make(weight, **options)
    layer, x = make(w, dtype=E4M3), torch.zeros(3, 64)
    with pytest.raises(Unsupported, match=r"torch.float16"):
        layer(x.half())
    layer.scale = layer.scale.to(BF16)
    with pytest.raises(Unsupported, match="scales"):
        layer(x.to(BF16))


def test_wrong_weights_of_an_mlp_are_refused():
    gate, up, down = pruned(256, 64, 128, 64), pruned(256, 64, 128, 64), pruned(64, 256, 64, 128)
    make = SpenseGatedMLP.from_dense
    uneven = {"gate": gate[:252], "up": up[:252], "down": down[:, :252]}
    not_two_four = up.clone()
    not_two_four[127, :4] = 1
    for change, name in (
        ({"down": up}, "down"),
        ({"up": up.half()}, "up"),
        ({"dense": 257}, "dense"),
        (uneven, "hidden_features"),
        ({"activation": "tanh"}, "activation"),
        ({"up": not_two_four}, "up: .*row 127, group 0"),
        ({"dtype": E4M3}, "largest"),
        ({"largest": 3.0}, "largest"),
    ):
        with pytest.raises(FormatError, match=f"^{name}"):
            make(**{"gate": gate, "up": up, "down": down, "dense": 128} | change)


def test_a_gradient_of_fp8_is_refused():
    x = torch.zeros(3, 144, dtype=BF16, requires_grad=True)
    layer = SpenseLinear.from_dense(pruned(200, 144, 200, 144), dtype=E4M3)
    with pytest.raises(Unsupported, match="fp8"):
        layer(x)
    with torch.inference_mode():
        layer(x)


IN_TRITON = [
    pytest.param("cpu", marks=pytest.mark.interpreted),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", IN_TRITON)
@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(("n", "k", "fraction", "split", "tokens"), LAYERS)
def test_a_hybrid_is_written_out_by_triton(n, k, fraction, split, tokens, dtype, device):
    layer = layer_of(n, k, fraction, split, dtype)[0].to(device)
    assert torch.equal(written_out(layer.spense), layer.to_dense().weight)


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize("capability", sampled([90, 80, 100]))
def test_writing_out_compiles_for_every_gpu(capability, sparse, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kinds = dict.fromkeys(_written_out._write.arg_names, "i32")
    kinds |= {"values": "*i16", "codes": "*u8", "out": "*i16", "SPARSE": "constexpr"}
    source = ASTSource(_written_out._write, kinds, {"SPARSE": sparse})
    assert triton.compile(source, GPUTarget("cuda", capability, 32)).asm["cubin"]


@pytest.mark.parametrize("device", IN_TRITON)
@pytest.mark.parametrize(("m", "n", "dtype"), [(5, 424, FP16), (1, 8, torch.float32)])
@pytest.mark.parametrize("activation", layers.ACTIVATIONS)
def test_a_gated_gradient_by_triton_is_that_of_autograd(activation, m, n, dtype, device):
    products = torch.randn(m, 2 * n, device=device, dtype=torch.float32) * 3
    products[0, 0], products[0, 1] = 0, -90
    products, dh = products.to(dtype), torch.randn(m, n, device=device).to(dtype)
    gate, up = (t.requires_grad_() for t in parted(products.T.double()))
    (layers.ACTIVATIONS[activation](gate) * up).backward(dh.T.double())
    expected = interleaved(gate.grad, up.grad).T.to(dtype)
    torch.testing.assert_close(gated_gradient(products, dh, activation), expected)


@pytest.mark.parametrize("activation", sampled(layers.ACTIVATIONS, 0, -1))
def test_dx_of_an_mlp_equals_that_of_dense_layers_and_compiles(activation):
    mlp, dense = mlp_of(200, 144, 72, activation, FP16)
    x = torch.randn(3, 5, 144).half()
    dy = torch.randn_like(x)
    grads = []
    for call in (mlp, dense, torch.compile(mlp, backend="aot_eager", fullgraph=True)):
        leaf = x.clone().requires_grad_()
        call(leaf).backward(dy)
        grads.append(leaf.grad)
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-2, atol=1e-2)
    assert torch.equal(grads[0], grads[2])


def test_backward_needs_no_copy_of_x():
    saved: list[tuple[int, ...]] = []
    x = torch.randn(6, 144, dtype=BF16, requires_grad=True)
    layer = layer_of(200, 144, 0.0, "rows")[0]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append((*t.shape,)), print):
        layer(x)
    assert not saved


def test_a_write_to_the_weights_between_forward_and_backward_is_an_error():
    x = torch.randn(6, 144, dtype=BF16, requires_grad=True)
    layer = layer_of(200, 144, 0.0, "rows")[0]
    y = layer(x)
    layer.dense.add_(1)
    with pytest.raises(RuntimeError, match="modified"):
        y.sum().backward()


def test_a_second_derivative_is_refused():
    mlp, _ = mlp_of(128, 128, 0)
    x = torch.randn(6, 128, dtype=BF16, requires_grad=True)
    (dx,) = torch.autograd.grad(mlp(x).float().sum(), x, create_graph=True)
    with pytest.raises(Unsupported, match="spense_dgrad: expected no second"):
        dx.sum().backward()


# ---- plans ----


# ---- on a GPU ----


@hopper
@pytest.mark.parametrize("dtype", [BF16, FP16, E4M3], ids=str)
def test_layers_on_a_gpu_are_those_on_a_cpu(dtype: torch.dtype) -> None:
    """Tensor cores sum fp8 with 13 bits, so a few elements of H round differently."""
    fp8 = dtype == E4M3
    sizes = [(200, 144, 0.0, "rows"), (72, 400, 0.4, "columns"), (192, 272, 1.0, "rows")]
    cases: list[tuple[Any, int]] = []
    for n, k, fraction, split in sizes if fp8 else [case[:4] for case in LAYERS]:
        _, w, b = layer_of(n, k, fraction, split, BF16 if fp8 else dtype)
        options = {"dense_fraction": fraction, "split": split, "bias": b, "dtype": dtype}
        cases.append((SpenseLinear.from_dense(w, **options), k))
    for h, k, dense in [(336, 144, 200), (512, 80, 128), (208, 144, 0)] if fp8 else MLPS:
        for activation in layers.ACTIVATIONS:
            packed, right = mlp_of(h, k, dense, activation, BF16 if fp8 else dtype)
            if fp8:
                weights, more = (right.gate, right.up, right.down), {"dtype": E4M3, "largest": 40.0}
                packed = SpenseGatedMLP.from_dense(
                    *weights, dense=dense, activation=activation, **more
                )
            cases.append((packed, k))
    for layer, k in cases:
        wide = torch.randn(300, k + 24).to(BF16 if fp8 else dtype)
        for x in (wide[:, :k], wide[:, 8 : k + 8], wide[:, 3 : k + 3], wide[:17, :k], wide[:0, :k]):
            right = layer.cpu()(x)
            y = layer.cuda()(x.cuda()).cpu()
            assert (y.dtype, y.shape) == (right.dtype, right.shape)
            error, size = (y.float() - right.float()).abs(), right.float().square().mean().sqrt()
            assert not len(x) or error.square().mean().sqrt() < 0.03 * size
            assert fp8 or (error <= 2**-5 * (right.float().abs() + size)).all()
