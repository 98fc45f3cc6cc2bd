// The walk of a tile of queries over the blocks of its list, which attention_wgmma.cu draws: the
// ring, the producer, and what both consumers do with it. The kernel that includes it defines
//
//   QUERY_MAPS   matrices of queries that a tile needs: Q, or Q, dO and O
//   SHARED_Q     1: consumers read Q in shared memory until the LAST step; 0: it goes to registers
//   LAGGING      1: V of a step comes after K of the next step; 0: before
//
// and the macros of attention_wgmma.cu. With GATHERED, a row of a tile is an entry of a block of keys
// (_gathering.py): row * GATHERED + place, of a query in the list of a head. The tile has
// one block, or complete rows all blocks that they see.
// Two more producer warps copy its rows of Q, wherever they are, and their entries.

#pragma once

constexpr int ROW_BYTES = 128, HALVES = HEAD_DIM / 64;
constexpr int ROWS = 64 * CONSUMERS;                       // of a tile
constexpr int BOX_KEYS = BLOCK_K < KEYS ? BLOCK_K : KEYS;  // of an entry of a step
constexpr int ENTRIES = KEYS / BOX_KEYS, PARTS = BLOCK_K / BOX_KEYS;
constexpr int Q_BYTES = ROWS * HEAD_DIM * 2, SLOT_BYTES = KEYS * HEAD_DIM * 2;
constexpr int Q_COUNT = GROUPS * Q_BUFFERS;
constexpr int Q_BOX = SPAN < 64 ? SPAN : 64;
constexpr int WARPGROUPS = GROUPS * CONSUMERS, THREADS = 128 * (WARPGROUPS + 1);
constexpr int NOTE_INTS = 4 + (1 + BITS) * ENTRIES;  // flags, query, head, part; keys; bits
constexpr int COMPLETE = 1 << 31;                    // of the count of a tile
constexpr int TICKETS = 3 + WARPGROUPS;              // a named barrier, behind those of consumers
constexpr int PARTIAL = 1 << 31;                     // of a column, and of a key in a note
// Flags: of a tile's first and last step, of the end, and of a last step with one entry.
enum { FIRST = 1, MASKED = 2, END = 4, SHORT = 8, LAST = 16 };
static_assert(!SHORTENS || KEYS == 128 && BOX_KEYS == 64, "a short step has one of two blocks");
#define INF __int_as_float(0x7f800000)

template <int BITS_OF_IT> struct UnsignedOf { using type = u32; };
template <> struct UnsignedOf<16> { using type = unsigned short; };
template <> struct UnsignedOf<8> { using type = unsigned char; };
template <int BITS_OF_IT> using Unsigned = typename UnsignedOf<BITS_OF_IT>::type;

struct Maps { TensorMap k, v, queries[QUERY_MAPS]; };  // [batch, tokens, heads * D]
// The host writes these (_wgmma_tiles.py). Heads count through all sequences. If GATHERED, _cut of
// _gathered_wgmma.py does: `first` is the first key, a multiple of KEYS, plus how many steps, less
// than KEYS, all rows see whole; `count` has the steps, in the lowest 8 bits the rows, and in the
// highest whether they are COMPLETE; `query` is the first entry.
struct alignas(16) Tile { int first, count, query, head; };
struct Lists {
  const Tile* tiles;
  const int *columns, *slots;
  const unsigned char* bits;
#if GATHERED
  const int* entries;
  const char* q;
  char* o;     // of complete rows
  float* lse;  // the same
#endif
  int* counters;  // tiles taken, workers done: zero between launches; GATHERED: and tile_count
  int tile_count;
};
// SPLITS: each tile from `whole` on counts as `count` tiles, the parts of its list.
//   sums      of the parts
//   counters  the parts of each such tile that each warp has done: zero between launches
struct Parts {
  int whole, count;
  float4* sums;
  int* counters;
};
struct Sizes {
  int queries, keys, heads, kv_heads;
  float scale;
#if GATHERED
  int first;  // entry that has a part
#endif
};

// GATHERED: where the entries of a tile are in shared memory, and behind them the ticket of the next
// tile. Those of a tile are read until the first scores of the next one, so three tiles take turns.
constexpr int TURNS = 3, ENTRY_INTS = GATHERED ? ROWS + 1 : 1;
struct EntryPlace {
  u32 tile;
  int turn;
  __device__ __forceinline__ u32 ticket() const { return tile + ROWS * 4; }
  __device__ __forceinline__ void advance() {
    const bool last = turn == TURNS - 1;
    tile += (last ? 1 - TURNS : 1) * ENTRY_INTS * 4;
    turn = last ? 0 : turn + 1;
  }
};

