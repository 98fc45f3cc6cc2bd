// Y[m, K] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T for up to 64 tokens, few units of act on: one launch.
//
// With so few tokens it is the weights' way from memory that counts. Wg is read whole; of Wu and Wd
// the rows of units that are on for any token, each once. All units on is a good dense layer.
//
//   a cluster: CTAS CTAs, an equal share of the units       a CTA: a part of K, X's part in registers
//
//              rank 0   rank 1  ..                  a tile: 16 rows        tokens
//            +--------+--------+--               +----+----+----+--      +--------+
//     units  |        |        |         16 rows |warp|warp|warp|    x   |   X    |  -->  partial sums
//     of Wg  |  PART  |  PART  |                 | 0  | 1  | 2  |        |        |
//     and Wu |        |        |                 +----+----+----+--      +--------+
//            +--------+--------+--
//
//   warps      what they do                                    wait for
//   0 to 7     products of a tile, each of its columns of K    a full slot of the ring
//   8, 9       sums over warps and ranks; who is on; H         partial sums
//   10         copies: all tiles of Wg, then of Wu the rows    a free slot; flags of the tile
//              that are on, each in its place in its tile;
//              and sends the same rows of Wd into L2
//
//     ring of slots    | Wg 0 | Wg 1 | Wg 2 | Wu 0: 1 of 16 rows | Wu 1: 2 rows | ...
//
//   then, all warps: a cluster has WIDTH columns of Y, a CTA of it a segment of the units that are on
//
//                    WIDTH                          tokens
//                  +-------+                      +--------+
//     rows of      |       |                      |        |  16 units a product, read by columns;
//     Wd.T that    |       |  transposed,  x      |   H    |  sums over warps, then over ranks
//     are on       |       |                      |        |
//                  +-------+                      +--------+
//
// A unit's flag is 0 (not known yet), OFF or ON. In shared memory it says which rows of Wu to copy,
// and in global memory that H of the unit is there: every CTA waits for the flags of all units, and
// lists those that are on. So there is no counter between the two halves, which would cost another
// way to L2 and back. The last CTA to have read the flags makes them 0 again. All CTAs must run at
// the same time: the launch is cooperative.
//
// G is rounded as that of a dense layer is; a unit of a token is on unless G <= 0: NaN is on. U is
// kept in fp32, H rounded once. All sums have a fixed order: the bits are the same at every call.
//
// With GATED = 0, Y = act(X @ Wg.T) @ Wd.T: there is no Wu.
//
// Compiled with -DN, -DK, -DTOKENS=8|16|32|64, -DCTAS=1|2|4 (of a cluster), -DCLUSTERS (of the grid),
// -DSQUARED=0|1 (relu, relu2), -DGATED=0|1 and what hopper.cuh asks for. N and K are multiples of 8.

#include "hopper.cuh"

using u16 = unsigned short;
using u8 = unsigned char;

constexpr int smaller(int a, int b) { return a < b ? a : b; }
constexpr int rounded_up(int a, int to) { return (a + to - 1) / to * to; }

constexpr int WARPS = 8, ADDERS = 2, PRODUCER = WARPS + ADDERS, THREADS = 32 * (PRODUCER + 1);
constexpr int TOKEN_WARPS = TOKENS == 64 ? 2 : 1, K_WARPS = WARPS / TOKEN_WARPS;
constexpr int PART = rounded_up((K + CTAS - 1) / CTAS, 32 * K_WARPS);  // of K, a CTA's
constexpr int COLUMNS = PART / K_WARPS, WIDE = TOKENS / 8 / TOKEN_WARPS;  // a warp's; in products
constexpr int ROWS = 16, TILES = ((N / 8 + CLUSTERS - 1) / CLUSTERS + 1) / 2;  // most of a cluster
constexpr int SHARE = ROWS / CTAS, QUADS = TOKENS / 4;  // units of a tile a rank adds up; of a unit
static_assert(SHARE * QUADS <= 32 * ADDERS, "a thread has one quad of a share");
enum { OFF = 1, ON = 3 };

