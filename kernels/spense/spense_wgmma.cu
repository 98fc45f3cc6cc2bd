// Y[m, n] = X[m, k] @ W[n, k].T, where part of W is 2:4 sparse and the rest is dense
// (formats/spense.py).
// One launch on Hopper's tensor cores (wgmma and wgmma.sp). Compute capability 9.0 only.
//
//   A work item is 64 WARPGROUPS features x TOKENS tokens of Y, here with two warpgroups. A k tile
//   is a tile of W: 256 bytes of k.
//
//      W, two rows of tiles               X.T                         Y.T
//      +--------+--------+--------+     +---------+                 +---------+
//      | sparse | sparse | dense  |     | 2 boxes |    warpgroup 0  | 64      |
//      |        |        |        |     +---------+       ->        | TOKENS  |
//      +--------+--------+--------+  x  | 2 boxes |  =              +---------+
//      | sparse | sparse | dense  |     +---------+    warpgroup 1  | 64      |
//      |        |        |        |     | 2 boxes |       ->        | TOKENS  |
//      +--------+--------+--------+     +---------+                 +---------+
//
// W is operand A, because only A may be sparse. One instruction takes 64 rows of W; tokens are its
// width N. Sparse and dense tiles add to the same accumulators, in fp32. A sparse tile has 9 KiB
// (16 bits) or 10 KiB (8 bits), a dense one 16 KiB. A row of tiles begins sparse and ends dense
// (split by columns), or is of one kind (split by rows). Each warpgroup has its own row of tiles.
// All warpgroups read the same X. The more of them share it, the fewer bytes an SM copies: for a
// row of tiles, a k tile and 112 tokens, 9 KiB of W and 14 of X with two warpgroups, 9 and 9 with
// three.
//
// The pipeline, for two warpgroups: 12 warps, one CTA per SM, three pipelines of stages.
//
//    warp 8     X boxes, TOKENS x 128 bytes, by TMA -----> X pipeline -----+--> warpgroups 0 and 1
//    warp 9     W tiles of warpgroup 0, by bulk copies --> W pipeline 0 ---|--> warpgroup 0
//    warp 10    W tiles of warpgroup 1 ------------------> W pipeline 1 ---+--> warpgroup 1
//    warp 11    W tiles of warpgroup 2, if there is one
//
//   A stage of a W pipeline holds a whole sparse tile (values and metadata) or half of a dense one.
//   A box of X is multiplied by half of a sparse tile (2 wgmma.sp) or by half of a dense one
//   (4 wgmma). A warpgroup keeps the wgmma of one box in flight. It releases their stages after it
//   has issued the wgmma of the next box. With CLUSTER = 2 both CTAs have the same tokens and
//   neighbouring features. Each loads half of every box of X and multicasts it to both.
//
// If there are few work items, several CTAs share the k tiles of one (stream-K, _stream_k.py). Each
// warpgroup writes its partial sums to memory. A CTA that has finished its list waits for the other
// parts of its items (the fixup). Each part then reduces all partial sums of some of the tokens, so
// the parts share this work too. The order of the reduction is fixed: equal inputs give equal bits.
// CTAs wait for one another, so all must run at the same time: the launch is cooperative.
//
// With SPLIT there are no list and no partial sums in memory. The SPLIT CTAs of a cluster share the
// k tiles of one item. At the end each sends its sums, in registers, to the shared memory of the
// CTA that adds up and writes these tokens:
//
//    part 0   k tiles 0 to 3    ==> sums --+--> part 0 adds up and writes tokens 0 to 63
//    part 1   k tiles 4 to 7    ==> sums --+--> part 1 adds up and writes tokens 64 to 111
//
// Sizes are in bytes, so the same code multiplies 16 and 8 bits. One instruction takes 32 bytes of
// each row of W, stored or dense, and 64 or 32 bytes of each token. The tensor cores accumulate fp8
// in fewer bits than fp32, as in cuBLAS with use_fast_accum. The epilogue multiplies by a scale for
// each feature and each token, if there are any. Y is then bf16.
//
// Gate and up of a gated MLP may be one W: 8 rows of gate and the same 8 of up alternate. With an
// ACTIVATION the kernel writes H[m, n / 2] = act(G) * U ("hidden units" below). G and U stay in
// registers. H is rounded once, to the operands' dtype; for fp8 that is e4m3, which saturates.
//
// Clocks of an SM for one box, TOKENS = 256 (shared memory: 128 bytes a clock):
//
//                     tensor cores   X, read by each warpgroup   W, read   both, written by copies
//    half a sparse tile        512                         512        64                 328
//    half a dense tile        1024                         512       128                 384
//
// Half a sparse tile needs 512 + 64 + 328 = 904 clocks of shared memory: 0.88 of the 1024 that half
// a dense tile needs on the tensor cores. So 2:4 cannot be twice as fast if compute is the limit.
// If memory is the limit (up to about 128 tokens), the bytes of W count: a sparse tile has 0.5625
// (16 bits) or 0.625 (8 bits) of those of a dense one.
//
// wgmma.sp reads its metadata from registers while it runs, so they must not change before it is
// done. ptxas does not ensure that for the loads of the next tile's metadata. (If it notices, it
// serialises the wgmma: warning C7513.) So each half of a tile has its own registers, which are
// loaded again only after the wgmma that read their old contents are done.
//
// With WINDOWS, W is a lifted 6:8 matrix (formats/slide.py) and X is not lifted. The warps that
// otherwise do nothing make every third box of X from the two boxes before it. Work items start and
// end at multiples of UNIT tiles, so that these three boxes are in one item ("middle boxes" below).
//
// At most AHEAD tiles of W are in flight for a warpgroup. If all stages that fit were used, 20 MB
// would be in flight at a time, and some SMs would get their tiles much later than others. With 4
// to 5 tiles the kernel is 6 % faster.
//
// Macros from spense_wgmma.py: TOKENS=16..256 by 16, or from 128 on by 8, CLUSTER=1|2, AHEAD=2...,
// WARPGROUPS=1|2|3, SPLIT=0 (a list)|1|2|3|4|5|8 (CTAs of a cluster for each item), WINDOWS=0|1,
// FP8=0|1, FP16=0|1 (0 is bf16), ACTIVATION=0 (none)|1 silu|2 relu|3 relu2|4 gelu_tanh, and the
// constants that both files share: THREADS, SHARED_BYTES, ROWS, ROW_BYTES, VALUE_BYTES, STORE_TOKENS, WORKERS. With
// WATCHDOG=1 a kernel that hangs ends and reports where.
// Source: PTX ISA 9.0, wgmma.mma_async.sp.

