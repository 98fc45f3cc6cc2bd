"""cuSPARSELt and the hybrid of two libraries: how they call the library, and what is unsupported.

Without a GPU a stand-in for the library's three functions multiplies densely, in fp32. Like the
library it takes no stride, refuses operands that are not contiguous, and knows no other sizes.
"""

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.harness.bench.check import FP8, FP32, Expected, check
from sparsebench.harness.inputs.bits import scores
from sparsebench.harness.ops.linear import definition, spread
from sparsebench.harness.patterns._mask import mask
from sparsebench.kernels._kernel import DTYPES, OUTPUTS, Launch, Operands
from sparsebench.kernels.peers import cusparselt, cusparselt_hybrid
from sparsebench.results.record import Problem

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
N, K, M = 256, 512, 32
FOUND = 7, 3, 1, 21  # a search's algorithm, split_k, split_k_mode and highest algorithm
SPLITS = {"spense_rows": "rows", "spense_columns": "columns"}


class Library:
    """The stand-in; it remembers how it was called."""

    def __init__(self) -> None:
        self.asked: list[dict[str, Any]] = []
        self.searched: list[tuple[bool, bool]] = []

    def compress(self, w: Tensor) -> Tensor:
        assert w.is_contiguous()
        return w.clone()

    def multiply(self, w: Tensor, b: Tensor, **how: Any) -> Tensor:
        assert b.is_contiguous() or b.t().is_contiguous()
        self.asked.append(how)
        y = (w.float() @ b.float()).to(how["out_dtype"] or b.dtype)
        return y.t().contiguous() if how["transpose_result"] else y

    def search(self, w: Tensor, b: Tensor, *rest: Any) -> tuple[int, int, int, int]:
        *_, transposed = rest
        self.searched.append((b.is_contiguous(), transposed))
        if b.is_contiguous():
            raise RuntimeError("no algorithm for this layout")
        return FOUND


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    stand_in = Library()
    monkeypatch.setattr(torch, "_cslt_compress", stand_in.compress)
    monkeypatch.setattr(torch, "_cslt_sparse_mm", stand_in.multiply)
    search = SimpleNamespace(mm_search=stand_in.search)
    monkeypatch.setattr(torch._C, "_cusparselt", search, raising=False)
    monkeypatch.setattr(torch.backends.cusparselt, "version", lambda: 800)
    return stand_in


def problem_of(dtype: str, pattern: str = "two_four", m: int = M, n: int = N) -> Problem:
    sparsity = 0.5 if pattern == "two_four" else 0.25
    fields = {"m": m, "n": n, "k": K, "dtype": dtype, "pattern": pattern, "block": 1}
    return Problem("linear", {**fields, "sparsity": sparsity})


def operands_of(
    dtype: str, pattern: str = "two_four", device: str = "cpu", pinned: Any = None
) -> Operands:
    problem = problem_of(dtype, pattern)
    torch.manual_seed(0)
    keep = mask(problem.fields, ("n", "k"), lambda g: scores(0, "w", g.cells, CPU), CPU)
    w, x = torch.randn(N, K).where(keep, 0).to(DTYPES[dtype]), torch.randn(M, K).to(DTYPES[dtype])
    params = {"dense_fraction": 0.5, "split": SPLITS[pattern]} if pattern in SPLITS else {}
    weights = {"w": Spense.from_dense(w.to(device), **params)}
    return Operands(problem, weights, {"x": x.to(device)}, definition, pinned)


def assert_right(y: Any, operands: Operands) -> None:
    dtype = operands.problem["dtype"]
    exact = operands.weights["w"].to_dense().double(), operands.activations["x"].double()
    sums = FP8 if dtype == "fp8" else FP32
    right = Expected(definition(*exact), spread(*exact), OUTPUTS[dtype], K, sums=sums)
    assert check(y, right).reason is None


