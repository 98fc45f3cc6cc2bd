// Y[m, n] = X[m, k] @ W[n, k].T, W in blocks, on Hopper's tensor cores (wgmma), fed by its copy
// engine (TMA). With TRANSPOSED, dX[m, k] = dY[m, n] @ W[n, k] over the same stored blocks.
// Compute capability 9.0 alone.
//
//   an item: 128 features x TOKENS tokens of Y        a step: 64 of k
//
//      W, two slices of 64 rows          X.T                        Y.T
//        k0   k1   k2                  +---------+                +---------+
//      +----+----+                     | k0      |      half 0 -> | 64      |
//      | w0 | w0 |                     | TOKENS  |                | TOKENS  |
//      +----+----+----+           x    +---------+       =        +---------+
//           | w1 | w1 |                | k1      |      half 1 -> | 64      |
//           +----+----+                +---------+                | TOKENS  |
//                                      | k2      |                +---------+
//      steps: k0 (half 0 alone),       +---------+
//      k1 (both), k2 (half 1)
//
// The two slices are the halves of a block 128 high, or two block rows 64 high. They share the X
// tile of each step, and a half without a block there skips the step: a NaN in a column that a row
// does not touch stays out of that row. W is the left operand, since 64 of its rows are what one
// instruction takes; so the sum is features x tokens, and is transposed on its way out.
//
// The pipeline: 12 warps, one CTA an SM for the whole launch.
//
//    warp 8    X tile, note ---+     +--------+--------+-- --+     +--> warpgroup 0, warps 0 to 3
//                              +---> | slot 0 | slot 1 | ... | ----+    rows of half 0
//    warp 9    W tiles --------+     +--------+--------+-- --+     +--> warpgroup 1, warps 4 to 7
//                 ^                                                |    rows of half 1
//                 |               full: the bytes have landed -----+         |
//                 +-------------- empty: both warpgroups are done with it <--+
//
//   A slot holds an X tile, two W tiles, and a note: which halves multiply, whether this is the
//   item's last step, where its sums go. A warpgroup keeps the products of one step in flight and
//   frees a slot when those of the next are issued. After the last step it stores its half, 64
//   tokens at a time: stmatrix.trans turns 8 x 8 pieces of the sum into rows of tokens in shared
//   memory, and TMA writes them out. Two buffers take turns, and the producers run ahead meanwhile.
//
// Tiles have rows of 128 bytes (64 elements), and TMA puts 16-byte piece p of row r at piece
// p ^ (r % 8), which wgmma undoes (the 128-byte swizzle): no bank conflicts. What a tile has
// outside of its matrix is read as zero and not written. The next 16 of k are 32 bytes on in a row.
// With TRANSPOSED, the tile [64 of n x 64 of k] is read by columns (imm-trans-a), and the next 16
// of n are 16 rows, 2048 bytes, on; eight rows are 1024 bytes (SBO) either way, LBO is not used.
//
// Counts of a step, TOKENS = 256: 2 x 64 x 256 x 64 multiply-adds = 4.2 MFLOP, 700 ns of an SM at
// the 790 TFLOP/s that cuBLAS reaches on an H200; 48 KB of loads (X 32, W 16), 740 ns of an SM at
// the 8.8 TB/s that TMA brings from L2 to shared memory, all SMs together, boxes and bulk copies
// alike. So loads are the limit, tokens are many (half of them: 32 KB for half the work), and with
// CLUSTER = 2 each CTA loads half of each W tile and sends it to both: 40 KB. Measured, n = k = m =
// 4096, bf16, blocks of 128, half of them stored: 102 us (cuBLAS, dense: 168). A version without
// the loads takes 84.7, without the products 93.8, without either 39.
//
// What it took:
//  - The branch around the products depends on a value from memory. It goes through __shfl_sync,
//    so that ptxas knows that a warp agrees; else it waits for each product on the spot (warning
//    C7518, serialised wgmma).
//  - One producer warp that handed entries round by shuffles took 380 clocks a step, a TMA itself
//    170. Two warps, each lane issuing the steps that it read, take half.
//  - The arrival on the other CTA's barrier has the plain form; mbarrier.arrive.release.cluster
//    cost 45 %.
//  - Items are assigned by their lengths (_wgmma_schedule.py): a fixed order, in which CTA 0 always had
//    the longest, cost 12 %.
//
// Compiled with -DTOKENS=256|128|64 -DCLUSTER=1|2 -DTRANSPOSED=0|1, the constants of the lists
// (bsr_wgmma.constants_of) and what hopper.cuh asks for. Source: PTX ISA 9.0, wgmma, mbarrier,
// cp.async.bulk.tensor.

#include "hopper.cuh"

constexpr int ROW_BYTES = 128;
constexpr int X_BYTES = TOKENS * ROW_BYTES, W_BYTES = SIDE * ROW_BYTES;
constexpr int SLOT_BYTES = X_BYTES + 2 * W_BYTES, SLOTS = RING_BYTES / SLOT_BYTES;  // 4, 6, 8
constexpr int CHUNKS = TOKENS / SIDE, CHUNK_BYTES = SIDE * ROW_BYTES, BUFFERS = CHUNKS > 1 ? 2 : 1;
constexpr unsigned short ALL = (1 << CLUSTER) - 1;  // CTAs
enum { HALF_0 = 1, HALF_1 = 2, LAST = 4, END = 8 };  // of a note

