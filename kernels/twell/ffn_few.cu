// Y[m, K] = (act(X @ Wg.T) * (X @ Wu.T)) @ Wd.T for up to 64 tokens, few active units, one launch.
//
// With so few tokens, reading the weights takes most of the time. The kernel reads all of Wg, and
// once each row of Wu and Wd whose unit is active for any token. With all units active it reads as
// much as a dense layer. Active units and H are the column vectors of formats/cvse.py, with all
// tokens of the call in one vector; bits instead of a list mark the active units.
//
//   a cluster: an equal share of the units       a CTA (rank): PART columns of K, and of X
//
//               rank 0   rank 1 ..                 PART: warps 0 to 7          tokens
//             +--------+--------+--              +----+----+----+----+        +------+
//     units   |        |        |       a tile:  |    |    |    |    |   x    |  X   |   partial
//     of Wg   |  PART  |  PART  |       16 rows  |    |    |    |    |        |      |   sums
//     and Wu  |        |        |                +----+----+----+----+        +------+
//             +--------+--------+--                in shared memory         in registers
//
//   warps     role                                              wait for
//   0 to 7    MMA: the products of a tile; each warp takes      a full slot
//             other columns of K
//   8         producer: copies all tiles of Wg, then the        a free slot; a tile's flags
//             active rows of Wu, packed into tiles;
//             prefetches the same rows of Wd into L2;
//             counts the active units of all CTAs               the words of all CTAs
//   9, 10     reducers: sum over warps and ranks; determine     partial sums
//             the active units; compute H
//
//     ring of slots   | Wg 0 | Wg 1 | Wg 2 | Wu: units 5, 9, 30 | ...
//
//   The MMA warps load X.
//
//   Then SPLIT CTAs share WIDTH columns of Y. Each takes a segment of the active units, in
//   ascending order. Warps 0 to 8 list the segment. Warps 0 to 7 take UNITS of it in turn. Each
//   warp has separate stages, so that no warp waits for another:
//
//                     WIDTH                        tokens
//                   +-------+                     +------+
//     active rows   |       |                     |      |    16 units per product, both read by
//     of Wd.T       |       |  transposed,   x    |  H   |    columns; sums over warps, then CTAs
//                   +-------+                     +------+
//
// The active units are exchanged in two steps. Within a cluster, shared memory holds a byte for
// each unit and rank, which is 0 until the unit's state is known. Between clusters, global memory
// holds words, each with 48 units of a cluster and a mark that it is published. Warp 8 counts the
// units of all words while Wu is still being copied. Therefore, after a CTA's last product, each
// thread can list the units of half a word, and the first rows of Wd are requested. A counter of
// CTAs shows when all of H is written. The last CTA that reads the full count resets words and
// counters to 0. All CTAs must run at the same time, so the launch is cooperative.
//
// G is rounded as in a dense layer. A unit of a token is active unless G <= 0, so NaN is active. U
// stays in fp32, and H is rounded once. All sums have a fixed order, so every call returns the same
// bits.
//
// With GATED = 0, there is no Wu: Y = act(X @ Wg.T) @ Wd.T.
//
// Compiled with -DN and -DK (multiples of 8), -DTOKENS=8|16|32|64, -DCTAS=1|2|4 that share K,
// -DCLUSTERS of CTAS each, -DSPLIT (CTAS; or 2 if CTAS is 1: then a hardware cluster holds two of
// these clusters), -DSQUARED=0|1 (relu, relu2), -DGATED=0|1, -DFP16=0|1. Loops that run once or
// twice are not unrolled, because the 8 KB of instructions come from memory too.

#include "ffn_ptx.cuh"

using u16 = unsigned short;

__device__ constexpr int min_of(int a, int b) { return a < b ? a : b; }
__device__ constexpr int max_of(int a, int b) { return a > b ? a : b; }
__device__ constexpr int round_up(int a, int to) { return (a + to - 1) / to * to; }

constexpr int MMA_WARPS = 8, PRODUCER = MMA_WARPS, FIRST_REDUCER = 32 * (PRODUCER + 1);
constexpr int REDUCE_WARPS = 2, REDUCE_THREADS = 32 * REDUCE_WARPS;
constexpr int LIST_THREADS = FIRST_REDUCER, THREADS = FIRST_REDUCER + REDUCE_THREADS;
constexpr int TOKEN_WARPS = TOKENS >= 32 ? 2 : 1, K_WARPS = MMA_WARPS / TOKEN_WARPS;
constexpr int PART = round_up((K + CTAS - 1) / CTAS, 32 * K_WARPS);  // columns per CTA
constexpr int COLUMNS = PART / K_WARPS, WIDE = TOKENS / 8 / TOKEN_WARPS;  // per warp; its products
constexpr int ROWS = 16, TILES = ((N / 8 + CLUSTERS - 1) / CLUSTERS + 1) / 2;  // at most
constexpr int QUADS = TOKENS / 4, OWN_QUADS = QUADS / CTAS;  // a quad: four tokens of a unit
constexpr int SHARE = ROWS * OWN_QUADS;  // quads per tile and rank
constexpr int EACH = (SHARE + REDUCE_THREADS - 1) / REDUCE_THREADS;  // quads per thread
static_assert(QUADS % CTAS == 0 && 32 % OWN_QUADS == 0, "a warp has all quads of a unit");
constexpr int TILES_OF_WORD = 3, HALF = TILES_OF_WORD * ROWS / 2;  // units in half a word
constexpr int WORDS = (TILES + TILES_OF_WORD - 1) / TILES_OF_WORD, ALL_WORDS = WORDS * CLUSTERS;
enum : u32 { OFF = 1, ON = 3, EVERY_RANK = 0x01010101u >> 8 * (4 - CTAS) };
constexpr u64 PUBLISHED = 1ull << 63;  // the mark in a word

