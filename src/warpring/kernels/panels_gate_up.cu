// panels_gate_up.cu   act[t,k,i] = activation(dot(w13[e,0,i,:], x[t,:]) + b[e,0,i], dot(w13[e,1,i,:], x[t,:]) + b[e,1,i])
//                     e = topk_idx[t,k]
//
// Warp decode on tile layout, for few tokens: tensor cores multiply, weights go from memory to registers.
//
// Grid     (pairs, panels of 8 neurons / kTeams / rounds); a team of kSplit warps owns a panel of one (t, k), and then,
//          where there are rounds, every gridDim.y * kTeams-th. Pairs run fastest: tokens that want the same panel want it
//          at about the same time, while it is in L2.
// Reads    a panel once, each warp every kSplit-th unit of it, all records of a unit before the first use; x from L1/L2
// Bound    HBM: pairs * 2 * intermediate * hidden * bytes_per_weight (no reuse between tokens but through L2)
// Sync     waits for its predecessor before anything is read (topk_idx and x may be its output), then lets the down
//          kernel start; publishes nothing before its end
// Limits   hidden % 32 == 0, intermediate % 32 == 0; ids outside [0, num_experts) are skipped. The bits of tile.cu.
//
// WARPRING_ROUNDS is 1 where a team may have several panels: the next one's first unit is then requested before this one's
// last is multiplied. It changes no bit of the result, and neither does kTeams.
#include "panels_common.cuh"

constexpr bool kRounds = WARPRING_ROUNDS;
constexpr bool kAhead = kRounds || kPasses > 1;  // a unit is requested before the one at hand is multiplied
static_assert(kWarps == kSplit * kTeams, "every warp multiplies");

struct Args {
    const float *gmem_w13_matrix_scale, *gmem_w13_row_scale, *gmem_w13_block_scale, *gmem_w13_bias;
    float alpha, limit, up_offset;
};

extern "C" __global__ void __launch_bounds__(kThreads, WARPRING_MIN_CTAS)
    moe_gate_up_panels(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride,
                       const uint8_t* __restrict__ gmem_w13, const float* __restrict__ gmem_matrix_scale,
                       const float* __restrict__ gmem_row_scale, const float* __restrict__ gmem_block_scale,
                       const float* __restrict__ gmem_bias, float alpha, float limit, float up_offset,
                       uint16_t* gmem_act) {
    __shared__ float smem_shares[2][kTeams][kSplit][16];
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const int team = warp / kSplit, share = warp % kSplit;
    const int pair = blockIdx.x, first = int(blockIdx.y) * kTeams, stride = int(gridDim.y) * kTeams;

    // The down kernel reads topk_idx and weights before its own wait, so it may start only once they are complete.
    pdl_wait();
    pdl_launch_dependents();
    const uint32_t expert = expert_of(gmem_topk_idx, idx_stride, pair);
    if (expert == kUnused) return;
    const Args args{gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias, alpha, limit, up_offset};
    const uint16_t* gmem_row = gmem_x + pair / kSlots * x_stride + share * kGateUpRun * kRecordCols;

    // Of the teams' panels [base, base + kTeams): a team without one takes the last, and nobody looks at its sums.
    const auto panel_of = [&](int base) { return min(base + team, kGateUpPanels - 1); };
    const auto load = [&](Run<kGateUpRun>& run, int base, int pass) {
        const int64_t panel = int64_t(expert) * kGateUpPanels + panel_of(base);
        run.load(gmem_w13 + (panel * kGateUpUnits + pass * kSplit + share) * kUnitBytes, lane);
    };
    const auto scales_of = [&](int base, int pass) {
        return gate_up_scales(args, expert, panel_of(base), (pass * kSplit + share) * kGateUpRun);
    };
    Run<kGateUpRun> next;
    load(next, first, 0);
    BlockScales<kGateUpRun> next_scales = scales_of(first, 0);
#pragma unroll 1
    for (int base = first, round = 0; base < kGateUpPanels; base += stride, round ^= 1) {
        // The neuron that this thread finishes; what that takes is on its way meanwhile.
        const int own_team = threadIdx.x / 8, row = threadIdx.x % 8, neuron = (base + own_team) * 8 + row;
        const bool finishes = own_team < kTeams && neuron < kIntermediate;
        const Neuron constants(args, expert, finishes ? neuron : 0);
        Sums<1> sums;
        const int passes = kPasses == 1 ? 1 : opaque(kPasses);
#pragma unroll 1
        for (int pass = 0; pass < passes; ++pass) {
            const Run<kGateUpRun> run = next;
            const BlockScales<kGateUpRun> scales = next_scales;
            const bool wraps = pass + 1 == passes;
            const int next_base = wraps ? base + stride : base, next_pass = wraps ? 0 : pass + 1;
            if (kAhead && next_base < kGateUpPanels) {
                load(next, next_base, next_pass);
                next_scales = scales_of(next_base, next_pass);
            }
            run.add_to(sums, gmem_row + pass * (kSplit * kGateUpRun * kRecordCols), lane, scales);
        }
        // Two places by turns: who is a round ahead leaves those be that are still being read.
        store_rows(smem_shares[round][team][share], sums, lane);
        __syncthreads();
        if (finishes) {
            float gate = 0.f, up = 0.f;
#pragma unroll
            for (int w = 0; w < kSplit; ++w) {
                gate += smem_shares[round][own_team][w][row];
                up += smem_shares[round][own_team][w][row + 8];
            }
            gmem_act[int64_t(pair) * kIntermediate + neuron] = constants.activation(args, gate, up);
        }
        if (!kRounds) return;
        __syncwarp();
    }
}
