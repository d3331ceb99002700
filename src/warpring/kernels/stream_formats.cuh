// stream_formats.cuh   The policies of tile_formats.cuh with fewer instructions where they count: one scale word a record for
// both rows of a lane, and E2M1 codes in an order of bits that takes two shifts less (warpring/kernels/stream_layout.py).
// Compiled for sm_90a, not yet run on a GPU.
#pragma once
#include "tile_formats.cuh"

// The block scales of rows g and g + 8 as a pair of BF16, from two bytes that are exponent fields.
__device__ __forceinline__ uint32_t scale_word(uint32_t bytes) { return __byte_perm(bytes, 0, 0x4140) << 7; }

// Multiplies a pair of row g, or of row g + 8, by its half of the scale word.
template <bool kHigh>
__device__ __forceinline__ uint32_t scaled(uint32_t pair, uint32_t scales) {
    return kHigh ? mul_bf16x2_by_high(pair, scales) : mul_bf16x2_by_low(pair, scales);
}

// Four E4M3 codes of one row, in the bits of fields_e4m3().
template <bool kHigh>
__device__ __forceinline__ void stream_e4m3(uint32_t word, uint32_t scales, uint32_t& first, uint32_t& second) {
    first = scaled<kHigh>(word & 0x87f087f0u, scales);
    const uint32_t moved =
        ((word << 1) & 0x80008000u) | ((word << 7) & 0x07800780u) | ((word >> 7) & 0x00700070u);
    second = scaled<kHigh>(moved, scales);
}

// Eight E2M1 codes of one row: BF16 fields sign 15, exponent 8..7, fraction 6 of the pairs at left rotations of 0, 6, 10; of
// the last pair sign and the lower two bits at 12, the upper exponent bit at 4.
template <bool kHigh>
__device__ __forceinline__ void stream_e2m1(uint32_t word, uint32_t scales, uint32_t (&pairs)[4]) {
    constexpr uint32_t kMask = 0x81c081c0u;
    pairs[0] = scaled<kHigh>(word & kMask, scales);
    pairs[1] = scaled<kHigh>((word << 6) & kMask, scales);
    pairs[2] = scaled<kHigh>(__funnelshift_l(word, word, 10) & kMask, scales);
    const uint32_t moved = (__funnelshift_l(word, word, 12) & 0x80c080c0u) | ((word << 4) & 0x01000100u);
    pairs[3] = scaled<kHigh>(moved, scales);
}

__device__ __forceinline__ void stream_e2m1(uint2 w, uint32_t scales, Operands& out) {
    uint32_t pairs[4];
    stream_e2m1<false>(w.x, scales, pairs);
    out.a[0][0] = pairs[0], out.a[0][2] = pairs[1], out.a[1][0] = pairs[2], out.a[1][2] = pairs[3];
    stream_e2m1<true>(w.y, scales, pairs);
    out.a[0][1] = pairs[0], out.a[0][3] = pairs[1], out.a[1][1] = pairs[2], out.a[1][3] = pairs[3];
}

struct StreamMxfp8 : TileMxfp8 {
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        const uint32_t scales = scale_word(raw.scales);
        stream_e4m3<false>(raw.codes.x, scales, out.a[0][0], out.a[0][2]);
        stream_e4m3<false>(raw.codes.y, scales, out.a[1][0], out.a[1][2]);
        stream_e4m3<true>(raw.codes.z, scales, out.a[0][1], out.a[0][3]);
        stream_e4m3<true>(raw.codes.w, scales, out.a[1][1], out.a[1][3]);
    }
};

struct StreamMxfp4 : TileMxfp4 {
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        stream_e2m1(raw.codes, scale_word(raw.scales), out);
    }
};

struct StreamNvfp4 : TileNvfp4 {
    static __device__ __forceinline__ void unpack(const Raw& raw, Operands& out) {
        constexpr float kUnit = 0x1p118f;
        const uint32_t halves = cvt_e4m3x2_f16x2_low(raw.scales);
        stream_e2m1(raw.codes, cvt_f32_bf16x2(cvt_f16_f32_high(halves) * kUnit, cvt_f16_f32_low(halves) * kUnit), out);
    }
};