// ---- shared memory ----
// Rows of a slot are 64 bytes more than a multiple of 128: eight lanes that read two rows read all
// banks. Rows of partial sums are padded likewise.

constexpr int STRIDE = 2 * PART + 64, SLOT_BYTES = ROWS * STRIDE;
constexpr int SUMS = TOKENS == 8 ? 8 : TOKENS + 8;  // floats of a row of partial sums
constexpr int PARTIAL = K_WARPS * ROWS * SUMS;
constexpr int LAG = CTAS / 2, DEPTH = 2 * LAG + 2;  // tiles; see Adder
constexpr int SHARED_BYTES = 226 * 1024, MOST_SLOTS = 16;
constexpr int AT_PARTS = 2 * 4 * PARTIAL;
constexpr int AT_GATES = AT_PARTS + (CTAS == 1 ? 0 : DEPTH * 4 * ROWS * TOKENS);
constexpr int AT_FLAGS = AT_GATES + TILES * 2 * SHARE * TOKENS;
constexpr int AT_BARRIERS = AT_FLAGS + TILES * ROWS;
constexpr int AT_COUNTS = AT_BARRIERS + 8 * (2 * MOST_SLOTS + 4 + DEPTH);
constexpr int AT_RING = rounded_up(AT_COUNTS + 64, 128);
constexpr int RING_BYTES = SHARED_BYTES - AT_RING;
constexpr int SLOTS = smaller(MOST_SLOTS, RING_BYTES / SLOT_BYTES);
static_assert(RING_BYTES > 0 && SLOTS >= 1, "too many units, or too long rows");

extern __shared__ __align__(128) char shared[];

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 full(int slot) const { return at + 8 * slot; }
  __device__ __forceinline__ u32 empty(int slot) const { return at + 8 * (MOST_SLOTS + slot); }
  __device__ __forceinline__ u32 added(int i) const { return at + 8 * (2 * MOST_SLOTS + i); }
  __device__ __forceinline__ u32 summed(int i) const { return added(2 + i); }  // partial sums
  __device__ __forceinline__ u32 parts(int i) const { return added(4 + i); }
  __device__ __forceinline__ void init_all() const {
    for (int i = 0; i < SLOTS; i++) init(full(i), 1), init(empty(i), WARPS);
    for (int i = 0; i < 2; i++) init(summed(i), WARPS), init(added(i), ADDERS);
    for (int i = 0; i < DEPTH; i++) init(parts(i), 1);
  }
};

// ---- PTX ----

