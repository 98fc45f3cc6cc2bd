"""Test the gate in TwELL words: its epilogue thread by thread on a CPU, all on a Hopper GPU."""

import ctypes

import pytest
import torch
from torch import Tensor

from sparsebench.formats.twell import Twell
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.twell import _twell_gate
from sparsebench.kernels.twell._call import TwellCall
from sparsebench.kernels.twell._twell_gate import CAPACITY, CLUSTERS, TILE
from tests.compiling.nvcc import hopper
from tests.emulation.cuda_on_cpu import device_code, library_of
from tests.tools.marks import needs_gxx, sampled

KERNEL = 'extern "C" __global__'
STAND_INS = """
struct TensorMap {};
static void st_shared_u32(u32 at, u32 value) { memcpy(dynamic_shared() + at, &value, 4); }
static void consumers_sync() { in_step(1, 256); }
static uint4 ld_shared_v4(u32 at) {  // delay some warps, in either order
  static int calls;
  const int warp = now->thread / 32 % 4, late = calls++ / 512 % 2 ? warp : 3 - warp;
  for (int i = 0; i < 12 * late; i++) others_first();
  uint4 v;
  memcpy(&v, dynamic_shared() + at, 16);
  return v;
}
"""
RUN = """
static const float* sums;  // [m, n], padded to whole CTA tiles
static Out out;
static int columns;
template <bool HALF> static void part(const CtaTile& tile) {
  const int warpgroup = threadIdx.x / 128, thread = threadIdx.x % 128;
  float d[UNITS / 2];
  for (int i = 0; i < Part<HALF>::UNITS / 2; i++) {
    const int row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
    const int token = tile.token + row + (HALF ? 0 : 64 * warpgroup);
    const int unit = tile.unit + i / 4 * 8 + thread % 4 * 2 + i % 2 +
                     (HALF ? Part<HALF>::UNITS * warpgroup : 0);
    d[i] = sums[(size_t)token * columns + unit];
  }
  epilogue<HALF>(d, 0, out, tile, warpgroup);
}
static void run() {
  const int workers = ctas_of_grid / CLUSTER, rank = cta_number() % CLUSTER;
  const Schedule schedule(out, workers);
  int index = cta_number() / CLUSTER;
  for (; index < schedule.whole; index += workers) part<false>(schedule(index, rank));
  consumers_sync();
  for (; index < schedule.end; index += workers) part<true>(schedule(index, rank));
}
extern "C" void call(const float* from, int wide, u32* words, unsigned short* dense, int m, int n,
                     int grid) {
  sums = from, columns = wide, out = Out{words, dense, m, n, 64};
  launch(grid, 256, CLUSTER, WORDS_BYTES + 512, run);
}
"""
# CTAs of a cluster, m, n, fraction of active units, workers: whole tiles, half tiles, and both
CASES = [
    *((1, 21, 328, 0.02, 3), (1, 200, 520, 0.05, 4), (2, 300, 264, 0.5, 3)),
    *((2, 130, 8, 1.0, 2), (2, 1, 1032, 0.0, 5), (1, 270, 776, 0.1, 5)),
]


@needs_gxx
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("cluster", "m", "n", "fraction", "workers"), sampled(CASES, 0, 2), ids=str
)
def test_threads_on_a_cpu_write_the_words(cluster, m, n, fraction, workers, name) -> None:
    dtype = DTYPES[name]
    rows, columns = (-(-m // 256) + 1) * 256, -(-n // 256) * 256
    sums = torch.zeros(rows, columns)
    sums[:m, :n] = torch.rand(m, n).where(torch.rand(m, n) < fraction, -torch.rand(m, n))
    sums[0, :3] = torch.tensor([float("nan"), 1e-42, -0.0])  # fp16 rounds the second to zero
    sums[m:] = float("nan")  # X is zero there, but W may be infinite
    words = torch.full((m, -(-n // TILE) * (CAPACITY + 1)), -1, dtype=torch.int32)
    dense = torch.full((m, n), torch.nan, dtype=dtype)
    code, _ = device_code("twell_gate.cu", "produce", "mainloop").split(KERNEL)
    source = '#include "grid_on_cpu.h"\n' + STAND_INS + code + RUN
    constants = _twell_gate.constants_of(cluster, dtype)
    run = library_of(source, constants).call
    pointers = [ctypes.c_void_p(t.data_ptr()) for t in (sums, words, dense)]
    run(pointers[0], columns, *pointers[1:], m, n, workers * cluster)
    assert_words(words, dense, sums[:m, :n].to(dtype))


def assert_words(words: Tensor, dense: Tensor, gate: Tensor) -> None:
    """Compare words and dense tiles, filled with NaN before, with the rounded gate."""
    active = ~(gate <= 0)
    count = words.view(len(gate), -1, CAPACITY + 1)[..., 0]
    padded = torch.nn.functional.pad(active, (0, -active.shape[1] % TILE))
    assert torch.equal(count, padded.unflatten(1, (-1, TILE)).sum(2).int())
    full = (count > CAPACITY).repeat_interleave(TILE, 1)[:, : active.shape[1]]
    assert dense[~full].isnan().all()
    stored = Twell.from_words(words, tuple(gate.shape), dense=dense)
    expected = gate.where(active, 0)
    assert torch.equal(stored.to_dense().nan_to_num(9999), expected.nan_to_num(9999))


# ---- on a Hopper GPU ----

# m, n, k: one tile; edges on all sides; more CTA tiles than CTAs; a layer.
SHAPES = [(1, 8, 16), (20, 200, 528), (300, 1552, 1280), (513, 520, 2064), (3000, 5632, 256)]
SHAPES += [(1024, 5632, 2048)]


@hopper
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_words_are_correct_on_a_hopper_gpu(cluster: int, name: str) -> None:
    """Use small integers, whose sums are exact; column 0 of W sets how many units are active."""
    dtype, options = DTYPES[name], {"dtype": torch.float32, "device": "cuda"}
    for m, n, k in SHAPES:
        x, w = (torch.randint(-2, 3, size, **options) / 4 for size in ((m, k), (n, k)))
        x[:, 0] = 1
        call = TwellCall(m, n, k, dtype, False)
        write = _twell_gate.writer(x.device, call, cluster)
        for shift in (-(k**0.5) * 1.1, -(k**0.5) * 0.6, 0.0, k):
            w[:, 0] = round(shift)
            w[0, :2] = torch.tensor([float("nan"), 0])
            w[n - 1] = -0.0
            expected = (x.double() @ w.to(dtype).double().T).to(dtype)
            for tokens in (m, m // 2 + 1):
                assert_words(*write(x[:tokens].to(dtype), w.to(dtype)), expected[:tokens])