#include "spense_tiles.cuh"

// This is part `part` of `parts` that share these features and tokens. Their partial sums are in
// `parts` slots of the workspace, from `slot` on. `counter` counts the parts that have arrived.
struct alignas(16) Fixup { int part, parts, slot, counter; };
struct WorkItem { WorkTile tile; Fixup fixup; };
// The first work tile of each worker is a kernel argument. If the worker read it from memory, the
// first copy would start 1.3 us later.
struct First { WorkTile items[WORKERS]; int starts[WORKERS]; };
// With SPLIT, items of one group follow each other, one for each tile of tokens.
struct Items { int token_tiles, k_tiles; };

// ---- stream-K: partial sums and their reduction ----

constexpr int PARTIAL_FLOAT4S = TILE_ROWS * STORES * 2 * 128;  // of a part, all its warpgroups

// Thread 0 of a warpgroup has its first four partial sums of the item's first part here.
__device__ __forceinline__ float4* partial_sums(float4* workspace, const Fixup& fixup,
                                                int consumer) {
  return workspace + (u64)fixup.slot * PARTIAL_FLOAT4S + consumer * STORES * 2 * 128 +
         threadIdx.x % 128;
}

// A thread that reads the new count with ld_acquire also sees what the warpgroup wrote.
__device__ __forceinline__ void red_release_add_1(int* counter) {
  asm volatile("red.release.gpu.global.add.s32 [%0], 1;" :: "l"(counter) : "memory");
}

