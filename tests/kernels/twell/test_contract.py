"""The contract of every engine of the ops ffn and mlp with few active units, found by name.

An engine needs no test here. The files beside this one have what only one kernel needs. Engines in
CUDA C++ also run on a CPU, thread by thread (test_threads_on_a_cpu.py).
"""

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from sparsebench._discovery import modules
from sparsebench.errors import Unsupported
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._common.choices import package_folder
from sparsebench.kernels._common.operator import Engine, bucket
from sparsebench.kernels._common.tape import taping
from sparsebench.kernels._kernel import DTYPES, poison
from sparsebench.kernels.twell._call import TwellCall, operator_of
from sparsebench.kernels.twell._engines import DENSE, ENGINES, likeliest
from sparsebench.kernels.twell._grouped import WHOLE
from tests.kernels.twell.examples import Operands, assert_right, drawn

NAMED = [
    kernel
    for name, place in modules("kernels").items()
    if place.startswith("sparsebench.kernels.twell.")
    and isinstance(kernel := load_kernel(name), Engine)
]
LAYERS = dict.fromkeys([*(e for e in NAMED if e.op in ("ffn", "mlp")), *ENGINES])
CASES = [pytest.param(e, e.op == "ffn", id=f"{e.name}-{e.op}") for e in LAYERS]
CASES += [pytest.param(replace(WHOLE, op="mlp"), False, id="ffn_sparse-mlp")]
ON_A_CPU = [case for case in CASES if case.values[0].name in ("ffn_step_sparse", "dense")]

FRACTIONS = 0.0, 0.005, 0.2, 1.0  # the last needs several lists per group
SHAPES = [  # one token, edges of tiles, few units and many, every depth of a CTA
    *((1, 512, 256), (3, 1000, 200), (5, 8, 8), (8, 5632, 2048), (16, 14336, 4096)),
    *((17, 1000, 200), (33, 9728, 2560), (50, 2056, 3080), (64, 5632, 2048), (64, 28672, 1024)),
    *((65, 1000, 200), (77, 1408, 512), (129, 520, 1032), (255, 2056, 3064), (500, 5632, 2048)),
    *((513, 1024, 512), (1500, 1024, 2048), (2500, 520, 4096)),
]


def test_a_layer_with_many_active_units_is_likeliest_dense() -> None:
    call = TwellCall(256, 5632, 2048, torch.bfloat16, False)
    assert likeliest(64, call) == ENGINES
    assert likeliest(128, call)[:2] == (ENGINES[0], DENSE)
    assert {*likeliest(5632, call)} == {*ENGINES}


def run_engine(engine: Engine, call: TwellCall, operands: Operands) -> int:
    """Check all configurations on operands, and return how many there are.

    Each writes its own tensor and one that is given, with the same bits, and runs fewer tokens.
    """
    x, *weights = operands
    try:
        configs = engine.choices(x.device, call)
    except Unsupported:
        return 0
    few = max(2 * len(x) // 3, 1)
    for config in configs:
        run = engine.plan(x.device, call, config).run
        with taping() as tape:
            y = run(x, *weights)
        assert tape.outputs[-1] is y or not tape.complete
        assert_right(y, operands, call.squared)
        assert (y[2:3] == 0).all()
        out = torch.empty_like(y)
        poison(out)
        assert run(x, *weights, out=out) is out
        assert torch.equal(out, y)
        poison(out[few:])
        assert_right(run(x[:few], *weights), (x[:few], *weights), call.squared)
    return len(configs)


def test_published_choices_are_of_calls_and_configurations_that_exist() -> None:
    lines = [
        json.loads(line)
        for file in sorted(package_folder().glob("*.choices"))
        for line in file.read_text().splitlines()
        if '"twell.' in line
    ]
    assert lines
    engines = {engine.name: engine for engine in ENGINES}
    for line in lines:
        problem = line["problem"]
        (m, n, k), squared = (problem[s] for s in "mnk"), problem["activation"] == "relu2"
        call = TwellCall(m, n, k, DTYPES[problem["dtype"]], squared)
        fields = operator_of(ENGINES, 8, torch.device("cpu")).problem(call)
        assert {**fields, "density": problem["density"]} == problem
        assert fields["density"] == float(f"{8 / n:.2g}")
        assert m == bucket(m)
        engines[line["kernel"]].config(**line["config"])


@pytest.mark.interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("slots", [72, 1])
@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize(("engine", "gated"), ON_A_CPU)
def test_an_interpreted_engine_is_right(engine, gated, squared, slots) -> None:
    for m, fraction in ((1, 0.2), (21, 0.1)):
        call = TwellCall(m, 72, 40, torch.float16, squared, gated, slots)
        assert run_engine(engine, call, drawn(call, fraction))


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(
    ("dtype", "squared"), [(torch.bfloat16, False), (torch.float16, True), (torch.float32, True)]
)
@pytest.mark.parametrize(("engine", "gated"), CASES)
def test_any_number_of_active_units_is_right(engine, gated, dtype, squared, monkeypatch) -> None:
    # cuBLAS may otherwise add parts of G in bf16, which the definition does not
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False)
    counts = []
    for m, n, k in SHAPES:
        call = TwellCall(bucket(m), n, k, dtype, squared, gated, slots=-(-n // 64))
        for fraction in FRACTIONS:
            operands = drawn(call._replace(m=m), fraction, "cuda")
            counts.append(run_engine(engine, call, operands))
    if not any(counts):
        pytest.skip("the GPU has no such kernel")


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 16, 33, 64, 100, 500])
@pytest.mark.parametrize(("engine", "gated"), CASES)
def test_a_graph_replays_a_layer_and_nan_stays_near_its_token(engine, gated, m) -> None:
    call = TwellCall(bucket(m), 5632, 2048, torch.bfloat16, False, gated, slots=88)
    operands: Any = drawn(call._replace(m=m), 0.005, "cuda")
    x, *weights = operands
    try:
        configs = engine.choices(x.device, call)
    except Unsupported as error:
        pytest.skip(str(error))
    for config in configs:
        run = engine.plan(x.device, call, config).run
        run(x, *weights)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = run(x, *weights)
        for _ in range(50):
            poison(y)
            graph.replay()
        assert_right(y, operands, False)
        old = x[0, 5].clone()
        x[0, 5] = torch.nan
        graph.replay()
        assert y[0].isnan().all()
        assert y[16:].isfinite().all()  # ffn_step_sparse multiplies zero by NaN in 16 tokens
        x[0, 5] = old
        assert_right(y, operands, False, slice(16, None))
