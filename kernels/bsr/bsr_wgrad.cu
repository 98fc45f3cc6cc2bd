// dW = dY[m, n].T @ X[m, k] at W's stored blocks, on Hopper's tensor cores (wgmma), fed by its copy
// engine (TMA). Compute capability 9.0 alone.
//
//   an item: up to eight 64 x 64 tiles of W, all tokens        a step: DEPTH tokens
//
//                dY.T                  X                              dW
//              tokens              x0   x1   x2   x3
//            +--------+          +----+----+----+----+         +----+----+----+----+
//   slice a  | dy0    |      x   | 64 columns each   |    =    | a0 | a1 | a2 | a3 |  half 0
//            +--------+          |    |    |    |    |         +----+----+----+----+
//   slice b  | dy1    |          +----+----+----+----+         | b0 | b1 | b2 | b3 |  half 1
//            +--------+                                        +----+----+----+----+
//
// Each of two warpgroups holds a slice of 64 rows x four columns of 64, a half, in 128 registers a
// thread: one m64n256k16 reads a tile of dY and four of X that lie side by side in shared memory.
// With WIDE = 2 it is two columns, and m64n128k16.
// The halves may have other slices and columns: they share whatever tiles both read (_wgrad_schedule.py).
//
//   slot:  x0 x1 x2 x3 x4 x5 x6 dy0 dy1       half 0 reads four tiles of X from x0 on,
//          |--half 0-|          |   |         half 1 four from where its own begin
//                |--half 1-|    0   1
//
// What a half lacks of four columns is computed from whatever lies there, and not stored: a column
// of the product depends on that column of X alone. Both operands lie in rows of tokens, [DEPTH
// tokens x 64], and are read by columns (imm-trans-a, imm-trans-b): the next 16 tokens are 16 rows,
// 2048 bytes, on; eight rows are 1024 bytes (SBO), the next 64 columns a tile on (LBO). TMA reads
// zeros beyond m, n and k, which add nothing, and are what a block stores outside of W.
//
// The pipeline: 12 warps, one CTA an SM for the whole launch.
//
//    warp 8     tiles 0, 4, 8 ---+    +--------+--------+-- --+     +--> warpgroup 0: half 0
//    warp 9     tiles 1, 5    ---+--> | slot 0 | slot 1 | ... | ----+
//    warp 10    tiles 2, 6    ---+    +--------+--------+-- --+     +--> warpgroup 1: half 1
//    warp 11    tiles 3, 7    ---+                                  |
//                 ^                 full: the bytes have landed ----+         |
//                 +---------------- empty: both warpgroups are done with it <-+
//
// Few items would leave SMs idle, so an item may be cut between workers: a piece is an item, or
// every second, third, ... of its steps. All workers then go through the tokens at one pace, and
// what one brings from memory the others find in L2; with ranges of tokens instead, dY and X came
// from memory several times, and 90 % took 53 us (NOTES.md). A worker sums its pieces one
// after the other. A whole item goes from the registers to the blocks, four 8 x 8 pieces
// transposed among the four lanes of a row so that each stores 16 bytes. A cut one goes to
// `partials` in fp32, in the registers' own order:
//
//       worker 0    [ item 0, steps 0, 2, 4, ... ]         adds up units 0 to 3 of item 0
//       worker 1    [ item 0, steps 1, 3, 5, ... ]   then  units 4 to 7
//
// When all of its pieces are done, a worker adds up a share of each item that it holds a piece of,
// 64 rows x 32 columns (a unit) at a time, always in the order of the pieces: equal bits in every
// launch. Nobody waits before all of its own partials are written, and all workers run at the same
// time, one an SM, so the wait ends. Each half of an item has a counter: its first piece adds 2^31
// less the number of others, each other 1; so the highest bit changes when all are there, the rest
// is zero again, and the next launch, or a replay, needs no reset.
//
// Counts of a step of 64 tokens: 8 tiles are 4.2 MFLOP, 700 ns of an SM at the 790 TFLOP/s that
// cuBLAS reaches on an H200. Six tiles of loads (two slices, four columns, as in blocks of 128) are
// 48 KB, 735 ns at the 8.8 TB/s that TMA brings from L2 to shared memory; nine (nothing shared) are
// 72 KB, 1100 ns. A partial sum is 128 KB written and 128 KB read, about 6 us of an SM.
//
// Compiled with -DDEPTH=64|32 (tokens in a step) -DTILES=6|9 (in a slot) -DWIDE=4|2 (columns in a
// half), the constants of the lists (bsr_wgrad.constants_of) and what hopper.cuh asks for.
// Source: PTX ISA 9.0, wgmma (matrix descriptor, strides), mbarrier, cp.async.bulk.tensor, memory
// consistency model.

