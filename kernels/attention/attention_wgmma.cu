// O = softmax(scale Q K.T) V over the blocks of a mask, by wgmma and TMA (Hopper).
//
//   tile: 64 queries for each consumer warpgroup           step: KEYS keys, of one or more blocks
//
//                 K.T: KEYS of the list                    V
//               +----+----+----+----+                 +---------+
//               | 3  | 7  | 8  | 20 |                 |    3    |
//     Q         +----+----+----+----+         P       |    7    |            O
//   +-----+     +----+----+----+----+    +---------+  |    8    |         +-----+
//   | 64  |  x  |     scores S      | -> |   e^S   |x |   20    |    =    | 64  |
//   | 64  |     |                   |    |         |  +---------+         | 64  |
//   +-----+     +-------------------+    +---------+                      +-----+
//   rows are SPAN queries of each of several heads       P stays in registers
//
// Blocks smaller than a step are laid side by side, each by a TMA box of its own. What is missing
// in the last step of a tile is read behind the last key, where TMA writes zeros, and masked. If
// the second of two blocks of 64 is missing, SHORTENS makes the step short instead: it loads and
// multiplies 64 keys.
//
// The pipeline: one CTA per SM for the whole launch. GROUPS tiles are in work at the same time,
// each with CONSUMERS warpgroups, a producer warp and a ring.
//
//    producer warp   tile from the counter -> Q, and K 0, K 1, V 0, K 2, V 1, ... into the ring
//    consumer        S 0 | S 1, O += P 0 V 0 | S 2, O += P 1 V 1 | ... across the ends of tiles
//
//   The products of a step are issued together: the scores of the next step, then P V of this one.
//   While P V runs, the consumer computes the exponentials of the next step. The first step of the
//   next tile takes part, and a tile's output is stored meanwhile. If two warpgroups share K and V,
//   they issue products in turn (named barriers), so one computes exponentials while the other's
//   products run.
//
//   A slot has a note: where the tile is, and for K also whether its step is the first of a tile,
//   whether it needs a mask, and the first key of each block. The last note ends the kernel. Q has
//   a buffer of its own, which is free again when Q is in the registers of the consumers.
//
// Softmax of a step, for rows r: most = max(most, S), P = 2^(scale S - scale most),
// sum = sum 2^(old most - most) + P, O = O 2^(old most - most). A row without an allowed element
// has sum 0, O 0 and LSE -inf. `scale` includes log2 e.
//
// Tiles have rows of 128 bytes and the 128-byte swizzle (hopper.cuh): 64 columns of the head, and
// HEAD_DIM / 64 of these side by side. K is K-major. V is MN-major: the next 16 keys are 16 rows
// further (2048 bytes), the next 64 columns KEYS rows.
//
// Cost of a step, 128 queries and keys, D = 128:
//    products      8.4 MFLOP: 1.3 us of an SM at the 850 TFLOP/s of the H200's clocks
//    exponentials  16 a clock: 1024 of 2048 clocks; hidden
//    loads         64 KB: 0.85 us of an SM at the 10 TB/s of TMA from L2 to all SMs
// Tiles of 64 queries read 64 KB for half the products: 1.7 us, so loads are their bottleneck.
//
// Macros: HEAD_DIM=64|128 BLOCK_Q BLOCK_K KEYS=64|128 GROUPS CONSUMERS=1|2 SLOTS SPAN=16|32|64|128
// SHORTENS=0|1 CAUSAL=0|1 BITS=0|1, and hopper.cuh's.
// Source: PTX ISA 9.0; FlashAttention-3 (2407.08608) for the order of products.

#include "hopper.cuh"
#include "mma.cuh"
#include "warpgroup.cuh"

constexpr int QUERY_MAPS = 1, LAGGING = 1, CONSUMER_REGISTERS = 232, PRODUCER_REGISTERS = 40;
#include "walk.cuh"

// Two warpgroups that issue products in turn wait for each other's instructions, so fewer of them
// and shorter chains gain 5 %. Tiles of 64 rows, with a ring each, lose 3 % (NOTES.md).
constexpr bool IN_TURN = CONSUMERS == 2;

