// two_terms.cuh   BF16 values as sums of two E4M3 numbers, with one power of two for many of them.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// What values are multiplied by, and what gives them back.
struct TermScale {
    float multiplier, scale;
};

// The power of two that brings the largest magnitude into [2^7, 2^8), 2^126 at most: BF16 values stay as they are if they
// are 2^-9 of it or more. Codes do not hold an infinity, so the scale does.
__device__ __forceinline__ TermScale two_term_scale(uint32_t largest_bits) {
    const uint32_t exponent = max(largest_bits >> 23, 8u);
    return {__uint_as_float((261u - exponent) << 23),
            __uint_as_float(exponent == 255u ? largest_bits : (exponent - 7u) << 23)};
}

// The terms of two values, the first in the low byte: the nearest E4M3 number, and that of what it leaves of the FP16
// number next to the value.
struct TermPair {
    uint16_t high, low;
};
__device__ __forceinline__ TermPair terms_of(float first, float second) {
    const uint32_t halves = cvt_f32_f16x2(second, first);
    const uint16_t high = cvt_f16x2_e4m3x2(halves);
    return {high, cvt_f16x2_e4m3x2(sub_f16x2(halves, cvt_e4m3x2_f16x2_low(high)))};
}
