// ep_wgmma_ptx.cuh   Warpgroup matrix products of sm_90a, A in registers, B in shared memory; what goes with them.
//
// A product is asynchronous: between warpgroup_commit() and the warpgroup_wait() that covers it, neither its sums nor
// its A registers may be read or written. warpgroup_arrive() comes before the first product that follows a change of
// either. hold() keeps the compiler from using sums before the wait that stands in the source.
#pragma once
#include "ptx.cuh"

// ---- products ------------------------------------------------------------------------------------------------------
//
// Lane l = 4 g + q of warp w (of 4) holds rows 16 w + g and 16 w + g + 8.
//   A, E4M3, 32 columns:  a0: row g, columns 4 q .. 4 q + 3;  a1: row g + 8;  a2, a3: the same rows, columns + 16
//   sums:                 d[4 j + i]: row g + 8 (i / 2), column 8 j + 2 q + i % 2
// d = a * b, or d += a * b with scale_d != 0.

#define WARPRING_SUMS4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])

template <int N>
__device__ __forceinline__ void wgmma_e4m3(float (&d)[N / 2], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3,
                                           uint64_t b_desc, int scale_d) {
    static_assert(N == 8 || N == 16 || N == 32 || N == 64, "columns of one product");
    if constexpr (N == 8) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %9, 0; wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3}, "
            "{%4, %5, %6, %7}, %8, p, 1, 1; }"
            : WARPRING_SUMS4(0)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 16) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %13, 0; wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7}, "
            "{%8, %9, %10, %11}, %12, p, 1, 1; }"
            : WARPRING_SUMS4(0), WARPRING_SUMS4(4)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else if constexpr (N == 32) {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %21, 0; wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, "
            "{%16, %17, %18, %19}, %20, p, 1, 1; }"
            : WARPRING_SUMS4(0), WARPRING_SUMS4(4), WARPRING_SUMS4(8), WARPRING_SUMS4(12)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    } else {
        asm volatile(
            "{ .reg .pred p; setp.ne.b32 p, %37, 0; wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
            "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15,"
            " %16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
            "{%32, %33, %34, %35}, %36, p, 1, 1; }"
            : WARPRING_SUMS4(0), WARPRING_SUMS4(4), WARPRING_SUMS4(8), WARPRING_SUMS4(12), WARPRING_SUMS4(16),
              WARPRING_SUMS4(20), WARPRING_SUMS4(24), WARPRING_SUMS4(28)
            : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b_desc), "r"(scale_d));
    }
}

#undef WARPRING_SUMS4

// Descriptor of an operand B without swizzle, K-major: 16 bytes of K of 8 columns are 128 contiguous bytes, the next 8
// columns follow, the next 16 bytes of K lie `columns` * 16 bytes on. Add n to go n units of 16 bytes further.
__device__ __forceinline__ uint64_t b_descriptor(uint32_t smem, int columns) {
    constexpr uint64_t kNextColumns = 128 >> 4;
    return uint64_t(smem >> 4) | uint64_t(columns) << 16 | kNextColumns << 32;
}

// Orders this warpgroup's writes to registers before the products that follow.
__device__ __forceinline__ void warpgroup_arrive() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
// Closes a group of products.
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
// Until at most `groups` groups are unfinished; the sums and A registers of the others are free again, B has been read.
template <int groups>
__device__ __forceinline__ void warpgroup_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(groups) : "memory");
}

// Keeps the compiler from moving uses of these sums to before this place.
template <int n>
__device__ __forceinline__ void hold(float (&registers)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}

// The same of integers: what is computed from them is computed behind this place, and not ahead of a loop around it, where it
// would take registers all the time.
template <int n>
__device__ __forceinline__ void hold(int32_t (&registers)[n]) {
#pragma unroll
    for (int i = 0; i < n; ++i) asm volatile("" : "+r"(registers[i]));
}

// Registers of this warpgroup's threads from here on; the CTA's warpgroups share what the launch gave them.
template <int count>
__device__ __forceinline__ void registers_more() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(count));
}
template <int count>
__device__ __forceinline__ void registers_fewer() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(count));
}

// v >> bits (1 to 31) by the multiplier: where logic is what a loop waits for, shifts are better off there.
__device__ __forceinline__ uint32_t multiplier_shift(uint32_t v, int bits) {
    uint32_t shifted;
    asm("mul.hi.u32 %0, %1, %2;" : "=r"(shifted) : "r"(v), "r"(1u << (32 - bits)));
    return shifted;
}

// ---- barriers and copies -------------------------------------------------------------------------------------------

// Until the phase of that parity has completed. The loop is in assembly: the compiler takes a C++ loop for a place
// where threads part, and runs the products behind it one at a time.
__device__ __forceinline__ void mbarrier_wait(uint32_t smem_barrier, uint32_t parity) {
    asm volatile(
        "{ .reg .pred p; again: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done; bra again; done: "
        "}" ::"r"(smem_barrier),
        "r"(parity)
        : "memory");
}

// One arrival, by the lanes that say so. Not a branch around an arrival, for the same reason.
__device__ __forceinline__ void mbarrier_arrive_if(uint32_t smem_barrier, bool arrives) {
    asm volatile(
        "{ .reg .pred p; setp.ne.b32 p, %1, 0; @p mbarrier.arrive.shared::cta.b64 _, [%0]; }" ::"r"(smem_barrier),
        "r"(int(arrives))
        : "memory");
}

// The same behind loads: `loaded` is made of what they gave. An arrival does not wait for loads that are under way, and a copy into
// what they read is of another proxy; the count, which is 1 whatever the value, cannot be known before that has come.
__device__ __forceinline__ void mbarrier_arrive_behind(uint32_t smem_barrier, bool arrives, uint32_t loaded) {
    asm volatile(
        "{ .reg .pred p; .reg .b32 n; setp.ne.b32 p, %1, 0; min.u32 n, %2, 1; max.u32 n, n, 1; "
        "@p mbarrier.arrive.shared::cta.b64 _, [%0], n; }" ::"r"(smem_barrier),
        "r"(int(arrives)), "r"(loaded)
        : "memory");
}

// A copy like bulk_copy() of bytes that nobody wants again soon: the first to leave L2.
__device__ __forceinline__ void bulk_copy_once(uint32_t smem_dst, const void* gmem_src, uint32_t bytes,
                                               uint32_t smem_barrier) {
    asm volatile(
        "{ .reg .b64 policy; createpolicy.fractional.L2::evict_first.b64 policy, 1.0;"
        " cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], "
        "policy; }" ::"r"(smem_dst),
        "l"(gmem_src), "r"(bytes), "r"(smem_barrier)
        : "memory");
}