struct State { float most[2], sum[2]; };  // of a row's scores, and of its exponentials
#define EMPTY State{{-INF, -INF}, {0.f, 0.f}}

// Exponentials of the scores of N keys, in place; `rescale` is the factor of the sums so far.
template <int N = KEYS>
__device__ __forceinline__ void softmax(float (&s)[KEYS / 2], State& state, float (&rescale)[2],
                                        float scale) {
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    float tops[2] = {s[2 * r], s[2 * r + 1]};
    #pragma unroll
    for (int i = 0; i < N / 8; i++)
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        float& top = tops[IN_TURN ? j : 0];
        top = fmaxf(top, s[4 * i + 2 * r + j]);
      }
    float most = IN_TURN ? fmaxf(tops[0], tops[1]) : tops[0];
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    most = fmaxf(most, state.most[r]);
    const float top = most == -INF ? 0.f : most * scale;
    rescale[r] = exp2_approx(state.most[r] * scale - top);
    state.most[r] = most;
    float sum = 0.f;
    #pragma unroll
    for (int i = 0; i < N / 8; i++)
      #pragma unroll
      for (int j = 0; j < 2; j++) {
        float& x = s[4 * i + 2 * r + j];
        x = exp2_approx(fmaf(x, scale, -top));
        sum += x;
      }
    state.sum[r] = state.sum[r] * rescale[r] + sum;
  }
}

// note: of a slot with V of the tile
__device__ __forceinline__ void store(const float (&o)[HEAD_DIM / 2], const State& state, u32 note,
                                      int row, const Sizes& sizes, char* out, float* lse) {
  const int query = ld_shared(note + 4) + row % SPAN, head = ld_shared(note + 8) + row / SPAN;
  float sums[2];
  #pragma unroll
  for (int r = 0; r < 2; r++) {
    float sum = state.sum[r];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (threadIdx.x % 4 == 0 && query + 8 * r < sizes.queries)
      lse[(long long)head * sizes.queries + query + 8 * r] =
          sum == 0.f ? -INF : state.most[r] * (sizes.scale * 0.69314718f) + logf(sum);
    sums[r] = sum == 0.f ? 0.f : 1.f / sum;
  }
  const long long row_bytes = (long long)sizes.heads * HEAD_DIM * 2;
  char* to = out + head / sizes.heads * sizes.queries * row_bytes +
             head % sizes.heads * HEAD_DIM * 2;
  store_rows<HEAD_DIM>(o, sums, to, query, sizes.queries, row_bytes);
}

// Registers of a consumer: scores of the next step, O, P of this step, Q.
struct Held {
  float s[KEYS / 2], o[HEAD_DIM / 2], rescale[2];
  u32 p[KEYS / 4], q[HEAD_DIM / 4];
  State state;
};

// Compute the scores and P of the next step, of NEXT keys, while O += P V of this step, of THIS
// keys, runs. If the next step is the first of its tile, store O. A short step of 64 keys is the
// last of its tile, but not the first.
template <int THIS, int NEXT>
__device__ __forceinline__ void step(Held& h, const Ring& k, const Ring& v, const Buffer& buffer,
                                     int consumer, int flags, int row, int barrier,
                                     const Lists& lists, const Sizes& sizes, char* out,
                                     float* lse) {
  multiply_keys<NEXT>(h.s, h.q, k.tile());
  wgmma_commit();
  mbarrier_wait(v.full_barrier(), v.phase, "V");
  add_rows<THIS>(h.o, h.p, v.tile());
  give_turn(consumer);
  wgmma_wait<1>();  // for the scores
  hold(h.s);
  if (flags & MASKED) {
    mask<NEXT>(h.s, k.note(), row, lists, sizes);
    warpgroup_sync(barrier);  // all warps have read the note
  }
  release(k.empty_barrier());
  const bool first = NEXT == KEYS && (THIS < KEYS || flags & FIRST);
  if (first) release(buffer.empty);
  const State done = h.state;
  if (first) h.state = EMPTY;
  softmax<NEXT>(h.s, h.state, h.rescale, sizes.scale);
  wgmma_wait<0>();
  hold(h.o);
  if (first) {
    store(h.o, done, v.note(), row, sizes, out, lse);
    warpgroup_sync(barrier);
    #pragma unroll
    for (int i = 0; i < HEAD_DIM / 2 && IN_TURN; i++) h.o[i] = 0.f;  // it may be infinite or NaN
  }
  release(v.empty_barrier());
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++)
    h.o[i] = first && !IN_TURN ? 0.f : h.o[i] * h.rescale[i / 2 % 2];
  #pragma unroll
  for (int i = 0; i < NEXT / 4; i++) h.p[i] = pack_pair(h.s[2 * i], h.s[2 * i + 1]);
}