// ---- the ring of slots, and the buffer of Q ----

struct Places { u32 slots, notes; };  // in shared memory
struct Slots : Places, Ring<SLOTS> {
  __device__ __forceinline__ u32 tile() const { return slots + stage * SLOT_BYTES; }
  __device__ __forceinline__ u32 note() const { return notes + stage * 4 * NOTE_INTS; }
};
struct Buffer {
  u32 tile, full, empty, phase;
  int number;  // of the Q_BUFFERS, which take turns
  __device__ __forceinline__ void advance() {
    const bool wraps = number == Q_BUFFERS - 1;
    const int by = wraps ? 1 - Q_BUFFERS : 1;
    number += by;
    tile += by * QUERY_MAPS * Q_BYTES;
    full += 8 * by;
    empty += 8 * by;
    phase ^= wraps;
  }
};

// ---- producer: a warp ----

// The first key of a place in a tile's list, flagged if it is partial. An empty place, which ends a
// list, and one behind the list have a key behind the last one.
__device__ __forceinline__ int key_of(const int* columns, const Tile& tile, int place, int keys) {
  if (GATHERED) {
    const int key = (tile.first & -KEYS) + place * KEYS, whole = tile.first % KEYS;
    return place >= tile.count >> 8 ? keys : CAUSAL && place >= whole ? key | PARTIAL : key;
  }
  if (place >= tile.count * PARTS) return keys;
  const int column = columns[tile.first + place / PARTS];
  return (column & PARTIAL) | ((column & ~PARTIAL) * BLOCK_K + place % PARTS * BOX_KEYS);
}

// Whether the place that a lane has looked up has a key.
__device__ __forceinline__ bool has_key(int key, int lane, const Sizes& sizes) {
  return (__shfl_sync(~0u, key, lane) & ~PARTIAL) < sizes.keys;
}

// Each lane loads one box, of an entry and half of the head; of a short step the first entries.
__device__ __forceinline__ void load_slot(const TensorMap* map, const Slots& ring, int key,
                                          int column, int sequence, bool is_short) {
  const int lane = threadIdx.x % 32, entry = lane / HALVES, half = lane % HALVES;
  if (lane == 0) mbarrier_arrive_expect_tx(ring.full_barrier(), SLOT_BYTES >> is_short);
  if (lane < ENTRIES * HALVES >> is_short)
    tma_load(ring.tile() + (half * KEYS + entry * BOX_KEYS) * ROW_BYTES, map, column + 64 * half,
             key & ~PARTIAL, sequence, ring.full_barrier());
  __syncwarp();
}

__device__ __forceinline__ void load_queries(const Maps& maps, const Buffer& q, int query, int head,
                                             int sequence) {
  const int lane = threadIdx.x % 32, row = lane / HALVES * Q_BOX, half = lane % HALVES;
  if (lane == 0) mbarrier_arrive_expect_tx(q.full, QUERY_MAPS * Q_BYTES);
  if (row < ROWS)
    for (int i = 0; i < QUERY_MAPS; i++)
      tma_load(q.tile + i * Q_BYTES + row / 64 * 64 * HEAD_DIM * 2 +
                   (64 * half + row % 64) * ROW_BYTES,
               &maps.queries[i], (head + row / SPAN) * HEAD_DIM + 64 * half, query + row % SPAN,
               sequence, q.full);
  __syncwarp();
}

#if GATHERED
// The query of an entry, in its head.
__device__ __forceinline__ int query_of(int entry, const Sizes& sizes) {
  return entry / GATHERED % sizes.queries;
}