@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
@pytest.mark.parametrize("x_layout", cusparselt.LAYOUTS)
@pytest.mark.parametrize("y_layout", cusparselt.LAYOUTS)
def test_every_layout_is_the_product(
    library: Library, dtype: str, x_layout: Any, y_layout: Any
) -> None:
    operands = operands_of(dtype)
    way = cusparselt.Way(x_layout, y_layout, 5, 2, 1)
    w, x = operands.weights["w"].to_dense(), operands.activations["x"]
    assert_right(cusparselt.multiply(w, x, way), operands)
    (how,) = library.asked
    assert how["out_dtype"] == (torch.bfloat16 if dtype == "fp8" else None)
    assert (how["alg_id"], how["split_k"], how["split_k_mode"]) == (5, 2, 1)


def candidates(monkeypatch: pytest.MonkeyPatch, module: Any, pick: int) -> list[Any]:
    """Make `pick` the fastest, and return what it is chosen from."""
    seen: list[Any] = []

    def fastest(calls: list[Callable[[], object]], *_: Any) -> int:
        seen.extend(calls)
        return pick

    monkeypatch.setattr(module, "fastest", fastest)
    return seen


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_a_search_is_made_for_each_pair_of_layouts_and_may_fail(
    library: Library, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    seen = candidates(monkeypatch, cusparselt, pick=2)
    operands = operands_of(dtype)
    launch = cusparselt.prepare(operands)
    assert sorted(library.searched) == [(False, False), (False, True), (True, False), (True, True)]
    assert len(seen) == 3  # the default, and two that were found
    assert launch.choice == {
        "x_layout": "columns",
        "y_layout": "rows",
        "algorithm": 7,
        "split_k": 3,
        "split_k_mode": 1,
        "candidates": 3,
        "cusparselt": 800,
    }
    assert_right(launch(), operands)


def test_fp16_is_never_searched(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = candidates(monkeypatch, cusparselt, pick=4)
    operands = operands_of("fp16")
    launch = cusparselt.prepare(operands)
    assert not library.searched
    assert len(seen) == 1 + 4 * len(cusparselt.FP16_ALGORITHMS)
    assert launch.choice["algorithm"] == cusparselt.FP16_ALGORITHMS[3]
    assert_right(launch(), operands)


def test_without_a_search_it_is_the_default(library: Library) -> None:
    operands = operands_of("bf16")
    launch = cusparselt.prepare(operands, search=False)
    assert_right(launch(), operands)
    assert not library.searched
    assert (launch.choice["algorithm"], launch.choice["candidates"]) == (0, 1)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_a_pinned_way_is_taken_again_without_a_search(
    library: Library, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    candidates(monkeypatch, cusparselt, pick=1)
    choice = cusparselt.prepare(operands_of(dtype)).choice
    library.searched.clear()
    operands = operands_of(dtype, pinned=choice)
    launch = cusparselt.prepare(operands)
    assert launch.choice == choice
    assert_right(launch(), operands)
    assert not library.searched
    assert library.asked[-1]["alg_id"] == choice["algorithm"]


@pytest.mark.parametrize("pattern", SPLITS)
def test_cusparselt_supports_no_dense_part_and_the_hybrid_needs_one(pattern: str) -> None:
    with pytest.raises(
        Unsupported, match=r"all of W to be 2:4, found \[\d+, \d+\] of \[256, 512\]"
    ):
        cusparselt.prepare(operands_of("bf16", pattern))
    with pytest.raises(Unsupported, match=r"and a dense part of W, found \[256, 512\] of \[256"):
        cusparselt_hybrid.prepare(operands_of("bf16"))


@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
@pytest.mark.parametrize("pattern", SPLITS)
def test_the_hybrid_is_the_product_and_reads_activations_anew(
    library: Library, dtype: str, pattern: str
) -> None:
    operands = operands_of(dtype, pattern)
    launch = cusparselt_hybrid.prepare(operands)
    before = launch()
    assert_right(before, operands)
    kept = before.clone()
    x = operands.activations["x"]
    x.copy_(x.float().flip(1))
    assert_right(launch(), operands)
    assert torch.equal(before, kept)


@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
@pytest.mark.parametrize("pattern", SPLITS)
def test_the_hybrid_takes_a_pinned_way_again(library: Library, dtype: str, pattern: str) -> None:
    choice = cusparselt_hybrid.prepare(operands_of(dtype, pattern)).choice
    last = cusparselt_hybrid.ways(DTYPES[dtype], pattern == "spense_rows")[-1]
    pinned = {"sparse": choice["sparse"], "dense": vars(last)}
    library.searched.clear()
    launch = cusparselt_hybrid.prepare(operands_of(dtype, pattern, pinned=pinned))
    assert launch.choice == pinned
    assert not library.searched


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (problem_of("fp32"), "expected a dtype of fp16, bf16, fp8 for 2:4, found fp32"),
        (problem_of("bf16", m=4), "m in multiples of 8, n and k of 16 in bf16, found m 4"),
        (problem_of("fp8", m=8), "m in multiples of 16, n and k of 32 in fp8, found m 8"),
        (problem_of("fp8", n=48), "found m 32, n 48 and k 512"),
    ],
)
def test_what_the_library_cannot_take_is_unsupported_before_any_launch(
    problem: Problem, reason: str
) -> None:
    for kernel in (cusparselt.KERNEL, cusparselt_hybrid.KERNEL):
        assert reason in str(kernel.unsupported(problem, CUDA))


def test_a_torch_without_the_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: False)
    assert cusparselt.unsupported(problem_of("bf16"), CUDA) == "torch was built without cuSPARSELt"
    monkeypatch.setattr(torch.backends.cusparselt, "is_available", lambda: True)
    assert cusparselt.unsupported(problem_of("bf16"), CUDA) is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert "8.9 or newer, found 8.0" in str(cusparselt.unsupported(problem_of("fp8"), CUDA))


