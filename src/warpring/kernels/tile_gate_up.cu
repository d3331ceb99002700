// tile_gate_up.cu   act[t,k,i] = activation(dot(w13[e,0,i,:], x[t,:]) + b[e,0,i], dot(w13[e,1,i,:], x[t,:]) + b[e,1,i]),  e = topk_idx[t,k]
//
// Grid     one or more CTAs an SM, 8 warps each. The panels (8 neurons: gate and up rows) of the experts that the batch
//          wants are one list, cut into equal runs, one a CTA. A warp owns an eighth of the columns of every panel.
// Reads    every wanted weight byte once for each 64 pairs of its expert, in the order of memory, through a ring of bulk
//          copies a warp; x from L1/L2
// Bound    HBM: distinct experts * 2 * intermediate * hidden * bytes_per_weight
// Sync     waits for its predecessor before anything is read (topk_idx and x may be its output), then lets the down
//          kernel start. Inside a CTA: one barrier a panel, between partial sums and their reader (double-buffered).
// Limits   hidden % 32 == 0, intermediate % 32 == 0, num_tokens * topk <= 512; ids outside [0, num_experts) are skipped
#include "tile_common.cuh"
#include "activation.cuh"
#include "tile_neuron.cuh"

constexpr int kPanels = kIntermediate / 8;
constexpr int kRecords = kHidden / kRecordCols;
constexpr int kTilesAtOnce = 2;  // columns whose partial sums fit the exchange: 16
static_assert(kWarps == 8, "a warp owns an eighth of the columns");
constexpr int64_t kPanelBytes = int64_t(kRecords) * Format::kRecordBytes;

struct Smem {
    alignas(128) uint8_t ring[kWarps][kStages][kStageBytes];
    alignas(16) float parts[2][kWarps][kTilesAtOnce][16][kColumns];  // [buffer][warp][tile][row][column]
    uint64_t barriers[kWarps][kStages];
    Routing routing;
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "kernels/tile.py computes the same size");

// The runs of this warp's eighth of the panels [item, last_item).
struct PanelSource {
    const uint8_t* gmem_records;
    const Routing* smem_routing;
    int item, last_item, begin, end, record;
    const uint8_t* gmem_next;

    __device__ __forceinline__ PanelSource(const uint8_t* records, const Routing* routing, int first, int last, int b, int e)
        : gmem_records(records), smem_routing(routing), item(first), last_item(last), begin(b), end(e), record(b) {
        enter();
    }
    __device__ __forceinline__ void enter() {
        if (begin >= end) item = last_item;
        if (item >= last_item) return;
        const int64_t expert = smem_routing->expert[item / kPanels];
        gmem_next = gmem_records + (expert * kPanels + item % kPanels) * kPanelBytes + begin * Format::kRecordBytes;
    }
    __device__ __forceinline__ bool next(const uint8_t*& gmem, int& records) {
        if (item >= last_item) return false;
        gmem = gmem_next;
        records = min(kStageRecords, end - record);
        gmem_next += records * Format::kRecordBytes;
        record += records;
        if (record == end) {
            record = begin;
            ++item;
            enter();
        }
        return true;
    }
};

// The partial sums of all warps become activations: thread (neuron, column) adds its eight parts in order.
__device__ __forceinline__ void finish(const Smem& smem, int buffer, const Args& args, const Neuron& constants, int finisher,
                                       int neuron, const uint16_t* smem_pairs, int num_columns) {
    const int row = finisher % 8, column = finisher / 8;
    if (column >= num_columns) return;
    const int tile = column / kColumns, c = column % kColumns;
    float gate = 0.f, up = 0.f;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
        gate += smem.parts[buffer][w][tile][row][c];
        up += smem.parts[buffer][w][tile][row + 8][c];
    }
    gate = fmaf(gate, constants.gate_scale, constants.gate_bias);
    up = fmaf(up, constants.up_scale, constants.up_bias);
    args.gmem_act[int64_t(smem_pairs[column]) * kIntermediate + neuron] =
        cvt_f32_bf16(gated_activation(gate, up, {args.alpha, args.limit, args.up_offset}));
}