#include "hopper.cuh"

#if WIDE == 4
#define COLUMNS 256
#else
#define COLUMNS 128
#endif

constexpr int ROW_BYTES = 128;
constexpr int TILE_BYTES = DEPTH * ROW_BYTES, SLOT_BYTES = TILES * TILE_BYTES;
constexpr int SLOTS = RING_BYTES / SLOT_BYTES;  // 4, 9 of six tiles; 3, 6 of nine
constexpr int PRODUCERS = 4, BOXES_EACH = (TILES + PRODUCERS - 1) / PRODUCERS;
constexpr int GROUP = 128, SUMS = SIDE * SIDE * WIDE / GROUP;  // threads of a warpgroup; of one
constexpr int UNIT = 16, UNITS = SUMS / UNIT;                      // 32 columns
constexpr u32 DONE = 1u << 31;

struct Maps { TensorMap dy, x; };

// What the host lays out (Work in _wgrad_schedule.py): for each piece one of Loads and two of Sums.
struct alignas(16) Loads {
  int boxes[BOXES];  // of each tile in a slot: its first column, + 1 if of dY; -1 is not loaded
  int step, count;   // the first step, and how many
  int apart;         // by how many steps
};
struct alignas(16) Sums {
  int dy, x, count;      // where in a slot the half's tiles begin; steps
  int tiles;             // of dW: up to four; of an empty half none
  int first, share, of;  // the item's first partial sum; which of how many pieces this is
  u32 adds;              // to the item's counter
  int out[4];            // where in the values each tile begins, in 64 elements
};

// ---- the ring of slots, and where in it a thread is ----

struct Ring {
  u32 tiles, full, empty;  // shared memory
  int slot;
  u32 parity;
  __device__ __forceinline__ u32 tile(int i) const {
    return tiles + slot * SLOT_BYTES + i * TILE_BYTES;
  }
  __device__ __forceinline__ u32 filled() const { return full + 8 * slot; }
  __device__ __forceinline__ u32 freed() const { return empty + 8 * slot; }
  __device__ __forceinline__ void wait_filled() const { wait(filled(), parity, "a full slot"); }
  __device__ __forceinline__ void wait_freed() const { wait(freed(), parity, "a free slot"); }
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) { slot = 0; parity ^= 1; }
  }
};

// ---- producers: one thread of each of four warps, since a box takes it about 170 clocks ----

__device__ __forceinline__ void produce(const Maps& maps, const Loads* loads, int at, int end,
                                        Ring ring, int producer) {
  for (; at < end; at++) {
    int boxes[BOXES_EACH], bytes = 0;
    #pragma unroll
    for (int i = 0; i < BOXES_EACH; i++) {
      const int tile = producer + PRODUCERS * i;
      boxes[i] = tile < TILES ? loads[at].boxes[tile] : -1;
      bytes += boxes[i] >= 0 ? TILE_BYTES : 0;
    }
    int token = loads[at].step * DEPTH;
    const int apart = loads[at].apart * DEPTH;
    for (int left = loads[at].count; left > 0; left--) {
      ring.wait_freed();
      arrive_expecting(ring.filled(), bytes);
      #pragma unroll
      for (int i = 0; i < BOXES_EACH; i++) {
        const TensorMap* map = boxes[i] & 1 ? &maps.dy : &maps.x;
        const u32 to = ring.tile(producer + PRODUCERS * i);
        if (boxes[i] >= 0) load(to, map, boxes[i] & ~1, token, ring.filled());
      }
      ring.advance();
      token += apart;
    }
  }
}

