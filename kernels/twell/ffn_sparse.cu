// Y[m, K] = (act(G) * (X @ Wu.T)) @ Wd.T with few active units in act(G): the part after the gate.
//
//   G[m, n] = X @ Wg.T comes from the launch before. A unit of a token is active unless G <= 0, so
//   NaN is active. A list and its gates are the column vectors of formats/cvse.py, 8 tokens high.
//
//   a group: HEIGHT tokens, at most eight, of one CTA
//
//     G of    . . x . . . . x . .         rows, a list:     unit | tokens with the unit active
//     its     . . . . . . . x . .   -->                       2  |  x . .
//     tokens  . . x . . x . . . .                             5  |  . . x   ...
//
//   a step: 16 rows of the list, for all warps; a warp takes 256 columns of K, twice if K > 2048
//
//                       K                        tokens                        tokens
//          +--------+--------+--               +--------+                    +--------+
//     16   | warp 0 | warp 1 |  of Wu      x   |   X    |   =  U, summed     |  act   |
//    rows  |        |        |                 |        |      over the  *   |  (G)   |  =  H
//          +--------+--------+--               +--------+      warps         +--------+
//
//     Y, K x tokens  +=  the same rows and columns of Wd.T, read by columns, x  H
//
// The products run on tensor cores (mma m16n8k16), although most of H is zero: weights are the tall
// operand, tokens the eight columns. Groups of fewer tokens leave columns empty, but give more SMs
// work. A unit that several tokens share is read once. A unit of a single token costs 4 K bytes from
// L2, which delivers 9 TB/s to plain loads and to cp.async, and 6 to cp.async.bulk (NOTES.md). All
// other work overlaps with these copies:
//
//     warps                role
//     list     4           G, or words     --->  list, list        of later groups
//     load     4           rows of Wu, Wd  --->  stage, ...        8 rows each, by cp.async; and X
//     MMA      MMA_WARPS   up(0)  up(1) down(0)  up(2) down(1)  ...   one exchange of U a step
//
// If K exceeds 2048, a row has two halves, and there are two list warps and two load warps.
//
// A CTA is persistent: it takes its next group from a counter. Load warps continue with the rows of
// the next group while MMA warps store the sums of the last. Missing rows of a last step are loaded
// as zeros. Separate warps copy because the 600 instructions of a step's copies delayed the MMA
// warps, two per scheduler, when each MMA warp copied its columns.
//
// With ALONE there is no dense fallback. No group is left, however many units are active: units that
// do not fit into a list go to the next list, which adds to the same sums of Y. A CTA has one group.
// Rows of up to 2560 columns then have one half, with 320 columns per warp.
//
// U is summed over K in the order of the warps and kept in fp32. H is rounded once. Y is summed in
// the order of the units, so every call returns the same bits. The kernel does not read rows that no
// token of the group needs. It leaves groups with more rows than `limit` to a dense product: it
// appends their numbers to the list `heavy` and does not write their tokens.
//
// With GATED = 0, there is no U: H = act(G) and Y = H @ Wd.T.
//
// With TWELL, G is stored as TwELL words (twell_gate.cu), otherwise as a matrix. List warps then
// write the gates of a list, a row's eight tokens side by side, to `gates`, so that MMA warps need
// not search for entries. If a group is left to a dense product, they write it to G, as a matrix.
//
// Compiled with -DK (a multiple of 8, at most 4096), -DHEIGHT=1 to 8, -DSQUARED=0|1 (relu, relu2),
// -DGATED=0|1, -DTWELL=0|1, -DFP16=0|1, -DALONE=0|1; with TWELL, -DTILE=256|128|64 and -DCAPACITY.
// ALONE requires TWELL=0.

#include "ffn_ptx.cuh"

using u16 = unsigned short;
static_assert(!ALONE || !TWELL, "ALONE");