__device__ __forceinline__ void inits_are_done() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void multiply(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0,
                                         u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." TYPE "." TYPE ".f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// Four matrices of 8 rows x 16 bytes, each transposed; lane l gives the address of row l % 8 of
// matrix l / 8, and gets the column l / 4 of rows 2 (l % 4) and the next, of each.
__device__ __forceinline__ void columns(u32 (&v)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
__device__ __forceinline__ float wide(u16 value) {
  float f;
#if FP16
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(value));
#else
  f = __uint_as_float((u32)value << 16);
#endif
  return f;
}
// Zeros where there is nothing to copy.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void end_of_copies() {  // of a group
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int LEFT> __device__ __forceinline__ void copies_left() {  // groups
  asm volatile("cp.async.wait_group %0;" :: "n"(LEFT) : "memory");
}
__device__ __forceinline__ void send_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
}
// To the same place in a CTA of the cluster: 16 bytes, counted by its barrier.
__device__ __forceinline__ void push(u32 to, float4 v, u32 barrier, int cta) {
  asm volatile("{\n.reg .b32 there, bar;\nmapa.shared::cluster.u32 there, %0, %6;\n"
               "mapa.shared::cluster.u32 bar, %1, %6;\n"
               "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 "
               "[there], {%2, %3, %4, %5}, [bar];\n}"
               :: "r"(to), "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(cta)
               : "memory");
}
__device__ __forceinline__ void tell(u32 to, u32 flag, int cta) {
  asm volatile("{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, %0, %2;\n"
               "st.relaxed.cluster.shared::cluster.u8 [there], %1;\n}"
               :: "r"(to), "r"(flag), "r"(cta) : "memory");
}
__device__ __forceinline__ u32 told(u32 at) {
  u32 flag;
  asm volatile("ld.relaxed.cluster.shared::cta.u8 %0, [%1];" : "=r"(flag) : "r"(at) : "memory");
  return flag;
}
// What the warp wrote before it was last in step is there for whoever sees the flag.
__device__ __forceinline__ void publish(u8* to, u32 flag) {
  asm volatile("st.release.gpu.global.u8 [%0], %1;" :: "l"(to), "r"(flag) : "memory");
}
__device__ __forceinline__ void publish_alone(u8* to, u32 flag) {
  asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" :: "l"(to), "r"(flag) : "memory");
}
__device__ __forceinline__ u64 seen(const u64* eight_flags) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(eight_flags) : "memory");
  return v;
}
__device__ __forceinline__ float4 floats_of(const float* own, int cta) {  // of the cluster
  float4 v;
  asm volatile("{\n.reg .b32 remote;\nmapa.shared::cluster.u32 remote, %4, %5;\n"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [remote];\n}"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
               : "r"(address_of(own)), "r"(cta) : "memory");
  return v;
}

// ---- whose units ----

struct Work {
  int cluster, rank, first, count, tiles;  // units from `first` on
  __device__ __forceinline__ Work()
      : cluster(blockIdx.x / CTAS), rank(blockIdx.x % CTAS),
        first(8 * (int)((u64)(N / 8) * cluster / CLUSTERS)),
        count(8 * (int)((u64)(N / 8) * (cluster + 1) / CLUSTERS) - first),
        tiles((count + ROWS - 1) / ROWS) {}
  __device__ __forceinline__ int rows(int tile) const { return min(ROWS, count - ROWS * tile); }
  __device__ __forceinline__ int bytes() const {  // of this rank's part of a row
    return 2 * max(0, min(PART, K - rank * PART));
  }
};

// A bit for each unit of a tile that is on, once all are known. For a whole warp.
__device__ __forceinline__ u32 who_is_on(int tile) {
  const u32 at = address_of(shared) + AT_FLAGS + ROWS * tile + threadIdx.x % ROWS;
  u32 flag;
  do flag = told(at);
  while (!flag);
  return __ballot_sync(~0u, flag == ON) & 0xffff;
}

// ---- copies ----

constexpr int FIRST = smaller(2, SLOTS);  // slots filled while the other warps start

struct Producer {
  const Work& work;
  Barriers bars;
  u32 ring;
  __device__ __forceinline__ void bring_rows(int step, int tile, u32 mask, const char* w) const {
    const int slot = step % SLOTS, lane = threadIdx.x % 32, bytes = work.bytes();
    wait(bars.empty(slot), step / SLOTS & 1 ^ 1, "a free slot");
    if (lane == 0) arrive_expecting(bars.full(slot), __popc(mask) * bytes);
    __syncwarp();
    if (bytes && mask >> lane & 1)
      bring(ring + slot * SLOT_BYTES + lane * STRIDE, w + own(tile, lane), bytes, bars.full(slot));
  }
  __device__ __forceinline__ u64 own(int tile, int row) const {  // bytes from the weights' start
    return 2 * ((u64)(work.first + ROWS * tile + row) * K + work.rank * PART);
  }
  __device__ __forceinline__ void bring_gates(int step, int end, const char* wg) const {
    for (; step < end; step++) bring_rows(step, step, (1u << work.rows(step)) - 1, wg);
  }
  __device__ __forceinline__ void bring_rest(const char* wu, const char* wd) const {
    const int lane = threadIdx.x % 32, bytes = work.bytes();
    for (int tile = 0; tile < work.tiles; tile++) {
      const u32 mask = who_is_on(tile);
      if (GATED) bring_rows(work.tiles + tile, tile, mask, wu);
      if (bytes && mask >> lane & 1) send_to_l2(wd + own(tile, lane), bytes);
    }
  }
};