// Copy a half of the rows of Q of each tile, 16 bytes a lane, and their entries: -1 if absent. The
// first half takes the ticket of the next tile, for both and for the producer.
__device__ __forceinline__ void gather(const Lists& lists, const Sizes& sizes, int tiles, Buffer q,
                                       EntryPlace entries, int half) {
  constexpr int PIECES = HEAD_DIM / 8, AT_ONCE = 32 / PIECES;  // pieces of a row, rows
  const int lane = threadIdx.x % 32, piece = lane % PIECES;
  const long long row_bytes = (long long)sizes.heads * HEAD_DIM * 2;
  int ticket = blockIdx.x;
  while (ticket < tiles) {
    const Tile tile = lists.tiles[ticket];
    const bool takes = half == 0 && lane == 0;
    if (takes) ticket = gridDim.x + atomicAdd(lists.counters, 1);
    const char* const from = lists.q + tile.head / sizes.heads * sizes.queries * row_bytes +
                             tile.head % sizes.heads * HEAD_DIM * 2 + piece * 16;
    int entry[2], query[2];
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      const int row = 64 * half + 32 * i + lane;
      entry[i] = row < (tile.count & 255) ? lists.entries[tile.query + row] : -1;
      query[i] = entry[i] < 0 ? -1 : query_of(entry[i], sizes);
    }
    mbarrier_wait(q.empty, q.phase, "a free buffer for Q");
    if (takes) st_shared(entries.ticket(), ticket);
    const u32 to = q.tile + 64 * half * HEAD_DIM * 2 + piece / 8 * 64 * ROW_BYTES;
    #pragma unroll
    for (int i = 0; i < 2; i++) {
      st_shared(entries.tile + (64 * half + 32 * i + lane) * 4, entry[i]);
      #pragma unroll 4
      for (int j = 0; j < 32; j += AT_ONCE) {
        const int row = j + lane / PIECES, at = __shfl_sync(~0u, query[i], row);
        cp_async_16(to + (32 * i + row) * ROW_BYTES + (piece ^ row) % 8 * 16,
                    from + max(at, 0) * row_bytes, at >= 0);
      }
    }
    cp_async_commit();
    cp_async_wait<0>();
    fence_proxy_async();  // wgmma reads what was copied
    barrier_sync(TICKETS, 64);  // of both halves
    ticket = ld_shared(entries.ticket());
    if (lane == 0) mbarrier_arrive(q.full);
    q.advance();
    entries.advance();
  }
}
#endif

// A tile, or a part of one: equal numbers of steps of its list.
__device__ __forceinline__ Tile tile_of(const Lists& lists, const Parts& parts, int ticket) {
  if (!SPLITS || ticket < parts.whole) return lists.tiles[ticket];
  const int part = (ticket - parts.whole) % parts.count;
  Tile tile = lists.tiles[parts.whole + (ticket - parts.whole) / parts.count];
  const int steps = (tile.count + ENTRIES - 1) / ENTRIES;
  const int begin = steps * part / parts.count * ENTRIES;
  tile.count = min(tile.count, steps * (part + 1) / parts.count * ENTRIES) - begin;
  tile.first += begin;
  return tile;
}

// The V that is loaded next. GATHERED: `part` is whether the rows are COMPLETE.
struct Value { int key, column, query, head, part; bool is_short; };

__device__ __forceinline__ void load_values(const TensorMap* map, Slots& ring, const Value& value,
                                            const Sizes& sizes) {
  ring.producer_acquire();
  if (threadIdx.x % 32 == 0) {
    st_shared(ring.note() + 4, value.query);
    st_shared(ring.note() + 8, value.head);
    if (SPLITS || GATHERED) st_shared(ring.note() + 12, value.part);
  }
  load_slot(map, ring, value.key, value.column, value.head / sizes.heads, value.is_short);
  ring.advance();
}

