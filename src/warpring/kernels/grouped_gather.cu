// grouped_gather.cu   image[row of pair] = x[token of pair]   for all pairs of each token (see grouped_plan.cuh)
//
// Grid     (num_tokens, units / 128); a thread owns a unit, 16 bytes of a token's rows, 8 lanes a row's 128 bytes of a chunk
// Reads    x once from L2, in words of 4 bytes from L1
// Writes   2 bytes a column of every pair, in whole lines: a warp four of them at once
// Bound    L2, or HBM beyond its size
// Sync     waits for its predecessor, which wrote the places, with x in registers: the predecessor began behind those
//          that wrote x; publishes nothing
// Limits   hidden % 32 == 0; the last half chunk of an odd number of records stays unwritten
//
// Compile-time parameters (macros set by kernels/grouped_gemm.py): WARPRING_HIDDEN; those of grouped_plan.cuh.
#include "grouped_plan.cuh"

constexpr int kHidden = WARPRING_HIDDEN, kThreads = 128;
constexpr int kUnitColumns = kUnitBytes / 2, kUnits = kHidden / kUnitColumns;
constexpr int kChunkUnits = kChunkRowBytes / kUnitBytes, kRecordUnits = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_gather(const uint16_t* gmem_x, int64_t x_stride, int32_t num_slots, const PairPlace* gmem_places,
                   uint8_t* gmem_image) {
    const int token = blockIdx.x, unit = blockIdx.y * kThreads + threadIdx.x;
    if (unit >= kUnits) return;
    // Unit i of a record is word i of each of its four quarters. There before the kernel ahead began.
    const uint16_t* gmem_record = gmem_x + token * x_stride + unit / kRecordUnits * kRecordUnits * kUnitColumns;
    const uint32_t* gmem_words = reinterpret_cast<const uint32_t*>(gmem_record) + unit % kRecordUnits;
    const uint4 words = {gmem_words[0], gmem_words[4], gmem_words[8], gmem_words[12]};
    pdl_wait();
    pdl_launch_dependents();
    const int chunk = unit / kChunkUnits;
#pragma unroll 4
    for (int slot = 0; slot < num_slots; ++slot) {
        const uint4 place = ld_activations(gmem_places + int64_t(token) * num_slots + slot);
        const int row = int(place.x), first = int(place.y), count = int(place.z);
        if (row < 0) continue;
        uint8_t* gmem_chunk =
            gmem_image + int64_t(first) * image_row_bytes(kHidden) + int64_t(chunk) * count * kChunkRowBytes;
        *reinterpret_cast<uint4*>(gmem_chunk + unit_offset(row - first, unit % kChunkUnits)) = words;
    }
}
