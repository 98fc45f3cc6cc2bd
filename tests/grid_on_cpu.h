// What ffn_few.cu asks for beyond mma_on_cpu.h: copies that mbarriers count, flags. All of the
// grid's CTAs run together. A copy lands at once or, with LATE, when its barrier is waited for.

#include "mma_on_cpu.h"

using std::max;

static int __popc(u32 v) { return __builtin_popcount(v); }
static int __popcll(u64 v) { return __builtin_popcountll(v); }
static int __ffs(u32 v) { return __builtin_ffs(v); }
static u32 __ballot_sync(u32, bool own) {
  warp()[lane()][0] = own;
  warp_in_step();
  u32 all = 0;
  for (int i = 0; i < 32; i++) all |= (warp()[i][0] & 1) << i;
  warp_in_step();
  return all;
}
static u32 __shfl_sync(u32, u32 value, int from) {
  warp()[lane()][0] = value;
  warp_in_step();
  const u32 got = warp()[from][0];
  warp_in_step();
  return got;
}

static uint4 __ldcg(const uint4* p) { return *p; }

// ---- copies that barriers count ----

static void inits_are_done() {}
static void fence_proxy_async() {}
static void bulk_load(u32 to, const void* from, int bytes, u32 barrier) {
  if ((u64)from % 16) std::abort();
  counted_copy(mine(), to, from, bytes, barrier);
}

// ---- flags and words ----

static void tell(u32 to, u32 flag, int cta) { of_cluster(cta).dynamic[to] = flag; }
static u32 told(u32 at) {
  others_first();
  u32 flags = 0;
  std::memcpy(&flags, dynamic_shared() + at, CTAS);
  return flags;
}
static void publish(u64* to, u64 word) { *to = word; }
static u64 seen(const u64* word) {
  others_first();
  return *word;
}
static void count_me(int* counter) { ++*counter; }
static int counted(const int* counter) {
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
static void adders_in_step() { in_step(1, 64); }
static void listers_in_step() { in_step(2, 288); }
static void send_to_l2(const void* from, int bytes) {
  if ((u64)from % 16 || bytes % 16) std::abort();
}
