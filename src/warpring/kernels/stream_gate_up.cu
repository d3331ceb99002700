// stream_gate_up.cu   act[t,k,i] = activation(dot(w13[e,0,i,:], x[t,:]) + b[e,0,i], dot(w13[e,1,i,:], x[t,:]) + b[e,1,i]),  e = topk_idx[t,k]
//
// Compiled for sm_90a, not yet run on a GPU.
//
// Grid     one or two CTAs an SM. The panels (8 neurons: gate and up rows) of the experts that the batch wants are one
//          list, cut into equal runs, one a CTA. Of a CTA's warps kSplit consume: each owns its share of the records of
//          every chunk of a panel. One warp requests the chunks, one adds the shares up and applies the activation.
// Reads    every wanted weight byte once for each 32 pairs of its expert, in the order of memory, a chunk a bulk copy; x
//          once an expert and CTA into shared memory where its columns fit, else through L1
// Bound    HBM: distinct experts * 2 * intermediate * hidden * bytes_per_weight
// Sync     waits for its predecessor before anything is read (topk_idx and x may be its output). Lets the down kernel start
//          after that: once its last chunks are requested, so that down's first weights follow them without a gap and do
//          not compete with them; or, with WARPRING_EARLY, at once. Inside a CTA: mbarriers full and empty of each
//          chunk's stage, and of each slot of shares.
// Limits   hidden % 32 == 0, intermediate % 32 == 0, num_tokens * topk <= WARPRING_PAIRS; ids outside [0, num_experts) are skipped
//
// Compile-time parameters of its own: WARPRING_SPLIT, warps that share the columns, and WARPRING_CHUNKS, chunks of a panel. They
// decide the order of sums: they depend on format and sizes, never on the batch.
#include "stream_common.cuh"
#include "activation.cuh"
#include "tile_neuron.cuh"

constexpr int kSplit = WARPRING_SPLIT;
constexpr int kChunks = WARPRING_CHUNKS;
constexpr int kPanels = kIntermediate / 8;
constexpr int kRecords = kHidden / kRecordCols;
constexpr int kChunkRecords = kRecords / kChunks;
constexpr int kRun = kChunkRecords / kSplit;  // records of a warp in a chunk
constexpr int kChunkBytes = kChunkRecords * Format::kRecordBytes;
constexpr int64_t kPanelBytes = int64_t(kRecords) * Format::kRecordBytes;
#ifdef WARPRING_EARLY
constexpr bool kEarly = true;
#else
constexpr bool kEarly = false;
#endif
constexpr int kSlots = 2;  // shares of two tiles may wait for the finisher
static_assert(kRun * kSplit * kChunks == kRecords, "kernels/stream.py splits a panel evenly");
static_assert(kWarps == kSplit + 2, "consumers, a producer, a finisher");

struct Smem {
    alignas(128) uint8_t ring[kRing][kChunkBytes];
    // Staged activations, a warp's own columns: [warp][chunk][record of its run][column][32 values].
    alignas(16) uint8_t x[kSplit][kChunks * kRun * kStaged * 64 + (kStaged == 0 ? 16 : 0)];
    alignas(16) float parts[kSlots][kSplit][16][kColumns];  // [slot][warp][row][column]
    uint64_t full[kRing], empty[kRing];
    uint64_t parts_full[kSlots], parts_empty[kSlots];
    Routing routing;
};
static_assert(sizeof(Smem) <= WARPRING_SMEM_BYTES, "kernels/stream.py computes the same size");

// The columns of one expert.
struct Wanted {
    int64_t expert;
    const uint16_t* smem_pairs;
    int count;

    __device__ __forceinline__ Wanted(const Routing& routing, int rank)
        : expert(routing.expert[rank]),
          smem_pairs(routing.pairs + routing.first[rank]),
          count(routing.first[rank + 1] - routing.first[rank]) {}
};

// ---- producer: one lane requests the chunks of the panels [first, last) ----------------------------------------------

__device__ __forceinline__ void produce(Smem& smem, const uint8_t* gmem_records, int first, int last) {
    Turn<kRing> turn;
    int rank = first / kPanels, panel = first % kPanels;
    const uint8_t* gmem = nullptr;
    for (int item = first; item < last; ++item) {
        if (gmem == nullptr || panel == kPanels) {
            if (panel == kPanels) {
                panel = 0;
                ++rank;
            }
            gmem = gmem_records + (int64_t(smem.routing.expert[rank]) * kPanels + panel) * kPanelBytes;
        }
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            // The first pass over the ring waits for the phase before the first, which counts as complete.
            wait(smem_address(&smem.empty[turn.stage]), turn.parity ^ 1);
            bulk_load(smem_address(smem.ring[turn.stage]), gmem, kChunkBytes, smem_address(&smem.full[turn.stage]));
            gmem += kChunkBytes;
            turn.next();
        }
        ++panel;
    }
    if (!kEarly) pdl_launch_dependents();
}