// ---- products of 16 units ----
// A lane has 8 columns of each 32, in A and B alike: a sum may be taken in any order.

using X = uint4[COLUMNS / 32][WIDE];

__device__ __forceinline__ void load_x(X& x, const uint4* from, int rank, int m) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = warp / K_WARPS * WIDE * 8 + lane / 4;
  const int column = rank * PART + warp % K_WARPS * COLUMNS + lane % 4 * 8;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32; i++)
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const bool there = token + 8 * j < m && column + 32 * i < K;
      x[i][j] = there ? __ldg(from + ((token + 8 * j) * K + column + 32 * i) / 8) : uint4{};
    }
}

// Two sums for every eight tokens where there are few: a product waits for the one before.
constexpr int CHAINS = WIDE < 4 ? 2 : 1;

__device__ __forceinline__ void multiply_tile(const X& x, const char* slot, float* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_warp = warp % K_WARPS;
  const char* upper = slot + lane / 4 * STRIDE + 2 * (k_warp * COLUMNS + lane % 4 * 8);
  float d[CHAINS][WIDE][4] = {};
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32; i++) {
    const uint4 a = *(const uint4*)(upper + 64 * i);
    const uint4 b = *(const uint4*)(upper + 64 * i + 8 * STRIDE);
    #pragma unroll
    for (int j = 0; j < WIDE; j++) multiply(d[0][j], a.x, b.x, a.y, b.y, x[i][j].x, x[i][j].y);
    #pragma unroll
    for (int j = 0; j < WIDE; j++)
      multiply(d[CHAINS - 1][j], a.z, b.z, a.w, b.w, x[i][j].z, x[i][j].w);
  }
  float* to = partial + (k_warp * ROWS + lane / 4) * SUMS + warp / K_WARPS * WIDE * 8 + lane % 4 * 2;
  #pragma unroll
  for (int j = 0; j < WIDE; j++) {
    #pragma unroll
    for (int c = 1; c < CHAINS; c++)
      for (int e = 0; e < 4; e++) d[0][j][e] += d[c][j][e];
    *(float2*)(to + 8 * j) = float2{d[0][j][0], d[0][j][1]};
    *(float2*)(to + 8 * j + 8 * SUMS) = float2{d[0][j][2], d[0][j][3]};
  }
}

__device__ __forceinline__ void multiply_tiles(const X& x, const Work& work, Barriers bars) {
  const bool leader = threadIdx.x % 32 == 0;
  int done = 0;  // tiles with sums
  for (int step = 0; step < (GATED ? 2 : 1) * work.tiles; step++) {
    const int slot = step % SLOTS, buffer = done % 2;
    wait(bars.full(slot), step / SLOTS & 1, "a full slot");
    const bool any = step < work.tiles || who_is_on(step - work.tiles);
    if (any) {
      wait(bars.added(buffer), done / 2 & 1 ^ 1, "room for sums");
      multiply_tile(x, shared + AT_RING + slot * SLOT_BYTES, (float*)shared + buffer * PARTIAL);
      done++;
    }
    __syncwarp();
    if (leader) {
      arrive(bars.empty(slot));
      if (any) arrive(bars.summed(buffer));
    }
  }
}

// ---- sums, who is on, H ----
// Each rank sums over its warps, sends a share of the units to each rank, and adds up its own share:
// a thread has four tokens of a unit. Shares are taken LAG tiles after they are sent, so that ranks
// do not wait for each other. When a rank sends tile i it has taken i - LAG - 1, so that all have
// sent that one, and have taken i - 2 LAG - 2: a place is free again after DEPTH tiles.

