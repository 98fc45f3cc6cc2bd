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
//   8         copies: all tiles of Wg; then the rows of Wu      a free slot; a tile's flags
//             that are on, close together, and the same
//             rows of Wd into L2; ranks of all units that
//             are on                                            words of all CTAs
//   9, 10     sums over warps and ranks; who is on; H           partial sums
//
//     ring of slots   | Wg 0 | Wg 1 | Wg 2 | Wu: units 5, 9, 30 | ...
//
//   then SPLIT CTAs have WIDTH columns of Y, each a segment of the units that are on, in ascending
//   order. Warps 0 to 8 list it; warps 0 to 7 take UNITS of it in turn, in stages of their own: no
//   warp waits for another
//
//                     WIDTH                        tokens
//                   +-------+                     +------+
//     rows of Wd.T  |       |                     |      |    16 units a product, both read by
//     that are on   |       |  transposed,   x    |  H   |    columns; sums over warps, then CTAs
//                   +-------+                     +------+
//
// Who is on goes through shared memory, a byte for a unit and rank: 0 until it is known. It is then
// published, in words of a cluster's units, 48 bits and a mark: while Wu is still on its way warp 8
// counts them all, so that after a CTA's last product each thread lists the units of half a word,
// and the first rows of Wd are asked for. A counter of the CTAs says when all of H is there. The
// last CTA to see that makes words and counters 0 again. All CTAs must run at the same time: the
// launch is cooperative.
//
// G is rounded as that of a dense layer is; a unit of a token is on unless G <= 0: NaN is on. U is
// kept in fp32, H rounded once. All sums have a fixed order: the bits are the same at every call.
//
// With GATED = 0, Y = act(X @ Wg.T) @ Wd.T: there is no Wu.
//
// Compiled with -DN, -DK, -DTOKENS=8|16|32|64, -DCTAS=1|2|4 of a cluster, -DCLUSTERS of the grid,
// -DSPLIT, which is CTAS, or 2 where that is 1 (then two clusters are one to the hardware),
// -DSQUARED=0|1 (relu, relu2), -DGATED=0|1 and what hopper.cuh asks for. N and K: multiples of 8.
// Loops that run once or twice are not unrolled: instructions, too, come from memory, 8 KB of them.

#include "hopper.cuh"

using u16 = unsigned short;

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int larger(int a, int b) { return a > b ? a : b; }
__device__ constexpr int rounded_up(int a, int to) { return (a + to - 1) / to * to; }

constexpr int WARPS = 8, PRODUCER = WARPS, ADDERS = 2, FIRST_ADDER = 32 * (PRODUCER + 1);
constexpr int LISTERS = FIRST_ADDER, THREADS = FIRST_ADDER + 32 * ADDERS;
constexpr int TOKEN_WARPS = TOKENS >= 32 ? 2 : 1, K_WARPS = WARPS / TOKEN_WARPS;
constexpr int PART = rounded_up((K + CTAS - 1) / CTAS, 32 * K_WARPS);  // of K, a CTA's
constexpr int COLUMNS = PART / K_WARPS, WIDE = TOKENS / 8 / TOKEN_WARPS;  // a warp's; in products
constexpr int ROWS = 16, TILES = ((N / 8 + CLUSTERS - 1) / CLUSTERS + 1) / 2;  // most of a cluster
constexpr int QUADS = TOKENS / 4, OWN_QUADS = QUADS / CTAS;  // of a unit's tokens; a rank's
constexpr int SHARE = ROWS * OWN_QUADS;  // of a tile, a rank's
constexpr int EACH = (SHARE + 32 * ADDERS - 1) / (32 * ADDERS);  // quads of a thread
static_assert(QUADS % CTAS == 0 && 32 % OWN_QUADS == 0, "a warp has all quads of a unit");
constexpr int TILES_OF_WORD = 3, HALF = TILES_OF_WORD * ROWS / 2;  // units of half a word
constexpr int WORDS = (TILES + TILES_OF_WORD - 1) / TILES_OF_WORD, ALL_WORDS = WORDS * CLUSTERS;
enum : u32 { OFF = 1, ON = 3, EVERY_RANK = 0x01010101u >> 8 * (4 - CTAS) };
constexpr u64 THERE = 1ull << 63;  // the mark of a word

