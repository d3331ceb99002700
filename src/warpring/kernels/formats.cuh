// formats.cuh   One policy a number format: how a 16-byte chunk of codes, its scales and 16-byte pieces of BF16
// activations make a partial dot product in FP32.
//
// A policy has
//   kWeightsPerChunk   weights in 16 bytes of codes
//   kCodeBits          bits of a code
//   Scale              what it keeps of a chunk's scales in registers
//   scale_matrix_bytes, scale_offset   where the scales of a matrix and of its row lie
//   scale_at(...)      requests the scales of a chunk (issued with the weights, before any wait)
//   dot(w, x, scale)   scale * sum_i w[i] * x[i], products and sums in FP32, in index order
//   matrix_scale(...)  what multiplies every dot product of one matrix (1 where chunks carry all of the scale)
//
// Layouts are those of warpring/formats: scales [.., rows, blocks of columns], row-major.
#pragma once
#include "ptx.cuh"

// Activations of one chunk: up to 32 BF16 values as packed words, low half first.
__device__ __forceinline__ float bf16_low(uint32_t pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float bf16_high(uint32_t pair) { return __uint_as_float(pair & 0xffff0000u); }

__device__ __forceinline__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// UE8M0: 2^(code - 127). Code 0 is the subnormal 2^-127, code 255 is NaN.
__device__ __forceinline__ float e8m0_value(uint32_t code) {
    const uint32_t bits = code == 0 ? 0x00400000u : code == 255 ? 0x7fc00000u : code << 23;
    return __uint_as_float(bits);
}

// Partial dot of one 4-byte word of E4M3 codes with two words of BF16 activations.
__device__ __forceinline__ float dot_e4m3x4(uint32_t codes, uint32_t x01, uint32_t x23, float sum) {
    const uint32_t w01 = cvt_e4m3x2_f16x2(codes);
    const uint32_t w23 = cvt_e4m3x2_f16x2(codes >> 16);
    sum = fmaf(cvt_f16_f32_low(w01), bf16_low(x01), sum);
    sum = fmaf(cvt_f16_f32_high(w01), bf16_high(x01), sum);
    sum = fmaf(cvt_f16_f32_low(w23), bf16_low(x23), sum);
    return fmaf(cvt_f16_f32_high(w23), bf16_high(x23), sum);
}

__device__ __forceinline__ float dot_e4m3x16(uint4 w, const uint4 (&x)[2]) {
    float sum = dot_e4m3x4(w.x, x[0].x, x[0].y, 0.f);
    sum = dot_e4m3x4(w.y, x[0].z, x[0].w, sum);
    sum = dot_e4m3x4(w.z, x[1].x, x[1].y, sum);
    return dot_e4m3x4(w.w, x[1].z, x[1].w, sum);
}

// Partial dot of eight E2M1 codes (one word, even column in the low nibble) with four words of BF16 activations.
// A code s|ee|m moved to FP16's sign, low exponent bits and top mantissa bit is its value times 2^-14, subnormal
// included; the policies fold 2^14 into the scale.
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

struct Bf16 {
    static constexpr int kWeightsPerChunk = 8, kCodeBits = 16;
    struct Scale {};
    static __device__ constexpr int64_t scale_matrix_bytes(int, int) { return 0; }
    static __device__ __forceinline__ int64_t scale_offset(int, int) { return 0; }
    static __device__ __forceinline__ Scale scale_at(const uint8_t*, int) { return {}; }
    static __device__ __forceinline__ float matrix_scale(const float*) { return 1.f; }
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[1], Scale) {
        const uint32_t* a = &w.x;
        const uint32_t* b = &x[0].x;
        float sum = 0.f;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum = fmaf(bf16_low(a[i]), bf16_low(b[i]), sum);
            sum = fmaf(bf16_high(a[i]), bf16_high(b[i]), sum);
        }
        return sum;
    }
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
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[2], Scale scale) {
        return scale * dot_e4m3x16(w, x);
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
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[2], Scale scale) {
        return scale * dot_e4m3x16(w, x);
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
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[2], Scale scale) {
        return e8m0_value(scale) * dot_e4m3x16(w, x);
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
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[4], Scale scale) {
        float sum = dot_e2m1x8(w.x, x[0], 0.f);
        sum = dot_e2m1x8(w.y, x[1], sum);
        sum = dot_e2m1x8(w.z, x[2], sum);
        sum = dot_e2m1x8(w.w, x[3], sum);
        return e8m0_value(scale) * sum;
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
    static __device__ __forceinline__ float dot(uint4 w, const uint4 (&x)[4], Scale scale) {
        const uint32_t scales = cvt_e4m3x2_f16x2(scale);
        const float first = dot_e2m1x8(w.y, x[1], dot_e2m1x8(w.x, x[0], 0.f));
        const float second = dot_e2m1x8(w.w, x[3], dot_e2m1x8(w.z, x[2], 0.f));
        return fmaf(cvt_f16_f32_high(scales), second, cvt_f16_f32_low(scales) * first);
    }
};