struct Adder {
  const Work& work;
  Barriers bars;
  u16* h;
  u8* flags;
  int thread, sent, taken;

  __device__ __forceinline__ float4 over_warps(int buffer, int quad) const {
    const float* own = (float*)shared + buffer * PARTIAL + quad / QUADS * SUMS + quad % QUADS * 4;
    float4 sum{};
    #pragma unroll
    for (int w = 0; w < K_WARPS; w++) {
      const float4 v = *(const float4*)(own + w * ROWS * SUMS);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    return sum;
  }
  __device__ __forceinline__ void have_added(int buffer) const {
    __syncwarp();
    if (thread % 32 == 0) arrive(bars.added(buffer));
  }
  __device__ __forceinline__ void send() {
    const int buffer = sent % 2, place = sent % DEPTH;
    wait(bars.summed(buffer), sent / 2 & 1, "sums of warps");
    const u32 to = address_of(shared) + AT_PARTS + 16 * (place * CTAS + work.rank) * SHARE * QUADS;
    #pragma unroll
    for (int quad = thread; quad < ROWS * QUADS; quad += 32 * ADDERS)
      push(to + 16 * (quad % (SHARE * QUADS)), over_warps(buffer, quad), bars.parts(place),
           quad / (SHARE * QUADS));
    have_added(buffer);
    sent++;
  }
  // Four tokens' sums of a unit; nothing from threads beyond the share.
  __device__ __forceinline__ float4 take() {
    float4 sum{};
    const bool mine = thread < SHARE * QUADS;
    if (CTAS == 1) {
      wait(bars.summed(taken % 2), taken / 2 & 1, "sums of warps");
      if (mine) sum = over_warps(taken % 2, thread);
      have_added(taken % 2);
    } else {
      const int place = taken % DEPTH;
      if (thread == 0) arrive_expecting(bars.parts(place), 16 * ROWS * QUADS);
      wait(bars.parts(place), taken / DEPTH & 1, "sums of ranks");
      const float* own = (float*)(shared + AT_PARTS) + 4 * (place * ROWS * QUADS + thread);
      #pragma unroll
      for (int rank = 0; rank < CTAS; rank++)
        if (mine) {
          const float4 v = *(const float4*)(own + 4 * rank * SHARE * QUADS);
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
      __syncwarp();
    }
    taken++;
    return sum;
  }

  __device__ __forceinline__ int unit() const { return work.rank * SHARE + thread / QUADS; }
  __device__ __forceinline__ bool there(int tile) const {
    return thread < SHARE * QUADS && unit() < work.rows(tile);
  }
  __device__ __forceinline__ uint2* gates(int tile) const {
    return (uint2*)(shared + AT_GATES) + tile * SHARE * QUADS + thread;
  }
  __device__ __forceinline__ static u32 hidden(u32 gates, float u0, float u1) {  // of two tokens
    const float a = wide(gates & 0xffff), b = wide(gates >> 16);
    return pair_of(gates & 0xffff ? (SQUARED ? a * a : a) * u0 : 0.f,
                   gates >> 16 ? (SQUARED ? b * b : b) * u1 : 0.f);
  }
  __device__ __forceinline__ void put(int tile, bool is_on, uint2 gates, float4 u) const {
    const int unit_of_all = work.first + ROWS * tile + unit();
    if (is_on)
      *(uint2*)(h + unit_of_all * TOKENS + thread % QUADS * 4) =
          uint2{hidden(gates.x, u.x, u.y), hidden(gates.y, u.z, u.w)};
    __syncwarp();
    if (is_on && thread % QUADS == 0) publish(flags + unit_of_all, ON);
  }
  __device__ __forceinline__ void find(int tile) {
    const float4 g = take();
    const uint2 v{pair_of(g.x, g.y), pair_of(g.z, g.w)}, masks{on(v.x), on(v.y)};
    const u32 lanes = (QUADS == 32 ? ~0u : (1u << QUADS) - 1) << (thread % 32 & ~(QUADS - 1));
    const bool some = there(tile) && (masks.x | masks.y);
    const bool is_on = __ballot_sync(~0u, some) & lanes;
    const uint2 own{v.x & masks.x, v.y & masks.y};
    if (thread % QUADS == 0 && thread < SHARE * QUADS) {
      const u32 at = address_of(shared) + AT_FLAGS + ROWS * tile + unit();
      #pragma unroll
      for (int cta = 0; cta < CTAS; cta++) tell(at, is_on ? ON : OFF, cta);
      if (there(tile) && !is_on)
        publish_alone(flags + work.first + ROWS * tile + unit(), OFF);
    }
    if (GATED && thread < SHARE * QUADS) *gates(tile) = own;
    if (!GATED) put(tile, is_on, own, float4{1, 1, 1, 1});
  }
  __device__ __forceinline__ void finish(int tile) {
    const u32 mask = who_is_on(tile);
    if (!mask) return;
    const float4 u = take();
    const bool mine = thread < SHARE * QUADS;
    put(tile, mine && mask >> unit() & 1, mine ? *gates(tile) : uint2{}, u);
  }
  __device__ __forceinline__ void run() {
    for (int i = 0; i < work.tiles + LAG; i++) {
      if (CTAS > 1 && i < work.tiles) send();
      if (i >= LAG) find(i - LAG);
    }
    for (int i = 0; GATED && i < work.tiles + LAG; i++) {
      if (CTAS > 1 && i < work.tiles && who_is_on(i)) send();
      if (i >= LAG) finish(i - LAG);
    }
  }
};

// ---- the list of units that are on ----

constexpr int LIST_BYTES = rounded_up(2 * N, 128);

__device__ __forceinline__ int sum_before(int own, int& all) {  // over the CTA
  int* counts = (int*)(shared + AT_COUNTS);
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int up_to = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_up_sync(~0u, up_to, by);
    if (lane >= by) up_to += below;
  }
  if (lane == 31) counts[warp] = up_to;
  __syncthreads();
  int before = up_to - own;
  all = 0;
  #pragma unroll
  for (int w = 0; w < THREADS / 32; w++) {
    if (w < warp) before += counts[w];
    all += counts[w];
  }
  __syncthreads();
  return before;
}

// List the units that are on, in ascending order; returns their number.
__device__ __forceinline__ int list_units(u16* list, const u64* flags) {
  int found = 0;
  for (int at = 0; at < N / 8; at += THREADS) {
    const int eight = at + threadIdx.x;
    u64 v = 0;
    if (eight < N / 8) do v = seen(flags + eight);
      while (~v & 0x0101010101010101ull);
    int all, to = found + sum_before(__popcll(v & 0x0202020202020202ull), all);
    #pragma unroll
    for (int i = 0; i < 8; i++)
      if (v >> (8 * i + 1) & 1) list[to++] = 8 * eight + i;
    found += all;
  }
  return found;
}

// The last CTA that has read the flags resets them. For one warp.
__device__ __forceinline__ void reset(u64* flags, int* readers) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  if (lane == 0) before = atomicAdd(readers, 1);
  if (__shfl_sync(~0u, before, 0) != CTAS * CLUSTERS - 1) return;
  for (int i = lane; i < N / 8; i += 32) flags[i] = 0;
  if (lane == 0) *readers = 0;
}

