"""The launch of a mixture's gated layer: it computes the op, and follows what is written later."""

from functools import partial

import torch
from torch import Tensor

from sparsebench.harness.ops import experts, experts_ffn
from sparsebench.kernels._common.gated_layer import launch_of_experts
from sparsebench.kernels._common.operator import Earlier, Engine, NoConfig, Operator, OperatorCall
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._kernel import Operands
from sparsebench.results.record import Problem

EXPERTS, TOP_K, TOKENS, N, K = 3, 2, 5, 6, 4


def hidden(products: Tensor) -> Tensor:
    """Return relu(G) * U of G | U."""
    gate, up = products.chunk(2, 1)
    return gate.relu() * up


def bind(w: Tensor, x: Tensor, ends: Tensor, *, gated: bool = False) -> OperatorCall:
    """Return a call of the products in torch; of gate and up, it writes H."""

    def run(x: Tensor, ends: Tensor, w: Tensor, out: Tensor | None = None) -> Tensor:
        y = experts.definition(w, x, ends, experts=EXPERTS)
        return hidden(y) if gated else y

    engine = Engine(
        op="experts",
        consumes="dense",
        device="any",
        name="in_torch",
        choices=lambda w, call: [NoConfig()],
        plan=lambda w, call, config: Product(run),
        bind=lambda operands, engines: bind(w, x, ends),
    )
    operator = Operator((engine,), lambda call: w, lambda call: {"n": w.shape[0]}, x.device)
    return OperatorCall(operator, w.shape, (x, ends), lambda product: (w,))


def test_the_layer_of_a_mixture_computes_the_op_on_new_activations() -> None:
    draw = torch.Generator().manual_seed(0)
    wg, wu, wd, x = (
        torch.randn(rows, columns, generator=draw, dtype=torch.float64)
        for rows, columns in ((EXPERTS * N, K), (EXPERTS * N, K), (EXPERTS * K, N), (TOKENS, K))
    )
    shares = torch.rand(TOKENS, TOP_K, generator=draw, dtype=torch.float64)
    ids = torch.zeros(TOKENS, TOP_K, dtype=torch.int64)
    both = torch.stack([w.unflatten(0, (EXPERTS, N)) for w in (wg, wu)], 1).flatten(0, 2)

    problem = Problem("experts_ffn", {"experts": EXPERTS, "activation": "relu"})
    operands = Operands(problem, {}, {"x": x, "shares": shares, "ids": ids}, lambda: x)
    products = partial(bind, both, gated=True), partial(bind, wd)
    launch = launch_of_experts(operands, Earlier(None, ()), *products)
    assert [*launch.choice] == ["gate_up", "down"]

    x.copy_(torch.randn(x.shape, generator=draw, dtype=torch.float64))
    ids.copy_(torch.rand(TOKENS, EXPERTS, generator=draw).topk(TOP_K).indices)
    expected = experts_ffn.definition(
        wg, wu, wd, x, shares, ids, experts=EXPERTS, activation="relu"
    )
    torch.testing.assert_close(launch(), expected)
