// Y[m, K] = (act(G) * (X @ Wu.T)) @ Wd.T where few units of act(G) are on: what follows the gate.
//
//   G[m, n] = X @ Wg.T, of the launch before. A unit of a token is on unless G <= 0: NaN is on.
//
//   a group: eight tokens, and SPLIT CTAs (a cluster), each with as many of the steps
//
//     G of    . . x . . . . x . .         rows, a list:     unit | tokens it is on for
//     its     . . . . . . . x . .   -->                       2  |  x . .
//     tokens  . . x . . x . . . .                             5  |  . . x   ...
//
//   a step: 16 rows of the list, for all warps; a warp has 256 columns of K, beyond 2048 twice
//
//                       K                        tokens                        tokens
//          +--------+--------+--               +--------+                    +--------+
//     16   | warp 0 | warp 1 |  of Wu      x   |   X    |   =  U, summed     |  act   |
//    rows  |        |        |                 |        |      over the  *   |  (G)   |  =  H
//          +--------+--------+--               +--------+      warps         +--------+
//
//     Y, K x tokens  +=  the same rows and columns of Wd.T, read by columns, x  H
//
// By tensor cores (mma m16n8k16), although most of H is off: weights are the tall operand, tokens
// its eight columns. A unit that several tokens share is read once, and one that a single token
// has costs what it would alone: 4 K bytes from L2, which gives 9 TB/s to plain loads and cp.async
// (6 to cp.async.bulk, measured; NOTES.md). All else is to stay beside that:
//
//     listers    4 warps    G, or bits      --->  list, list        groups ahead
//     loaders    4 warps    rows of Wu, Wd  --->  stage, ...        5 x 8 rows, by cp.async; and X
//     products   WARPS      up(0)  up(1) down(0)  up(2) down(1)  ...   one exchange of U a step
//
// A CTA stays, and takes one group after the other, each in turn from a counter: loaders run on
// into the next group's rows while the sums of the last are stored. Rows of a last step that are
// not there come as zeros. Loaders are warps of their own since products, two warps a scheduler,
// were held up by the 600 instructions a step that it took them to copy their own columns.
//
// U is summed over K in the order of the warps and kept in fp32; H is rounded once; Y is summed in
// the order of the units, then of the CTAs. So the bits are the same at every call. A row that no
// token of the group needs is not read. A group with more rows than `limit` is left to a dense
// product: its number goes onto the list `heavy`, and its tokens are not written.
//
// With GATED = 0, Y = act(G) @ Wd.T: there is no U, and H is act(G).
//
// With PACKED, the gate's product has written who is on (spense_wgmma.cu, "who is on"): a byte for a
// unit and eight tokens, which are a group. Of G nothing but what is on is read.
//
// Compiled with -DK, -DSPLIT=1 to 8, -DSQUARED=0|1 (relu, relu2), -DGATED=0|1, -DPACKED=0|1 and
// what hopper.cuh asks for. K is a multiple of 8, at most 4096.

#include "hopper.cuh"

using u16 = unsigned short;

constexpr int HALVES = K > 2048 ? 2 : 1;  // of a row, 256 columns of each a warp's
constexpr int WARPS = K > 1024 ? 8 : 4;   // that multiply: whole warpgroups, and so are the others
constexpr int HALF = 256 * WARPS, PITCH = 2 * HALF;  // columns; bytes
constexpr int PRODUCTS = 32 * WARPS, LISTERS = HALVES == 1 ? 128 : 64, LOADERS = LISTERS;
constexpr int THREADS = PRODUCTS + LISTERS + LOADERS;
constexpr int GROUP = 8, ROWS = 16, STAGES = HALVES == 1 ? 5 : 4, STAGE_BYTES = 8 * PITCH;
constexpr int X_PITCH = HALVES * PITCH;
constexpr int MOST_ROWS = 1536;  // of a list
constexpr int LISTS = 3;  // one is multiplied, one is loaded, and one is made
constexpr int END = -1;  // no group
// Registers of a thread, of which a CTA has 64 K: of those that multiply, and of the others.
constexpr int MANY = HALVES == 1 ? 152 : 224, FEW = HALVES == 1 ? 104 : 56;
// That a lister reads at a time, of eight units: beside the rows' copies a load takes 2 to 3 us.
constexpr int PIECES = (PACKED ? 3 : 1) * (HALVES == 1 ? 2 : 1);
constexpr int READ = HALVES == 1 ? GROUP : 4;  // tokens, likewise
constexpr bool SHIFTED = THREADS == 512 || HALVES == 2;  // registers; else all have enough

