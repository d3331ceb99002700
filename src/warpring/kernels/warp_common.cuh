// warp_common.cuh   What both warp-decode kernels share: the CTA shape, the butterfly, activation chunks, expert ids.
//
// Compile-time parameters (macros set by kernels/warp.py, one cubin each):
//   WARPRING_FORMAT        a policy of formats.cuh
//   WARPRING_HIDDEN, WARPRING_INTERMEDIATE, WARPRING_TOPK
//   WARPRING_INDEX         int32_t or int64_t, the type of topk_idx
#pragma once
#include "formats.cuh"

constexpr int kWarps = 8;  // warps of a CTA, which share nothing
constexpr int kLanes = 32;
constexpr int kHidden = WARPRING_HIDDEN;
constexpr int kIntermediate = WARPRING_INTERMEDIATE;
constexpr int kTopk = WARPRING_TOPK;
using Format = WARPRING_FORMAT;
using Index = WARPRING_INDEX;

static_assert(kHidden % 32 == 0 && kIntermediate % 32 == 0, "rows are whole 16-byte chunks in every format");
static_assert(kTopk >= 1 && kTopk <= kLanes, "a lane holds one routed expert");

constexpr int kXPieces = Format::kWeightsPerChunk / 8;  // 16-byte pieces of BF16 activations that face one chunk

__device__ __forceinline__ constexpr int64_t row_bytes(int cols) { return int64_t(cols) * Format::kCodeBits / 8; }

// Sum over the warp; every lane gets it. The order is fixed, so the bits are.
__device__ __forceinline__ float butterfly_sum(float v) {
#pragma unroll
    for (int mask = kLanes / 2; mask > 0; mask >>= 1) v += __shfl_xor_sync(0xffffffffu, v, mask);
    return v;
}

// Two sums in one butterfly: after the first exchange the lower half of the warp holds `a`, the upper half `b`.
__device__ __forceinline__ void butterfly_sum(float& a, float& b) {
    const bool upper = threadIdx.x & (kLanes / 2);
    float v = (upper ? b : a) + __shfl_xor_sync(0xffffffffu, upper ? a : b, kLanes / 2);
#pragma unroll
    for (int mask = kLanes / 4; mask > 0; mask >>= 1) v += __shfl_xor_sync(0xffffffffu, v, mask);
    const float other = __shfl_xor_sync(0xffffffffu, v, kLanes / 2);
    a = upper ? other : v;
    b = upper ? v : other;
}

// Where a lane reads its pieces of activations, in its rotated order: one address a piece, so that the chunks of a row
// are at constant offsets from them.
struct Pieces {
    const uint16_t* gmem[kXPieces];

    __device__ __forceinline__ Pieces(const uint16_t* gmem_row, int chunk, int rotation) {
#pragma unroll
        for (int i = 0; i < kXPieces; ++i)
            gmem[i] = gmem_row + chunk * Format::kWeightsPerChunk + 8 * ((i + rotation) % kXPieces);
    }
    __device__ __forceinline__ void load(uint4 (&x)[kXPieces], int chunks_on) const {
#pragma unroll
        for (int i = 0; i < kXPieces; ++i) x[i] = ld_activations(gmem[i] + chunks_on * Format::kWeightsPerChunk);
    }
};

// An id outside [0, num_experts) names no expert: -1 is an unused slot, anything else is skipped all the same.
__device__ __forceinline__ bool is_expert(int64_t id, int num_experts) {
    return uint64_t(id) < uint64_t(num_experts);
}
