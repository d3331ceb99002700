// formats.cuh   One policy a number format: how a 16-byte chunk of codes, its scales and 16-byte pieces of BF16
// activations make a partial dot product in FP32.
//
// A policy has
//   kWeightsPerChunk   weights in 16 bytes of codes
//   kCodeBits          bits of a code
//   Scale              what it keeps of a chunk's scales in registers
//   scale_matrix_bytes, scale_offset   where the scales of a matrix and of its row lie
//   scale_at(...)      requests the scales of a chunk (issued with the weights, before any wait)
//   dot(w, x, scale, r)  scale * sum_i w[i] * x[i], products and sums in FP32; x[p] is piece (p + r) % pieces
//   matrix_scale(...)  what multiplies every dot product of one matrix (1 where chunks carry all of the scale)
//
// Layouts are those of warpring/formats: scales [.., rows, blocks of columns], row-major.
#pragma once
#include "ptx.cuh"

// Activations of one chunk: up to 32 BF16 values as packed words, low half first.
__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// sum * 2^(code - 127), UE8M0. Code 0 is the subnormal 2^-127, whose bits are larger than 0 << 23 and smaller than 1 << 23.
// Code 255 is NaN, but its bits are those of infinity: infinity * 0 makes the NaN, and adds 0 everywhere else.
__device__ __forceinline__ float scale_e8m0(uint32_t code, float sum) {
    const float scale = __uint_as_float(max(code << 23, 0x00400000u));
    return fmaf(scale, sum, scale * 0.f);
}

// Every policy works on pieces: 8 weights that face 16 bytes of BF16 activations.

__device__ __forceinline__ float dot_bf16x8(const uint4& w, const uint4& x) {
    float sum = bf16_low(w.x) * bf16_low(x.x);
    sum = fmaf(bf16_high(w.x), bf16_high(x.x), sum);
    sum = fmaf(bf16_low(w.y), bf16_low(x.y), sum);
    sum = fmaf(bf16_high(w.y), bf16_high(x.y), sum);
    sum = fmaf(bf16_low(w.z), bf16_low(x.z), sum);
    sum = fmaf(bf16_high(w.z), bf16_high(x.z), sum);
    sum = fmaf(bf16_low(w.w), bf16_low(x.w), sum);
    return fmaf(bf16_high(w.w), bf16_high(x.w), sum);
}

// Four E4M3 codes with two words of activations.
__device__ __forceinline__ float dot_e4m3x4(uint32_t codes, uint32_t x01, uint32_t x23, float sum) {
    const uint32_t w01 = cvt_e4m3x2_f16x2_low(codes);
    const uint32_t w23 = cvt_e4m3x2_f16x2_high(codes);
    sum = fmaf(cvt_f16_f32_low(w01), bf16_low(x01), sum);
    sum = fmaf(cvt_f16_f32_high(w01), bf16_high(x01), sum);
    sum = fmaf(cvt_f16_f32_low(w23), bf16_low(x23), sum);
    return fmaf(cvt_f16_f32_high(w23), bf16_high(x23), sum);
}

__device__ __forceinline__ float dot_e4m3x8(uint32_t low, uint32_t high, const uint4& x, float sum) {
    return dot_e4m3x4(high, x.z, x.w, dot_e4m3x4(low, x.x, x.y, sum));
}

// Eight E2M1 codes, the even column in the low nibble. A code s|ee|m moved to FP16's sign, low exponent bits and top
// mantissa bit is its value times 2^-14, subnormal included; the policies give 2^14 back through matrix_scale.
constexpr float kE2m1Unit = 16384.f;
__device__ __forceinline__ float dot_e2m1x8(uint32_t codes, const uint4& x, float sum) {
    // Shifted left by 12 - 4j, nibble j tops the low half and nibble j + 4 the high half.
    uint32_t pairs[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) {
        const uint32_t top = codes << (12 - 4 * j);
        pairs[j] = (top & 0x80008000u) | ((top >> 3) & 0x0e000e00u);
    }
    sum = fmaf(cvt_f16_f32_low(pairs[0]), bf16_low(x.x), sum);
    sum = fmaf(cvt_f16_f32_low(pairs[1]), bf16_high(x.x), sum);
    sum = fmaf(cvt_f16_f32_low(pairs[2]), bf16_low(x.y), sum);
    sum = fmaf(cvt_f16_f32_low(pairs[3]), bf16_high(x.y), sum);
    sum = fmaf(cvt_f16_f32_high(pairs[0]), bf16_low(x.z), sum);
    sum = fmaf(cvt_f16_f32_high(pairs[1]), bf16_high(x.z), sum);
    sum = fmaf(cvt_f16_f32_high(pairs[2]), bf16_low(x.w), sum);
    return fmaf(cvt_f16_f32_high(pairs[3]), bf16_high(x.w), sum);
}