// Write the partial sums of a part, and count it as arrived.
__device__ __forceinline__ void store_partial(const Accumulators& d, const Fixup& fixup,
                                              float4* workspace, int* counters, int consumer,
                                              int warpgroup) {
  float4* to = partial_sums(workspace, fixup, consumer) + (u64)fixup.part * PARTIAL_FLOAT4S;
  #pragma unroll
  for (int i = 0; i < 2 * STORES; i++)
    to[i * 128] = float4{d[4 * i], d[4 * i + 1], d[4 * i + 2], d[4 * i + 3]};
  warpgroup_sync(warpgroup + 1);
  if (threadIdx.x % 128 == 0) red_release_add_1(counters + fixup.counter * TILE_ROWS + consumer);
}

__device__ __forceinline__ int ld_acquire(const int* counter) {
  int count;
  asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(count) : "l"(counter) : "memory");
  return count;
}
__device__ __forceinline__ void wait_for_parts(const int* counter, int parts) {
  for (int tries = 0; ld_acquire(counter) < parts; tries++) {
#ifdef WATCHDOG
    if (tries == 1 << 18) __assertfail("all parts", __FILE__, __LINE__, "wait_for_parts", 1);
#endif
  }
}

// Reduce all parts of stores `index` to `end`, COUNT at a time, and write the result. The partial
// sums of UNROLL parts are read at a time. With ten instead of six, 20 parts of few tokens take 0.5
// to 0.9 us less. Three warpgroups have registers for fewer.
constexpr bool ROOM = WARPGROUPS <= 2;
template <int COUNT, int UNROLL>
__device__ __forceinline__ void reduce_parts(const float4* from, int parts, int index, int end,
                                             const Scales& scales, const Out* to, u32 out,
                                             int feature, int token, int warpgroup) {
  const bool writer = is_writer();
  const u32 address = epilogue_address(out);
  for (; index < end; index += COUNT) {
    float d[8 * COUNT] = {};
    #pragma unroll UNROLL
    for (int i = 0; i < parts; i++) {
      const float4* v = from + (u64)i * PARTIAL_FLOAT4S + index * 2 * 128;
      #pragma unroll
      for (int j = 0; j < 2 * COUNT; j++)
        if (index + j / 2 < end) {
          const float4 four = __ldcg(v + j * 128);
          float* sum = d + 4 * j;
          sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
        }
    }
    if (FP8) apply_scales<2 * COUNT>(d, scales, feature, token + index * STORE_TOKENS);
    if (writer) tma_store_wait_read<0>();
    warpgroup_sync(warpgroup + 1);
    #pragma unroll
    for (int j = 0; j < COUNT; j++) copy_r2s(address + j * STORE_BYTES, d + 8 * j);
    fence_proxy_async();
    warpgroup_sync(warpgroup + 1);
    if (writer) {
      for (int j = 0; j < COUNT && index + j < end; j++)
        copy_s2g(to, out + j * STORE_BYTES, feature, token + (index + j) * STORE_TOKENS,
                 index + j);
      tma_store_commit();
    }
  }
}

