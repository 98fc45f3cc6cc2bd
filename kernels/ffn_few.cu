// Y[m, K] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T: up to 64 tokens, few units of act on, one launch.
//
// With so few tokens the weights' way from memory is what counts. Wg is read whole; of Wu and Wd
// the rows of units that are on for any token, each once. With all units on it is a dense layer.
//
//   a cluster: an equal share of the units          a CTA (a rank): PART of K, and that of X
//
//               rank 0   rank 1 ..                 PART: warps 0 to 7          tokens
//             +--------+--------+--              +----+----+----+----+        +------+
//     units   |        |        |       a tile:  |    |    |    |    |   x    |  X   |   partial
//     of Wg   |  PART  |  PART  |       16 rows  |    |    |    |    |        |      |   sums
//     and Wu  |        |        |                +----+----+----+----+        +------+
//             +--------+--------+--                in shared memory         in registers
//
//   warps     what they do                                      wait for
//   0 to 7    products of a tile, each of its columns of K      a full slot of the ring
//   8, 9      sums over warps and ranks; who is on; H           partial sums
//   10        copies: all tiles of Wg; then the rows of Wu      a free slot; a tile's flags
//             that are on, close together, and the same
//             rows of Wd into L2
//
//     ring of slots   | Wg 0 | Wg 1 | Wg 2 | Wu: units 5, 9, 30 | ...
//
//   then all warps: a cluster has WIDTH columns of Y, a rank a segment of the units that are on
//
//                     WIDTH                        tokens
//                   +-------+                     +------+
//     rows of Wd.T  |       |                     |      |    16 units a product, both read by
//     that are on   |       |  transposed,   x    |  H   |    columns; sums over warps, then ranks
//                   +-------+                     +------+
//
// Who is on goes through shared memory, a byte for a unit and rank: 0 until it is known. When a CTA
// has written its part of H it publishes a word of the cluster's units, 48 bits and a mark. Who has
// seen the words of all CTAs knows all units that are on, and that H is there: a counter between
// the two halves would cost another way to L2 and back. The last CTA to have read the words makes
// them 0 again. All CTAs must run at the same time: the launch is cooperative.
//
// G is rounded as that of a dense layer is; a unit of a token is on unless G <= 0: NaN is on. U is
// kept in fp32, H rounded once. All sums have a fixed order: the bits are the same at every call.
//
// With GATED = 0, Y = act(X @ Wg.T) @ Wd.T: there is no Wu.
//
// Compiled with -DN, -DK, -DTOKENS=8|16|32|64, -DCTAS=1|2|4 of a cluster, -DCLUSTERS of the grid,
// -DSQUARED=0|1 (relu, relu2), -DGATED=0|1 and what hopper.cuh asks for. N and K: multiples of 8.

#include "hopper.cuh"

using u16 = unsigned short;

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int rounded_up(int a, int to) { return (a + to - 1) / to * to; }

constexpr int WARPS = 8, ADDERS = 2, PRODUCER = WARPS + ADDERS, THREADS = 32 * (PRODUCER + 1);
constexpr int TOKEN_WARPS = TOKENS == 64 ? 2 : 1, K_WARPS = WARPS / TOKEN_WARPS;
constexpr int PART = rounded_up((K + CTAS - 1) / CTAS, 32 * K_WARPS);  // of K, a CTA's
constexpr int COLUMNS = PART / K_WARPS, WIDE = TOKENS / 8 / TOKEN_WARPS;  // a warp's; in products
constexpr int ROWS = 16, TILES = ((N / 8 + CLUSTERS - 1) / CLUSTERS + 1) / 2;  // most of a cluster
constexpr int QUADS = TOKENS / 4, OWN_QUADS = QUADS / CTAS;  // of a unit's tokens; a rank's
constexpr int SHARE = ROWS * OWN_QUADS;  // of a tile, a rank's: a quad a thread
static_assert(QUADS % CTAS == 0 && SHARE <= 32 * ADDERS, "a thread has one quad");
enum : u32 { OFF = 1, ON = 3, EVERY_RANK = 0x01010101u >> 8 * (4 - CTAS) };