// Lanes read their pieces in rotated order: lane l starts at piece rotation(l). With all lanes at the same piece the
// addresses of eight neighbours are 32 or 64 bytes apart, and two or four of them meet in the same memory banks; rotated,
// they are 8 different 16-byte banks. Codes and scales are rotated likewise, in registers.
template <int kPieces>
__device__ __forceinline__ int rotation(int lane) {
    if constexpr (kPieces == 2) return (lane >> 2) & 1;
    if constexpr (kPieces == 4) return (lane >> 1) & 3;
    return 0;
}

__device__ __forceinline__ uint4 rotate_halves(uint4 w, int rotation) {
    return rotation ? uint4{w.z, w.w, w.x, w.y} : w;
}

__device__ __forceinline__ uint4 rotate_words(uint4 w, int rotation) {
    w = rotation & 1 ? uint4{w.y, w.z, w.w, w.x} : w;
    return rotation & 2 ? uint4{w.z, w.w, w.x, w.y} : w;
}

__device__ __forceinline__ float dot_e4m3x16(uint4 w, const uint4 (&x)[2], int rotation) {
    w = rotate_halves(w, rotation);
    return dot_e4m3x8(w.z, w.w, x[1], dot_e4m3x8(w.x, w.y, x[0], 0.f));
}

struct Bf16 {
    static constexpr int kWeightsPerChunk = 8, kCodeBits = 16;
    struct Scale {};
    static __device__ constexpr int64_t scale_matrix_bytes(int, int) { return 0; }
    static __device__ __forceinline__ int64_t scale_offset(int, int) { return 0; }
    static __device__ __forceinline__ Scale scale_at(const uint8_t*, int) { return {}; }
    static __device__ __forceinline__ float matrix_scale(const float*) { return 1.f; }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[1], Scale, int) { return dot_bf16x8(w, x[0]); }
};

// E4M3 with one FP32 scale a 128 x 128 block; blocks may overhang the matrix.
struct Fp8Block {
    static constexpr int kWeightsPerChunk = 16, kCodeBits = 8, kBlock = 128;
    using Scale = float;
    static __device__ constexpr int64_t scale_matrix_bytes(int rows, int cols) {
        return int64_t(ceil_div(rows, kBlock)) * ceil_div(cols, kBlock) * 4;
    }
    static __device__ __forceinline__ int64_t scale_offset(int row, int cols) {
        return int64_t(row / kBlock) * ceil_div(cols, kBlock) * 4;
    }
    static __device__ __forceinline__ Scale scale_at(const uint8_t* gmem_row, int chunk) {
        return ld_scale_f32(gmem_row + 4 * (chunk * kWeightsPerChunk / kBlock));
    }
    static __device__ __forceinline__ float matrix_scale(const float*) { return 1.f; }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[2], Scale scale, int rotation) {
        return scale * dot_e4m3x16(w, x, rotation);
    }
};

// E4M3 with one FP32 scale a row.
struct Fp8Channel {
    static constexpr int kWeightsPerChunk = 16, kCodeBits = 8;
    using Scale = float;
    static __device__ constexpr int64_t scale_matrix_bytes(int rows, int) { return int64_t(rows) * 4; }
    static __device__ __forceinline__ int64_t scale_offset(int row, int) { return int64_t(row) * 4; }
    static __device__ __forceinline__ Scale scale_at(const uint8_t* gmem_row, int) { return ld_scale_f32(gmem_row); }
    static __device__ __forceinline__ float matrix_scale(const float*) { return 1.f; }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[2], Scale scale, int rotation) {
        return scale * dot_e4m3x16(w, x, rotation);
    }
};

