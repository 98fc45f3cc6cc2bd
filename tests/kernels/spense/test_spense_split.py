"""The end of a launch in which the CTAs of a cluster share the k tiles of an item, on a CPU.

Each CTA sends sums to whoever adds them up, and writes its share of the tokens. The text is
spense_wgmma.cu's (spense_epilogue_on_cpu.py). tests/kernels/spense/test_spense_wgmma.py runs the
whole kernel on a Hopper GPU.
"""

import ctypes

import numpy as np
import pytest
import torch

from sparsebench.kernels._kernel import DTYPES
from sparsebench.kernels.spense import spense_wgmma
from sparsebench.kernels.spense.spense_wgmma import Config
from tests.kernels.spense.epilogue_on_cpu import KERNEL, on_cpu
from tests.tools.marks import needs_gxx, sampled

BEFORE = """
static u32 map_shared_rank(u32 address, int cta) { return address | cta << 24; }
static int got[64][4];  // bytes that came for a warpgroup of a CTA
static void st_async(u32 to, float4 v, u32 barrier) {
  if (to >> 24 != barrier >> 24 || to % 16) std::abort();
  memcpy(of_cluster(to >> 24).dynamic.data() + (to & 0xffffff), &v, sizeof v);
  got[to >> 24][barrier & 0xffffff] += sizeof v;
}
static float4 ld_shared_float4(u32 at) {
  float4 v;
  memcpy(&v, dynamic_shared() + at, sizeof v);
  return v;
}
"""
AFTER = """
template <int LEFT> static void tma_store_wait_read() { land_stores<ROW_BYTES>(LEFT); }
static struct { const float* sums; char* out; } p;  // [parts][tile rows][64][tokens]
static struct { int n, m, token; } q;
static void run() {
  const TensorMap map{p.out, 2l * q.n, q.m};
  const int part = now->cta, role = threadIdx.x / 128;
  mine_pending().resize(1);
  float d[8 * STORES] = {};
  load_sums(d, p.sums + (size_t)(part * WARPGROUPS + role) * 64 * TOKENS);
  const u32 sums = role * SUMS_BYTES, out = WARPGROUPS * SUMS_BYTES + role * SHARE * STORE_BYTES;
  float share[8 * SHARE];
  exchange(d, share, sums, role, part);
  while (got[part][role] < bytes_for(part)) others_first();
  write_share(share, Scales{}, &map, out, sums, part, role * ROWS, q.token, role);
}
extern "C" void call(void** pointers, int* sizes) {
  memcpy(&p, pointers, sizeof p), memcpy(&q, sizes, sizeof q), memset(got, 0, sizeof got);
  for (auto& cta : pending) for (auto& of_warp : cta) of_warp.clear();
  launch(SPLIT, 128 * WARPGROUPS, SPLIT, WARPGROUPS * (SUMS_BYTES + SHARE * STORE_BYTES), run);
  for (int cta = 0; cta < SPLIT; cta++)
    for (int role = 0; role < WARPGROUPS; role++)
      if (got[cta][role] != bytes_for(cta)) std::abort();
}
"""
# tokens, warpgroups, split
CASES = [(48, 1, 4), (112, 2, 2), (112, 3, 3), (16, 2, 4)]
CASES += [(128, 3, 2), (112, 1, 8), (80, 2, 1), (176, 3, 1)]
CASES += [(136, 3, 1), (152, 2, 2), (192, 3, 1)]


@needs_gxx
@pytest.mark.parametrize(("tokens", "warpgroups", "split"), sampled(CASES, 0, 2, 5, 8))
def test_a_cluster_adds_up_its_sums_and_writes_each_token_once(tokens, warpgroups, split) -> None:
    config, n = Config(tokens, 1, 4, warpgroups, split), 64 * warpgroups - 8
    parts = np.random.default_rng(0).integers(-2, 3, (split, warpgroups, 64, tokens))
    right = parts.sum(0).reshape(-1, tokens)[:n].T
    for m, token in ((tokens, 0), (tokens + 5, tokens), (2 * tokens + 1, tokens)):
        sums, out = parts.astype(np.float32), torch.full((m, n), 7, dtype=torch.bfloat16)
        constants = spense_wgmma.constants_of(config, DTYPES["bf16"])
        call = on_cpu(BEFORE + KERNEL + AFTER, constants).call
        pointers = (ctypes.c_void_p * 2)(sums.ctypes.data, out.data_ptr())
        call(pointers, (ctypes.c_int * 3)(n, m, token))
        left = min(m - token, tokens)
        assert np.array_equal(out[token : token + left].float().numpy(), right[:left])
        assert (out[:token] == 7).all()
        assert (out[token + left :] == 7).all()