constexpr int SLICES = CTAS * CLUSTERS / SPLIT;  // column slices of Y
static_assert(SPLIT % CTAS == 0 && CTAS * CLUSTERS % SPLIT == 0, "a slice has whole clusters");
__device__ constexpr int width_of_slice(int width) {
  return width * SLICES >= K ? width : width_of_slice(2 * width);
}
constexpr int WIDTH = width_of_slice(16), OUT_STRIDE = WIDTH + 4;

// ---- shared memory ----
// The pitch of a slot's rows is 16 bytes more than a multiple of 128: eight rows, read at once, are
// in different banks. So are four rows of partial sums, whose groups of eight tokens are permuted.
//
// At the end, the sums of Y overwrite the rest. First come the sums that CTAs push to each other.
// They overwrite only the reducers' buffers, because a slower CTA still uses its list and ring. The
// sums of the CTA's warps follow. Nothing overlaps the barriers, which come last: overwriting a
// valid barrier is undefined (PTX ISA, mbarrier.inval). On an H200, 28 sums of Y that overlapped
// them were NaN.

constexpr int STRIDE = 2 * PART + 16, SLOT_BYTES = ROWS * STRIDE;
constexpr int PARTIAL = K_WARPS * ROWS * TOKENS, ROWS_OF_BANKS = TOKENS < 32 ? 32 / TOKENS : 1;
constexpr int LAG = CTAS / 2, DEPTH = 2 * LAG + 2;  // tiles; see Reducer
constexpr int SHARED_BYTES = 226 * 1024, MOST_SLOTS = 16;
constexpr int AT_BARRIERS = SHARED_BYTES - round_up(8 * (2 * MOST_SLOTS + 5 + DEPTH), 16);
constexpr int AT_PARTS = 2 * 4 * PARTIAL;
constexpr int AT_GATES = AT_PARTS + (CTAS == 1 ? 0 : DEPTH * 4 * ROWS * TOKENS);
constexpr int PUSHED_BYTES = 4 * TOKENS * WIDTH, AT_OUT = PUSHED_BYTES;
constexpr int AT_ACTIVE = max_of(AT_GATES + TILES * 8 * SHARE, PUSHED_BYTES);
constexpr int AT_FLAGS = AT_ACTIVE + TILES * 2 * ROWS;
constexpr int AT_FOUND = AT_FLAGS + TILES * ROWS * CTAS;
constexpr int AT_WORDS = AT_FOUND + 16;
constexpr int AT_LIST = AT_WORDS + 16 * ALL_WORDS;
constexpr int AT_RING = round_up(AT_LIST + 2 * ((N + SPLIT - 1) / SPLIT), 128);
constexpr int RING_BYTES = AT_BARRIERS - AT_RING;
constexpr int SLOTS = min_of(MOST_SLOTS, RING_BYTES / SLOT_BYTES);
static_assert(RING_BYTES > 0 && SLOTS >= 1, "too many units, or too long rows");

extern __shared__ __align__(128) char shared[];

__device__ __forceinline__ int sum_offset(int row, int token) {
  return row * TOKENS + (token ^ row / ROWS_OF_BANKS % (TOKENS / 8) * 8);
}

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 full(int slot) const { return at + 8 * slot; }
  __device__ __forceinline__ u32 empty(int slot) const { return at + 8 * (MOST_SLOTS + slot); }
  __device__ __forceinline__ u32 reduced(int i) const { return at + 8 * (2 * MOST_SLOTS + i); }
  __device__ __forceinline__ u32 summed(int i) const { return reduced(2 + i); }  // partial sums
  __device__ __forceinline__ u32 parts(int i) const { return reduced(4 + i); }
  __device__ __forceinline__ u32 pushed() const { return parts(DEPTH); }  // sums of Y
  __device__ __forceinline__ void init_all() const {
    mbarrier_init(pushed(), 1);
    for (int i = 0; i < SLOTS; i++) mbarrier_init(full(i), 1), mbarrier_init(empty(i), MMA_WARPS);
    for (int i = 0; i < 2; i++) {
      mbarrier_init(summed(i), MMA_WARPS);
      mbarrier_init(reduced(i), REDUCE_WARPS);
    }
    for (int i = 0; i < DEPTH; i++) mbarrier_init(parts(i), 1);
  }
};

// ---- the units of a cluster ----

__device__ __forceinline__ int first_unit(int cluster) {
  return 8 * (N / 8 * cluster / CLUSTERS);
}