constexpr int SLICES = CTAS * CLUSTERS / SPLIT;  // of Y
static_assert(SPLIT % CTAS == 0 && CTAS * CLUSTERS % SPLIT == 0, "a slice has whole clusters");
__device__ constexpr int width_of_slice(int width) {
  return width * SLICES >= K ? width : width_of_slice(2 * width);
}
constexpr int WIDTH = width_of_slice(16), OUT_STRIDE = WIDTH + 4;

// ---- shared memory ----
// Rows of a slot are 16 bytes more than a multiple of 128, so that eight of them, read at once, are
// in different banks. So are four rows of partial sums: groups of eight tokens are permuted.
// In the end come sums of Y: those of all CTAs, pushed to where adders had theirs, while the other
// CTA may still have its list and ring; then those of a CTA's own warps. Barriers are last, and
// nothing else is ever there: to write over a valid one is undefined (PTX ISA, mbarrier.inval). On
// an H200 28 sums of Y that lay over them were NaN.

constexpr int STRIDE = 2 * PART + 16, SLOT_BYTES = ROWS * STRIDE;
constexpr int PARTIAL = K_WARPS * ROWS * TOKENS, ROWS_OF_BANKS = TOKENS < 32 ? 32 / TOKENS : 1;
constexpr int LAG = CTAS / 2, DEPTH = 2 * LAG + 2;  // tiles; see Adder
constexpr int SHARED_BYTES = 226 * 1024, MOST_SLOTS = 16;
constexpr int AT_BARRIERS = SHARED_BYTES - rounded_up(8 * (2 * MOST_SLOTS + 5 + DEPTH), 16);
constexpr int AT_PARTS = 2 * 4 * PARTIAL;
constexpr int AT_GATES = AT_PARTS + (CTAS == 1 ? 0 : DEPTH * 4 * ROWS * TOKENS);
constexpr int PUSHED_BYTES = 4 * TOKENS * WIDTH, AT_OUT = PUSHED_BYTES;
constexpr int AT_UNITS = larger(AT_GATES + TILES * 8 * SHARE, PUSHED_BYTES);
constexpr int AT_FLAGS = AT_UNITS + TILES * 2 * ROWS;
constexpr int AT_FOUND = AT_FLAGS + TILES * ROWS * CTAS;
constexpr int AT_KNOWN = AT_FOUND + 16;
constexpr int AT_LIST = AT_KNOWN + 16 * ALL_WORDS;
constexpr int AT_RING = rounded_up(AT_LIST + 2 * ((N + SPLIT - 1) / SPLIT), 128);
constexpr int RING_BYTES = AT_BARRIERS - AT_RING;
constexpr int SLOTS = smaller(MOST_SLOTS, RING_BYTES / SLOT_BYTES);
static_assert(RING_BYTES > 0 && SLOTS >= 1, "too many units, or too long rows");

extern __shared__ __align__(128) char shared[];

__device__ __forceinline__ int place_of_sum(int row, int token) {
  return row * TOKENS + (token ^ row / ROWS_OF_BANKS % (TOKENS / 8) * 8);
}

struct Barriers {
  u32 at;
  __device__ __forceinline__ u32 full(int slot) const { return at + 8 * slot; }
  __device__ __forceinline__ u32 empty(int slot) const { return at + 8 * (MOST_SLOTS + slot); }
  __device__ __forceinline__ u32 added(int i) const { return at + 8 * (2 * MOST_SLOTS + i); }
  __device__ __forceinline__ u32 summed(int i) const { return added(2 + i); }  // partial sums
  __device__ __forceinline__ u32 parts(int i) const { return added(4 + i); }
  __device__ __forceinline__ u32 pushed() const { return parts(DEPTH); }  // sums of Y
  __device__ __forceinline__ void init_all() const {
    mbarrier_init(pushed(), 1);
    for (int i = 0; i < SLOTS; i++) mbarrier_init(full(i), 1), mbarrier_init(empty(i), WARPS);
    for (int i = 0; i < 2; i++) mbarrier_init(summed(i), WARPS), mbarrier_init(added(i), ADDERS);
    for (int i = 0; i < DEPTH; i++) mbarrier_init(parts(i), 1);
  }
};

