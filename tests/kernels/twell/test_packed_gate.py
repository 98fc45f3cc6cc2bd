"""The gate that says who is on: its own source on a CPU, thread by thread; on a Hopper GPU.

What comes after the products is run from spense_wgmma.cu's text, as test_spense_hidden.py does.
"""

import ctypes
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsebench.errors import Unsupported
from sparsebench.formats.spense import Spense
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._stream_k import interleaved_rows, schedule
from sparsebench.kernels.spense.spense_wgmma import Config
from sparsebench.kernels.twell import _packed_gate
from tests.compiling.nvcc import assert_compiles_cleanly, hopper
from tests.kernels.spense.epilogue_on_cpu import KERNEL, Case, on_cpu
from tests.tools.marks import sampled

READ = """
static uint4 ld_shared_v4(u32 at) {  // some warps are much later than others, in either order
  static int calls;
  const int warp = now->thread / 32 % 4, late = calls++ / 4096 % 2 ? warp : 3 - warp;
  for (int i = 0; i < 12 * late; i++) others_first();
  uint4 v;
  memcpy(&v, dynamic_shared() + at, 16);
  return v;
}
"""
RUN = """
template <int LEFT> static void tma_store_wait_read() {}
static struct { const float* given; const WorkItem* items; const int* starts; float4* workspace;
                int* counters; unsigned short* values; unsigned char* bits; } p;
static struct { int rows, n, m; } q;
static void run() {
  const Out to{p.values, p.bits, q.m, q.n};
  const Weights w{nullptr, nullptr, q.rows, 0, 0, 0, 0, 0};
  const int worker = cta_number() / CLUSTER, warpgroup = threadIdx.x / 128;
  const int consumer = cta_number() % CLUSTER * 2 + warpgroup, thread = threadIdx.x % 128;
  const u32 out = warpgroup * EPI_STAGES * EPI_BYTES;
  const int begin = p.starts[worker], end = p.starts[worker + 1];
  for (int i = begin; i < end; i++) {
    float d[TOKENS / 2];
    const float* of = p.given + (size_t)(i * TILE_ROWS + consumer) * 64 * TOKENS;
    for (int j = 0; j < TOKENS / 2; j++)
      d[j] = of[(16 * (thread / 32) + thread % 32 / 4 + j / 2 % 2 * 8) * TOKENS +
                j / 4 * 8 + thread % 4 * 2 + j % 2];
    const WorkItem& item = p.items[i];
    const int feature = tile_row_of(w, item.tile, consumer) * ROWS;
    if (item.fixup.parts > 1)
      store_partial(d, item.fixup, p.workspace, p.counters, consumer, warpgroup);
    else
      epilogue(d, &to, out, feature, item.tile.token, warpgroup);
  }
  for (int i = begin; i < end; i++) {
    const WorkItem& item = p.items[i];
    if (item.fixup.parts > 1)
      fixup_part(item, partial_sums(p.workspace, item.fixup, consumer),
                 p.counters + item.fixup.counter * TILE_ROWS + consumer, Scales{}, &to, out,
                 tile_row_of(w, item.tile, consumer) * ROWS, warpgroup);
  }
}
extern "C" void call(void** pointers, int* sizes, int grid) {
  memcpy(&p, pointers, sizeof p), memcpy(&q, sizes, sizeof q);
  launch(grid, 256, grid, 2 * EPI_STAGES * EPI_BYTES, run);
}
"""


def who_is_on(bits: Tensor, m: int) -> Tensor:
    """Return bool [m, n] of bytes [ceil(m / 8), n], which have no bit of a token beyond m."""
    tokens = torch.arange(8, dtype=torch.uint8, device=bits.device)[:, None]
    on = (bits[:, None] >> tokens & 1).flatten(0, 1).bool()
    assert not on[m:].any()
    return on[:m]


