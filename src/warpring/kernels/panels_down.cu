// panels_down.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b[e,h]),  e = topk_idx[t,k]
//
// Grid     (tokens, panels of 16 outputs); of the units of the token's panels, one panel an expert, a warp owns every
//          kWarps-th. Tokens run fastest, so that those that share a panel find it in L2.
// Reads    a panel of each of the token's experts once; act from L1/L2
// Bound    HBM: pairs * hidden * intermediate * bytes_per_weight (no reuse between tokens but through L2)
// Sync     before the wait it reads topk_idx, topk_weights, each warp's first unit and what finishing takes: complete by
//          then, since gate_up let this kernel start only after its own wait; then waits for act. Publishes nothing.
// Limits   those of panels_gate_up.cu, topk + shared experts <= 32. The bits of tile.cu.
#include "panels_common.cuh"

constexpr int kItems = kSlots * kDownUnits;  // units of the panels of all slots
static_assert(kSlots <= kLanes, "a lane holds one slot");

struct Args {
    const float *gmem_w2_matrix_scale, *gmem_w2_row_scale, *gmem_w2_block_scale, *gmem_w2_bias;
};

struct Smem {
    float sums[kItems][16];
    float scale[kSlots][16], bias[kSlots][16];
    float weight[kSlots];
    uint32_t expert[kSlots];
};
static_assert(sizeof(Smem) <= 48 * 1024, "kernels/panels.py takes no such layer");

extern "C" __global__ void __launch_bounds__(kThreads, WARPRING_MIN_CTAS)
    moe_down_panels(const uint16_t* gmem_act, const Index* gmem_topk_idx, int64_t idx_stride,
                    const float* gmem_topk_weights, int64_t weights_stride, const float* gmem_shared_weights,
                    int64_t shared_weights_stride, const uint8_t* __restrict__ gmem_w2,
                    const float* __restrict__ gmem_matrix_scale, const float* __restrict__ gmem_row_scale,
                    const float* __restrict__ gmem_block_scale, const float* __restrict__ gmem_bias,
                    uint16_t* gmem_out, int64_t out_stride) {
    __shared__ Smem smem;
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int token = blockIdx.x, panel = blockIdx.y, first_pair = token * kSlots;
    pdl_launch_dependents();
    const Args args{gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias};
    // Lane k holds slot k.
    const uint32_t own = lane < kSlots ? expert_of(gmem_topk_idx, idx_stride, first_pair + lane) : kUnused;
    const auto expert_at = [&](int item) { return __shfl_sync(kFull, own, item / kDownUnits); };
    Run<kDownRun> run;
    const auto load = [&](int item) {
        const uint32_t expert = expert_at(item);
        if (expert == kUnused) return;
        const int64_t place = (int64_t(expert) * kDownPanels + panel) * kDownUnits + item % kDownUnits;
        run.load(gmem_w2 + place * kDownUnitBytes, lane);
    };
    if (warp < kItems) load(warp);
    // What makes outputs of sums.
#pragma unroll 1
    for (int i = threadIdx.x; i < kSlots * 16; i += kThreads) {
        const uint32_t expert = expert_of(gmem_topk_idx, idx_stride, first_pair + i / 16);
        if (expert == kUnused) continue;
        const OutputRow row(args, expert, panel * 16 + i % 16);
        smem.scale[i / 16][i % 16] = row.scale;
        smem.bias[i / 16][i % 16] = row.bias;
    }
    if (warp == kWarps - 1 && lane < kSlots) {
        smem.expert[lane] = own;
        smem.weight[lane] = pair_weight(gmem_topk_weights, weights_stride, gmem_shared_weights, shared_weights_stride,
                                        first_pair + lane);
    }
    pdl_wait();
    const int items = opaque(kItems);
#pragma unroll 1
    for (int item = warp; item < items; item += kWarps) {
        const int slot = item / kDownUnits, first_record = item % kDownUnits * kDownRun;
        const uint32_t expert = expert_at(item);
        if (expert != kUnused) {
            const uint16_t* gmem_row = gmem_act + int64_t(first_pair + slot) * kIntermediate + first_record * kRecordCols;
            Sums<1> sums;
            run.add_to(sums, gmem_row, lane, down_scales(args, expert, panel, first_record));
            store_rows(smem.sums[item], sums, lane);
        }
        if (item + kWarps < items) load(item + kWarps);
    }
    __syncthreads();
    const int row = threadIdx.x;
    if (row >= 16) return;
    float y = 0.f;
#pragma unroll 8
    for (int slot = 0; slot < kSlots; ++slot) {
        if (smem.expert[slot] == kUnused) continue;
        float sum = 0.f;
#pragma unroll 8
        for (int unit = 0; unit < kDownUnits; ++unit) sum += smem.sums[slot * kDownUnits + unit][row];
        y = fmaf(smem.weight[slot], fmaf(sum, smem.scale[slot][row], smem.bias[slot][row]), y);
    }
    gmem_out[token * out_stride + panel * 16 + row] = cvt_f32_bf16(y);
}
