// partition_probe.cu   Where and when CTAs run: for each, its SM and the device's clock at its start and end.
#include "sync_ptx.cuh"

__device__ __forceinline__ uint32_t own_sm() {
    uint32_t sm;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(sm));
    return sm;
}

extern "C" __global__ void partition_probe(uint64_t* gmem_sm, uint64_t* gmem_start, uint64_t* gmem_end, uint64_t busy_ns) {
    if (threadIdx.x != 0) return;
    const uint64_t start = globaltimer_ns();
    while (globaltimer_ns() - start < busy_ns) {
    }
    gmem_sm[blockIdx.x] = own_sm();
    gmem_start[blockIdx.x] = start;
    gmem_end[blockIdx.x] = globaltimer_ns();
}
