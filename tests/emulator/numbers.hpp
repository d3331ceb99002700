// numbers.hpp   Small floating-point formats as the GPU converts them: round to nearest even, subnormals kept, bit for bit.
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

using Half = SmallFloat<5, 10, true>;
using BFloat16 = SmallFloat<8, 7, true>;
using E4M3 = SmallFloat<4, 3, false>;
using E5M2 = SmallFloat<5, 2, true>;

inline float bf16_to_float(uint32_t code) { return bits_as<float>(code << 16); }
inline float half_to_float(uint32_t code) { return float(Half::decode(code & 0xffffu)); }

// 256 values, decoded once.
inline float e4m3_to_float(uint32_t code) {
    struct Table {
        float values[256];
        Table() {
            for (uint32_t i = 0; i < 256; ++i) values[i] = float(E4M3::decode(i));
        }
    };
    static const Table table;
    return table.values[code & 0xffu];
}

}  // namespace cuda_on_cpu