// E4M3 with one UE8M0 scale per 32 columns (OCP MX).
struct Mxfp8 {
    static constexpr int kWeightsPerChunk = 16, kCodeBits = 8, kBlock = 32;
    using Scale = uint32_t;
    static __device__ constexpr int64_t scale_matrix_bytes(int rows, int cols) { return int64_t(rows) * ceil_div(cols, kBlock); }
    static __device__ __forceinline__ int64_t scale_offset(int row, int cols) {
        return int64_t(row) * ceil_div(cols, kBlock);
    }
    static __device__ __forceinline__ Scale scale_at(const uint8_t* gmem_row, int chunk) {
        return ld_scale_u8(gmem_row + chunk * kWeightsPerChunk / kBlock);
    }
    static __device__ __forceinline__ float matrix_scale(const float*) { return 1.f; }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[2], Scale scale, int rotation) {
        return scale_e8m0(scale, dot_e4m3x16(w, x, rotation));
    }
};

// E2M1, two codes a byte, with one UE8M0 scale per 32 columns (OCP MX). A chunk is exactly one block.
struct Mxfp4 {
    static constexpr int kWeightsPerChunk = 32, kCodeBits = 4, kBlock = 32;
    using Scale = uint32_t;
    static __device__ constexpr int64_t scale_matrix_bytes(int rows, int cols) { return int64_t(rows) * ceil_div(cols, kBlock); }
    static __device__ __forceinline__ int64_t scale_offset(int row, int cols) {
        return int64_t(row) * ceil_div(cols, kBlock);
    }
    static __device__ __forceinline__ Scale scale_at(const uint8_t* gmem_row, int chunk) {
        return ld_scale_u8(gmem_row + chunk);
    }
    static __device__ __forceinline__ float matrix_scale(const float*) { return kE2m1Unit; }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[4], Scale scale, int rotation) {
        w = rotate_words(w, rotation);
        float sum = dot_e2m1x8(w.x, x[0], 0.f);
        sum = dot_e2m1x8(w.y, x[1], sum);
        sum = dot_e2m1x8(w.z, x[2], sum);
        sum = dot_e2m1x8(w.w, x[3], sum);
        return scale_e8m0(scale, sum);
    }
};

// E2M1 with one E4M3 scale per 16 columns and one FP32 scale a matrix. A chunk is two blocks.
struct Nvfp4 {
    static constexpr int kWeightsPerChunk = 32, kCodeBits = 4, kBlock = 16;
    using Scale = uint32_t;  // two E4M3 codes
    static __device__ constexpr int64_t scale_matrix_bytes(int rows, int cols) { return int64_t(rows) * ceil_div(cols, kBlock); }
    static __device__ __forceinline__ int64_t scale_offset(int row, int cols) {
        return int64_t(row) * ceil_div(cols, kBlock);
    }
    static __device__ __forceinline__ Scale scale_at(const uint8_t* gmem_row, int chunk) {
        return ld_scale_u16(gmem_row + chunk * 2);
    }
    static __device__ __forceinline__ float matrix_scale(const float* gmem_global) {
        return kE2m1Unit * ld_scale_f32(gmem_global);
    }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[4], Scale scale, int rotation) {
        w = rotate_words(w, rotation);
        // Pieces 0 and 1 have the first scale, 2 and 3 the second: with an odd rotation the two scales of a pair of
        // rotated pieces differ.
        const uint32_t scales = cvt_e4m3x2_f16x2_low(scale);
        const float s0 = cvt_f16_f32_low(scales), s1 = cvt_f16_f32_high(scales);
        const bool swapped = rotation >= 2, odd = rotation & 1;
        const float head = swapped ? s1 : s0, tail = swapped ? s0 : s1;
        float sum = head * dot_e2m1x8(w.x, x[0], 0.f);
        sum = fmaf(odd ? tail : head, dot_e2m1x8(w.y, x[1], 0.f), sum);
        sum = fmaf(tail, dot_e2m1x8(w.z, x[2], 0.f), sum);
        return fmaf(odd ? head : tail, dot_e2m1x8(w.w, x[3], 0.f), sum);
    }
};
