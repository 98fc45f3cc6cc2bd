"""SparseGatedMLP compared with dense layers: on a CPU, interpreted, compiled, and on a GPU."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.functional import linear, relu

from sparsebench.errors import FormatError, Unsupported
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops._op import with_fields
from sparsebench.kernels._kernel import NAMES
from sparsebench.kernels.nn import SparseGatedMLP
from sparsebench.kernels.twell import _autograd, _index
from sparsebench.results.record import Problem
from tests.tools.marks import crossed, sampled

OP = load_op("ffn_step")
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
    """Return a layer and X; a unit is active if a normal deviate is above `rarity`.

    Gates are sums of few-bit integers divided by a power of two. Rounding changes no sign, so every
    implementation has the same active units. With m > 3, one token has all units active, one none.
    """
    options: dict[str, Any] = {"dtype": torch.float64}
    x, gate = (torch.randint(-2, 3, size).to(**options) for size in ((m, k), (n, k)))
    x[:, 0], gate[:, 0] = 1, -round(rarity * 2 * k**0.5)
    if m > 3:
        x[1, 0], x[2, 0] = -(most := -(-6 // abs(rarity))), most
    up, down = (torch.randn(size, **options) * k**-0.5 for size in ((n, k), (k, n)))
    weights = (w.to(device, dtype) for w in (gate / 2 ** round(k**0.5).bit_length(), up, down))
    mlp = SparseGatedMLP.from_dense(*weights, activation=activation, slots=slots)
    return mlp, x.to(device, dtype)


def step(mlp: Any, x: Tensor, share: float = 0.5) -> tuple[Tensor, ...]:
    """Return Y, L1, and the gradients of X, gate, up and down for a loss with L1 times `share`."""
    x = x.detach().requires_grad_()
    y, l1 = mlp(x, l1=True)
    loss = (y * gradient_of(y)).double().sum() + share * l1.double()
    return y.detach(), l1.detach(), *torch.autograd.grad(loss, [x, *mlp.parameters()])


def gradient_of(y: Tensor) -> Tensor:
    """Return a dY that is exact in any dtype."""
    at = torch.arange(y.numel(), device=y.device)
    return ((at * 7919 % 17 - 8) / 8).to(y.dtype).view(y.shape)


class Dense(nn.Module):
    """The same function as a SparseGatedMLP, by dense layers."""

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


def assert_near(results: tuple[Tensor, ...], expected: tuple[Tensor, ...], eps: float) -> None:
    assert len(results) == len(expected)
    for number, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert (a.double() - b.double()).norm() <= eps * b.double().norm(), number


def expected_of(mlp: SparseGatedMLP, x: Tensor) -> Expected:
    """Return Y and all gradients for a loss without L1, as the op ffn_step stacks them."""
    (m, k), n = x.shape, mlp.hidden_features
    sizes = {"m": m, "n": n, "k": k, "activation": mlp.activation}
    problem = Problem("ffn_step", sizes | {"dtype": NAMES[x.dtype]})
    weights = {"wg": mlp.gate.weight, "wu": mlp.up.weight, "wd": mlp.down.weight}
    tensors = {**weights, "x": x, "dy": gradient_of(x)}
    exact = {name: t.detach().double() for name, t in tensors.items()}
    right, spread = (with_fields(f, problem)(**exact) for f in (OP.definition, OP.spread))
    return Expected(right, spread, x.dtype, max(m, n, k), parts=OP.parts(problem), rounded=True)


def assert_correct(mlp: SparseGatedMLP, x: Tensor) -> tuple[Tensor, ...]:
    """Compare Y and all gradients as the harness does, and those with L1; return the latter."""
    y, _, *gradients = step(mlp, x, 0)
    reason = check(torch.cat((y, *gradients)), expected_of(mlp, x)).reason
    assert reason is None, reason
    results, right = step(mlp, x), dense_step(mlp, x)
    assert (results[1] - right[1]).abs() <= torch.finfo(x.dtype).eps * right[1] + 1e-6
    assert_near(results, right, 1e-5 if x.dtype == torch.float32 else 2e-2)
    return results


def units_on(mlp: SparseGatedMLP, x: Tensor) -> int:
    """Return the average number of active units per token, rounded up."""
    on = int((linear(x.double(), mlp.gate.weight.double()) > 0).sum())
    return -(-on // max(1, len(x)))


# m, n, k, slots, rarity: a last group with few rows, fewer units than a word, partial pieces, k
# below, at and above what a program sums; enough slots and too few.
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


@pytest.mark.parametrize(
    ("case", "activation", "sparse"), crossed(CASES, ["relu", "relu2"], [True, True, False])
)
def test_results_and_the_count_are_those_of_dense_layers(case, activation, sparse):
    m, n, k, slots, rarity = case
    mlp, x = drawn(m, n, k, slots, rarity=rarity, activation=activation)
    mlp.sparse = sparse
    for share in (0.0, 0.5):
        assert_near(step(mlp, x, share), dense_step(mlp, x, share), 1e-5)
    for tokens in (x, x[:1], x[:0]):
        y, l1 = mlp(tokens, l1=True)
        assert (y.shape, bool(l1 != 0)) == (tokens.shape, bool(y.any()))
        assert int(mlp.active) == units_on(mlp, tokens)


def test_a_loss_of_only_the_l1_term_has_a_gradient():
    mlp, x = drawn(12, 40, 16, 8)
    twin = Dense(mlp, torch.float64)
    results, expected = (
        torch.autograd.grad(each(t, l1=True)[1], [*each.parameters()], materialize_grads=True)
        for each, t in ((mlp, x), (twin, x.double()))
    )
    assert_near(results, expected, 1e-5)
    assert results[2].eq(0).all()


def test_a_state_dict_of_three_linear_layers_loads_and_one_without_down_is_refused():
    mlp, x = drawn(7, 40, 16, 8)
    assert {w.shape for w in mlp.state_dict().values()} == {(40, 16)}
    assert torch.equal(mlp.down.weight, mlp.down.weight_t.t())
    for assign in (False, True):
        state = mlp.state_dict()
        state["down.weight"] = state.pop("down.weight_t").t()  # as other code stores it
        other = SparseGatedMLP(16, 40)
        other.load_state_dict(state, assign=assign)
        assert torch.equal(other(x), mlp(x))
        assert all(w.is_contiguous() for w in other.parameters())
        del state["down.weight"]
        with pytest.raises(RuntimeError, match="weight_t"):
            other.load_state_dict(state)


def test_weights_gradients_and_optimizer_states_are_contiguous():
    mlp, x = drawn(7, 40, 16, 8)
    mlp(x).sum().backward()
    optimizer = torch.optim.AdamW(mlp.parameters())
    optimizer.step()
    weight = mlp.down.weight_t
    moved = copy.deepcopy(mlp).bfloat16().down.weight_t
    for tensor in (weight, weight.grad, optimizer.state[weight]["exp_avg"], moved):
        assert (tensor.shape, tensor.is_contiguous()) == ((40, 16), True)


def test_down_is_initialized_like_nn_linear():
    mlp = SparseGatedMLP(16, 400)
    for reset in (False, True):
        if reset:
            mlp.down.reset_parameters()
        largest = float(mlp.down.weight_t.detach().abs().max())
        assert 0.95 * 400**-0.5 < largest <= 400**-0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_equals_dense_layers(dtype):
    mlp, x = drawn(9, 40, 16, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = mlp(x), Dense(mlp)(x)
    assert results.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    torch.testing.assert_close(results.float(), expected.float(), rtol=0.03, atol=0.03)


# ---- `sparse` and `adapt` ----


def test_a_layer_with_sparse_false_stores_what_dense_layers_store():
    mlp, x = drawn(64, 40, 16, 8)
    mlp.sparse = False

    def stored(layer: nn.Module) -> int:
        tensors: list[Tensor] = []

        def keep(t: Tensor) -> Tensor:
            tensors.append(t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(keep, keep):
            layer(x)
        return len({t.data_ptr() for t in tensors if len(t) == 64})

    assert stored(mlp) == stored(Dense(mlp)) == 4  # X, act(G), U and H


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
    x[:, 1:] += 0.01 * torch.randn(6, 15)  # away from kinks and zero gates
    weights = mlp.gate.weight, mlp.up.weight, mlp.down.weight_t
    return [t.detach().clone().contiguous().requires_grad_() for t in (x, *weights)]


@pytest.mark.parametrize("slots", [1, 24])
def test_the_operators_pass_opcheck(slots):
    inputs = operands(torch.float32)
    torch.library.opcheck(torch.ops.sparsebench.sparse_gated_mlp, (*inputs, False, slots))
    *packed, dy = (*_autograd.gated_mlp(*inputs, False, slots)[2:], torch.randn(6, 16))
    plain = [t.detach() for t in inputs]
    packed = [t.detach() for t in packed]
    gradients = dy, torch.ones(6), *plain, packed, True
    torch.library.opcheck(torch.ops.sparsebench.sparse_gated_mlp_backward, gradients)


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
    [({"activation": "silu"}, "^activation"), ({"slots": 0}, "^slots"), ({"slots": 41}, "41")],
)
def test_wrong_sizes_and_settings_are_refused(options, message):
    with pytest.raises(FormatError, match=message):
        SparseGatedMLP(16, 40, **options)


def test_weights_and_inputs_of_other_sizes_are_refused():
    gate = torch.zeros(40, 16)
    with pytest.raises(FormatError, match=r"^down"):
        SparseGatedMLP.from_dense(gate, gate, gate)
    with pytest.raises(Unsupported, match="40, 16"):
        _autograd.gated_mlp(torch.zeros(2, 16), gate, gate[:32], gate, False, 4)


def test_backward_needs_under_4_percent_of_what_dense_layers_store():
    n, m = 5632, 16384
    x, w = (torch.empty(s, 2048, dtype=torch.bfloat16, device="meta") for s in (m, n))
    packed = _autograd.gated_mlp(x, w, w, w, False, -(-n // _autograd.SHARE))[2:]
    assert sum(t.nbytes for t in packed) < 0.04 * 3 * m * n * 2


# ---- its kernels, in Triton's interpreter ----


@pytest.mark.interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("m", "n", "k", "slots", "rarity", "dtype", "activation"),
    sampled(
        [(*case, "float16", "relu") for case in CASES[::2]]
        + [(*case, "float16", "relu2") for case in CASES[1::2]]
        + [(*case, "float32", "relu2") for case in CASES[1:3]],
        *(0, 11),  # room for every active unit, and for few of them
    ),
)
def test_interpreted_kernels_are_correct(m, n, k, slots, rarity, dtype, activation):
    kind = getattr(torch, dtype)
    mlp, x = drawn(m, n, k, slots, rarity=rarity, activation=activation, dtype=kind)
    results = assert_correct(mlp, x)
    assert all(map(torch.equal, results, step(mlp, x)))
    assert int(mlp.active) == units_on(mlp, x)


def assert_nan_as_in_dense(mlp: SparseGatedMLP, x: Tensor) -> None:
    """Check that NaN spreads from active units, and only to where dense layers have it."""
    results = step(mlp, x)
    y, l1, dx, *_ = results
    for a, b in zip(results, dense_step(mlp, x), strict=True):
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
def test_interpreted_calls_with_wrong_operands_are_refused():
    mlp, x = drawn(5, 24, 12, 4, dtype=torch.float32)
    with pytest.raises(Unsupported, match="multiples of 8"):
        mlp(x)
    with pytest.raises(Unsupported, match="bf16"):
        mlp.bfloat16()(x.bfloat16())
    with pytest.raises(Unsupported, match="float64"):
        mlp.double()(x.double())


@pytest.mark.interpreted
def test_interpreted_calls_without_gradients_are_right_for_any_number_of_tokens():
    mlp, x = drawn(21, 24, 16, 4, dtype=torch.float16)
    with torch.no_grad():
        for m in (21, 17, 1, 0):
            torch.testing.assert_close(mlp(x[:m]), Dense(mlp)(x[:m]), rtol=1e-2, atol=1e-2)


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
    """Fill the memory that torch allocates next with NaN."""
    sizes = 2**12, 2**16, 2**20, 2**24, 2**28
    blocks = [torch.full((size,), float("nan"), device=GPU) for size in sizes]
    del blocks


@pytest.mark.gpu
@pytest.mark.parametrize(("m", "n", "k", "slots", "rarity", "dtype"), ON_GPU)
@pytest.mark.parametrize("activation", ["relu", "relu2"])
def test_a_gpu_equals_dense_layers_in_fp64(m, n, k, slots, rarity, dtype, activation) -> None:
    mlp, x = on_gpu(m, n, k, slots, rarity, dtype, activation=activation)
    poison()
    results = assert_correct(mlp, x)
    poison()
    assert all(map(torch.equal, results, step(mlp, x)))
    for mlp.sparse in (True, False):
        mlp.active.zero_()
        assert_near(step(mlp, x), results, 2e-2)
        assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [60, 1])
def test_nan_is_where_dense_layers_have_it_on_a_gpu(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    x[7, 3] = float("nan")
    assert_nan_as_in_dense(mlp, x)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # warnings of inductor itself
def test_a_gpu_compiles_the_layer_into_one_graph() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    whole = torch.compile(mlp, fullgraph=True)
    for mlp.sparse in (True, False):
        expected = step(mlp, x)
        mlp.active.zero_()
        assert_near(step(whole, x), expected, 1e-2)
        assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.gpu
def test_a_captured_step_can_be_sparse_or_dense() -> None:
    mlp, x = on_gpu(300, 1024, 512, 60, 2.0, "bfloat16")
    many = x.clone()
    many[:, 0] = -4.0  # more active units than slots
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(mlp, x)
    torch.cuda.current_stream().wait_stream(side)
    graph, inputs = torch.cuda.CUDAGraph(), x.clone()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = step(mlp, inputs)
    for batch in (many, x, many):
        inputs.copy_(batch)
        mlp.active.zero_()
        graph.replay()
        assert int(mlp.active) == units_on(mlp, batch)
        assert all(map(torch.equal, results, step(mlp, batch)))


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [60, 1])
def test_a_step_is_repeated_for_any_address_stream_and_number_of_tokens(slots) -> None:
    mlp, x = on_gpu(300, 1024, 512, slots, 2.0, "bfloat16")
    expected = {m: step(mlp, x[:m]) for m in (300, 33, 1)}
    stream = torch.cuda.Stream()
    for m in (300, 300, 33, 1, 33):  # a plan passes tensors to Triton in its first call
        inputs, dy = (torch.empty(m * 512 + i, dtype=x.dtype, device=GPU)[i:] for i in (1, 3))
        inputs = inputs.view(m, 512).copy_(x[:m]).requires_grad_()
        dy = dy.view(m, 512).copy_(gradient_of(x[:m]))
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            y, l1 = mlp(inputs, l1=True)
            leaves, grads = [inputs, *mlp.parameters()], [dy, l1.new_tensor(0.5)]
            for keep in (True, False):
                poison()
                results = torch.autograd.grad([y, l1], leaves, grads, retain_graph=keep)
                assert all(map(torch.equal, (y, l1, *results), expected[m]))
            strided = mlp(inputs).sum()  # its gradient has strides of zero
            ones = torch.autograd.grad((mlp(inputs) * torch.ones_like(y)).sum(), leaves)
            assert all(map(torch.equal, torch.autograd.grad(strided, leaves), ones))
        stream.synchronize()


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 16, 200, 513, 1500])
def test_recorded_calls_see_writes_and_new_modules_on_a_gpu(m: int) -> None:
    mlp, x = on_gpu(m, 5632, 2048, 60, 2.5, "bfloat16")

    def assert_right() -> None:
        whole = expected_of(mlp, x)
        right = Expected(whole.reference[:m], whole.spread[:m], x.dtype, 5632, rounded=True)
        for _ in range(4):
            poison()
            assert (reason := check(mlp(x), right).reason) is None, reason

    with torch.no_grad():
        assert_right()
        mlp.up.weight.mul_(2)
        assert_right()
        mlp.gate = copy.deepcopy(mlp.gate)
        mlp.gate.weight[:, 1] += 1
        assert_right()
        mlp.activation, mlp.slots = "relu2", 30
        assert_right()
        assert torch.equal(copy.deepcopy(mlp)(x), mlp(x))
    y = mlp(x)
    assert y.requires_grad  # with gradients, the layer trains


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [88, 8])
def test_a_gpu_computes_matrices_of_two_billion_elements(slots) -> None:
    n, k = 5632, 2048
    m = _index.ELEMENTS // n
    mlp, _ = on_gpu(8, n, k, slots, 2.57, "bfloat16")
    dense = Dense(mlp)
    x = torch.randint(-2, 3, (m, k), device=GPU, dtype=torch.int8).bfloat16()
    x[:, 0] = 1
    dy = torch.randint(-8, 9, (m, k), device=GPU, dtype=torch.int8).bfloat16() / 8
    inputs = x.requires_grad_()
    y, l1 = mlp(inputs, l1=True)
    results = torch.autograd.grad([y, l1], [inputs, *mlp.parameters()], [dy, torch.ones_like(l1)])
    sums = [torch.zeros_like(w, dtype=torch.float64) for w in dense.parameters()]
    norm = 0.0
    for at in range(0, m, 2**15):
        of = slice(at, min(m, at + 2**15))
        part = x[of].detach().requires_grad_()
        right, mean = dense(part, l1=True)
        share = torch.full_like(mean, len(part) / m)
        leaves = [part, *dense.parameters()]
        dx, *rest = torch.autograd.grad([right, mean], leaves, [dy[of], share])
        assert_near((y[of], results[0][of]), (right, dx), 1e-2)
        for total, gradient in zip(sums, rest, strict=True):
            total += gradient
        norm += float(mean.detach() * share)
    assert_near(results[1:], tuple(sums), 1e-2)
    assert float(l1.detach()) == pytest.approx(norm, rel=1e-2)


@pytest.mark.gpu
def test_a_step_stores_a_tenth_of_dense_layers_and_peaks_lower() -> None:
    m, n, k = 16384, 5632, 2048
    mlp, x = on_gpu(m, n, k, 88, 2.57, "bfloat16")
    dense, dy, x = Dense(mlp), gradient_of(x), x.requires_grad_()
    stored, peaks = [], []
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
        stored.append(after)
        peaks.append(peak)
    assert stored[0] <= 0.1 * stored[1], stored
    assert peaks[0] <= 0.7 * peaks[1], peaks
