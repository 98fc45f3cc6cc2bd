"""bsr_fragments on a CPU, thread by thread: its source text, with stand-ins for asm."""

import ctypes
import re

import numpy as np
import pytest
import torch

from sparsebench.kernels._common.work_list import WORKERS
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_fragments
from sparsebench.kernels.bsr._launch import packed as packed_pieces
from sparsebench.kernels.bsr._small_steps import worked
from sparsebench.kernels.bsr._strip_tiles import packed_order, tiles_of
from sparsebench.kernels.bsr.bsr_fragments import ACROSS, Config, costs_of, lists_of, possible
from tests.emulation.cuda_on_cpu import library_of
from tests.kernels.bsr.examples import example
from tests.tools.marks import needs_gxx, sampled
from tests.tools.paths import cuda_source

IN_CPP = """
static u32 opaque(u32 v) { return v; }
static void st_shared(u32 to, uint4 v) { memcpy(in_shared(to), &v, 16); }
static uint4 ld_shared(u32 from) {
  uint4 v;
  memcpy(&v, in_shared(from), 16);
  return v;
}
static void mbarrier_arrive_cluster(u32 barrier, int cta) {
  Barrier& b = barriers.at({&of_cluster(cta), barrier});
  b.missing--;
  proceed(b);
}
static void bulk_load_multicast(int ctas, u32 to, const void* from, int bytes, u32 barrier) {
  for (int cta = 0; ctas >> cta; cta++) counted_copy(of_cluster(cta), to, from, bytes, barrier);
}
"""
FIXED = """
  char* const shared = dynamic_shared();
  auto* notes = (uint4*)fixed_shared();
  u64 *full = (u64*)(notes + 64), *empty = full + 8;
"""
RUN = """
static struct { Maps maps; Starts starts; const char* w; const Step* steps; const int* seats;
                char* y; int m, width; } given;
static void run() {
  multiply_tiles(given.maps, given.starts, given.w, given.steps, given.seats, given.y, given.m,
                 given.width);
}
extern "C" void call(const char* x, int step, int m, int k, const int* starts, void** pointers,
                     int width, int grid, int bytes) {
  const int last = m % TOKENS ? m % TOKENS : TOKENS;
  given.maps = Maps{{x, m, k, step, TOKENS, 32, 64}, {x, m, k, step, last, 32, 64}};
  memcpy(&given.starts, starts, sizeof given.starts);
  given.w = (const char*)pointers[0], given.steps = (const Step*)pointers[1];
  given.seats = (const int*)pointers[2], given.y = (char*)pointers[3];
  given.m = m, given.width = width;
  launch(grid, THREADS, CLUSTER, bytes, run);
}
"""


def on_cpu() -> str:
    """Return the kernel's text, with stand-ins for what is asm."""
    headers = cuda_source("ring.cuh") + cuda_source("strips.cuh")
    text = headers + cuda_source("bsr_fragments.cu")
    in_asm = (
        r"__device__ __forceinline__ \w+ (opaque|[sl][td]_shared|bulk_load_multicast)"
        r"\([^{;]*\) \{\n.*?\n\}\n"
    )
    text = re.sub(in_asm, "", text, flags=re.DOTALL)
    text = re.sub(r"#define (?:X_AND_W|WGMMA)(?:.*\\\n)*.*", "", text)
    text = re.sub(r"#include .*|#pragma once|extern __shared__ [^;]*;", "", text)
    text = re.sub(r'asm volatile\("[^"]*"\);', "", text)
    text = re.sub(r"__shared__ uint4 notes[^;]*;", "", text)
    text = re.sub(r"__shared__ u64 full[^;]*;", FIXED, text)
    assert "asm" not in text
    return '#include "wgmma_on_cpu.h"\n' + IN_CPP + text + RUN


# m, n, k, block, part of the blocks that is stored
CASES = [
    (Config(64, 8, 1, 4, 1), (70, 264, 200, (16, 16), 0.4), True),
    (Config(128, 5, 1, 4, 0), (130, 264, 200, (24, 24), 0.4), True),
    (Config(128, 4, 2), (512, 256, 128, (32, 32), 0.5), False),
    (Config(64, 2), (65, 120, 104, (24, 24), 0.5), False),
    (Config(128, 2, 2), (300, 136, 200, (16, 16), 0.5), False),
    (Config(64, 8), (70, 264, 72, (16, 16), 0.4), True),
    (Config(64, 3), (40, 104, 120, (40, 24), 0.4), True),
    (Config(128, 1), (130, 160, 168, (80, 40), 0.6), False),
    (Config(64, 1), (30, 144, 144, (48, 48), 1.0), False),
    (Config(64, 3), (70, 72, 72, (24, 24), 0.0), False),
    (Config(256, 2), (300, 64, 328, (16, 32), 0.6), False),
    (Config(64, 2, 2), (100, 200, 144, (12, 12), 0.3), True),
    (Config(128, 2), (65, 112, 320, (10, 28), 0.4), False),
    (Config(64, 3), (33, 120, 96, (52, 26), 0.5), True),
    (Config(64, 1, 2), (1, 640, 640, (64, 16), 0.05), False),
]


@needs_gxx
@pytest.mark.parametrize("late", sampled([1, 0], 0))
@pytest.mark.parametrize(("config", "shape", "transposed"), sampled(CASES, 0, 1), ids=str)
def test_the_threads_multiply_tiles_on_a_cpu(config, shape, transposed, late) -> None:
    w, x, dy = example(shape)
    dtype, workers = DTYPES["fp16"], 4
    a = (dy if transposed else x).to(dtype)
    tiles = tiles_of(w, transposed, ACROSS)
    assert possible(config, tiles.height)
    lists = lists_of(tiles, config, len(a), workers)
    costs = costs_of(lists, tiles.height, config)
    tokens = config.tokens * config.cluster
    steps, bounds = worked(lists, costs, len(a), tokens, workers // config.cluster)
    starts = np.zeros(WORKERS, np.int32)
    starts[: len(bounds)] = bounds
    values = w.values.to(dtype)
    values = values.transpose(1, 2).contiguous() if transposed else values
    units = lists.units.flatten()
    assert len(np.unique(units[units >= 0])) == (units >= 0).sum()  # none is written twice
    packed = packed_pieces(values, packed_order(tiles, lists), tiles.piece)
    width = w.shape[1] if transposed else w.shape[0]
    y = torch.full((len(a), width), float("nan"), dtype=dtype)
    constants = bsr_fragments.constants_of(config, tiles.height, lists.room, dtype)
    run = library_of(on_cpu(), (*constants, ("LATE", late))).call
    pointers = packed.data_ptr(), steps.ctypes.data, lists.units.ctypes.data, y.data_ptr()
    run(
        *(ctypes.c_void_p(a.data_ptr()), a.stride(0) * 2, len(a), a.shape[1]),
        *(ctypes.c_void_p(starts.ctypes.data), (ctypes.c_void_p * 4)(*pointers)),
        *(width, (len(bounds) - 1) * config.cluster, bsr_fragments.SHARED_BYTES),
    )
    dense = w.to_dense().to(dtype).float()
    right = a.float() @ (dense if transposed else dense.T)
    torch.testing.assert_close(y.float(), right, rtol=2e-3, atol=2e-2)
