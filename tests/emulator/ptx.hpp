// ptx.hpp   The kernels' inline assembly in plain C++: every function of theirs that holds an asm statement has its
// twin here, by name. tests/emulator/sources.py takes the originals out.
#pragma once
#include "cuda_on_cpu.hpp"

namespace cuda_on_cpu {

// ---- global memory -------------------------------------------------------------------------------------------------

template <class T>
inline T& at_global(const void* gmem, const char* operation, Site site) {
    if (reinterpret_cast<size_t>(gmem) % sizeof(T))
        fail(site, "%s at %p: not a multiple of %zu", operation, gmem, sizeof(T));
    return *static_cast<T*>(const_cast<void*>(gmem));
}
template <class T>
inline T load_global(const void* gmem, const char* operation, Site site) {
    before_access(operation, site);
    return at_global<T>(gmem, operation, site);
}
template <class T>
inline void store_global(void* gmem, T value, const char* operation, Site site) {
    before_access(operation, site);
    at_global<T>(gmem, operation, site) = value;
}

inline uint4 ld_weights(const void* gmem, Site site = here()) { return load_global<uint4>(gmem, "ld_weights", site); }
inline uint2 ld_weights_64(const void* gmem, Site site = here()) {
    return load_global<uint2>(gmem, "ld_weights_64", site);
}
inline uint32_t ld_scale_u8(const void* gmem, Site site = here()) {
    return load_global<uint8_t>(gmem, "ld_scale_u8", site);
}
inline uint32_t ld_scale_u16(const void* gmem, Site site = here()) {
    return load_global<uint16_t>(gmem, "ld_scale_u16", site);
}
inline float ld_scale_f32(const void* gmem, Site site = here()) {
    return load_global<float>(gmem, "ld_scale_f32", site);
}
inline uint4 ld_activations(const void* gmem, Site site = here()) {
    return load_global<uint4>(gmem, "ld_activations", site);
}
inline int64_t ld_routing(const int32_t* gmem, Site site = here()) {
    return load_global<int32_t>(gmem, "ld_routing", site);
}
inline int64_t ld_routing(const int64_t* gmem, Site site = here()) {
    return load_global<int64_t>(gmem, "ld_routing", site);
}
inline float ld_routing(const float* gmem, Site site = here()) { return load_global<float>(gmem, "ld_routing", site); }
inline uint4 ld_global_v4(const void* gmem, Site site = here()) {
    return load_global<uint4>(gmem, "ld_global_v4", site);
}
inline void st_global_v4(void* gmem, uint4 value, Site site = here()) {
    store_global(gmem, value, "st_global_v4", site);
}

// ---- programmatic dependent launch ---------------------------------------------------------------------------------

inline void pdl_wait(Site site = here()) { pdl_wait_at(site); }
inline void pdl_launch_dependents(Site site = here()) { pdl_launch_dependents_at(site); }

// ---- conversions ---------------------------------------------------------------------------------------------------

inline uint32_t half_pair(uint32_t codes) {
    return Half::encode(E4M3::decode(codes & 0xffu)) | Half::encode(E4M3::decode(codes >> 8 & 0xffu)) << 16;
}
inline uint32_t cvt_e4m3x2_f16x2_low(uint32_t codes) { return half_pair(codes); }
inline uint32_t cvt_e4m3x2_f16x2_high(uint32_t codes) { return half_pair(codes >> 16); }
inline float cvt_f16_f32_low(uint32_t halves) { return half_to_float(halves); }
inline float cvt_f16_f32_high(uint32_t halves) { return half_to_float(halves >> 16); }
inline int opaque(int v) { return v; }
inline uint16_t cvt_f32_bf16(float v) { return uint16_t(BFloat16::encode(v)); }
inline uint32_t cvt_f32_bf16x2(float high, float low) { return BFloat16::encode(high) << 16 | BFloat16::encode(low); }
inline uint16_t cvt_f32_f16(float v) { return uint16_t(Half::encode(v)); }
inline uint32_t cvt_f32_f16x2(float high, float low) { return Half::encode(high) << 16 | Half::encode(low); }
inline uint16_t cvt_f32x2_e4m3x2(float high, float low) {
    return uint16_t(E4M3::encode(high, true) << 8 | E4M3::encode(low, true));
}
inline uint16_t cvt_f16x2_e4m3x2(uint32_t halves) {
    return cvt_f32x2_e4m3x2(half_to_float(halves >> 16), half_to_float(halves));
}
inline uint32_t sub_f16x2(uint32_t a, uint32_t b) {
    return cvt_f32_f16x2(half_to_float(a >> 16) - half_to_float(b >> 16), half_to_float(a) - half_to_float(b));
}
inline uint32_t mul_bf16x2(uint32_t a, uint32_t b) {
    const auto product = [&](int shift) {
        return BFloat16::encode(double(bf16_to_float(a >> shift & 0xffffu)) * bf16_to_float(b >> shift & 0xffffu))
               << shift;
    };
    return product(0) | product(16);
}
inline uint32_t mul_bf16x2_by_low(uint32_t a, uint32_t b) { return mul_bf16x2(a, (b & 0xffffu) * 0x10001u); }
inline uint32_t mul_bf16x2_by_high(uint32_t a, uint32_t b) { return mul_bf16x2(a, (b >> 16) * 0x10001u); }

// ---- tensor cores of a warp ----------------------------------------------------------------------------------------

// d += a * b for one 16 x 8 tile; a register holds 32 / bits values, and lane 4 g + q has rows g and g + 8 of A, column
// g of B.
template <class Format, int depth>
inline void mma(float (&d)[4], const uint32_t (&words)[6], const char* operation, Site site) {
    const Gathered all = gather(0xffffffffu, operation, words, 6, true, site);
    constexpr int in_word = depth / 8;
    constexpr uint32_t mask = (1u << Format::kBits) - 1;
    const int g = current->lane / 4, q = current->lane % 4;
    const auto value = [&](int lane, int word, int k) {
        return Format::value((*all.slots)[lane][word] >> (k % in_word * Format::kBits) & mask);
    };
    for (int i = 0; i < 4; ++i) {
        float a[depth], b[depth];
        for (int k = 0; k < depth; ++k) {
            const int half = k / (depth / 2), lane = k % (depth / 2) / in_word;
            a[k] = value(g * 4 + lane, half * 2 + i / 2, k);
            b[k] = value((q * 2 + i % 2) * 4 + lane, 4 + half, k);
        }
        d[i] = tensor_core_sum(a, b, depth, d[i], Format::kMinExponent, 25, 23);
    }
}
#define MMA(name, format, depth)                                                                                  \
    inline void name(float (&d)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0, uint32_t b1, \
                     Site site = here()) {                                                                        \
        mma<format, depth>(d, {a0, a1, a2, a3, b0, b1}, #name, site);                                             \
    }
MMA(mma_bf16, BFloat16, 16)
MMA(mma_f16, Half, 16)
MMA(mma_e4m3, E4M3, 32)
#undef MMA

// Matrices of 8 rows of 16 bytes; lane i gives the address of row i % 8 of matrix i / 8 and gets word lane % 4 of row
// lane / 4 of each.
template <int matrices>
inline void load_matrices(uint32_t (&words)[matrices], uint32_t smem, bool transposed, const char* operation,
                          Site site) {
    const Gathered all = gather(0xffffffffu, operation, &smem, 1, true, site);
    const int row = current->lane / 4, word = current->lane % 4;
    for (int m = 0; m < matrices; ++m) {
        if (!transposed) {
            const uint32_t at = (*all.slots)[m * 8 + row][0];
            std::memcpy(&words[m], shared_pointer(at, 16, 16, operation, site) + word * 4, 4);
            continue;
        }
        for (int half = 0; half < 2; ++half) {
            const uint32_t at = (*all.slots)[m * 8 + word * 2 + half][0];
            uint16_t element;
            std::memcpy(&element, shared_pointer(at, 16, 16, operation, site) + row * 2, 2);
            words[m] = (half ? words[m] : 0) | uint32_t(element) << (16 * half);
        }
    }
}
#define LDMATRIX(name, count, transposed)                                           \
    inline void name(uint32_t (&words)[count], uint32_t smem, Site site = here()) { \
        load_matrices<count>(words, smem, transposed, #name, site);                 \
    }                                                                               \
    inline uint##count name(uint32_t smem, Site site = here()) {                    \
        uint32_t words[count];                                                      \
        load_matrices<count>(words, smem, transposed, #name, site);                 \
        return bits_as<uint##count>(words);                                         \
    }
LDMATRIX(ldmatrix_x4, 4, false)
LDMATRIX(ldmatrix_x2, 2, false)
LDMATRIX(ldmatrix_x4_trans, 4, true)
LDMATRIX(ldmatrix_x2_trans, 2, true)
#undef LDMATRIX

// ---- shared memory and bulk copies ---------------------------------------------------------------------------------

template <class T>
inline T load_shared(uint32_t smem, const char* operation, Site site) {
    before_access(operation, site);
    T value;
    std::memcpy(&value, shared_pointer(smem, sizeof(T), sizeof(T), operation, site), sizeof value);
    return value;
}
inline uint4 ld_shared_128(uint32_t smem, Site site = here()) {
    return load_shared<uint4>(smem, "ld_shared_128", site);
}
inline uint2 ld_shared_64(uint32_t smem, Site site = here()) { return load_shared<uint2>(smem, "ld_shared_64", site); }
inline uint32_t ld_shared_32(uint32_t smem, Site site = here()) {
    return load_shared<uint32_t>(smem, "ld_shared_32", site);
}
inline uint32_t ld_shared_u32(uint32_t smem, Site site = here()) {
    return load_shared<uint32_t>(smem, "ld_shared_u32", site);
}
inline void st_shared_u32(uint32_t smem, uint32_t value, Site site = here()) {
    before_access("st_shared_u32", site);
    memcpy(shared_pointer(smem, 4, 4, "st_shared_u32", site), &value, 4);
}
inline uint32_t ld_shared_u16(uint32_t smem, Site site = here()) {
    return load_shared<uint16_t>(smem, "ld_shared_u16", site);
}
inline void st_shared_128(uint32_t smem, uint4 value, Site site = here()) {
    std::memcpy(shared_pointer(smem, 16, 16, "st_shared_128", site), &value, 16);
}

inline void mbarrier_init(uint32_t smem_barrier, uint32_t arrivals, Site site = here()) {
    mbarrier_init_at(smem_barrier, arrivals, site);
}
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(uint32_t smem_barrier, Site site = here()) { mbarrier_arrive_at(smem_barrier, 1, 0, site); }
inline void mbarrier_arrive_if(uint32_t smem_barrier, bool arrives, Site site = here()) {
    if (arrives) mbarrier_arrive_at(smem_barrier, 1, 0, site);
}
inline void mbarrier_arrive_behind(uint32_t smem_barrier, bool arrives, uint32_t, Site site = here()) {
    if (arrives) mbarrier_arrive_at(smem_barrier, 1, 0, site);
}
inline void mbarrier_arrive_expect_tx(uint32_t smem_barrier, uint32_t bytes, Site site = here()) {
    mbarrier_arrive_at(smem_barrier, 1, bytes, site);
}
inline void bulk_load(uint32_t smem_dst, const void* gmem_src, uint32_t bytes, uint32_t smem_barrier,
                      Site site = here()) {
    mbarrier_arrive_at(smem_barrier, 1, bytes, site);
    bulk_load_at(smem_dst, gmem_src, bytes, smem_barrier, site);
}
inline bool mbarrier_try_wait(uint32_t smem_barrier, uint32_t parity, Site site = here()) {
    return mbarrier_wait_at(smem_barrier, parity, true, site);
}
inline void mbarrier_wait(uint32_t smem_barrier, uint32_t parity, Site site = here()) {
    while (!mbarrier_wait_at(smem_barrier, parity, true, site)) {
    }
}
inline bool mbarrier_test_wait(uint32_t smem_barrier, uint32_t parity, Site site = here()) {
    return mbarrier_wait_at(smem_barrier, parity, false, site);
}
inline void bulk_copy(uint32_t smem_dst, const void* gmem_src, uint32_t bytes, uint32_t smem_barrier,
                      Site site = here()) {
    bulk_load_at(smem_dst, gmem_src, bytes, smem_barrier, site);
}
inline void bulk_copy_once(uint32_t smem_dst, const void* gmem_src, uint32_t bytes, uint32_t smem_barrier,
                           Site site = here()) {
    bulk_load_at(smem_dst, gmem_src, bytes, smem_barrier, site);
}
inline void bulk_store(void* gmem_dst, uint32_t smem_src, uint32_t bytes, Site site = here()) {
    bulk_store_at(gmem_dst, smem_src, bytes, site);
}
inline void bulk_commit() { commit_copies(Copies::kBulkStores); }
template <int groups_left>
inline void bulk_wait_read(Site site = here()) {
    wait_for_copies(Copies::kBulkStores, groups_left, site);
}

inline void cp_async_16(uint32_t smem_dst, const void* gmem_src, Site site = here()) {
    lane_copy_at(smem_dst, gmem_src, 16, site);
}
inline void cp_async_arrive(uint32_t smem_barrier, Site site = here()) { lane_copies_arrive_at(smem_barrier, site); }
inline void cp_async_commit() { commit_copies(Copies::kLanes); }
template <int groups_left>
inline void cp_async_wait(Site site = here()) {
    wait_for_copies(Copies::kLanes, groups_left, site);
}

}  // namespace cuda_on_cpu
