// warp_down.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b[e,h]),  e = topk_idx[t,k]
//
// Grid     (num_tokens, hidden / 8); 8 warps a CTA, a warp owns one (t, h) for its whole life.
//          Tokens run fastest, so that tokens that share a row find it in L2.
// Reads    w2 rows once per (t, k); the topk rows of a warp are one list of 16-byte chunks dealt out to the lanes, so
//          that short rows (768 bytes are 1.5 loads a lane) still fill every lane; act from L1/L2
// Bound    HBM: num_tokens * topk * hidden * intermediate * bytes_per_weight (no reuse between tokens but through L2)
// Sync     before the wait it reads topk_idx, topk_weights and the first batch of weights: complete by then, since
//          gate_up let this kernel start only after its own wait; then waits for act. Publishes nothing.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, topk <= 32; ids outside [0, num_experts) are skipped
#include "warp_common.cuh"

constexpr int kRowChunks = kIntermediate / Format::kWeightsPerChunk;
constexpr int kChunks = kTopk * kRowChunks;
constexpr int kSteps = ceil_div(kChunks, kLanes);
#ifndef DN_BATCH
#define DN_BATCH 12
#endif
#ifndef DN_MIN
#define DN_MIN 2
#endif
constexpr int kBatch = kSteps < DN_BATCH ? kSteps : DN_BATCH;


extern "C" __global__ void __launch_bounds__(kWarps * kLanes, DN_MIN)
moe_down_3d_batched(const uint16_t* __restrict__ gmem_act, const Index* __restrict__ gmem_topk_idx, int64_t idx_stride,
                    const float* __restrict__ gmem_topk_weights, int64_t weights_stride,
                    const uint8_t* __restrict__ gmem_w2, const uint8_t* __restrict__ gmem_scale,
                    const float* __restrict__ gmem_global, const float* __restrict__ gmem_bias, int32_t num_experts,
                    uint16_t* __restrict__ gmem_out, int64_t out_stride) {
    const int lane = threadIdx.x % kLanes;
    const int out_dim = blockIdx.y * kWarps + threadIdx.x / kLanes;
    const int64_t token = blockIdx.x;
    pdl_launch_dependents();

    // Lane k holds slot k. An unused slot's weight may be NaN: it is replaced, not multiplied.
    int32_t my_expert = -1;
    float my_weight = 0.f, my_scaled_weight = 0.f;
    if (lane < kTopk) {
        const int64_t id = gmem_topk_idx[token * idx_stride + lane];
        if (is_expert(id, num_experts)) {
            my_expert = int32_t(id);
            my_weight = gmem_topk_weights[token * weights_stride + lane];
            my_scaled_weight = my_weight * Format::matrix_scale(gmem_global + id);
        }
    }

    const int64_t scale_offset = Format::scale_offset(out_dim, kIntermediate);
    const uint16_t* act_row = gmem_act + token * kTopk * kIntermediate;
    float sum = 0.f;
#pragma unroll 1
    for (int step = 0; step < kSteps; step += kBatch) {
        uint4 w[kBatch];
        Format::Scale s[kBatch];
        int32_t expert[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int chunk = (step + b) * kLanes + lane;
            const int slot = chunk / kRowChunks, within = chunk % kRowChunks;
            const int32_t id = __shfl_sync(0xffffffffu, my_expert, slot);
            expert[b] = chunk < kChunks ? id : -1;
            if (expert[b] >= 0) {
                w[b] = ld_weights(gmem_w2 + (int64_t(expert[b]) * kHidden + out_dim) * row_bytes(kIntermediate) +
                                  within * 16);
                s[b] = Format::scale_at(gmem_scale + scale_offset + int64_t(expert[b]) *
                                            Format::scale_matrix_bytes(kHidden, kIntermediate), within);
            }
        }
        if (step == 0) pdl_wait();
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int chunk = (step + b) * kLanes + lane;
            const int slot = chunk / kRowChunks, within = chunk % kRowChunks;
            const float weight = __shfl_sync(0xffffffffu, my_scaled_weight, slot);
            if (expert[b] >= 0) {
                uint4 x[kXPieces];
                load_x(x, act_row + slot * kIntermediate, within);
                sum = fmaf(weight, Format::dot(w[b], x, s[b]), sum);
            }
        }
    }
    if (gmem_bias != nullptr && my_expert >= 0) sum = fmaf(my_weight, gmem_bias[int64_t(my_expert) * kHidden + out_dim], sum);
    sum = butterfly_sum(sum);
    if (lane == 0) gmem_out[token * out_stride + out_dim] = cvt_f32_bf16(sum);
}
