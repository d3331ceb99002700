// tile_down.cu   y[t,h] = sum_k weight[t,k] * (dot(w2[e,h,:], act[t,k,:]) + b[e,h]),  e = topk_idx[t,k]
//
// Grid     (hidden / 16) CTAs of 8 or 16 warps; a CTA owns 16 output rows of every token. Its warps deal out the experts that
//          the batch wants among them, whole rows each.
// Reads    every wanted weight byte once for each 64 pairs of its expert, through a ring of bulk copies a warp; act from
//          L1/L2
// Bound    HBM: distinct experts * hidden * intermediate * bytes_per_weight
// Sync     before the wait it reads topk_idx and topk_weights and requests the first weights: complete by then, since gate_up
//          let this kernel start only after its own wait; then waits for act. One barrier, between the dot products of
//          all (token, slot) pairs in shared memory and the threads that add them up in the order of the slots.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, num_tokens * topk <= 512; ids outside [0, num_experts) are skipped
#include "tile_common.cuh"

constexpr int kPanels = kHidden / 16;
constexpr int kRecords = kIntermediate / kRecordCols;
constexpr int64_t kPanelBytes = int64_t(kRecords) * Format::kRecordBytes;

struct Smem {
    alignas(128) uint8_t ring[kWarps][kStages][kStageBytes];
    alignas(16) float dots[kMaxPairs][16];  // [pair][row]
    uint64_t barriers[kWarps][kStages];
    Routing routing;
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "kernels/tile.py computes the same size");

// The runs of this CTA's panel for every kWarps-th expert.
struct ExpertSource {
    const uint8_t* gmem_panel;
    const Routing* smem_routing;
    int rank, record = 0;
    const uint8_t* gmem_next;

    __device__ __forceinline__ ExpertSource(const uint8_t* panel, const Routing* routing, int first)
        : gmem_panel(panel), smem_routing(routing), rank(first) {
        enter();
    }
    __device__ __forceinline__ void enter() {
        if (rank < smem_routing->num_distinct) gmem_next = gmem_panel + smem_routing->expert[rank] * (kPanels * kPanelBytes);
    }
    __device__ __forceinline__ bool next(const uint8_t*& gmem, int& records) {
        if (rank >= smem_routing->num_distinct) return false;
        gmem = gmem_next;
        records = min(kStageRecords, kRecords - record);
        gmem_next += records * Format::kRecordBytes;
        record += records;
        if (record == kRecords) {
            record = 0;
            rank += kWarps;
            enter();
        }
        return true;
    }
};

struct Args {
    const uint16_t* gmem_act;
    const float* gmem_matrix_scale;
    const float* gmem_row_scale;
    const float* gmem_block_scale;
    const float* gmem_bias;
};

template <int kTiles>
__device__ __forceinline__ void do_expert(Smem& smem, Stream<ExpertSource>& stream, const Args& args, int64_t expert,
                                          const uint16_t* smem_pairs, int num_columns) {
    const int lane = threadIdx.x % kLanes, g = lane / 4, q = lane % 4;
    Columns<kTiles> columns;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        const int column = min(t * kColumns + g, num_columns - 1);
        columns.gmem[t] = args.gmem_act + int64_t(smem_pairs[column]) * kIntermediate + q * 8;
    }
    const int row = blockIdx.x * 16 + g;
    const float* gmem_scale = nullptr;
    constexpr int kScaleCols = ceil_div(kIntermediate, 128), kScaleRows = ceil_div(kHidden, 128);
    if constexpr (Format::kBlockScale)  // 16 rows lie in one block of 128
        gmem_scale = args.gmem_block_scale + (expert * kScaleRows + blockIdx.x * 16 / 128) * kScaleCols;
    Accumulators<kTiles> sum;
    sum_records(sum, stream, columns, 0, kRecords, gmem_scale, gmem_scale);
    float low = args.gmem_matrix_scale[expert], high = low;
    if (args.gmem_row_scale != nullptr) {
        low *= args.gmem_row_scale[expert * kHidden + row];
        high *= args.gmem_row_scale[expert * kHidden + row + 8];
    }
    const float low_bias = args.gmem_bias != nullptr ? args.gmem_bias[expert * kHidden + row] : 0.f;
    const float high_bias = args.gmem_bias != nullptr ? args.gmem_bias[expert * kHidden + row + 8] : 0.f;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int column = t * kColumns + q * 2 + c;
            if (column < num_columns) {
                float(&dots)[16] = smem.dots[smem_pairs[column]];
                dots[g] = fmaf(sum.d[t][c], low, low_bias);
                dots[g + 8] = fmaf(sum.d[t][2 + c], high, high_bias);
            }
        }
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 16 / kWarps)
moe_down_tile(const uint16_t* gmem_act, const Index* gmem_topk_idx, int64_t idx_stride, const float* gmem_topk_weights,
              int64_t weights_stride, int32_t num_tokens, const uint8_t* __restrict__ gmem_records,
              const float* __restrict__ gmem_matrix_scale, const float* __restrict__ gmem_row_scale,
              const float* __restrict__ gmem_block_scale, const float* __restrict__ gmem_bias, uint16_t* gmem_out,
              int64_t out_stride) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = threadIdx.x / kLanes;
    pdl_launch_dependents();
    if (threadIdx.x < kWarps * kStages) mbarrier_init(smem_address(&smem.barriers[0][0] + threadIdx.x), 1);
    fence_mbarrier_init();
    find_pairs(smem.routing, gmem_topk_idx, idx_stride, num_tokens * kTopk);

    Stream<ExpertSource> stream(smem_address(smem.ring[warp]), smem_address(smem.barriers[warp]),
                                ExpertSource(gmem_records + blockIdx.x * kPanelBytes, &smem.routing, warp));
    stream.fill();
    pdl_wait();
    const Args args{gmem_act, gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias};
#pragma unroll 1
    for (int rank = warp; rank < smem.routing.num_distinct; rank += kWarps) {
        const int64_t expert = smem.routing.expert[rank];
        const uint16_t* pairs = smem.routing.pairs + smem.routing.first[rank];
        const int count = smem.routing.first[rank + 1] - smem.routing.first[rank];
        if (count <= 8) do_expert<1>(smem, stream, args, expert, pairs, count);
        else if (count <= 16) do_expert<2>(smem, stream, args, expert, pairs, count);
        else if (count <= 32) do_expert<4>(smem, stream, args, expert, pairs, count);
        else do_expert<8>(smem, stream, args, expert, pairs, count);
    }
    __syncthreads();
    for (int i = threadIdx.x; i < num_tokens * 16; i += kThreads) {
        const int token = i / 16, row = i % 16;
        float y = 0.f;
        for (int slot = 0; slot < kTopk; ++slot) {
            const int pair = token * kTopk + slot;
            if (smem.routing.ids[pair] != kUnused)
                y = fmaf(ld_routing(gmem_topk_weights + token * weights_stride + slot), smem.dots[pair][row], y);
        }
        gmem_out[token * out_stride + blockIdx.x * 16 + row] = cvt_f32_bf16(y);
    }
}
