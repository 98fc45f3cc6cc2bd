"""cuSPARSELt and the hybrid of two libraries: how they call the library, and what is unsupported.

Without a GPU a stand-in (cusparselt_on_cpu.py) takes the place of the loaded library.
"""

import ctypes
import json
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsebench.errors import Unsupported
from sparsebench.formats.dense import Dense
from sparsebench.formats.spense import Spense
from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.ops.linear import definition
from sparsebench.harness.patterns._mask import mask
from sparsebench.kernels._common.search import FINALISTS, MOST_LINES, Search, Trial
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, STEPS, Launch, Operands, poison, sum_scale
from sparsebench.kernels.peers import (
    _cusparselt,
    cusparselt,
    cusparselt_dense,
    cusparselt_hybrid,
)
from sparsebench.results.record import Problem
from tests.emulation.cusparselt_on_cpu import OnCpu
from tests.kernels.layers import assert_correct
from tests.tools.marks import crossed

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
N, K, M = 256, 512, 32
SPLITS = {"spense_rows": "rows", "spense_columns": "columns"}
HYBRID = [dtype for dtype in cusparselt.MULTIPLES if dtype != "int8"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    stand_in = OnCpu()
    bound = _cusparselt.bind("stand-in", stand_in)
    stream = SimpleNamespace(cuda_stream=0, synchronize=lambda: None)
    monkeypatch.setattr(_cusparselt, "library", lambda: bound)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    _cusparselt.handle_on.cache_clear()
    # oneDNN, which torch 2.13 uses for fp8 on CPUs with AMX, ignores the strides of `out`.
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)
    yield stand_in
    _cusparselt.handle_on.cache_clear()
    assert not stand_in.errors


def problem_of(dtype: str, pattern: str = "two_four", m: int = M) -> Problem:
    fields = {"m": m, "n": N, "k": K, "dtype": dtype, "pattern": pattern, "block": 1}
    return Problem("linear", {**fields, "sparsity": 0.5 if pattern == "two_four" else 0.25})


def drawn(*shape: int, dtype: str, keep: Any = None) -> torch.Tensor:
    """Return normal deviates, in int8 of as many steps as the harness draws."""
    values = torch.randn(shape) * (STEPS if dtype == "int8" else 1)
    values = values.clamp(-127, 127) if dtype == "int8" else values
    return (values if keep is None else values.where(keep, 0)).to(DTYPES[dtype])


def operands_of(
    dtype: str, pattern: str = "two_four", device: str = "cpu", pinned: Any = None, m: int = M
) -> Operands:
    problem = problem_of(dtype, pattern, m)
    torch.manual_seed(0)
    keep = mask(problem.fields, ("n", "k"), lambda g: scores(0, "w", g.cells, CPU), CPU)
    w, x = drawn(N, K, dtype=dtype, keep=keep), drawn(m, K, dtype=dtype)
    params = {"dense_fraction": 0.5, "split": SPLITS[pattern]} if pattern in SPLITS else {}
    weights = {"w": Spense.from_dense(w.to(device), **params)}
    return Operands(problem, weights, {"x": x.to(device)}, definition, pinned)


def assert_right(y: object, operands: Operands) -> None:
    """Assert that an output is right; the hybrid adds two products in 16 bits."""
    hybrid = operands.problem["pattern"] in SPLITS
    assert_correct(y, operands, cusparselt_hybrid.LOSSY if hybrid else None)


def call_of(operands: Operands, **call: Any) -> cusparselt.Call:
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    scale = sum_scale(operands.problem["dtype"], w.shape[1])
    return cusparselt.Call(cusparselt.compressed(w), x, len(w), scale=scale, **call)


WEIGHTS = [*((dtype, "two_four") for dtype in cusparselt.MULTIPLES), *product(HYBRID, SPLITS)]
EVERY_LAYOUT = [(d, way) for d in cusparselt.MULTIPLES for way in cusparselt.layouts(DTYPES[d])]


@pytest.mark.parametrize(("dtype", "way"), EVERY_LAYOUT)
def test_every_layout_gives_the_product(library: OnCpu, dtype: str, way: cusparselt.LtCall) -> None:
    operands = operands_of(dtype)
    call = call_of(operands)
    one = cusparselt.planned(call, replace(way, algorithm=4, split_k=2, split_k_mode=1))
    poison(y := torch.empty(M, N, dtype=OUTPUTS[dtype]))
    one.call(y)
    assert_right(y, operands)
    assert library.planned[-1] == {
        _cusparselt.CONFIG: 4,
        _cusparselt.SPLIT_K: 2,
        _cusparselt.SPLIT_K_MODE: 1,
    }


