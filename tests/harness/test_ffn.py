"""Feed-forward layers whose units are seldom active: operands, work and refusals."""

import pytest
import torch
from torch import Tensor

from sparsebench.formats.bsr import Bsr
from sparsebench.formats.spense import Spense
from sparsebench.harness.bench.operands import DenseOperands, operands, redraw
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops._active import SEQUENCE, share_of_any
from sparsebench.results.record import Problem, Value
from tests.tools.devices import CPU

M, N, K = 512, 1024, 256
GATE = {"ffn": "wg", "mlp": "wu"}


def problem(op: str = "ffn", **more: Value) -> Problem:
    fields: dict[str, Value] = {"m": M, "n": N, "k": K, "dtype": "bf16", "activation": "relu"}
    rest: dict[str, Value] = {"pattern": "dense", "sparsity": 0.0, "block": 1}
    return Problem(op, {**fields, **rest, **more})


def built(spec: Problem) -> DenseOperands:
    return operands(spec, load_op(spec.op), CPU, None)


def units_on(spec: Problem, drawn: DenseOperands) -> Tensor:
    """Return bool [m, n]."""
    gate = drawn.weights[GATE[spec.op]]
    return drawn.activations["x"].float() @ gate.float().T > 0


@pytest.mark.parametrize("op", GATE)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("active", [8.0, 100.0])
def test_every_draw_has_the_requested_number_of_active_units(op, dtype, active) -> None:
    spec = problem(op, dtype=dtype, active=active, skew="iid")
    drawn = built(spec)
    for draw in (0, 1):
        redraw(spec, load_op(op), drawn.activations, draw)
        assert (drawn.activations["x"][:, 0] == 1).all()
        assert float(units_on(spec, drawn).sum(1).float().mean()) == pytest.approx(active, rel=0.1)