// ---- shared memory ----
// Rows of a slot are 16 bytes more than a multiple of 128, those of partial sums 32: so that eight
// and four of them, which are read and written at once, are in different banks.

constexpr int STRIDE = 2 * PART + 16, SLOT_BYTES = ROWS * STRIDE;
constexpr int SUMS = TOKENS == 8 ? 8 : TOKENS + 8;  // floats of a row of partial sums
constexpr int PARTIAL = K_WARPS * ROWS * SUMS;
constexpr int LAG = CTAS / 2, DEPTH = 2 * LAG + 2;  // tiles; see Adder
constexpr int SHARED_BYTES = 226 * 1024, MOST_SLOTS = 16;
constexpr int AT_PARTS = 2 * 4 * PARTIAL;
constexpr int AT_GATES = AT_PARTS + (CTAS == 1 ? 0 : DEPTH * 4 * ROWS * TOKENS);
constexpr int AT_UNITS = AT_GATES + TILES * 8 * SHARE;
constexpr int AT_FLAGS = AT_UNITS + TILES * 2 * ROWS;
constexpr int AT_BARRIERS = AT_FLAGS + TILES * ROWS * CTAS;
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

#if CTAS == 1
#define BITS 8
#elif CTAS == 2
#define BITS 16
#else
#define BITS 32
#endif