constexpr int MMA_WARPS = K > 1024 ? 8 : 4;   // whole warpgroups, like list and load warps together
constexpr int HALVES = K > MMA_WARPS * (ALONE ? 320 : 256) ? 2 : 1;  // of a row
constexpr int LINES = (K + 64 * MMA_WARPS * HALVES - 1) / (64 * MMA_WARPS * HALVES);
constexpr int COLUMNS = 64 * (LINES > 2 ? LINES : 2);  // per warp, in each half
constexpr int HALF = COLUMNS * MMA_WARPS, PITCH = 2 * HALF;  // columns; bytes
constexpr int MMA_THREADS = 32 * MMA_WARPS;
constexpr int LIST_THREADS = HALVES == 1 ? 128 : 64, LOAD_THREADS = LIST_THREADS;
constexpr int THREADS = MMA_THREADS + LIST_THREADS + LOAD_THREADS;
constexpr int GROUP = 8, ROWS = 16, STAGE_BYTES = 8 * PITCH;
constexpr int X_PITCH = HALVES * PITCH;
constexpr int FITTING = (200 * 1024 - GROUP * X_PITCH) / STAGE_BYTES;
constexpr int STAGES = !ALONE ? 6 - HALVES : FITTING < 6 ? FITTING : 6;  // as in _grouped.py
constexpr int MOST_ROWS = ALONE ? 512 : 1536;  // per list
constexpr int LISTS = 3;  // one to multiply, one to load, and one to write
constexpr int END = -1;  // no group
// Registers per thread of MMA warps and of other warps; a CTA has 64 K.
constexpr int MMA_REGISTERS = HALVES == 2 ? 224 : COLUMNS > 256 ? 184 : 152;
constexpr int OTHER_REGISTERS = HALVES == 2 ? 56 : COLUMNS > 256 ? 72 : 104;
#if TWELL
constexpr int CHUNK = 256;  // units of eight tokens that a list warp takes at a time
constexpr int WORDS = CAPACITY + 1, TILES = CHUNK / TILE;  // per tile; per token and chunk
constexpr int CHUNKS = TILES > 1 || HALVES > 1 ? 1 : 3;  // loaded at a time
#else
// A list thread loads so many 16 bytes at a time: READ tokens of PIECES pieces of eight units. Each
// load takes 2 to 3 us while rows are being copied. NUMBERED adjacent pieces are numbered by one
// scan. In groups of one or two tokens more of them save 2 to 4 us (NOTES.md).
constexpr int LOADS = HALVES == 2 && (!ALONE || HEIGHT > 2) ? 4 : ALONE ? 8 : 16;
constexpr int READ = HEIGHT < LOADS ? HEIGHT : LOADS;
constexpr int PIECES = READ > 1 ? LOADS / READ : LOADS / 2;
constexpr int NUMBERED = HEIGHT > 2 ? 1 : PIECES;
#endif
constexpr bool MOVES_REGISTERS = THREADS == 512 || HALVES == 2;  // otherwise all have enough

extern __shared__ __align__(1024) char shared[];  // X, then the stages; at the end, sums of Y

struct List {
  int group, steps;
  bool more;  // ALONE: the next list belongs to the same group
  alignas(16) u32 rows[MOST_ROWS + ROWS];  // unit << 8 | a bit for each token with the unit active
  u16* gates;  // with TWELL: [row][token], in global memory
};
struct Shared {
  List lists[LISTS];
  float parts[2][MMA_WARPS][GROUP][ROWS + 4];  // partial sums of U, of two steps
  alignas(16) u16 gates[2][GROUP][ROWS + 8];
  int counts[2][THREADS / 32], next, after;  // counts of a scan; groups
  u64 listed[LISTS], used[LISTS], full[STAGES], empty[STAGES];
  u64 x_full, x_empty;
#if TWELL
  u32 marks[THREADS / 32][CHUNK / 4];  // of a chunk: a byte per unit, a bit per token
#endif
};

// ---- operands, and the place of a CTA in the grid ----

struct Layer {
  const u16* x;
  u16* g;  // with TWELL: gates of tiles with too many entries, and of groups left
  const char *wu, *wd;
  u16* y;
  int *left, *heavy;
  int m, n, limit;
  const void* words;  // with TWELL
  __device__ __forceinline__ int groups() const { return (m + HEIGHT - 1) / HEIGHT; }
  __device__ __forceinline__ int tokens(int group) const {
    return min(HEIGHT, m - group * HEIGHT);
  }
  __device__ __forceinline__ u16* out_of(int group) const { return y + (u64)group * HEIGHT * K; }
};
struct GridPlace { int cta, ctas; };  // this CTA's number, and how many there are

// ---- lists ----

// The threads that write a list, and their named barrier.
struct ThreadGroup { int thread, threads, barrier; };

// Return the sum of `own` over the threads before this one; `all` is the sum over all threads.
__device__ __forceinline__ int exclusive_scan(int own, const ThreadGroup& team, int turn, Shared& s,
                                          int& all) {
  const int lane = team.thread % 32, warp = team.thread / 32;
  int up_to = own;
  #pragma unroll
  for (int by = 1; by < 32; by *= 2) {
    const int below = __shfl_up_sync(~0u, up_to, by);
    if (lane >= by) up_to += below;
  }
  if (lane == 31) s.counts[turn % 2][warp] = up_to;
  named_barrier_sync(team.barrier, team.threads);
  const int count = lane < team.threads / 32 ? s.counts[turn % 2][lane] : 0;  // a warp's
  all = __reduce_add_sync(~0u, count);
  return up_to - own + __reduce_add_sync(~0u, lane < warp ? count : 0);
}

