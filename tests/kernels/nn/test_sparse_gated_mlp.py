"""SparseGatedMLP against three dense layers: on a CPU, interpreted, compiled, and on a GPU."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear, relu
from triton.compiler import ASTSource
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsebench.errors import FormatError, Unsupported
from sparsebench.formats.active_csr import ActiveCsr
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels.nn import SparseGatedMLP
from sparsebench.kernels.nn import sparse_gated_mlp as module
from sparsebench.kernels.twell import _autograd, _gather, _index, _overflow
from tests.compiling.triton_kernels import complaint_about
from tests.tools.marks import sampled

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def drawn(
    m: int,
    n: int,
    k: int,
    slots: int,
    *,
    rarity: float = 1.0,
    activation: str = "relu",
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
) -> tuple[SparseGatedMLP, Tensor]:
    """Return a layer, and X; a gate is on where a normal deviate is above `rarity`.

    Gates are sums of few-bit integers, over a power of two: no rounding changes a sign, so that
    all agree on who is on. If there are enough, one token has all units on, and one none.
    """
    made: dict[str, Any] = {"dtype": torch.float64}
    x, gate = (torch.randint(-2, 3, size).to(**made) for size in ((m, k), (n, k)))
    x[:, 0], gate[:, 0] = 1, -round(rarity * 2 * k**0.5)
    if m > 3:
        x[1, 0], x[2, 0] = -(most := -(-6 // abs(rarity))), most
    up, down = (torch.randn(size, **made) * k**-0.5 for size in ((n, k), (k, n)))
    weights = (w.to(device, dtype) for w in (gate / 2 ** round(k**0.5).bit_length(), up, down))
    mlp = SparseGatedMLP.from_dense(*weights, activation=activation, slots=slots)
    return mlp, x.to(device, dtype)


def step(mlp: Any, x: Tensor, share: float = 0.5) -> tuple[Tensor, ...]:
    """Return Y, L1, and of both, L1 times `share`, the gradients of X, gate, up and down."""
    x = x.detach().requires_grad_()
    y, l1 = mlp(x, l1=True)
    loss = (y * gradient_of(y)).double().sum() + share * l1.double()
    return y.detach(), l1.detach(), *torch.autograd.grad(loss, [x, *mlp.parameters()])


def gradient_of(y: Tensor) -> Tensor:
    """Return a dY that any dtype holds."""
    at = torch.arange(y.numel(), device=y.device)
    return ((at * 7919 % 17 - 8) / 8).to(y.dtype).view(y.shape)


class Dense(nn.Module):
    """What a SparseGatedMLP is, by dense layers."""

    def __init__(self, mlp: SparseGatedMLP, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.gate, self.up, self.down = (copy.deepcopy(w) for w in (mlp.gate, mlp.up, mlp.down))
        self.squared = mlp.activation == "relu2"
        self.to(dtype)

    def forward(self, x: Tensor, *, l1: bool = False) -> Any:
        act = relu(self.gate(x))
        h = (act.square() if self.squared else act) * self.up(x)
        y = self.down(h)
        return (y, h.float().abs().sum(-1).mean()) if l1 else y


def dense_step(mlp: SparseGatedMLP, x: Tensor, share: float = 0.5) -> tuple[Tensor, ...]:
    return step(Dense(mlp, torch.float64), x.double(), share)


def assert_near(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], eps: float) -> None:
    assert len(found) == len(expected)
    for number, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a.double() - b.double()).norm() <= eps * b.double().norm(), number


def spreads(mlp: SparseGatedMLP, x: Tensor, share: float) -> Iterator[Tensor]:
    """Carry the spreads of rounded products through Y and all gradients (harness/ops/ffn.py)."""
    x, wg, wu, wd_t = (t.detach().double() for t in (x, *mlp.parameters()))
    wd = wd_t.t()
    squared = mlp.activation == "relu2"
    g, u, dy = linear(x, wg), linear(x, wu), gradient_of(x)
    on = (g > 0).double()
    act, slope = (g * g * on, 2 * g * on) if squared else (g * on, on)
    var_g, var_u = (linear(x.square(), w.square()) for w in (wg, wu))
    h, dh = act * u, dy @ wd + share / len(x) * (act * u).sign()
    var_h = (slope * u).square() * var_g + act.square() * var_u + h.square()
    var_dh = dy.square() @ wd.square()
    var_du = act.square() * var_dh + (dh * slope).square() * var_g
    of_slope = (2 * dh * u * on).square() * var_g if squared else 0
    var_dg = (u * slope).square() * var_dh + (dh * slope).square() * var_u + of_slope
    two_h = var_h + h.square()
    two_dg, two_du = var_dg + 2 * (dh * u * slope).square(), var_du + 2 * (dh * act).square()
    yield linear(two_h, wd.square()).sqrt()
    yield (two_dg @ wg.square() + two_du @ wu.square()).sqrt()
    yield (two_dg.T @ x.square()).sqrt()
    yield (two_du.T @ x.square()).sqrt()
    yield (two_h.T @ dy.square()).sqrt()


def assert_right(mlp: SparseGatedMLP, x: Tensor, share: float = 0.5) -> tuple[Tensor, ...]:
    """Hold Y and all gradients against fp64 as the harness would; return what was found."""
    found = step(mlp, x, share)
    (y, l1, *rest), (right, norm, *others) = found, dense_step(mlp, x, share)
    assert (l1 - norm).abs() <= torch.finfo(x.dtype).eps * norm + 1e-6
    depth = max(*x.shape, mlp.hidden_features)
    parts = zip((y, *rest), (right, *others), spreads(mlp, x, share), strict=True)
    for name, (a, b, spread) in zip(("y", "dx", "dwg", "dwu", "dwd"), parts, strict=True):
        verdict = check(a.contiguous(), Expected(b.contiguous(), spread, x.dtype, depth))
        assert verdict.reason is None, f"{name}: {verdict.reason}"
    return found


# m, n, k, slots, rarity: a last group with few rows, fewer units than a word, pieces that are not
# full, k below, at and beyond what a program sums; slots that suffice, and that do not.
CASES = [
    (5, 24, 16, 24, 0.3),
    (37, 72, 40, 30, 1.0),
    (37, 72, 40, 2, 1.0),
    (150, 136, 72, 20, 1.5),
    (150, 136, 72, 3, 1.5),
    (33, 520, 264, 60, 2.0),
    (20, 264, 520, 1, 2.5),
    (1, 8, 8, 8, 0.0),
    (40, 40, 24, 40, -5.0),
    (9, 64, 32, 1, 9.0),
]


# ---- the module, on a CPU ----


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize(("m", "n", "k", "slots", "rarity"), CASES)
def test_output_and_gradients_are_those_of_dense_layers(m, n, k, slots, rarity, activation):
    mlp, x = drawn(m, n, k, slots, rarity=rarity, activation=activation)
    for share in (0.0, 0.5):
        assert_near(step(mlp, x, share), dense_step(mlp, x, share), 1e-5)


def test_inputs_of_any_shape_and_layout_are_taken():
    mlp, x = drawn(24, 40, 16, 8)
    flat = mlp(x)
    torch.testing.assert_close(mlp(x.view(2, 3, 4, 16)), flat.view(2, 3, 4, 16))
    torch.testing.assert_close(mlp(x[3]), flat[3])
    torch.testing.assert_close(mlp(x.t().contiguous().t()), flat)
    y, l1 = mlp(x[:0], l1=True)
    assert (y.shape, l1.item()) == ((0, 16), 0.0)


def test_a_loss_of_the_l1_term_alone_has_a_gradient():
    mlp, x = drawn(12, 40, 16, 8)
    found = torch.autograd.grad(mlp(x, l1=True)[1], [*mlp.parameters()])
    twin = Dense(mlp, torch.float64)
    h = relu(twin.gate(x.double())) * twin.up(x.double())
    norm = h.abs().sum() / len(x)
    expected = torch.autograd.grad(norm, [twin.gate.weight, twin.up.weight])
    assert_near(found[:2], expected, 1e-5)
    assert found[2].eq(0).all()


def three_linears(mlp: SparseGatedMLP) -> dict[str, Tensor]:
    """Return the state dict of three nn.Linear, as other code and older versions store it."""
    state = mlp.state_dict()
    return {**state, "down.weight": state.pop("down.weight_t").t()}


def test_a_state_dict_of_three_linear_layers_loads():
    mlp, x = drawn(7, 40, 16, 8)
    assert {n: w.shape for n, w in mlp.state_dict().items()} == {
        "gate.weight": (40, 16), "up.weight": (40, 16), "down.weight_t": (40, 16)
    }  # fmt: skip
    torch.testing.assert_close(Dense(mlp)(x), mlp(x))
    assert torch.equal(mlp.down.weight, mlp.down.weight_t.t())
    for assign in (False, True):
        for state in (three_linears(mlp), mlp.state_dict()):
            other = SparseGatedMLP(16, 40)
            other.load_state_dict(state, assign=assign)
            assert torch.equal(other(x), mlp(x))
            assert all(w.is_contiguous() for w in other.parameters())


def test_a_state_dict_without_down_is_missing_it():
    mlp, _ = drawn(7, 40, 16, 8)
    state = mlp.state_dict()
    del state["down.weight_t"]
    with pytest.raises(RuntimeError, match=r'Missing key.*"down.weight_t"'):
        SparseGatedMLP(16, 40).load_state_dict(state)


def test_weights_their_gradients_and_states_are_contiguous():
    mlp, x = drawn(7, 40, 16, 8)
    mlp(x).sum().backward()
    optimizer = torch.optim.AdamW(mlp.parameters())
    optimizer.step()
    weight = mlp.down.weight_t
    moved = copy.deepcopy(mlp).bfloat16().down.weight_t
    for each in (weight, weight.grad, optimizer.state[weight]["exp_avg"], moved):
        assert (each.shape, each.is_contiguous()) == ((40, 16), True)


def test_weights_of_down_are_drawn_as_those_of_nn_linear():
    mlp = SparseGatedMLP(16, 400)
    for drawn_again in (False, True):
        if drawn_again:
            mlp.down.reset_parameters()
        largest = float(mlp.down.weight_t.detach().abs().max())
        assert 0.95 * 400**-0.5 < largest <= 400**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_gives_what_dense_layers_give(dtype):
    mlp, x = drawn(9, 40, 16, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = mlp(x), Dense(mlp)(x)
    assert found.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.03, atol=0.03)


# ---- sparse or dense, as it is told ----


def units_on(mlp: SparseGatedMLP, x: Tensor) -> int:
    """Count the units on for a token, on average, rounded up."""
    on = int((linear(x.double(), mlp.gate.weight.double()) > 0).sum())
    return -(-on // max(1, len(x)))


@pytest.mark.parametrize("activation", ["relu", "relu2"])
@pytest.mark.parametrize(("m", "n", "k", "slots", "rarity"), CASES)
def test_a_layer_that_is_told_to_be_dense_is(m, n, k, slots, rarity, activation):
    mlp, x = drawn(m, n, k, slots, rarity=rarity, activation=activation)
    mlp.sparse = False
    for share in (0.0, 0.5):
        assert_near(step(mlp, x, share), dense_step(mlp, x, share), 1e-5)


def test_a_layer_told_to_be_dense_stores_what_dense_layers_store():
    mlp, x = drawn(64, 40, 16, 8)
    mlp.sparse = False

    def kept(layer: nn.Module) -> int:
        found: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            found.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            layer(x)
        return len({t.data_ptr() for t in found if len(t) == 64})

    assert kept(mlp) == kept(Dense(mlp)) == 4  # X, act(G), U and H


@pytest.mark.parametrize("sparse", [True, False])
@pytest.mark.parametrize(("m", "n", "k", "slots", "rarity"), CASES)
def test_a_layer_counts_its_active_units(m, n, k, slots, rarity, sparse):
    mlp, x = drawn(m, n, k, slots, rarity=rarity)
    mlp.sparse = sparse
    for given in (x, x[:1], x[:0]):
        mlp(given)
        assert int(mlp.active) == units_on(mlp, given)


def test_the_count_is_not_in_the_state_and_keeps_its_dtype():
    mlp, x = drawn(12, 600, 16, 8, rarity=-5.0)
    mlp(x)
    assert "active" not in mlp.state_dict()
    assert int(copy.deepcopy(mlp).bfloat16().active) == int(mlp.active) == units_on(mlp, x) > 512


@pytest.mark.parametrize(
    ("active", "slots", "sparse"),
    [(0, 88, True), (59, 88, True), (60, 88, False), (20, 20, True), (21, 20, False)],
)
def test_a_layer_adapts_to_what_is_faster(active, slots, sparse):
    mlp = SparseGatedMLP(8, 5632, slots=slots)
    for before in (True, False):
        mlp.sparse = before
        mlp.active.fill_(active)
        assert mlp.adapt() == mlp.sparse == sparse
    assert f"slots={slots} of 5632, sparse={sparse}" in repr(mlp)


def test_a_layer_adapts_again_as_units_become_inactive():
    mlp, x = drawn(30, 512, 16, 8, rarity=0.5)
    mlp(x)
    assert not mlp.adapt()
    few = x.clone()
    few[:, 0] = 8  # the bias, eight times
    expected = dense_step(mlp, few)
    for sparse in (False, True):
        assert_near(step(mlp, few), expected, 1e-5)
        assert mlp.sparse == sparse
        assert mlp.adapt()


def operands(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    mlp, x = drawn(6, 24, 16, 5, dtype=dtype)
    x[:, 1:] += 0.01 * torch.randn(6, 15)  # off the kinks, and of gates at zero
    weights = mlp.gate.weight, mlp.up.weight, mlp.down.weight_t
    return [t.detach().clone().contiguous().requires_grad_() for t in (x, *weights)]


@pytest.mark.parametrize("squared", [True, False])
def test_the_operator_has_right_derivatives(squared):
    def function(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        y, norms, *_ = _autograd.gated_mlp(*tensors, squared, 5)
        return y, norms.double()

    found = function(*(given := operands()))
    loss = found[0].square().sum() + found[1].square().sum()
    x, wg, wu, wd_t = given
    act = relu(x @ wg.T)
    h = (act.square() if squared else act) * (x @ wu.T)
    right = (h @ wd_t).square().sum() + h.abs().sum(1).float().double().square().sum()
    expected = torch.autograd.grad(right, given)
    assert_near(torch.autograd.grad(loss, given), expected, 1e-6)


@pytest.mark.parametrize("slots", [1, 24])
def test_the_operators_are_what_torch_compile_expects(slots):
    given = operands(torch.float32)
    torch.library.opcheck(_autograd.gated_mlp, (*given, False, slots))
    *packed, dy = (*_autograd.gated_mlp(*given, False, slots)[2:], torch.randn(6, 16))
    plain = [t.detach() for t in given]
    packed = [t.detach() for t in packed]
    torch.library.opcheck(_autograd.gated_mlp_backward, (dy, torch.ones(6), *plain, packed, True))


def test_the_layer_compiles_into_one_graph_for_any_number_of_tokens():
    mlp, x = drawn(12, 40, 16, 8)
    compiler = CompileCounterWithBackend("aot_eager")
    whole = torch.compile(mlp, fullgraph=True, backend=compiler, dynamic=True)
    for sparse in (True, False, True, False):
        mlp.sparse = sparse
        for m in (12, 5, 7):
            expected = step(mlp, x[:m])
            mlp.active.zero_()
            assert_near(step(whole, x[:m]), expected, 1e-6)
            assert int(mlp.active) == units_on(mlp, x[:m])
    assert compiler.frame_count == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"activation": "silu"}, "activation: expected relu or relu2, found 'silu'"),
        ({"slots": 0}, "slots: expected 1 to 40, the hidden units, found 0"),
        ({"slots": 41}, "found 41"),
    ],
)
def test_wrong_sizes_and_settings_of_a_layer_are_refused(options, message):
    with pytest.raises(FormatError, match=message):
        SparseGatedMLP(16, 40, **options)


def test_weights_and_inputs_of_other_sizes_are_refused():
    gate, down = torch.zeros(40, 16), torch.zeros(16, 40)
    with pytest.raises(FormatError, match=r"down: expected \[16, 40\], found \[40, 16\]"):
        SparseGatedMLP.from_dense(gate, gate, gate)
    mlp = SparseGatedMLP.from_dense(gate, gate, down)
    with pytest.raises(Unsupported, match=r"expected \[\.\.\., 16\], found \[2, 40\]"):
        mlp(torch.zeros(2, 40))
    for sparse in (False, True):
        mlp.sparse = sparse
        with pytest.raises(Unsupported, match="expected operands of one dtype, found"):
            mlp(torch.zeros(2, 16).double())
    with pytest.raises(
        Unsupported, match=r"expected three weights \[n, 16\], found \[\[40, 16\], "
    ):
        _autograd.gated_mlp(torch.zeros(2, 16), gate, gate[:32], gate, False, 4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((8, 2**16 + 8, 64), "expected at most 65536 hidden units, found 65544"),
        ((2**19, 4096, 64), "at most 2147483136 elements, found 2147483648"),
        ((2**16, 64, 2**15), "at most 2147483136 elements"),
        ((2**14, 2**16, 2**15), "at most 2147483136 elements, found 2147483648"),
    ],
)
def test_sizes_beyond_the_indices_are_unsupported(sizes, message):
    with pytest.raises(Unsupported, match=message):
        _index.require_room(*sizes)


def test_the_largest_sizes_of_the_indices_are_supported():
    _index.require_room(2**10, 2**16, 2**14)  # units by units would be 2^32


def test_stored_for_backward_is_a_small_part_of_what_dense_layers_store():
    n, m = 5632, 16384
    x = torch.empty(m, 2048, dtype=torch.bfloat16, device="meta")
    packed = _autograd._packed_like(x, n, -(-n // _autograd.SHARE))
    assert sum(t.nbytes for t in packed) < 0.04 * 3 * m * n * 2


# ---- its kernels, in Triton's interpreter ----


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill new memory with NaN, and the highest number of integers."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("m", "n", "k", "slots", "rarity", "dtype", "activation"),
    sampled(
        [(*case, "float16", "relu") for case in CASES[::2]]
        + [(*case, "float16", "relu2") for case in CASES[1::2]]
        + [(*case, "float32", "relu2") for case in CASES[1:4]],
        *(0, -1),
    ),
)
def test_interpreted_kernels_are_right(m, n, k, slots, rarity, dtype, activation):
    kind = getattr(torch, dtype)
    mlp, x = drawn(m, n, k, slots, rarity=rarity, activation=activation, dtype=kind)
    found = assert_right(mlp, x)
    assert all(map(torch.equal, found, step(mlp, x)))
    assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("shape", sampled([[7, 40], [130, 72], [300, 8], [5, 33000]], 1))
def test_interpreted_index_lists_each_unit_twice(shape):
    g = torch.where(torch.rand(shape) < 0.2, torch.rand(shape), -torch.rand(shape))
    g[2], g[3], g[4, 5] = 1.0, 0.0, float("nan")
    rows, columns = (~(g <= 0)).nonzero(as_tuple=True)
    active = _index.index_of(g, len(rows) + 3)
    of = slice(0, len(rows))
    assert torch.equal(active.offsets.diff(), (~(g <= 0)).sum(1).int())
    assert torch.equal(active.unit_offsets.diff(), (~(g <= 0)).sum(0).int())
    assert torch.equal(active.columns[of].long() & 0xFFFF, columns)
    assert torch.equal(active.values[of].nan_to_num(9), g[rows, columns].nan_to_num(9))
    by_unit = (~(g.T <= 0)).nonzero(as_tuple=True)
    assert torch.equal(active.tokens[of].long(), by_unit[1])
    place = active.places[of].long()
    assert torch.equal(by_unit[0][place], columns)
    assert torch.equal(by_unit[1][place], rows)


@pytest.mark.interpreted
def test_interpreted_index_that_does_not_fit_writes_nothing():
    g = torch.ones(5, 40)
    programs, active = _index.listing(g, 199)
    lists = active.columns, active.values, active.tokens, active.places
    for each in lists:
        each.fill_(7)
    for program in programs:
        program()
    assert active.offsets[-1] == active.unit_offsets[-1] == 200
    for each in lists:
        assert each.eq(7).all()


def assert_nan_as_in_dense(mlp: SparseGatedMLP, x: Tensor) -> None:
    """NaN is where a unit that is on brings it, and nowhere where dense layers have none."""
    found = step(mlp, x)
    y, l1, dx, *_ = found
    for a, b in zip(found, dense_step(mlp, x), strict=True):
        assert not (a.isnan() & ~b.isnan()).any()
    bad = x.isnan().any(1)
    assert y[bad].isnan().all()
    assert dx[bad].isnan().all()
    assert y[~bad].isfinite().all()
    assert l1.isnan()


@pytest.mark.interpreted
@pytest.mark.parametrize("slots", [40, 1])
def test_interpreted_nan_is_where_dense_layers_have_it(slots):
    mlp, x = drawn(30, 40, 16, slots)
    x[7, 3] = float("nan")
    assert_nan_as_in_dense(mlp, x)


@pytest.mark.interpreted
def test_interpreted_refusals_say_what_is_expected():
    mlp, x = drawn(5, 24, 12, 4, dtype=torch.float32)
    with pytest.raises(Unsupported, match="multiples of 8, found 24 hidden and 12 in features"):
        mlp(x)
    with pytest.raises(Unsupported, match="interpreter multiplies bf16 wrongly"):
        mlp.bfloat16()(x.bfloat16())
    with pytest.raises(Unsupported, match="expected fp16, bf16 or fp32 on a GPU, found"):
        mlp.double()(x.double())


# ---- its code ----

ELEMENTS = {
    **{torch.int32: "i32", torch.int16: "i16", torch.float32: "fp32"},
    **{torch.bfloat16: "bf16", torch.float16: "fp16"},
}


def empty(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def programs(m: int, n: int, k: int, dtype: torch.dtype) -> Iterator[BoundKernel]:
    """Return the programs of a step."""
    x, w, g, norms = (empty(*s, dtype=dtype) for s in ((m, k), (n, k), (m, n), (m,)))
    norms = norms.float()
    offsets, columns, values, u, unit_offsets, tokens, places = _autograd._packed_like(x, n, 88)
    active = ActiveCsr((m, n), offsets, columns, values, unit_offsets, tokens, places)
    yield from _index.listing(g, active.capacity)[0]
    for squared in (False, True):
        yield _gather.up(x, w, active, squared=squared)[0]
        yield _gather.slopes(x, w, active, u, norms, squared=squared)[0]
        yield from _overflow.forward(x, w, w, g, x, norms, active, squared=squared, device=CPU)
        out = x, w, w, w
        yield from _overflow.backward(
            x, x, (w, w, w), norms, out, active, squared=squared, device=CPU
        )
    h, by_unit = places.float(), (unit_offsets, tokens)
    dsd = _gather.dsd
    yield dsd("norms", (offsets, columns), (h,), (w,), (x, norms))
    yield dsd("two_products", (offsets, columns), (h, h), (w, w), (x,))
    yield dsd("two_outputs", by_unit, (h, h), (x,), (w, w))
    yield dsd("plain", by_unit, (h,), (x,), (w,))


def source_of(program: BoundKernel) -> tuple[ASTSource, dict[str, Any]]:
    """Return a call as Triton would compile it, and the options; None and sizes of 1 are fixed."""
    params, values = program.kernel.params, dict(program.constants)
    names = [param.name for param in params]
    options = {name: values.pop(name) for name in (*values,) if name not in names}
    signature, aligned = {}, {}
    for place, value in enumerate(program.args):
        whole = isinstance(value, int) and not params[place].do_not_specialize
        if value is None or (whole and value == 1):
            kind = "constexpr"
            values[names[place]] = value
        elif isinstance(value, TensorDescriptor):
            kind = f"tensordesc<{ELEMENTS[value.base.dtype]}{value.block_shape}>"
        else:
            kind = f"*{ELEMENTS[value.dtype]}" if isinstance(value, Tensor) else "i32"
            if isinstance(value, Tensor) or (whole and value % 16 == 0):
                aligned[(place,)] = [["tt.divisibility", 16]]
        signature[names[place]] = kind
    signature |= dict.fromkeys(values, "constexpr")
    return ASTSource(program.kernel, signature, values, aligned), options


@pytest.mark.parametrize("sizes", [(2**24, 8, 8), (8, 2**16, 8), (8, 8, 2**23)])
def test_grids_fit_what_a_launch_may_have(sizes, monkeypatch):
    monkeypatch.setattr(_overflow, "before_hopper", lambda device: False)
    _index.require_room(*sizes)
    for program in programs(*sizes, torch.bfloat16):
        first, *others = program.grid
        assert first < 2**31, program.kernel
        assert max(others, default=0) < 2**16, program.kernel


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("capability", "dtype"),
    sampled([(90, "bfloat16"), (80, "bfloat16"), (90, "float32"), (100, "bfloat16")]),
)
def test_every_kernel_compiles_without_a_spill(capability, dtype, tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a compile, not a memory of one
    old = capability < 90
    monkeypatch.setattr(_overflow, "before_hopper", lambda device: old)
    for program in programs(16384, 5632, 2048, getattr(torch, dtype)):
        source, options = source_of(program)
        assert complaint_about(source, capability, options) is None, program


# ---- on a GPU ----

ON_GPU = [
    *[(*case, dtype) for case in CASES for dtype in ("bfloat16", "float16")],
    *[(300, 1024, 512, slots, 2.0, "bfloat16") for slots in (60, 16, 1)],
    *[(4096, 5632, 2048, slots, 2.57, "bfloat16") for slots in (88, 8)],
    (1000, 1000, 3000, 30, 2.3, "float16"),
    (200, 136, 72, 20, 1.5, "float32"),
]


def on_gpu(m: int, n: int, k: int, slots: int, rarity: float, dtype: str, **more: Any) -> Any:
    kind = getattr(torch, dtype)
    return drawn(m, n, k, slots, rarity=rarity, dtype=kind, device=GPU, **more)


def poison() -> None:
    """Leave NaN in the memory that torch hands out next."""
    sizes = 2**12, 2**16, 2**20, 2**24, 2**28
    kept = [torch.full((size,), float("nan"), device=GPU) for size in sizes]
    del kept


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k", "slots", "rarity", "dtype"), ON_GPU)
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_gpu_gives_what_dense_layers_give_in_fp64(
    m, n, k, slots, rarity, dtype, activation
) -> None:
    mlp, x = on_gpu(m, n, k, slots, rarity, dtype, activation=activation)
    poison()
    found = assert_right(mlp, x)
    poison()
    assert all(map(torch.equal, found, step(mlp, x)))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_layer_adapts_on_a_gpu_and_is_right_either_way(dtype, activation) -> None:
    for rarity in (2.57, 1.0):
        mlp, x = on_gpu(300, 1024, 512, 16, rarity, dtype, activation=activation)
        found = assert_right(mlp, x)
        assert int(mlp.active) == units_on(mlp, x)
        assert mlp.adapt() == (units_on(mlp, x) * module.EVEN <= 1024)
        mlp.sparse = False
        mlp.active.zero_()
        assert_near(assert_right(mlp, x), found, 2e-2)
        assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [60, 1])
def test_nan_is_where_dense_layers_have_it_on_a_gpu(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    x[7, 3] = float("nan")
    assert_nan_as_in_dense(mlp, x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # what inductor warns of is not ours
def test_a_gpu_compiles_the_layer_into_one_graph() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    whole = torch.compile(mlp, fullgraph=True)
    for sparse in (True, False):
        mlp.sparse = sparse
        expected = step(mlp, x)
        mlp.active.zero_()
        assert_near(step(whole, x), expected, 1e-2)
        assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.gpu
def test_a_captured_step_can_be_sparse_or_dense() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    _, many = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    many[:, 0] = -4.0  # more units are on than there are slots
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(mlp, x)
    torch.cuda.current_stream().wait_stream(side)
    graph, given = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        found = step(mlp, given)
    for each in (many, x, many):
        given.copy_(each)
        mlp.active.zero_()
        graph.replay()
        assert int(mlp.active) == units_on(mlp, each)
        assert all(map(torch.equal, found, step(mlp, each)))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [60, 1])
def test_a_gpu_repeats_a_backward_pass_on_a_stream_of_its_own(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    leaves = [x.requires_grad_(), *mlp.parameters()]
    expected = torch.autograd.grad(mlp(x).sum(), leaves)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        loss = mlp(x).sum()  # whose gradient has strides of zero
        poison()
        first = torch.autograd.grad(loss, leaves, retain_graph=True)
        poison()
        second = torch.autograd.grad(loss, leaves)
    stream.synchronize()
    assert all(map(torch.equal, first, expected))
    assert all(map(torch.equal, second, expected))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [60, 1])
def test_a_gpu_takes_operands_at_any_address(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    expected = step(mlp, x)
    for _ in range(2):  # a plan's first call gives Triton tensors, later ones addresses
        given = torch.empty(x.numel() + 1, dtype=x.dtype, device=GPU)[1:].view_as(x)
        given.copy_(x).requires_grad_()
        poison()
        y, l1 = mlp(given, l1=True)
        dy = torch.empty(x.numel() + 3, dtype=x.dtype, device=GPU)[3:].view_as(x)
        dy.copy_(gradient_of(y))
        leaves = [given, *mlp.parameters()]
        found = torch.autograd.grad([y, l1], leaves, [dy, l1.new_tensor(0.5)])
        assert all(map(torch.equal, (y, l1, *found), expected))


@pytest.mark.gpu
def test_a_gpu_keeps_plans_of_sizes_apart() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    expected = {m: step(mlp, x[:m]) for m in (300, 33, 1)}
    for m in (33, 300, 1, 33):
        poison()
        assert all(map(torch.equal, step(mlp, x[:m]), expected[m]))


@pytest.mark.gpu
def test_a_gpu_is_right_at_the_last_slot_and_beyond() -> None:
    made: dict[str, Any] = {"dtype": torch.float16, "device": GPU}
    gate, w = torch.randn(300, 1024, **made) - 1.5, torch.randn(1024, 512, **made)
    y, norms = torch.full((300, 512), 7.0, **made), torch.full((300,), 7.0, device=GPU)
    count = int((gate > 0).sum())
    exact, short = (_index.index_of(gate, room) for room in (count, count - 1))
    rows, columns = (gate > 0).nonzero(as_tuple=True)
    assert int(exact.offsets[-1]) == int(short.offsets[-1]) == int(exact.unit_offsets[-1]) == count
    assert torch.equal(exact.columns.long() & 0xFFFF, columns)
    assert torch.equal(exact.tokens[exact.places.long()].long(), rows)
    h = exact.values.float()
    for active, is_written in ((short, False), (exact, True)):
        lists = active.offsets, active.columns
        _gather.dsd("norms", lists, (h,), (w,), (y, norms))()
        assert bool((y != 7).any()) == bool((norms != 7).any()) == is_written
    assert_near((y,), (relu(gate).double() @ w.double(),), 1e-2)


@pytest.mark.gpu
def test_a_gpu_lists_more_tokens_than_a_second_axis_has() -> None:
    m, n = 2**21 + 40, 8
    gate = torch.randn(m, n, device=GPU)
    active = _index.index_of(gate, count := int((gate > 0).sum()))
    by_unit = (gate.T > 0).nonzero(as_tuple=True)
    assert int(active.unit_offsets[-1]) == count
    assert torch.equal(active.tokens.long(), by_unit[1])
    assert torch.equal(active.values, gate[gate > 0])


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [88, 8])
def test_a_gpu_reaches_matrices_of_two_billion_elements(slots) -> None:
    n, k = 5632, 2048
    m = _index.ELEMENTS // n
    mlp, _ = on_gpu(8, n, k, slots, 2.57, "bfloat16")
    dense = Dense(mlp)
    x = torch.randint(-2, 3, (m, k), device=GPU, dtype=torch.int8).bfloat16()
    x[:, 0] = 1
    dy = torch.randint(-8, 9, (m, k), device=GPU, dtype=torch.int8).bfloat16() / 8
    given = x.requires_grad_()
    y, l1 = mlp(given, l1=True)
    found = torch.autograd.grad([y, l1], [given, *mlp.parameters()], [dy, torch.ones_like(l1)])
    sums = [torch.zeros_like(w, dtype=torch.float64) for w in dense.parameters()]
    norm = 0.0
    for at in range(0, m, 2**15):
        of = slice(at, min(m, at + 2**15))
        part = x[of].detach().requires_grad_()
        right, mean = dense(part, l1=True)
        share = torch.full_like(mean, len(part) / m)
        leaves = [part, *dense.parameters()]
        dx, *rest = torch.autograd.grad([right, mean], leaves, [dy[of], share])
        assert_near((y[of], found[0][of]), (right, dx), 1e-2)
        for total, each in zip(sums, rest, strict=True):
            total += each
        norm += float(mean.detach() * share)
    assert_near(found[1:], tuple(sums), 1e-2)
    assert float(l1.detach()) == pytest.approx(norm, rel=1e-2)


@pytest.mark.gpu
def test_a_step_keeps_a_tenth_and_peaks_below_dense_layers() -> None:
    m, n, k = 16384, 5632, 2048
    mlp, x = on_gpu(m, n, k, 88, 2.57, "bfloat16")
    dense, dy, x = Dense(mlp), gradient_of(x), x.requires_grad_()
    kept, peaks = [], []
    for layer in (mlp, dense):
        for _ in range(2):  # the first one compiles
            layer.zero_grad(set_to_none=True)
            x.grad = None
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            y = layer(x)
            after = torch.cuda.memory_allocated() - before - y.nbytes
            y.backward(dy)
            peak = torch.cuda.max_memory_allocated() - before
            del y
        kept.append(after)
        peaks.append(peak)
    assert kept[0] <= 0.1 * kept[1], kept
    assert peaks[0] <= 0.7 * peaks[1], peaks