extern __shared__ __align__(1024) char shared[];  // X, then the stages; at the end, sums of Y

struct List {
  int group, steps;
  alignas(16) u32 rows[MOST_ROWS + ROWS];  // unit << 8 | tokens that it is on for
};
struct Shared {
  List lists[LISTS];
  float parts[2][WARPS][GROUP][ROWS + 4];  // of U, of two steps
  alignas(16) u16 gates[2][GROUP][ROWS + 8];
  int counts[2][THREADS / 32], next, after;  // groups
  u64 listed[LISTS], used[LISTS], full[STAGES], empty[STAGES];
  u64 x_full, x_empty, summed;
};

// ---- PTX ----

#include "mma.cuh"

// How long L2 is to keep what is copied: weights longer than what is read or written once.
__device__ __forceinline__ u64 lasting() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
__device__ __forceinline__ u64 passing() {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  return policy;
}
// Zeros where there is nothing to copy.
__device__ __forceinline__ void copy_16(u32 to, const char* from, bool there, u64 policy) {
  asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;"
               :: "r"(to), "l"(from), "r"(there ? 16 : 0), "l"(policy) : "memory");
}
// Volatile: all loads of a loop are asked for before the first is waited for.
__device__ __forceinline__ uint4 read_once(const uint4* from) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(from), "l"(passing()));
  return v;
}
__device__ __forceinline__ uint2 read_once(const uint2* from) {
  uint2 v;
  asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v2.u32 {%0, %1}, [%2], %3;"
               : "=r"(v.x), "=r"(v.y) : "l"(from), "l"(passing()));
  return v;
}
__device__ __forceinline__ void write_once(uint4* to, uint4 v) {
  asm volatile("st.global.L2::cache_hint.v4.u32 [%0], {%1, %2, %3, %4}, %5;"
               :: "l"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "l"(passing()) : "memory");
}
// Arrive when this thread's copies so far are there.
__device__ __forceinline__ void arrive_after_copies(u32 barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" :: "r"(barrier) : "memory");
}
__device__ __forceinline__ void prefetch(const void* line) {  // to L2
  asm volatile("prefetch.global.L2 [%0];" :: "l"(line));
}
__device__ __forceinline__ void in_step(int barrier, int threads) {  // 0 to 15, some warps
  asm volatile("bar.sync %0, %1;" :: "r"(barrier), "r"(threads) : "memory");
}
template <int REGISTERS> __device__ __forceinline__ void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}
template <int REGISTERS> __device__ __forceinline__ void leave_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(REGISTERS));
}

// ---- what a CTA is given ----

struct Layer {
  const u16 *x, *g;
  const char *wu, *wd;
  u16* y;
  int *left, *heavy;
  int m, n, limit;
  const uint2* bits;
  __device__ __forceinline__ int groups() const { return (m + GROUP - 1) / GROUP; }
  __device__ __forceinline__ int tokens(int group) const { return min(GROUP, m - group * GROUP); }
  __device__ __forceinline__ u16* out_of(int group) const { return y + (u64)group * GROUP * K; }
};
struct Place { int cta, ctas; };  // in the grid

// ---- lists ----

// The threads that make one, and the barrier that keeps them in step.
struct Team { int thread, threads, barrier; };

__device__ __forceinline__ int sum_before(int own, const Team& team, int turn, Shared& s,
                                          int& all) {
  const int lane = team.thread % 32, warp = team.thread / 32;
  int up_to = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_up_sync(~0u, up_to, by);
    if (lane >= by) up_to += below;
  }
  if (lane == 31) s.counts[turn % 2][warp] = up_to;
  in_step(team.barrier, team.threads);
  const int count = lane < team.threads / 32 ? s.counts[turn % 2][lane] : 0;  // a warp's
  all = __reduce_add_sync(~0u, count);
  return up_to - own + __reduce_add_sync(~0u, lane < warp ? count : 0);
}

