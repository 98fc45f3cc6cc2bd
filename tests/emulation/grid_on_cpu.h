// Stands in for ffn_ptx.cuh, which ffn_few.cu and ffn_sparse.cu include: copies, barriers, flags,
// as the PTX ISA defines them. A copy lands at once or, when it is `late`, when its barrier is waited for.

#include "mma_on_cpu.h"

using std::max;

static int __popc(u32 v) { return __builtin_popcount(v); }
static int __popcll(u64 v) { return __builtin_popcountll(v); }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static int __ffsll(u64 v) { return __builtin_ffsll(v); }
static u32 __ballot_sync(u32, bool own) {
  warp()[lane()][0] = own;
  warp_in_step();
  u32 all = 0;
  for (int i = 0; i < 32; i++) all |= (warp()[i][0] & 1) << i;
  warp_in_step();
  return all;
}
static bool __any_sync(u32 lanes, bool own) { return __ballot_sync(lanes, own); }
static u32 __shfl_sync(u32, u32 value, int from) {
  warp()[lane()][0] = value;
  warp_in_step();
  const u32 got = warp()[from][0];
  warp_in_step();
  return got;
}

static uint4 __ldcg(const uint4* p) { return *p; }

// ---- copies and barriers ----

static u64 evict_last_policy() { return 0; }
static u64 evict_first_policy() { return 0; }
static void cp_async_16(u32 to, const char* from, bool pred, u64 = 0) { copy(to, from, 16, pred); }
static void cp_async_arrive(u32 barrier) {
  cp_async_commit();
  cp_async_wait<0>();
  mbarrier_arrive(barrier);
}
static void prefetch_l2(const void*) {}
static void bulk_prefetch_l2(const void* from, int bytes) {
  if ((u64)from % 16 || bytes % 16) std::abort();
}
template <class T> T load_once(const T* from, bool there = true) { return there ? *from : T{}; }
static void store_once(uint4* to, uint4 v) { *to = v; }
static void fence_mbarrier_init() {}
static void fence_proxy_async() {}
static void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  if ((u64)from % 16) std::abort();
  counted_copy(mine(), to, from, bytes, barrier);
}
static void named_barrier_sync(int barrier, int threads) { in_step(barrier, threads); }
template <int BARRIER, int THREADS> void named_barrier_sync() { in_step(BARRIER, THREADS); }
template <int REGISTERS> void setmaxnreg_inc() {}
template <int REGISTERS> void setmaxnreg_dec() {}

// ---- flags and words ----

static void store_flag(u32 to, u32 flag, int cta) { of_cluster(cta).dynamic[to] = flag; }
template <int FLAGS> u32 load_flags(u32 at) {
  others_first();
  u32 flags = 0;
  std::memcpy(&flags, dynamic_shared() + at, FLAGS);
  return flags;
}
static void store_relaxed(u64* to, u64 word) { *to = word; }
static u64 load_relaxed(const u64* from) {
  others_first();
  return *from;
}
static void add_release(int* counter) { ++*counter; }
static int load_acquire(const int* counter) {
  others_first();
  return *counter;
}

// In four neighbouring lanes, word t of lane q goes to word q of lane t.
static void quad_transpose(u32 (&words)[4]) {
  std::memcpy(warp()[lane()], words, sizeof words);
  warp_in_step();
  for (int t = 0; t < 4; t++) words[t] = warp()[lane() / 4 * 4 + t][lane() % 4];
  warp_in_step();
}

static std::map<Fiber*, int> rounds;  // of a thread's cluster, when it came
static void cluster_arrive() {
  Meeting& m = clusters[cluster_number()];
  rounds[now] = m.round;
  if (++m.arrived == cluster_size * threads) m.arrived = 0, m.round++;
}
static void cluster_arrive_relaxed() { cluster_arrive(); }
static void cluster_wait() {
  while (clusters[cluster_number()].round == rounds[now]) others_first();
}
