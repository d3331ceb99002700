// expand_panels.cu   out[e,h,r,:] = bf16(w[e,h,first + r,:])   from the tile layout (warpring/layout.py), for a
// library's GEMM
//
// Grid     (panels of the slice / 8, num_experts); 8 warps a CTA, a warp owns a panel of 16 rows
// Reads    records and scales of the slice once, a few records at a time through shared memory; nothing of an expert
//          without rows in the batch
// Writes   2 bytes a weight, 64 bytes of each of a record's 16 rows
// Bound    HBM: (bytes_per_weight + 2) * weights of the slice
// Sync     waits for its predecessor before anything: it wrote ends, or still reads out; publishes nothing
// Limits   cols % 32 == 0; rows of the slice whole panels
//
// Compile-time parameters (macros set by kernels/expand.py): WARPRING_FORMAT, a policy of tile_formats.cuh;
// WARPRING_COLS; WARPRING_HALVES, 2 where a panel's upper 8 rows are those of the second half (gate, up), else 1.
#include "formats.cuh"
#include "tile_formats.cuh"

using Format = WARPRING_FORMAT;
constexpr int kCols = WARPRING_COLS, kHalves = WARPRING_HALVES, kWarps = 8, kBlock = 128;
constexpr int kRecords = kCols / kRecordCols;
constexpr int kStageRecords = 4;
constexpr int kStageBytes = kStageRecords * Format::kRecordBytes;
constexpr int kLoads = ceil_div(kStageBytes, 32 * 16);
constexpr int kTogether = kPanelsTogether<Format>, kPiece = kPieceBytes<Format>;
static_assert(kWarps % kTogether == 0, "panels that lie together are of one CTA");
static_assert(kCols % kRecordCols == 0 && Format::kRecordBytes % 16 == 0, "records are whole 16-byte pieces");

// Where byte `at` of a panel's records is, from its first on.
__device__ __forceinline__ int place_of(int at) {
    return kTogether == 1 ? at : at / kPiece * (kTogether * kPiece) + at % kPiece;
}

__device__ __forceinline__ uint32_t scaled(uint32_t pair, float scale) {
    return cvt_f32_bf16x2(bf16_high(pair) * scale, bf16_low(pair) * scale);
}

// One of the two rows of a lane: where it goes, and what multiplies it.
struct Row {
    uint16_t* gmem_out;
    const float* gmem_blocks;  // scales of its 128 x 128 blocks, or null
    float scale;

    // Columns of record `record`, from the operands of rows g (index 0) or g + 8 (index 1).
    __device__ __forceinline__ void store(const Operands& in, int index, int record, int q) const {
        const float factor = gmem_blocks ? scale * ld_scale_f32(gmem_blocks + record * kRecordCols / kBlock) : scale;
        const uint4 out = {scaled(in.a[0][index], factor), scaled(in.a[0][index + 2], factor),
                           scaled(in.a[1][index], factor), scaled(in.a[1][index + 2], factor)};
        *reinterpret_cast<uint4*>(gmem_out + record * kRecordCols + 8 * q) = out;
    }
};

extern "C" __global__ void __launch_bounds__(32 * kWarps)
    expand_panels(const uint8_t* gmem_records, const float* gmem_matrix_scale, const float* gmem_row_scale,
                  const float* gmem_block_scale, const int32_t* gmem_ends, int32_t rows, int32_t first, int32_t count,
                  uint16_t* gmem_out) {
    __shared__ alignas(16) uint8_t smem_stages[kWarps][kStageBytes];
    pdl_wait();
    const int expert = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4;
    if (ld_routing(gmem_ends + expert) == (expert ? ld_routing(gmem_ends + expert - 1) : 0)) return;
    constexpr int kHalfRows = 16 / kHalves;  // rows of one half in a panel
    const int panel = blockIdx.x * kWarps + warp;
    if (panel * kHalfRows >= count) return;

    Row own[2];
#pragma unroll
    for (int upper = 0; upper < 2; ++upper) {
        const int half = kHalves == 2 ? upper : 0, row = panel * kHalfRows + (kHalves == 2 ? g : 8 * upper + g);
        const int64_t matrix = int64_t(expert) * kHalves + half;
        own[upper].gmem_out = gmem_out + (matrix * count + row) * kCols;
        own[upper].scale = ld_scale_f32(gmem_matrix_scale + matrix);
        if (gmem_row_scale) own[upper].scale *= ld_scale_f32(gmem_row_scale + matrix * rows + first + row);
        own[upper].gmem_blocks = Format::kBlockScale
                                     ? gmem_block_scale + (matrix * ceil_div(rows, kBlock) + (first + row) / kBlock) *
                                                              ceil_div(kCols, kBlock)
                                     : nullptr;
    }

    const int64_t panels = rows / kHalfRows;
    const int64_t place = expert * panels + first / kHalfRows + panel;
    const uint8_t* gmem = gmem_records + place / kTogether * kTogether * kRecords * Format::kRecordBytes +
                          place % kTogether * kPiece;
    uint8_t* smem = smem_stages[warp / kTogether * kTogether] + warp % kTogether * kPiece;
    for (int record = 0; record < kRecords; record += kStageRecords) {
        const int records = min(kStageRecords, kRecords - record), bytes = records * Format::kRecordBytes;
        uint4 pieces[kLoads];
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            if (const int at = (32 * i + lane) * 16; at < bytes) pieces[i] = ld_weights(gmem + place_of(at));
        __syncwarp();  // every lane has read the stage before
#pragma unroll
        for (int i = 0; i < kLoads; ++i)
            if (const int at = (32 * i + lane) * 16; at < bytes) *reinterpret_cast<uint4*>(smem + place_of(at)) = pieces[i];
        __syncwarp();
        for (int i = 0; i < records; ++i) {
            Operands in;
            Format::unpack(Format::load(smem_address(smem), lane, i), in);
            own[0].store(in, 0, record + i, q);
            own[1].store(in, 1, record + i, q);
        }
        gmem += kTogether * kStageBytes;
    }
}
