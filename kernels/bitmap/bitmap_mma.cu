// Y[m, n] = X[m, k] @ W[n, k].T, W with zeros anywhere (formats/bitmap.py), for few tokens.
// W is loaded as records and decoded into the registers of the tensor core (mma.sync).
//
//   A CTA has some rows of tiles of W, 16 features each: ROW_WARPS of them at a time. It has
//   ROW_WARPS x PARTS warps and one that loads X. The PARTS divide k: part p has the tiles p,
//   p + PARTS, ... With ROW_WARPS = 3, PARTS = 2:
//
//        W                                                X.T
//        +--------+--------+--------+--------+- ...       +------+   a step of X: PARTS tiles,
//        | warp 0 | warp 3 | warp 0 | warp 3 |            | 256  |   in a ring of X_STAGES that
//        | 16x256 |        |        |        |            | rows |   all warps share
//        +--------+--------+--------+--------+- ...       +------+
//        | warp 1 | warp 4 | ...                     x    |      |  =  Y.T
//        +--------+--------+- ...                         +------+
//        | warp 2 | warp 5 | ...                          | ...  |
//        +--------+--------+- ...                         +------+
//
//   Each warp has a ring of STAGES records, which its own lanes fill by bulk copies. At the
//   end parts 1 and on give their sums to part 0 through shared memory, always added in the same
//   order, so equal inputs give equal bits.
//
//   With SPLIT the CTAs of a cluster have the same rows and divide k first: CTA c has parts c PARTS
//   to c PARTS + PARTS - 1 of SPLIT x PARTS, so it reads 1 / SPLIT of X. At the end CTA 0 receives
//   the sums of the others by st_async and adds them in order. A CTA then has one block of rows.
//
// W is operand A: 16 features x 16 columns of k. Lane 4 g + q holds rows g and g + 8. Its columns
// are 8 q .. 8 q + 7 of each strip of 32, four of them per instruction, so it reads its part of X.T
// as 8 columns of token g. (The order of k within an instruction is free.)
//
// The decode of 4 elements of a row, which are two registers of A:
//
//     bits 4 ──> entry (shared memory, 16 x 8 bytes) ── count, two selectors, is it full
//     position ──> three words of the lane's stream (its own bank) ── shift ──> 4 values, W0 W1
//     not full: the last value becomes zero      a = prmt(W0, W1, selector)
//
// Fewer than 4 elements never need the last value, so it can be the zero. The position then advances
// by the count. Lanes drift apart, but no two read the same bank.
//
// Before that, each lane copies its tail, the part of its stream after the words that lie side by
// side, below these words, so that word j of a lane is at row j.
//
// Macros from bitmap_mma.py: TOKENS=8|16|32|64, ROW_WARPS, PARTS, STAGES, X_STAGES, SPLIT,
// TABLE=0|1 (the decode without a table is described below), VALUE_BYTES=2|1, and FP16=0|1, the type
// that the tensor core multiplies (0 is bf16; 1 also for fp8, whose Y is bf16).

using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int ROWS = 16, COLUMNS = 256, STRIPS = 8, WORDS_AT = 592, STARTS_AT = 512;  // of a record
constexpr int NB = TOKENS / 8;
constexpr int WARPS = ROW_WARPS * PARTS, THREADS = 32 * (WARPS + 1);
constexpr int ALL_PARTS = SPLIT * PARTS;
constexpr int TABLE_BYTES = 128, BARRIERS = WARPS * STAGES + 2 * X_STAGES + 1;
constexpr int BARRIER_BYTES = (8 * BARRIERS + 15) / 16 * 16;
constexpr int OF_PART = ROW_WARPS * NB * 32;  // sums of a part, of 16 bytes
constexpr int CLUSTER_BYTES = (SPLIT - 1) * OF_PART * 16;
// The pitch of rows of X is a multiple of 128 bytes plus a quarter or a half of that, so that lanes
// that read together hit all banks.
constexpr int X_ROW = COLUMNS * VALUE_BYTES, X_STEP = X_ROW + 32 * VALUE_BYTES;
#if VALUE_BYTES == 2
using Piece = uint4;  // 8 columns of X
#else
using Piece = uint2;
#endif

// `tiles` along k. `workers`, CTAs or clusters, divide the rows of tiles; as many more workers have
// the next TOKENS tokens.
struct Weights { const char* records; const int* offsets; int row_tiles, tiles, workers; };
struct Activations { const char* x; u64 stride; int m, k; };  // bytes of a row