// ---- finisher: the shares of all consumers become activations --------------------------------------------------------

__device__ __forceinline__ void finish(Smem& smem, const Args& args, int first, int last, int lane) {
    const int row = lane % 8, column = lane / 8;  // and column + 4
    Turn<kSlots> turn;
#pragma unroll 1
    for (int item = first; item < last; ++item) {
        const Wanted wanted(smem.routing, item / kPanels);
        const int neuron = item % kPanels * 8 + row;
        Neuron constants;
        constants.load(args, wanted.expert, neuron);  // on its way while the consumers work
#pragma unroll 1
        for (int base = 0; base < wanted.count; base += kColumns) {
            wait(smem_address(&smem.parts_full[turn.stage]), turn.parity);
            float gate[2] = {0.f, 0.f}, up[2] = {0.f, 0.f};
#pragma unroll
            for (int c = 0; c < 2; ++c)
#pragma unroll
                for (int w = 0; w < kSplit; ++w) {
                    gate[c] += smem.parts[turn.stage][w][row][column + c * 4];
                    up[c] += smem.parts[turn.stage][w][row + 8][column + c * 4];
                }
            arrive_warp(smem_address(&smem.parts_empty[turn.stage]));
            turn.next();
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int index = base + column + c * 4;
                if (index >= wanted.count) break;
                const float g = fmaf(gate[c], constants.gate_scale, constants.gate_bias);
                const float u = fmaf(up[c], constants.up_scale, constants.up_bias);
                args.gmem_act[int64_t(wanted.smem_pairs[index]) * kIntermediate + neuron] =
                    cvt_f32_bf16(gated_activation(g, u, {args.alpha, args.limit, args.up_offset}));
            }
        }
    }
}

// ---- consumers ---------------------------------------------------------------------------------------------------------

// Copies this warp's columns of x for one expert into its part of smem.x. The last expert's are no longer read: the arrival
// after its last chunk was that of every lane.
__device__ __forceinline__ void stage_columns(uint8_t* smem_x, const Args& args, const Wanted& wanted, int warp, int lane) {
    constexpr int kPieces = kChunks * kRun * 4;  // of 16 bytes, a column
#pragma unroll 4
    for (int i = lane; i < wanted.count * kPieces; i += kLanes) {
        const int column = i / kPieces, piece = i % kPieces, own = piece / 4;
        const int record = own / kRun * kChunkRecords + warp * kRun + own % kRun;
        const uint16_t* gmem = args.gmem_x + wanted.smem_pairs[column] / kTopk * args.x_stride;
        *reinterpret_cast<uint4*>(smem_x + (own * kStaged + column) * 64 + piece % 4 * 16) =
            ld_activations(gmem + record * kRecordCols + piece % 4 * 8);
    }
    __syncwarp();
}

struct Turns {
    Turn<kRing> chunk;
    Turn<kSlots> slot;
};

// The panels [item, end) of one expert, kTiles x 8 columns.
template <int kTiles, bool kInShared>
__device__ __forceinline__ void do_panels(Smem& smem, const Args& args, const Wanted& wanted, int panel, int end, int warp,
                                          int lane, Turns& turns) {
    const int g = lane / 4, q = lane % 4;
    constexpr int kOwn = kStaged == 0 ? 1 : kStaged < kColumns ? kStaged : kColumns;
    const uint32_t smem_x = smem_address(smem.x[warp]) + g % kOwn * 64 + q * 16;
    constexpr int kScaleCols = ceil_div(kHidden, 128), kScaleRows = ceil_div(kIntermediate, 128);
#pragma unroll 1
    for (; panel < end; ++panel) {
        const float *gmem_low = nullptr, *gmem_high = nullptr;
        if constexpr (Format::kBlockScale) {
            gmem_low = args.gmem_block_scale + (wanted.expert * 2 * kScaleRows + panel * 8 / 128) * kScaleCols;
            gmem_high = gmem_low + kScaleRows * kScaleCols;
        }
        Sums<kTiles> sums;
#pragma unroll 1
        for (int chunk = 0; chunk < kChunks; ++chunk) {
            const int record = chunk * kChunkRecords + warp * kRun;
            const uint32_t smem_run = smem_address(smem.ring[turns.chunk.stage]) + warp * (kRun * Format::kRecordBytes);
            const BlockScales<kRun> scales(gmem_low, gmem_high, record);
            wait(smem_address(&smem.full[turns.chunk.stage]), turns.chunk.parity);
            if constexpr (kInShared) {
                const StagedColumns staged{smem_x + chunk * (kRun * kStaged * 64)};
                add_run<kRun, 0, kTiles>(sums, smem_run, staged, lane, scales, record);
            } else {
                const uint16_t* gmem_x = args.gmem_x + record * kRecordCols + q * 8;
                add_global<kRun, kTiles>(sums, smem_run, lane, scales, record, [&](int column) {
                    return gmem_x + wanted.smem_pairs[min(column, wanted.count - 1)] / kTopk * args.x_stride;
                });
            }
            arrive_warp(smem_address(&smem.empty[turns.chunk.stage]));
            turns.chunk.next();
        }
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            if (t * kColumns >= wanted.count) break;  // tiles beyond the last column are not handed over
            wait(smem_address(&smem.parts_empty[turns.slot.stage]), turns.slot.parity ^ 1);
            float(&part)[16][kColumns] = smem.parts[turns.slot.stage][warp];
            *reinterpret_cast<float2*>(&part[g][q * 2]) = {sums.total(t, 0), sums.total(t, 1)};
            *reinterpret_cast<float2*>(&part[g + 8][q * 2]) = {sums.total(t, 2), sums.total(t, 3)};
            arrive_warp(smem_address(&smem.parts_full[turns.slot.stage]));
            turns.slot.next();
        }
    }
}