// List the units whose bytes of `masks` are not zero at rows `to`, `to` + 1, ...; return the next
// row. A loop over them is short code, which matters because its first run comes from memory.
__device__ __forceinline__ int list_units(List& list, const u32 (&masks)[2], int unit, int to) {
  for (u64 left = (u64)masks[1] << 32 | masks[0]; left; to++) {
    const int j = (__ffsll(left) - 1) / 8;
    if (to < MOST_ROWS && (!ALONE || to >= 0))
      list.rows[to] = (u32)(unit + j) << 8 | (u32)(left >> 8 * j & 0xff);
    left &= ~(0xffull << 8 * j);
  }
  return to;
}
__device__ __forceinline__ int units_on(const u32 (&masks)[2]) {
  int units = 0;
  #pragma unroll
  for (int j = 0; j < 8; j++) units += (masks[j / 4] >> 8 * (j % 4) & 0xff) != 0;
  return units;
}
// Pad the last step of a list of `found` units; it holds at most MOST_ROWS of them.
__device__ __forceinline__ void end_list(List& list, int found, int group,
                                         const ThreadGroup& team) {
  const int listed = min(found, MOST_ROWS), steps = listed ? (listed + ROWS - 1) / ROWS : 1;
  for (int row = listed + team.thread; row < steps * ROWS; row += team.threads) list.rows[row] = 0;
  if (team.thread == 0) list.group = group, list.steps = steps;
  if (ALONE && team.thread == 0) list.more = found > MOST_ROWS;
}

#if !TWELL
// Return a thread's i-th piece: it takes NUMBERED adjacent ones at `at`, at + threads, ...
__device__ __forceinline__ int piece_at(int at, int i, int threads) {
  return (at + i / NUMBERED * threads) * NUMBERED + i % NUMBERED;
}
// The active units of PIECES pieces of eight units: a byte per unit, a bit per token.
struct ActiveMask {
  u32 masks[PIECES][2];

