"""The contract of every engine of the family, found by name, in the configurations that it offers.

    in Triton's interpreter   random operands, both paths, odd shapes
    ahead of time             what Triton and nvcc compile has no spill
    on a GPU                  random operands, twice the same bits, and where NaN goes

test_engine_contract.py has products that are exact, of fewer tokens and of rows with gaps.
test_NAME.py has the tests that only one kernel needs: its work lists, and what it refuses.
"""

import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle, product
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench._discovery import modules
from sparsebench.errors import Unsupported
from sparsebench.formats.bsr import Bsr
from sparsebench.harness.catalog import load_kernel
from sparsebench.kernels._common import cuda
from sparsebench.kernels._common.operator import Engine
from sparsebench.kernels._common.product import Product
from sparsebench.kernels._common.triton import BoundKernel
from sparsebench.kernels._kernel import DTYPES, poison, unsupported
from sparsebench.kernels.bsr import _triton, bsr_triton_wgrad
from sparsebench.kernels.bsr._call import BsrCall
from sparsebench.results.record import Problem
from tests.compiling.nvcc import HOPPERS_OWN, assert_compiles_cleanly, by_nvcc
from tests.compiling.triton_kernels import complaint_about_launch
from tests.kernels.bsr.cases import LARGE, ODD, SHAPES, WHOLE, WIDE
from tests.kernels.bsr.examples import Shape, assert_right, assert_right_gradient, call_of, example
from tests.tools.marks import exhaustive, needs_cupy, sampled
from tests.tools.paths import KERNELS

ENGINES: dict[str, Engine] = {
    name: engine
    for name, place in modules("kernels").items()
    if ".bsr." in place
    and isinstance(engine := load_kernel(name), Engine)
    and not engine.op.startswith("experts")  # test_experts_contract.py
}
CUDA = [n for n, e in ENGINES.items() if (KERNELS / "bsr" / f"{e.name}.cu").exists()]
TRITON = [name for name in ENGINES if name not in CUDA]
GPU = torch.device("cuda", 0)
# C7519: a fence before each row's products, whose registers a branch may have left unchanged.
ALLOWED = {"bsr_small": "(C7519)", "bsr_strips": "(C7519)"}


def choices(engine: Engine, w: Bsr, call: BsrCall) -> list[Any]:
    """Return an engine's configurations; none if it refuses the call."""
    try:
        return [*engine.choices(w, call)]
    except Unsupported:
        return []


def outputs(engine: Engine, w: Bsr, call: BsrCall, config: Any, activations: Any) -> list[Tensor]:
    """Return the results of a product that is run twice: in new memory, and into wrong values."""
    planned = engine.plan(w, call, config)
    stored = () if call.op == "wgrad" else (planned.packed(w.values),)
    y = planned.run(*activations, *stored)
    out = torch.empty_like(y)
    poison(out)
    assert planned.run(*activations, *stored, out=out) is out
    return [y, out]


def assert_right_and_repeatable(name: str, shape: Shape, dtype: str, device: str = "cpu") -> int:
    """Check all configurations of an engine; return how many it has."""
    engine, (w, x, dy) = ENGINES[name], example(shape, device, dtype)
    call = call_of(engine.op, w, len(x), dtype)
    configs = choices(engine, w, call)
    for config in configs:
        activations = {"linear": (x,), "dgrad": (dy,), "wgrad": (dy, x)}[call.op]
        what = name, shape, config
        if call.op == "wgrad":  # no kernel reads the values
            w = replace(w, values=torch.full_like(w.values, torch.nan))
        first, second = outputs(engine, w, call, config, activations)
        if call.op == "wgrad":
            assert_right_gradient(first, dy, x, w, what, call.tf32)
        else:
            assert_right(first, activations[0], w, call.transposed, what, tf32=call.tf32)
        assert torch.equal(first.view(torch.uint8), second.view(torch.uint8)), what
    return len(configs)