__device__ __forceinline__ void expect(u32 barrier, int bytes) {  // without an arrival
  asm volatile("mbarrier.expect_tx.relaxed.cta.shared::cta.b64 [%0], %1;"
               :: "r"(barrier), "r"(bytes) : "memory");
}
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
// Four matrices of 8 rows x 16 bytes; lane l gives the address of row l % 8 of matrix l / 8, and
// gets word l % 4 of row l / 4 of each.
__device__ __forceinline__ void matrices(u32 (&v)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3]) : "r"(address) : "memory");
}
// Each transposed: column l / 4 of rows 2 (l % 4) and the next.
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
__device__ __forceinline__ void adders_in_step() {
  asm volatile("bar.sync 1, %0;" :: "n"(32 * ADDERS) : "memory");
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
__device__ __forceinline__ u32 told(u32 at) {  // a byte of each rank
  u32 flags;
  asm volatile("ld.relaxed.cluster.shared::cta.u" TEXT(BITS) " %0, [%1];"
               : "=r"(flags) : "r"(at) : "memory");
  return flags;
}
// What the CTA wrote before it was last in step is there for whoever sees the word.
__device__ __forceinline__ void publish(u64* to, u64 word) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ u64 seen(const u64* word) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
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

__device__ __forceinline__ int first_unit(int cluster) {
  return 8 * (int)((u64)(N / 8) * cluster / CLUSTERS);
}

struct Work {
  int cluster, rank, first, count, tiles;  // units from `first` on
  __device__ __forceinline__ Work()
      : cluster(blockIdx.x / CTAS), rank(blockIdx.x % CTAS),
        first(first_unit(cluster)), count(first_unit(cluster + 1) - first),
        tiles((count + ROWS - 1) / ROWS) {}
  __device__ __forceinline__ int rows(int tile) const { return min(ROWS, count - ROWS * tile); }
  __device__ __forceinline__ int bytes() const {  // of this rank's part of a row
    return 2 * max(0, min(PART, K - rank * PART));
  }
};

// A bit for each unit of a tile that is on, once all ranks have told. For a whole warp.
__device__ __forceinline__ u32 who_is_on(int tile) {
  const u32 at = address_of(shared) + AT_FLAGS + (ROWS * tile + threadIdx.x % ROWS) * CTAS;
  u32 flags;
  do flags = told(at);
  while (~flags & EVERY_RANK);
  return __ballot_sync(~0u, flags & EVERY_RANK << 1) & 0xffff;
}
__device__ __forceinline__ int count_on(int tiles) {
  int found = 0;
  for (int tile = 0; tile < tiles; tile++) found += __popc(who_is_on(tile));
  return found;
}
__device__ __forceinline__ u16* units_on() { return (u16*)(shared + AT_UNITS); }  // of the cluster

// ---- copies ----

constexpr int FIRST = smaller(2, SLOTS);  // slots filled while the other warps start

struct Producer {
  const Work& work;
  Barriers bars;
  u32 ring;
  __device__ __forceinline__ u64 own(int unit) const {  // bytes from the weights' start
    return 2 * ((u64)(work.first + unit) * K + work.rank * PART);
  }
  __device__ __forceinline__ void wait_free(int step) const {
    wait(bars.empty(step % SLOTS), step / SLOTS & 1 ^ 1, "a free slot");
  }
  __device__ __forceinline__ void bring_row(int step, int row, const char* from) const {
    const int slot = step % SLOTS, bytes = work.bytes();
    if (bytes) bring(ring + slot * SLOT_BYTES + row * STRIDE, from, bytes, bars.full(slot));
  }
  __device__ __forceinline__ void bring_gates(int tile, int end, const char* wg) const {
    const int lane = threadIdx.x % 32;
    for (; tile < end; tile++) {
      const int rows = work.rows(tile);
      wait_free(tile);
      if (lane == 0) arrive_expecting(bars.full(tile % SLOTS), rows * work.bytes());
      __syncwarp();
      if (lane < rows) bring_row(tile, lane, wg + own(ROWS * tile + lane));
    }
  }
  // Units that are on, in ascending order, are rows of the steps after the gates'. A step is open
  // until it has 16 rows, or there are no more: then its slot's barrier has its one arrival.
  __device__ __forceinline__ void bring_ups(const char* wu, const char* wd) const {
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int tile = 0; tile < work.tiles; tile++) {
      const u32 mask = who_is_on(tile);
      const bool is_on = mask >> lane & 1;
      const int unit = ROWS * tile + lane, row = before + __popc(mask & ((1u << lane) - 1));
      const int found = before + __popc(mask);
      if (is_on) units_on()[row] = unit;
      for (int up = before / ROWS; GATED && up * ROWS < found; up++) {
        const int step = work.tiles + up, first = max(before, up * ROWS);
        const u32 full = bars.full(step % SLOTS);
        if (first % ROWS == 0) wait_free(step);
        if (lane == 0) expect(full, (min(found, up * ROWS + ROWS) - first) * work.bytes());
        __syncwarp();
        if (is_on && row / ROWS == up) bring_row(step, row % ROWS, wu + own(unit));
        if (lane == 0 && found >= up * ROWS + ROWS) arrive(full);
      }
      if (is_on && work.bytes()) send_to_l2(wd + own(unit), work.bytes());
      before = found;
    }
    if (GATED && before % ROWS && lane == 0)
      arrive(bars.full((work.tiles + before / ROWS) % SLOTS));
  }
};

// ---- products of 16 units ----

using X = u32[COLUMNS / 32][WIDE][4];  // words of B: four of each 32 columns and eight tokens

// Asked for before any weight: behind 190 KB of those, X would come last.
__device__ __forceinline__ void ask_for_x(X& x, const uint4* from, int rank, int m) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = warp / K_WARPS * WIDE * 8 + lane / 4;
  const int column = rank * PART + warp % K_WARPS * COLUMNS + lane % 4 * 8;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32; i++)
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const bool there = token + 8 * j < m && column + 32 * i < K;
      const int at = (token + 8 * j) * (K / 8) + (column + 32 * i) / 8;
      *(uint4*)x[i][j] = there ? __ldg(from + at) : uint4{};
    }
}

// Two sums for every eight tokens where there are few: a product waits for the one before.
constexpr int CHAINS = WIDE < 4 ? 2 : 1;