struct Work {
  int cluster, rank, first, count, tiles;  // `count` units from `first` on, in 16s: tiles
  __device__ __forceinline__ Work()
      : cluster(blockIdx.x / CTAS), rank(blockIdx.x % CTAS),
        first(first_unit(cluster)), count(first_unit(cluster + 1) - first),
        tiles((count + ROWS - 1) / ROWS) {}
  __device__ __forceinline__ int cta_of(int rank) const {  // in the hardware cluster
    return blockIdx.x % SPLIT / CTAS * CTAS + rank;
  }
  __device__ __forceinline__ int rows(int tile) const { return min(ROWS, count - ROWS * tile); }
  __device__ __forceinline__ int bytes() const {  // in this rank's part of a row
    return 2 * max(0, min(PART, K - rank * PART));
  }
};

// Wait for the flags of a tile from all ranks; return a bit for each of its 16 units. A warp calls
// it.
__device__ __forceinline__ u32 active_mask(int tile) {
  const u32 at = smem_address(shared) + AT_FLAGS + (ROWS * tile + threadIdx.x % ROWS) * CTAS;
  u32 flags;
  do flags = load_flags<CTAS>(at);
  while (~flags & EVERY_RANK);
  return __ballot_sync(~0u, flags & EVERY_RANK << 1) & 0xffff;
}
__device__ __forceinline__ int count_active(int tiles) {
  int found = 0;
  for (int tile = 0; tile < tiles; tile++) found += __popc(active_mask(tile));
  return found;
}
// The active units of the cluster, in ascending order.
__device__ __forceinline__ u16* active_units() { return (u16*)(shared + AT_ACTIVE); }

// ---- copies ----

// Slots to fill while the other warps start: an SM gets 33 KB per microsecond from memory.
constexpr int FIRST = min_of((96 * 1024 + SLOT_BYTES - 1) / SLOT_BYTES, SLOTS);

struct Producer {
  const Work& work;
  Barriers bars;
  u32 ring;
  __device__ __forceinline__ u64 own(int unit) const {  // byte offset of this rank's part
    return 2 * ((u64)(work.first + unit) * K + work.rank * PART);
  }
  __device__ __forceinline__ void producer_acquire(int step) const {
    mbarrier_wait(bars.empty(step % SLOTS), step / SLOTS & 1 ^ 1, "a free slot");
  }
  __device__ __forceinline__ void load_row(int step, int row, const char* from) const {
    const int slot = step % SLOTS, bytes = work.bytes();
    if (bytes) bulk_load(ring + slot * SLOT_BYTES + row * STRIDE, from, bytes, bars.full(slot));
  }
  __device__ __forceinline__ void load_gates(int tile, int end, const char* wg) const {
    const int lane = threadIdx.x % 32;
    for (; tile < end; tile++) {
      const int rows = work.rows(tile), step = tile;
      producer_acquire(step);
      if (lane == 0) mbarrier_arrive_expect_tx(bars.full(step % SLOTS), rows * work.bytes());
      __syncwarp();
      if (lane < rows) load_row(step, lane, wg + own(ROWS * tile + lane));
    }
  }
  // Prefetch the rest of Wg into L2 before the ring has room for it. Wait for the first slot, but
  // not for X: if all of Wg (5.4 us of memory traffic) is queued first, X comes last.
  __device__ __forceinline__ void prefetch_gates(int tile, const char* wg) const {
    if (tile < work.tiles) mbarrier_wait(bars.full(0), 0, "the first gates");
    #pragma unroll 1
    for (int unit = ROWS * tile + threadIdx.x % 32; unit < work.count; unit += 32)
      if (work.bytes()) bulk_prefetch_l2(wg + own(unit), work.bytes());
  }
  // Copy the active rows of Wu in ascending order, 16 per step; these steps follow those of Wg. A
  // slot's barrier gets its single arrival when the step has 16 rows or no rows are left.
  __device__ __forceinline__ void load_ups(const char* wu, const char* wd, u64* words) const {
    const int lane = threadIdx.x % 32;
    u64 bits = PUBLISHED;
    int before = 0;
    for (int tile = 0; tile < WORDS * TILES_OF_WORD; tile++) {
      const u32 mask = tile < work.tiles ? active_mask(tile) : 0;
      bits |= (u64)mask << tile % TILES_OF_WORD * ROWS;
      if (tile % TILES_OF_WORD == TILES_OF_WORD - 1) {
        const int word = tile / TILES_OF_WORD;
        if (lane == 0 && word % CTAS == work.rank)
          store_relaxed(words + WORDS * work.cluster + word, bits);
        bits = PUBLISHED;
      }
      const bool is_on = mask >> lane & 1;
      const int unit = ROWS * tile + lane, row = before + __popc(mask & ((1u << lane) - 1));
      const int found = before + __popc(mask);
      if (is_on) active_units()[row] = unit;
      for (int up = before / ROWS; GATED && up * ROWS < found; up++) {
        const int step = work.tiles + up, first = max(before, up * ROWS);
        const u32 full = bars.full(step % SLOTS);
        if (first % ROWS == 0) producer_acquire(step);
        if (lane == 0) expect_tx(full, (min(found, up * ROWS + ROWS) - first) * work.bytes());
        __syncwarp();
        if (is_on && row / ROWS == up) load_row(step, row % ROWS, wu + own(unit));
        if (lane == 0 && found >= up * ROWS + ROWS) mbarrier_arrive(full);
      }
      before = found;
    }
    if (GATED && before % ROWS && lane == 0)
      mbarrier_arrive(bars.full((work.tiles + before / ROWS) % SLOTS));
    __syncwarp();  // prefetch Wd last, because Wu is needed first
    #pragma unroll 1
    for (int i = lane; i < before; i += 32)
      if (work.bytes()) bulk_prefetch_l2(wd + own(active_units()[i]), work.bytes());
  }
};