// ---- PTX ----

#include "mma.cuh"

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
// Zeros where there is nothing to copy.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
__device__ __forceinline__ void adders_in_step() {
  asm volatile("bar.sync 1, %0;" :: "n"(32 * ADDERS) : "memory");
}
__device__ __forceinline__ void listers_in_step() {
  asm volatile("bar.sync 2, %0;" :: "n"(LISTERS) : "memory");
}
__device__ __forceinline__ void send_to_l2(const void* from, int bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" :: "l"(from), "r"(bytes) : "memory");
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
__device__ __forceinline__ void publish(u64* to, u64 word) {
  asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" :: "l"(to), "l"(word) : "memory");
}
__device__ __forceinline__ u64 seen(const u64* word) {
  u64 v;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(word) : "memory");
  return v;
}
// What these threads wrote before they were last in step is there for whoever sees the count.
__device__ __forceinline__ void count_me(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}
__device__ __forceinline__ int counted(const int* counter) {
  int v;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(v) : "l"(counter) : "memory");
  return v;
}

// ---- whose units ----

__device__ __forceinline__ int first_unit(int cluster) {
  return 8 * (N / 8 * cluster / CLUSTERS);
}

struct Work {
  int cluster, rank, first, count, tiles;  // units from `first` on
  __device__ __forceinline__ Work()
      : cluster(blockIdx.x / CTAS), rank(blockIdx.x % CTAS),
        first(first_unit(cluster)), count(first_unit(cluster + 1) - first),
        tiles((count + ROWS - 1) / ROWS) {}
  __device__ __forceinline__ int place_of(int rank) const {  // in the hardware's cluster
    return blockIdx.x % SPLIT / CTAS * CTAS + rank;
  }
  __device__ __forceinline__ int rows(int tile) const { return min(ROWS, count - ROWS * tile); }
  __device__ __forceinline__ int bytes() const {  // of this rank's part of a row
    return 2 * max(0, min(PART, K - rank * PART));
  }
};