// ---- Y ----

constexpr int width_of_slice(int width) {
  return width * CLUSTERS >= K ? width : width_of_slice(2 * width);
}
constexpr int WIDTH = width_of_slice(16);
constexpr int COLUMN_WARPS = smaller(WARPS, WIDTH / 16), UNIT_WARPS = WARPS / COLUMN_WARPS;
constexpr int TALL = WIDTH / 16 / COLUMN_WARPS;  // products of a warp
constexpr int STEP = WIDTH + TOKENS <= 48 ? 256 : 128;  // units: some 16 KB
constexpr int W_STRIDE = 2 * WIDTH + 16, H_STRIDE = TOKENS == 8 ? 16 : 2 * TOKENS + 16;
constexpr int STAGE_BYTES = STEP * (W_STRIDE + H_STRIDE), OUT_STRIDE = WIDTH + 4;
constexpr int STAGES = smaller(8, (RING_BYTES - LIST_BYTES) / STAGE_BYTES);
static_assert(STAGES >= 2, "too little room for rows of Wd");
static_assert(4 * UNIT_WARPS * TOKENS * OUT_STRIDE <= RING_BYTES, "too little room for Y");

__device__ __forceinline__ void bring_step(u32 to, const u16* list, int units, int column,
                                           const char* wd, const char* h) {
  #pragma unroll 4
  for (int i = threadIdx.x; i < STEP * WIDTH / 8; i += THREADS) {
    const int row = i / (WIDTH / 8), piece = i % (WIDTH / 8), from = column + 8 * piece;
    const bool there = row < units && from < K;
    const u32 at = there ? list[row] * (u32)K + from : 0;
    copy_16(to + row * W_STRIDE + 16 * piece, wd + 2 * (u64)at, there);
  }
  to += STEP * W_STRIDE;
  #pragma unroll 4
  for (int i = threadIdx.x; i < STEP * TOKENS / 8; i += THREADS) {
    const int row = i / (TOKENS / 8), piece = i % (TOKENS / 8);
    const bool there = row < units;
    const u32 at = there ? list[row] * TOKENS + 8 * piece : 0;
    copy_16(to + row * H_STRIDE + 16 * piece, h + 2 * (u64)at, there);
  }
}

