"""bsr_strips on a CPU, thread by thread: its source text, with stand-ins for asm."""

import ctypes
import re

import numpy as np
import pytest
import torch

from sparsebench.kernels._common.cuda import pitch
from sparsebench.kernels._common.work_list import WORKERS
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.bsr import bsr_strips
from sparsebench.kernels.bsr._launch import packed as packed_pieces
from sparsebench.kernels.bsr._small_steps import work
from sparsebench.kernels.bsr._strip_tiles import Config, boxes_of, packed_order, tiles_of
from sparsebench.kernels.bsr.bsr_strips import costs_of
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
"""
FIXED = """
  char* const shared = dynamic_shared();
  auto* notes = (uint4*)fixed_shared();
  u64 *full = (u64*)(notes + 64), *empty = full + 8;
"""
RUN = """
static struct { Maps maps; Starts starts; const char* w; const Step* steps; const int* rows;
                char* y; int m, width; } given;
static void run() {
  multiply_tiles(given.maps, given.starts, given.w, given.steps, given.rows, given.y, given.m,
                 given.width);
}
extern "C" void call(const char* x, int step, int m, int k, const int* boxes, const int* pitches,
                     const int* starts, void** pointers, int width, int grid, int bytes) {
  TensorMap maps[4] = {};
  const int last = m % TOKENS ? m % TOKENS : TOKENS;
  for (int i = 0; i < 4; i++)
    maps[i] = {x, m, k, step, i < 2 ? TOKENS : last, boxes[i % 2], pitches[i % 2]};
  given.maps = Maps{{maps[0], maps[1]}, {maps[2], maps[3]}};
  memcpy(&given.starts, starts, sizeof given.starts);
  given.w = (const char*)pointers[0], given.steps = (const Step*)pointers[1];
  given.rows = (const int*)pointers[2], given.y = (char*)pointers[3];
  given.m = m, given.width = width;
  launch(grid, THREADS, 1, bytes, run);
}
"""


def on_cpu() -> str:
    """Return the kernel's text, with stand-ins for what is asm."""
    device = cuda_source("wgmma.cuh")
    start = device.index("__device__ __forceinline__ u64 smem_descriptor")
    descriptor = device[start : device.index("__device__", start + 1)]
    headers = cuda_source("ring.cuh") + cuda_source("strips.cuh")
    in_asm = r"__device__ __forceinline__ \w+ (opaque|[sl][td]_shared)\([^{;]*\) \{\n.*?\n\}\n"
    text = re.sub(in_asm, "", headers, flags=re.DOTALL) + cuda_source("bsr_strips.cu")
    text = re.sub(r"#include .*|#pragma once|extern __shared__ [^;]*;", "", text)
    text = re.sub(r"__shared__ uint4 notes[^;]*;", "", text)
    text = re.sub(r"__shared__ u64 full[^;]*;", FIXED, text)
    assert "asm" not in text
    return '#include "wgmma_on_cpu.h"\n' + descriptor + IN_CPP + text + RUN


# m, n, k, block, part of the blocks that is stored
CASES = [
    (Config(64, 2, 2, 2), (65, 120, 104, (24, 24), 0.5), False),
    (Config(64, 2, 2, 2), (40, 104, 120, (40, 24), 0.4), True),
    (Config(128, 1, 2, 2), (130, 160, 168, (80, 40), 0.6), False),
    (Config(64, 1, 1, 2), (30, 144, 144, (48, 48), 1.0), False),
    (Config(64, 3, 2, 2), (70, 72, 72, (24, 24), 0.0), False),
    (Config(64, 2, 2), (65, 120, 104, (24, 24), 0.5), False),
    (Config(64, 1, 2), (65, 160, 160, (40, 80), 0.5), True),
    (Config(64, 2, 2, 2), (100, 200, 144, (12, 12), 0.3), True),
    (Config(128, 2, 2, 2), (65, 112, 320, (10, 28), 0.4), False),
    (Config(64, 3, 2, 2), (33, 120, 96, (52, 26), 0.5), True),
    (Config(256, 1, 2), (1, 640, 640, (64, 16), 0.05), False),
]


@needs_gxx
@pytest.mark.parametrize("late", sampled([True, False], 0))
@pytest.mark.parametrize(("config", "shape", "transposed"), sampled(CASES, 0, 5), ids=str)
def test_the_threads_multiply_tiles_on_a_cpu(config, shape, transposed, late) -> None:
    w, x, dy = example(shape)
    dtype, workers = DTYPES["fp16"], 2
    a = (dy if transposed else x).to(dtype)
    tiles = tiles_of(w, transposed, config.across)
    assert tiles.possible(config)
    lists = tiles.lists(config, len(a), workers)
    costs = costs_of(lists, tiles, config)
    steps, bounds = work(lists, costs, len(a), config.tokens, workers)
    starts = np.zeros(WORKERS, np.int32)
    starts[: len(bounds)] = bounds
    values = w.values.to(dtype)
    values = values.transpose(1, 2).contiguous() if transposed else values
    units = lists.units.flatten()
    assert len(np.unique(units[units >= 0])) == (units >= 0).sum()  # none is written twice
    packed = packed_pieces(values, packed_order(tiles, lists), tiles.piece)
    width = w.shape[1] if transposed else w.shape[0]
    y = torch.full((len(a), width), float("nan"), dtype=dtype)
    constants = bsr_strips.constants_of(config, tiles.height, tiles.depth, lists.room, dtype)
    run = library_of(on_cpu(), constants, late).call
    boxes = (*boxes_of(tiles.depth, tiles.across), 0)[:2]
    pitches = [pitch(2 * box) for box in boxes]
    pointers = packed.data_ptr(), steps.ctypes.data, lists.units.ctypes.data, y.data_ptr()
    two, four = ctypes.c_int * 2, ctypes.c_void_p * 4
    run(
        *(ctypes.c_void_p(a.data_ptr()), a.stride(0) * 2, len(a), a.shape[1]),
        *(two(*boxes), two(*pitches), ctypes.c_void_p(starts.ctypes.data), four(*pointers)),
        *(width, len(bounds) - 1, bsr_strips.SHARED_BYTES),
    )
    dense = w.to_dense().to(dtype).float()
    right = a.float() @ (dense if transposed else dense.T)
    torch.testing.assert_close(y.float(), right, rtol=2e-3, atol=2e-2)
