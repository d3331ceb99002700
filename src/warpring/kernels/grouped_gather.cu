// grouped_gather.cu   image[row of pair] = x[token of pair]   for all pairs of each token (see grouped_plan.cuh)
//
// Grid     (num_tokens, records / 64); a thread owns a record, 32 columns of a token
// Reads    x once
// Writes   2 bytes a column of every pair
// Bound    L2, or HBM beyond its size
// Sync     waits for its predecessor, which wrote the places, with x in registers: the predecessor began behind those
//          that wrote x; publishes nothing
// Limits   hidden % 32 == 0; the last half chunk of an odd number of records stays unwritten
//
// Compile-time parameters (macros set by kernels/grouped_gemm.py): WARPRING_HIDDEN; those of grouped_plan.cuh.
#include "grouped_plan.cuh"

constexpr int kHidden = WARPRING_HIDDEN, kRecords = kHidden / 32, kThreads = 64;

extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_gather(const uint16_t* gmem_x, int64_t x_stride, int32_t num_slots, const PairPlace* gmem_places,
                   uint8_t* gmem_image) {
    const int token = blockIdx.x, record = blockIdx.y * kThreads + threadIdx.x;
    if (record >= kRecords) return;
    // There before the kernel ahead began.
    const uint16_t* gmem_record = gmem_x + token * x_stride + record * 32;
    uint4 in[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) in[i] = ld_activations(gmem_record + 8 * i);
    const uint4 out[4] = {{in[0].x, in[1].x, in[2].x, in[3].x},
                          {in[0].y, in[1].y, in[2].y, in[3].y},
                          {in[0].z, in[1].z, in[2].z, in[3].z},
                          {in[0].w, in[1].w, in[2].w, in[3].w}};
    pdl_wait();
    pdl_launch_dependents();
    const int chunk = record / 2, first_unit = record % 2 * 4;
#pragma unroll 4
    for (int slot = 0; slot < num_slots; ++slot) {
        const uint4 place = ld_activations(gmem_places + int64_t(token) * num_slots + slot);
        const int row = int(place.x), first = int(place.y), count = int(place.z);
        if (row < 0) continue;
        uint8_t* gmem_chunk =
            gmem_image + int64_t(first) * image_row_bytes(kHidden) + int64_t(chunk) * count * kChunkRowBytes;
#pragma unroll
        for (int i = 0; i < 4; ++i)
            *reinterpret_cast<uint4*>(gmem_chunk + unit_offset(row - first, first_unit + i)) = out[i];
    }
}