// Who is on, of PIECES of eight units: a byte a unit, a bit a token.
struct Who {
  u32 masks[PIECES][2];

  __device__ __forceinline__ void read(const Layer& layer, int group, int tokens, int piece,
                                       int stride) {
    const int pieces = layer.n / 8;  // beyond them, and beyond the tokens, it is another one
    if (PACKED) {
      uint2 v[PIECES];
      #pragma unroll
      for (int i = 0; i < PIECES; i++)
        v[i] = read_once(layer.bits + (u64)group * pieces + min(piece + i * stride, pieces - 1));
      #pragma unroll
      for (int i = 0; i < PIECES; i++) masks[i][0] = v[i].x, masks[i][1] = v[i].y;
      return;
    }
    u32 pairs[PIECES][4] = {};  // of two units each, 16 bits apart
    const uint4* g = (const uint4*)(layer.g + (u64)group * GROUP * layer.n);
    #pragma unroll
    for (int first = 0; first < GROUP; first += READ) {
      uint4 v[PIECES][READ];
      #pragma unroll
      for (int i = 0; i < PIECES; i++)
        #pragma unroll
        for (int j = 0; j < READ; j++)
          v[i][j] = read_once(g + min(first + j, tokens - 1) * pieces +
                              min(piece + i * stride, pieces - 1));
      #pragma unroll
      for (int i = 0; i < PIECES; i++)
        #pragma unroll
        for (int j = 0; j < READ; j++) {
          pairs[i][0] |= on(v[i][j].x) & 0x10001u << (first + j);
          pairs[i][1] |= on(v[i][j].y) & 0x10001u << (first + j);
          pairs[i][2] |= on(v[i][j].z) & 0x10001u << (first + j);
          pairs[i][3] |= on(v[i][j].w) & 0x10001u << (first + j);
        }
    }
    const u32 there = (0xffu >> (GROUP - tokens)) * 0x1010101u;
    #pragma unroll
    for (int i = 0; i < PIECES; i++) {
      masks[i][0] = __byte_perm(pairs[i][0], pairs[i][1], 0x6420) & there;
      masks[i][1] = __byte_perm(pairs[i][2], pairs[i][3], 0x6420) & there;
    }
  }
};

// List a group's units that are on for some token, in ascending order, and fill up the last step.
// Returns their number, of which MOST_ROWS are listed at most.
__device__ __forceinline__ int list_rows(List& list, const Layer& layer, int group,
                                         const Team& team, Shared& s) {
  const int tokens = layer.tokens(group), pieces = layer.n / 8;  // of eight units
  int found = 0, turn = 0;
  for (int at = team.thread; at - team.thread < pieces; at += PIECES * team.threads) {
    Who who;
    who.read(layer, group, tokens, at, team.threads);
    #pragma unroll
    for (int i = 0; i < PIECES; i++, turn++) {
      const int unit = 8 * (at + i * team.threads);
      if (unit - 8 * team.thread >= layer.n) break;
      const u32 masks[2] = {unit < layer.n ? who.masks[i][0] : 0,
                            unit < layer.n ? who.masks[i][1] : 0};
      int own = 0, all;
      #pragma unroll
      for (int j = 0; j < 8; j++)
        own += (masks[j / 4] >> 8 * (j % 4) & 0xff) != 0;
      int to = found + sum_before(own, team, turn, s, all);
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        const u32 mask = masks[j / 4] >> 8 * (j % 4) & 0xff;
        if (mask && to < MOST_ROWS) list.rows[to] = (u32)(unit + j) << 8 | mask;
        to += mask != 0;
      }
      found += all;
    }
  }
  const int listed = min(found, MOST_ROWS), steps = listed ? (listed + ROWS - 1) / ROWS : 1;
  for (int row = listed + team.thread; row < steps * ROWS; row += team.threads) list.rows[row] = 0;
  if (team.thread == 0) list.group = group, list.steps = steps;
  return found;
}

