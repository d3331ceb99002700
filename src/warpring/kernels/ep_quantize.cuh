// ep_quantize.cuh   How FP32 values become operands: an E4M3 number each, or two whose sum it is, with an FP32 scale a group.
//
// role1 and role4 use it on tokens, role2 on the activations between its two GEMMs; expert_parallel/arithmetic.py is
// the same arithmetic in torch. A group of values is described by the bits of its largest magnitude: as integers, so
// that a NaN is larger than everything and stays.
#pragma once
#include "ep_common.cuh"

__device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// What a group is multiplied by, and what gives its values back.
struct QuantScale {
    float multiplier, scale;
};

// One number a value: scale = amax / 448, 1 for a group of zeros, 2^-126 at least so that the multiplier is finite. NaN
// stays NaN.
__device__ __forceinline__ QuantScale e4m3_scale(uint32_t amax_bits) {
    const float scale = __fdiv_rn(__uint_as_float(amax_bits), 448.f);
    const float bounded = amax_bits == 0 ? 1.f : scale < 0x1p-126f ? 0x1p-126f : scale;
    return {__fdiv_rn(1.f, bounded), bounded};
}

// Two numbers a value: the power of two that brings the largest magnitude into [2^7, 2^8), 2^126 at most, so that BF16
// values stay as they are if they are 2^-9 of it or more. Codes do not hold an infinity, so the scale does.
__device__ __forceinline__ QuantScale two_term_scale(uint32_t amax_bits) {
    const uint32_t exponent = max(amax_bits >> 23, 8u);
    return {__uint_as_float((261u - exponent) << 23),
            __uint_as_float(exponent == 255u ? amax_bits : (exponent - 7u) << 23)};
}

__device__ __forceinline__ QuantScale quant_scale(uint32_t amax_bits) {
    return kFp8 ? e4m3_scale(amax_bits) : two_term_scale(amax_bits);
}

// Two values, the first in the low byte, as their terms: the nearest E4M3 number, and that of what it leaves of the
// FP16 number next to the value.
struct E4m3Pair {
    uint16_t term[kTerms];
};
__device__ __forceinline__ E4m3Pair e4m3_pair(float second, float first) {
    E4m3Pair pair;
    if constexpr (kFp8) {
        pair.term[0] = cvt_f32x2_e4m3x2(second, first);
    } else {
        const uint32_t halves = cvt_f32_f16x2(second, first);
        pair.term[0] = cvt_f16x2_e4m3x2(halves);
        pair.term[1] = cvt_f16x2_e4m3x2(sub_f16x2(halves, cvt_e4m3x2_f16x2_low(pair.term[0])));
    }
    return pair;
}
