"""The launch that writes H = act(G) * U: its epilogue on a CPU by threads, and on a Hopper GPU.

spense_epilogue_on_cpu.py builds the epilogue and the fixup from the text of spense_wgmma.cu, with
stand-ins for PTX and TMA.
"""

import ctypes
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from sparsebench.formats.spense import Spense
from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense._stream_k import interleaved_rows, schedule
from sparsebench.kernels.spense.spense_ffn import TURN, interleaved, joined, parted
from sparsebench.kernels.spense.spense_wgmma import Config
from tests.compiling.nvcc import hopper
from tests.kernels.spense.epilogue_on_cpu import KERNEL, Case, on_cpu
from tests.kernels.spense.examples import WGMMA_POWERS, call_of
from tests.tools.marks import needs_gxx, sampled

ACTIVATIONS = [name for name in spense_wgmma.ACTIVATIONS if name]
NAMES = "bf16", "fp16", "fp8"

TMA = """
template <int LEFT> static void tma_store_wait_read() { land_stores<EPI_ROW_BYTES>(LEFT); }
static struct { const float* sums; const WorkItem* items; const int* starts; float4* workspace;
                int* counters; const float *features, *tokens; char* out; } p;
static struct { int rows, sparse_rows, n, m, bytes; } q;
static void run() {
  const TensorMap map{p.out, q.bytes, q.m};
  const Scales scales{p.features, p.tokens, q.n, q.m};
  const Weights w{nullptr, nullptr, q.rows, q.sparse_rows, 0, 0, 0, 0};
  const int worker = cta_number() / CLUSTER, warpgroup = threadIdx.x / 128;
  const int consumer = cta_number() % CLUSTER * 2 + warpgroup;
  const u32 out = warpgroup * EPI_STAGES * EPI_BYTES;
  mine_pending().resize(1);
  const int begin = p.starts[worker], end = p.starts[worker + 1];
  for (int i = begin; i < end; i++) {
    float d[8 * STORES] = {};
    load_sums(d, p.sums + (size_t)(i * TILE_ROWS + consumer) * 64 * TOKENS);
    const WorkItem& item = p.items[i];
    const int feature = tile_row_of(w, item.tile, consumer) * ROWS;
    if (item.fixup.parts > 1) {
      store_partial(d, item.fixup, p.workspace, p.counters, consumer, warpgroup);
    } else {
      if (FP8) apply_scales<TOKENS / 8>(d, scales, feature, item.tile.token);
      epilogue(d, out, warpgroup, [&](bool writer, int first, int stores, u32 from) {
        if (!writer) return;
        for (int i = 0; i < stores; i++)
          copy_s2g(&map, from + i * STORE_BYTES, feature,
                   item.tile.token + (first + i) * STORE_TOKENS, first + i);
        tma_store_commit();
      });
    }
  }
  for (int i = begin; i < end; i++) {
    const WorkItem& item = p.items[i];
    if (item.fixup.parts > 1)
      fixup_part(item, partial_sums(p.workspace, item.fixup, consumer),
                 p.counters + item.fixup.counter * TILE_ROWS + consumer, scales, &map, out,
                 tile_row_of(w, item.tile, consumer) * ROWS, warpgroup);
  }
  if (is_writer()) tma_store_wait_read<0>();
}
extern "C" void call(void** pointers, int* sizes, int grid) {
  memcpy(&p, pointers, sizeof p), memcpy(&q, sizes, sizeof q);
  for (auto& cta : pending) for (auto& of_warp : cta) of_warp.clear();
  launch(grid, 256, grid, 2 * EPI_STAGES * EPI_BYTES, run);
}
"""


# Whole items, and some that are cut: into few parts, and into more than there are granules.
CASES = [
    Case(Config(16, 1, 4), 21, 328, 6, 0.5, 7),
    Case(Config(32, 2, 4), 33, 328, 9, 0.5, 6),
    Case(Config(64, 1, 4), 50, 40, 40, 0.0, 9),
    Case(Config(128, 2, 4), 300, 72, 5, 1.0, 4),
    Case(Config(136, 1, 4), 264, 136, 6, 0.5, 4),
    Case(Config(144, 1, 4), 264, 136, 6, 0.5, 4),
    Case(Config(256, 1, 4), 270, 264, 7, 0.5, 5),
]
KINDS = [
    ("bf16", "relu"),
    ("fp16", "silu"),
    ("fp8", "relu2"),
    ("bf16", "gelu_tanh"),
    ("bf16", None),
]