// Bring a group's X, 128 bytes each time, into L2: from memory it takes 3 us and more.
__device__ __forceinline__ void prefetch_x(const Layer& layer, int group, const Team& team) {
  if (!GATED || group >= layer.groups()) return;
  const char* x = (const char*)(layer.x + (u64)group * GROUP * K);
  #pragma unroll 1
  for (int at = 128 * team.thread; at < 2 * layer.tokens(group) * K; at += 128 * team.threads)
    prefetch(x + at);
}

// List s.next, or the first group from there that is not left to a dense product, or the end. The
// one after it is known by then, and its X brought nearer; the counter is asked for a third.
__device__ __forceinline__ void list_next(List& list, const Layer& layer, Place place,
                                          const Team& team, Shared& s) {
  for (;;) {
    const int group = s.next, after = s.after;
    if (group >= layer.groups()) break;
    int third = layer.groups();  // a cluster has one
    if (SPLIT == 1 && team.thread == 0) third = 2 * place.ctas + atomicAdd(layer.left + 2, 1);
    prefetch_x(layer, after, team);
    const int found = list_rows(list, layer, group, team, s);
    if (team.thread == 0) s.next = after, s.after = third;
    in_step(team.barrier, team.threads);
    if (found <= layer.limit) return;
    if (team.thread == 0 && place.cta % SPLIT == 0)
      layer.heavy[atomicAdd(layer.left, 1)] = group;
  }
  if (team.thread == 0) list.group = END;
  in_step(team.barrier, team.threads);
}

// One group after the other, ahead of the products; the first is there.
__device__ __forceinline__ void list_groups(const Layer& layer, Place place, const Team& team,
                                            Shared& s) {
  for (int i = 0;; i++) {
    if (i) {
      if (i >= LISTS) wait(address_of(&s.used[i % LISTS]), (i / LISTS - 1) % 2, "a free list");
      list_next(s.lists[i % LISTS], layer, place, team, s);
    }
    if (team.thread == 0) arrive(address_of(&s.listed[i % LISTS]));
    if (s.lists[i % LISTS].group == END) return;
  }
}

// ---- stages ----

// Which steps of a list are this CTA's.
struct Steps {
  int first, end;
  __device__ __forceinline__ Steps(const List& list, Place place) {
    const int rank = place.cta % SPLIT;
    first = list.steps * rank / SPLIT, end = list.steps * (rank + 1) / SPLIT;
  }
};