// A bit for each unit of a tile that is on, once all ranks have told. For a whole warp.
__device__ __forceinline__ u32 who_is_on(int tile) {
  const u32 at = smem_address(shared) + AT_FLAGS + (ROWS * tile + threadIdx.x % ROWS) * CTAS;
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

// Slots filled while the other warps start: memory gives an SM 33 KB in each microsecond.
constexpr int FIRST = smaller((96 * 1024 + SLOT_BYTES - 1) / SLOT_BYTES, SLOTS);

struct Producer {
  const Work& work;
  Barriers bars;
  u32 ring;
  __device__ __forceinline__ u64 own(int unit) const {  // bytes from the weights' start
    return 2 * ((u64)(work.first + unit) * K + work.rank * PART);
  }
  __device__ __forceinline__ void wait_free(int step) const {
    mbarrier_wait(bars.empty(step % SLOTS), step / SLOTS & 1 ^ 1, "a free slot");
  }
  __device__ __forceinline__ void bring_row(int step, int row, const char* from) const {
    const int slot = step % SLOTS, bytes = work.bytes();
    if (bytes) bulk_load(ring + slot * SLOT_BYTES + row * STRIDE, from, bytes, bars.full(slot));
  }
  __device__ __forceinline__ void bring_gates(int tile, int end, const char* wg) const {
    const int lane = threadIdx.x % 32;
    for (; tile < end; tile++) {
      const int rows = work.rows(tile);
      wait_free(tile);
      if (lane == 0) mbarrier_arrive_expect_tx(bars.full(tile % SLOTS), rows * work.bytes());
      __syncwarp();
      if (lane < rows) bring_row(tile, lane, wg + own(ROWS * tile + lane));
    }
  }
  // On their way from memory before there is room for them, or X is there, but not before the first
  // slot is: behind all of Wg, 5.4 us of memory's time, X came last.
  __device__ __forceinline__ void send_gates_to_l2(int tile, const char* wg) const {
    if (tile < work.tiles) mbarrier_wait(bars.full(0), 0, "the first gates");
    #pragma unroll 1
    for (int unit = ROWS * tile + threadIdx.x % 32; unit < work.count; unit += 32)
      if (work.bytes()) send_to_l2(wg + own(unit), work.bytes());
  }
  // Units that are on, in ascending order, are rows of the steps after the gates'. A step is open
  // until it has 16 rows, or there are no more: then its slot's barrier has its one arrival.
  __device__ __forceinline__ void bring_ups(const char* wu, const char* wd, u64* words) const {
    const int lane = threadIdx.x % 32;
    u64 bits = THERE;
    int before = 0;
    for (int tile = 0; tile < WORDS * TILES_OF_WORD; tile++) {
      const u32 mask = tile < work.tiles ? who_is_on(tile) : 0;
      bits |= (u64)mask << tile % TILES_OF_WORD * ROWS;
      if (tile % TILES_OF_WORD == TILES_OF_WORD - 1) {
        const int word = tile / TILES_OF_WORD;
        if (lane == 0 && word % CTAS == work.rank)
          publish(words + WORDS * work.cluster + word, bits);
        bits = THERE;
      }
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
        if (lane == 0 && found >= up * ROWS + ROWS) mbarrier_arrive(full);
      }
      before = found;
    }
    if (GATED && before % ROWS && lane == 0)
      mbarrier_arrive(bars.full((work.tiles + before / ROWS) % SLOTS));
    __syncwarp();  // Wd comes last: Wu is waited for first
    #pragma unroll 1
    for (int i = lane; i < before; i += 32)
      if (work.bytes()) send_to_l2(wd + own(units_on()[i]), work.bytes());
  }
};

// ---- products of 16 units ----

using X = u32[COLUMNS / 32][WIDE][4];  // words of B: four of each 32 columns and eight tokens

// Asked for before any weight: behind 190 KB of those, X would come last. An address for each load
// is 80 instructions ahead of the first; with one for a row all SMs ask at 1 us, and wait longer.
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
      *(uint4*)x[i][j] = there ? __ldcg(from + at) : uint4{};
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
    float* to = partial + place_of_sum(lane / 4, token + 8 * j);  // of row + 8: 8 rows on
    *(float2*)to = float2{d[0][j][0], d[0][j][1]};
    *(float2*)(to + 8 * TOKENS) = float2{d[0][j][2], d[0][j][3]};
  }
}

__device__ __forceinline__ void multiply_tiles(X& x, const Work& work, Barriers bars) {
  int steps = work.tiles;
  #pragma unroll
  for (int i = 0; i < COLUMNS / 32 * WIDE; i++) quad_transpose(x[i / WIDE][i % WIDE]);
  listers_in_step();  // X is there
  for (int step = 0; step < steps; step++) {
    mbarrier_wait(bars.full(step % SLOTS), step / SLOTS & 1, "a full slot");
    mbarrier_wait(bars.added(step % 2), step / 2 & 1 ^ 1, "room for sums");
    multiply_tile(x, smem_address(shared) + AT_RING + step % SLOTS * SLOT_BYTES,
                  (float*)shared + step % 2 * PARTIAL);
    asm volatile("" : "+r"(step));  // addresses are computed again: kept, they would be spilled
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive(bars.empty(step % SLOTS));
      mbarrier_arrive(bars.summed(step % 2));
    }
    if (GATED && step == work.tiles - 1) steps += (count_on(work.tiles) + ROWS - 1) / ROWS;
  }
}

