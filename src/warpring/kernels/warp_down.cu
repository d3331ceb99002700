// warp_down.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b[e,h]),  e = topk_idx[t,k]
//
// Grid     (num_tokens, hidden / 8); 8 warps a CTA, a warp owns one (t, h) for its whole life.
//          Tokens run fastest, so that tokens that share a row find it in L2.
// Reads    w2 rows once per (t, k). Rows are short (768 bytes are 1.5 loads a lane), so the lanes work in groups, each
//          at another expert's row, of the size that leaves the fewest lanes idle; act from L1/L2
// Bound    HBM: num_tokens * topk * hidden * intermediate * bytes_per_weight (no reuse between tokens but through L2)
// Sync     before the wait it reads topk_idx, topk_weights and the first batch of weights: complete by then, since
//          gate_up let this kernel start only after its own wait; then waits for act. Publishes nothing.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, topk <= 32; ids outside [0, num_experts) are skipped
//
// WARPRING_DOWN_BATCH is the number of 16-byte loads in flight a lane. It changes no bit of the result.
#include "warp_common.cuh"

constexpr int kRowChunks = kIntermediate / Format::kWeightsPerChunk;

__device__ constexpr int steps_with(int group_lanes) {
    return ceil_div(kRowChunks, group_lanes) * ceil_div(kTopk * group_lanes, kLanes);
}
__device__ constexpr int best_group() {
    int best = kLanes;
    for (int lanes = kLanes / 2; lanes >= 4; lanes /= 2)
        if (steps_with(lanes) < steps_with(best)) best = lanes;
    return best;
}
constexpr int kGroupLanes = best_group();
constexpr int kGroups = kLanes / kGroupLanes;                 // experts at work in a warp
constexpr int kSlotSteps = ceil_div(kTopk, kGroups);          // times the groups go on to their next slot
constexpr int kRowSteps = ceil_div(kRowChunks, kGroupLanes);  // loads a lane needs for one row
// A depth of 12 is for rows that it covers whole; in a loop, beside what the next round needs, it would not fit 128 registers.
constexpr int kDepth = WARPRING_DOWN_BATCH;
constexpr int kMaxBatch = kDepth > 8 && kSlotSteps * kRowSteps > kDepth ? 8 : kDepth;
constexpr int kMinCtas = kMaxBatch > 6 || kRowSteps > 4 * kMaxBatch ? 2 : Format::kCodeBits == 4 || kRowSteps > kMaxBatch ? 3 : 4;
constexpr int kRowBatch = kRowSteps < kMaxBatch ? kRowSteps : kMaxBatch;
constexpr int kSlotBatch = kRowSteps >= kMaxBatch ? 1 : kMaxBatch / kRowSteps < kSlotSteps ? kMaxBatch / kRowSteps : kSlotSteps;

// What a lane knows of its slots. Lane k holds slot k; an unused slot's weight may be NaN: it is replaced, not multiplied.
struct Slot {
    int32_t expert = -1;
    float weight = 0.f;         // topk_weights
    float scaled_weight = 0.f;  // times the matrix scale of the format
};