def assert_packed(values: Tensor, bits: Tensor, gate: Tensor, poison: float | None) -> None:
    """Hold what is on against the gate [m, n], rounded; the rest is the poison, or near what is on.

    A NaN as poison is the kernel's to leave, not to make: it is not looked for.
    """
    on = ~(gate <= 0)
    assert torch.equal(who_is_on(bits, len(gate)), on)
    right, found = gate[on], values[on]
    assert torch.equal(found.double().nan_to_num(9999), right.double().nan_to_num(9999))
    if poison is not None:
        padded = torch.nn.functional.pad(on, (0, -on.shape[1] % 16))
        near = padded.unflatten(1, (-1, 16)).any(2, keepdim=True).expand(-1, -1, 16).flatten(1)
        assert (values[~near[:, : on.shape[1]]] == poison).all()


# Whole items and some that are cut, into few parts and into more than granules; units that are no
# multiple of 16; edges of m inside eight tokens; many whole items to a CTA, which use its buffers
# anew. Part of the sums that is on: none, few, half, all.
CASES = [
    (Case(Config(16, 1, 4), 21, 328, 6, 0.0, 7), 0.02),
    (Case(Config(32, 2, 4), 33, 328, 9, 0.0, 6), 0.5),
    (Case(Config(64, 1, 4), 50, 40, 40, 0.0, 9), 0.1),
    (Case(Config(128, 2, 4), 300, 72, 5, 0.0, 4), 1.0),
    (Case(Config(256, 1, 4), 270, 264, 7, 0.0, 5), 0.01),
    (Case(Config(256, 2, 4), 1, 136, 3, 0.0, 4), 0.0),
    (Case(Config(128, 1, 4), 391, 8, 12, 0.0, 8), 0.05),
    (Case(Config(256, 1, 4), 520, 392, 2, 0.0, 2), 0.2),
    (Case(Config(128, 2, 4), 260, 520, 2, 0.0, 4), 0.2),
    (Case(Config(64, 1, 4), 130, 392, 2, 0.0, 2), 0.2),
]