// ---- PTX ----

#include "hopper.cuh"
#include "mma.cuh"

__device__ __forceinline__ u32 load_32(u32 address) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ uint2 load_64(u32 address) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(address));
  return v;
}
__device__ __forceinline__ uint4 load_128(u32 address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
  return v;
}
__device__ __forceinline__ u32 load_16(u32 address) {
  u16 v;
  asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address));
  return v;
}
__device__ __forceinline__ void store_32(u32 address, u32 v) {
  asm volatile("st.shared.u32 [%0], %1;" :: "r"(address), "r"(v) : "memory");
}
__device__ __forceinline__ u32 prmt(u32 a, u32 b, u32 selector) {
  u32 v;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(v) : "r"(a), "r"(b), "r"(selector));
  return v;
}
// Move the upper half to the lower one. The sum is exact, because the halves are selectors, which
// are finite and normal as fp16. A shift would use the integer pipe.
__device__ __forceinline__ u32 upper_half(u32 v) {
  u32 upper;
  asm("{\n.reg .b16 l, h;\n.reg .b32 t;\nmov.b32 {l, h}, %1;\nmov.b32 t, {h, h};\n"
      "add.f16x2 %0, t, %2;\n}" : "=r"(upper) : "r"(v), "r"(0));
  return upper;
}
// Writes zeros if not `there`.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool there) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0) : "memory");
}
// Arrive on a barrier when all copies of this thread so far have landed.
__device__ __forceinline__ void cp_async_arrive(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void multiplying_warps_sync() {
  asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS) : "memory");
}
// Four values of fp8 (e4m3) as fp16: exact.
__device__ __forceinline__ void widen(u32& low, u32& high, u32 four) {
  asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %2;\ncvt.rn.f16x2.e4m3x2 %0, l;\n"
      "cvt.rn.f16x2.e4m3x2 %1, h;\n}" : "=r"(low), "=r"(high) : "r"(four));
}
__device__ __forceinline__ u16 rounded(float f) {
  u16 v;
#if FP16 && VALUE_BYTES == 2
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(v) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(v) : "f"(f));
#endif
  return v;
}

// ---- the decode ----

// A lane's place in a stream: the address of word 0, and the position in bits.
struct Stream { u32 base, position; };

#if TABLE

// ---- the table: for the 4 bits of 4 elements ----
//
//     16 bits   16 x number of elements << 16 | selector of elements 0 and 1
//               0xffff << 16 if all four      | selector of elements 2 and 3
//     8 bits    8 x number of elements << 16  | selector of all four
//
// A selector names bytes: in 16 bits of four values, in 8 bits of four values and of a zero. For an
// element that is zero it names value 3, which is not needed then, or the zero.

#if VALUE_BYTES == 2
using Entry = uint2;
__device__ __forceinline__ Entry entry_of(u32 bits) {
  u32 words[2] = {0, bits == 15 ? 0xffff0000 : 0}, rank = 0;
  for (int e = 0; e < 4; e++) {
    const u32 value = bits >> e & 1 ? rank++ : 3;
    words[e / 2] |= (0x10 + 0x22 * value) << e % 2 * 8;
  }
  return {words[0] | rank << 20, words[1]};
}
#else
using Entry = u32;
__device__ __forceinline__ Entry entry_of(u32 bits) {
  u32 selector = 0, rank = 0;
  for (int e = 0; e < 4; e++) selector |= (bits >> e & 1 ? rank++ : 4) << 4 * e;
  return selector | rank << 19;
}
#endif

struct Word { u32 bits; };  // of 32 elements: four instructions

__device__ __forceinline__ Word word_of(u32 bits) { return {bits}; }
__device__ __forceinline__ Stream stream_at(u32 base) { return {base, 0}; }
__device__ __forceinline__ void pass(Stream&, const Word&) {}

// The address of the entry of the 4 bits from `shift` on.
__device__ __forceinline__ u32 entry_at(u32 table, u32 bits, int shift) {
  constexpr int UP = sizeof(Entry) == 8 ? 3 : 2;
  return table + ((shift < UP ? bits << (UP - shift) : bits >> (shift - UP)) & 15 << UP);
}