def test_a_few_units_are_on_most_of_the_time_by_zipf() -> None:
    spec = problem(active=32.0, skew="zipf")
    often = units_on(spec, built(spec)).float().mean(0).sort(descending=True).values
    assert float(often.sum()) == pytest.approx(32, rel=0.1)
    assert often[0] > 0.6
    assert often[:32].sum() > often[32:].sum() / 2 > 20 * often[N // 2]


def test_tokens_of_a_sequence_share_units() -> None:
    shared = {}
    for skew in ("iid", "correlated"):
        spec = problem(active=32.0, skew=skew)
        on = units_on(spec, built(spec)).float()
        assert float(on.sum(1).mean()) == pytest.approx(32, rel=0.2)
        shared[skew] = float((on[:-1] * on[1:]).sum() / on.sum())
        apart = (on[: M - SEQUENCE] * on[SEQUENCE:]).sum() / on.sum()
        assert apart < 0.06
    assert shared["iid"] < 0.06
    assert shared["correlated"] > 0.4


PRUNED: list[tuple[str, Value, float]] = [
    ("blocks", 16, 0.75),
    ("balanced_blocks", 16, 0.75),
    ("unstructured", 1, 0.9),
    ("two_four", 1, 0.5),
    ("spense_hidden", 1, 0.25),
]


@pytest.mark.parametrize("op", GATE)
@pytest.mark.parametrize(("pattern", "block", "sparsity"), PRUNED)
def test_pruned_layers_have_as_many_units_on_and_keep_their_pattern(op, pattern, block, sparsity):
    spec = problem(op, active=32.0, skew="iid", pattern=pattern, block=block, sparsity=sparsity)
    drawn = built(spec)
    assert float(units_on(spec, drawn).sum(1).float().mean()) == pytest.approx(32, rel=0.15)
    assert drawn.sparsity == pytest.approx(sparsity, abs=0.001)
    gate = drawn.weights[GATE[op]]
    assert (gate[:, 0] != 0).all()
    if pattern == "two_four":
        assert ((gate.view(N, -1, 4) != 0).sum(2) <= 2).all()
    if pattern == "spense_hidden":
        Spense.from_dense(gate, dense_fraction=0.5, split="rows")
    if pattern in ("blocks", "balanced_blocks"):
        count = len(Bsr.from_dense(gate, block=16).values)
        assert count == N * K // 16**2 // 4


def test_a_row_that_has_its_bias_alone_is_never_on() -> None:
    spec = problem(n=32, k=64, active=8.0, skew="iid", pattern="unstructured", sparsity=0.97)
    drawn = built(spec)
    alone = (drawn.weights["wg"][:, 1:] == 0).all(1)
    assert alone.any()
    assert not units_on(spec, drawn)[:, alone].any()


IN_BLOCKS: dict[str, Value] = {"pattern": "blocks", "block": 16, "sparsity": 0.75}
DIGESTS: dict[str, tuple[dict[str, Value], str]] = {
    "as before": ({}, "3f96aeca17e24fe2"),
    "iid": ({"active": 32.0, "skew": "iid"}, "1c4dd52eeb5605fb"),
    "zipf": ({"active": 32.0, "skew": "zipf"}, "3ceac05c7ed041b0"),
    "correlated": ({"active": 32.0, "skew": "correlated"}, "9277d2ac44ecd51e"),
    "pruned": ({"active": 32.0, "skew": "iid", **IN_BLOCKS}, "f91df311511c54d5"),
}


@pytest.mark.parametrize("what", DIGESTS)
def test_these_bits_never_change(what: str) -> None:
    fields, digest = DIGESTS[what]
    assert built(problem(**fields)).digest == digest


@pytest.mark.parametrize("activation", ["silu", "relu", "relu2"])
def test_mlp_is_a_gated_layer_whose_gate_and_up_agree_but_for_a_factor(activation: str) -> None:
    """With relu, act(z) is relu(z) times 1; with relu2, times relu(z)."""
    torch.manual_seed(0)
    wu, wd, x = torch.randn(6, 5), torch.randn(5, 6), torch.randn(3, 5)
    y = load_op("mlp").definition(wu, wd, x, activation=activation)
    factor = {"silu": 1 / (1 + (-x @ wu.T).exp()), "relu": (x @ wu.T > 0).float()}
    factor["relu2"] = (x @ wu.T).relu()
    torch.testing.assert_close(y, ((x @ wu.T) * factor[activation]) @ wd.T)


def test_the_spread_leaves_out_units_that_are_surely_off() -> None:
    spec = problem(active=8.0, skew="iid", dtype="fp32")
    drawn = built(spec)
    exact = {n: t.double() for n, t in {**drawn.weights, **drawn.activations}.items()}
    spread = load_op("ffn").spread(**exact, activation="relu")
    y = load_op("ffn").definition(**exact, activation="relu")
    assert 1 < float(spread.norm() / y.norm()) < 10


def test_only_units_that_are_on_are_work() -> None:
    nnz = {"wg": N * K, "wu": N * K, "wd": N * K}
    for op, gates in (("ffn", 2), ("mlp", 1)):
        counts = {name: nnz[name] for name in load_op(op).weights}
        dense, few = problem(op), problem(op, active=N / 4, skew="iid")
        flops, bytes_ = load_op(op).flops, load_op(op).fewest_bytes
        assert flops(dense, counts) == 2 * M * (1 + gates) * N * K
        assert flops(few, counts) == 2 * M * (1 + gates / 4) * N * K
        one = Problem(op, {**few.fields, "m": 1})
        assert bytes_(one, counts, 2) == 2 * ((1 + gates / 4) * N * K + 2 * K)


def test_units_on_for_any_token_are_a_union() -> None:
    assert share_of_any(problem(active=64.0, skew="iid")) == pytest.approx(1.0)
    two = {"active": 64.0, "m": 2}
    assert share_of_any(problem(**two, skew="iid")) == pytest.approx(2 / 16 - 1 / 256)
    assert share_of_any(problem(**two, skew="correlated")) == pytest.approx(1 / 16)
    assert share_of_any(problem(**two, skew="zipf")) < 2 / 16 - 1 / 256