// ---- consumers ----

__device__ __forceinline__ void release(const Ring& ring, int slot) {
  if (threadIdx.x % GROUP == 0) arrive(ring.empty + 8 * slot);
}

// Add up the products of one half of a piece; those of one step are in flight.
__device__ __forceinline__ void add_up(float (&d)[SUMS], Ring& ring, int dy, int x, int count) {
  constexpr int STEP = 16 * ROW_BYTES >> 4;
  #pragma unroll
  for (int i = 0; i < SUMS; i++) d[i] = 0.f;
  int held = -1;  // the slot that products in flight read
  for (; count > 0; count--) {
    ring.wait_filled();
    const u64 a = descriptor(ring.tile(dy)), b = descriptor(ring.tile(x), ROW_BYTES, TILE_BYTES);
    begin_products();
    #pragma unroll
    for (int i = 0; i < DEPTH / 16; i++) WGMMA(COLUMNS, a + i * STEP, b + i * STEP, 1, 1);
    end_of_products();
    products_left<1>();
    if (held >= 0) release(ring, held);
    held = ring.slot;
    ring.advance();
  }
  products_left<0>();
  if (held >= 0) release(ring, held);
}

// A half without tiles lets the slots pass. One thread waits for them, and the others for it:
// further ahead than a round, the parity of a slot means nothing.
__device__ __forceinline__ void pass_by(Ring& ring, int count, int half) {
  for (; count > 0; count--) {
    if (threadIdx.x % GROUP == 0) ring.wait_filled();
    release(ring, ring.slot);
    ring.advance();
  }
  warpgroup_in_step(half + 1);
}

// Store a unit. Of 64 x 8 sums a thread holds, in row thread / 4 of its warp's 16 and eight rows
// below it, columns 2 * (thread % 4) and the next; of a unit, four times that.
__device__ __forceinline__ void put(const float* s, char* values, int out, int unit, int width) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane / 4;
  const int column = unit % 2 * 32 + lane % 4 * 8;
  char* to = values + 2 * ((long long)out * SIDE + (long long)row * width + column);
  #pragma unroll
  for (int below = 0; below < 2; below++, to += 16LL * width) {
    u32 words[4];
    #pragma unroll
    for (int i = 0; i < 4; i++) words[i] = pair_of(s[4 * i + 2 * below], s[4 * i + 2 * below + 1]);
    exchange(words);
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};"
                 :: "l"(to), "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
  }
}

// A thread's part of partial sum p: SUMS / 4 pieces of 16 bytes, each next to its neighbours'.
__device__ __forceinline__ float* part_of(float* partials, int p, int half) {
  return partials + (2LL * p + half) * SUMS * GROUP + threadIdx.x % GROUP * 4;
}

// Write a partial sum and count it; thread 0 returns what the counter was before.
__device__ __forceinline__ u32 hand_in(const float (&d)[SUMS], float* partials, u32* counters,
                                       const Sums& sums, int half) {
  float* to = part_of(partials, sums.first + sums.share, half);
  #pragma unroll
  for (int i = 0; i < SUMS; i += 4)
    if (i / (SUMS / WIDE) < sums.tiles)
      asm volatile("st.global.v4.f32 [%0], {%1, %2, %3, %4};"
                   :: "l"(to + i * GROUP), "f"(d[i]), "f"(d[i + 1]), "f"(d[i + 2]),
                      "f"(d[i + 3]) : "memory");
  warpgroup_in_step(half + 1);
  u32 before = 0;
  if (threadIdx.x % GROUP == 0)
    asm volatile("atom.release.gpu.global.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counters + 2 * sums.first + half), "r"(sums.adds)
                 : "memory");
  return before;
}