// ---- MMA warps: products of 16 units ----

using X = u32[COLUMNS / 32][WIDE][4];  // fragments of B: four words for 32 columns and eight tokens

// Request X before any weight: queued behind 190 KB of weights, it would come last. Each load
// computes a separate address, which puts 80 instructions before the first load. With one address
// per row, all SMs send their requests at 1 us, and wait longer.
__device__ __forceinline__ void load_x(X& x, const uint4* from, int rank, int m) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int token = warp / K_WARPS * WIDE * 8 + lane / 4;
  const int column = rank * PART + warp % K_WARPS * COLUMNS + lane % 4 * 8;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32; i++)
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const bool pred = token + 8 * j < m && column + 32 * i < K;
      const int at = (token + 8 * j) * (K / 8) + (column + 32 * i) / 8;
      *(uint4*)x[i][j] = pred ? __ldcg(from + at) : uint4{};
    }
}

// With few tokens, each eight have two accumulators, because an mma waits for the previous one.
constexpr int CHAINS = WIDE < 4 ? 2 : 1;

__device__ __forceinline__ void mma_tile(const X& x, u32 slot, float* partial) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, k_warp = warp % K_WARPS;
  const u32 own = slot + lane % 16 * STRIDE + 2 * (k_warp * COLUMNS + lane / 16 * 8);
  float d[CHAINS][WIDE][4] = {};
  #pragma unroll
  for (int i = 0; i < COLUMNS / 16; i++) {
    u32 a[4];
    ldmatrix_x4(a, own + 32 * i);
    #pragma unroll
    for (int j = 0; j < WIDE; j++) {
      const u32* b = x[i / 2][j] + i % 2 * 2;
      mma_m16n8k16(d[i % CHAINS][j], a, b[0], b[1]);
    }
  }
  const int token = warp / K_WARPS * WIDE * 8 + lane % 4 * 2;
  partial += k_warp * ROWS * TOKENS;
  #pragma unroll
  for (int j = 0; j < WIDE; j++) {
    #pragma unroll
    for (int c = 1; c < CHAINS; c++)
      for (int e = 0; e < 4; e++) d[0][j][e] += d[c][j][e];
    float* to = partial + sum_offset(lane / 4, token + 8 * j);
    *(float2*)to = float2{d[0][j][0], d[0][j][1]};
    *(float2*)(to + 8 * TOKENS) = float2{d[0][j][2], d[0][j][3]};
  }
}

__device__ __forceinline__ void mma_mainloop(X& x, const Work& work, Barriers bars) {
  int steps = work.tiles;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32 * WIDE; i++) quad_transpose(x[i / WIDE][i % WIDE]);
  named_barrier_sync<2, LIST_THREADS>();  // X has arrived
  for (int step = 0; step < steps; step++) {
    const int slot = step % SLOTS;
    mbarrier_wait(bars.full(slot), step / SLOTS & 1, "a full slot");
    mbarrier_wait(bars.reduced(step % 2), step / 2 & 1 ^ 1, "room for sums");
    mma_tile(x, smem_address(shared) + AT_RING + slot * SLOT_BYTES,
                  (float*)shared + step % 2 * PARTIAL);
    asm volatile("" : "+r"(step));  // forces the compiler to recompute addresses, which else spill
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive(bars.empty(step % SLOTS));
      mbarrier_arrive(bars.summed(step % 2));
    }
    if (GATED && step == work.tiles - 1) steps += (count_active(work.tiles) + ROWS - 1) / ROWS;
  }
}

// ---- reducers: sums, active units, H ----
// Each rank sums over its warps and pushes to each rank the sums of that rank's tokens. Then it
// adds up the received sums: a thread has four tokens (a quad) of EACH units. A rank reduces a tile
// LAG tiles after it pushed the tile, so that ranks do not wait for each other.
//
// A rank that pushes tile i has reduced tile i - LAG - 1. So all ranks have pushed that tile and
// have reduced tile i - 2 LAG - 2, and a buffer is free again after DEPTH tiles.

