"""Test the layer for few tokens: its code, its threads on a CPU, and its results on a GPU.

Without a gate (`gated` False) the cases test mlp_few, which launches the same kernel.
"""

import ctypes
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sparsebench.harness.bench.correctness import Expected, check
from sparsebench.kernels._common.cuda import Constants
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.twell import ffn_few
from tests.compiling.nvcc import assert_compiles_cleanly, by_nvcc, hopper
from tests.emulation.cuda_on_cpu import library_of
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

GPU = torch.device("cuda", 0)
Operands = tuple[Tensor, Tensor, Tensor | None, Tensor]


def drawn(
    m: int, n: int, k: int, fraction: float, kind: torch.dtype, gated: bool, device: str = "cpu"
) -> Operands:
    """Return x, wg, wu and wd transposed, with a fraction of active units and sums of about 1."""
    x, wg, wu, wd_t = (torch.randn(size, k, device=device) for size in (m, n, n, n))
    x[:, 0] = 1
    wg *= k**-0.5
    bias = torch.distributions.Normal(0.0, 1.0).icdf(torch.tensor(fraction))
    wg[:, 0] = bias.clamp(-6, 6)  # none or all active
    x, wg, wu, wd_t = (t.to(kind) for t in (x, wg, wu * k**-0.5, wd_t))
    return x, wg, wu if gated else None, wd_t


def redraw(operands: Operands, others: Operands) -> None:
    for old, new in zip(operands, others, strict=True):
        if old is not None:
            old.copy_(new)


def assert_correct(
    y: Tensor, operands: Operands, squared: bool, tokens: Tensor | None = None
) -> None:
    """Compare Y, or these tokens of it, with the definition in fp64."""
    x, wg, wu, wd_t = (t if t is None else t.double() for t in operands)
    gate = (x @ wg.T).to(y.dtype).double().relu()
    h = (gate.square() if squared else gate) * (1 if wu is None else x @ wu.T)
    reference, spread = h @ wd_t, (h.square() @ wd_t.square()).sqrt()
    # Gates and H are rounded; in fp16, H may be below the smallest number, 6e-8.
    spread = 2 * spread + (1e-3 if y.dtype == torch.float16 else 1e-30)
    if tokens is not None:
        y, reference, spread = y[tokens], reference[tokens], spread[tokens]
    reason = check(y, Expected(reference, spread, y.dtype, len(wd_t))).reason
    assert reason is None, reason


# ---- shapes and limits ----

AT_ONCE = {1: 132, 2: 66, 4: 30}.__getitem__  # clusters, on an H200


def test_a_cluster_shares_x_and_every_sm_has_work() -> None:
    shapes = {m: ffn_few.shape_of(m, 2048, AT_ONCE) for m in (1, 8, 9, 16, 17, 32, 33, 64)}
    assert shapes == {
        **dict.fromkeys((1, 8), (8, 1, 132)),
        **dict.fromkeys((9, 16), (16, 1, 132)),
        **dict.fromkeys((17, 32), (32, 1, 132)),
        **dict.fromkeys((33, 64), (64, 2, 66)),
    }
    assert ffn_few.shape_of(1, 4096, AT_ONCE) == (8, 2, 66)
    assert ffn_few.shape_of(64, 4096, AT_ONCE) == (64, 4, 30)


def test_copies_of_x_are_timed_from_33_tokens_on() -> None:
    assert ffn_few.ways_of(32, 5632) == ffn_few.ways_of(64, 16392) == ["loads"]
    assert ffn_few.ways_of(33, 5632) == ["loads", "copies"]


# ---- its code ----


@by_nvcc
@pytest.mark.parametrize(
    ("n", "k"), sampled([(5632, 2048), (14336, 4096), (1000, 200), (28672, 4096)])
)
@pytest.mark.parametrize("m", sampled([1, 16, 32, 64], 1))
def test_the_kernel_compiles_without_spills(m: int, n: int, k: int, tmp_path: Path) -> None:
    shape = ffn_few.shape_of(m, k, AT_ONCE)
    ways = ((False, True, torch.bfloat16), (True, False, torch.float16))
    for squared, gated, dtype in ways[: 2 if k == 2048 else 1]:
        constants = ffn_few.constants_of(n, k, shape, squared, gated, dtype)
        assert_compiles_cleanly("ffn_few", constants, tmp_path)


@by_nvcc
@pytest.mark.parametrize(
    ("n", "k"), sampled([(5632, 2048), (9728, 2560), (16384, 4096), (16384, 1024)], 0, 1)
)
def test_with_copies_of_x_the_kernel_compiles_without_spills(n, k, tmp_path) -> None:
    shape = ffn_few.shape_of(64, k, AT_ONCE)
    assert "copies" in ffn_few.ways_of(64, n)
    for squared, gated, dtype in ((False, True, torch.bfloat16), (True, False, torch.float16)):
        constants = ffn_few.constants_of(n, k, shape, squared, gated, dtype, "copies")
        assert_compiles_cleanly("ffn_few", constants, tmp_path)


# ---- its threads ----