def layout(case: Case, dtype: torch.dtype) -> Spense:
    """Return gate and up without memory; the units are a multiple of 16 in fp8."""
    step = 16 // dtype.itemsize
    n, k = 2 * (-(-case.units // step) * step), case.steps * 256 // dtype.itemsize
    sparse = int(case.units * case.sparse) // 128 * 128 * 2 if case.sparse < 1 else n
    tiles = [-(-rows // 64) for rows in (sparse, n - sparse)]
    blobs = (torch.empty(t, case.steps, 1, device="meta") for t in tiles)
    return Spense((n, k), dtype, (sparse, k), *blobs)


@needs_gxx
@pytest.mark.parametrize("case", sampled(CASES), ids=str)
@pytest.mark.parametrize(("name", "activation"), sampled(KINDS, 0, 2))
def test_its_threads_write_the_hidden_units_on_a_cpu(name, activation, case) -> None:
    dtype, config, share = DTYPES[name], case.config, 2 * case.config.cluster
    w, m = layout(case, dtype), case.m
    n = w.shape[0]
    work = schedule(w, m, config.tokens, config.cluster, case.ctas // config.cluster)
    items, rows = work.items[: work.starts[-1]], -(-n // 64)
    rng = np.random.default_rng(0)
    wide = -(-m // config.tokens) * config.tokens
    of_steps = rng.integers(-2, 3, (case.steps, rows * 64, wide)).astype(np.float32)
    of_steps[0, 3, 1] = np.nan  # of gate
    order = interleaved_rows(rows, w.sparse.shape[0])
    sums_of = np.zeros((len(items), share, 64, config.tokens), np.float32)
    for i, (group, token, first, count, *_) in enumerate(items):
        for j, row in enumerate(order[np.minimum(group * share + np.arange(share), rows - 1)]):
            part = of_steps[first : first + count, row * 64 : row * 64 + 64]
            sums_of[i, j] = part[..., token : token + config.tokens].sum(0)
    fp8 = name == "fp8"
    features = (2.0 ** torch.randint(-2, 2, (n,))).float()
    tokens = (2.0 ** torch.randint(-2, 2, (m,))).float()
    stored = -(-config.tokens // spense_wgmma.STORE_TOKENS) * spense_wgmma.STORE_TOKENS
    partial = torch.full((work.slots, share, 64, stored), float("nan"))
    counters = torch.zeros(work.counters * share + 1, dtype=torch.int32)
    kind = torch.bfloat16 if fp8 and not activation else dtype
    out = torch.zeros(m, n // 2 if activation else n).add(7).to(kind)

    arrays = sums_of, work.items, work.starts, partial, counters, features, tokens, out
    address = [t.ctypes.data if isinstance(t, np.ndarray) else t.data_ptr() for t in arrays]
    sizes = rows, w.sparse.shape[0], n, m, out.shape[1] * out.itemsize
    constants = spense_wgmma.constants_of(config, dtype, activation)
    run = on_cpu(KERNEL + TMA, constants).call
    for _ in range(2):  # counters must be reset
        run((ctypes.c_void_p * 8)(*address), (ctypes.c_int * 5)(*sizes), case.ctas)
    assert not counters.any()

    sums = torch.from_numpy(of_steps.sum(0)[:n, :m]).double()
    if fp8:
        sums = sums * features[:, None] * tokens
    assert_same(out, right_of(sums, activation), activation)


def right_of(sums: Tensor, activation: str | None) -> Tensor:
    """Return Y, or H, of sums [n, m]."""
    if activation is None:
        return sums.T
    gate, up = parted(sums)
    return (act(gate, activation) * up).T


def act(z: Tensor, activation: str) -> Tensor:
    match activation:
        case "silu":
            return torch.nn.functional.silu(z)
        case "gelu_tanh":  # 1 + tanh in torch loses values below eps
            return z * (2 * (2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)).sigmoid()
        case "relu":
            return z.relu()
        case _:
            return z.relu().square()


def assert_same(out: Tensor, right: Tensor, activation: str | None) -> None:
    if out.dtype == torch.float8_e4m3fn:
        right = right.clamp(-448, 448)
    right = right.to(out.dtype)
    if activation in (None, "relu"):
        assert torch.equal(out.double().nan_to_num(9999), right.double().nan_to_num(9999))
    else:  # the last places of fp32 may decide how a value is rounded
        limits = torch.finfo(out.dtype)
        close = {"rtol": limits.eps, "atol": max(limits.smallest_normal * limits.eps, 1e-30)}
        torch.testing.assert_close(out.double(), right.double(), equal_nan=True, **close)


# ---- on a Hopper GPU ----

ENDS = [Config(16, 1, 4), Config(256, 2, 4)]

# m, units (8 more at 16 bits), k, dense fraction: one tile; edges on all sides; all sparse, all
# dense; a last row of tiles without a neighbour; items of many CTAs; more tokens than a tile.
SHAPES = [
    (1, 16, 16, 0.0),
    (20, 208, 528, 0.25),
    (33, 336, 400, 0.5),
    (5, 464, 784, 0.7),
    (40, 176, 640, 1.0),
    (16, 336, 6400, 0.5),
    (64, 6400, 640, 0.5),
    (300, 1552, 1280, 0.5),
    (513, 528, 2064, 0.0),
]


@dataclass(frozen=True)
class Drawn:
    """X, gate and up as one matrix, scales of units and tokens, the sums [2 units, m] in fp64."""

    x: Tensor
    w: Spense
    scales: tuple[Tensor | None, Tensor | None]
    sums: Tensor


def drawn(shape: tuple[int, int, int, float], name: str) -> Drawn:
    """Return small integers in units of a power of two, whose products every dtype sums exactly."""
    (m, units, k, fraction), dtype = shape, DTYPES[name]
    units += TURN * (name != "fp8")
    of = {"dtype": torch.float32, "device": "cuda"}
    x = torch.randint(-3, 4, (m, k), **of) / 8
    gate, up = torch.randint(-3, 4, (2, units, k), **of) / 4
    sparse = int(units * (1 - fraction))
    for w in (gate, up):
        two = torch.rand(units, k // 4, 4, device="cuda").argsort(-1) < 2
        w[:sparse] = torch.where(two.flatten(1), w, 0)[:sparse]
    gate[0, :4] = torch.tensor([float("nan"), 0, 0, 0])
    packed = [Spense.from_dense((w + 0.0).to(dtype), dense_fraction=fraction) for w in (gate, up)]
    sums, scales = interleaved(gate, up).double() @ x.double().T, (None, None)
    if name == "fp8":
        features, tokens = (2.0 ** torch.randint(-2, 2, (n,), **of) for n in (2 * units, m))
        sums, scales = sums * features[:, None] * tokens, (features, tokens)
    return Drawn(x.to(dtype), joined(*packed), scales, sums)


def assert_right_on_gpu(config: Config, name: str, activation: str) -> None:
    for shape in SHAPES:
        these = drawn(shape, name)
        w, m = these.w, len(these.x)
        product = spense_wgmma.plan(w, call_of(w, m, activation), config)
        seen = []
        for _ in range(3):
            h = torch.empty(m, w.shape[0] // 2, dtype=w.dtype, device="cuda")
            h.view(torch.uint8).fill_(0xFF)  # NaN in every dtype
            assert product.run(these.x, w.sparse, w.dense, *these.scales, out=h) is h
            seen.append(h.float().nan_to_num(9999))
        assert_same(h, right_of(these.sums, activation), activation)
        assert all(torch.equal(h, seen[0]) for h in seen), shape


@hopper
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", WGMMA_POWERS, ids=str)
def test_hidden_units_are_right_on_a_hopper_gpu(config: Config, name: str) -> None:
    assert_right_on_gpu(config, name, "relu")


@hopper
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("config", ENDS, ids=str)
def test_activations_are_right_on_a_hopper_gpu(config: Config, name: str, activation: str) -> None:
    assert_right_on_gpu(config, name, activation)
