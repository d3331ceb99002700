// sync_ptx.hpp   Flags between CTAs and GPUs, fences, clocks, named barriers; warpgroup matrix products.
//
// All threads of a run share one thread of the system, so every access is atomic and in order already. Each of these
// lets other threads run first: what a flag guards is then read or written at any moment that the real machine may
// choose.
#pragma once
#include "ptx.hpp"

namespace cuda_on_cpu {

#define FLAG_LOAD(name, T, Pointer)                               \
    inline T name(const Pointer* gmem_flag, Site site = here()) { \
        poll(#name, site);                                        \
        return at_global<T>(gmem_flag, #name, site);              \
    }
FLAG_LOAD(ld_acquire_sys_u32, uint32_t, uint32_t)
FLAG_LOAD(ld_acquire_sys_u64, uint64_t, uint64_t)
FLAG_LOAD(ld_acquire_gpu_u32, uint32_t, uint32_t)
FLAG_LOAD(ld_acquire_gpu_u64, uint64_t, uint64_t)
FLAG_LOAD(ld_relaxed_sys_u32, uint32_t, uint32_t)
FLAG_LOAD(ld_relaxed_sys_u64, uint64_t, uint64_t)
FLAG_LOAD(ld_relaxed_gpu_u32, uint32_t, uint32_t)
FLAG_LOAD(ld_relaxed_gpu_u64, uint64_t, uint64_t)
FLAG_LOAD(ld_relaxed_sys_b128, ulonglong2, void)
FLAG_LOAD(ld_relaxed_gpu_b128, ulonglong2, void)
#undef FLAG_LOAD

#define FLAG_STORE(name, T, Pointer)                                    \
    inline void name(Pointer* gmem_flag, T value, Site site = here()) { \
        poll(#name, site, true);                                        \
        at_global<T>(gmem_flag, #name, site) = value;                   \
    }
FLAG_STORE(st_release_sys_u32, uint32_t, uint32_t)
FLAG_STORE(st_release_sys_u64, uint64_t, uint64_t)
FLAG_STORE(st_release_gpu_u32, uint32_t, uint32_t)
FLAG_STORE(st_release_gpu_u64, uint64_t, uint64_t)
FLAG_STORE(st_relaxed_sys_b128, ulonglong2, void)
FLAG_STORE(st_relaxed_gpu_b128, ulonglong2, void)
#undef FLAG_STORE

#define FLAG_UPDATE(name, result, T, expression)                    \
    inline result name(T* gmem_flag, T value, Site site = here()) { \
        poll(#name, site, true);                                    \
        T& flag = at_global<T>(gmem_flag, #name, site);             \
        const T old = flag;                                         \
        flag = T(expression);                                       \
        return result(old);                                         \
    }
FLAG_UPDATE(red_add_release_gpu_u32, void, uint32_t, old + value)
FLAG_UPDATE(red_add_release_sys_u32, void, uint32_t, old + value)
FLAG_UPDATE(red_add_release_gpu_u64, void, uint64_t, old + value)
FLAG_UPDATE(red_add_release_sys_u64, void, uint64_t, old + value)
FLAG_UPDATE(red_or_release_gpu_u64, void, uint64_t, old | value)
FLAG_UPDATE(red_xor_release_gpu_u64, void, uint64_t, old ^ value)
FLAG_UPDATE(atom_add_acq_rel_gpu_u32, uint32_t, uint32_t, old + value)
FLAG_UPDATE(atom_add_relaxed_gpu_u32, uint32_t, uint32_t, old + value)
FLAG_UPDATE(atom_add_acq_rel_sys_u32, uint32_t, uint32_t, old + value)
#undef FLAG_UPDATE
inline uint32_t atom_cas_relaxed_gpu_u32(uint32_t* gmem, uint32_t expected, uint32_t desired, Site site = here()) {
    poll("atom_cas_relaxed_gpu_u32", site, true);
    return atomicCAS(gmem, expected, desired);
}

inline void fence_acq_rel_sys() {}
inline void fence_acq_rel_gpu() {}
inline void fence_proxy_async_global() {}
inline void fence_proxy_async_shared() {}
inline uint64_t globaltimer_ns(Site site = here()) {
    poll("globaltimer_ns", site);
    return clock_ns();
}
inline uint32_t smid() { return resident_slot(); }
inline void nanosleep(uint32_t, Site site = here()) { poll("nanosleep", site); }

inline void named_barrier_sync(int id, int threads, Site site = here()) {
    barrier(id, threads, true, false, "named_barrier_sync", site);
}
inline void named_barrier_arrive(int id, int threads, Site site = here()) {
    barrier(id, threads, false, false, "named_barrier_arrive", site);
}

// ---- warpgroups: d += a * b, 64 rows x N columns, A in registers, B in shared memory -------------------------------

inline void warpgroup_arrive(Site site = here()) { wgmma_fence_at(site); }
inline void warpgroup_commit(Site site = here()) { wgmma_commit_at(site); }
template <int groups_left>
inline void warpgroup_wait(Site site = here()) {
    wgmma_wait_at(groups_left, site);
}

inline uint32_t multiplier_shift(uint32_t v, int bits) { return v >> bits; }

// Registers are the compiler's here.
template <class T, int count>
inline void hold(T (&)[count]) {}
template <int count>
inline void registers_more(Site site = here()) {
    gather(0xffffffffu, "registers_more", nullptr, 0, true, site);
}
template <int count>
inline void registers_fewer(Site site = here()) {
    gather(0xffffffffu, "registers_fewer", nullptr, 0, true, site);
}

template <int N>
inline void wgmma_e4m3(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b_desc,
                       int scale_d, Site site = here()) {
    wgmma_at(d, N, {a0, a1, a2, a3}, b_desc, scale_d, Operand::kE4M3, site);
}
template <int N>
inline void wgmma_f16(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b_desc,
                      int scale_d, Site site = here()) {
    wgmma_at(d, N, {a0, a1, a2, a3}, b_desc, scale_d, Operand::kHalf, site);
}
template <int N>
inline void wgmma_bf16(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b_desc,
                       int scale_d, Site site = here()) {
    wgmma_at(d, N, {a0, a1, a2, a3}, b_desc, scale_d, Operand::kBFloat16, site);
}
#define WGMMA(name, N, operand)                                                                              \
    inline void name(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint64_t b_desc, \
                     int scale_d, Site site = here()) {                                                      \
        wgmma_at(d, N, {a0, a1, a2, a3}, b_desc, scale_d, operand, site);                                    \
    }
#define WGMMA_COLUMNS(N)                              \
    WGMMA(wgmma_m64n##N##k32_e4m3, N, Operand::kE4M3) \
    WGMMA(wgmma_m64n##N##k16_f16, N, Operand::kHalf)  \
    WGMMA(wgmma_m64n##N##k16_bf16, N, Operand::kBFloat16)
WGMMA_COLUMNS(8)
WGMMA_COLUMNS(16)
WGMMA_COLUMNS(32)
WGMMA_COLUMNS(64)
#undef WGMMA_COLUMNS
#undef WGMMA

}  // namespace cuda_on_cpu