  __device__ __forceinline__ void load(const Layer& layer, int group, int tokens, int at,
                                       int threads) {
    const int pieces = layer.n / 8;  // beyond the last token, read the last again
    u32 pairs[PIECES][4] = {};  // of two units each, 16 bits apart
    const uint4* g = (const uint4*)(layer.g + (u64)group * HEIGHT * layer.n);
    #pragma unroll
    for (int first = 0; first < HEIGHT; first += READ) {
      uint4 v[PIECES][READ];
      #pragma unroll
      for (int i = 0; i < PIECES; i++)
        #pragma unroll
        for (int j = 0; j < READ; j++) {
          const int piece = piece_at(at, i, threads);
          v[i][j] = load_once(g + min(first + j, tokens - 1) * pieces + piece, piece < pieces);
        }
      #pragma unroll
      for (int i = 0; i < PIECES; i++)
        #pragma unroll
        for (int j = 0; j < READ; j++) {
          pairs[i][0] |= positive_mask(v[i][j].x) & 0x10001u << (first + j);
          pairs[i][1] |= positive_mask(v[i][j].y) & 0x10001u << (first + j);
          pairs[i][2] |= positive_mask(v[i][j].z) & 0x10001u << (first + j);
          pairs[i][3] |= positive_mask(v[i][j].w) & 0x10001u << (first + j);
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

// List the units that are active for any token of a group, in ascending order, at most MOST_ROWS;
// pad the last step. Return the number of active units. With ALONE the first `first` are left out.
__device__ __forceinline__ int list_rows(List& list, const Layer& layer, int group, int first,
                                         const ThreadGroup& team, Shared& s) {
  const int tokens = layer.tokens(group), threads = team.threads, pieces = layer.n / 8;
  int found = 0, turn = 0;
  for (int turns = 0; turns * threads * NUMBERED < pieces; turns += PIECES / NUMBERED) {
    const int at = turns * threads + team.thread;
    ActiveMask active;
    active.load(layer, group, tokens, at, threads);
    #pragma unroll
    for (int i = 0; i < PIECES; i += NUMBERED, turn++) {
      if ((turns + i / NUMBERED) * threads * NUMBERED >= pieces) break;
      int units = 0, all;
      #pragma unroll
      for (int j = i; j < i + NUMBERED; j++) units += units_on(active.masks[j]);
      int to = found + exclusive_scan(units, team, turn, s, all) - (ALONE ? first : 0);
      #pragma unroll
      for (int j = i; j < i + NUMBERED; j++)
        to = list_units(list, active.masks[j], 8 * piece_at(at, j, threads), to);
      found += all;
    }
  }
  end_list(list, found - (ALONE ? first : 0), group, team);
  return found;
}
#else

// ---- lists, from TwELL words ----
//
//   A warp takes CHUNK units of the group's eight tokens at a time: lane 4 t + q has words 2 q and
//   2 q + 1 of each 32 bytes of token t. The warp marks the units in shared memory and numbers
//   them, which gives each entry's row in the list and place in `gates`. Entries beyond the first
//   32 bytes of a tile are loaded twice, but at 29 of 5632 a tile has far fewer than 7 entries.

// The tiles of a chunk and a token, for the warp that lists them.
struct Chunk {
  const u32* words;   // of the chunk's first tile
  const u16* dense;   // the token's gates in tiles with too many entries
  int unit, n;        // the chunk's first unit; units of the layer
  bool there;         // whether the token and the chunk exist

  __device__ __forceinline__ Chunk(const Layer& layer, int group, int number) {
    const int token = threadIdx.x % 32 / 4, tiles = (layer.n + TILE - 1) / TILE;
    const u64 row = (u64)group * HEIGHT + token;
    unit = number * CHUNK, n = layer.n;
    there = token < layer.tokens(group) && unit < n;
    words = (const u32*)layer.words + (row * tiles + number * TILES) * WORDS;
    dense = layer.g + row * n;
  }
  // Return a lane's two words of the first 32 bytes of a tile, or of fewer; zeros beyond tiles.
  __device__ __forceinline__ uint2 head(int tile) const {
    const int at = threadIdx.x % 4 * 2;
    if (!there || unit + tile * TILE >= n || at >= WORDS) return uint2{0, 0};
    return load_once((const uint2*)(words + tile * WORDS + at));
  }
  // Call visit(unit, gate) for a lane's part of the entries of a tile. All lanes of a warp call it.
  template <class Visit>
  __device__ __forceinline__ void each(int tile, uint2 head, Visit visit) const {
    const int lane = threadIdx.x % 32, at = lane % 4 * 2;
    const int count = __shfl_sync(~0u, (int)head.x, lane & ~3);
    const int listed = count > CAPACITY ? 0 : count;
    for (int word = 0; __any_sync(~0u, word < listed + 1 && listed); word += 8) {
      const int first = word + at;
      if (first > listed) continue;
      if (word) head = load_once((const uint2*)(words + tile * WORDS + first));
      if (first) visit(head.x & 0xffff, head.x >> 16);
      if (first < listed) visit(head.y & 0xffff, head.y >> 16);
    }
    if (count <= CAPACITY) return;
    for (int i = lane % 4; i < TILE && unit + tile * TILE + i < n; i += 4) {
      const int at = unit + tile * TILE + i;
      if (positive_mask(dense[at]) & 1) visit(at, dense[at]);
    }
  }
};

// List the units that are active for any token of a group, in ascending order, with their gates, at
// most MOST_ROWS; pad the last step. Return the number of active units.
__device__ __forceinline__ int list_rows(List& list, const Layer& layer, int group, int,
                                         const ThreadGroup& team, Shared& s) {
  const int warp = team.thread / 32, warps = team.threads / 32, lane = threadIdx.x % 32;
  const int chunks = (layer.n + CHUNK - 1) / CHUNK;
  u32* marks = s.marks[threadIdx.x / 32];
  u16* gates = list.gates + lane / 4;
  int found = 0, turn = 0;
  for (int first = 0; first < chunks; first += CHUNKS * warps) {
    uint2 heads[CHUNKS][TILES];
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++)
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++)
        heads[i][tile] = Chunk(layer, group, first + i * warps + warp).head(tile);
    #pragma unroll
    for (int i = 0; i < CHUNKS; i++, turn++) {
      if (first + i * warps >= chunks) break;
      const Chunk chunk(layer, group, first + i * warps + warp);
      marks[lane] = 0, marks[lane + 32] = 0;
      __syncwarp();
      const auto mark = [&](int unit, u32) {
        unit -= chunk.unit;
        atomicOr(marks + unit / 4, 1u << 8 * (unit % 4) + lane / 4);
      };
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) chunk.each(tile, heads[i][tile], mark);
      __syncwarp();
      const u32 masks[2] = {marks[2 * lane], marks[2 * lane + 1]};
      int all, to = found + exclusive_scan(units_on(masks), team, turn, s, all);
      list_units(list, masks, chunk.unit + 8 * lane, to);
      const int base = __shfl_sync(~0u, to, 0);
      unsigned char* ranks = (unsigned char*)marks;  // all lanes have read the marks
      #pragma unroll
      for (int j = 0; j < 8; j++) {
        ranks[8 * lane + j] = to - base;
        to += (masks[j / 4] >> 8 * (j % 4) & 0xff) != 0;
      }
      __syncwarp();
      const auto put = [&](int unit, u32 gate) {
        const int row = base + ranks[unit - chunk.unit];
        if (row < MOST_ROWS) gates[row * GROUP] = gate;
      };
      #pragma unroll
      for (int tile = 0; tile < TILES; tile++) chunk.each(tile, heads[i][tile], put);
      found += all;
      __syncwarp();  // the ranks have been read
    }
  }
  end_list(list, found, group, team);
  return found;
}

// Write the gates of a group to G as a matrix, with zeros for inactive units.
__device__ __forceinline__ void expand_group(const Layer& layer, int group,
                                             const ThreadGroup& team) {
  const int lane = threadIdx.x % 32, chunks = (layer.n + CHUNK - 1) / CHUNK;
  u16* g = layer.g + ((u64)group * HEIGHT + lane / 4) * layer.n;
  for (int number = team.thread / 32; number < chunks; number += team.threads / 32) {
    const Chunk chunk(layer, group, number);
    for (int tile = 0; tile < TILES; tile++) {
      const uint2 head = chunk.head(tile);
      const int first = chunk.unit + tile * TILE, end = min(first + TILE, layer.n);
      const int count = __shfl_sync(~0u, (int)head.x, lane & ~3);
      if (chunk.there && count <= CAPACITY)  // otherwise G has the tile
        for (int unit = first + lane % 4 * 8; unit < end; unit += 32)
          *(uint4*)(g + unit) = uint4{0, 0, 0, 0};
      __syncwarp();
      chunk.each(tile, head, [&](int unit, u32 gate) { g[unit] = gate; });
    }
  }
}
#endif

// Prefetch a group's X into L2, 128 bytes per thread at a time: from memory, X takes over 3 us.
__device__ __forceinline__ void prefetch_x(const Layer& layer, int group, const ThreadGroup& team) {
  if (!GATED || group >= layer.groups()) return;
  const char* x = (const char*)(layer.x + (u64)group * HEIGHT * K);
  #pragma unroll 1
  for (int at = 128 * team.thread; at < 2 * layer.tokens(group) * K; at += 128 * team.threads)
    prefetch_l2(x + at);
}

// List the first group, starting at s.next, that is not left to a dense product, or END. Meanwhile
// prefetch X of the group after it, and take the group after that from the counter. ALONE leaves no
// group: the next list holds the group's rows beyond this list.
__device__ __forceinline__ void list_next(int number, const Layer& layer, GridPlace place,
                                          const ThreadGroup& team, Shared& s) {
  List& list = s.lists[number % LISTS];
  const int first = number * MOST_ROWS;  // of ALONE
  for (;;) {
    const int group = s.next, after = s.after;
    if (group >= layer.groups()) break;
    int third = layer.groups();  // none: with ALONE there is one group
    if (!ALONE && team.thread == 0) third = 2 * place.ctas + atomicAdd(layer.left + 2, 1);
    prefetch_x(layer, after, team);
    const int found = list_rows(list, layer, group, first, team, s);
    const bool more = ALONE && found > first + MOST_ROWS;
    if (!more && team.thread == 0) s.next = after, s.after = third;
    named_barrier_sync(team.barrier, team.threads);
    if (ALONE || found <= layer.limit) return;
#if TWELL
    expand_group(layer, group, team);
#endif
    if (team.thread == 0) layer.heavy[atomicAdd(layer.left, 1)] = group;
  }
  if (team.thread == 0) list.group = END;
  named_barrier_sync(team.barrier, team.threads);
}

// The loop of the list warps, which list one group after the other, ahead of the products. All
// threads together have listed the first group.
__device__ __forceinline__ void list_groups(const Layer& layer, GridPlace place,
                                            const ThreadGroup& team, Shared& s) {
  for (int i = 0;; i++) {
    if (i) {
      if (i >= LISTS)
        mbarrier_wait(smem_address(&s.used[i % LISTS]), (i / LISTS - 1) % 2, "a free list");
      list_next(i, layer, place, team, s);
    }
    if (team.thread == 0) mbarrier_arrive(smem_address(&s.listed[i % LISTS]));
    if (s.lists[i % LISTS].group == END) return;
  }
}

// ---- stages ----

struct Pipeline : Ring<STAGES> {
  u32 stages;  // in shared memory
  __device__ __forceinline__ Pipeline(Shared& s, u32 phase)
      : Ring{smem_address(s.full), smem_address(s.empty), 0, phase},
        stages(smem_address(shared) + GROUP * X_PITCH) {}
  __device__ __forceinline__ u32 tile() const { return stages + stage * STAGE_BYTES; }
};

// Return the swizzled offset of a piece of 16 bytes. Eight rows that are read at once are in
// different banks.
__device__ __forceinline__ int swizzled(int row, int piece, int pitch = PITCH) {
  return row * pitch + ((piece ^ row % 8) << 4);
}

// Copy the rows of a step. A warp takes every second or fourth row, a lane every 32nd piece of it.
__device__ __forceinline__ void load_step(Pipeline& pipeline, const char* w, const u32* rows,
                                          int loader) {
  const int lane = loader % 32;
  #pragma unroll
  for (int part = 0; part < 2 * HALVES; part++) {
    const int half = part / 2;
    pipeline.producer_acquire();
    const u32 tile = pipeline.tile();
    #pragma unroll
    for (int i = 0; i < 8 / (LOAD_THREADS / 32); i++) {
      const int number = loader / 32 + i * (LOAD_THREADS / 32);
      const u32 row = rows[part % 2 * 8 + number];
      const char* from = w + (u64)(row >> 8) * (2 * K) + PITCH * half + 16 * lane;
      const u32 to = tile + swizzled(number, lane);
      #pragma unroll
      for (int j = 0; j < PITCH / 512; j++)
        cp_async_16(to + 512 * j, from + 512 * j,
                (row & 0xff) && (HALVES * HALF == K || HALF * half + 256 * j + 8 * lane < K),
                evict_last_policy());
    }
    cp_async_arrive(pipeline.full_barrier());
    pipeline.advance();
  }
}

// Copy X of a group, with zeros beyond K and beyond the last token.
__device__ __forceinline__ void load_x(const Layer& layer, int group, int loader) {
  const int lane = loader % 32, tokens = layer.tokens(group);
  #pragma unroll
  for (int i = 0; i < GROUP / (LOAD_THREADS / 32); i++) {
    const int token = loader / 32 + i * (LOAD_THREADS / 32);
    const char* from = (const char*)(layer.x + (u64)(group * HEIGHT + token) * K) + 16 * lane;
    const u32 to = smem_address(shared) + swizzled(token, lane, X_PITCH);
    #pragma unroll
    for (int j = 0; j < X_PITCH / 512; j++)
      cp_async_16(to + 512 * j, from + 512 * j,
                  token < tokens && (HALVES * HALF == K || 256 * j + 8 * lane < K),
              evict_first_policy());
  }
}

// Load X of a list's group, if there is one, after the MMA warps have read the previous X.
__device__ __forceinline__ void load_next_x(const Layer& layer, int number, int loader,
                                            Shared& s) {
  const List& list = s.lists[number % LISTS];
  mbarrier_wait(smem_address(&s.listed[number % LISTS]), number / LISTS % 2, "a list");
  if (!GATED || list.group == END) return;
  mbarrier_wait(smem_address(&s.x_empty), 1 - number % 2, "a place for X");
  load_x(layer, list.group, loader);
  cp_async_arrive(smem_address(&s.x_full));
}

// The loop of the load warps. For each list: up(0), up(1), down(0), ..., up(last), down(last - 1),
// down(last). X of the next list comes before the last step of a list, to arrive in time.
__device__ __forceinline__ void load_groups(const Layer& layer, int loader, Shared& s) {
  Pipeline pipeline(s, 1);  // stages are free before the first round
  load_next_x(layer, 0, loader, s);
  for (int i = 0; s.lists[i % LISTS].group != END; i++) {
    const List& list = s.lists[i % LISTS];
    const int steps = list.steps;
    for (int step = 0; step <= steps; step++) {
      const u32* rows = list.rows + ROWS * step;
      if (step == steps - 1) load_next_x(layer, i + 1, loader, s);
      if (GATED && step < steps) load_step(pipeline, layer.wu, rows, loader);
      if (step) load_step(pipeline, layer.wd, rows - ROWS, loader);
    }
    __syncwarp();
    if (loader % 32 == 0) mbarrier_arrive(smem_address(&s.used[i % LISTS]));
  }
}

// ---- products ----

// The first column of a warp in a half of K.
__device__ __forceinline__ int column_of(int half) {
  return HALF * half + threadIdx.x / 32 * COLUMNS;
}

// X of a group as fragments of B: [half][k / 8]; a lane holds words of token lane / 4.
constexpr int PIECES_OF_HALF = COLUMNS / 32;  // 32 columns each
using Tokens = u32[HALVES][COLUMNS / 8];

__device__ __forceinline__ void load_x_fragments(Tokens& x, int number, Shared& s) {
  const int lane = threadIdx.x % 32;
  mbarrier_wait(smem_address(&s.x_full), number % 2, "X");
  #pragma unroll
  for (int i = 0; i < PIECES_OF_HALF * HALVES; i++) {
    const int half = i / PIECES_OF_HALF, of_half = i % PIECES_OF_HALF;
    const int piece = column_of(half) / 8 + 4 * of_half + lane / 8;
    u32 four[4];
    ldmatrix_x4(four, smem_address(shared) + swizzled(lane % 8, piece, X_PITCH));
    #pragma unroll
    for (int j = 0; j < 4; j++) x[half][of_half * 4 + j] = four[j];
  }
  __syncwarp();
  if (lane == 0) mbarrier_arrive(smem_address(&s.x_empty));
}

// Sums of Y.T: [half][i][j] is column 16 i + 8 (j / 2) + lane / 4, token 2 (lane % 4) + j % 2.
using Sums = float[HALVES][COLUMNS / 16][4];

// A warp writes 32 columns at a time. In the i-th 32, a lane has eight columns of token lane / 4,
// which are 16 bytes at `piece_of(i)`.
__device__ __forceinline__ int piece_of(int i) {
  const int warp = threadIdx.x / 32 % MMA_WARPS;
  const int half = i / PIECES_OF_HALF, of_half = i % PIECES_OF_HALF;
  return (HALF * half + COLUMNS * warp) / 8 + 4 * of_half + threadIdx.x % 4;
}
__device__ __forceinline__ uint4 eight_columns(const float (*d)[4]) {
  u32 words[4];
  #pragma unroll
  for (int j = 0; j < 4; j++) {
    const float* pair = &d[j / 2][j % 2 * 2];
    words[j] = movmatrix_trans(pack_pair(pair[0], pair[1]));
  }
  quad_transpose(words);
  return uint4{words[0], words[1], words[2], words[3]};
}

struct MmaWarp {
  Pipeline pipeline;
  Tokens x;
  Sums y;
  u32 h[2];  // units 2 q, 2 q + 1, and these + 8, of token lane / 4; q is lane % 4
  u16 gate;  // thread t: row t / 8 of token t % 8; zero if and only if the unit is inactive
  int turn;  // number of the step, because U and gates are double-buffered