// Wait for all parts, and reduce this part's share of the stores. The last part resets the counter
// to 0 for the next launch.
__device__ __forceinline__ void fixup_part(const WorkItem& item, const float4* from, int* counter,
                                           const Scales& scales, const Out* to, u32 out,
                                           int feature, int warpgroup) {
  const int part = item.fixup.part, parts = item.fixup.parts, token = item.tile.token;
  const int each = (STORES + parts - 1) / parts, reducers = (STORES + each - 1) / each;
  if (part >= reducers) return;
  const bool leader = threadIdx.x % 128 == 0;
  if (leader) wait_for_parts(counter, parts);
  warpgroup_sync(warpgroup + 1);
  const int index = part * each, end = min(index + each, STORES);
  if (each == 1)
    reduce_parts<1, ROOM ? 10 : 6>(from, parts, index, end, scales, to, out, feature, token,
                                   warpgroup);
  else
    reduce_parts<EPI_TOKENS / STORE_TOKENS, ROOM ? 3 : 1>(from, parts, index, end, scales, to, out,
                                                          feature, token, warpgroup);
  if (leader && atomicAdd(counter, 1) == parts + reducers - 1) *counter = 0;
}

// Write the result of a work item that is not cut.
__device__ __forceinline__ void write_item(const Accumulators& d, const Out* to, u32 out,
                                           int feature, int token, int warpgroup) {
  epilogue(d, out, warpgroup, [&](bool writer, int first, int stores, u32 from) {
    if (!writer) return;
    #pragma unroll
    for (int i = 0; i < stores; i++)
      copy_s2g(to, from + i * STORE_BYTES, feature, token + (first + i) * STORE_TOKENS, first + i);
    tma_store_commit();
  });
}

// ---- SPLIT: the CTAs of a cluster share the k tiles of an item ----
//
//   CTA `part` adds up and writes SHARE stores of tokens, from part * SHARE on. Each warpgroup of
//   the other CTAs sends its sums to the same warpgroup there, in the layout
//   [sender][store][2][thread] of 16 bytes. An mbarrier counts their bytes.

#if SPLIT
__device__ __forceinline__ int stores_of(int part) {
  return max(min(SHARE, STORES - part * SHARE), 0);
}
__device__ __forceinline__ int bytes_for(int part) {  // that a warpgroup receives from all others
  return (SPLIT - 1) * stores_of(part) * STORE_TOKENS * ROWS * 4;
}
// Send the sums of all stores except this CTA's own, and keep those.
__device__ __forceinline__ void exchange(const Accumulators& d, float (&own)[8 * SHARE], u32 sums,
                                         u32 received, int part) {
  #pragma unroll
  for (int owner = 0; owner < SPLIT; owner++) {
    const int place = part - (part > owner);  // among the senders
    const u32 from = sums + place * SHARE * 2 * 2048 + threadIdx.x % 128 * 16;
    const u32 to = map_shared_rank(from, owner), barrier = map_shared_rank(received, owner);
    #pragma unroll
    for (int i = 0; i < 2 * SHARE; i++) {
      const int at = 4 * (owner * 2 * SHARE + i);
      if (at >= 8 * STORES) continue;
      if (owner != part)
        st_async(to + i * 2048, float4{d[at], d[at + 1], d[at + 2], d[at + 3]}, barrier);
      else
        #pragma unroll
        for (int j = 0; j < 4; j++) own[4 * i + j] = d[at + j];
    }
  }
}
__device__ __forceinline__ float4 ld_shared_float4(u32 at) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(at) : "memory");
  return v;
}
// Add the received sums to eight sums of a thread, those of 16 tokens.
__device__ __forceinline__ void add_received(float* d, u32 from) {
  #pragma unroll
  for (int sender = 0; sender < SPLIT - 1; sender++)
    #pragma unroll
    for (int j = 0; j < 2; j++) {
      const float4 four = ld_shared_float4(from + (sender * SHARE * 2 + j) * 2048);
      float* sum = d + 4 * j;
      sum[0] += four.x, sum[1] += four.y, sum[2] += four.z, sum[3] += four.w;
    }
}
// Write the stores of this CTA. `out` is free.
__device__ __forceinline__ void write_share(float* own, const Scales& scales, const Out* to,
                                            u32 out, u32 sums, int part, int feature, int token,
                                            int warpgroup) {
  const u32 address = epilogue_address(out), from = sums + threadIdx.x % 128 * 16;
  const int stores = stores_of(part), first = token + part * SHARE * STORE_TOKENS;
  #pragma unroll
  for (int i = 0; i < SHARE; i++) {
    if (i >= stores) break;
    add_received(own + 8 * i, from + i * 2 * 2048);
    if (FP8) apply_scales<2>(own + 8 * i, scales, feature, first + i * STORE_TOKENS);
    copy_r2s(address + i * STORE_BYTES, own + 8 * i);
  }
  fence_proxy_async();
  warpgroup_sync(warpgroup + 1);
  if (is_writer()) {
    for (int i = 0; i < stores; i++)
      copy_s2g(to, out + i * STORE_BYTES, feature, first + i * STORE_TOKENS,
               part * SHARE + i);
    tma_store_commit();
    tma_store_wait_read<0>();
  }
}
#endif