// Four elements of a row: two registers of A.
__device__ __forceinline__ void decode(u32& low, u32& high, Stream& s, u32 entry_address) {
  const u32 at = s.base + ((s.position & ~31u) << 2);  // 32 bits: a row of 128 bytes further
#if VALUE_BYTES == 2
  const Entry entry = load_64(entry_address);
  const u32 w0 = load_32(at), w1 = load_32(at + 128), w2 = load_32(at + 256);
  const u32 first = __funnelshift_r(w0, w1, s.position);  // the shift takes 5 bits
  const u32 second = __funnelshift_r(w1, w2, s.position) & (entry.y | 0xffff);
  low = prmt(first, second, entry.x), high = prmt(first, second, entry.y);
  s.position += entry.x >> 16;
#else
  const Entry entry = load_32(entry_address);
  const u32 w0 = load_32(at), w1 = load_32(at + 128);
  const u32 four = prmt(__funnelshift_r(w0, w1, s.position), 0, entry);
  widen(low, high, four);
  s.position += entry >> 16;
#endif
}

// A of instruction `at` of the word.
__device__ __forceinline__ void decode(u32 (&a)[4], Stream& s, const Word& word, int at,
                                       u32 table) {
  decode(a[0], a[2], s, entry_at(table, word.bits, 8 * at));
  decode(a[1], a[3], s, entry_at(table, word.bits, 8 * at + 4));
}

#else

// Without a table. Byte `at` of a word has the bits of an instruction: 4 elements of row g, then 4
// of row g + 8. A population count finds the value after a boundary P among them. Values before P
// are counted backwards from P and values after it forwards, so the two elements of a register
// depend only on their own two bits and on the number of values between them and P.
//
//     16 bits   values v[-4] .. v[3] around P, five words and four shifts:  F' N' | N F
//               a pair beside P   prmt(N, 0, selector)
//               the pair beyond   prmt(prmt(N and F, by the count of the first), 0, selector)
//     8 bits    P is in the middle of each 4 elements:  v[-2] v[-1] | v[0] v[1]
//               all four          prmt(two words, shifted, 0, selector)
//
// A permute is also a table of eight bytes that four nibbles index at once. It makes the selectors,
// two bytes each, from nibbles 0 b1 b0 and 1 b1 b0, or 0 b1 b0 and 1 b3 b2.

__device__ __forceinline__ Stream stream_at(u32 base) {
  return {base, VALUE_BYTES == 2 ? 0u : -16u};  // in 8 bits a window begins two values before P
}
__device__ __forceinline__ u32 before(u32 bits, int elements) {
  return __popc(bits & ((1u << elements) - 1)) * (8 * VALUE_BYTES);
}

#if VALUE_BYTES == 2
struct Word { u32 bits, index[4]; };  // an index for each pair of an instruction, a byte for each `at`
__device__ __forceinline__ Word word_of(u32 bits) {
  Word word{bits};
  for (int pair = 0; pair < 4; pair++)
    word.index[pair] = (bits >> 2 * pair & 0x03030303) * 0x11 + 0x40404040;
  return word;
}
#else
struct Word { u32 bits, index[2]; };  // the same, for each four
__device__ __forceinline__ Word word_of(u32 bits) {
  Word word{bits};
  for (int four = 0; four < 2; four++) {
    const u32 own = bits >> 4 * four;
    word.index[four] = (own & 0x03030303) | (own << 2 & 0x30303030) | 0x40404040;
  }
  return word;
}
#endif
__device__ __forceinline__ void pass(Stream& s, const Word& word) {
  s.position += __popc(word.bits) * (8 * VALUE_BYTES);
}

// Two bytes of a table for the byte `at` of an index.
__device__ __forceinline__ u32 looked_up(u32 low, u32 high, u32 index, int at) {
  const u32 two = prmt(low, high, at / 2 ? upper_half(index) : index);
  return at % 2 ? upper_half(two) : two;
}