struct Maps { TensorMap x, w, y; };

// What the host lays out: Groups.steps (_wgmma_pairs.py), Schedule.items (_wgmma_schedule.py). Two numbers of
// 16 bits, one for each half, share an int: columns of a step's W tiles, an item's slices of Y.
struct alignas(16) Step { int x, w0, w1, columns; };
struct alignas(16) Item { int first, count, token, slices; };
// An argument: read from memory, one after the other, they came 1.3 us later to the first copy.
struct First { Item items[WORKERS]; int starts[WORKERS]; };
struct alignas(16) Note { int what, token, slices, unused; };
__device__ __forceinline__ int of_half(int pair, int half) { return pair >> 16 * half & 0xffff; }

__device__ __forceinline__ void write(u32 to, Note note) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};"
               :: "r"(to), "r"(note.what), "r"(note.token), "r"(note.slices), "r"(note.unused)
               : "memory");
}
__device__ __forceinline__ Note read(u32 from) {
  Note note;
  asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(note.what), "=r"(note.token), "=r"(note.slices), "=r"(note.unused)
               : "r"(from) : "memory");
  return note;
}

__device__ __forceinline__ void multiply(float (&d)[TOKENS / 2], u32 w, u32 x) {
  constexpr int A_STEP = (TRANSPOSED ? 16 * ROW_BYTES : 32) >> 4, B_STEP = 32 >> 4;
  const u64 a = descriptor(w), b = descriptor(x);
  begin_products();
  #pragma unroll
  for (int i = 0; i < SIDE / 16; i++) WGMMA(TOKENS, a + i * A_STEP, b + i * B_STEP, TRANSPOSED, 0);
  end_of_products();
}

// ---- the ring of slots, and where in it a thread is ----

struct Ring {
  u32 tiles, notes, full, empty;  // shared memory
  int slot;
  u32 parity;
  __device__ __forceinline__ u32 x() const { return tiles + slot * SLOT_BYTES; }
  __device__ __forceinline__ u32 w(int half) const { return x() + X_BYTES + half * W_BYTES; }
  __device__ __forceinline__ u32 note() const { return notes + 16 * slot; }
  __device__ __forceinline__ u32 filled() const { return full + 8 * slot; }
  __device__ __forceinline__ u32 freed() const { return empty + 8 * slot; }
  __device__ __forceinline__ void wait_filled() const { wait(filled(), parity, "a full slot"); }
  __device__ __forceinline__ void wait_freed() const { wait(freed(), parity, "a free slot"); }
  __device__ __forceinline__ void advance() {
    if (++slot == SLOTS) { slot = 0; parity ^= 1; }
  }
};

// A warpgroup's word that it is done with a slot, to every CTA that sends tiles into it.
__device__ __forceinline__ void release(const Ring& ring, int slot) {
  const int thread = threadIdx.x % 128;
  if (CLUSTER == 1 && thread == 0) arrive(ring.empty + 8 * slot);
  if (CLUSTER > 1 && thread < CLUSTER) arrive_in(ring.empty + 8 * slot, thread);
}

// ---- producers ----

__device__ __forceinline__ void bring_x(const Maps& maps, const Ring& ring, Step step, int token,
                                        int slices, bool last) {
  const int what = (step.w0 >= 0 ? HALF_0 : 0) | (step.w1 >= 0 ? HALF_1 : 0) | (last ? LAST : 0);
  write(ring.note(), Note{what, token, slices, 0});
  arrive_expecting(ring.filled(), step.x >= 0 ? X_BYTES : 0);  // an empty row's step has no tiles
  if (step.x >= 0) load(ring.x(), &maps.x, step.x, token, ring.filled());
}

__device__ __forceinline__ void bring_w(const Maps& maps, const Ring& ring, Step step, int rank) {
  const int first = rank * (SIDE / CLUSTER);  // of the rows that this CTA loads
  arrive_expecting(ring.filled(), (step.w0 >= 0 ? W_BYTES : 0) + (step.w1 >= 0 ? W_BYTES : 0));
  #pragma unroll
  for (int half = 0; half < 2; half++) {
    const int row = half ? step.w1 : step.w0, column = of_half(step.columns, half);
    const u32 to = ring.w(half) + first * ROW_BYTES;
    if (row < 0) continue;
    if (CLUSTER == 1) load(to, &maps.w, column, row, ring.filled());
    else load_for(ALL, to, &maps.w, column, row + first, ring.filled());
  }
}