__device__ __forceinline__ void consume(Ring ring, Buffer buffer, int consumer, const Lists& lists,
                                        const Sizes& sizes, char* out, float* lse) {
  const int row = 64 * consumer + threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;  // in the tile
  const int barrier = 3 + threadIdx.x / 128;  // of this warpgroup
  const u32 q_tile = buffer.tile + consumer * 64 * HEAD_DIM * 2;
  Held h;
  h.state = EMPTY;

  mbarrier_wait(ring.full_barrier(), ring.phase, "the first K");
  int flags = __shfl_sync(~0u, ld_shared(ring.note()), 0);
  if (flags & END) return;
  mbarrier_wait(buffer.full, buffer.phase, "Q");
  buffer.phase ^= 1;
  queries_to_registers(h.q, q_tile);
  if (consumer == 1) give_turn(1);
  take_turn(consumer);
  multiply_keys(h.s, h.q, ring.tile());
  wgmma_commit();
  give_turn(consumer);
  wgmma_wait<0>();
  hold(h.s);
  if (flags & MASKED) {
    mask(h.s, ring.note(), row, lists, sizes);
    warpgroup_sync(barrier);
  }
  release(ring.empty_barrier());
  release(buffer.empty);
  ring.advance();
  softmax(h.s, h.state, h.rescale, sizes.scale);
  #pragma unroll
  for (int i = 0; i < KEYS / 4; i++) h.p[i] = pack_pair(h.s[2 * i], h.s[2 * i + 1]);
  #pragma unroll
  for (int i = 0; i < HEAD_DIM / 2; i++) h.o[i] = 0.f;

  bool is_short = false;  // whether the step of P is
  for (;;) {
    const Ring k = ring;
    ring.advance();
    mbarrier_wait(k.full_barrier(), k.phase, "K");
    flags = __shfl_sync(~0u, ld_shared(k.note()), 0);
    if (flags & END) break;
    if (flags & FIRST) {
      mbarrier_wait(buffer.full, buffer.phase, "Q");
      buffer.phase ^= 1;
      queries_to_registers(h.q, q_tile);
    }
    take_turn(consumer);
    #define STEP(now, next) \
      step<now, next>(h, k, ring, buffer, consumer, flags, row, barrier, lists, sizes, out, lse)
    if (SHORTENS && flags & SHORT) STEP(KEYS, 64);
    else if (SHORTENS && is_short) STEP(64, KEYS);
    else STEP(KEYS, KEYS);
    is_short = flags & SHORT;
    ring.advance();
  }
  mbarrier_wait(ring.full_barrier(), ring.phase, "the last V");
  if (SHORTENS && is_short) {
    add_rows<64>(h.o, h.p, ring.tile());
    wgmma_wait<0>();
    hold(h.o);
  } else {
    add_rows(h.o, h.p, ring.tile());
    wgmma_wait<0>();
    hold(h.o);
  }
  store(h.o, h.state, ring.note(), row, sizes, out, lse);
}

// ---- the kernel ----

extern "C" __global__ void __launch_bounds__(THREADS, 1)
attend(const __grid_constant__ Maps maps, const __grid_constant__ Lists lists, char* out,
       float* lse, const __grid_constant__ Sizes sizes) {
  walk(maps, lists, sizes, [&](Ring ring, Buffer q, int consumer) {
    consume(ring, q, consumer, lists, sizes, out, lse);
  });
}
