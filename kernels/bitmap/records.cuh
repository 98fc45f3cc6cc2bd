// Shared by bitmap_mma.cu and bitmap_wgmma.cu: the records of W (formats/bitmap.py), their copies into
// shared memory, and their decode into the registers of a tensor core's operand A.
//
// Lane 4 g + q of a warp holds rows g and g + 8 of 16. Its columns are 8 q .. 8 q + 7 of each strip of
// 32, four of them per instruction.
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
// Macros: ROW_WARPS, GROUP, PARTS, STAGES, SPLIT, TABLE=0|1, VALUE_BYTES=2|1, FP16=0|1.

#pragma once
using u16 = unsigned short;
using u32 = unsigned int;
using u64 = unsigned long long;

constexpr int ROWS = 16, COLUMNS = 256, STRIPS = 8, WORDS_AT = 592, STARTS_AT = 512;  // of a record
constexpr int WARPS = ROW_WARPS * PARTS;  // that multiply
constexpr int BLOCK = ROW_WARPS * GROUP;  // rows of tiles at a time
constexpr int ALL_PARTS = SPLIT * PARTS;
constexpr int TABLE_BYTES = 128;

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

// ---- the copies ----

struct Range { int first, last; };  // rows of tiles of a CTA

__device__ __forceinline__ Range rows_of(int worker, const Weights& w) {
  return {(int)((long long)worker * w.row_tiles / w.workers),
          (int)((long long)(worker + 1) * w.row_tiles / w.workers)};
}

// A warp's ring of items, each GROUP records in slots of `room` bytes. Lanes load in turn: lane l
// loads record l % GROUP of every (32 / GROUP)th item from l / GROUP on, whose offsets it holds. So
// the first 32 / GROUP items wait for memory at the same time.
struct Loader {
  static constexpr int TURNS = 32 / GROUP;
  u32 slots, barriers;
  int first, last, part, of_block, items;  // rows of tiles; items of a block, of all
  int room, item, stage, from, to;

  __device__ __forceinline__ Loader(const Weights& w, u32 ring, u32 full, int part, int first,
                                    int last, int blocks, int room)
      : slots(ring), barriers(full), first(first), last(last), part(part),
        of_block((w.tiles - part + ALL_PARTS - 1) / ALL_PARTS), items(blocks * of_block),
        room(room), item(0), stage(0) {
    fetch(w, threadIdx.x % 32 / GROUP);
  }
  __device__ __forceinline__ void fetch(const Weights& w, int its) {
    from = to = 0;
    if (its >= items) return;
    const int row = first + its / of_block * BLOCK + threadIdx.x % GROUP;
    if (row >= last) return;
    const int* o = w.offsets + (u64)row * w.tiles + part + its % of_block * ALL_PARTS;
    from = o[0], to = o[1];
  }
  __device__ __forceinline__ void load(const Weights& w) {
    const int lane = threadIdx.x % 32;
    if (item < items && lane / GROUP == item % TURNS) {
      const u32 barrier = barriers + 8 * stage, bytes = (to - from) * 16;
      mbarrier_arrive_expect_tx(barrier, bytes);
      if (bytes)
        bulk_load(slots + (stage * GROUP + lane % GROUP) * room, w.records + (u64)from * 16, bytes,
                  barrier);
      fetch(w, item + TURNS);
    }
    item++;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }
};

__device__ __forceinline__ void add(float* sum, const float4& v) {
  sum[0] += v.x, sum[1] += v.y, sum[2] += v.z, sum[3] += v.w;
}
