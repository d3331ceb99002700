// warp_gate_up.cu   act[t,k,i] = activation(dot(w13[e,0,i,:], x[t,:]) + b[e,0,i], dot(w13[e,1,i,:], x[t,:]) + b[e,1,i]),  e = topk_idx[t,k]
//
// Grid     (num_tokens * topk, intermediate / 8); 8 warps a CTA, a warp owns one (t, k, i) for its whole life.
//          Pairs run fastest: tokens that want the same row want it at about the same time, while it is in L2.
// Reads    both weight rows once per (t, k), 16 bytes a lane; x from L1/L2; all loads of a batch before the first use
// Bound    HBM: num_tokens * topk * 2 * intermediate * hidden * bytes_per_weight (no reuse between tokens but through L2)
// Sync     waits for its predecessor before anything is read (topk_idx and x may be its output), then lets the
//          down kernel start; publishes nothing before its end
// Limits   hidden % 32 == 0, intermediate % 32 == 0, topk <= 32; ids outside [0, num_experts) are skipped
#include "warp_common.cuh"
#include "activation.cuh"

constexpr int kChunks = kHidden / Format::kWeightsPerChunk;
constexpr int kSteps = ceil_div(kChunks, kLanes);
constexpr int kBatch = kSteps < 4 ? kSteps : 4;  // chunks of each row in flight a lane: 2 x 4 x 16 bytes
constexpr int kMinCtas = kSteps > kBatch && Format::kCodeBits == 4 ? 2 : 3;  // per SM: at most 128 or 80 registers

struct Row {
    const uint8_t* gmem_codes;
    const uint8_t* gmem_scale;
};

__device__ __forceinline__ Row row_of(const uint8_t* gmem_w13, const uint8_t* gmem_scale, int64_t matrix, int neuron) {
    return {gmem_w13 + (matrix * kIntermediate + neuron) * row_bytes(kHidden),
            gmem_scale + matrix * Format::scale_matrix_bytes(kIntermediate, kHidden) +
                Format::scale_offset(neuron, kHidden)};
}

extern "C" __global__ void __launch_bounds__(kWarps * kLanes, kMinCtas)
moe_gate_up_3d_batched(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride,
                       const uint8_t* __restrict__ gmem_w13, const uint8_t* __restrict__ gmem_scale,
                       const float* __restrict__ gmem_global, const float* __restrict__ gmem_bias, int32_t num_experts,
                       float alpha, float limit, float up_offset, uint16_t* gmem_act) {
    const int lane = threadIdx.x % kLanes;
    const int turn = rotation<kXPieces>(lane);
    const int neuron = blockIdx.y * kWarps + threadIdx.x / kLanes;
    const int64_t pair = blockIdx.x;
    const int64_t token = pair / kTopk;
    const int slot = pair % kTopk;

    // The down kernel reads topk_idx and topk_weights before its own wait, so it may start only once they are complete:
    // the release comes after the wait, never before.
    pdl_wait();
    pdl_launch_dependents();
    const int64_t expert = ld_routing(gmem_topk_idx + token * idx_stride + slot);
    if (!is_expert(expert, num_experts)) return;

    const Pieces x_pieces(gmem_x + token * x_stride, lane, turn);
    const Row gate = row_of(gmem_w13, gmem_scale, expert * 2, neuron);
    const Row up = row_of(gmem_w13, gmem_scale, expert * 2 + 1, neuron);

    float gate_sum = 0.f, up_sum = 0.f;
#pragma unroll 1
    for (int step = 0; step < kSteps; step += kBatch) {
        uint4 w_gate[kBatch], w_up[kBatch];
        Format::Scale s_gate[kBatch], s_up[kBatch];
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int chunk = (step + b) * kLanes + lane;
            if (chunk < kChunks) {
                w_gate[b] = ld_weights(gate.gmem_codes + chunk * 16);
                w_up[b] = ld_weights(up.gmem_codes + chunk * 16);
                s_gate[b] = Format::scale_at(gate.gmem_scale, chunk);
                s_up[b] = Format::scale_at(up.gmem_scale, chunk);
            }
        }
#pragma unroll
        for (int b = 0; b < kBatch; ++b) {
            const int chunk = (step + b) * kLanes + lane;
            if (chunk < kChunks) {
                uint4 x[kXPieces];
                x_pieces.load(x, (step + b) * kLanes);
                gate_sum += Format::dot(w_gate[b], x, s_gate[b], turn);
                up_sum += Format::dot(w_up[b], x, s_up[b], turn);
            }
        }
    }
    butterfly_sum(gate_sum, up_sum);
    if (lane == 0) {
        gate_sum *= Format::matrix_scale(gmem_global + expert * 2);
        up_sum *= Format::matrix_scale(gmem_global + expert * 2 + 1);
        if (gmem_bias != nullptr) {
            gate_sum += gmem_bias[expert * 2 * kIntermediate + neuron];
            up_sum += gmem_bias[(expert * 2 + 1) * kIntermediate + neuron];
        }
        gmem_act[pair * kIntermediate + neuron] =
            cvt_f32_bf16(gated_activation(gate_sum, up_sum, {alpha, limit, up_offset}));
    }
}