// ---- sums, who is on, H ----
// Each rank sums over its warps, sends each rank the sums of its tokens, and adds up its own: a
// thread has four tokens (a quad) of EACH units. Sums are taken LAG tiles after they are sent: so
// ranks do not wait for each other. When a rank sends tile i it has taken i - LAG - 1; so all have
// sent that one, and have taken i - 2 LAG - 2: a place is free again after DEPTH tiles.

__device__ __forceinline__ void add_to(float4& sum, const float* from) {
  const float4 v = *(const float4*)from;
  sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
}

struct Adder {
  const Work& work;
  Barriers bars;
  u16* h;
  int *counts, thread, sent, taken;

  __device__ __forceinline__ int quad(int e) const { return thread + 32 * ADDERS * e; }
  __device__ __forceinline__ float4 over_warps(int buffer, int quad) const {
    const float* own =
        (float*)shared + buffer * PARTIAL + place_of_sum(quad / QUADS, quad % QUADS * 4);
    float4 sum{};
    #pragma unroll
    for (int w = 0; w < K_WARPS; w++) add_to(sum, own + w * ROWS * TOKENS);
    return sum;
  }
  __device__ __forceinline__ void have_added(int buffer) const {
    __syncwarp();
    if (thread % 32 == 0) mbarrier_arrive(bars.added(buffer));
  }
  __device__ __forceinline__ void send() {
    const int buffer = sent % 2, place = sent % DEPTH;
    mbarrier_wait(bars.summed(buffer), sent / 2 & 1, "sums of warps");
    const u32 to = smem_address(shared) + AT_PARTS + 16 * (place * CTAS + work.rank) * SHARE;
    constexpr int ALL = ROWS * QUADS, TURNS = (ALL + 32 * ADDERS - 1) / (32 * ADDERS);
    float4 sums[TURNS];  // all are read before the first is sent
    #pragma unroll
    for (int i = 0; i < TURNS; i++)
      if (quad(i) < ALL) sums[i] = over_warps(buffer, quad(i));
    have_added(buffer);
    #pragma unroll
    for (int i = 0; i < TURNS; i++) {
      const int row = quad(i) / QUADS, of_row = quad(i) % QUADS;
      const int cta = work.place_of(of_row / OWN_QUADS);
      const u32 own = to + 16 * (row * OWN_QUADS + of_row % OWN_QUADS);
      if (quad(i) < ALL)
        st_async(map_shared_rank(own, cta), sums[i], map_shared_rank(bars.parts(place), cta));
    }
    sent++;
  }
  // Four tokens' sums of EACH units; nothing from threads beyond the share.
  __device__ __forceinline__ void take(float4 (&sums)[EACH]) {
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
        sums[e] = over_warps(taken % 2, quad(e));
        continue;
      }
      const float* own = (float*)(shared + AT_PARTS) + 4 * (place * ROWS * QUADS + quad(e));
      #pragma unroll
      for (int rank = 0; rank < CTAS; rank++) add_to(sums[e], own + 4 * rank * SHARE);
    }
    if (CTAS == 1) have_added(taken % 2);
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
  __device__ __forceinline__ void put(int unit, uint2 gates, float4 u) const {
    const int token = 4 * (work.rank * OWN_QUADS + thread % OWN_QUADS);
    *(uint2*)(h + (work.first + unit) * TOKENS + token) =
        uint2{hidden(gates.x, u.x, u.y), hidden(gates.y, u.z, u.w)};
  }
  __device__ __forceinline__ void find(int tile, int row, float4 g) const {
    const int unit = ROWS * tile + row;
    const bool there = thread < SHARE && row < work.rows(tile);
    const uint2 v{pack_pair(g.x, g.y), pack_pair(g.z, g.w)};
    const uint2 masks{positive_mask(v.x), positive_mask(v.y)};
    const uint2 own{v.x & masks.x, v.y & masks.y};
    if (GATED && there) *gates(unit) = own;
    if (!GATED && there) put(unit, own, float4{1, 1, 1, 1});
    const u32 all = __ballot_sync(~0u, there && (masks.x | masks.y));
    const u32 lanes = (1u << OWN_QUADS) - 1 << (thread % 32 / OWN_QUADS * OWN_QUADS);
    if (thread < SHARE && thread % OWN_QUADS == 0)
      for (int rank = 0; rank < CTAS; rank++)
        tell(smem_address(shared) + AT_FLAGS + unit * CTAS + work.rank, all & lanes ? ON : OFF,
             work.place_of(rank));
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
        float4 sums[EACH];
        take(sums);
        #pragma unroll
        for (int e = 0; e < EACH; e++) {
          const int row = quad(e) / OWN_QUADS, up_row = ROWS * (i - LAG) + row;
          if (!up) find(i - LAG, row, sums[e]);
          else if (thread < SHARE && up_row < found) finish(up_row, sums[e]);
        }
        __syncwarp();
      }
      if (GATED && !up) {
        adders_in_step();  // who finishes a unit may not be who found it
        found = count_on(work.tiles), tiles = (found + ROWS - 1) / ROWS;
      }
    }
    adders_in_step();
    if (thread == 0) count_me(counts);
  }
};

