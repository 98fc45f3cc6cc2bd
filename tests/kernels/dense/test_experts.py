"""The dense experts that transformers computes by batched products, on a CPU."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import silu

from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._kernel import Operands
from tests.kernels.layers import assert_right, operands_for, problem_of
from tests.tools.devices import CPU

SIZES = {"m": 9, "n": 48, "k": 40, "experts": 4, "top_k": 2, "dtype": "bf16"}


def operands_of(name: str, **fields: Any) -> Operands:
    return operands_for(problem_of(load_kernel(name).op, **{**SIZES, **fields}))


@pytest.mark.parametrize("fields", [{}, {"m": 1}, {"routing": "one"}, {"dtype": "fp32"}])
@pytest.mark.parametrize("name", ["experts_batched", "experts_ffn_batched"])
def test_batched_products_compute_the_op(name: str, fields: dict[str, Any]) -> None:
    operands = operands_of(name, **fields)
    assert_right(load_kernel(name).prepare(operands), operands)


@pytest.mark.parametrize(("name", "tokens"), [("experts_batched", 85), ("experts_ffn_batched", 28)])
def test_copies_of_more_than_4_gib_are_refused(name: str, tokens: int) -> None:
    """A row copies 24 MiB for a product and 72 MiB for a layer of 2048 x 6144, for top_k = 2."""
    kernel, sizes = load_kernel(name), {**SIZES, "n": 6144, "k": 2048}
    for m, refused in ((tokens, False), (tokens + 1, True)):
        reason = kernel.unsupported(problem_of(kernel.op, **sizes | {"m": m}), CPU)
        assert ("expected copies of 4 GiB at most" in str(reason)) == refused


def test_the_layer_is_what_transformers_computes() -> None:
    moe = pytest.importorskip("transformers.integrations.moe")
    operands = operands_of("experts_ffn_batched", dtype="fp32")
    x, shares, ids = (operands.activations[name] for name in ("x", "shares", "ids"))
    wg, wu, wd = (w.to_dense().unflatten(0, (4, -1)) for w in operands.weights.values())
    layer = SimpleNamespace(
        gate_up_proj=torch.cat([wg, wu], 1), down_proj=wd, num_experts=4, config=None,
        has_bias=False, has_gate=True, is_transposed=False, is_concatenated=True,
        has_post_expert_norm=False, _is_expert_parallel=False,
        _apply_gate=lambda both: silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
    )  # fmt: skip
    expected = moe.batched_mm_experts_forward(layer, x, ids, shares)
    y = load_kernel("experts_ffn_batched").prepare(operands)()
    assert torch.allclose(y, expected, atol=1e-5)