// One panel for kTiles x 8 columns.
template <int kTiles>
__device__ __forceinline__ void do_panel(Smem& smem, Stream<PanelSource>& stream, const Args& args, int64_t expert,
                                         int panel, const uint16_t* smem_pairs, int num_columns, int begin, int end,
                                         int& buffer) {
    const int lane = threadIdx.x % kLanes, warp = threadIdx.x / kLanes;
    const int g = lane / 4, q = lane % 4;
    // Panels are finished by the warps in turn.
    const int finisher = (threadIdx.x + panel * kLanes) % kThreads, neuron = panel * 8 + finisher % 8;
    constexpr bool kEarly = kTiles <= 2;  // beyond that the registers are needed for the sums
    Neuron constants;
    if (kEarly) constants.load(args, expert, neuron);
    Columns<kTiles> columns;
#pragma unroll
    for (int t = 0; t < kTiles; ++t) {
        const int column = min(t * kColumns + g, num_columns - 1);
        columns.gmem[t] = args.gmem_x + smem_pairs[column] / kTopk * args.x_stride + q * 8;
    }
    const float* gmem_scale = nullptr;
    constexpr int kScaleCols = ceil_div(kHidden, 128), kScaleRows = ceil_div(kIntermediate, 128);
    if constexpr (Format::kBlockScale)
        gmem_scale = args.gmem_block_scale + (expert * 2 * kScaleRows + panel * 8 / 128) * kScaleCols;
    Accumulators<kTiles> sum;
    sum_records(sum, stream, columns, begin, end, gmem_scale, gmem_scale + kScaleRows * kScaleCols);
    if (!kEarly) constants.load(args, expert, neuron);
#pragma unroll
    for (int t0 = 0; t0 < kTiles; t0 += kTilesAtOnce) {
#pragma unroll
        for (int t = t0; t < kTiles && t < t0 + kTilesAtOnce; ++t) {
            float(&part)[16][kColumns] = smem.parts[buffer][warp][t - t0];
            *reinterpret_cast<float2*>(&part[g][q * 2]) = {sum.d[t][0], sum.d[t][1]};
            *reinterpret_cast<float2*>(&part[g + 8][q * 2]) = {sum.d[t][2], sum.d[t][3]};
        }
        __syncthreads();
        finish(smem, buffer, args, constants, finisher, neuron, smem_pairs + t0 * kColumns,
               min(num_columns - t0 * kColumns, kTilesAtOnce * kColumns));
        buffer ^= 1;
    }
}

extern "C" __global__ void __launch_bounds__(kThreads, 2)
moe_gate_up_tile(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride, int32_t num_tokens,
                 const uint8_t* __restrict__ gmem_records, const float* __restrict__ gmem_matrix_scale,
                 const float* __restrict__ gmem_row_scale, const float* __restrict__ gmem_block_scale,
                 const float* __restrict__ gmem_bias, float alpha, float limit, float up_offset, uint16_t* gmem_act) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = threadIdx.x / kLanes;
    if (threadIdx.x < kWarps * kStages) mbarrier_init(smem_address(&smem.barriers[0][0] + threadIdx.x), 1);
    fence_mbarrier_init();

    // The down kernel reads topk_idx and topk_weights before its own wait: the release comes after ours, never before.
    pdl_wait();
    pdl_launch_dependents();
    find_pairs(smem.routing, gmem_topk_idx, idx_stride, num_tokens * kTopk);

    const Args args{gmem_x, x_stride, gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias, alpha, limit, up_offset, gmem_act};
    const int num_items = smem.routing.num_distinct * kPanels;
    const int first = int(int64_t(num_items) * blockIdx.x / gridDim.x);
    const int last = int(int64_t(num_items) * (blockIdx.x + 1) / gridDim.x);
    const int begin = kRecords * warp / kWarps, end = kRecords * (warp + 1) / kWarps;
    Stream<PanelSource> stream(smem_address(smem.ring[warp]), smem_address(smem.barriers[warp]),
                               PanelSource(gmem_records, &smem.routing, first, last, begin, end));
    stream.fill();
    int buffer = 0;
#pragma unroll 1
    for (int item = first; item < last; ++item) {
        const int rank = item / kPanels, panel = item % kPanels;
        const int64_t expert = smem.routing.expert[rank];
        const uint16_t* pairs = smem.routing.pairs + smem.routing.first[rank];
        const int count = smem.routing.first[rank + 1] - smem.routing.first[rank];
        if (count <= 8) do_panel<1>(smem, stream, args, expert, panel, pairs, count, begin, end, buffer);
        else if (count <= 16) do_panel<2>(smem, stream, args, expert, panel, pairs, count, begin, end, buffer);
        else if (count <= 32) do_panel<4>(smem, stream, args, expert, panel, pairs, count, begin, end, buffer);
        else do_panel<8>(smem, stream, args, expert, panel, pairs, count, begin, end, buffer);
    }
}
