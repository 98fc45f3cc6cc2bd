// Y[m, n] = X[m, k] @ W[n, k].T, W in blocks of 16 or 32, on Hopper's tensor cores (wgmma), fed by
// its copy engine (TMA). With TRANSPOSED, dX[m, k] = dY[m, n] @ W[n, k] over the same blocks.
//
//   an item: TOKENS tokens x FEATURES of Y        a step: up to four strips, 32 of k each
//
//        X, strips                 W, what these rows have there         sums, in registers
//      +--------+--------+ ..    row 0      [ ]                          row 0  row 1  ...
//      | 64     |        |       row 1    [ ]  [ ]                      +------+------+ ..
//      | tokens |        |   x     ...                        +=        | 64 x |      |
//      +--------+--------+ ..    last row      [ ]                      | BLOCK|      |
//      | 64     |        |       place    0  1  2  3 ..                 +------+------+ ..
//      +--------+--------+ ..                                           | 64 x |      |
//                                                                       +------+------+ ..
//
// Nothing is padded: a block is one product (two, of 32) for every 64 tokens. Tokens are the tall
// side, since wgmma takes 64 rows and any multiple of 8 columns. X is what limits it: with blocks
// as small as this nearly every strip is touched by one row or another, so that as many rows as the
// registers hold (256 features) share it. The rows are divided among the warpgroups, each of which
// multiplies all tokens: a step's list is then read once for several products.
//
// The pipeline: WARPGROUPS consumers, one more warpgroup of producers; one CTA an SM.
//
//    warp 0    strips 0, 1 --+
//    warp 1    strips 2, 3 --+     +--------+--------+-- --+     +--> warpgroup 0: rows 0, 1, ...
//    warp 2    W chunk ------+---> | slot 0 | slot 1 | ... | ----+
//    warp 3    note ---------+     +--------+--------+-- --+     +--> warpgroup 1: the next rows
//
//   A slot holds the strips, the chunk and a note: for each row how many blocks (4 bits), and for
//   each block which place (3 bits), in the order of the chunk. The host packs W so that a chunk is
//   one piece of memory: blocks in this order, swizzled as TMA would (hopper.cuh). A warpgroup keeps
//   the products of one step in flight; its warps free a slot when those of the next are issued.
//   After an item's last step it stores the sums straight from registers: four lanes exchange
//   theirs, and write 64 bytes of a token (a unit of 32 features) together.
//
// A strip is 32 wide, a row of it 64 bytes: TMA takes 0.95 ns a row on one SM, whether it has 32 or
// 64 bytes, and 64 are 8.8 TB/s over all SMs, what L2 gives. Loads and stores together are within
// a tenth of the whole from 80 % of blocks of 32 and 90 % of blocks of 16 on (NOTES.md).
//
// Compiled with -DBLOCK=16|32 -DTOKENS=64|128 -DFEATURES=256|128|64|32 -DWARPGROUPS=1|2|4
// -DROOM=24|12|5 -DTRANSPOSED=0|1, the constants of the lists (bsr_small.constants_of) and what
// hopper.cuh asks for.

#include "hopper.cuh"

constexpr int ROWS = FEATURES / BLOCK / WARPGROUPS;  // of a warpgroup
constexpr int UNITS = FEATURES / 32 / WARPGROUPS, TILES = TOKENS / 64;
constexpr int STRIP_BYTES = TOKENS * 64, BLOCK_BYTES = BLOCK * BLOCK * 2;
constexpr int MOST_BYTES = STRIPS * 32 * FEATURES * 2;
constexpr int W_BYTES = MOST_BYTES < ROOM * 1024 ? MOST_BYTES : ROOM * 1024;
constexpr int SLOT_BYTES = STRIPS * STRIP_BYTES + W_BYTES;
constexpr int SLOTS = RING_BYTES / SLOT_BYTES < 8 ? RING_BYTES / SLOT_BYTES : 8;

// What the host lays out (_small_steps.py). A share is one warpgroup's: how many blocks each row has, 4
// bits each; its first block in the chunk, and the flags; each block's place, 3 bits each.
struct alignas(16) Share { u32 counts; int what; u64 places; };
struct alignas(16) Step {
  int blocks, token, group, first;  // the chunk in the packed W
  u64 strips, unused;               // 16 bits each
  Share shares[WARPGROUPS];
};
struct Starts { int at[WORKERS]; };  // of each worker's steps

