// cuda_on_cpu.hpp   The part of CUDA C++ that kernels use, in plain C++. The kernel's sources are compiled inside
// namespace cuda_on_cpu::kernel, so that these names are found before those of the C library.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>

#include "numbers.hpp"
#include "runtime.hpp"

#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
#define threadIdx (::cuda_on_cpu::current->thread_idx)
#define blockIdx (::cuda_on_cpu::current->block_idx)
#define blockDim (::cuda_on_cpu::current->block_dim)
#define gridDim (::cuda_on_cpu::current->grid_dim)
#define warpSize 32
#define __CUDA_ARCH__ 900

namespace cuda_on_cpu {

#define VECTOR_TYPES(T, name, align2, align4)                  \
    struct alignas(align2) name##2 { T x, y; };                \
    struct alignas(align4) name##4 { T x, y, z, w; };          \
    inline name##2 make_##name##2(T x, T y) { return {x, y}; } \
    inline name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTOR_TYPES(int, int, 8, 16)
VECTOR_TYPES(unsigned, uint, 8, 16)
VECTOR_TYPES(float, float, 8, 16)
VECTOR_TYPES(short, short, 4, 8)
VECTOR_TYPES(unsigned short, ushort, 4, 8)
VECTOR_TYPES(unsigned char, uchar, 2, 4)
VECTOR_TYPES(long long, longlong, 16, 16)
VECTOR_TYPES(unsigned long long, ulonglong, 16, 16)
#undef VECTOR_TYPES
struct float3 {
    float x, y, z;
};

// ---- scalar functions ----------------------------------------------------------------------------------------------

template <class A, class B>
constexpr auto min(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmin(T(a), T(b));
    else
        return T(a) < T(b) ? T(a) : T(b);
}
template <class A, class B>
constexpr auto max(A a, B b) {
    using T = std::common_type_t<A, B>;
    if constexpr (std::is_floating_point_v<T>)
        return std::fmax(T(a), T(b));
    else
        return T(a) < T(b) ? T(b) : T(a);
}

inline uint32_t __float_as_uint(float v) { return bits_as<uint32_t>(v); }
inline int __float_as_int(float v) { return bits_as<int>(v); }
inline float __uint_as_float(uint32_t v) { return bits_as<float>(v); }
inline float __int_as_float(int v) { return bits_as<float>(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __logf(float v) { return std::log(v); }
inline float __log2f(float v) { return std::log2(v); }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f && std::isfinite(b) ? 0.f * a : a / b; }
inline float __frcp_rn(float v) { return 1.f / v; }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float rsqrtf(float v) { return 1.f / std::sqrt(v); }
inline float __saturatef(float v) { return v > 0.f ? (v < 1.f ? v : 1.f) : 0.f; }
inline int __float2int_rn(float v) { return int(std::nearbyint(v)); }
inline int __float2int_rz(float v) { return int(v); }
inline int __popc(uint32_t v) { return __builtin_popcount(v); }
inline int __popcll(uint64_t v) { return __builtin_popcountll(v); }
inline int __clz(uint32_t v) { return v ? __builtin_clz(v) : 32; }
inline int __clzll(uint64_t v) { return v ? __builtin_clzll(v) : 64; }
inline int __ffs(uint32_t v) { return __builtin_ffs(int(v)); }
inline int __ffsll(uint64_t v) { return __builtin_ffsll((long long)(v)); }
inline uint32_t __brev(uint32_t v) {
    uint32_t reversed = 0;
    for (int i = 0; i < 32; ++i) reversed |= ((v >> i) & 1u) << (31 - i);
    return reversed;
}
inline uint32_t __byte_perm(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = uint64_t(b) << 32 | a;
    uint32_t picked = 0;
    for (int i = 0; i < 4; ++i) {
        const uint32_t which = selector >> (4 * i);
        uint32_t byte = uint32_t(bytes >> (8 * (which & 7u))) & 0xffu;
        if (which & 8u) byte = byte & 0x80u ? 0xffu : 0;
        picked |= byte << (8 * i);
    }
    return picked;
}
inline uint32_t __funnelshift_l(uint32_t low, uint32_t high, uint32_t shift) {
    return uint32_t((uint64_t(high) << 32 | low) << (shift & 31u) >> 32);
}
inline uint32_t __funnelshift_r(uint32_t low, uint32_t high, uint32_t shift) {
    return uint32_t((uint64_t(high) << 32 | low) >> (shift & 31u));
}
template <class T>
inline T __ldg(const T* gmem) {
    return *gmem;
}

[[noreturn]] inline void __trap(Site site = here()) { fail(site, "__trap()"); }
inline size_t __cvta_generic_to_shared(const void* smem, Site site = here()) { return shared_address(smem, site); }
inline void __nanosleep(unsigned, Site site = here()) { poll("__nanosleep", site); }

// ---- warps ---------------------------------------------------------------------------------------------------------

inline void __syncwarp(uint32_t mask = 0xffffffffu, Site site = here()) {
    gather(mask, "__syncwarp", nullptr, 0, false, site);
}

template <class T>
inline T shuffle(uint32_t mask, T value, int source, const char* operation, Site site) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "shuffles move 4 or 8 bytes");
    uint32_t words[2] = {};
    std::memcpy(words, &value, sizeof value);
    const Gathered all = gather(mask, operation, words, 2, false, site);
    if (!(all.present >> source & 1u)) fail(site, "%s reads lane %d, which does not take part", operation, source);
    std::memcpy(&value, (*all.slots)[source], sizeof value);
    return value;
}
template <class T>
inline T __shfl_sync(uint32_t mask, T value, int source, int width = 32, Site site = here()) {
    const int lane = current->lane;
    return shuffle(mask, value, (lane & -width) | (source & (width - 1)), "__shfl_sync", site);
}
template <class T>
inline T __shfl_up_sync(uint32_t mask, T value, unsigned delta, int width = 32, Site site = here()) {
    const int lane = current->lane, source = lane - int(delta);
    return shuffle(mask, value, source < (lane & -width) ? lane : source, "__shfl_up_sync", site);
}
template <class T>
inline T __shfl_down_sync(uint32_t mask, T value, unsigned delta, int width = 32, Site site = here()) {
    const int lane = current->lane, source = lane + int(delta);
    return shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, "__shfl_down_sync", site);
}
template <class T>
inline T __shfl_xor_sync(uint32_t mask, T value, int lanes, int width = 32, Site site = here()) {
    const int lane = current->lane, source = lane ^ lanes;
    return shuffle(mask, value, source > (lane | (width - 1)) ? lane : source, "__shfl_xor_sync", site);
}