@pytest.mark.skipif(not shutil.which("g++"), reason="needs g++")
@pytest.mark.parametrize(("case", "part"), sampled(CASES, 0, 2), ids=str)
@pytest.mark.parametrize("name", sampled(["bf16", "fp16"]))
def test_its_threads_write_who_is_on_on_a_cpu(
    name: str, case: Case, part: float, tmp_path: Path
) -> None:
    dtype, config, share, m, n = (
        DTYPES[name],
        case.config,
        2 * case.config.cluster,
        case.m,
        case.units,
    )
    w = _packed_gate.packed(torch.zeros(n, case.steps * 128, dtype=dtype))
    work = schedule(w, m, config.tokens, config.cluster, case.ctas // config.cluster)
    items, rows = work.items[: work.starts[-1]], -(-n // 64)
    rng = np.random.default_rng(0)
    wide = -(-m // config.tokens) * config.tokens
    sums = rng.standard_normal((rows * 64, wide)).astype(np.float32)
    sums = np.abs(sums) * np.where(rng.random(sums.shape) < part, 1, -1)
    sums[3, 0], sums[5, 0], sums[6, 0] = np.nan, 1e-42, -0.0  # fp16 rounds the second one to zero
    sums[n:] = 0  # tiles are filled up; tokens beyond m are NaN where W is not finite
    sums[:n, m:] = np.nan
    of_steps = np.zeros((case.steps, *sums.shape), np.float32)
    of_steps[rng.integers(case.steps)] = sums  # sums of parts are exact
    order = interleaved_rows(rows, 0)
    given = np.zeros((len(items), share, 64, config.tokens), np.float32)
    for i, (group, token, first, count, *_) in enumerate(items):
        for j, row in enumerate(order[np.minimum(group * share + np.arange(share), rows - 1)]):
            own = of_steps[first : first + count, row * 64 : row * 64 + 64]
            given[i, j] = own[..., token : token + config.tokens].sum(0)
    partial = torch.full((work.slots, share, 64, config.tokens), float("nan"))
    counters = torch.zeros(work.counters * share + 1, dtype=torch.int32)
    values = torch.full((m, n), 7.0, dtype=dtype)
    bits = torch.full((-(-m // 8), n), 0xFF, dtype=torch.uint8)

    kept = given, work.items, work.starts, partial, counters, values, bits
    address = [t.ctypes.data if isinstance(t, np.ndarray) else t.data_ptr() for t in kept]
    constants = spense_wgmma.constants_of(config, dtype, packed=True)
    run = on_cpu(READ + KERNEL + RUN, constants, tmp_path).call
    for _ in range(2):  # counters are as they were
        run((ctypes.c_void_p * 7)(*address), (ctypes.c_int * 3)(rows, n, m), case.ctas)
    assert not counters.any()
    assert_packed(values, bits, torch.from_numpy(sums[:n, :m].T.copy()).to(dtype), 7.0)


@pytest.mark.compiles
@pytest.mark.skipif(not shutil.which("nvcc"), reason="needs nvcc")
@pytest.mark.parametrize(
    "config", sampled(c for c in spense_wgmma.space() if c.ahead == 4), ids=str
)
def test_it_compiles_without_a_spill_or_a_serialised_product(
    config: Config, tmp_path: Path
) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        constants = spense_wgmma.constants_of(config, dtype, packed=True)
        assert_compiles_cleanly("spense_wgmma", constants, tmp_path)


def test_what_the_kernel_cannot_read_is_refused_before_anything_is_built() -> None:
    w = _packed_gate.packed(torch.zeros(64, 128).half())
    with pytest.raises(Unsupported, match="expected activations of 128 columns"):
        _packed_gate.launch(torch.zeros(4, 64).half(), w, Config(16, 1, 4))
    of_bytes = Spense.from_dense(torch.zeros(64, 128).to(torch.float8_e4m3fn), dense_fraction=1.0)
    x = torch.zeros(4, 128).to(torch.float8_e4m3fn)
    with pytest.raises(Unsupported, match=r"expected fp16 or bf16, found torch.float8_e4m3fn"):
        _packed_gate.launch(x, of_bytes, Config(16, 1, 4))


# ---- on a Hopper GPU ----

CONFIGS = [c for c in spense_wgmma.space() if c.ahead == 4]
# m, n, k: one tile; edges on all sides; items of many CTAs; more tokens than a tile; a layer.
SHAPES = [(1, 8, 16), (20, 200, 528), (33, 328, 400), (16, 136, 6400), (64, 6400, 640)]
SHAPES += [(300, 1552, 1280), (513, 520, 2064), (1024, 5632, 2048)]


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("name", ["bf16", "fp16"])
@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_who_is_on_is_right_on_a_hopper_gpu(config: Config, name: str) -> None:
    """Small integers, whose sums are exact; the first column of W moves how many are on."""
    dtype, of = DTYPES[name], {"dtype": torch.float32, "device": "cuda"}
    for m, n, k in SHAPES:
        x, w = (torch.randint(-2, 3, size, **of) / 4 for size in ((m, k), (n, k)))
        x[:, 0] = 1
        for shift in (-(k**0.5) * 0.4, 0.0, k):
            w[:, 0] = round(shift)
            w[0, :2] = torch.tensor([float("nan"), 0])
            w[n - 1] = -0.0
            tiles = _packed_gate.packed((w + 0.0).to(dtype))
            gate = _packed_gate.launch(x.to(dtype), tiles, config, watchdog=True)
            gates = []
            for _ in range(2):
                gate.values.fill_(float("nan"))
                gate.on.fill_(0xFF)
                gate()
                gates.append((gate.values.clone(), gate.on.clone()))
            right = (x.double() @ w.to(dtype).double().T).to(dtype)
            assert_packed(gate.values, gate.on, right, None)
            for seen in zip(*gates, strict=True):
                assert torch.equal(*(t.view(torch.uint8) for t in seen)), (m, n, k)
            gate.values.fill_(7.0)
            gate()
            assert_packed(gate.values, gate.on, right, 7.0)