__device__ __forceinline__ void decode(u32 (&a)[4], Stream& s, const Word& word, int at, u32) {
#if VALUE_BYTES == 2
  const u32 p = s.position + before(word.bits, 8 * at + 4);
  const u32 from = s.base + ((p & ~31u) << 2) - 256;
  u32 w[5], v[4];
  #pragma unroll
  for (int i = 0; i < 5; i++) w[i] = load_32(from + 128 * i);
  #pragma unroll
  for (int i = 0; i < 4; i++) v[i] = __funnelshift_r(w[i], w[i + 1], p);
  const u32* index = word.index;
  const u32 left = prmt(v[0], v[1], looked_up(0x10323254, 0x32545476, index[1], at));
  const u32 right = prmt(v[2], v[3], looked_up(0x54323210, 0x76545432, index[2], at));
  a[0] = prmt(left, 0, looked_up(0x10443244, 0x32324444, index[0], at));
  a[2] = prmt(v[1], 0, looked_up(0x10443244, 0x32324444, index[1], at));
  a[1] = prmt(v[2], 0, looked_up(0x10441044, 0x32104444, index[2], at));
  a[3] = prmt(right, 0, looked_up(0x10441044, 0x32104444, index[3], at));
#else
  #pragma unroll
  for (int four = 0; four < 2; four++) {
    const u32 p = s.position + before(word.bits, 8 * at + 4 * four + 2);
    const u32 from = s.base + ((p & ~31u) << 2);
    const u32 v = __funnelshift_r(load_32(from), load_32(from + 128), p);
    widen(a[four], a[four + 2], prmt(v, 0, looked_up(0x10144144, 0x32244244, word.index[four], at)));
  }
#endif
}
#endif

// Copy the lane's tail below the words that lie side by side. Returns the address of word 0.
__device__ __forceinline__ u32 join_tail(u32 record) {
  constexpr int AT_ONCE = 4;
  const int lane = threadIdx.x % 32;
  const u32 starts = record + STARTS_AT;
  const u32 begin = load_16(starts + 2 * lane), end = load_16(starts + 2 * lane + 2);
  const u32 all = load_16(starts + 64), full = load_16(starts + 66);
  const u32 words = record + WORDS_AT + ((all + 3) / 4 * 16) + 4 * lane;
  u32 to = words + 128 * full, from = record + WORDS_AT + 4 * begin;
  for (int left = end - begin; left > 0; left -= AT_ONCE, from += 4 * AT_ONCE) {
    u32 v[AT_ONCE];  // words past the tail are overwritten or never selected
    #pragma unroll
    for (int i = 0; i < AT_ONCE; i++) v[i] = load_32(from + 4 * i);
    #pragma unroll
    for (int i = 0; i < AT_ONCE; i++, to += 128)
      if (i < left) store_32(to, v[i]);
  }
  return words;
}

// B of two instructions: a lane's 8 columns of X in a strip.
__device__ __forceinline__ uint4 load_b(u32 address) {
#if VALUE_BYTES == 2
  return load_128(address);
#else
  const uint2 x = load_64(address);
  uint4 b;
  widen(b.x, b.y, x.x), widen(b.z, b.w, x.y);
  return b;
#endif
}

// ---- the copies ----

struct Range { int first, last; };  // rows of tiles of a CTA

__device__ __forceinline__ Range rows_of(int worker, const Weights& w) {
  return {(int)((long long)worker * w.row_tiles / w.workers),
          (int)((long long)(worker + 1) * w.row_tiles / w.workers)};
}

// A warp's ring of items, each a record in a slot of `room` bytes. Lanes load in turn: lane l loads
// every 32nd item from l on, whose offsets it holds. So the first 32 items wait for memory at the
// same time.
struct Loader {
  u32 slots, barriers;
  int first, last, part, of_block, items;  // rows of tiles; items of a block, of all
  int room, item, stage, from, to;