// ---- the kernel ----

#if SPLIT

constexpr int SUMS = XPipeline::END + WARPGROUPS * WPipeline::END;
constexpr int RECEIVED = SUMS + WARPGROUPS * SUMS_BYTES;  // an mbarrier for each warpgroup
static_assert(RECEIVED + 1024 <= SHARED_BYTES - 1024);

// One cluster for each item, one CTA for each part of its k tiles.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if SPLIT > 1
__cluster_dims__(SPLIT, 1, 1)
#endif
multiply_tiles(const __grid_constant__ Maps maps, const __grid_constant__ Weights w,
               const __grid_constant__ Items items, const __grid_constant__ Scales scales) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;  // the alignment of a swizzled tile
  const int part = blockIdx.x % SPLIT, item = blockIdx.x / SPLIT;
  if (threadIdx.x == 0) {
    init_barriers(stages);
    for (int warpgroup = 0; warpgroup < WARPGROUPS; warpgroup++) {
      const u32 received = stages + RECEIVED + 8 * warpgroup;
      mbarrier_init(received, 1);
      mbarrier_arrive_expect_tx(received, bytes_for(part));
    }
    fence_mbarrier_init();
  } else if (threadIdx.x == 128 * WARPGROUPS) {  // the warp that loads X
    prefetch_map(&maps.x), prefetch_map(&maps.out);
  }
  __syncthreads();
  if (SPLIT > 1) cluster_arrive_relaxed();  // its mbarriers are initialised
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  const int units = items.k_tiles / UNIT;
  const int begin = units * part / SPLIT * UNIT, end = units * (part + 1) / SPLIT * UNIT;
  const WorkTile tile{item / items.token_tiles, item % items.token_tiles * TOKENS, begin,
                      end - begin};
  // Producers start one phase ahead: in the first round all stages are empty.
  XPipeline x{stages, role == WARPGROUPS, 0};
  if (role == WARPGROUPS) {
    if (WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (WINDOWS && warp > WARPGROUPS) {
      x.phase = 0;  // of a consumer
      expand_x(x, tile.k_tiles);
    } else if (threadIdx.x % 32 == 0) {
      WPipeline w_pipeline = w_pipeline_of(stages, warp - 1, true);
      if (warp == 0) produce_x(maps, tile, x, 0, scales.m);
      else if (warp <= WARPGROUPS) produce_w(w, tile, w_pipeline, tile_row_of(w, tile, warp - 1));
    }
    __syncwarp();
    if (SPLIT > 1) cluster_wait();
  } else {
    if (WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    WPipeline w_pipeline = w_pipeline_of(stages, role, false);
    const u32 out = w_pipeline.base, sums = stages + SUMS + role * SUMS_BYTES;
    const int row = tile_row_of(w, tile, role);
    Accumulators d;
    mainloop(d, x, w_pipeline, w, tile, row);
    if (SPLIT > 1) {
      const u32 received = stages + RECEIVED + 8 * role;
      float own[8 * SHARE];
      cluster_wait();
      exchange(d, own, sums, received, part);
      mbarrier_wait(received, 0, "sums of all parts");
      warpgroup_sync(role + 1);  // all its warps are done with its stages
      write_share(own, scales, &maps.out, out, sums, part, row * ROWS, tile.token, role);
    } else {
      warpgroup_sync(role + 1);
      write_share(d, scales, &maps.out, out, sums, part, row * ROWS, tile.token, role);
    }
  }
}

#else

// As many workers, CTAs or clusters, as the GPU runs at a time.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
#if CLUSTER > 1
__cluster_dims__(CLUSTER, 1, 1)
#endif
multiply_tiles(const __grid_constant__ Maps maps, const __grid_constant__ Weights w,
               const __grid_constant__ First first, const __grid_constant__ Scales scales,
               const WorkItem* items, float4* workspace, int* counters) {
  extern __shared__ char shared[];
  const u32 stages = (smem_address(shared) + 1023) & ~1023u;  // the alignment of a swizzled tile
  if (threadIdx.x == 0) {
    init_barriers(stages);
    fence_mbarrier_init();
  }
  if (CLUSTER > 1) cluster_sync();
  else __syncthreads();
  const int role = __shfl_sync(~0u, threadIdx.x / 128, 0), warp = threadIdx.x / 32 % 4;
  const int rank = blockIdx.x % CLUSTER, worker = blockIdx.x / CLUSTER;
  const int begin = first.starts[worker], end = first.starts[worker + 1];
  XPipeline x{stages, role == WARPGROUPS, 0};
  if (role == WARPGROUPS) {
    if (WARPGROUPS > 1) setmaxnreg_dec<PRODUCER_REGISTERS>();
    if (WINDOWS && warp > WARPGROUPS) {
      x.phase = 0;  // of a consumer
      for (int i = begin; i < end; i++) expand_x(x, items[i].tile.k_tiles);
    } else if (threadIdx.x % 32 == 0) {
      WPipeline w_pipeline = w_pipeline_of(stages, warp - 1, true);
      WorkTile next = first.items[worker];
      for (int i = begin; i < end; i++) {
        const WorkTile tile = next;
        next = items[i + 1].tile;  // READ_AHEAD
        if (warp == 0) produce_x(maps, tile, x, rank, scales.m);
        else if (warp <= WARPGROUPS) 
          produce_w(w, tile, w_pipeline, tile_row_of(w, tile, WARPGROUPS * rank + warp - 1));
      }
    }
    __syncwarp();
  } else {
    if (WARPGROUPS > 1) setmaxnreg_inc<CONSUMER_REGISTERS>();
    WPipeline w_pipeline = w_pipeline_of(stages, role, false);
    const int consumer = WARPGROUPS * rank + role;
    const u32 out = stages + XPipeline::END + WARPGROUPS * WPipeline::END +
                    role * EPI_STAGES * EPI_BYTES;
    Accumulators d;
    for (int i = begin; i < end; i++) {
      const WorkItem& item = items[i];  // read when used, because accumulators fill the registers
      const int row = tile_row_of(w, item.tile, consumer);
      mainloop(d, x, w_pipeline, w, item.tile, row);
      if (item.fixup.parts > 1) {
        store_partial(d, item.fixup, workspace, counters, consumer, role);
      } else {
        if (FP8) apply_scales<TOKENS / 8>(d, scales, row * ROWS, item.tile.token);
        write_item(d, &maps.out, out, row * ROWS, item.tile.token, role);
      }
    }
    for (int i = begin; i < end; i++) {
      const WorkItem& item = items[i];
      if (item.fixup.parts > 1)
        fixup_part(item, partial_sums(workspace, item.fixup, consumer),
                   counters + item.fixup.counter * TILE_ROWS + consumer, scales, &maps.out, out,
                   tile_row_of(w, item.tile, consumer) * ROWS, role);
    }
    if (is_writer()) tma_store_wait();
  }
  if (CLUSTER > 1) cluster_sync();  // the other CTA may still send boxes and arrivals to this one
}

#endif
