// grouped_combine.cu   out[t,:] = bf16(sum_k weight[t,k] * dots[row of pair (t,k),:])
//
// Grid     (hidden / 4 / 128, num_tokens); a thread owns 4 columns of a token
// Reads    dots once, 4 bytes a column of every pair
// Bound    L2, or HBM beyond its size
// Sync     waits for its predecessor before anything: it wrote dots; publishes nothing
// Limits   hidden % 4 == 0; slots are added in their order, those of no expert left out
//
// Compile-time parameters (macros set by kernels/grouped_gemm.py): WARPRING_HIDDEN; those of grouped_plan.cuh.
#include "grouped_plan.cuh"

constexpr int kHidden = WARPRING_HIDDEN, kThreads = 128, kQuad = 4;

extern "C" __global__ void __launch_bounds__(kThreads)
    grouped_combine(const float* gmem_dots, const PairPlace* gmem_places, const float* gmem_weights,
                    int64_t weights_stride, const float* gmem_shared_weights, int64_t shared_weights_stride,
                    int32_t topk, int32_t num_slots, uint16_t* gmem_out, int64_t out_stride) {
    pdl_wait();
    const int token = blockIdx.y, column = (blockIdx.x * kThreads + threadIdx.x) * kQuad;
    if (column >= kHidden) return;
    float y[kQuad] = {0.f, 0.f, 0.f, 0.f};
    // No branch, so that the loads of several slots are on their way at once.
#pragma unroll 8
    for (int slot = 0; slot < num_slots; ++slot) {
        const int row = int(ld_routing(&gmem_places[int64_t(token) * num_slots + slot].row));
        float weight = 1.f;
        if (slot < topk)
            weight = ld_routing(gmem_weights + token * weights_stride + slot);
        else if (gmem_shared_weights != nullptr)
            weight = ld_routing(gmem_shared_weights + token * shared_weights_stride);
        const uint4 bits = ld_activations(gmem_dots + int64_t(max(row, 0)) * kHidden + column);
        const float dots[kQuad] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                                   __uint_as_float(bits.w)};
#pragma unroll
        for (int r = 0; r < kQuad; ++r) y[r] = row >= 0 ? fmaf(weight, dots[r], y[r]) : y[r];
    }
    uint16_t* gmem_own = gmem_out + token * out_stride + column;
    // A store of 2 bytes a lane takes a part of every sector it touches, which costs as much as the sector.
    if (reinterpret_cast<uint64_t>(gmem_own) % 8 == 0) {
        *reinterpret_cast<uint2*>(gmem_own) = {cvt_f32_bf16x2(y[1], y[0]), cvt_f32_bf16x2(y[3], y[2])};
    } else {
#pragma unroll
        for (int r = 0; r < kQuad; ++r) gmem_own[r] = cvt_f32_bf16(y[r]);
    }
}