// ---- the list of units that are on ----

struct Known { u64 bits; int rank, unit; };  // a word: units on before it, and its first unit
static_assert(sizeof(Known) == 16, "AT_LIST");
__device__ __forceinline__ Known* known() { return (Known*)(shared + AT_KNOWN); }
__device__ __forceinline__ u16* list() { return (u16*)(shared + AT_LIST); }

// Wait for all words, and count the units before each. For one warp, of which a lane has some
// neighbouring words, all asked for at once.
__device__ __forceinline__ void rank_words(const u64* words) {
  constexpr int OF_LANE = smaller(8, (ALL_WORDS + 31) / 32);
  const int lane = threadIdx.x % 32;
  int found = 0;
  #pragma unroll 1
  for (int first = OF_LANE * lane; first - OF_LANE * lane < ALL_WORDS; first += 32 * OF_LANE) {
    u64 bits[OF_LANE], all;
    do {
      all = THERE;
      #pragma unroll
      for (int i = 0; i < OF_LANE; i++)
        bits[i] = first + i < ALL_WORDS ? seen(words + first + i) : THERE, all &= bits[i];
    } while (!all);
    int own = 0;
    #pragma unroll
    for (int i = 0; i < OF_LANE; i++) own += __popcll(bits[i] &= ~THERE);
    int up_to = own;
    #pragma unroll
    for (int by = 1; by < 32; by *= 2) {
      const int below = __shfl_up_sync(~0u, up_to, by);
      if (lane >= by) up_to += below;
    }
    int rank = found + up_to - own;
    #pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
      const int cluster = (first + i) / WORDS, word = (first + i) % WORDS;
      const int unit = first_unit(cluster) + 2 * HALF * word;
      if (first + i < ALL_WORDS) known()[first + i] = Known{bits[i], rank, unit};
      rank += __popcll(bits[i]);
    }
    found += __shfl_sync(~0u, up_to, 31);
  }
  if (lane == 0) *(int*)(shared + AT_FOUND) = found;
}

struct Segment { int first, length; };  // of the units that are on, a CTA's

__device__ __forceinline__ Segment segment_of(int cta) {
  const int found = *(const int*)(shared + AT_FOUND), first = found * cta / SPLIT;
  return {first, found * (cta + 1) / SPLIT - first};
}

// List a segment, each thread the units of half a word: by one warp it took 2 ns a unit.
__device__ __forceinline__ void list_units(Segment segment) {
  #pragma unroll 1
  for (int half = threadIdx.x; half < 2 * ALL_WORDS; half += LISTERS) {
    const Known word = known()[half / 2];
    const u32 low = word.bits & (1 << HALF) - 1, high = word.bits >> HALF;
    int unit = word.unit - 1, place = word.rank - segment.first;
    if (half % 2) unit += HALF, place += __popc(low);
    #pragma unroll 1
    for (u32 left = half % 2 ? high : low; left; left &= left - 1, place++)
      if (0 <= place && place < segment.length) list()[place] = unit + __ffs(left);
  }
}