__device__ __forceinline__ void multiply_tile(const X& x, u32 slot, float* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_warp = warp % K_WARPS;
  const u32 own = slot + lane % 16 * STRIDE + 2 * (k_warp * COLUMNS + lane / 16 * 8);
  float d[CHAINS][WIDE][4] = {};
  #pragma unroll
  for (int i = 0; i < COLUMNS / 16; i++) {
    u32 a[4];
    matrices(a, own + 32 * i);
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const u32* b = x[i / 2][j] + i % 2 * 2;
      multiply(d[i % CHAINS][j], a[0], a[1], a[2], a[3], b[0], b[1]);
    }
  }
  const int token = warp / K_WARPS * WIDE * 8 + lane % 4 * 2;
  float* to = partial + (k_warp * ROWS + lane / 4) * SUMS + token;
  #pragma unroll
  for (int j = 0; j < WIDE; j++) {
    #pragma unroll
    for (int c = 1; c < CHAINS; c++)
      for (int e = 0; e < 4; e++) d[0][j][e] += d[c][j][e];
    *(float2*)(to + 8 * j) = float2{d[0][j][0], d[0][j][1]};
    *(float2*)(to + 8 * j + 8 * SUMS) = float2{d[0][j][2], d[0][j][3]};
  }
}

__device__ __forceinline__ void multiply_tiles(X& x, const Work& work, Barriers bars) {
  int steps = work.tiles;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32 * WIDE; i++) exchange(x[i / WIDE][i % WIDE]);
  for (int step = 0; step < steps; step++) {
    wait(bars.full(step % SLOTS), step / SLOTS & 1, "a full slot");
    wait(bars.added(step % 2), step / 2 & 1 ^ 1, "room for sums");
    multiply_tile(x, address_of(shared) + AT_RING + step % SLOTS * SLOT_BYTES,
                  (float*)shared + step % 2 * PARTIAL);
    asm volatile("" : "+r"(step));  // addresses are computed again: kept, they would be spilled
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(bars.empty(step % SLOTS)), arrive(bars.summed(step % 2));
    if (GATED && step == work.tiles - 1) steps += (count_on(work.tiles) + ROWS - 1) / ROWS;
  }
}

// ---- sums, who is on, H ----
// Each rank sums over its warps, sends each rank the sums of its tokens, and adds up its own: a
// thread has four tokens (a quad) of a unit. Sums are taken LAG tiles after they are sent, so that
// ranks do not wait for each other. When a rank sends tile i it has taken i - LAG - 1; so all have
// sent that one, and have taken i - 2 LAG - 2: a place is free again after DEPTH tiles.

