"""Gated feed-forward layers in fp8: what is right, the dense peers, and the kernels between."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor
from triton.runtime import interpreter

from sparsebench.errors import SuiteError
from sparsebench.harness.bench import contest
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.harness.bench.operands import DenseOperands, operands
from sparsebench.harness.catalog import load_op
from sparsebench.harness.plan.suite import read
from sparsebench.kernels._common import elementwise
from sparsebench.kernels._kernel import Launch, unit_scale
from sparsebench.kernels.dense import _gemm, _layers, cublas, torch_compile
from sparsebench.results.record import Contender, Problem, Status, Value
from tests.kernels.layers import assert_right, expected_of, operands_for
from tests.tools.marks import crossed, sampled

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
BF16, E4M3, E5M2 = torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2
OP = load_op("ffn")

WAYS = {  # ways in which torch multiplies, by their name in rows
    "fp8": [{"library": "cublaslt", "use_fast_accum": fast} for fast in (True, False)],
    "16 bits": [
        {"library": library, "weights": layout}
        for library in _gemm.LIBRARIES
        for layout in _gemm.LAYOUTS
    ],
}


def problem(dtype: str = "fp8", **fields: Value) -> Problem:
    sizes = {"m": 16, "n": 2048, "k": 512, "dtype": dtype, "activation": "silu"}
    rest = {"pattern": "dense", "sparsity": 0.0, "block": 1, "active": None, "skew": "iid"}
    return Problem("ffn", {**sizes, **rest, **fields})


# ---- operands and contests ----


def test_weights_are_e4m3_activations_bf16_and_the_bits_never_change() -> None:
    drawn = operands(problem(n=512, k=256), OP, CPU, None)
    assert {w.dtype for w in drawn.weights.values()} == {E4M3}
    assert drawn.activations["x"].dtype == BF16
    assert drawn.digest == "4f9674750a555ad2"


def test_a_contest_is_right_on_a_cpu() -> None:
    case = problem(m=2, n=512, k=256, pattern="spense_hidden", sparsity=0.25)
    contenders = [
        Contender("dense", "torch_dense", baseline=True),
        Contender("dense", "reference"),
        Contender("csr", "reference"),
        Contender(
            "spense", "reference", {"dense_fraction": 0.5, "split": "rows", "wd.split": "columns"}
        ),
    ]
    rows, _ = contest.run(case, contenders, CPU, None)
    assert [row.status for row in rows] == [Status.OK] * 4
    elements, x_and_y = 3 * (3 * 512 * 256) // 4, 2 * 2 * 256
    assert {row.nnz for row in rows} == {elements}
    assert {row.fewest_bytes for row in rows} == {elements + 2 * x_and_y}
    assert {row.flops for row in rows} == {2.0 * 2 * elements}
    assert rows[3].stored_bytes == 3 * 512 * 256 * (1 + 5 / 8) / 2


REFUSED = {
    "op: mlp": "dtype: expected 'fp16', 'bf16' or 'fp32'; found 'fp8'",
    "op: ffn, pattern: blocks, block: 8, sparsity: 0.95": "sparsity up to 0.9 in fp8, not 0.95",
    "op: ffn, activation: relu, active: 8": "dtype of 16 or 32 bits with active, not fp8",
}


@pytest.mark.parametrize("written", REFUSED)
def test_problems_too_imprecise_for_fp8_are_refused(written: str, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(
        "schema: sparsebench/suite@1\ntitle: t\nproblems:\n"
        f"  - {{m: 4, n: 1280, k: 640, dtype: fp8, {written}}}\n"
        "contenders: [{format: dense, kernel: reference}]\n"
    )
    with pytest.raises(SuiteError, match=REFUSED[written]):
        read(str(path))


# ---- what is right ----


def quantised(z: Tensor, dtype: torch.dtype = E4M3) -> Tensor:
    return z.float().clamp(-448, 448).to(dtype).float()


def layer(
    drawn: DenseOperands,
    activation: str,
    of_x: Callable[[Tensor], Tensor] = quantised,
    of_h: Callable[[Tensor], Tensor] = quantised,
    scales: tuple[float, float] | None = None,
) -> Tensor:
    """Return Y like an fp8 kernel: G and U are rounded to bf16 before they are scaled."""
    wg, wu, wd = (w.float() for w in drawn.weights.values())
    inner, outer = scales or (unit_scale(wg.shape[1]), unit_scale(wd.shape[1]))
    x = of_x(drawn.activations["x"])
    g, u = (inner * (x @ w.T).bfloat16().float() for w in (wg, wu))
    return (outer * (of_h(cublas.ACTIVATIONS[activation](g) * u) @ wd.T)).bfloat16()


@pytest.mark.parametrize(
    ("activation", "sparsity"), crossed([*cublas.ACTIVATIONS], [0.0, 0.25, 0.9])
)
def test_layers_of_rounded_activations_are_right(activation: str, sparsity: float) -> None:
    pattern = {0.25: "spense_hidden", 0.9: "unstructured"}.get(sparsity, "dense")
    case = problem(activation=activation, pattern=pattern, sparsity=sparsity)
    y, expected = layer(operands(case, OP, CPU, None), activation), expected_of(operands_for(case))
    assert check(y, expected).reason is None
    error = float((y.double() - expected.reference).norm() / expected.spread.norm())
    assert 0.022 < error < 0.0265


def dropped(z: Tensor, columns: int) -> Tensor:
    z = quantised(z)
    z[:, 256 : 256 + columns] = 0
    return z


@cache
def example(activation: str) -> tuple[DenseOperands, Expected]:
    case = problem(activation=activation)
    return operands(case, OP, CPU, None), expected_of(operands_for(case))


WRONG: dict[str, dict[str, Any]] = {
    "x in e5m2": {"of_x": partial(quantised, dtype=E5M2)},
    "h in e5m2": {"of_h": partial(quantised, dtype=E5M2)},
    "a tile of k left out": {"of_x": partial(dropped, columns=64)},
    "a tile of n left out": {"of_h": partial(dropped, columns=128)},
    "unscaled": {"scales": (1.0, 1.0)},
    "down unscaled": {"scales": (unit_scale(512), 1.0)},
    "scaled twice": {"scales": (unit_scale(512) ** 2, unit_scale(2048))},
    "the scale of the other product": {"scales": (unit_scale(2048), unit_scale(512))},
    "x beyond 448 by another scale": {"of_x": lambda z: quantised(1024 * z) / 1024},
}


@pytest.mark.parametrize(("what", "activation"), crossed([*WRONG], [*cublas.ACTIVATIONS]))
def test_wrong_layers_are_caught(what: str, activation: str) -> None:
    drawn, expected = example(activation)
    assert check(layer(drawn, activation, **WRONG[what]), expected).reason


# ---- the baselines ----


@pytest.mark.parametrize("activation", sampled(cublas.ACTIVATIONS))
def test_cublas_multiplies_step_by_step(activation: str) -> None:
    case = problem(n=512, k=256, activation=activation)
    these = operands_for(case)
    arguments = {name: w.to_dense() for name, w in these.weights.items()} | {**these.activations}
    for fast in (True, False):  # products of oneDNN, with the same name in torch
        assert_right(Launch(partial(cublas.in_fp8(these, fast), **arguments)), these)


def test_cublas_saturates_what_it_rounds() -> None:
    these = operands_for(problem(m=1, n=32, k=32))
    x, weights = these.activations["x"], {n: w.to_dense() for n, w in these.weights.items()}
    beyond = cublas.in_fp8(these, True)
    x.fill_(1e6)
    outputs = beyond(**weights, x=x)
    x.fill_(448)
    assert outputs.isfinite().all()
    assert torch.equal(outputs, beyond(**weights, x=x))
    x[0, 0] = float("nan")
    assert beyond(**weights, x=x).isnan().all()


def test_its_steps_are_one_graph_to_torch_compile() -> None:
    these = operands_for(problem(n=256, k=128))
    run = torch.compile(cublas.in_fp8(these, True), fullgraph=True, backend="aot_eager")
    arguments = {name: w.to_dense() for name, w in these.weights.items()} | {**these.activations}
    assert torch.equal(run(**arguments), cublas.in_fp8(these, True)(**arguments))


# ---- Triton ----


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cast to e4m3 like cvt.rn.satfinite; the interpreter of Triton 3.7 turns 126.5 into 64."""
    cast = interpreter._convert_float

    def by_torch(data: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target.name != "fp8e4nv":
            return cast(data, source, target, rounding)
        wide = torch.from_numpy(numpy.ascontiguousarray(data)).clamp(-448, 448)
        return wide.to(E4M3).view(torch.uint8).numpy()

    monkeypatch.setattr(interpreter, "_convert_float", by_torch)


def same_bits(actual: Tensor, right: Tensor) -> bool:
    return torch.equal(actual.view(torch.uint8), right.view(torch.uint8))


def by_token(x: Tensor) -> tuple[Tensor, Tensor]:
    scales = (x.float().abs().amax(1) / 448).clamp_min(1e-30)
    return (x.float() / scales[:, None]).clamp(-448, 448).to(E4M3), scales


@pytest.mark.interpreted
@pytest.mark.usefixtures("casts")
@pytest.mark.parametrize(("m", "k"), [(1, 8), (19, 200), (33, 384)])
def test_interpreted_inputs_are_rounded_and_scaled_whatever_their_stride(m: int, k: int) -> None:
    wide = 100 * torch.randn(m, k + 24).half()
    wide[-1] = 0
    wide[0, 9] = 60000
    for x in (wide[:, :k], wide[:, 8 : k + 8], wide[:, :k].contiguous()):
        program = elementwise.quantised(x)
        program.out.view(torch.uint8).fill_(0x7F)
        assert same_bits(program(), x.clamp(-448, 448).to(E4M3))
        out, (right, expected) = torch.empty(m, k, dtype=E4M3), by_token(x)
        assert torch.equal(elementwise.scaled(x, out), expected)
        assert same_bits(out, right)


@pytest.mark.interpreted
@pytest.mark.usefixtures("casts")
@pytest.mark.parametrize("activation", [*cublas.ACTIVATIONS])
@pytest.mark.parametrize(("dtype", "sizes"), [("fp8", (19, 400, 144)), ("fp16", (5, 136, 72))])
def test_interpreted_layers_of_two_gemms_are_right(activation, dtype, sizes) -> None:
    m, n, k = sizes
    case = problem(dtype, m=m, n=n, k=k, activation=activation)
    these = operands_for(case)
    launch = _layers.ffn(these)
    assert_right(launch, these)
    pinned = {name: dict(way) for name, way in launch.choice.items()}
    again = _layers.ffn(replace(these, pinned=pinned))
    assert again.choice == launch.choice
    assert_right(again, these)


# ---- on a GPU ----


@pytest.mark.gpu
def test_inputs_are_rounded_to_the_right_bits_on_a_gpu() -> None:
    if reason := cublas.unsupported_8_bits("fp8", CUDA):
        pytest.skip(reason)
    every = torch.arange(2**16, device=CUDA).to(torch.int32).to(torch.int16).view(BF16)
    x = torch.stack([every.view(64, 1024)[i % 64].roll(i) for i in range(133)])
    right = x.float().clamp(-448, 448).to(E4M3)
    out = elementwise.quantised(x)()
    assert torch.equal(out.float().isnan(), x.isnan())
    assert torch.equal(out.float().nan_to_num(7), right.float().nan_to_num(7))


@pytest.mark.gpu
def test_inputs_are_scaled_by_token_on_a_gpu() -> None:
    if reason := cublas.unsupported_8_bits("fp8", CUDA):
        pytest.skip(reason)
    for m, k in ((1, 16), (19, 5120), (300, 27648)):
        x = 10.0 ** torch.linspace(-6, 4, m, device=CUDA)[:, None] * torch.randn(m, k, device=CUDA)
        x = x.to(BF16)
        x[-1, : k // 2] = 0
        out, (right, expected) = torch.empty_like(x, dtype=E4M3), by_token(x.cpu())
        assert torch.equal(elementwise.scaled(x, out).cpu(), expected)
        assert same_bits(out.cpu(), right)
        x[0, 3] = float("nan")
        elementwise.scaled(x, out)
        assert out.float().isnan().sum() == 1


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [*cublas.ACTIVATIONS])
def test_hidden_units_are_rounded_once_on_a_gpu(activation: str) -> None:
    if reason := cublas.unsupported_8_bits("fp8", CUDA):
        pytest.skip(reason)
    for m, n in ((1, 16), (19, 336), (3000, 1360)):
        products = 64 * torch.randn(m, 2 * n, device=CUDA).to(BF16)
        products[0, 1] = products[-1, 2] = float("nan")
        products[0, 3], products[0, n] = 1e5, 1e5  # beyond 448, where act is not zero
        program = elementwise.hidden(products, activation, E4M3, 2.0**-6)
        program.out.view(torch.uint8).fill_(0x7F)
        out = program().float()
        gate, up = (products.double() / 64).chunk(2, 1)
        right = cublas.ACTIVATIONS[activation](gate) * up
        assert torch.equal(out.isnan(), right.isnan())
        right = right.clamp(-448, 448)
        within = 2.0**-4 * 1.001 * right.abs() + 2.0**-10 * 1.001
        assert ((out - right).abs() <= within)[~right.isnan()].all()


SHAPES = [(1, 512, 256), (17, 1360, 528), (33, 2048, 512), (300, 1360, 528), (1000, 4096, 1024)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp8", "bf16", "fp16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_two_gemms_are_right_in_every_way_on_a_gpu(shape, dtype) -> None:
    if reason := cublas.unsupported(problem(dtype), CUDA):
        pytest.skip(reason)
    m, n, k = shape
    for activation in cublas.ACTIVATIONS:
        case = problem(dtype, m=m, n=n, k=k, activation=activation)
        these = operands_for(case, CUDA)
        launch = cublas.prepare(these)
        assert_right(launch, these)
        for pair in _layers.PAIRS:
            for way in WAYS["fp8" if dtype == "fp8" else "16 bits"]:
                pinned = dict.fromkeys((*pair, "down"), way)
                forced = cublas.prepare(replace(these, pinned=pinned))
                assert forced.choice == pinned
                assert_right(forced, these)


@pytest.mark.gpu
@pytest.mark.filterwarnings("default")  # inductor warns
@pytest.mark.parametrize("kernel", [cublas, torch_compile])
def test_baselines_by_torch_are_right_on_a_gpu(kernel: Any) -> None:
    if reason := cublas.unsupported_8_bits("fp8", CUDA):
        pytest.skip(reason)
    for m, n, k in SHAPES:
        for activation in ("silu", "relu2"):
            case = problem(m=m, n=n, k=k, activation=activation)
            these = operands_for(case, CUDA)
            assert_right(kernel.prepare(these), these)