__device__ __forceinline__ void wait_for_h(const int* counts) {
  if (threadIdx.x % 32 == 0)
    while (counted(counts) != CTAS * CLUSTERS) {}
  __syncwarp();
}
// The last CTA to have seen that all of H is there resets words and counters. For one warp.
__device__ __forceinline__ void reset(u64* words, int* counts) {
  const int lane = threadIdx.x % 32;
  const int before = lane == 0 ? atomicAdd(counts + 1, 1) : 0;
  if (__shfl_sync(~0u, before, 0) != CTAS * CLUSTERS - 1) return;
  #pragma unroll 1
  for (int i = lane; i < ALL_WORDS; i += 32) words[i] = 0;
  if (lane < 2) counts[lane] = 0;
}

// ---- Y ----

constexpr int TALL = smaller(4, WIDTH / 16), OWN = 16 * TALL;  // a warp's products; columns
constexpr int COLUMN_WARPS = WIDTH / OWN, UNIT_WARPS = WARPS / COLUMN_WARPS;
constexpr int W_STRIDE = 2 * OWN + 16, H_STRIDE = TOKENS == 8 ? 16 : 2 * TOKENS + 16;
constexpr int UNITS_AT_ONCE = RING_BYTES / (WARPS * (W_STRIDE + H_STRIDE));  // of a warp
constexpr int UNITS = UNITS_AT_ONCE >= 256 ? 64 : UNITS_AT_ONCE >= 128 ? 32 : 16;  // of a stage
constexpr int STAGE_BYTES = UNITS * (W_STRIDE + H_STRIDE);
constexpr int STAGES = smaller(8, RING_BYTES / (WARPS * STAGE_BYTES));
static_assert(UNIT_WARPS * COLUMN_WARPS == WARPS, "too many columns");
static_assert(STAGES >= 2, "too little room for rows of Wd");
static_assert(AT_OUT + 4 * UNIT_WARPS * TOKENS * OUT_STRIDE <= AT_BARRIERS, "no room for Y");

// Copy PIECES of 16 bytes, from `skipped` on, of UNITS rows of a list, of which so many are there.
template <int PIECES, int STRIDE, int ROW_BYTES>
__device__ __forceinline__ void bring_pieces(u32 to, const u16* list, int units, int skipped,
                                             const char* from) {
  constexpr u32 NOWHERE = ~0u;
  u32 at[(UNITS * PIECES + 31) / 32];  // all are looked up before the first is copied
  #pragma unroll
  for (int first = 0; first < UNITS * PIECES; first += 32) {
    const int i = first + threadIdx.x % 32, row = i / PIECES, piece = i % PIECES;
    const bool there = i < UNITS * PIECES && row < units && skipped + piece < ROW_BYTES / 16;
    at[first / 32] = there ? list[row] * (u32)ROW_BYTES + 16 * (skipped + piece) : NOWHERE;
  }
  #pragma unroll
  for (int first = 0; first < UNITS * PIECES; first += 32) {
    const int i = first + threadIdx.x % 32, row = i / PIECES, piece = i % PIECES;
    const bool there = at[first / 32] != NOWHERE;
    if (UNITS * PIECES % 32 == 0 || i < UNITS * PIECES)
      copy_16(to + row * STRIDE + 16 * piece, from + (there ? at[first / 32] : 0), there);
  }
}

using Sums = float[TALL][TOKENS / 8][4];