struct Adder {
  const Work& work;
  Barriers bars;
  u16* h;
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
    const u32 to = address_of(shared) + AT_PARTS + 16 * (place * CTAS + work.rank) * SHARE;
    #pragma unroll
    for (int i = thread; i < ROWS * QUADS; i += 32 * ADDERS) {
      const int row = i / QUADS, quad = i % QUADS;
      push(to + 16 * (row * OWN_QUADS + quad % OWN_QUADS), over_warps(buffer, i),
           bars.parts(place), quad / OWN_QUADS);
    }
    have_added(buffer);
    sent++;
  }
  // Four tokens' sums of a unit; nothing from threads beyond the share.
  __device__ __forceinline__ float4 take() {
    float4 sum{};
    if (CTAS == 1) {
      wait(bars.summed(taken % 2), taken / 2 & 1, "sums of warps");
      if (thread < SHARE) sum = over_warps(taken % 2, thread);
      have_added(taken % 2);
    } else {
      const int place = taken % DEPTH;
      if (thread == 0) arrive_expecting(bars.parts(place), 16 * ROWS * QUADS);
      wait(bars.parts(place), taken / DEPTH & 1, "sums of ranks");
      const float* own = (float*)(shared + AT_PARTS) + 4 * (place * ROWS * QUADS + thread);
      #pragma unroll
      for (int rank = 0; rank < CTAS; rank++)
        if (thread < SHARE) {
          const float4 v = *(const float4*)(own + 4 * rank * SHARE);
          sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
      __syncwarp();
    }
    taken++;
    return sum;
  }

  __device__ __forceinline__ uint2* gates(int unit) const {
    return (uint2*)(shared + AT_GATES) + unit * OWN_QUADS + thread % OWN_QUADS;
  }
  __device__ __forceinline__ static u32 hidden(u32 gates, float u0, float u1) {  // of two tokens
    const float a = wide(gates & 0xffff), b = wide(gates >> 16);
    return pair_of(gates & 0xffff ? (SQUARED ? a * a : a) * u0 : 0.f,
                   gates >> 16 ? (SQUARED ? b * b : b) * u1 : 0.f);
  }
  __device__ __forceinline__ void put(int unit, uint2 gates, float4 u) const {
    const int token = 4 * (work.rank * OWN_QUADS + thread % OWN_QUADS);
    *(uint2*)(h + (work.first + unit) * TOKENS + token) =
        uint2{hidden(gates.x, u.x, u.y), hidden(gates.y, u.z, u.w)};
  }
  __device__ __forceinline__ void find(int tile, float4 g) const {
    const int row = thread / OWN_QUADS, unit = ROWS * tile + row;
    const bool there = thread < SHARE && row < work.rows(tile);
    const uint2 v{pair_of(g.x, g.y), pair_of(g.z, g.w)}, masks{on(v.x), on(v.y)};
    const uint2 own{v.x & masks.x, v.y & masks.y};
    if (GATED && there) *gates(unit) = own;
    if (!GATED && there) put(unit, own, float4{1, 1, 1, 1});
    const u32 all = __ballot_sync(~0u, there && (masks.x | masks.y));
    const u32 lanes = (1u << OWN_QUADS) - 1 << (thread % 32 / OWN_QUADS * OWN_QUADS);
    if (thread < SHARE && thread % OWN_QUADS == 0)
      for (int cta = 0; cta < CTAS; cta++)
        tell(address_of(shared) + AT_FLAGS + unit * CTAS + work.rank, all & lanes ? ON : OFF, cta);
  }
  __device__ __forceinline__ void finish(int row, float4 u) const {
    const int unit = units_on()[row];
    put(unit, *gates(unit), u);
  }
  __device__ __forceinline__ void run() {
    int tiles = work.tiles, found = 0;
    #pragma unroll 1
    for (int up = 0; up <= GATED; up++) {
      #pragma unroll 1
      for (int i = 0; i < tiles + LAG; i++) {
        if (CTAS > 1 && i < tiles) send();
        if (i < LAG) continue;
        const float4 sum = take();
        const int row = ROWS * (i - LAG) + thread / OWN_QUADS;
        if (!up) find(i - LAG, sum);
        else if (thread < SHARE && row < found) finish(row, sum);
        __syncwarp();
      }
      if (GATED && !up) {
        adders_in_step();  // who finishes a unit may not be who found it
        found = count_on(work.tiles), tiles = (found + ROWS - 1) / ROWS;
      }
    }
  }
};

// ---- the list of units that are on ----

constexpr int TILES_OF_WORD = 3, WORDS_NEEDED = (TILES + TILES_OF_WORD - 1) / TILES_OF_WORD;
constexpr int WORDS = WORDS_NEEDED < CTAS ? CTAS : WORDS_NEEDED;  // of a cluster
constexpr int LIST_BYTES = rounded_up(2 * N, 128);
constexpr u64 THERE = 1ull << 63;

