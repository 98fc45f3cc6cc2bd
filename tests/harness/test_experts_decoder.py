"""The op experts_decoder: its definition by loops, its spread by jolts, and its work by hand."""

from typing import Any

import numpy as np
import pytest
import torch

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.operands import operands
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops import decoder
from sparsebench.harness.ops._op import with_fields
from sparsebench.harness.plan.suite import expand
from sparsebench.results.record import Contender, Problem, Status
from tests.harness.test_decoder import REST, SIZES, loops
from tests.tools.devices import CPU

OP = load_op("experts_decoder")
ROUTED = {"experts": 5, "top_k": 2}


def problem(**fields: Any) -> Problem:
    every = {**OP.defaults, **SIZES, **REST, **ROUTED, **fields}
    return Problem("experts_decoder", every, defaults=OP.defaults)


def exact(spec: Problem) -> dict[str, Any]:
    """Return the operands in fp64, and ids as they are."""
    result = operands(spec, OP, CPU, None)
    every = {**result.weights, **result.activations}
    return {n: t if n == "ids" else t.double() for n, t in every.items()}


def test_one_expert_with_shares_of_one_is_the_mlp_of_op_decoder() -> None:
    spec = problem(experts=1, top_k=1)
    tensors = exact(spec)
    tensors["shares"].fill_(1)
    y = with_fields(OP.definition, spec)(**tensors).numpy()
    arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
    assert np.allclose(y, loops(spec, arrays), rtol=1e-9)


def test_each_layer_sums_the_experts_of_its_own_tokens() -> None:
    spec = problem(layers=2)
    tensors = exact(spec)
    ids = tensors["ids"].view(2, spec["m"], 2)
    assert not torch.equal(ids[0], ids[1])
    y = with_fields(OP.definition, spec)(**tensors)
    count, fields = spec["experts"], spec.fields
    of_experts = {
        name: tensors[name].view(count, -1, tensors[name].shape[1]) for name in decoder.MLP
    }

    def mlp(layer: int, z: torch.Tensor) -> torch.Tensor:
        rows = []
        for token, row in enumerate(z):
            total = torch.zeros_like(row)
            for e, share in zip(
                ids[layer, token], tensors["shares"][layer * len(z) + token], strict=True
            ):
                wg, wu, wd = (of_experts[name][e] for name in decoder.MLP)
                gate = wg @ row
                total += share * (wd @ (gate / (1 + torch.exp(-gate)) * (wu @ row)))
            rows.append(total)
        return torch.stack(rows)

    rest = {name: t for name, t in tensors.items() if name not in ("ids", "shares")}
    assert torch.allclose(y, decoder.logits(fields, rest, mlp), rtol=1e-9)


@pytest.mark.parametrize("layers", [1, 4])
def test_the_spread_is_that_of_roundings_in_every_layer(layers: int) -> None:
    spec = problem(layers=layers, caches=1, context=40)
    tensors = exact(spec)
    size = 1e-4
    torch.manual_seed(0)
    reference = with_fields(OP.definition, spec)(**tensors)
    errors = []
    for _ in range(60):
        jolted = {
            n: t if n == "ids" else t * (1 + size * torch.randn_like(t)) for n, t in tensors.items()
        }
        errors.append(with_fields(OP.definition, spec)(**jolted) - reference)
    result = torch.stack(errors).norm() / 60**0.5 / size
    ratio = float(result / with_fields(OP.spread, spec)(**tensors).norm())
    assert 0.4 < ratio < 1.5


def test_experts_are_not_small_beside_attention() -> None:
    spec = problem(layers=8)
    tensors = exact(spec)
    right = with_fields(OP.definition, spec)(**tensors)
    gains = tensors["gains"].clone()
    gains[15] = 0
    wrong = with_fields(OP.definition, spec)(**{**tensors, "gains": gains})
    assert float((wrong - right).norm() / right.norm()) > 0.04


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_torch_is_right_in_a_contest_on_a_cpu(dtype: str) -> None:
    spec = problem(dtype=dtype, pattern="two_four", sparsity=0.5)
    contenders = [Contender("dense", "reference", baseline=True)]
    (row,), _ = contest.run(spec, contenders, CPU, None)
    assert row.status == Status.OK, row.detail
    dense = 24 * (80 + 48 + 3 * 5 * 32 + 10)
    assert row.nnz == dense - 3 * 5 * 24 * 32 // 2


def test_the_work_by_hand() -> None:
    """A token takes 2 of 5 equal experts, and the tokens of the first layer hit some."""
    spec, plain = problem(), Problem("decoder", {**SIZES, **REST}, defaults=decoder.OP.defaults)
    nnz = {"wqkv": 10, "wo": 10, "wg": 100, "wu": 100, "wd": 100, "wh": 10}
    of_two, of_all = ({**nnz, **dict.fromkeys(decoder.MLP, n)} for n in (40, 100))
    assert OP.flops(spec, nnz) == decoder.OP.flops(plain, of_two)
    assert OP.fewest_bytes(problem(m=40), nnz, 2) == decoder.OP.fewest_bytes(
        Problem("decoder", {**SIZES, **REST, "m": 40}, defaults=decoder.OP.defaults), of_all, 2
    )
    assert OP.held_bytes(spec) > decoder.OP.held_bytes(plain)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ("top_k: 9", "top_k of at most experts, 5, not 9"),
        ("active: 4, activation: relu", "no active units, not 4"),
        ("pruned: all", "pruned mlp, not all"),
        ("dtype: fp8", "found 'fp8'"),
    ],
)
def test_fields_that_do_not_fit_are_refused(fields: str, message: str) -> None:
    every = {**SIZES, **REST, **ROUTED, "pattern": "dense", "sparsity": 0}
    names = {part.split(":")[0] for part in fields.split(", ")}
    rest = ", ".join(f"{name}: {value}" for name, value in every.items() if name not in names)
    text = "schema: sparsebench/suite@1\ntitle: t\nproblems:\n  - {op: experts_decoder, "
    text += f"{rest}, {fields}}}\ncontenders:\n  - {{format: dense, kernel: reference}}\n"
    with pytest.raises(SuiteError, match=message):
        expand("t", text)