  __device__ __forceinline__ Loader(const Weights& w, u32 ring, u32 full, int part, int first,
                                    int last, int blocks, int room)
      : slots(ring), barriers(full), first(first), last(last), part(part),
        of_block((w.tiles - part + ALL_PARTS - 1) / ALL_PARTS), items(blocks * of_block),
        room(room), item(0), stage(0) {
    fetch(w, threadIdx.x % 32);
  }
  __device__ __forceinline__ void fetch(const Weights& w, int its) {
    from = to = 0;
    if (its >= items) return;
    const int row = first + its / of_block * ROW_WARPS;
    if (row >= last) return;
    const int* o = w.offsets + (u64)row * w.tiles + part + its % of_block * ALL_PARTS;
    from = o[0], to = o[1];
  }
  __device__ __forceinline__ void load(const Weights& w) {
    const int lane = threadIdx.x % 32;
    if (item < items && lane == item % 32) {
      const u32 barrier = barriers + 8 * stage, bytes = (to - from) * 16;
      mbarrier_arrive_expect_tx(barrier, bytes);
      if (bytes)
        bulk_load(slots + stage * room, w.records + (u64)from * 16, bytes, barrier);
      fetch(w, item + 32);
    }
    item++;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
};

// The warp that loads X: all steps of all blocks, into a ring that the other warps empty together.
// One instruction of the warp copies a row of a tile, 32 pieces of 16 bytes, or two rows in fp8.
// (Bulk copies of 512 bytes took 75 clocks each.) Past the end of X it writes zeros.
__device__ __forceinline__ void load_x(const Activations& x, int total, int first_part, int first,
                                       int tokens, int steps, u32 ring, u32 full) {
  constexpr int PIECES = X_ROW / 16, AT_ONCE = 32 / PIECES;
  const int lane = threadIdx.x % 32;
  const int piece = lane % PIECES, columns = 16 / VALUE_BYTES;
  const u32 empty = full + 8 * X_STAGES, stage_bytes = PARTS * tokens * X_STEP;
  int stage = 0, parity = 0;
  for (int i = 0, step = 0; i < steps; i++, step = step + 1 == total ? 0 : step + 1) {
    if (i >= X_STAGES) mbarrier_wait(empty + 8 * stage, parity ^ 1, "X is read");
    for (int part = 0; part < PARTS; part++) {
      const int column = (step * ALL_PARTS + first_part + part) * COLUMNS + piece * columns;
      const bool there = column < x.k;
      const char* from = x.x + (u64)first * x.stride + (there ? (u64)column * VALUE_BYTES : 0);
      const u32 to = ring + stage * stage_bytes + part * tokens * X_STEP + piece * 16;
      #pragma unroll 4
      for (int token = lane / PIECES; token < tokens; token += AT_ONCE)
        copy_16(to + token * X_STEP, from + token * x.stride, there);
    }
    cp_async_arrive(full + 8 * stage);
    if (++stage == X_STAGES) stage = 0, parity ^= 1;
  }
  cp_async_commit();  // no thread may end before its copies
  cp_async_wait<0>();
}

__device__ __forceinline__ void add(float* sum, const float4& v) {
  sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT)
#endif
multiply_records(const __grid_constant__ Activations x, const __grid_constant__ Weights w, u16* y,
                 int n, int room) {
  extern __shared__ __align__(128) char shared[];
  const u32 table = smem_address(shared), records_full = table + TABLE_BYTES;
  const u32 x_full = records_full + 8 * WARPS * STAGES, x_empty = x_full + 8 * X_STAGES;
  const u32 received = x_empty + 8 * X_STAGES;
  float4* sums = (float4*)(shared + TABLE_BYTES + BARRIER_BYTES);
  float4* of_others = sums + (PARTS - 1) * OF_PART;
  const u32 x_ring = smem_address(of_others) + CLUSTER_BYTES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int rank = blockIdx.x % SPLIT, cluster = blockIdx.x / SPLIT;
  const Range range = rows_of(cluster % w.workers, w);
  const int first = cluster / w.workers * TOKENS;
  const int tokens = x.m - first < TOKENS ? x.m - first : TOKENS;
  const int steps = (w.tiles + ALL_PARTS - 1) / ALL_PARTS;
  const int blocks = (range.last - range.first + ROW_WARPS - 1) / ROW_WARPS;
  const int part = warp / ROW_WARPS, of_all = rank * PARTS + part, own = warp % ROW_WARPS;
  const u32 x_bytes = PARTS * tokens * X_STEP, full = records_full + 8 * STAGES * warp;
  const u32 ring = x_ring + X_STAGES * x_bytes + warp * STAGES * room;
  Loader loader(w, ring, full, of_all, range.first + own, range.last, blocks, room);
#if TABLE
  if (threadIdx.x < 16) ((Entry*)shared)[threadIdx.x] = entry_of(threadIdx.x);
#endif
  if (threadIdx.x == 0) {
    for (int i = 0; i < WARPS * STAGES; i++) mbarrier_init(records_full + 8 * i, 1);
    for (int i = 0; i < X_STAGES; i++) {
      mbarrier_init(x_full + 8 * i, 32);
      mbarrier_init(x_empty + 8 * i, WARPS);
    }
    if (SPLIT > 1) {
      mbarrier_init(received, 1);
      if (rank == 0) mbarrier_arrive_expect_tx(received, CLUSTER_BYTES);
      fence_mbarrier_init();
    }
  }
  fence_proxy_async();
  __syncthreads();

  if (warp == WARPS) {
    if (SPLIT > 1) cluster_sync_relaxed();
    return load_x(x, steps, rank * PARTS, first, tokens, blocks * steps, x_ring, x_full);
  }
  for (int i = 0; i < STAGES; i++) loader.load(w);
  if (SPLIT > 1) cluster_sync_relaxed();  // all mbarriers are initialised
  const u32 x_at = x_ring + (part * tokens + lane / 4) * X_STEP + lane % 4 * 8 * VALUE_BYTES;
  uint4 b[NB] = {};  // a lane's part of X; past the last token another one, whose sums are not written
  int stage = 0, parity = 0, x_stage = 0, x_parity = 0;
  for (int row = range.first; row < range.last; row += ROW_WARPS) {
    float d[NB][4] = {};
    for (int step = 0; step < steps; step++) {
      const bool busy = range.last - row - own > 0 && step * ALL_PARTS + of_all < w.tiles;
      Stream stream;
      u32 bits_at;
      if (busy) {
        mbarrier_wait(full + 8 * stage, parity, "records");
        const u32 record = ring + stage * room;
        bits_at = record + 4 * lane;
        stream = stream_at(join_tail(record));
      }
      mbarrier_wait(x_full + 8 * x_stage, x_parity, "X");
      if (busy) {
        #pragma unroll 1
        for (int pair = 0; pair < STRIPS / 2; pair++) {
          const u32 x_now = x_at + x_stage * x_bytes + pair * 64 * VALUE_BYTES;
          Word word = word_of(load_32(bits_at + 128 * pair));
          #pragma unroll
          for (int at = 0; at < 4; at++) {
            const bool first = at % 2 == 0;
            if (first)
              #pragma unroll
              for (int j = 0; j < NB; j++)
                if (lane / 4 + 8 * j < tokens)
                  b[j] = load_b(x_now + at / 2 * 32 * VALUE_BYTES + 8 * j * X_STEP);
            u32 a[4];
            decode(a, stream, word, at, table);
            #pragma unroll
            for (int j = 0; j < NB; j++)
              mma_m16n8k16(d[j], a, first ? b[j].x : b[j].z, first ? b[j].y : b[j].w);
          }
          pass(stream, word);
        }
        fence_proxy_async();
        __syncwarp();
        loader.load(w);
        if (++stage == STAGES) stage = 0, parity ^= 1;
      }
      if (lane == 0) mbarrier_arrive(x_empty + 8 * x_stage);
      if (++x_stage == X_STAGES) x_stage = 0, x_parity ^= 1;
    }

    // ---- the sums of the parts, and Y ----
    const int at = warp % ROW_WARPS * NB * 32 + lane;
    float4* mine = sums + at;
    if (PARTS > 1) {
      if (part > 0)
        #pragma unroll
        for (int i = 0; i < NB; i++) {
          const float* s = d[i];
          mine[(part - 1) * OF_PART + i * 32] = float4{s[0], s[1], s[2], s[3]};
        }
      multiplying_warps_sync();
    }
    if (SPLIT > 1 && part == 0 && rank == 0) mbarrier_wait(received, 0, "sums of the others");
    if (part == 0)
      #pragma unroll
      for (int i = 0; i < NB; i++) {
        float* s = d[i];
        for (int p = 0; p < PARTS - 1; p++) add(s, mine[p * OF_PART + i * 32]);
        if (SPLIT > 1 && rank > 0) {
          const u32 to = smem_address(of_others + (rank - 1) * OF_PART + at + i * 32);
          st_async(map_shared_rank(to, 0), float4{s[0], s[1], s[2], s[3]},
                   map_shared_rank(received, 0));
          continue;
        }
        for (int c = 0; c < SPLIT - 1; c++) add(s, of_others[c * OF_PART + at + i * 32]);
        #pragma unroll
        for (int e = 0; e < 4; e++) {
          // i / NB is 0; without it nvcc orders these instructions in another way
          const int token = i % NB * 8 + lane % 4 * 2 + e % 2, tile = row + own + i / NB;
          const int feature = tile * ROWS + lane / 4 + e / 2 * 8;
          if (token < tokens && tile < range.last && feature < n)
            y[(u64)(first + token) * n + feature] = rounded(s[e]);
        }
      }
    if (PARTS > 1) multiplying_warps_sync();
  }
}