__device__ __forceinline__ void add_to(float4& sum, const float* from) {
  const float4 v = *(const float4*)from;
  sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

struct Reducer {
  const Work& work;
  Barriers bars;
  u16* h;
  int *counts, thread, sent, taken;

  __device__ __forceinline__ int quad(int e) const { return thread + REDUCE_THREADS * e; }
  __device__ __forceinline__ float4 sum_warps(int buffer, int quad) const {
    const float* own =
        (float*)shared + buffer * PARTIAL + sum_offset(quad / QUADS, quad % QUADS * 4);
    float4 sum{};
    #pragma unroll
    for (int w = 0; w < K_WARPS; w++) add_to(sum, own + w * ROWS * TOKENS);
    return sum;
  }
  __device__ __forceinline__ void release(int buffer) const {
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(bars.reduced(buffer));
  }
  __device__ __forceinline__ void push_partials() {
    const int buffer = sent % 2, place = sent % DEPTH;
    mbarrier_wait(bars.summed(buffer), sent / 2 & 1, "sums of warps");
    const u32 to = smem_address(shared) + AT_PARTS + 16 * (place * CTAS + work.rank) * SHARE;
    constexpr int ALL = ROWS * QUADS, TURNS = (ALL + REDUCE_THREADS - 1) / REDUCE_THREADS;
    float4 sums[TURNS];  // read all before pushing the first
    #pragma unroll
    for (int i = 0; i < TURNS; i++)
      if (quad(i) < ALL) sums[i] = sum_warps(buffer, quad(i));
    release(buffer);
    #pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int row = quad(i) / QUADS, of_row = quad(i) % QUADS;
      const int cta = work.cta_of(of_row / OWN_QUADS);
      const u32 own = to + 16 * (row * OWN_QUADS + of_row % OWN_QUADS);
      if (quad(i) < ALL)
        st_async(map_shared_rank(own, cta), sums[i], map_shared_rank(bars.parts(place), cta));
    }
    sent++;
  }
  // Sum four tokens of EACH units; zeros in threads without a quad of this rank.
  __device__ __forceinline__ void reduce(float4 (&sums)[EACH]) {
    const int place = taken % DEPTH;
    if (CTAS == 1) {
      mbarrier_wait(bars.summed(taken % 2), taken / 2 & 1, "sums of warps");
    } else {
      if (thread == 0) mbarrier_arrive_expect_tx(bars.parts(place), 16 * ROWS * QUADS);
      mbarrier_wait(bars.parts(place), taken / DEPTH & 1, "sums of ranks");
    }
    #pragma unroll
    for (int e = 0; e < EACH; e++) {
      sums[e] = float4{};
      if (thread >= SHARE) continue;
      if (CTAS == 1) {
        sums[e] = sum_warps(taken % 2, quad(e));
        continue;
      }
      const float* own = (float*)(shared + AT_PARTS) + 4 * (place * ROWS * QUADS + quad(e));
      #pragma unroll
      for (int rank = 0; rank < CTAS; rank++) add_to(sums[e], own + 4 * rank * SHARE);
    }
    if (CTAS == 1) release(taken % 2);
    else __syncwarp();
    taken++;
  }

  __device__ __forceinline__ uint2* gates(int unit) const {
    return (uint2*)(shared + AT_GATES) + unit * OWN_QUADS + thread % OWN_QUADS;
  }
  __device__ __forceinline__ static u32 hidden(u32 gates, float u0, float u1) {  // of two tokens
    const float a = to_float(gates & 0xffff), b = to_float(gates >> 16);
    return pack_pair(gates & 0xffff ? (SQUARED ? a * a : a) * u0 : 0.f,
                   gates >> 16 ? (SQUARED ? b * b : b) * u1 : 0.f);
  }
  __device__ __forceinline__ void store_h(int unit, uint2 gates, float4 u) const {
    const int token = 4 * (work.rank * OWN_QUADS + thread % OWN_QUADS);
    *(uint2*)(h + (work.first + unit) * TOKENS + token) =
        uint2{hidden(gates.x, u.x, u.y), hidden(gates.y, u.z, u.w)};
  }
  __device__ __forceinline__ void apply_gates(int tile, int row, float4 g) const {
    const int unit = ROWS * tile + row;
    const bool pred = thread < SHARE && row < work.rows(tile);
    const uint2 v{pack_pair(g.x, g.y), pack_pair(g.z, g.w)};
    const uint2 masks{positive_mask(v.x), positive_mask(v.y)};
    const uint2 own{v.x & masks.x, v.y & masks.y};
    if (GATED && pred) *gates(unit) = own;
    if (!GATED && pred) store_h(unit, own, float4{1, 1, 1, 1});
    const u32 all = __ballot_sync(~0u, pred && (masks.x | masks.y));
    const u32 lanes = (1u << OWN_QUADS) - 1 << (thread % 32 / OWN_QUADS * OWN_QUADS);
    if (thread < SHARE && thread % OWN_QUADS == 0)
      for (int rank = 0; rank < CTAS; rank++)
        store_flag(smem_address(shared) + AT_FLAGS + unit * CTAS + work.rank,
                   all & lanes ? ON : OFF, work.cta_of(rank));
  }
  __device__ __forceinline__ void apply_ups(int row, float4 u) const {
    const int unit = active_units()[row];
    store_h(unit, *gates(unit), u);
  }
  __device__ __forceinline__ void run() {
    int tiles = work.tiles, found = 0;
    #pragma unroll 1
    for (int up = 0; up <= GATED; up++) {
      #pragma unroll 1
      for (int i = 0; i < tiles + LAG; i++) {
        if (CTAS > 1 && i < tiles) push_partials();
        if (i < LAG) continue;
        float4 sums[EACH];
        reduce(sums);
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int row = quad(e) / OWN_QUADS, up_row = ROWS * (i - LAG) + row;
          if (!up) apply_gates(i - LAG, row, sums[e]);
          else if (thread < SHARE && up_row < found) apply_ups(up_row, sums[e]);
        }
        __syncwarp();
      }
      if (GATED && !up) {
        named_barrier_sync<1, REDUCE_THREADS>();  // other threads may have computed a unit's G
        found = count_active(work.tiles), tiles = (found + ROWS - 1) / ROWS;
      }
    }
    named_barrier_sync<1, REDUCE_THREADS>();
    if (thread == 0) add_release(counts);
  }
};