__device__ __forceinline__ void producer(const Maps& maps, const Lists& lists, const Sizes& sizes,
                                         const Parts& parts, Slots ring, Buffer q, int group,
                                         int tiles, EntryPlace entries) {
  const int lane = threadIdx.x % 32, entry = min(lane / HALVES, ENTRIES - 1);
  const int workers = gridDim.x * GROUPS;
  int ticket = blockIdx.x * GROUPS + group;
  Value value{};
  bool pending = false;
  while (ticket < tiles) {
    Tile tile = tile_of(lists, parts, ticket);
    const int part = GATHERED ? tile.count & COMPLETE : ticket - parts.whole;
    if (GATHERED) {
      tile.count &= ~COMPLETE;
      mbarrier_wait(q.full, q.phase ^ 1, "the ticket of the next tile");
      ticket = ld_shared(entries.ticket());
      tile.query = entries.tile;  // what consumers look up
      q.advance();
      entries.advance();
    } else if (lane == 0) {
      ticket = workers + atomicAdd(lists.counters, 1);
    }
    const int sequence = tile.head / sizes.heads, head = tile.head % sizes.heads;
    const int column = head / (sizes.heads / sizes.kv_heads) * HEAD_DIM;
    int key = key_of(lists.columns, tile, entry, sizes.keys);
    bool last = false;
    for (int step = 0; !last; step++) {  // an empty tile has a step, too
      const int next = key_of(lists.columns, tile, (step + 1) * ENTRIES + entry, sizes.keys);
      const bool is_short = SHORTENS && step && !has_key(key, HALVES, sizes);  // of entry 1
      ring.producer_acquire();
      last = __any_sync(~0u, (key & ~PARTIAL) >= sizes.keys) || !has_key(next, 0, sizes);
      const bool masked = __any_sync(~0u, (key < 0 || key + BOX_KEYS > sizes.keys) &&
                                              entry < ENTRIES >> is_short);
      if (lane == 0) {
        st_shared(ring.note(), (step ? 0 : FIRST) | (SHARED_Q && last ? LAST : 0) |
                                   (masked ? MASKED : 0) | (is_short ? SHORT : 0));
        st_shared(ring.note() + 4, tile.query);
        st_shared(ring.note() + 8, tile.head);
      }
      if (lane % HALVES == 0 && lane < ENTRIES * HALVES) {
        st_shared(ring.note() + 16 + 4 * entry, key);
        if (BITS && key < 0)
          st_shared(ring.note() + 16 + 4 * (ENTRIES + entry),
                    lists.slots[tile.first + (step * ENTRIES + entry) / PARTS]);
      }
      __syncwarp();
      load_slot(&maps.k, ring, key, column, sequence, is_short);
      ring.advance();
      if (step == 0 && !GATHERED) {
        mbarrier_wait(q.empty, q.phase, "a free buffer for Q");
        load_queries(maps, q, tile.query, head, sequence);
        q.advance();
      }
      if (LAGGING && pending) load_values(&maps.v, ring, value, sizes);
      pending = true;
      value = Value{key, column, tile.query, tile.head, part, is_short};
      if (!LAGGING) load_values(&maps.v, ring, value, sizes);
      key = next;
    }
    ticket = __shfl_sync(~0u, ticket, 0);
  }
  ring.producer_acquire();
  if (lane == 0) {
    st_shared(ring.note(), END);
    mbarrier_arrive(ring.full_barrier());
  }
  __syncwarp();
  ring.advance();
  if (LAGGING && pending) load_values(&maps.v, ring, value, sizes);
  if (lane == 0 && atomicAdd(lists.counters + 1, 1) == workers - 1) {
    lists.counters[0] = lists.counters[1] = 0;
    if (GATHERED) lists.counters[2] = 0;
  }
}

// ---- consumers: a warpgroup each; `row` is this lane's first row in the tile ----
// Lane 4 g + t of warp w has rows 16 w + g and 8 more of its warpgroup's 64. Its sum
// d[4 i + 2 r + j] belongs to row r of the two and to column 8 i + 2 t + j.

__device__ __forceinline__ void queries_to_registers(u32 (&q)[HEAD_DIM / 4], u32 tile) {
  const int lane = threadIdx.x % 32, row = threadIdx.x / 32 % 4 * 16 + lane % 16;
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    const int piece = (2 * i % 8 + lane / 16) ^ (row % 8);
    const u32 address = tile + (i / 4 * 64 + row) * ROW_BYTES + piece * 16;
    ldmatrix_x4(*(u32(*)[4])(q + 4 * i), address);
  }
}

// d = Q K.T, or dO V.T: the caller ends the group. N keys; N = 64 leaves the rest of d as it is.
template <int N = KEYS>
__device__ __forceinline__ void multiply_keys(float (&d)[KEYS / 2], const u32 (&q)[HEAD_DIM / 4],
                                              u32 tile) {
  const u64 k = smem_descriptor(tile);
  wgmma_fence();
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 16; i++) {
    const u64 k_at = k + ((i / 4 * KEYS * ROW_BYTES + i % 4 * 32) >> 4);
    Wgmma<N>::multiply(d, q + 4 * i, k_at, i > 0);
  }
}

using Word = Unsigned<(BOX_KEYS < 32 ? BOX_KEYS : 32)>;
constexpr int WORD = sizeof(Word);  // bytes of bits that are read at once