@cache
def on_cpu(constants: Constants, late: bool) -> Any:
    """Build the kernel's source for this machine; grid_on_cpu.h replaces PTX."""
    source = cuda_source("ffn_few.cu").replace('"ffn_ptx.cuh"', '"grid_on_cpu.h"')
    source = re.sub("extern __shared__.*", "#define shared dynamic_shared()", source)
    source += """
      static struct { const char *x, *wg, *wu, *wd; u16 *y, *h; u64* words; int* counts; } p;
      static int tokens;
      static void run() {
        multiply_few(p.x, p.wg, p.wu, p.wd, p.y, p.h, p.words, p.counts, tokens);
      }
      extern "C" void call(void** pointers, int m, size_t bytes) {
        memcpy(&p, pointers, sizeof p), tokens = m;
        if (bytes != SHARED_BYTES) abort();
        launch(CTAS * CLUSTERS, THREADS, SPLIT, bytes, run, true);
      }
    """
    return library_of(source, (*constants, ("LATE", int(late))))


# m, n, k, fraction of active units per token, CTAs per cluster, clusters. The cases cover a last
# tile of eight rows; rings that wrap in the gates and after; slots with all and with some columns;
# clusters without a unit; ranks without a column; no and all units active; several stages of the
# list; more words than a warp scans at once, and more half words than threads.
CASES = [
    (1, 48, 72, 0.2, 1, 3),
    (3, 104, 2056, 0.3, 2, 9),
    (8, 840, 136, 0.02, 1, 2),
    (16, 248, 1288, 0.3, 1, 6),
    (11, 16, 520, 0.5, 1, 4),
    (17, 432, 264, 0.02, 2, 2),
    (32, 96, 2056, 1.0, 2, 9),
    (40, 64, 200, 0.0, 2, 2),
    (64, 680, 72, 0.01, 4, 2),
    (64, 56, 264, 0.3, 4, 2),
    (5, 400, 72, 1.0, 1, 1),
    (20, 320, 136, 0.9, 1, 2),
    (33, 304, 200, 0.6, 2, 1),
    (64, 1400, 72, 1.0, 1, 2),
    (2, 12480, 8, 0.01, 1, 2),
    (17, 104, 200, 0.3, 1, 14),
]


WAYS = [("bf16", False, True, True), ("fp16", True, True, False), ("bf16", True, False, True)]
X_BY = "loads", "copies"
EVERY = [(c, WAYS[(i + j) % 3], x_by) for j, x_by in enumerate(X_BY) for i, c in enumerate(CASES)]


@needs_gxx
@pytest.mark.parametrize(("case", "way", "x_by"), sampled(EVERY, 0, 2, 8, 28))
def test_threads_on_a_cpu_compute_the_layer(case, way, x_by) -> None:
    (m, n, k, fraction, ctas, clusters), (dtype, squared, gated, late) = case, way
    torch.manual_seed(0)
    operands = drawn(m, n, k, fraction, DTYPES[dtype], gated)
    x, wg, wu, wd_t = operands
    tokens, fewest, _ = ffn_few.shape_of(m, k, AT_ONCE)
    assert fewest <= ctas
    shape = tokens, ctas, clusters
    y, h = torch.empty_like(x), torch.full((n, tokens), float("nan")).to(x)
    words = torch.zeros(ffn_few.words_of(n, clusters), dtype=torch.int64)
    counts = torch.zeros(2, dtype=torch.int32)
    tensors = x, wg, wg if wu is None else wu, wd_t, y, h, words, counts
    constants = ffn_few.constants_of(n, k, shape, squared, gated, x.dtype, x_by)
    kernel = on_cpu(constants, late)
    results = []
    for token, column in ((None, 0), (None, 0), (m // 2, 3)):
        if token is not None:
            x[token, column] = float("nan")
        y.fill_(float("nan"))
        pointers = (ctypes.c_void_p * 8)(*(t.data_ptr() for t in tensors))
        kernel.call(pointers, m, ctypes.c_size_t(ffn_few.SHARED_BYTES))
        assert not words.any()
        assert not counts.any()
        results.append(y.clone())
    assert torch.equal(results[0], results[1])
    others = torch.arange(m) != m // 2
    assert results[2][m // 2].isnan().all()
    x[m // 2, 3] = 0
    assert_correct(results[2], operands, squared, others)
    assert_correct(results[0], operands, squared, others)


# ---- on a GPU ----

SHAPES = [(1, 512, 256), (3, 1000, 200), (17, 1000, 200), (64, 1000, 200), (1, 5632, 2048)]
SHAPES += [(8, 5632, 2048), (16, 5632, 2048), (32, 5632, 2048), (64, 5632, 2048), (5, 8, 8)]
SHAPES += [(1, 14336, 4096), (16, 14336, 4096), (27, 14336, 4096), (64, 14336, 4096)]
SHAPES += [(9, 520, 3848), (50, 2056, 3080), (64, 28672, 1024), (2, 28672, 4096)]


def launched(operands: Operands, squared: bool) -> ffn_few.BoundKernel:
    return ffn_few.launch(*operands, torch.empty_like(operands[0]), squared=squared)


@hopper
@pytest.mark.parametrize(
    ("dtype", "squared", "gated"), [("bf16", False, True), ("fp16", True, False)]
)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_number_of_active_units_is_correct_on_a_gpu(shape, dtype, squared, gated):
    m, n, k = shape
    operands = drawn(m, n, k, 0.5, DTYPES[dtype], gated, "cuda")
    program = launched(operands, squared)
    for fraction in (0.0, 2 / n, 0.01, 0.1, 1.0):
        redraw(operands, drawn(m, n, k, fraction, DTYPES[dtype], gated, "cuda"))
        program.out.fill_(float("nan"))
        first = program().clone()
        assert_correct(first, operands, squared)
        for _ in range(10):
            program.out.fill_(float("nan"))
            assert torch.equal(program(), first)