def test_x_and_y_are_used_in_place_whatever_their_row_strides(library: OnCpu) -> None:
    operands = operands_of("bf16")
    wide, room = torch.randn(M, 2 * K).bfloat16(), torch.zeros(M, 3 * N).bfloat16()
    strided = replace(operands, activations={"x": wide[:, K:]})
    one = cusparselt.planned(replace(call_of(strided), y_stride=3 * N), cusparselt.LtCall())
    one.call(room[:, N : 2 * N])
    assert_right(room[:, N : 2 * N].contiguous(), strided)
    assert not room[:, :N].any()
    assert not room[:, 2 * N :].any()


def assert_right_twice(launch: Launch, operands: Operands) -> None:
    x = operands.activations["x"]
    for _ in range(2):
        y = launch()
        assert isinstance(y, torch.Tensor)
        assert y.is_contiguous()
        assert_right(y, operands)
        x.copy_(x.float().flip(0))


@pytest.mark.parametrize(("of", "m"), crossed(WEIGHTS, [1, 3, 50]))
def test_tokens_are_padded_to_the_multiple_that_the_library_takes(
    library, monkeypatch, of, m
) -> None:
    dtype, pattern = of
    pick(monkeypatch, cusparselt, 0)
    operands = operands_of(dtype, pattern, m=m)
    module = cusparselt if pattern == "two_four" else cusparselt_hybrid
    launch = module.prepare(operands)
    choice = launch.choice if pattern == "two_four" else launch.choice["sparse"]
    assert choice["tokens"] == m + -m % (16 if DTYPES[dtype].itemsize == 1 else 8)
    assert_right_twice(launch, operands)


def test_a_plan_that_needs_too_large_a_workspace_is_refused(library, monkeypatch) -> None:
    monkeypatch.setattr(_cusparselt, "MOST_WORKSPACE", 63)
    with pytest.raises(Unsupported, match=r"a workspace of at most 63 bytes, found 64$"):
        cusparselt.prepare(operands_of("bf16"))


def pick(monkeypatch: pytest.MonkeyPatch, module: Any, index: int) -> list[int]:
    """Make every search choose one candidate, the last if there are fewer; return their sizes."""
    sizes: list[int] = []

    def search(calls: list[Any], *_: Any) -> Search:
        sizes.append(len(calls))
        for call in calls:
            call()
        best = min(index, len(calls) - 1)
        return Search(best, tuple(Trial(10.0 + abs(i - best)) for i in range(len(calls))))

    monkeypatch.setattr(module, "search", search)
    return sizes


def test_a_later_process_searches_once_among_the_finalists(library, monkeypatch) -> None:
    sizes = pick(monkeypatch, cusparselt, 1)
    operands = operands_of("bf16")
    first = cusparselt.prepare(operands)
    del sizes[:]
    later = cusparselt.prepare(replace(operands, timed=json.loads(json.dumps(first.candidates))))
    (size,) = sizes
    assert 1 < size <= 3 * (FINALISTS + 1)
    assert len(later.candidates) == min(size, MOST_LINES + 1)
    assert {line["of"] for line in later.candidates} == {"finalists"}
    assert later.choice in [
        {**line["choice"], "cusparselt": "0.8.0"} for line in first.candidates if "choice" in line
    ]
    assert_right(later(), operands)


