"""The op ffn with 2:4 hybrid weights: gate and up as one matrix, both products, and activations."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy
import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.harness.bench import contest
from sparsebench.kernels._common import elementwise
from sparsebench.kernels._common.operator import NoConfig
from sparsebench.kernels._common.product import Product
from sparsebench.kernels.dense.cublas import ACTIVATIONS
from sparsebench.kernels.spense import spense_ffn
from sparsebench.results.record import Contender, Status
from tests.compiling.nvcc import hopper
from tests.kernels.layers import assert_right, assert_right_twice, operands_for, problem_of
from tests.kernels.spense.examples import pruned

BF16, FP16 = torch.bfloat16, torch.float16


def test_gate_and_up_with_different_layouts_are_not_joined():
    w = torch.zeros(256, 256, dtype=BF16)
    half, whole = (Spense.from_dense(w, dense_fraction=fraction) for fraction in (0.5, 0.0))
    with pytest.raises(Unsupported, match="sparse"):
        spense_ffn.joined(half, whole)
    columns = Spense.from_dense(w, dense_fraction=0.5, split="columns")
    with pytest.raises(Unsupported, match="split"):
        spense_ffn.joined(columns, columns)
    odd = Spense.from_dense(w[:100])
    with pytest.raises(Unsupported, match="100"):
        spense_ffn.joined(odd, odd)


@pytest.mark.parametrize("dtype", [BF16, FP16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize(("h", "fraction"), [(328, 0.5), (328, 0.0), (200, 1.0), (72, 0.5)])
def test_gate_and_up_are_joined_by_rows_of_eight_and_parted(h, fraction, dtype):
    of = {"dense_fraction": fraction, "split": "rows"}
    rows = int(h * (1 - fraction))
    gate, up = ((pruned(h, 400, rows, 400, FP16) + 0.0).to(dtype) for _ in range(2))
    packed = [Spense.from_dense(w, **of) for w in (gate, up)]
    both = spense_ffn.joined(*packed)
    rows = both.to_dense().float()
    assert torch.equal(rows[:24], torch.cat((gate.float()[:8], up.float()[:8], gate.float()[8:16])))
    for result, expected in zip(spense_ffn.parted(rows), (gate, up), strict=True):
        assert torch.equal(result, expected.float())
    assert both.sparse_shape == (2 * packed[0].sparse_shape[0], 400)


def test_down_is_converted_by_its_own_split():
    params = {"dense_fraction": 0.5, "split": "rows", "wd.split": "columns"}
    contender = Contender("spense", "reference", params)
    (row,), _ = contest.run(
        problem_of("ffn", m=4, n=512, k=128, dtype="bf16", pattern="two_four", sparsity=0.5),
        [contender],
        torch.device("cpu"),
        None,
    )
    assert row.status is Status.OK
    assert row.stored_bytes == 3 * 512 * 128 * (2 + 9 / 8) / 2  # with rows, down would be dense


# ---- the kernel ----


def layer(dtype: str, fraction: float, device: str = "cpu", **fields: Any) -> Any:
    """Return the operands of a layer: gate and up split by rows, down by columns."""
    rest = {"dtype": dtype, "pattern": "two_four", "sparsity": 0.5, **fields}
    split = partial(Spense.from_dense, dense_fraction=fraction, split="rows")
    down = partial(Spense.from_dense, dense_fraction=fraction, split="columns")
    formats = {"wg": split, "wu": split, "wd": down}
    return operands_for(problem_of("ffn", **rest), torch.device(device), formats)


def in_torch(w: Spense, call: Any, config: NoConfig) -> Product:
    """Plan a product of spense_wgmma without a GPU."""

    def run(x: Any, sparse: Any, dense: Any, *scales: Any, out: Any = None) -> Any:
        features = scales[0] if scales else None
        sums = x.float() @ w.to_dense().float().T
        sums = sums if features is None else sums * features
        if call.activation:
            gate, up = spense_ffn.parted(sums.T)
            sums = (ACTIVATIONS[call.activation](gate) * up).T
        return (sums.clamp(-448, 448) if call.kind.itemsize == 1 else sums).to(call.kind)

    return Product(run, "code")


@pytest.mark.interpreted
@pytest.mark.parametrize("activation", ["silu", "relu2"])
@pytest.mark.parametrize("fraction", [0.0, 0.25, 1.0])
def test_both_products_are_planned_and_can_be_pinned(fraction, activation, monkeypatch) -> None:
    engine = replace(
        spense_ffn.PRODUCT, choices=lambda w, call: [NoConfig()], plan=in_torch, config=NoConfig
    )
    monkeypatch.setattr(spense_ffn, "PRODUCT", engine)
    these = layer("fp16", fraction, m=19, n=400, k=144, activation=activation)
    launch = spense_ffn.prepare(these)
    assert_right(launch, these)
    assert {name: of["kernel"] for name, of in launch.choice.items()} == dict.fromkeys(
        ("gate_up", "down"), "spense_wgmma"
    )
    older = {name: {"by": "search"} for name in launch.choice}  # 0.3 has no kernel
    for pinned in (launch.choice, older):
        assert_right(spense_ffn.prepare(replace(these, pinned=pinned)), these)


@hopper
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize("activation", [*ACTIVATIONS])
def test_layers_are_right_on_a_gpu(activation: str, dtype: str) -> None:
    for m, fraction in ((1, 0.5), (33, 0.0), (300, 0.25), (2000, 0.5), (17, 1.0)):
        these = layer(dtype, fraction, "cuda", m=m, n=1360, k=528, activation=activation)
        assert assert_right_twice(these, spense_ffn.prepare).code


# ---- activations ----


def assert_activates(m: int, n: int, activation: str, dtype: Any, device: str) -> None:
    """Compare the kernel with fp64, to two units in the last place; NaN stays in its element."""
    products = 3 * torch.randn(m, 2 * n, device=device).to(dtype)
    products[0, 0] = -300  # its exp is infinite
    products[-1, 1] = float("nan")
    program = elementwise.hidden(products, activation)
    program.out.fill_(7)
    gate, up = products.double().chunk(2, 1)
    right = (ACTIVATIONS[activation](gate) * up).to(dtype)
    with numpy.errstate(over="ignore"):  # in the interpreter
        torch.testing.assert_close(program(), right, rtol=2**-7, atol=1e-6, equal_nan=True)
        in_layers = elementwise.gated(products, activation)
    torch.testing.assert_close(in_layers, program.out, rtol=0, atol=0, equal_nan=True)


@pytest.mark.interpreted
@pytest.mark.parametrize("activation", [*ACTIVATIONS])
@pytest.mark.parametrize(("m", "n"), [(1, 8), (19, 328), (5, 512), (33, 200)])
def test_interpreted_activations_are_correct(m, n, activation):
    assert_activates(m, n, activation, FP16, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_activations_are_correct_on_a_gpu(dtype):
    for activation in ACTIVATIONS:
        for m, n in ((1, 8), (19, 328), (5, 512), (3000, 1352)):
            assert_activates(m, n, activation, dtype, "cuda")