using Sums = float[TALL][TOKENS / 8][4];

__device__ __forceinline__ void add_step(Sums& d, u32 stage) {
  constexpr int UNITS = STEP / UNIT_WARPS;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int unit = warp / COLUMN_WARPS * UNITS, column = warp % COLUMN_WARPS * 16 * TALL;
  const u32 w = stage + (unit + lane % 8 + lane / 16 * 8) * W_STRIDE + 2 * (column + lane / 8 % 2 * 8);
  const u32 h = stage + STEP * W_STRIDE + (unit + lane % 16) * H_STRIDE +
                (TOKENS > 8 ? lane / 16 * 16 : 0);
  #pragma unroll
  for (int i = 0; i < UNITS; i += 16) {
    u32 b[(TOKENS + 15) / 16][4], a[4];
    #pragma unroll
    for (int j = 0; j < (TOKENS + 15) / 16; j++) columns(b[j], h + i * H_STRIDE + 32 * j);
    #pragma unroll
    for (int t = 0; t < TALL; t++) {
      columns(a, w + i * W_STRIDE + 32 * t);
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++)
        multiply(d[t][j], a[0], a[1], a[2], a[3], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
  }
}

__device__ __forceinline__ void add_units(Sums& d, u32 stages, const u16* list, int units,
                                          int column, const char* wd, const char* h) {
  const int steps = (units + STEP - 1) / STEP;
  #pragma unroll 1
  for (int step = 1 - STAGES; step < steps; step++) {
    if (step >= 0) {
      copies_left<STAGES - 2>();
      __syncthreads();
    }
    const int ahead = step + STAGES - 1;
    if (ahead < steps)
      bring_step(stages + ahead % STAGES * STAGE_BYTES, list + ahead * STEP, units - ahead * STEP,
                 column, wd, h);
    end_of_copies();
    if (step >= 0 && threadIdx.x < 32 * WARPS) add_step(d, stages + step % STAGES * STAGE_BYTES);
  }
}

// Add up the warps' and ranks' sums, by way of shared memory: rows of tokens.
__device__ __forceinline__ void put_out(const Sums& d, float* out, u16* y, int rank, int column,
                                        int m) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();  // the stages have been read: their place is free
  if (warp < WARPS) {
    float* own = out + (warp / COLUMN_WARPS * TOKENS + lane % 4 * 2) * OUT_STRIDE +
                 warp % COLUMN_WARPS * 16 * TALL + lane / 4;
    #pragma unroll
    for (int t = 0; t < TALL; t++)
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
          own[(8 * j + e % 2) * OUT_STRIDE + 16 * t + e / 2 * 8] = d[t][j][e];
  }
  if (CTAS > 1) cluster_in_step();
  else __syncthreads();
  for (int i = rank * THREADS + threadIdx.x; i < m * WIDTH / 4; i += CTAS * THREADS) {
    const int token = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
    float4 sum{};
    #pragma unroll
    for (int from = 0; from < CTAS * UNIT_WARPS; from++) {
      const float* own = out + (from % UNIT_WARPS * TOKENS + token) * OUT_STRIDE + at;
      const float4 v = CTAS > 1 ? floats_of(own, from / UNIT_WARPS) : *(const float4*)own;
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    if (column + at < K)
      *(uint2*)(y + (u64)token * K + column + at) =
          uint2{pair_of(sum.x, sum.y), pair_of(sum.z, sum.w)};
  }
  if (CTAS > 1) cluster_in_step();  // no CTA may end before all have read its sums
}

// ---- the kernel ----

__device__ __forceinline__ void zero_what_is_not_copied(const Work& work) {
  for (int i = threadIdx.x; i < TILES * ROWS; i += THREADS) shared[AT_FLAGS + i] = 0;
  if (K == CTAS * PART) return;
  const int first = work.bytes() / 16, pieces = PART / 8 - first;
  for (int i = threadIdx.x; i < SLOTS * ROWS * pieces; i += THREADS)
    *(uint4*)(shared + AT_RING + i / pieces * STRIDE + 16 * (first + i % pieces)) = uint4{};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CTAS > 1
__cluster_dims__(CTAS)
#endif
multiply_few(const char* x, const char* wg, const char* wu, const char* wd, u16* y, u16* h,
             u64* flags, int* readers, int m) {
  const Work work;
  const Barriers bars{address_of(shared) + AT_BARRIERS};
  const int warp = threadIdx.x / 32;
  const Producer producer{work, bars, address_of(shared) + AT_RING};
  if (warp == PRODUCER) {  // at once: nobody else writes what is copied
    if (threadIdx.x % 32 == 0) bars.init_all(), inits_are_done();
    __syncwarp();
    producer.bring_gates(0, min(FIRST, work.tiles), wg);
  }
  zero_what_is_not_copied(work);
  if (CTAS > 1) cluster_in_step();
  else __syncthreads();
  if (warp < WARPS) {
    X own;
    load_x(own, (const uint4*)x, work.rank, m);
    multiply_tiles(own, work, bars);
  } else if (warp < PRODUCER) {
    Adder{work, bars, h, (u8*)flags, (int)threadIdx.x - 32 * WARPS, 0, 0}.run();
  } else {
    producer.bring_gates(FIRST, work.tiles, wg);
    producer.bring_rest(wu, wd);
  }
  __syncthreads();  // the ring is free

  u16* list = (u16*)(shared + AT_RING);
  const int found = list_units(list, flags), column = work.cluster * WIDTH;
  __syncthreads();
  if (warp == PRODUCER) reset(flags, readers);
  const int first = (u64)found * work.rank / CTAS, end = (u64)found * (work.rank + 1) / CTAS;
  Sums sums = {};
  add_units(sums, address_of(shared) + AT_RING + LIST_BYTES, list + first, end - first, column, wd,
            (const char*)h);
  put_out(sums, (float*)(shared + AT_RING), y, work.rank, column, m);
}