__device__ __forceinline__ void write(u32 to, const void* sixteen_bytes) {
  const uint4 v = *(const uint4*)sixteen_bytes;
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}
// What products depend on is the same in a warp, and ptxas is to know: else it waits for each.
__device__ __forceinline__ uint4 read(u32 from) {
  uint4 v;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(from) : "memory");
  return uint4{__shfl_sync(~0u, v.x, 0), __shfl_sync(~0u, v.y, 0), __shfl_sync(~0u, v.z, 0),
               __shfl_sync(~0u, v.w, 0)};
}

// Left to itself ptxas computes an address anew at every step, and waits for the CTA's number.
__device__ __forceinline__ u32 pinned(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

struct Ring {
  u32 tiles, notes, full, empty;  // shared memory
  int slot;
  u32 parity;
  __device__ __forceinline__ u32 x() const { return tiles + slot * SLOT_BYTES; }
  __device__ __forceinline__ u32 w() const { return x() + STRIPS * STRIP_BYTES; }
  __device__ __forceinline__ u32 note() const { return notes + (1 + WARPGROUPS) * 16 * slot; }
  __device__ __forceinline__ u32 share(int i) const { return note() + 16 * (1 + i); }
  __device__ __forceinline__ u32 filled() const { return full + 8 * slot; }
  __device__ __forceinline__ u32 freed() const { return empty + 8 * slot; }
  __device__ __forceinline__ void wait_filled() const { wait(filled(), parity, "a full slot"); }
  __device__ __forceinline__ void wait_freed() const { wait(freed(), parity, "a free slot"); }
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) { slot = 0; parity ^= 1; }
  }
};

// ---- producers ----

__device__ __forceinline__ void bring_note(const Ring& ring, const Step& step) {
  write(ring.note(), &step);
  #pragma unroll
  for (int i = 0; i < WARPGROUPS; i++) write(ring.share(i), &step.shares[i]);
  arrive(ring.filled());
}

__device__ __forceinline__ void bring_w(const char* w, const Ring& ring, const Step& step) {
  const int bytes = step.blocks * BLOCK_BYTES;
  arrive_expecting(ring.filled(), bytes);
  if (bytes) bring(ring.w(), w + (u64)step.first * BLOCK_BYTES, bytes, ring.filled());
}

__device__ __forceinline__ void bring_x(const TensorMap& x, const Ring& ring, const Step& step,
                                        int first) {
  const u32 both = step.strips >> 16 * first;
  const int one = both & 0xffff, other = both >> 16;
  const u32 to = ring.x() + first * STRIP_BYTES, bar = ring.filled();
  arrive_expecting(bar, STRIP_BYTES * ((one != NO_STRIP) + (other != NO_STRIP)));
  if (one != NO_STRIP) load(to, &x, one * 32, step.token, bar);
  if (other != NO_STRIP) load(to + STRIP_BYTES, &x, other * 32, step.token, bar);
}

// Lane j of each warp issues steps j, j + 32, ...; the next 32 are read while those are under way.
__device__ __forceinline__ void produce(const TensorMap& x, const char* w, const Step* steps,
                                        int at, int end, Ring ring, int warp) {
  const int lane = threadIdx.x % 32;
  Step mine = steps[at + lane];
  for (; at < end; at += 32) {
    const Step ahead = steps[at + 32 + lane];
    const int count = min(32, end - at);
    for (int i = 0; i < count; i++) {
      if (lane == i) {
        ring.wait_freed();
        if (warp < 2) bring_x(x, ring, mine, 2 * warp);
        else if (warp == 2) bring_w(w, ring, mine);
        else bring_note(ring, mine);
      }
      __syncwarp();
      ring.advance();
    }
    mine = ahead;
  }
}

// ---- consumers ----

using Sums = float[ROWS][TILES][BLOCK / 2];

__device__ __forceinline__ void multiply_16(float (&d)[BLOCK / 2], u64 x, u64 w) {
  WGMMA(BLOCK, x, w, 0, TRANSPOSED);
}
__device__ __forceinline__ void multiply(float (&sums)[TILES][BLOCK / 2], u64 x, u64 w) {
  constexpr int W_STEP = (TRANSPOSED ? 16 * BLOCK * 2 : 32) >> 4;
  #pragma unroll
  for (int i = 0; i < BLOCK / 16; i++)
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      multiply_16(sums[t], x + t * (64 * 64 >> 4) + i * (32 >> 4), w + i * W_STEP);
}

// Where in the strips a place is, in 16 bytes: 16 of k are 32 bytes of a row.
__device__ __forceinline__ u32 offset_of(u32 place) {
  constexpr int STRIP = STRIP_BYTES >> 4;
  return BLOCK == 32 ? place * STRIP : (place >> 1) * STRIP + (place & 1) * (32 >> 4);
}