// This lane's part of the output. With kAllUsed no slot is unused, and nothing is asked of the slots.
template <bool kAllUsed>
__device__ __forceinline__ float partial_sum(const Slot& mine, const uint8_t* gmem_w2, const uint8_t* gmem_scale,
                                             const uint16_t* gmem_act, int out_dim) {
    const int lane = threadIdx.x % kLanes;
    const int group = lane / kGroupLanes, in_group = lane % kGroupLanes;
    constexpr bool kFullSlots = kAllUsed && kTopk % (kGroups * kSlotBatch) == 0;
    constexpr bool kFullRows = kRowChunks % (kGroupLanes * kRowBatch) == 0;
    gmem_w2 += out_dim * row_bytes(kIntermediate) + in_group * 16;
    gmem_scale += Format::scale_offset(out_dim, kIntermediate);
    float sum = 0.f;
#pragma unroll 1
    for (int slot_step = 0; slot_step < kSlotSteps; slot_step += kSlotBatch) {
#pragma unroll 1
        for (int row_step = 0; row_step < kRowSteps; row_step += kRowBatch) {
            uint4 w[kSlotBatch][kRowBatch];
            Format::Scale s[kSlotBatch][kRowBatch];
            int32_t expert[kSlotBatch];
            // A lane whose slot is unused, or whose chunk lies beyond its row's end, reads nothing and adds nothing.
            const auto has_chunk = [&](int i, int j) {
                return (kFullSlots || expert[i] >= 0) &&
                       (kFullRows || (row_step + j) * kGroupLanes + in_group < kRowChunks);
            };
#pragma unroll
            for (int i = 0; i < kSlotBatch; ++i) {
                const int slot = (slot_step + i) * kGroups + group;
                const int32_t id = __shfl_sync(0xffffffffu, mine.expert, slot);
                expert[i] = slot < kTopk ? id : -1;
                const uint8_t* gmem_w = gmem_w2 + int64_t(id) * (kHidden * row_bytes(kIntermediate));
                const uint8_t* gmem_s = gmem_scale + int64_t(id) * Format::scale_matrix_bytes(kHidden, kIntermediate);
#pragma unroll
                for (int j = 0; j < kRowBatch; ++j) {
                    if (has_chunk(i, j)) {
                        w[i][j] = ld_weights(gmem_w + (row_step + j) * (kGroupLanes * 16));
                        s[i][j] = Format::scale_at(gmem_s, (row_step + j) * kGroupLanes + in_group);
                    }
                }
            }
            if (slot_step == 0 && row_step == 0) pdl_wait();
#pragma unroll
            for (int i = 0; i < kSlotBatch; ++i) {
                const int slot = (slot_step + i) * kGroups + group;
                const float weight = __shfl_sync(0xffffffffu, mine.scaled_weight, slot);
                const int turn = rotation<kXPieces>(lane);
                const Pieces pieces(gmem_act + slot * kIntermediate, in_group, turn);
#pragma unroll
                for (int j = 0; j < kRowBatch; ++j) {
                    if (has_chunk(i, j)) {
                        uint4 x[kXPieces];
                        pieces.load(x, (row_step + j) * kGroupLanes);
                        sum = fmaf(weight, Format::dot(w[i][j], x, s[i][j], turn), sum);
                    }
                }
            }
        }
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(kWarps * kLanes, kMinCtas)
moe_down_3d_batched(const uint16_t* gmem_act, const Index* gmem_topk_idx, int64_t idx_stride,
                    const float* gmem_topk_weights, int64_t weights_stride, const uint8_t* __restrict__ gmem_w2,
                    const uint8_t* __restrict__ gmem_scale, const float* __restrict__ gmem_global,
                    const float* __restrict__ gmem_bias, int32_t num_experts, uint16_t* gmem_out, int64_t out_stride) {
    const int lane = threadIdx.x % kLanes;
    const int out_dim = blockIdx.y * kWarps + threadIdx.x / kLanes;
    const int64_t token = blockIdx.x;
    pdl_launch_dependents();

    Slot mine;
    if (lane < kTopk) {
        const int64_t id = ld_routing(gmem_topk_idx + token * idx_stride + lane);
        if (is_expert(id, num_experts)) {
            mine.expert = int32_t(id);
            mine.weight = ld_routing(gmem_topk_weights + token * weights_stride + lane);
            mine.scaled_weight = mine.weight * Format::matrix_scale(gmem_global + id);
        }
    }
    const uint16_t* gmem_token_act = gmem_act + token * kTopk * kIntermediate;
    const bool all_used = __all_sync(0xffffffffu, lane >= kTopk || mine.expert >= 0);
    float sum = all_used ? partial_sum<true>(mine, gmem_w2, gmem_scale, gmem_token_act, out_dim)
                         : partial_sum<false>(mine, gmem_w2, gmem_scale, gmem_token_act, out_dim);
    if (gmem_bias != nullptr && mine.expert >= 0)
        sum = fmaf(mine.weight, gmem_bias[int64_t(mine.expert) * kHidden + out_dim], sum);
    sum = butterfly_sum(sum);
    if (lane == 0) gmem_out[token * out_stride + out_dim] = cvt_f32_bf16(sum);
}
