"""A decoding step of 2:4 hybrid weights: which kernel computes which product; right on a GPU."""

import json
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.formats.spense import Spense
from sparsebench.harness.catalog import load_op
from sparsebench.harness.ops.ffn import act_of
from sparsebench.harness.plan.suite import read
from sparsebench.kernels._kernel import Launch, Operands
from sparsebench.kernels.dense import _gemm
from sparsebench.kernels.spense import decoder_spense, spense_wgmma
from sparsebench.kernels.spense.spense_ffn import parted
from tests.compiling.nvcc import hopper
from tests.kernels.layers import assert_right, operands_for, problem_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
OP = load_op("decoder")
SIZES = {"m": 2, "hidden": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "intermediate": 256}
REST = {"vocab": 40, "layers": 2, "context": 20, "pattern": "spense_hidden", "sparsity": 0.25}


def operands_of(device: torch.device, **fields: Any) -> Operands:
    """Draw the operands of a problem; pruned weights are half dense, all others dense."""
    problem = problem_of("decoder", **{**SIZES, **REST, "dtype": "fp16", **fields})
    formats = {}
    for name in OP.weights:
        fraction = 0.5 if OP.prunes(problem.fields, name) else 1.0
        split = "columns" if name == "wd" else "rows"
        formats[name] = partial(Spense.from_dense, dense_fraction=fraction, split=split)
    return operands_for(problem, device, formats)


@dataclass
class _Product:
    """Compute the product of spense_wgmma with torch."""

    x: Tensor
    w: Spense
    activation: str | None
    out: Tensor

    def __call__(self) -> Tensor:
        y = self.x.float() @ self.w.to_dense().float().T
        if self.activation:
            gate, up = parted(y.T.contiguous())
            y = (act_of(gate, self.activation) * up).T
        self.out.copy_(y)
        return self.out


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[_Product]:
    """Replace the kernel for Hopper, and record each bound product."""
    calls: list[_Product] = []

    def product(x: Tensor, w: Spense, activation: str | None) -> _Product:
        columns = w.shape[0] // (2 if activation else 1)
        calls.append(_Product(x, w, activation, x.new_empty(len(x), columns)))
        return calls[-1]

    def prepare(operands: Operands, activation: Any, scales: Any, *, tuned: Any) -> Launch:
        launch = product(operands.activations["x"], operands.weights["w"], activation)
        return Launch(launch, {"tokens": 16, "cluster": 1, "ahead": 5, "by": "search"})

    monkeypatch.setattr(spense_wgmma, "prepare", prepare)
    monkeypatch.setattr(spense_wgmma, "plan", lambda w, m, config, activation: activation)
    monkeypatch.setattr(spense_wgmma, "bind", lambda plan, x, w, scales: product(x, w, plan))
    monkeypatch.setattr(_gemm, "preferred", lambda library: nullcontext())
    return calls


@pytest.mark.interpreted
@pytest.mark.parametrize("pruned", ["mlp", "all"])
def test_an_interpreted_step_has_a_copy_of_pruned_weights_for_each_layer(pruned, products) -> None:
    these = operands_of(CPU, pruned=pruned)
    launch = decoder_spense.prepare(these)
    assert_right(launch, these)
    assert [*launch.choice] == ["qkv", "o", "gate_up", "down", "head", "attention"]
    ours = {name for name, choice in launch.choice.items() if "cluster" in choice}
    assert ours == {"gate_up", "down"} | ({"qkv", "o"} if pruned == "all" else set())
    assert len(products) == 2 * len(ours)
    assert len({each.w.sparse.data_ptr() for each in products}) == len(products)
    again = replace(these, pinned=json.loads(json.dumps(launch.choice)))
    assert decoder_spense.prepare(again).choice == launch.choice


def test_the_suite_stores_pruned_weights_half_dense_and_the_others_dense() -> None:
    for contest in read("decoder").contests:
        layer = contest.problem
        for contender in contest.contenders:
            if contender.format == "spense":
                for name in OP.weights:
                    fraction = 0.5 if OP.prunes(layer.fields, name) else 1.0
                    assert contender.params_of(name)["dense_fraction"] == fraction


@hopper
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("pruned", ["mlp", "all"])
@pytest.mark.parametrize("m", [1, 33])
def test_a_step_is_right_on_hopper(m: int, pruned: str, dtype: str) -> None:
    sizes = {"hidden": 512, "heads": 8, "head_dim": 64, "intermediate": 1024, "context": 300}
    these = operands_of(CUDA, **sizes, m=m, pruned=pruned, dtype=dtype)
    assert_right(decoder_spense.prepare(these), these)