// ---- the list of active units ----

struct Word { u64 bits; int before, unit; };  // active units before it; its first unit
static_assert(sizeof(Word) == 16, "AT_LIST");
__device__ __forceinline__ Word* scanned() { return (Word*)(shared + AT_WORDS); }
__device__ __forceinline__ u16* list() { return (u16*)(shared + AT_LIST); }

// Wait for all words, and count the active units before each. One warp does this: a lane takes up
// to eight adjacent words, and loads them together.
__device__ __forceinline__ void scan_words(const u64* words) {
  constexpr int OF_LANE = min_of(8, (ALL_WORDS + 31) / 32);
  const int lane = threadIdx.x % 32;
  int found = 0;
  #pragma unroll 1
  for (int first = OF_LANE * lane; first - OF_LANE * lane < ALL_WORDS; first += 32 * OF_LANE) {
    u64 bits[OF_LANE], all;
    do {
      all = PUBLISHED;
      #pragma unroll
      for (int i = 0; i < OF_LANE; i++)
        bits[i] = first + i < ALL_WORDS ? load_relaxed(words + first + i) : PUBLISHED,
        all &= bits[i];
    } while (!all);
    int own = 0;
    #pragma unroll
    for (int i = 0; i < OF_LANE; i++) own += __popcll(bits[i] &= ~PUBLISHED);
    int up_to = own;
    #pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int below = __shfl_up_sync(~0u, up_to, by);
      if (lane >= by) up_to += below;
    }
    int before = found + up_to - own;
    #pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      const int cluster = (first + i) / WORDS, word = (first + i) % WORDS;
      const int unit = first_unit(cluster) + 2 * HALF * word;
      if (first + i < ALL_WORDS) scanned()[first + i] = Word{bits[i], before, unit};
      before += __popcll(bits[i]);
    }
    found += __shfl_sync(~0u, up_to, 31);
  }
  if (lane == 0) *(int*)(shared + AT_FOUND) = found;
}

struct Segment { int first, length; };  // of the list of all active units, for a CTA

__device__ __forceinline__ Segment segment_of(int cta) {
  const int found = *(const int*)(shared + AT_FOUND), first = found * cta / SPLIT;
  return {first, found * (cta + 1) / SPLIT - first};
}

// List a segment; each thread lists the units of half a word. A single warp took 2 ns per unit.
__device__ __forceinline__ void list_units(Segment segment) {
  #pragma unroll 1
  for (int half = threadIdx.x; half < 2 * ALL_WORDS; half += LIST_THREADS) {
    const Word word = scanned()[half / 2];
    const u32 low = word.bits & (1 << HALF) - 1, high = word.bits >> HALF;
    int unit = word.unit - 1, place = word.before - segment.first;
    if (half % 2) unit += HALF, place += __popc(low);
    #pragma unroll 1
    for (u32 left = half % 2 ? high : low; left; left &= left - 1, place++)
      if (0 <= place && place < segment.length) list()[place] = unit + __ffs(left);
  }
}

__device__ __forceinline__ void wait_for_h(const int* counts) {
  if (threadIdx.x % 32 == 0)
    while (load_acquire(counts) != CTAS * CLUSTERS) {}
  __syncwarp();
}
// The last CTA that reads the full count resets words and counters to 0. One warp calls it.
__device__ __forceinline__ void reset_counters(u64* words, int* counts) {
  const int lane = threadIdx.x % 32;
  const int before = lane == 0 ? atomicAdd(counts + 1, 1) : 0;
  if (__shfl_sync(~0u, before, 0) != CTAS * CLUSTERS - 1) return;
  #pragma unroll 1
  for (int i = lane; i < ALL_WORDS; i += 32) words[i] = 0;
  if (lane < 2) counts[lane] = 0;
}

// ---- Y ----

constexpr int TALL = min_of(4, WIDTH / 16), OWN = 16 * TALL;  // products per warp; their columns
constexpr int COLUMN_WARPS = WIDTH / OWN, UNIT_WARPS = MMA_WARPS / COLUMN_WARPS;
constexpr int W_STRIDE = 2 * OWN + 16, H_STRIDE = TOKENS == 8 ? 16 : 2 * TOKENS + 16;
constexpr int UNITS_AT_ONCE = RING_BYTES / (MMA_WARPS * (W_STRIDE + H_STRIDE));  // per warp
constexpr int UNITS = UNITS_AT_ONCE >= 256 ? 64 : UNITS_AT_ONCE >= 128 ? 32 : 16;  // per stage
constexpr int STAGE_BYTES = UNITS * (W_STRIDE + H_STRIDE);
constexpr int STAGES = min_of(8, RING_BYTES / (MMA_WARPS * STAGE_BYTES));
static_assert(UNIT_WARPS * COLUMN_WARPS == MMA_WARPS, "too many columns");
static_assert(STAGES >= 2, "too little room for rows of Wd");
static_assert(AT_OUT + 4 * UNIT_WARPS * TOKENS * OUT_STRIDE <= AT_BARRIERS, "no room for Y");