  __device__ __forceinline__ void load_gate(const Layer& layer, const List& list, int step) {
    gate = 0;
    if (threadIdx.x >= ROWS * GROUP) return;
    const u32 row = list.rows[step * ROWS + threadIdx.x / GROUP];
    const u32 token = threadIdx.x % GROUP;
    if (!(row >> token & 1)) return;
#if TWELL
    gate = list.gates[step * ROWS * GROUP + threadIdx.x];
#else
    gate = __ldg(layer.g + (u64)(list.group * HEIGHT + token) * layer.n + (row >> 8));
#endif
  }
  __device__ __forceinline__ void store_gate(Shared& s) const {
    if (threadIdx.x < ROWS * GROUP)
      s.gates[turn % 2][threadIdx.x % GROUP][threadIdx.x / GROUP] = gate;
  }
  // Wait for 16 rows; return the address of this warp's columns in the lane's row.
  __device__ __forceinline__ u32 wait_rows(int row) {
    pipeline.consumer_wait();
    const u32 upper = pipeline.tile();
    pipeline.advance();
    pipeline.consumer_wait();
    return (row < 8 ? upper : pipeline.tile()) + threadIdx.x / 32 * (2 * COLUMNS);
  }
  __device__ __forceinline__ void release_rows() {
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      mbarrier_arrive(pipeline.empty_barrier((pipeline.stage ? pipeline.stage : STAGES) - 1));
      mbarrier_arrive(pipeline.empty_barrier());
    }
    pipeline.advance();
  }
  // Store the partial sums of U of 16 rows, over this warp's columns.
  __device__ __forceinline__ void mma_up(Shared& s) {
    const int lane = threadIdx.x % 32, row = lane % 16;
    float u[2][4] = {};
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u32 tile = wait_rows(row);
      #pragma unroll
      for (int i = 0; i < COLUMNS / 16; i++) {
        u32 a[4];
        ldmatrix_x4(a, tile + swizzled(row % 8, i % 4 * 2 + lane / 16) + i / 4 * 128);
        mma_m16n8k16(u[i % 2], a, x[half][2 * i], x[half][2 * i + 1]);
      }
      release_rows();
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
        for (int w = 0; w < MMA_WARPS; w++) {
          const float2 part = *(const float2*)&s.parts[turn % 2][w][token][unit + 8 * i];
          u.x += part.x, u.y += part.y;
        }
      }
      const u32 gates = *(const u32*)&s.gates[turn % 2][token][unit + 8 * i];
      h[i] = pack_pair(hidden(gates & 0xffff, u.x), hidden(gates >> 16, u.y));
    }
  }
  __device__ __forceinline__ static float hidden(u16 gate, float u) {
    const float z = to_float(gate);
    return gate ? (SQUARED ? z * z : z) * u : 0.f;
  }
  __device__ __forceinline__ void mma_down() {
    const int lane = threadIdx.x % 32, row = lane % 8 + lane / 16 * 8;
    #pragma unroll
    for (int half = 0; half < HALVES; half++) {
      const u32 tile = wait_rows(row);
      #pragma unroll
      for (int i = 0; i < COLUMNS / 16; i++) {
        u32 a[4];
        ldmatrix_x4_trans(a, tile + swizzled(row % 8, i % 4 * 2 + lane / 8 % 2) + i / 4 * 128);
        mma_m16n8k16(y[half][i], a, h[0], h[1]);
      }
      release_rows();
    }
  }
  // Load the gates of the first step of a list.
  __device__ __forceinline__ void load_first_gate(const Layer& layer, int number, Shared& s) {
    const List& list = s.lists[number % LISTS];
    mbarrier_wait(smem_address(&s.listed[number % LISTS]), number / LISTS % 2, "a list");
    if (list.group != END) load_gate(layer, list, 0);
  }
  // Sum over the steps of a list. The gates of the first step are already loaded.
  __device__ __forceinline__ void mainloop(const Layer& layer, int number, Shared& s) {
    constexpr int OF_HALF = COLUMNS / 4;
    #pragma unroll
    for (int i = 0; i < HALVES * OF_HALF; i++)
      if (!ALONE || number == 0) y[i / OF_HALF][i % OF_HALF / 4][i % 4] = 0;
    if (GATED) load_x_fragments(x, number, s);
    const List& list = s.lists[number % LISTS];
    const int steps = list.steps;
    for (int step = 0; step < steps; step++, turn++) {
      store_gate(s);
      if (step + 1 < steps) load_gate(layer, list, step + 1);
      else load_first_gate(layer, number + 1, s);
      if (GATED) mma_up(s);
      if (GATED && step) mma_down();
      named_barrier_sync(2, MMA_THREADS);  // U is stored, and the other buffer has been read
      make_h(s);
      if (!GATED) mma_down();
    }
    if (GATED) mma_down();
  }
  __device__ __forceinline__ void store_y(u16* out, int tokens) const {
    const int token = threadIdx.x % 32 / 4;
    #pragma unroll
    for (int i = 0; i < PIECES_OF_HALF * HALVES; i++) {
      const uint4 v = eight_columns(y[i / PIECES_OF_HALF] + i % PIECES_OF_HALF * 2);
      if (token < tokens && piece_of(i) < K / 8)
        store_once((uint4*)(out + (u64)token * K) + piece_of(i), v);
    }
  }
};