// A warp's share of a segment of the list: every UNIT_WARPS-th UNITS of it, for OWN columns.
struct Share {
  const u16* list;
  int units, steps, skipped;  // units of the list, from the warp's first on; 16 bytes of columns
  const char *wd, *h;
  u32 stages;
  __device__ __forceinline__ Share(int length, int column, const char* wd, const char* h)
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
  __device__ __forceinline__ void bring_wd(int step) const {
    if (step < steps)
      bring_pieces<OWN / 8, W_STRIDE, 2 * K>(stage(step), list + before(step),
                                             units - before(step), skipped, wd);
  }
  __device__ __forceinline__ void bring_h(int step) const {
    if (step < steps)
      bring_pieces<TOKENS / 8, H_STRIDE, 2 * TOKENS>(
          stage(step) + UNITS * W_STRIDE, list + before(step), units - before(step), 0, h);
  }
  __device__ __forceinline__ void add(Sums& d, u32 stage) const {
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
  // Before H is there.
  __device__ __forceinline__ void begin() const {
    #pragma unroll 1
    for (int step = 0; step < STAGES - 1; step++) bring_wd(step);
  }
  __device__ __forceinline__ void add_all(Sums& d) const {
    #pragma unroll 1
    for (int step = 1 - STAGES; step < steps; step++) {
      if (step >= 0) {
        cp_async_wait<STAGES - 2>();
        __syncwarp();
        bring_wd(step + STAGES - 1);
      }
      bring_h(step + STAGES - 1);
      cp_async_commit();
      if (step >= 0) add(d, stage(step));
    }
  }
};

__device__ __forceinline__ void write(u16* y, int token, int column, float4 v) {
  if (column < K)
    *(uint2*)(y + (u64)token * K + column) = uint2{pack_pair(v.x, v.y), pack_pair(v.z, v.w)};
}

// Add up the warps' sums, rows of tokens, and then the CTAs': each writes an equal part of the
// columns, and is sent all sums of those: no CTA fetches any, or waits to end for those that do.
__device__ __forceinline__ void put_out(const Sums& d, u16* y, int cta, int column, int m,
                                        Barriers bars) {
  constexpr int PART_OF_CTA = WIDTH / SPLIT, QUADS_OF_TOKEN = PART_OF_CTA / 4;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, quads = m * QUADS_OF_TOKEN;
  float *const out = (float*)(shared + AT_OUT), *const pushed = (float*)shared;
  __syncthreads();  // this CTA is done with all else in shared memory
  if (warp < WARPS) {
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
      write(y, token, column + at, sum);
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
    write(y, i / QUADS_OF_TOKEN, column + cta * PART_OF_CTA + at, sum);
  }
}

// ---- the kernel ----

// By warps that do not ask for X.
__device__ __forceinline__ void zero_what_is_not_copied(const Work& work) {
  constexpr int BUSY = 32 * WARPS;
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
  if (warp < WARPS) {
    if (CTAS > 1) cluster_arrive_relaxed();  // before X, which takes up to 5 us
    ask_for_x(own, (const uint4*)x, work.rank, m);
  } else {
    if (warp == PRODUCER) {  // at once: nobody else writes what is copied
      if (threadIdx.x % 32 == 0) bars.init_all(), inits_are_done(), fence_proxy_async();
      __syncwarp();
      producer.bring_gates(0, min(FIRST, work.tiles), wg);
    }
    zero_what_is_not_copied(work);
    if (CTAS > 1) cluster_arrive();
    if (warp == PRODUCER) producer.send_gates_to_l2(FIRST, wg);
  }
  if (CTAS > 1) cluster_wait();
  else __syncthreads();
  const int cta = blockIdx.x % SPLIT, column = blockIdx.x / SPLIT * WIDTH;
  Sums sums = {};
  if (warp > PRODUCER) {
    Adder{work, bars, h, counts, (int)threadIdx.x - FIRST_ADDER, 0, 0}.run();
  } else {
    if (warp < WARPS) {
      multiply_tiles(own, work, bars);
    } else {
      listers_in_step();  // X is there: more copies would have been in its way
      producer.bring_gates(FIRST, work.tiles, wg);
      producer.bring_ups(wu, wd, words);
      rank_words(words);
    }
    listers_in_step();  // ranks are there, and the ring is free
    const Segment segment = segment_of(cta);
    list_units(segment);
    listers_in_step();  // the list is there
    const Share share(segment.length, column, wd, (const char*)h);
    if (warp < WARPS) {
      share.begin();
      listers_in_step();  // H is there
      share.add_all(sums);
    } else {
      wait_for_h(counts);
      listers_in_step();  // H is there
      reset(words, counts);
    }
  }
  put_out(sums, y, cta, column, m, bars);
}
