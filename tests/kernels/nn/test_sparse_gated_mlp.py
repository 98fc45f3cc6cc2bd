"""SparseGatedMLP compared with dense layers: on a CPU, interpreted, and compiled."""

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend

from sparsebench.errors import FormatError, Unsupported
from sparsebench.kernels.nn import SparseGatedMLP
from sparsebench.kernels.twell import _autograd
from tests.kernels.nn.gated_mlp_examples import (
    CASES,
    Dense,
    assert_correct,
    assert_nan_as_in_dense,
    assert_near,
    dense_step,
    draw,
    step,
    units_on,
)
from tests.tools.marks import crossed, sampled

# ---- the module, on a CPU ----


@pytest.mark.parametrize(
    ("case", "activation", "sparse"), crossed(CASES, ["relu", "relu2"], [True, True, False])
)
def test_results_and_the_count_are_those_of_dense_layers(case, activation, sparse):
    m, n, k, slots, rarity = case
    mlp, x = draw(m, n, k, slots, rarity=rarity, activation=activation)
    mlp.sparse = sparse
    for share in (0.0, 0.5):
        assert_near(step(mlp, x, share), dense_step(mlp, x, share), 1e-5)
    for tokens in (x, x[:1], x[:0]):
        y, l1 = mlp(tokens, l1=True)
        assert (y.shape, bool(l1 != 0)) == (tokens.shape, bool(y.any()))
        assert int(mlp.active) == units_on(mlp, tokens)


def test_a_loss_of_only_the_l1_term_has_a_gradient():
    mlp, x = draw(12, 40, 16, 8)
    twin = Dense(mlp, torch.float64)
    results, expected = (
        torch.autograd.grad(each(t, l1=True)[1], [*each.parameters()], materialize_grads=True)
        for each, t in ((mlp, x), (twin, x.double()))
    )
    assert_near(results, expected, 1e-5)
    assert results[2].eq(0).all()


def test_a_state_dict_of_three_linear_layers_loads_and_one_without_down_is_refused():
    mlp, x = draw(7, 40, 16, 8)
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
    mlp, x = draw(7, 40, 16, 8)
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
    mlp, x = draw(9, 40, 16, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        results, expected = mlp(x), Dense(mlp)(x)
    assert results.dtype == (torch.bfloat16 if dtype == torch.float32 else dtype)
    torch.testing.assert_close(results.float(), expected.float(), rtol=0.03, atol=0.03)


# ---- `sparse` and `adapt` ----


def test_a_layer_with_sparse_false_stores_what_dense_layers_store():
    mlp, x = draw(64, 40, 16, 8)
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
    mlp, x = draw(30, 512, 16, 8, rarity=0.5)
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
    mlp, x = draw(6, 24, 16, 5, dtype=dtype)
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
    mlp, x = draw(12, 40, 16, 8)
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
    mlp, x = draw(m, n, k, slots, rarity=rarity, activation=activation, dtype=kind)
    results = assert_correct(mlp, x)
    assert all(map(torch.equal, results, step(mlp, x)))
    assert int(mlp.active) == units_on(mlp, x)


@pytest.mark.interpreted
@pytest.mark.parametrize("slots", [40, 1])
def test_interpreted_nan_is_where_dense_layers_have_it(slots):
    mlp, x = draw(30, 40, 16, slots)
    x[7, 3] = float("nan")
    assert_nan_as_in_dense(mlp, x)


@pytest.mark.interpreted
def test_interpreted_calls_with_wrong_operands_are_refused():
    mlp, x = draw(5, 24, 12, 4, dtype=torch.float32)
    with pytest.raises(Unsupported, match="multiples of 8"):
        mlp(x)
    with pytest.raises(Unsupported, match="bf16"):
        mlp.bfloat16()(x.bfloat16())
    with pytest.raises(Unsupported, match="float64"):
        mlp.double()(x.double())


@pytest.mark.interpreted
def test_interpreted_calls_without_gradients_are_right_for_any_number_of_tokens():
    mlp, x = draw(21, 24, 16, 4, dtype=torch.float16)
    with torch.no_grad():
        for m in (21, 17, 1, 0):
            torch.testing.assert_close(mlp(x[:m]), Dense(mlp)(x[:m]), rtol=1e-2, atol=1e-2)