__device__ __forceinline__ void consume(Smem& smem, const Args& args, int num_tokens, int first, int last, int warp, int lane) {
    Turns turns;
    int staged = 0;  // columns; those of a single token serve every expert
#pragma unroll 1
    for (int item = first; item < last;) {
        const int rank = item / kPanels, panel = item % kPanels;
        const int end = min(kPanels, panel + last - item);
        const Wanted wanted(smem.routing, rank);
        if (wanted.count <= kStaged) {
            if (num_tokens > 1 || wanted.count > staged) stage_columns(smem.x[warp], args, wanted, warp, lane);
            staged = wanted.count;
            if (kStaged <= kColumns || wanted.count <= kColumns)
                do_panels<1, true>(smem, args, wanted, panel, end, warp, lane, turns);
            else
                do_panels<kStaged <= kColumns ? 1 : 2, true>(smem, args, wanted, panel, end, warp, lane, turns);
        } else if (wanted.count <= 8) {
            do_panels<1, false>(smem, args, wanted, panel, end, warp, lane, turns);
        } else if (wanted.count <= 16) {
            do_panels<2, false>(smem, args, wanted, panel, end, warp, lane, turns);
        } else {
            do_panels<4, false>(smem, args, wanted, panel, end, warp, lane, turns);
        }
        item += end - panel;
    }
}

extern "C" __global__ void __maxnreg__(WARPRING_REGISTERS)
moe_gate_up_stream(const uint16_t* gmem_x, int64_t x_stride, const Index* gmem_topk_idx, int64_t idx_stride, int32_t num_tokens,
                   const uint8_t* __restrict__ gmem_records, const float* __restrict__ gmem_matrix_scale,
                   const float* __restrict__ gmem_row_scale, const float* __restrict__ gmem_block_scale,
                   const float* __restrict__ gmem_bias, float alpha, float limit, float up_offset, uint16_t* gmem_act) {
    extern __shared__ __align__(128) uint8_t smem_bytes[];
    Smem& smem = *reinterpret_cast<Smem*>(smem_bytes);
    const int warp = threadIdx.x / kLanes, lane = threadIdx.x % kLanes;
    const bool produces = warp == kSplit;
    if (produces && lane == 0) {
        for (int i = 0; i < kRing; ++i) {
            mbarrier_init(smem_address(&smem.full[i]), 1);
            mbarrier_init(smem_address(&smem.empty[i]), kSplit);
        }
        for (int i = 0; i < kSlots; ++i) {
            mbarrier_init(smem_address(&smem.parts_full[i]), kSplit);
            mbarrier_init(smem_address(&smem.parts_empty[i]), 1);
        }
        fence_mbarrier_init();
    }

    // The down kernel reads topk_idx and topk_weights before its own wait: the release comes after ours, never before.
    pdl_wait();
    if (kEarly) pdl_launch_dependents();
    find(smem.routing, gmem_topk_idx, idx_stride, num_tokens * kTopk);
    const auto cut = [&](int cta) { return int(int64_t(smem.routing.num_distinct * kPanels) * cta / gridDim.x); };
    const int first = cut(blockIdx.x), last = cut(blockIdx.x + 1);
    const Args args{gmem_x, x_stride, gmem_matrix_scale, gmem_row_scale, gmem_block_scale, gmem_bias, alpha, limit, up_offset, gmem_act};
    if (warp < kSplit) consume(smem, args, num_tokens, first, last, warp, lane);
    else if (!produces) finish(smem, args, first, last, lane);
    else if (lane == 0) produce(smem, gmem_records, first, last);
}