struct Ring {
  u32 stages, full, empty;  // shared memory
  int slot;
  u32 parity;
  __device__ __forceinline__ Ring(Shared& s, u32 parity)
      : stages(address_of(shared) + GROUP * X_PITCH), full(address_of(s.full)),
        empty(address_of(s.empty)), slot(0), parity(parity) {}
  __device__ __forceinline__ u32 tile() const { return stages + slot * STAGE_BYTES; }
  __device__ __forceinline__ void wait_filled() const { wait(full + 8 * slot, parity, "a stage"); }
  __device__ __forceinline__ void wait_freed() const { wait(empty + 8 * slot, parity, "a place"); }
  __device__ __forceinline__ void advance() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// 16 bytes, swizzled: eight rows that are read at once are in different banks.
__device__ __forceinline__ int place_of(int row, int piece, int pitch = PITCH) {
  return row * pitch + ((piece ^ row % 8) << 4);
}

// Copy rows of a step, this thread's pieces: every 32nd, of some rows.
__device__ __forceinline__ void load_step(Ring& ring, const char* w, const u32* rows, int loader) {
  const int lane = loader % 32;
  #pragma unroll
  for (int part = 0; part < 2 * HALVES; part++) {
    const int half = part / 2;
    ring.wait_freed();
    const u32 tile = ring.tile();
    #pragma unroll
    for (int i = 0; i < 8 / (LOADERS / 32); i++) {
      const int number = loader / 32 + i * (LOADERS / 32);
      const u32 row = rows[part % 2 * 8 + number];
      const char* from = w + (u64)(row >> 8) * (2 * K) + PITCH * half + 16 * lane;
      const u32 to = tile + place_of(number, lane);
      #pragma unroll
      for (int j = 0; j < WARPS; j++)
        copy_16(to + 512 * j, from + 512 * j,
                (row & 0xff) && (HALVES * HALF == K || HALF * half + 256 * j + 8 * lane < K),
                lasting());
    }
    arrive_after_copies(ring.full + 8 * ring.slot);
    ring.advance();
  }
}

// Copy X of a group, zero beyond K and where it has no more tokens.
__device__ __forceinline__ void load_x(const Layer& layer, int group, int loader) {
  const int lane = loader % 32, tokens = layer.tokens(group);
  #pragma unroll
  for (int i = 0; i < GROUP / (LOADERS / 32); i++) {
    const int token = loader / 32 + i * (LOADERS / 32);
    const char* from = (const char*)(layer.x + (u64)(group * GROUP + token) * K) + 16 * lane;
    const u32 to = address_of(shared) + place_of(token, lane, X_PITCH);
    #pragma unroll
    for (int j = 0; j < HALVES * WARPS; j++)
      copy_16(to + 512 * j, from + 512 * j,
              token < tokens && (HALVES * HALF == K || 256 * j + 8 * lane < K), passing());
  }
}

// Load X of a list's group, if there is one: after the products have read the one before.
__device__ __forceinline__ void load_next_x(const Layer& layer, int number, int loader,
                                            Shared& s) {
  const List& list = s.lists[number % LISTS];
  wait(address_of(&s.listed[number % LISTS]), number / LISTS % 2, "a list");
  if (!GATED || list.group == END) return;
  wait(address_of(&s.x_empty), 1 - number % 2, "a place for X");
  load_x(layer, list.group, loader);
  arrive_after_copies(address_of(&s.x_full));
}

// The order is up(0), up(1), down(0), ..., up(last), down(last - 1), down(last), a list after the
// other; before the last step of a list comes X of the next, that it be there in time.
__device__ __forceinline__ void load_groups(const Layer& layer, Place place, int loader,
                                            Shared& s) {
  Ring ring(s, 1);  // stages are free before the first round
  load_next_x(layer, 0, loader, s);
  for (int i = 0; s.lists[i % LISTS].group != END; i++) {
    const List& list = s.lists[i % LISTS];
    const Steps steps(list, place);
    for (int step = steps.first; step <= steps.end; step++) {
      const u32* rows = list.rows + ROWS * step;
      if (step == steps.end - 1) load_next_x(layer, i + 1, loader, s);
      if (GATED && step < steps.end) load_step(ring, layer.wu, rows, loader);
      if (step > steps.first) load_step(ring, layer.wd, rows - ROWS, loader);
    }
    if (steps.first == steps.end) load_next_x(layer, i + 1, loader, s);  // it had none
    __syncwarp();
    if (loader % 32 == 0) arrive(address_of(&s.used[i % LISTS]));
  }
}

// ---- products ----

// The column of a warp's first in a half of K.
__device__ __forceinline__ int column_of(int half) {
  return HALF * half + threadIdx.x / 32 * 256;
}

// X of a group as B: [half][k / 8], of which a lane has words of token lane / 4.
using Tokens = u32[HALVES][32];

__device__ __forceinline__ void read_x(Tokens& x, int number, Shared& s) {
  const int lane = threadIdx.x % 32;
  wait(address_of(&s.x_full), number % 2, "X");
  #pragma unroll
  for (int i = 0; i < 8 * HALVES; i++) {
    const int piece = column_of(i / 8) / 8 + 4 * (i % 8) + lane / 8;
    u32 four[4];
    matrices(four, address_of(shared) + place_of(lane % 8, piece, X_PITCH));
    #pragma unroll
    for (int j = 0; j < 4; j++) x[i / 8][i % 8 * 4 + j] = four[j];
  }
  __syncwarp();
  if (lane == 0) arrive(address_of(&s.x_empty));
}

// Sums of Y.T: [half][i][j] is of column 16 i + 8 (j / 2) + lane / 4, token 2 (lane % 4) + j % 2.
using Sums = float[HALVES][16][4];

// Of 32 columns, `i`-th of the warp's, a lane's eight: of token lane / 4, 16 bytes from `piece_of`.
__device__ __forceinline__ int piece_of(int i) {
  const int warp = threadIdx.x / 32 % WARPS;
  return (HALF * (i / 8) + 256 * warp) / 8 + 4 * (i % 8) + threadIdx.x % 4;
}
__device__ __forceinline__ uint4 eight_columns(const float (*d)[4]) {
  u32 words[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const float* pair = &d[j / 2][j % 2 * 2];
    words[j] = transposed(pair_of(pair[0], pair[1]));
  }
  exchange(words);
  return uint4{words[0], words[1], words[2], words[3]};
}

struct Warp {
  Ring ring;
  Tokens x;
  Sums y;
  u32 h[2];  // of units 2 q, 2 q + 1; and + 8; of token lane / 4, q being lane % 4
  u16 gate;  // thread t has row t / 8 of token t % 8; zero where the unit is off, and nowhere else
  int turn;  // of steps: U and gates have two places