__device__ __forceinline__ void mma_groups(const Layer& layer, Shared& s) {
  MmaWarp warp{Pipeline(s, 0)};
  warp.load_first_gate(layer, 0, s);
  for (int i = 0; s.lists[i % LISTS].group != END; i++) {
    const int group = s.lists[i % LISTS].group, tokens = layer.tokens(group);
    const bool more = ALONE && s.lists[i % LISTS].more;
    warp.mainloop(layer, i, s);
    __syncwarp();
    if (threadIdx.x % 32 == 0) mbarrier_arrive(smem_address(&s.used[i % LISTS]));
    if (!more) warp.store_y(layer.out_of(group), tokens);
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
up_and_down(const u16* x, u16* g, const char* wu, const char* wd, u16* y, int* left, int* heavy,
            int m, int n, int limit, const void* words, u16* gates) {
  __shared__ Shared s;
  const Layer layer{x, g, wu, wd, y, left, heavy, m, n, limit, words};
  const GridPlace place{(int)blockIdx.x, (int)gridDim.x};
  if (threadIdx.x == 0) {
    for (int i = 0; i < LISTS; i++) {
      mbarrier_init(smem_address(&s.listed[i]), 1);
      mbarrier_init(smem_address(&s.used[i]), MMA_WARPS + LOAD_THREADS / 32);
      s.lists[i].gates = gates + (u64)(place.cta * LISTS + i) * MOST_ROWS * GROUP;
    }
    Pipeline(s, 0).init_barriers(LOAD_THREADS, MMA_WARPS);
    mbarrier_init(smem_address(&s.x_full), LOAD_THREADS);
    mbarrier_init(smem_address(&s.x_empty), MMA_WARPS);
  }
  const ThreadGroup all{(int)threadIdx.x, THREADS, 0};
  if (threadIdx.x == 0) {
    s.next = place.cta;
    s.after = ALONE ? layer.groups() : place.ctas + place.cta;
  }
  launch_dependent_grids();
  wait_on_dependent_grids();
  prefetch_x(layer, place.cta, all);
  __syncthreads();
  list_next(0, layer, place, all, s);
  if (s.lists[0].group == END) return;
  const int other = threadIdx.x - MMA_THREADS;
  if (other < 0) {
    if (MOVES_REGISTERS) setmaxnreg_inc<MMA_REGISTERS>();
    mma_groups(layer, s);
  } else {
    if (MOVES_REGISTERS) setmaxnreg_dec<OTHER_REGISTERS>();
    if (other < LIST_THREADS) list_groups(layer, place, {other, LIST_THREADS, 1}, s);
    else load_groups(layer, other - LIST_THREADS, s);
  }
}