def on_the_gpu(kernel: Any, operands: Operands, **options: Any) -> Iterator[Launch]:
    """Prepare, and prepare again as pinned, as a later process does."""
    if reason := kernel.KERNEL.unsupported(operands.problem, operands.device):
        pytest.skip(reason)
    first = kernel.prepare(operands, **options)
    yield first
    pinned = Operands(
        operands.problem, operands.weights, operands.activations, definition, first.choice
    )
    again = kernel.prepare(pinned, **options)
    assert again.choice == first.choice
    yield again


@pytest.mark.gpu
@pytest.mark.parametrize("search", [True, False])
@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
def test_the_library_is_right_on_a_gpu(dtype: str, search: bool) -> None:
    operands = operands_of(dtype, device="cuda")
    for launch in on_the_gpu(cusparselt, operands, search=search):
        assert_right(launch(), operands)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", SPLITS)
@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
def test_the_hybrid_is_right_on_a_gpu(dtype: str, pattern: str) -> None:
    operands = operands_of(dtype, pattern, device="cuda")
    for launch in on_the_gpu(cusparselt_hybrid, operands):
        assert_right(launch(), operands)


@pytest.mark.gpu
@pytest.mark.parametrize("pattern", SPLITS)
@pytest.mark.parametrize("dtype", cusparselt.MULTIPLES)
def test_every_way_to_join_the_parts_is_right_on_a_gpu(dtype: str, pattern: str) -> None:
    operands = operands_of(dtype, pattern, device="cuda")
    (first, _) = on_the_gpu(cusparselt_hybrid, operands)
    for way in cusparselt_hybrid.ways(DTYPES[dtype], pattern == "spense_rows"):
        pinned = {"sparse": first.choice["sparse"], "dense": vars(way)}
        again = Operands(
            operands.problem, operands.weights, operands.activations, definition, pinned
        )
        assert_right(cusparselt_hybrid.prepare(again)(), operands)
