// C names for a 2:4 product of CUTLASS 4 on Hopper, for ctypes; built once for each tile
// (cutlass_sparse.py) with -I of the package's headers and these macros:
//
//   ELEMENT, OUTPUT             element types of W and X, and of Y
//   TILE_N, TILE_M, TILE_K      the tile of Y and of k
//   CLUSTER_N, CLUSTER_M        the CTAs of a cluster
//   SCHEDULE                    the schedule of the main loop
//
// W [n, k] row by row is CUTLASS's sparse A [M, K]; X [m, k] is its B, column by column, and
// Y [m, n] its D, column by column.
#include <cute/tensor.hpp>
#include <cutlass/cutlass.h>
#include <cutlass/epilogue/collective/collective_builder.hpp>
#include <cutlass/gemm/collective/collective_builder.hpp>
#include <cutlass/gemm/device/gemm_universal_adapter.h>
#include <cutlass/gemm/kernel/gemm_universal.hpp>
#include <cutlass/transform/device/transform_universal_adapter.hpp>
#include <cutlass/transform/kernel/sparse_gemm_compressor.hpp>
#include <cutlass/util/packed_stride.hpp>

using namespace cutlass;
using cute::Int, cute::make_shape;

using Element = ELEMENT;
using Result = OUTPUT;
using Rows = layout::RowMajor;
using Columns = layout::ColumnMajor;
using Size = cute::Shape<int, int, int, int>;
using Block = cute::Shape<Int<TILE_N>, Int<TILE_M>, Int<TILE_K>>;
using Cluster = cute::Shape<Int<CLUSTER_N>, Int<CLUSTER_M>, Int<1>>;
constexpr int IN = 16 / sizeof(Element), OUT = 16 / sizeof(Result);  // elements per 16 bytes
using namespace cutlass::gemm;
using namespace cutlass::gemm::collective;
using Schedule = SCHEDULE;

using Epilogue = typename epilogue::collective::CollectiveBuilder<
    arch::Sm90, arch::OpClassSparseTensorOp, Block, Cluster, epilogue::collective::EpilogueTileAuto, float, float, void,
    Columns, OUT, Result, Columns, OUT, epilogue::collective::EpilogueScheduleAuto>::CollectiveOp;
using Loop = typename gemm::collective::CollectiveBuilder<
    arch::Sm90, arch::OpClassSparseTensorOp, Element, Rows, IN, Element, Columns, IN, float, Block, Cluster,
    gemm::collective::StageCountAutoCarveout<int(sizeof(typename Epilogue::SharedStorage))>, Schedule>::CollectiveOp;
using TwoFour = gemm::kernel::GemmUniversal<Size, Loop, Epilogue>;
using Gemm = gemm::device::GemmUniversalAdapter<TwoFour>;
using Config = typename Loop::SparseConfig;
using Packed = transform::kernel::StructuredSparseCompressorUtility<Size, Element, Rows, Config>;
using Pack = transform::device::TransformUniversalAdapter<
    transform::kernel::StructuredSparseCompressor<Size, Element, Rows, Config, arch::Sm90>>;
using StrideW = gemm::TagToStrideA_t<Rows>;

static KernelHardwareInfo hardware() {
    KernelHardwareInfo info;
    cudaGetDevice(&info.device_id);
    info.sm_count = KernelHardwareInfo::query_device_multiprocessor_count(info.device_id);
    return info;
}

static StrideW stride_of(int n, int k) { return make_cute_packed_stride(StrideW{}, make_shape(n, k, 1)); }

static typename Gemm::Arguments arguments(const void* values, const void* meta, const void* x, void* y, int n, int m,
                                          int k) {
    const Size size{n, m, k, 1};
    const auto of_x = make_cute_packed_stride(typename TwoFour::StrideB{}, make_shape(m, k, 1));
    const auto of_y = make_cute_packed_stride(typename TwoFour::StrideD{}, make_shape(n, m, 1));
    typename Gemm::Arguments all{gemm::GemmUniversalMode::kGemm,
                                 size,
                                 {(const Element*)values, Config::fill_layoutA(size), (const Element*)x, of_x,
                                  (const typename Loop::ElementE*)meta, Config::fill_layoutE(size)},
                                 {{1.f, 0.f}, nullptr, of_y, (Result*)y, of_y},
                                 hardware()};
    return all;
}

// Bytes of the packed values, of the metadata and of the workspace.
extern "C" void sizes(int n, int m, int k, long* bytes) {
    Packed packed(Size{n, m, k, 1}, stride_of(n, k));
    bytes[0] = long(n) * packed.get_tensorA_k_physical() * sizeof(Element);
    bytes[1] = long(packed.get_metadata_m_physical()) * packed.get_metadata_k_physical() * sizeof(typename Loop::ElementE);
    bytes[2] = long(Gemm::get_workspace_size(arguments(nullptr, nullptr, nullptr, nullptr, n, m, k)));
}

extern "C" int pack(cudaStream_t stream, const void* w, void* values, void* meta, int n, int m, int k) {
    typename Pack::Arguments all{
        Size{n, m, k, 1}, {(const Element*)w, stride_of(n, k), (Element*)values, (typename Loop::ElementE*)meta}, {hardware()}};
    Pack pack;
    // It reports its shared memory as the size of a workspace, but uses no workspace.
    if (Status status = pack.can_implement(all); status != Status::kSuccess) return int(status);
    if (Status status = pack.initialize(all, nullptr, stream); status != Status::kSuccess) return int(status);
    return int(pack.run(stream));
}

extern "C" int multiply(cudaStream_t stream, const void* values, const void* meta, const void* x, void* y,
                        void* workspace, int n, int m, int k) {
    const auto all = arguments(values, meta, x, y, n, m, k);
    Gemm gemm;
    if (Status status = gemm.can_implement(all); status != Status::kSuccess) return int(status);
    if (Status status = gemm.initialize(all, workspace, stream); status != Status::kSuccess) return int(status);
    return int(gemm.run(stream));
}
