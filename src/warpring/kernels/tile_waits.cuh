// tile_waits.cuh   How the warps of a CTA of the tile kernels wait for each other.
#pragma once
#include "sync_ptx.cuh"
#include "tile_routing.cuh"

constexpr uint64_t kPatienceNs = 20'000'000'000;

// Waits for the phase of that parity. A phase that never completes traps rather than hangs.
__device__ __forceinline__ void wait(uint64_t& barrier, uint32_t parity) {
    const uint32_t smem_barrier = smem_address(&barrier);
    for (uint32_t tries = 0; !mbarrier_try_wait(smem_barrier, parity); ++tries)
        if (tries > (1u << 22)) __trap();
}

// The same for a warp of which one lane goes on to what lets the phase after that complete: no lane is left behind.
__device__ __forceinline__ void wait_warp(uint64_t& barrier, uint32_t parity) {
    wait(barrier, parity);
    __syncwarp();
}

// One arrival for the whole warp, after what its lanes read and wrote.
__device__ __forceinline__ void arrive_warp(uint64_t& barrier) {
    __syncwarp();
    if (threadIdx.x % kLanes == 0) mbarrier_arrive(smem_address(&barrier));
}

// Looks at a count of other CTAs until it is `value`. One that never comes traps rather than hangs.
__device__ __forceinline__ void wait_for_count(const uint32_t* gmem_count, uint32_t value) {
    uint64_t start = 0;
    for (uint32_t tries = 0; ld_acquire_gpu_u32(gmem_count) != value; ++tries) {
        if (tries % 1024 != 0) continue;
        const uint64_t now = globaltimer_ns();
        if (tries == 0) start = now;
        if (now - start > kPatienceNs) __trap();
    }
}

// A place in a ring of stages, and the parity of its barriers there.
template <int kStagesOfRing>
struct Turn {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void next() {
        if (++stage == kStagesOfRing) {
            stage = 0;
            parity ^= 1;
        }
    }
};