def test_without_a_search_it_is_the_default(library: OnCpu) -> None:
    operands = operands_of("bf16")
    launch = cusparselt.prepare(operands, search=False)
    assert_right(launch(), operands)
    assert library.called.count("MatmulPlanInit") == 1
    assert (launch.choice["algorithm"], launch.choice["split_k"]) == (0, 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_pinned_way_is_taken_again_without_a_search(library, monkeypatch, dtype) -> None:
    pick(monkeypatch, cusparselt, 3)
    choice = cusparselt.prepare(operands_of(dtype)).choice
    library.planned.clear()
    library.called.clear()
    operands = operands_of(dtype, pinned=choice)
    launch = cusparselt.prepare(operands)
    assert launch.choice == choice
    assert_right(launch(), operands)
    (planned,) = library.planned
    assert planned[_cusparselt.CONFIG] == choice["algorithm"]


@pytest.mark.parametrize("pattern", SPLITS)
def test_cusparselt_supports_no_dense_part_and_the_hybrid_needs_one(pattern: str) -> None:
    with pytest.raises(
        Unsupported, match=r"all of W to be 2:4, found \[\d+, \d+\] of \[256, 512\]"
    ):
        cusparselt.prepare(operands_of("bf16", pattern))
    with pytest.raises(Unsupported, match=r"and a dense part of W, found \[256, 512\] of \[256"):
        cusparselt_hybrid.prepare(operands_of("bf16"))


def joins(dtype: str, pattern: str) -> list[cusparselt_hybrid.DenseCall]:
    x = torch.zeros(1, 1, dtype=DTYPES[dtype])
    whole = N if pattern == "spense_columns" else 0
    some: Any = object()
    return cusparselt_hybrid.ways(cusparselt_hybrid.Parts(some, some, x, x, N, whole))


@pytest.mark.parametrize("dtype", HYBRID)
@pytest.mark.parametrize("pattern", SPLITS)
def test_every_join_of_the_hybrid_is_the_product_and_can_be_pinned(
    library, monkeypatch, dtype, pattern
) -> None:
    # A torch without CUDA refuses to prefer cuBLASLt.
    monkeypatch.setattr(cusparselt_hybrid, "preferred", lambda library: nullcontext())
    choice = cusparselt_hybrid.prepare(operands_of(dtype, pattern)).choice
    for way in joins(dtype, pattern):
        pinned = {"sparse": choice["sparse"], "dense": vars(way)}
        library.called.clear()
        operands = operands_of(dtype, pattern, pinned=pinned)
        launch = cusparselt_hybrid.prepare(operands)
        before = launch()
        assert_right(before, operands)
        copy, x = before.clone(), operands.activations["x"]
        x.copy_(x.float().flip(1))
        assert_right(launch(), operands)
        assert torch.equal(before, copy)
        assert launch.choice == pinned


def test_structures_have_room_for_those_of_the_headers_and_their_alignment() -> None:
    structures = [_cusparselt.opaque() for _ in range(20)]
    for structure in structures:
        assert len(bytes(structure)) >= 512  # cusparseLt.h of 0.8.0 and of 0.10.0
        assert ctypes.addressof(structure) % 16 == 0


def test_the_version_is_that_of_the_loaded_library_and_an_old_one_is_refused() -> None:
    assert _cusparselt.bind("here", OnCpu((0, 10, 0))).version == "0.10.0"
    with pytest.raises(Unsupported, match=r"0\.8\.0 or newer, found 0\.7\.1 at here"):
        _cusparselt.bind("here", OnCpu((0, 7, 1)))


def test_a_missing_library_names_the_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    _cusparselt.library.cache_clear()
    monkeypatch.setattr(_cusparselt, "find", lambda: "libnowhere.so.0")
    reason = cusparselt.unsupported(problem_of("bf16"), CUDA)
    assert str(reason).startswith("needs cuSPARSELt 0.8.0 or newer (pip install nvidia-cusparselt")
    assert "\n" not in str(reason)


def test_the_newest_installed_wheel_comes_before_the_library_of_torch(monkeypatch, tmp_path):
    assert _cusparselt.find() == _cusparselt.NAME  # no wheel is installed here
    monkeypatch.syspath_prepend(str(tmp_path))
    for cuda, version in (("cu13", "0.8.1.post1"), ("cu12", "0.10.0")):
        folder = tmp_path / f"nvidia_cusparselt_{cuda}-{version}.dist-info"
        folder.mkdir()
        metadata = f"Name: nvidia-cusparselt-{cuda}\nVersion: {version}\n"
        (folder / "METADATA").write_text(metadata)
        (folder / "RECORD").write_text(f"nvidia/{cuda}/lib/{_cusparselt.NAME},,\n")
        file = tmp_path / f"nvidia/{cuda}/lib" / _cusparselt.NAME
        file.parent.mkdir(parents=True)
        file.touch()
        assert _cusparselt.find() == str(file)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", SPLITS)
@pytest.mark.parametrize("dtype", HYBRID)
def test_every_way_to_join_the_parts_is_right_on_a_gpu(dtype: str, pattern: str) -> None:
    operands = operands_of(dtype, pattern, device="cuda")
    if reason := cusparselt_hybrid.KERNEL.unsupported(operands.problem, operands.device):
        pytest.skip(reason)
    first = cusparselt_hybrid.prepare(operands)
    for dense in (first.choice["dense"], *map(vars, joins(dtype, pattern))):
        pinned = {"sparse": first.choice["sparse"], "dense": dense}
        later = cusparselt_hybrid.prepare(replace(operands, pinned=pinned))
        assert later.choice == pinned
        assert_right(later(), operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
def test_every_algorithm_is_right_on_redrawn_activations_when_captured(dtype: str) -> None:
    operands = operands_of(dtype, device="cuda")
    if reason := cusparselt.unsupported(operands.problem, operands.device):
        pytest.skip(reason)
    call, x = call_of(operands), operands.activations["x"]
    ways = cusparselt.numbers(call, [cusparselt.LtCall()])
    products, _ = cusparselt.accepted(call, ways)
    assert products
    for one in products:
        poison(y := torch.empty(M, N, dtype=OUTPUTS[dtype], device="cuda"))
        one.call(y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            one.call(y)
        x.copy_(drawn(M, K, dtype=dtype))
        poison(y)
        graph.replay()
        assert_right(y, operands)


# ---- dense weights ----


@pytest.mark.parametrize(("dtype", "m"), [("fp16", 3), ("fp8", 32), ("int8", 5)])
def test_the_null_contender_multiplies_dense_weights(library, monkeypatch, m, dtype) -> None:
    pick(monkeypatch, cusparselt, 0)
    operands = replace(
        operands_of(dtype, m=m), weights={"w": Dense.from_dense(drawn(N, K, dtype=dtype))}
    )
    launch = cusparselt_dense.prepare(operands)
    assert_right_twice(launch, operands)