__device__ __forceinline__ void multiply_step(Sums& sums, u32 x_tile, u32 w_tile, uint4 share) {
  const u64 x = descriptor(x_tile, 64);
  u64 w = descriptor(w_tile + (share.y & 0xff) * BLOCK_BYTES, BLOCK * 2);
  u64 places = share.z | (u64)share.w << 32;
  begin_products();
  #pragma unroll
  for (int j = 0; j < ROWS; j++) {
    #pragma unroll 1
    for (u32 count = share.x >> 4 * j & 15; count; count--) {
      multiply(sums[j], x + offset_of(places & 7), w);
      places >>= 3;
      w += BLOCK_BYTES >> 4;
    }
  }
  end_of_products();
}

// What an item is stored by: lane j has the number of its unit j of 32 features, -1 for none.
struct Item { int token, unit_of_lane; bool last; };

// A warp has 16 tokens of each 64. Of eight features of eight tokens a lane holds two neighbours;
// after the exchange, eight of one token.
__device__ __forceinline__ void put_out(const Sums& sums, char* y, int m, int width,
                                        const Item& item) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
  #pragma unroll
  for (int u = 0; u < UNITS; u++) {
    const int unit = __shfl_sync(~0u, item.unit_of_lane, u), feature = unit * 32 + lane % 4 * 8;
    #pragma unroll
    for (int t = 0; t < TILES; t++)
      #pragma unroll
      for (int below = 0; below < 2; below++) {  // by eight tokens
        u32 words[4];
        #pragma unroll
        for (int p = 0; p < 4; p++) {  // eight features each
          const float* s = BLOCK == 32 ? sums[u][t] + 4 * p : sums[2 * u + p / 2][t] + 4 * (p % 2);
          words[p] = pair_of(s[2 * below], s[2 * below + 1]);
        }
        exchange(words);
        const int token = item.token + 64 * t + 16 * warp + 8 * below + lane / 4;
        if (unit >= 0 && feature < width && token < m)
          *(uint4*)(y + 2 * ((u64)token * width + feature)) =
              uint4{words[0], words[1], words[2], words[3]};
      }
  }
}

__device__ __forceinline__ void release(const Ring& ring, int slot) {  // a warp's word for it
  if (threadIdx.x % 32 == 0) arrive(ring.empty + 8 * slot);
}

// Add up the products of an item, and say which it was.
__device__ __forceinline__ Item add_up(Sums& sums, Ring& ring, int warpgroup, const int* units) {
  const int lane = threadIdx.x % 32;
  #pragma unroll
  for (int i = 0; i < ROWS * TILES * BLOCK / 2; i++) (&sums[0][0][0])[i] = 0.f;
  ring.wait_filled();
  const uint4 note = read(ring.note());
  Item item{(int)note.y, 0, false};
  if (lane < UNITS) item.unit_of_lane = units[(note.z * WARPGROUPS + warpgroup) * UNITS + lane];
  int held = -1;  // the slot that products in flight read
  for (;;) {
    ring.wait_filled();
    const uint4 share = read(ring.share(warpgroup));
    multiply_step(sums, ring.x(), ring.w(), share);
    products_left<1>();
    if (held >= 0) release(ring, held);
    held = ring.slot;
    ring.advance();
    if (share.y & LAST) {
      products_left<0>();
      release(ring, held);
      item.last = share.y & END;
      return item;
    }
  }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
multiply_blocks(const __grid_constant__ TensorMap x, const __grid_constant__ Starts starts,
                const char* w, const Step* steps, const int* units, char* y, int m, int width) {
  extern __shared__ char shared[];
  __shared__ uint4 notes[SLOTS * (1 + WARPGROUPS)];
  __shared__ u64 full[SLOTS], empty[SLOTS];
  const u32 tiles = (address_of(shared) + 1023) & ~1023u;  // where a swizzled tile may start
  Ring ring{pinned(tiles), pinned(address_of(notes)), pinned(address_of(full)),
            pinned(address_of(empty)), 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      init(ring.full + 8 * i, 4);                // the producer warps
      init(ring.empty + 8 * i, 4 * WARPGROUPS);  // every consumer warp
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  __syncthreads();
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  if (warpgroup == WARPGROUPS) {
    ring.parity = 1;  // slots are free before the first round
    const int at = starts.at[blockIdx.x], end = starts.at[blockIdx.x + 1];
    produce(x, w, steps, at, end, ring, warp);
  } else {
    Sums sums;
    for (;;) {
      const Item item = add_up(sums, ring, warpgroup, units);
      put_out(sums, y, m, width, item);
      if (item.last) break;
    }
  }
}