  __device__ __forceinline__ void read_gate(const Layer& layer, const List& list, int step) {
    gate = 0;
    if (threadIdx.x >= ROWS * GROUP) return;
    const u32 row = list.rows[step * ROWS + threadIdx.x / GROUP];
    const u32 token = threadIdx.x % GROUP;
    if (row >> token & 1)
      gate = __ldg(layer.g + (u64)(list.group * GROUP + token) * layer.n + (row >> 8));
  }
  __device__ __forceinline__ void put_gate(Shared& s) const {
    if (threadIdx.x < ROWS * GROUP)
      s.gates[turn % 2][threadIdx.x % GROUP][threadIdx.x / GROUP] = gate;
  }
  // Wait for 16 rows; returns where the lane's one of them starts, this warp's columns.
  __device__ __forceinline__ u32 rows_of(int row) {
    ring.wait_filled();
    const u32 upper = ring.tile();
    ring.advance();
    ring.wait_filled();
    return (row < 8 ? upper : ring.tile()) + threadIdx.x / 32 * 512;
  }
  __device__ __forceinline__ void free_rows() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      arrive(ring.empty + 8 * (ring.slot ? ring.slot - 1 : STAGES - 1));
      arrive(ring.empty + 8 * ring.slot);
    }
    ring.advance();
  }
  // U of 16 rows, this warp's columns alone.
  __device__ __forceinline__ void put_up(Shared& s) {
    const int lane = threadIdx.x % 32, row = lane % 16;
    float u[2][4] = {};
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u32 tile = rows_of(row);
      #pragma unroll
      for (int i = 0; i < 16; i++) {
        u32 a[4];
        matrices(a, tile + place_of(row % 8, i % 4 * 2 + lane / 16) + i / 4 * 128);
        multiply(u[i % 2], a, x[half][2 * i], x[half][2 * i + 1]);
      }
      free_rows();
    }
    float (&part)[GROUP][ROWS + 4] = s.parts[turn % 2][threadIdx.x / 32];
    #pragma unroll
    for (int j = 0; j < 4; j++)
      part[lane % 4 * 2 + j % 2][lane / 4 + j / 2 * 8] = u[0][j] + u[1][j];
  }
  __device__ __forceinline__ void make_h(const Shared& s) {
    const int token = threadIdx.x % 32 / 4, unit = threadIdx.x % 4 * 2;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      float2 u{1, 1};
      if (GATED) {
        u = {};
        #pragma unroll
        for (int w = 0; w < WARPS; w++) {
          const float2 part = *(const float2*)&s.parts[turn % 2][w][token][unit + 8 * i];
          u.x += part.x, u.y += part.y;
        }
      }
      const u32 gates = *(const u32*)&s.gates[turn % 2][token][unit + 8 * i];
      h[i] = pair_of(hidden(gates & 0xffff, u.x), hidden(gates >> 16, u.y));
    }
  }
  __device__ __forceinline__ static float hidden(u16 gate, float u) {
    const float z = wide(gate);
    return gate ? (SQUARED ? z * z : z) * u : 0.f;
  }
  __device__ __forceinline__ void add_down() {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u32 tile = rows_of(row);
      #pragma unroll
      for (int i = 0; i < 16; i++) {
        u32 a[4];
        matrices_by_columns(a, tile + place_of(row % 8, i % 4 * 2 + lane / 8 % 2) + i / 4 * 128);
        multiply(y[half][i], a, h[0], h[1]);
      }
      free_rows();
    }
  }
  // The gates of the first step of a list, when there is one.
  __device__ __forceinline__ void read_first_gate(const Layer& layer, int number, Place place,
                                                  Shared& s) {
    const List& list = s.lists[number % LISTS];
    wait(address_of(&s.listed[number % LISTS]), number / LISTS % 2, "a list");
    if (list.group == END) return;
    const Steps steps(list, place);
    if (steps.first < steps.end) read_gate(layer, list, steps.first);
  }
  // This CTA's steps of a group: its sums. The gates of the first step have been read.
  __device__ __forceinline__ void walk(const Layer& layer, int number, Place place, Shared& s) {
    #pragma unroll
    for (int i = 0; i < HALVES * 64; i++) y[i / 64][i / 4 % 16][i % 4] = 0;
    if (GATED) read_x(x, number, s);
    const List& list = s.lists[number % LISTS];
    const Steps steps(list, place);
    for (int step = steps.first; step < steps.end; step++, turn++) {
      put_gate(s);
      if (step + 1 < steps.end) read_gate(layer, list, step + 1);
      else if (SPLIT == 1) read_first_gate(layer, number + 1, place, s);
      if (GATED) put_up(s);
      if (GATED && step > steps.first) add_down();
      in_step(2, PRODUCTS);  // by then the other place has been read
      make_h(s);
      if (!GATED) add_down();
    }
    if (GATED && steps.end > steps.first) add_down();
  }
  __device__ __forceinline__ void put_out(u16* out, int tokens) const {
    const int token = threadIdx.x % 32 / 4;
    #pragma unroll
    for (int i = 0; i < 8 * HALVES; i++) {
      const uint4 v = eight_columns(y[i / 8] + i % 8 * 2);
      if (token < tokens && piece_of(i) < K / 8)
        write_once((uint4*)(out + (u64)token * K) + piece_of(i), v);
    }
  }
};