__device__ __forceinline__ void wait_for_all(const u32* counter, u32 before) {
  for (u32 tries = 0, now = before; !((now ^ before) & DONE); tries++) {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(now) : "l"(counter) : "memory");
#ifdef WATCHDOG
    if (tries == 1 << 20) __assertfail("all partial sums", __FILE__, __LINE__, "wait_for_all", 1);
#endif
  }
}

// Add up this piece's share of its item's units; `before` is any of this launch's counters as it
// was, since their highest bits change together.
__device__ __forceinline__ void finish(float* partials, const u32* counters, u32 before,
                                       const Sums& sums, int half, char* values, int width) {
  const int units = UNITS / WIDE * sums.tiles, first = sums.first, share = sums.share, of = sums.of;
  if (threadIdx.x % GROUP == 0) wait_for_all(counters + 2 * first + half, before);
  warpgroup_in_step(half + 1);
  for (int unit = units * share / of; unit < units * (share + 1) / of; unit++) {
    float total[UNIT] = {};
    #pragma unroll 4
    for (int p = 0; p < of; p++) {
      const float* from = part_of(partials, first + p, half) + unit * UNIT * GROUP;
      #pragma unroll
      for (int i = 0; i < UNIT; i += 4) {
        float s[4];
        asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                     : "=f"(s[0]), "=f"(s[1]), "=f"(s[2]), "=f"(s[3]) : "l"(from + i * GROUP)
                     : "memory");
        #pragma unroll
        for (int j = 0; j < 4; j++) total[i + j] += s[j];
      }
    }
    put(total, values, sums.out[unit / (UNITS / WIDE)], unit, width);
  }
}

// The pieces of a worker, for one warpgroup; those of the next are read while products run.
__device__ __forceinline__ void consume(const Sums* list, int begin, int end, Ring ring, int half,
                                        char* values, int width, float* partials, u32* counters) {
  float d[SUMS];
  u32 before = 0;
  Sums sums = list[2 * begin + half];
  for (int at = begin; at < end; at++) {
    const Sums next = list[2 * (at + 1) + half];
    const int count = __shfl_sync(~0u, sums.count, 0), tiles = __shfl_sync(~0u, sums.tiles, 0);
    if (tiles == 0) {
      pass_by(ring, count, half);
    } else {
      add_up(d, ring, sums.dy, sums.x, count);
      if (__shfl_sync(~0u, sums.of, 0) > 1) {
        before = hand_in(d, partials, counters, sums, half);
      } else {
        #pragma unroll
        for (int unit = 0; unit < UNITS; unit++) {
          const int tile = unit / (UNITS / WIDE);
          if (tile < tiles) put(d + unit * UNIT, values, sums.out[tile], unit, width);
        }
      }
    }
    sums = next;
  }
  for (int at = begin; at < end; at++) {
    const Sums& mine = list[2 * at + half];
    if (__shfl_sync(~0u, mine.tiles, 0) && __shfl_sync(~0u, mine.of, 0) > 1)
      finish(partials, counters, before, mine, half, values, width);
  }
}

// ---- the kernel: a worker an SM, each with its own list of pieces ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sum_blocks(const __grid_constant__ Maps maps, const Loads* loads, const Sums* sums,
           const int* starts, char* values, int width, float* partials, u32* counters) {
  extern __shared__ char shared[];
  __shared__ u64 full[SLOTS], empty[SLOTS];
  const u32 tiles = (address_of(shared) + 1023) & ~1023u;  // where a swizzled tile may start
  Ring ring{tiles, address_of(full), address_of(empty), 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      init(ring.full + 8 * i, PRODUCERS);  // each with bytes to expect
      init(ring.empty + 8 * i, 2);         // warpgroups
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / GROUP, 0), warp = threadIdx.x / 32 % 4;
  const int begin = __shfl_sync(~0u, starts[blockIdx.x], 0);
  const int end = __shfl_sync(~0u, starts[blockIdx.x + 1], 0);
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    ring.parity = 1;  // slots are free before the first round
    if (threadIdx.x % 32 == 0) produce(maps, loads, begin, end, ring, warp);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    consume(sums, begin, end, ring, group, values, width, partials, counters);
  }
}
