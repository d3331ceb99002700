// ep_quantize.cuh   How FP32 values become operands: E4M3 with an FP32 scale, or FP16 with a power of two.
//
// role1 and role4 use it on tokens, role2 on the activations between its two GEMMs; expert_parallel/arithmetic.py is
// the same arithmetic in torch. A group of values is described by the bits of its largest magnitude: as integers, so
// that a NaN is larger than everything and stays.
#pragma once
#include "ptx.cuh"

__device__ __forceinline__ uint32_t magnitude_bits(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// What a group is multiplied by, and what gives its values back.
struct QuantScale {
    float multiplier, scale;
};

// E4M3: scale = amax / 448, 1 for a group of zeros, 2^-126 at least so that the multiplier is finite. NaN stays NaN.
__device__ __forceinline__ QuantScale e4m3_scale(uint32_t amax_bits) {
    const float scale = __fdiv_rn(__uint_as_float(amax_bits), 448.f);
    const float bounded = amax_bits == 0 ? 1.f : scale < 0x1p-126f ? 0x1p-126f : scale;
    return {__fdiv_rn(1.f, bounded), bounded};
}

// FP16: the power of two that brings the largest magnitude into [2^14, 2^15), 2^126 at most.
__device__ __forceinline__ QuantScale f16_scale(uint32_t amax_bits) {
    const uint32_t exponent = max(amax_bits >> 23, 15u);
    return {__uint_as_float((268u - exponent) << 23), __uint_as_float((exponent - 14u) << 23)};
}