// ---- sums of a cluster ----
// Each CTA adds up some of the pieces, 32 columns each, of all warps. Its own and the others' sums
// are pushed to it, to where X and the stages were: no CTA waits for another's memory.

constexpr int PIECES_OF_WARP = 8 * HALVES;
__device__ constexpr int first_piece(int rank) { return PIECES_OF_WARP * rank / SPLIT; }
constexpr int MOST_PIECES = (PIECES_OF_WARP + SPLIT - 1) / SPLIT, PIECE_BYTES = 2 * 32 * 16;

static_assert(SPLIT * WARPS * MOST_PIECES * PIECE_BYTES <=
              GROUP * X_PITCH + STAGES * STAGE_BYTES, "too little room for sums");

__device__ __forceinline__ u32 place_of_sums(int from, int piece) {
  return ((from * WARPS + threadIdx.x / 32 % WARPS) * MOST_PIECES + piece) * PIECE_BYTES +
         threadIdx.x % 32 * 16;
}
__device__ __forceinline__ void expect_sums(int rank, Shared& s) {
  const int pieces = first_piece(rank + 1) - first_piece(rank);
  arrive_expecting(address_of(&s.summed), SPLIT * WARPS * pieces * PIECE_BYTES);
}
// Once all CTAs have read their last stage.
__device__ __forceinline__ void push_sums(const Sums& y, int rank, Shared& s) {
  const u32 own = address_of(shared) + place_of_sums(rank, 0), summed = address_of(&s.summed);
  #pragma unroll
  for (int owner = 0; owner < SPLIT; owner++) {
    const u32 to = of_cta(own, owner), barrier = of_cta(summed, owner);
    #pragma unroll
    for (int i = 2 * first_piece(owner); i < 2 * first_piece(owner + 1); i++) {
      const float (&d)[4] = y[i / 16][i % 16];
      push(to + (i - 2 * first_piece(owner)) * 512, float4{d[0], d[1], d[2], d[3]}, barrier);
    }
  }
}
// A dry run writes nothing.
__device__ __forceinline__ void add_up(u16* y, int tokens, int rank, bool dry) {
  #pragma unroll 1
  for (int i = first_piece(rank); i < first_piece(rank + 1); i++) {
    float d[2][4] = {};
    #pragma unroll
    for (int from = 0; from < SPLIT; from++)
      #pragma unroll
      for (int half = 0; half < 2; half++) {
        const float4 v = *(const float4*)(shared + place_of_sums(from, i - first_piece(rank)) +
                                          512 * half);
        d[half][0] += v.x, d[half][1] += v.y, d[half][2] += v.z, d[half][3] += v.w;
      }
    const uint4 v = eight_columns(d);
    const int token = threadIdx.x % 32 / 4, piece = piece_of(i);
    if (!dry && token < tokens && piece < K / 8)
      ((uint4*)(y + (u64)token * K))[piece] = v;
  }
}