// Lane j of either warp issues steps j, j + 32, ... of an item; the next steps and items are read
// while those are under way.
__device__ __forceinline__ void produce(const Maps& maps, const First& first, const Step* steps,
                                        const Item* items, Ring ring, bool brings_x) {
  const int lane = threadIdx.x % 32, worker = blockIdx.x / CLUSTER, rank = blockIdx.x % CLUSTER;
  int at = first.starts[worker];
  const int end = first.starts[worker + 1];
  Item item = first.items[worker], next = items[at + 1];
  Step mine = steps[item.first + lane];
  for (; at < end; at++) {
    const Item after = items[at + 2];
    const int token = item.token + rank * TOKENS;
    for (int base = 0; base < item.count; base += 32) {
      const int later = base + 32 < item.count ? item.first + base + 32 : next.first;
      const int count = min(32, item.count - base);
      const Step ahead = steps[later + lane];
      for (int i = 0; i < count; i++) {
        if (lane == i) {
          ring.wait_freed();
          if (brings_x) bring_x(maps, ring, mine, token, item.slices, base + i + 1 == item.count);
          else bring_w(maps, ring, mine, rank);
        }
        __syncwarp();
        ring.advance();
      }
      mine = ahead;
    }
    item = next;
    next = after;
  }
  if (lane == 0) {
    ring.wait_freed();
    if (brings_x) write(ring.note(), Note{LAST | END, 0, 0, 0});
    arrive_expecting(ring.filled(), 0);
  }
  __syncwarp();
}

// ---- consumers ----

// Add up the products of one half of an item; returns the note of its last step.
__device__ __forceinline__ Note add_up(float (&d)[TOKENS / 2], Ring& ring, int half) {
  #pragma unroll
  for (int i = 0; i < TOKENS / 2; i++) d[i] = 0.f;
  int held = -1;  // the slot that products in flight read
  for (;;) {
    ring.wait_filled();
    const Note note = read(ring.note());
    const int what = __shfl_sync(~0u, note.what, 0);
    if (what >> half & 1) {
      multiply(d, ring.w(half), ring.x());
      products_left<1>();
      if (held >= 0) release(ring, held);
      held = ring.slot;
    } else {
      products_left<0>();
      if (held >= 0) release(ring, held);
      held = -1;
      // Products bring the four warps into step. Without them one may not have read the note yet.
      warpgroup_in_step(half + 1);
      release(ring, ring.slot);
    }
    ring.advance();
    if (what & LAST) {
      products_left<0>();
      if (held >= 0) release(ring, held);
      return Note{what, note.token, note.slices, 0};
    }
  }
}

__device__ __forceinline__ void put_out(const float (&d)[TOKENS / 2], const TensorMap* y, u32 out,
                                        Note note, int half) {
  const bool leader = threadIdx.x % 128 == 0;
  const int slice = of_half(note.slices, half);
  const u32 at = place_of_lane(out);
  #pragma unroll
  for (int c = 0; c < CHUNKS; c++) {
    const int buffer = c % BUFFERS * CHUNK_BYTES;
    if (leader) stores_have_read<BUFFERS - 1>();
    warpgroup_in_step(half + 1);
    #pragma unroll
    for (int i = 0; i < SIDE / 16; i++)
      put_transposed(at + buffer + i * 16 * ROW_BYTES, d + 8 * (c * (SIDE / 16) + i));
    show_to_copies();
    warpgroup_in_step(half + 1);
    if (leader) {
      if (slice != NO_SLICE) store(y, out + buffer, slice * SIDE, note.token + c * SIDE);
      end_of_stores();
    }
  }
}

// ---- the kernel: 132 / CLUSTER workers, each with its own list of items ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
multiply_blocks(const __grid_constant__ Maps maps, const __grid_constant__ First first,
                const Step* steps, const Item* items) {
  extern __shared__ char shared[];
  __shared__ Note notes[SLOTS];
  __shared__ u64 full[SLOTS], empty[SLOTS];
  const u32 tiles = (address_of(shared) + 1023) & ~1023u;  // where a swizzled tile may start
  Ring ring{tiles, address_of(notes), address_of(full), address_of(empty), 0, 0};
  if (threadIdx.x == 0) {
    for (int i = 0; i < SLOTS; i++) {
      init(ring.full + 8 * i, 2);             // the producer warps, each with bytes to expect
      init(ring.empty + 8 * i, 2 * CLUSTER);  // two warpgroups in each CTA
    }
    asm volatile("fence.mbarrier_init.release.cluster;");
  }
  if (CLUSTER > 1) cluster_in_step();
  else __syncthreads();
  const int group = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  if (group == 2) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 56;");
    ring.parity = 1;  // slots are free before the first round
    if (warp < 2) produce(maps, first, steps, items, ring, warp == 0);
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 224;");
    const u32 out = tiles + SLOTS * SLOT_BYTES + group * BUFFERS * CHUNK_BYTES;
    float d[TOKENS / 2];
    for (;;) {
      const Note note = add_up(d, ring, group);
      if (note.what & END) break;
      put_out(d, &maps.y, out, note, group);
    }
    if (threadIdx.x % 128 == 0) stores_are_done();
  }
  if (CLUSTER > 1) cluster_in_step();  // the other CTA may still send words to this one's barriers
}