def assert_nan_stays(name: str, block: int, device: str = "cpu", dtype: str = "fp32") -> bool:
    """Check where a product has NaN, in the likeliest configuration; return whether it can run.

    W's first row of blocks lacks the second column, and the last row and column have no block.
    """
    there = torch.ones(4, 5)
    there[0, 1] = there[1, 0] = there[-1] = there[:, -1] = 0
    dense = there.repeat_interleave(block, 0).repeat_interleave(block, 1)
    w = Bsr.from_dense(dense.to(device, DTYPES[dtype]), block=block)
    engine, m = ENGINES[name], 130
    call, op = call_of(engine.op, w, m, dtype), engine.op
    columns = {"linear": (1,), "linear_dgrad": (0,), "linear_wgrad": (0, 1)}[op]
    activations = [torch.randn(m, w.shape[at], device=device).to(DTYPES[dtype]) for at in columns]
    for a in activations:
        a[:, 2 * block - 8 : 2 * block - 6] = torch.nan  # bsr_strips reads eight columns beside
        a[:, -1] = torch.nan
        a[m // 2, 0] = torch.nan
    if not (configs := choices(engine, w, call)):
        return False
    result = outputs(engine, w, call, configs[0], activations)[1]
    wrong = [a.isnan() for a in activations]
    if op == "linear_wgrad":
        rows, across = (a.any(0) for a in wrong)
        assert torch.equal(result.isnan(), w.sample(rows[:, None] | across).values)
    else:
        right = dense.to(device) if call.transposed else dense.to(device).T
        assert torch.equal(result.isnan(), wrong[0].float() @ right > 0)
    return True


# ---- in Triton's interpreter ----


def take_path(path: str, patch: pytest.MonkeyPatch) -> None:
    """Let blocks of whole tiles be read by TMA on a CPU, which few multiprocessors share."""
    choose = {"tma": lambda reason, device: "pointers" if reason else "tma"}
    patch.setattr(_triton, "choose_path", choose.get(path, lambda reason, device: "pointers"))
    patch.setattr(bsr_triton_wgrad, "multiprocessors", lambda device: 4)  # tokens are split


CASES = [
    *((*odd, "pointers") for odd in ODD),
    *((*whole, path) for whole in (*WHOLE, *WIDE) for path in ("tma", "pointers")),
]


@pytest.mark.interpreted
@pytest.mark.parametrize(("shape", "dtype", "path"), sampled(CASES, 3, 10, 11, -2))
@pytest.mark.parametrize("name", TRITON)
def test_products_are_right_in_the_interpreter(name, shape, dtype, path, monkeypatch) -> None:
    take_path(path, monkeypatch)
    assert assert_right_and_repeatable(name, shape, dtype)


@pytest.mark.interpreted
@pytest.mark.parametrize("path", ["tma", "pointers"])
@pytest.mark.parametrize("name", TRITON)
def test_a_nan_stays_where_the_definition_has_it_in_the_interpreter(name, path, monkeypatch):
    take_path(path, monkeypatch)
    assert assert_nan_stays(name, 64)
    assert name == "bsr_triton" or assert_nan_stays(name, 10)  # it unites rows of blocks


# ---- ahead of time ----


def ahead_of_time(name: str, capability: int, patch: pytest.MonkeyPatch) -> Iterator[BoundKernel]:
    """Yield the kernels of an engine for a capability: every configuration and path."""
    module = sys.modules[ENGINES[name].plan.__module__]
    kernels: list[BoundKernel] = []

    def product_of(bound, operands, device, pack=None) -> Product:
        kernels.append(bound(*operands))
        return Product(bound)

    patch.setattr(module, "product_of", product_of)
    patch.setattr(module, "multiprocessors", lambda device: 132, raising=False)
    dtypes = cycle(("bf16", "fp32", "tf32"))  # each with every block and every number of tokens
    shapes = [*product(COMPILED, (1, 17, 64, 256, 4096))]
    for path in ("tma", "pointers")[capability < 90 :]:
        take_path(path, patch)
        for (block, m), dtype in zip(shapes, dtypes, strict=False):
            w, _, _ = example((1, 2 * max(block, 16), 4 * max(block, 16), block, 1.0))
            w = replace(w, values=w.values.to(DTYPES[dtype]))
            call = call_of(ENGINES[name].op, w, m, dtype)
            for config in choices(ENGINES[name], w, call):
                ENGINES[name].plan(w, call, config)
                program = kernels.pop()
                yield from filter(None, (program.before, program))


COMPILED = 1, 10, 16, 32, 64, 128, 200, 256  # sides of blocks


@pytest.mark.compiles
@pytest.mark.parametrize(
    ("capability", "every"), [(90, 40), *map(exhaustive, [(90, 1), (80, 3), (100, 3)])]
)
@pytest.mark.parametrize("name", TRITON)
def test_what_triton_compiles_has_no_spill(name, capability, every, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # compile, do not read a cache
    for kernel in [*ahead_of_time(name, capability, monkeypatch)][::every]:
        complaint = complaint_about_launch(kernel, capability)
        assert complaint is None, f"{complaint}: {kernel.constants}"


def planned(name: str, loads: list[Any]) -> Iterator[tuple[str, cuda.Constants, str]]:
    """Yield the first code that each configuration of an engine loads, for all its shapes."""
    engine, seen = ENGINES[name], set()
    for shape, dtype in product(SHAPES[engine.name], ("bf16", "fp16", "fp32", "fp8")):
        w, _, _ = example(shape)
        w = replace(w, values=w.values.to(DTYPES[dtype]))
        call = call_of(engine.op, w, shape[0], dtype)
        for config in choices(engine, w, call):
            engine.plan(w, call, config)
            if (config, dtype) not in seen:
                seen.add((config, dtype))
                yield loads[-1]


@by_nvcc
@pytest.mark.parametrize("most", [1, exhaustive(1000)])
@pytest.mark.parametrize("name", CUDA)
def test_what_an_engine_loads_compiles_without_a_spill(name, most, loads, tmp_path) -> None:
    for source, constants, target in [*dict.fromkeys(planned(name, loads))][:most]:
        target = HOPPERS_OWN if target == cuda.SM_90A else target
        allowed = ALLOWED.get(source, "")
        assert_compiles_cleanly(source, constants, tmp_path, allowed=allowed, target=target)


# ---- on a GPU ----


def skip_unless_possible(name: str, dtype: str) -> None:
    problem = Problem(ENGINES[name].op, {"dtype": dtype, "m": 1, "n": 64, "k": 64})
    if reason := unsupported(ENGINES[name], problem, GPU):
        pytest.skip(reason)


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32", "tf32", "fp8"])
@pytest.mark.parametrize("name", ENGINES)
def test_products_are_right_and_the_same_bits_every_time_on_a_gpu(name, dtype) -> None:
    skip_unless_possible(name, dtype)
    engine = ENGINES[name].name
    shapes = [*SHAPES.get(engine, [ODD[3][0], WHOLE[0][0]]), *LARGE.get(engine, [])]
    assert sum(assert_right_and_repeatable(name, shape, dtype, "cuda") for shape in shapes)


@pytest.mark.gpu
@needs_cupy
@pytest.mark.parametrize("name", ENGINES)
def test_a_nan_stays_where_the_definition_has_it_on_a_gpu(name) -> None:
    dtype = "fp32" if name == "bsr_fp32" else "bf16"
    skip_unless_possible(name, dtype)
    blocks = (64, 32, 16) if name == "bsr_triton" else (64, 32, 24, 16)  # it unites those of 24
    assert sum(assert_nan_stays(name, block, "cuda", dtype) for block in blocks)