__device__ __forceinline__ void multiply_groups(const Layer& layer, Place place, Shared& s) {
  Warp warp{Ring(s, 0)};
  warp.read_first_gate(layer, 0, place, s);
  for (int i = 0; s.lists[i % LISTS].group != END; i++) {
    const int group = s.lists[i % LISTS].group, tokens = layer.tokens(group);
    warp.walk(layer, i, place, s);
    __syncwarp();
    if (threadIdx.x % 32 == 0) arrive(address_of(&s.used[i % LISTS]));
    if (SPLIT > 1) {
      __syncwarp();
      cluster_has_read();
      return push_sums(warp.y, place.cta % SPLIT, s);
    }
    warp.put_out(layer.out_of(group), tokens);
  }
}

extern "C" __global__ void __cluster_dims__(SPLIT) __launch_bounds__(THREADS, 1)
up_and_down(const u16* x, const u16* g, const char* wu, const char* wd, u16* y, int* left,
            int* heavy, int m, int n, int limit, const uint2* bits) {
  __shared__ Shared s;
  const Layer layer{x, g, wu, wd, y, left, heavy, m, n, limit, bits};
  const Place place{(int)blockIdx.x, (int)gridDim.x};
  if (threadIdx.x == 0) {
    for (int i = 0; i < LISTS; i++) {
      init(address_of(&s.listed[i]), 1);
      init(address_of(&s.used[i]), WARPS + LOADERS / 32);
    }
    for (int i = 0; i < STAGES; i++) {
      init(address_of(&s.full[i]), LOADERS);
      init(address_of(&s.empty[i]), WARPS);
    }
    init(address_of(&s.x_full), LOADERS);
    init(address_of(&s.x_empty), WARPS);
    init(address_of(&s.summed), 1);
    if (SPLIT > 1) expect_sums(place.cta % SPLIT, s);
  }
  const Team all{(int)threadIdx.x, THREADS, 0};
  if (threadIdx.x == 0) {
    s.next = place.cta / SPLIT;
    s.after = SPLIT == 1 ? place.ctas + place.cta : layer.groups();
  }
  let_next_start();
  wait_for_stream();
  prefetch_x(layer, place.cta / SPLIT, all);
  __syncthreads();
  list_next(s.lists[0], layer, place, all, s);
  const int group = s.lists[0].group;
  if (group == END) return;  // of a cluster, all
  const int other = threadIdx.x - PRODUCTS;
  if (other < 0) {
    if (SHIFTED) take_registers<MANY>();
    multiply_groups(layer, place, s);
  } else {
    if (SHIFTED) leave_registers<FEW>();
    if (other < LISTERS) list_groups(layer, place, {other, LISTERS, 1}, s);
    else load_groups(layer, place, other - LISTERS, s);
  }
  if (SPLIT == 1) return;
  // Instructions come from memory the first time, 1 us for every few dozen of them: listers, which
  // are through early, go over these once in vain.
  const bool dry = other >= 0;
  if (!dry) wait(address_of(&s.summed), 0, "sums of the cluster");
  if (other < LISTERS)
    add_up(layer.out_of(group), layer.tokens(group), place.cta % SPLIT, dry);
  __syncwarp();
  if (dry) cluster_has_read();
}