inline uint32_t vote(uint32_t mask, int predicate, const char* operation, uint32_t& present, Site site) {
    const uint32_t word = predicate != 0;
    const Gathered all = gather(mask, operation, &word, 1, false, site);
    uint32_t votes = 0;
    for (int lane = 0; lane < 32; ++lane)
        if (all.present >> lane & 1u) votes |= (*all.slots)[lane][0] << lane;
    present = all.present;
    return votes;
}
inline uint32_t __ballot_sync(uint32_t mask, int predicate, Site site = here()) {
    uint32_t present;
    return vote(mask, predicate, "__ballot_sync", present, site);
}
inline int __any_sync(uint32_t mask, int predicate, Site site = here()) {
    uint32_t present;
    return vote(mask, predicate, "__any_sync", present, site) != 0;
}
inline int __all_sync(uint32_t mask, int predicate, Site site = here()) {
    uint32_t present;
    const uint32_t votes = vote(mask, predicate, "__all_sync", present, site);
    return votes == present;
}
template <class T>
inline uint32_t __match_any_sync(uint32_t mask, T value, Site site = here()) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "matches compare 4 or 8 bytes");
    uint32_t words[2] = {};
    std::memcpy(words, &value, sizeof value);
    const Gathered all = gather(mask, "__match_any_sync", words, 2, false, site);
    uint32_t same = 0;
    for (int lane = 0; lane < 32; ++lane)
        if ((all.present >> lane & 1u) && std::memcmp((*all.slots)[lane], words, sizeof words) == 0) same |= 1u << lane;
    return same;
}

template <class T, class Combine>
inline T reduce(uint32_t mask, T value, Combine combine, const char* operation, Site site) {
    static_assert(std::is_integral_v<T> && sizeof(T) == 4, "warps reduce 32-bit integers");
    const uint32_t word = bits_as<uint32_t>(value);
    const Gathered all = gather(mask, operation, &word, 1, false, site);
    bool first = true;
    T result = value;
    for (int lane = 0; lane < 32; ++lane) {
        if (!(all.present >> lane & 1u)) continue;
        const T other = bits_as<T>((*all.slots)[lane][0]);
        result = first ? other : combine(result, other);
        first = false;
    }
    return result;
}
#define WARP_REDUCTION(name, expression)                                                                     \
    template <class T>                                                                                       \
    inline T __reduce_##name##_sync(uint32_t mask, T value, Site site = here()) {                            \
        return reduce(mask, value, [](T a, T b) { return T(expression); }, "__reduce_" #name "_sync", site); \
    }
WARP_REDUCTION(add, uint32_t(a) + uint32_t(b))
WARP_REDUCTION(min, a < b ? a : b)
WARP_REDUCTION(max, a < b ? b : a)
WARP_REDUCTION(and, a& b)
WARP_REDUCTION(or, a | b)
WARP_REDUCTION(xor, a ^ b)
#undef WARP_REDUCTION

// ---- the CTA -------------------------------------------------------------------------------------------------------

inline void __syncthreads(Site site = here()) { barrier(0, 0, true, false, "__syncthreads", site); }
inline int __syncthreads_count(int predicate, Site site = here()) {
    return barrier(0, 0, true, predicate != 0, "__syncthreads_count", site);
}
inline int __syncthreads_or(int predicate, Site site = here()) {
    return barrier(0, 0, true, predicate != 0, "__syncthreads_or", site) != 0;
}
inline int __syncthreads_and(int predicate, Site site = here()) {
    return barrier(0, 0, true, predicate == 0, "__syncthreads_and", site) == 0;
}

// ---- atomics and fences: threads are fibers of one thread of the system, so every access is atomic and ordered
// -------

template <class T>
struct Same {
    using type = T;
};
#define ATOMIC(name, expression)                                      \
    template <class T>                                                \
    inline T atomic##name(T* address, typename Same<T>::type value) { \
        const T old = *address;                                       \
        *address = T(expression);                                     \
        return old;                                                   \
    }
ATOMIC(Add, old + value)
ATOMIC(Sub, old - value)
ATOMIC(Min, old < value ? old : value)
ATOMIC(Max, old < value ? value : old)
ATOMIC(Exch, value)
ATOMIC(And, old& value)
ATOMIC(Or, old | value)
ATOMIC(Xor, old ^ value)
#undef ATOMIC
template <class T>
inline T atomicCAS(T* address, typename Same<T>::type compare, typename Same<T>::type value) {
    const T old = *address;
    if (old == compare) *address = value;
    return old;
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}

}  // namespace cuda_on_cpu
