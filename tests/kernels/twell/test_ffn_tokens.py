"""Test layers of 3 to 512 tokens on a GPU in every timed way: odd sizes, NaN, CUDA graphs.

X is part of a larger matrix of NaN, so that a kernel that reads too many tokens fails.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels._kernel import Operands
from sparsebench.kernels.twell import _grouped, _remainder, ffn_few
from sparsebench.kernels.twell._layer import Layer
from sparsebench.results.record import Problem
from tests.compiling.nvcc import hopper

TOKENS = 3, 16, 32, 33, 64, 65, 100, 129, 255, 500
SHAPES = (5632, 2048), (9728, 2560), (1000, 200), (520, 1032), (2056, 3064)
CASES = [*((shape, True) for shape in SHAPES), ((9728, 2560), False), ((1000, 200), False)]
ACTIVE = 0.0, 0.005, 0.2, 1.0  # fractions of the units; the last needs several lists per group

Way = str  # "alone" for _grouped.py, or the way of ffn_few.py to read X


def ways(m: int, n: int) -> list[Way]:
    grouped = ["alone"] if m > 32 else []
    return [*grouped, *(ffn_few.ways_of(m, n) if m <= ffn_few.MOST_TOKENS else [])]


def layer(m: int, n: int, k: int, kind: torch.dtype, squared: bool, gated: bool) -> Layer:
    """Return operands on the GPU. X's column 0 is one, so Wg's sets the number of active units."""
    torch.manual_seed(m)
    x = torch.full((m + 16, k), float("nan"), device="cuda", dtype=kind)[:m]
    x.copy_(torch.randn(m, k, device="cuda"))
    x[:, 0] = 1
    wg, wu = (torch.randn(n, k, device="cuda").mul_(k**-0.5).to(kind) for _ in range(2))
    wd_t = torch.randn(n, k, device="cuda").mul_(n**-0.5).to(kind)
    up = wu if gated else None
    return Layer(x, wg, up, wd_t, torch.empty_like(x), squared)


def activate(layer: Layer, fraction: float) -> None:
    """Activate this fraction of a token's units, but all of token 1 and none of token 2."""
    bias = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(fraction)).clamp(-6, 6)
    layer.gate[:, 0], layer.gate[:, 1], layer.x[:, 1] = float(bias), 1.0, 0
    layer.x[1, 1], layer.x[2, 1] = 10, -200


def bound(layer: Layer, way: Way) -> Callable[[], Tensor]:
    """Return the layer in a way, without a search; torch computes the gate of 'alone'."""
    x, up, wd_t, y, squared = layer.x, layer.up, layer.wd_t, layer.y, layer.squared
    if way != "alone":
        return ffn_few.launch(x, layer.gate, up, wd_t, y, squared=squared, x_by=way)
    (m, n, k), device = layer.sizes, x.device
    g, rest = x.new_full((m, n), float("nan")), _remainder.rest_of(m, 1, device)
    at_once = partial(_grouped.clusters, k=k, device=device, alone=True)
    split = max(2, _grouped.split_of(m, at_once))
    options = {"split": split, "limit": 0, "squared": squared, "alone": True}
    sparse = _grouped.launch(x, g, up, wd_t, y, rest, **options)

    def run() -> Tensor:
        torch.mm(x, layer.gate.t(), out=g)
        return sparse()

    return run


def assert_correct(y: Tensor, layer: Layer) -> None:
    """Compare Y with the definition in fp64."""
    x, wd = layer.x.double(), layer.wd_t.double().T
    gate = (x @ layer.gate.double().T).to(y.dtype).double().relu()
    h = gate.square() if layer.squared else gate
    h = h if layer.up is None else h * (x @ layer.up.double().T)
    spread = 2 * (h.square() @ wd.square().T).sqrt()
    spread += 1e-3 if y.dtype == torch.float16 else 1e-30
    verdict = check(y, Expected(h @ wd.T, spread, y.dtype, layer.sizes[1]))
    assert verdict.reason is None, verdict.reason


@hopper
@pytest.mark.parametrize(("shape", "gated"), CASES, ids=str)
@pytest.mark.parametrize("m", TOKENS)
def test_any_number_of_active_units_is_correct_on_a_gpu(m, shape, gated) -> None:
    """Test gated layers in bf16 with relu, others in fp16 with relu2."""
    kind = torch.bfloat16 if gated else torch.float16
    case = layer(m, *shape, kind, not gated, gated)
    for way in ways(m, shape[0]):
        launch = bound(case, way)
        for fraction in ACTIVE:
            activate(case, fraction)
            case.y.fill_(float("nan"))
            first = launch().clone()
            assert_correct(first, case)
            assert (first[2] == 0).all()
            case.y.fill_(float("nan"))
            assert torch.equal(launch(), first)


@hopper
@pytest.mark.parametrize("m", [3, 16, 32, 33, 64, 100, 500])
def test_a_graph_replays_a_layer_and_nan_stays_in_its_token_on_a_gpu(m: int) -> None:
    case = layer(m, 5632, 2048, torch.bfloat16, False, True)
    activate(case, 0.005)
    for way in ways(m, 5632):
        launch = bound(case, way)
        launch()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = launch()
        for _ in range(50):
            y.fill_(float("nan"))
            graph.replay()
        assert_correct(y, case)
        finite, old = y.clone(), case.x[0, 5].clone()
        case.x[0, 5] = float("nan")
        graph.replay()
        assert y[0].isnan().all()
        assert y[1:].isfinite().all()
        if way == "alone":  # all units are active for the group of token 0, and for no other
            assert torch.equal(y[8:], finite[8:])
        case.x[0, 5] = old


@hopper
def test_too_many_tokens_are_refused() -> None:
    operands = layer(513, 64, 64, torch.bfloat16, False, True)
    problem = Operands(Problem("ffn", {"m": 513}), {}, {}, lambda: None)
    with pytest.raises(Unsupported, match="at most 512 tokens"):
        _grouped.prepare(problem, operands, "library", alone=True)