template <int N = KEYS>
__device__ __forceinline__ void mask(float (&s)[KEYS / 2], u32 note, int row, const Lists& lists,
                                     const Sizes& sizes) {
  const int t = threadIdx.x % 4, first = ld_shared(note + 4);
  #pragma unroll
  for (int e = 0; e < ENTRIES * N / KEYS; e++) {
    const int note_key = ld_shared(note + 16 + 4 * e), key = note_key & ~PARTIAL;
    #pragma unroll
    for (int r = 0; r < 2; r++) {
#if GATHERED
      const int query = query_of(ld_shared(first + 4 * (row + 8 * r)), sizes);
#else
      const int query = first + row % SPAN + 8 * r;
#endif
      int end = sizes.keys - key - 2 * t;  // of the allowed ones, after this lane's first key
      if (CAUSAL && note_key < 0)
        end = min(end, query + sizes.keys - sizes.queries + 1 - key - 2 * t);
      #pragma unroll
      for (int i = 0; i < BOX_KEYS / 8; i++)
        #pragma unroll
        for (int j = 0; j < 2; j++)
          if (8 * i + j >= end) s[4 * (e * BOX_KEYS / 8 + i) + 2 * r + j] = -INF;
      if (BITS && note_key < 0) {
        constexpr int LINE = (BLOCK_K + 7) / 8;  // bytes
        const int row = ld_shared(note + 16 + 4 * (ENTRIES + e)) * BLOCK_Q +
                        query % BLOCK_Q;
        const unsigned char* line = lists.bits + (long long)row * LINE + key % BLOCK_K / 8;
        #pragma unroll
        for (int i = 0; i < BOX_KEYS / 8; i += WORD) {
          const u32 bits = *(const Word*)(line + i) >> 2 * t;
          #pragma unroll
          for (int j = 0; j < 2 * WORD; j++)
            if (!(bits >> (j / 2 * 8 + j % 2) & 1))
              s[4 * (e * BOX_KEYS / 8 + i + j / 2) + 2 * r + j % 2] = -INF;
        }
      }
    }
  }
}

// Two warpgroups that share K and V issue their products in turn.
__device__ __forceinline__ void take_turn(int consumer) {
  if (CONSUMERS == 2) barrier_sync(1 + consumer, 256);
}
__device__ __forceinline__ void give_turn(int consumer) {
  if (CONSUMERS == 2) barrier_arrive(2 - consumer, 256);
}

// ---- all warps: producers run, consumers call `consume` ----

template <class Consume>
__device__ __forceinline__ void walk(const Maps& maps, const Lists& lists, const Sizes& sizes,
                                     Consume consume, const Parts& parts = {}) {
  extern __shared__ char shared[];
  __shared__ int notes[GROUPS][SLOTS][NOTE_INTS];
  __shared__ int entries[TURNS][ENTRY_INTS];
  __shared__ u64 full[GROUPS][SLOTS], empty[GROUPS][SLOTS], q_full[Q_COUNT], q_empty[Q_COUNT];
  const u32 base = (smem_address(shared) + 1023) & ~1023u;  // alignment for the swizzle
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
  const int warp = __shfl_sync(~0u, threadIdx.x / 32 % 4, 0);
  if (threadIdx.x == 0) {
    for (int g = 0; g < GROUPS; g++) {
      Slots{{}, {smem_address(full[g]), smem_address(empty[g])}}.init_barriers(1, CONSUMERS);
    }
    for (int i = 0; i < Q_COUNT; i++) {
      mbarrier_init(smem_address(&q_full[i]), GATHERED ? 2 : 1);
      mbarrier_init(smem_address(&q_empty[i]), CONSUMERS);
    }
    fence_mbarrier_init();
  }
  const int tiles = GATHERED ? lists.counters[2] : lists.tile_count;
  __syncthreads();
  const int group = warpgroup < WARPGROUPS ? warpgroup / CONSUMERS : min(warp, GROUPS - 1);
  const int buffer = group * Q_BUFFERS;
  const u32 slots = base + Q_COUNT * QUERY_MAPS * Q_BYTES + group * SLOTS * SLOT_BYTES;
  Slots ring{{slots, smem_address(notes[group])},
             {smem_address(full[group]), smem_address(empty[group])}};
  Buffer q{base + buffer * QUERY_MAPS * Q_BYTES, smem_address(&q_full[buffer]),
           smem_address(&q_empty[buffer]), 0, 0};
  if (warpgroup == WARPGROUPS) {
    setmaxnreg_dec<PRODUCER_REGISTERS>();
    ring.phase = q.phase = 1;  // at first, everything is free
    const EntryPlace first{smem_address(entries), 0};
    if (warp < GROUPS) producer(maps, lists, sizes, parts, ring, q, group, tiles, first);
#if GATHERED
    else if (warp < 3) gather(lists, sizes, tiles, q, first, warp - 1);
#endif
  } else {
    setmaxnreg_inc<CONSUMER_REGISTERS>();
    consume(ring, q, warpgroup % CONSUMERS);
  }
}