// Copy PIECES pieces of 16 bytes of UNITS listed rows, after `skipped`; zeros beyond `units`.
template <int PIECES, int STRIDE, int ROW_BYTES>
__device__ __forceinline__ void gather_rows(u32 to, const u16* list, int units, int skipped,
                                             const char* from) {
  constexpr u32 NOWHERE = ~0u;
  u32 at[(UNITS * PIECES + 31) / 32];  // load all offsets before the first copy
  #pragma unroll
  for (int first = 0; first < UNITS * PIECES; first += 32) {
    const int i = first + threadIdx.x % 32, row = i / PIECES, piece = i % PIECES;
    const bool pred = i < UNITS * PIECES && row < units && skipped + piece < ROW_BYTES / 16;
    at[first / 32] = pred ? list[row] * (u32)ROW_BYTES + 16 * (skipped + piece) : NOWHERE;
  }
  #pragma unroll
  for (int first = 0; first < UNITS * PIECES; first += 32) {
    const int i = first + threadIdx.x % 32, row = i / PIECES, piece = i % PIECES;
    const bool pred = at[first / 32] != NOWHERE;
    if (UNITS * PIECES % 32 == 0 || i < UNITS * PIECES)
      cp_async_16(to + row * STRIDE + 16 * piece, from + (pred ? at[first / 32] : 0), pred);
  }
}

using Sums = float[TALL][TOKENS / 8][4];

// A warp's products: OWN columns of UNITS units out of every UNIT_WARPS * UNITS in the segment.
struct Down {
  const u16* list;
  int units, steps, skipped;  // after the warp's first; skipped: 16-byte pieces
  const char *wd, *h;
  u32 stages;
  __device__ __forceinline__ Down(int length, int column, const char* wd, const char* h)
      : wd(wd), h(h) {
    const int warp = threadIdx.x / 32, before = warp / COLUMN_WARPS * UNITS;
    list = ::list() + before, units = length - before;
    steps = max(0, (units + UNITS * UNIT_WARPS - 1) / (UNITS * UNIT_WARPS));
    skipped = (column + warp % COLUMN_WARPS * OWN) / 8;
    stages = smem_address(shared) + AT_RING + warp * STAGES * STAGE_BYTES;
  }
  __device__ __forceinline__ u32 stage(int step) const {
    return stages + step % STAGES * STAGE_BYTES;
  }
  __device__ __forceinline__ int before(int step) const { return step * UNITS * UNIT_WARPS; }
  __device__ __forceinline__ void load_wd(int step) const {
    if (step < steps)
      gather_rows<OWN / 8, W_STRIDE, 2 * K>(stage(step), list + before(step),
                                             units - before(step), skipped, wd);
  }
  __device__ __forceinline__ void load_h(int step) const {
    if (step < steps)
      gather_rows<TOKENS / 8, H_STRIDE, 2 * TOKENS>(
          stage(step) + UNITS * W_STRIDE, list + before(step), units - before(step), 0, h);
  }
  __device__ __forceinline__ void mma(Sums& d, u32 stage) const {
    const int lane = threadIdx.x % 32;
    const u32 w = stage + (lane % 8 + lane / 16 * 8) * W_STRIDE + lane / 8 % 2 * 16;
    const u32 h = stage + UNITS * W_STRIDE + lane % 16 * H_STRIDE +
                  (TOKENS > 8 ? lane / 16 * 16 : 0);
    #pragma unroll
    for (int i = 0; i < UNITS; i += 16) {
      u32 b[(TOKENS + 15) / 16][4], a[4];
      #pragma unroll
      for (int j = 0; j < (TOKENS + 15) / 16; j++)
        ldmatrix_x4_trans(b[j], h + i * H_STRIDE + 32 * j);
      #pragma unroll
      for (int t = 0; t < TALL; t++) {
        ldmatrix_x4_trans(a, w + i * W_STRIDE + 32 * t);
        #pragma unroll
        for (int j = 0; j < TOKENS / 8; j++)
          mma_m16n8k16(d[t][j], a, b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
      }
    }
  }
  // Load only Wd, because H is not complete yet.
  __device__ __forceinline__ void prologue() const {
    #pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++) load_wd(step);
  }
  __device__ __forceinline__ void mainloop(Sums& d) const {
    #pragma unroll 1
    for (int step = 1 - STAGES; step < steps; step++) {
      if (step >= 0) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        load_wd(step + STAGES - 1);
      }
      load_h(step + STAGES - 1);
      cp_async_commit();
      if (step >= 0) mma(d, stage(step));
    }
  }
};

__device__ __forceinline__ void store_quad(u16* y, int token, int column, float4 v) {
  if (column < K)
    *(uint2*)(y + (u64)token * K + column) = uint2{pack_pair(v.x, v.y), pack_pair(v.z, v.w)};
}

