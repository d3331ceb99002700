// expand_rows.cu   out[e,h,r,:] = bf16(w[e,h,first + r,:])   row-major codes and scales to BF16, for a library's GEMM
//
// Grid     (rows of the slice * 16-byte chunks of a row / 256, halves, num_experts); a thread owns a chunk
// Reads    codes and scales of the slice once; nothing of an expert without rows in the batch
// Writes   2 bytes a weight, 16 bytes a store
// Bound    HBM: (bytes_per_weight + 2) * weights of the slice
// Sync     waits for its predecessor before anything: it wrote ends, or still reads out; publishes nothing
// Limits   cols % 32 == 0; first starts a block of scales
//
// Compile-time parameters (macros set by kernels/expand.py): WARPRING_FORMAT, a policy of formats.cuh; WARPRING_COLS.
#include "formats.cuh"

using Format = WARPRING_FORMAT;
constexpr int kCols = WARPRING_COLS;
constexpr int kChunks = kCols / Format::kWeightsPerChunk;
constexpr int kPieces = Format::kWeightsPerChunk / 8;
static_assert(kCols % 32 == 0, "rows are whole 16-byte chunks in every format");

// Eight values to BF16, rounded once.
__device__ __forceinline__ uint4 to_bf16x8(const float (&v)[8]) {
    return {cvt_f32_bf16x2(v[1], v[0]), cvt_f32_bf16x2(v[3], v[2]), cvt_f32_bf16x2(v[5], v[4]),
            cvt_f32_bf16x2(v[7], v[6])};
}

// Eight E4M3 codes.
__device__ __forceinline__ void values_e4m3(uint32_t low, uint32_t high, float (&v)[8]) {
    const uint32_t pairs[4] = {cvt_e4m3x2_f16x2_low(low), cvt_e4m3x2_f16x2_high(low), cvt_e4m3x2_f16x2_low(high),
                               cvt_e4m3x2_f16x2_high(high)};
#pragma unroll
    for (int j = 0; j < 4; ++j) v[2 * j] = cvt_f16_f32_low(pairs[j]), v[2 * j + 1] = cvt_f16_f32_high(pairs[j]);
}

// Eight E2M1 codes, the even column in the low nibble, as in dot_e2m1x8.
__device__ __forceinline__ void values_e2m1(uint32_t codes, float (&v)[8]) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t top = codes << (12 - 4 * j);
        const uint32_t pair = (top & 0x80008000u) | ((top >> 3) & 0x0e000e00u);
        v[j] = cvt_f16_f32_low(pair) * kE2m1Unit, v[j + 4] = cvt_f16_f32_high(pair) * kE2m1Unit;
    }
}

// What multiplies the codes of piece p of a chunk, from what scale_at() gave.
__device__ __forceinline__ float factor(Fp8Block, float scale, int) { return scale; }
__device__ __forceinline__ float factor(Fp8Channel, float scale, int) { return scale; }
__device__ __forceinline__ float factor(Mxfp8, uint32_t scale, int) { return scale_e8m0(scale, 1.f); }
__device__ __forceinline__ float factor(Mxfp4, uint32_t scale, int) { return scale_e8m0(scale, 1.f); }
__device__ __forceinline__ float factor(Nvfp4, uint32_t scale, int p) {
    const uint32_t scales = cvt_e4m3x2_f16x2_low(scale);
    return p < 2 ? cvt_f16_f32_low(scales) : cvt_f16_f32_high(scales);
}

extern "C" __global__ void __launch_bounds__(256)
    expand_rows(const uint8_t* gmem_codes, const uint8_t* gmem_scale, const float* gmem_global,
                const int32_t* gmem_ends, int32_t rows, int32_t first, int32_t count, uint16_t* gmem_out) {
    pdl_wait();
    const int expert = blockIdx.z;
    if (ld_routing(gmem_ends + expert) == (expert ? ld_routing(gmem_ends + expert - 1) : 0)) return;
    const int64_t index = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
    if (index >= int64_t(count) * kChunks) return;
    const int row = index / kChunks, chunk = index % kChunks;
    const int64_t matrix = int64_t(expert) * gridDim.y + blockIdx.y;
    const int64_t row_bytes = int64_t(kCols) * Format::kCodeBits / 8;
    const uint4 codes = ld_weights(gmem_codes + (matrix * rows + first + row) * row_bytes + chunk * 16);
    const uint8_t* gmem_row_scale =
        gmem_scale + matrix * Format::scale_matrix_bytes(rows, kCols) + Format::scale_offset(first + row, kCols);
    const auto scale = Format::scale_at(gmem_row_scale, chunk);
    const float global = gmem_global ? ld_scale_f32(gmem_global + matrix) : 1.f;
    uint4* out = reinterpret_cast<uint4*>(gmem_out + (matrix * count + row) * kCols + chunk * Format::kWeightsPerChunk);
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
        float values[8];
        if constexpr (Format::kCodeBits == 8)
            values_e4m3(p ? codes.z : codes.x, p ? codes.w : codes.y, values);
        else
            values_e2m1(p == 0 ? codes.x : p == 1 ? codes.y : p == 2 ? codes.z : codes.w, values);
        // In this order a product is that of the format: exact but for FP32 scales, whose last one rounds.
        const float multiplier = factor(Format{}, scale, p);
#pragma unroll
        for (float& value : values) value = value * multiplier * global;
        out[p] = to_bf16x8(values);
    }
}