// Publish this CTA's words: all of H that it writes is written.
__device__ __forceinline__ void publish_words(u64* words, const Work& work) {
  const int warp = threadIdx.x / 32;
  for (int i = work.rank + CTAS * warp; i < WORDS; i += CTAS * (PRODUCER + 1)) {
    u64 bits = THERE;
    for (int j = 0; j < TILES_OF_WORD; j++) {
      const int tile = TILES_OF_WORD * i + j;
      if (tile < work.tiles) bits |= (u64)who_is_on(tile) << ROWS * j;
    }
    if (threadIdx.x % 32 == 0) publish(words + WORDS * work.cluster + i, bits);
  }
}

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
__device__ __forceinline__ int list_units(u16* list, const u64* words) {
  int found = 0;
  for (int first = 0; first < WORDS * CLUSTERS; first += THREADS) {
    const int at = first + threadIdx.x, cluster = at / WORDS;
    u64 bits = THERE;
    if (at < WORDS * CLUSTERS) do bits = seen(words + at);
      while (!(bits & THERE));
    bits &= ~THERE;
    int all, to = found + sum_before(__popcll(bits), all);
    const int unit = first_unit(cluster) + TILES_OF_WORD * ROWS * (at % WORDS);
    for (; bits; bits &= bits - 1) list[to++] = unit + __ffsll(bits) - 1;
    found += all;
  }
  return found;
}

// The last CTA that has read the words resets them. For one warp.
__device__ __forceinline__ void reset(u64* words, int* readers) {
  const int lane = threadIdx.x % 32;
  int before = 0;
  if (lane == 0) before = atomicAdd(readers, 1);
  if (__shfl_sync(~0u, before, 0) != CTAS * CLUSTERS - 1) return;
  for (int i = lane; i < WORDS * CLUSTERS; i += 32) words[i] = 0;
  if (lane == 0) *readers = 0;
}

// ---- Y ----

__device__ constexpr int width_of_slice(int width) {
  return width * CLUSTERS >= K ? width : width_of_slice(2 * width);
}
constexpr int WIDTH = width_of_slice(16);
constexpr int COLUMN_WARPS = smaller(WARPS, WIDTH / 16), UNIT_WARPS = WARPS / COLUMN_WARPS;
constexpr int TALL = WIDTH / 16 / COLUMN_WARPS;  // products of a warp
constexpr int STEP = WIDTH + TOKENS <= 48 ? 256 : WIDTH + TOKENS <= 128 ? 128 : 64;  // units
static_assert(STEP % (16 * UNIT_WARPS) == 0, "a warp has whole products");
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
  const u32 w = stage + (unit + lane % 8 + lane / 16 * 8) * W_STRIDE +
                2 * (column + lane / 8 % 2 * 8);
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
  for (int i = threadIdx.x; i < TILES * ROWS * CTAS; i += THREADS)
    shared[AT_FLAGS + i] = 0;
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
             u64* words, int* readers, int m) {
  const Work work;
  const Barriers bars{address_of(shared) + AT_BARRIERS};
  const int warp = threadIdx.x / 32;
  const Producer producer{work, bars, address_of(shared) + AT_RING};
  X own;
  if (warp < WARPS) ask_for_x(own, (const uint4*)x, work.rank, m);
  if (warp == PRODUCER) {  // at once: nobody else writes what is copied
    if (threadIdx.x % 32 == 0) bars.init_all(), inits_are_done(), show_to_copies();
    __syncwarp();
    producer.bring_gates(0, min(FIRST, work.tiles), wg);
  }
  zero_what_is_not_copied(work);
  if (CTAS > 1) cluster_in_step();
  else __syncthreads();
  if (warp < WARPS) {
    multiply_tiles(own, work, bars);
  } else if (warp < PRODUCER) {
    Adder{work, bars, h, (int)threadIdx.x - 32 * WARPS, 0, 0}.run();
  } else {
    producer.bring_gates(FIRST, work.tiles, wg);
    producer.bring_ups(wu, wd);
  }
  __syncthreads();  // H is written, and the ring is free
  publish_words(words, work);

  u16* list = (u16*)(shared + AT_RING);
  const int found = list_units(list, words), column = work.cluster * WIDTH;
  __syncthreads();
  if (warp == PRODUCER) reset(words, readers);
  const int first = (u64)found * work.rank / CTAS, end = (u64)found * (work.rank + 1) / CTAS;
  Sums sums = {};
  add_units(sums, address_of(shared) + AT_RING + LIST_BYTES, list + first, end - first, column, wd,
            (const char*)h);
  put_out(sums, (float*)(shared + AT_RING), y, work.rank, column, m);
}