// Add up the sums of the warps, then those of the CTAs. Each CTA writes an equal part of the
// columns, and the other CTAs push their sums of these columns to it. No CTA reads another CTA's
// shared memory, so none has to wait for readers before it ends.
__device__ __forceinline__ void epilogue(const Sums& d, u16* y, int cta, int column, int m,
                                        Barriers bars) {
  constexpr int PART_OF_CTA = WIDTH / SPLIT, QUADS_OF_TOKEN = PART_OF_CTA / 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = m * QUADS_OF_TOKEN;
  float *const out = (float*)(shared + AT_OUT), *const pushed = (float*)shared;
  __syncthreads();  // this CTA no longer needs the memory that the sums overwrite
  if (warp < MMA_WARPS) {
    float* own = out + (warp / COLUMN_WARPS * TOKENS + lane % 4 * 2) * OUT_STRIDE +
                 warp % COLUMN_WARPS * OWN + lane / 4;
    #pragma unroll
    for (int t = 0; t < TALL; t++)
      #pragma unroll
      for (int j = 0; j < TOKENS / 8; j++)
        #pragma unroll
        for (int e = 0; e < 4; e++)
          own[(8 * j + e % 2) * OUT_STRIDE + 16 * t + e / 2 * 8] = d[t][j][e];
  }
  __syncthreads();
  #pragma unroll 1
  for (int i = threadIdx.x; i < SPLIT * quads; i += THREADS) {
    const int token = i / (WIDTH / 4), at = i % (WIDTH / 4) * 4;
    float4 sum{};
    #pragma unroll
    for (int w = 0; w < UNIT_WARPS; w++)
      add_to(sum, out + (w * TOKENS + token) * OUT_STRIDE + at);
    if (SPLIT == 1) {
      store_quad(y, token, column + at, sum);
    } else {
      const int place = cta * quads + token * QUADS_OF_TOKEN + at % PART_OF_CTA / 4;
      const int to = at / PART_OF_CTA;
      st_async(map_shared_rank(smem_address(pushed + 4 * place), to), sum,
               map_shared_rank(bars.pushed(), to));
    }
  }
  if (SPLIT == 1) return;
  if (threadIdx.x == 0) mbarrier_arrive_expect_tx(bars.pushed(), 16 * SPLIT * quads);
  mbarrier_wait(bars.pushed(), 0, "sums of CTAs");
  #pragma unroll 1
  for (int i = threadIdx.x; i < quads; i += THREADS) {
    const int at = i % QUADS_OF_TOKEN * 4;
    float4 sum{};
    #pragma unroll
    for (int from = 0; from < SPLIT; from++) add_to(sum, pushed + 4 * (from * quads + i));
    store_quad(y, i / QUADS_OF_TOKEN, column + cta * PART_OF_CTA + at, sum);
  }
}

// ---- the kernel ----

// Zero the flags, and the columns of slots beyond K, by the warps that do not load X.
__device__ __forceinline__ void zero_padding(const Work& work) {
  constexpr int BUSY = 32 * MMA_WARPS;
  for (int i = threadIdx.x - BUSY; i < TILES * ROWS * CTAS; i += THREADS - BUSY)
    shared[AT_FLAGS + i] = 0;
  if (K == CTAS * PART) return;
  const int first = work.bytes() / 16, pieces = PART / 8 - first;
  for (int i = threadIdx.x - BUSY; i < SLOTS * ROWS * pieces; i += THREADS - BUSY)
    *(uint4*)(shared + AT_RING + i / pieces * STRIDE + 16 * (first + i % pieces)) = uint4{};
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
multiply_few(const char* x, const char* wg, const char* wu, const char* wd, u16* y, u16* h,
             u64* words, int* counts, int m) {
  const Work work;
  const Barriers bars{smem_address(shared) + AT_BARRIERS};
  const int warp = threadIdx.x / 32;
  const Producer producer{work, bars, smem_address(shared) + AT_RING};
  X own;
  if (warp < MMA_WARPS) {
    if (CTAS > 1) cluster_arrive_relaxed();  // before the loads of X, which take up to 5 us
    load_x(own, (const uint4*)x, work.rank, m);
  } else {
    if (warp == PRODUCER) {  // at once, because no other thread writes where these copies land
      if (threadIdx.x % 32 == 0) bars.init_all(), fence_mbarrier_init(), fence_proxy_async();
      __syncwarp();
      producer.load_gates(0, min(FIRST, work.tiles), wg);
    }
    zero_padding(work);
    if (CTAS > 1) cluster_arrive();
    if (warp == PRODUCER) producer.prefetch_gates(FIRST, wg);
  }
  if (CTAS > 1) cluster_wait();
  else __syncthreads();
  const int cta = blockIdx.x % SPLIT, column = blockIdx.x / SPLIT * WIDTH;
  Sums sums = {};
  if (warp > PRODUCER) {
    Reducer{work, bars, h, counts, (int)threadIdx.x - FIRST_REDUCER, 0, 0}.run();
  } else {
    if (warp < MMA_WARPS) {
      mma_mainloop(own, work, bars);
    } else {
      named_barrier_sync<2, LIST_THREADS>();  // until X has arrived, because copies would delay it
      producer.load_gates(FIRST, work.tiles, wg);
      producer.load_ups(wu, wd, words);
      scan_words(words);
    }
    named_barrier_sync<2, LIST_THREADS>();  // words are scanned, the ring is free
    const Segment segment = segment_of(cta);
    list_units(segment);
    named_barrier_sync<2, LIST_THREADS>();  // the list is written
    const Down share(segment.length, column, wd, (const char*)h);
    if (warp < MMA_WARPS) {
      share.prologue();
      named_barrier_sync<2, LIST_THREADS>();  // H is complete
      share.mainloop(sums);
    } else {
      wait_for_h(counts);
      named_barrier_sync<2, LIST_THREADS>();  // H is complete
      reset_counters(words, counts);
    }
  }
  epilogue(sums, y, cta, column, m, bars);
}
