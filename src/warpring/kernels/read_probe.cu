// read_probe.cu   The read peak: every byte of a buffer once, next to nothing written.
//
// Grid     any number of CTAs of 256 threads; a CTA takes tiles of 32 KB in turns with all others
// Reads    num_tiles * 32 KB, 8 loads of 16 bytes in flight a thread, as the warp kernels load weights
// Bound    HBM; the buffer must be far larger than L2
// Sync     none
// Limits   the buffer is 16-byte aligned; what does not fill a tile is not read
#include "ptx.cuh"

constexpr int kThreads = 256;
constexpr int kInFlight = 8;
constexpr int kCtasPerSm = 6;
constexpr uint32_t kRare = 0x9e3779b9u;
constexpr int64_t kTileVectors = kThreads * kInFlight;

extern "C" __global__ void __launch_bounds__(kThreads, kCtasPerSm)
    read_probe(const uint4* gmem_data, int64_t num_tiles, uint32_t* gmem_sink) {
    uint32_t total = 0;
    for (int64_t tile = blockIdx.x; tile < num_tiles; tile += gridDim.x) {
        const uint4* gmem_tile = gmem_data + tile * kTileVectors + threadIdx.x;
        uint4 loaded[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) loaded[i] = ld_weights(gmem_tile + i * kThreads);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) total += loaded[i].x ^ loaded[i].y ^ loaded[i].z ^ loaded[i].w;
    }
    // Keeps the loads alive. What the total is does not matter; a store now and then costs nothing.
    if (total == kRare) *gmem_sink = total;
}
