// numbers.hpp   Small floating-point formats as the GPU converts them: round to nearest even, subnormals kept, bit for
// bit.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

namespace cuda_on_cpu {

template <class To, class From>
inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "a change of type, not of bits");
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// A format with a sign, an exponent of `exponent_bits` and `fraction_bits`. With infinities the highest exponent holds
// them and NaN, as in IEEE 754; without, only the code of all ones is NaN (E4M3).
template <int exponent_bits, int fraction_bits, bool has_infinity>
struct SmallFloat {
    static constexpr int kBits = 1 + exponent_bits + fraction_bits;
    static constexpr int kMinExponent = 2 - (1 << (exponent_bits - 1));
    static constexpr uint32_t kSign = 1u << (kBits - 1);
    static constexpr uint32_t kNan = kSign - 1;  // the NaN that conversions give
    static constexpr uint32_t kInfinity = ((1u << exponent_bits) - 1) << fraction_bits;
    static constexpr uint32_t kLargest = has_infinity ? kInfinity - 1 : kNan - 1;

    static double decode(uint32_t code) {
        const uint32_t magnitude = code & (kSign - 1);
        const double sign = code & kSign ? -1.0 : 1.0;
        if (has_infinity ? magnitude > kInfinity : magnitude == kNan) return std::numeric_limits<double>::quiet_NaN();
        if (has_infinity && magnitude == kInfinity) return sign * std::numeric_limits<double>::infinity();
        const int exponent = int(magnitude >> fraction_bits);
        const int fraction = int(magnitude & ((1u << fraction_bits) - 1));
        if (exponent == 0) return sign * std::ldexp(fraction, kMinExponent - fraction_bits);
        return sign * std::ldexp(fraction + (1 << fraction_bits), exponent - 1 + kMinExponent - fraction_bits);
    }

    // decode() from a table.
    static float value(uint32_t code) {
        struct Table {
            float values[1 << kBits];
            Table() {
                for (uint32_t i = 0; i < 1u << kBits; ++i) values[i] = float(decode(i));
            }
        };
        static const Table table;
        return table.values[code];
    }

    // What is beyond the largest value becomes infinity, or with `saturate` the largest value.
    static uint32_t encode(double value, bool saturate = false) {
        if (std::isnan(value)) return kNan;
        const uint32_t sign = std::signbit(value) ? kSign : 0;
        const uint32_t beyond = saturate ? kLargest : has_infinity ? kInfinity : kNan;
        value = std::fabs(value);
        if (std::isinf(value)) return sign | beyond;
        if (value == 0) return sign;
        const int exponent = std::max(std::ilogb(value), kMinExponent);
        // The code counts upwards through a binade and into the next, so a carry of the rounding needs no care.
        const double rounded = std::nearbyint(std::ldexp(value, fraction_bits - exponent));
        const double code = rounded + std::ldexp(double(exponent - kMinExponent), fraction_bits);
        return sign | (code > kLargest ? beyond : uint32_t(code));
    }
};

// value = significand * 2^exponent with |significand| in [1, 2), or below 1 at the format's lowest exponent.
inline int exponent_of(double value, int min_exponent) { return std::max(std::ilogb(value), min_exponent); }

// c + sum of a[i] * b[i] as Hopper's tensor cores form it: every term is cut off (towards zero) `fraction_bits` below
// the leading bit of the largest term's exponent, the sum is exact, and it is cut off again to `result_bits` of
// fraction. After measurements of Hopper in MMA-Sim (Microsoft, 2025): 25 and 23 bits for 16-bit operands, and for E4M3
// in mma.sync; 13 and 13 for E4M3 in wgmma.
inline float tensor_core_sum(const float* a, const float* b, int count, float c, int min_exponent, int fraction_bits,
                             int result_bits) {
    double plain = c;
    constexpr int kNone = -10000;
    int largest = c == 0 ? kNone : exponent_of(c, -126);
    for (int i = 0; i < count; ++i) {
        plain += double(a[i]) * b[i];
        if (a[i] != 0 && b[i] != 0)
            largest = std::max(largest, exponent_of(a[i], min_exponent) + exponent_of(b[i], min_exponent));
    }
    if (std::isnan(plain)) return bits_as<float>(0x7fffffffu);
    if (std::isinf(plain)) return float(plain);
    if (largest == kNone) return 0.f;
    const double scale = std::ldexp(1.0, fraction_bits - largest);
    double sum = std::trunc(c * scale);
    for (int i = 0; i < count; ++i) sum += std::trunc(double(a[i]) * b[i] * scale);
    sum /= scale;
    if (sum == 0) return 0.f;
    const double unit = std::ldexp(1.0, exponent_of(sum, -126) - result_bits);
    return float(std::trunc(sum / unit) * unit);
}

using Half = SmallFloat<5, 10, true>;
using BFloat16 = SmallFloat<8, 7, true>;
using E4M3 = SmallFloat<4, 3, false>;

inline float bf16_to_float(uint32_t code) { return bits_as<float>(code << 16); }
inline float half_to_float(uint32_t code) { return Half::value(code & 0xffffu); }
inline float e4m3_to_float(uint32_t code) { return E4M3::value(code & 0xffu); }

}  // namespace cuda_on_cpu
