// probe_wgmma.cu   d = c + a * b^T on the tensor cores of a warpgroup, with B in shared memory in the layouts its
// descriptor can say.
//
// Compile-time parameter: COLUMNS, 8 to 64. `mistake` leaves out one rule of the asynchronous products.
#include "sync_ptx.cuh"

__device__ __forceinline__ uint32_t word_of(const uint8_t* matrix, int row, int row_bytes, int byte) {
    return *reinterpret_cast<const uint32_t*>(matrix + row * row_bytes + byte);
}

// d += a [64][steps * 32 bytes] * b^T, b [COLUMNS][steps * 32 bytes]; steps == 4 fills rows of 128 bytes.
extern "C" __global__ void multiplies_warpgroup(const uint8_t* a, const uint8_t* b, const float* c, int32_t kind,
                                                int32_t swizzle, int32_t mistake, float* out) {
    constexpr int kSteps = 4, kRowBytes = kSteps * 32;
    extern __shared__ __align__(1024) uint8_t smem_b[];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, q = lane % 4, row = warp * 16 + g;
    const int atom_bytes = swizzle == 0 ? 16 : 256 >> swizzle;  // bytes of a row that lie together
    for (int i = threadIdx.x; i < COLUMNS * kRowBytes / 16; i += blockDim.x) {
        const int column = i / (kRowBytes / 16), byte = i % (kRowBytes / 16) * 16;
        const int atom = byte / atom_bytes, in_atom = byte % atom_bytes;
        int at = atom * COLUMNS * atom_bytes + column * atom_bytes + in_atom;
        if (swizzle) at ^= (at / 128 % (atom_bytes / 16)) * 16;
        *reinterpret_cast<uint4*>(smem_b + at) = *reinterpret_cast<const uint4*>(b + column * kRowBytes + byte);
    }
    __syncthreads();
    float d[COLUMNS / 2];
    for (int i = 0; i < COLUMNS / 2; ++i) d[i] = c[(row + i % 4 / 2 * 8) * COLUMNS + i / 4 * 8 + q * 2 + i % 2];
    if (mistake != 1) warpgroup_arrive();
    for (int step = 0; step < kSteps; ++step) {
        const uint32_t a0 = word_of(a, row, kRowBytes, step * 32 + q * 4),
                       a1 = word_of(a, row + 8, kRowBytes, step * 32 + q * 4);
        const uint32_t a2 = word_of(a, row, kRowBytes, step * 32 + 16 + q * 4),
                       a3 = word_of(a, row + 8, kRowBytes, step * 32 + 16 + q * 4);
        const int byte = step * 32;
        const uint32_t start = smem_address(smem_b) + byte / atom_bytes * COLUMNS * atom_bytes + byte % atom_bytes;
        const uint32_t leading = swizzle ? 16 : COLUMNS * 16, stride = 8 * atom_bytes;
        const uint64_t descriptor =
            uint64_t(start >> 4) | uint64_t(leading >> 4) << 16 | uint64_t(stride >> 4) << 32 | uint64_t(swizzle) << 62;
        if (kind == 0) wgmma_bf16<COLUMNS>(d, a0, a1, a2, a3, descriptor, 1);
        if (kind == 1) wgmma_f16<COLUMNS>(d, a0, a1, a2, a3, descriptor, 1);
        if (kind == 2) wgmma_e4m3<COLUMNS>(d, a0, a1, a2, a3, descriptor, step > 0 || mistake != 4);
    }
    warpgroup_commit();
    if (mistake == 3) *reinterpret_cast<uint4*>(smem_b + threadIdx.x % 8 * 16) = uint4{};
    if (mistake != 2) warpgroup_wait<0>();
    for (int i = 0; i < COLUMNS / 2; ++i) out[(row + i % 4 / 2 * 8) * COLUMNS + i / 4 * 8 + q * 2 + i % 2] = d[i];
}
