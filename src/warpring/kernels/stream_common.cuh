// stream_common.cuh   What both stream kernels add to tile_common.cuh: waits, a short way to the routing of few pairs, and the
// straight code that multiplies a run of records. Compiled for sm_90a, not yet run on a GPU.
//
// Compile-time parameters beside those of tile_common.cuh (macros set by kernels/stream.py):
//   WARPRING_WARPS       all warps of the CTA
//   WARPRING_STAGES      copies in flight: runs of a CTA (gate_up) or of a warp (down)
//   WARPRING_COLUMNS     columns of activations that are staged in shared memory; 0, 1, 2, 4, 8 or 16
//   WARPRING_MAX_COLUMNS pairs of an expert that are multiplied at once: 32
//   WARPRING_PAIRS       (token, slot) pairs that a launch may have
//   WARPRING_REGISTERS   registers a thread, so that as many CTAs as wanted fit a multiprocessor
// None of them changes a bit of the result.
#pragma once
#include "stream_formats.cuh"
#include "tile_common.cuh"

constexpr int kRing = WARPRING_STAGES;
constexpr int kStaged = WARPRING_COLUMNS;
constexpr int kMostPairs = WARPRING_PAIRS;
constexpr int kFewPairs = 32;  // one warp sorts them
static_assert(kMostPairs <= kMaxPairs && kMaxColumns == 32, "the routing holds all pairs, an entry at most four tiles");
static_assert(kStaged <= kColumns || kStaged == 2 * kColumns, "staged columns are part of a tile, or two tiles");

// Waits for the phase of that parity. A phase that never completes traps rather than hangs.
__device__ __forceinline__ void wait(uint32_t smem_barrier, uint32_t parity) {
    for (uint32_t tries = 0; !mbarrier_try_wait(smem_barrier, parity); ++tries)
        if (tries > (1u << 20)) __trap();
}

// One arrival for the whole warp, after what its lanes read and wrote.
__device__ __forceinline__ void arrive_warp(uint32_t smem_barrier) {
    __syncwarp();
    if (threadIdx.x % kLanes == 0) mbarrier_arrive(smem_barrier);
}

// A stage of a ring and the parity of its barriers.
template <int kStagesOfRing>
struct Turn {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        ++stage;
        if (stage == kStagesOfRing) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// find_pairs() of at most 32 pairs, by one warp without a barrier: experts in the order in which they first appear, the
// pairs of each ascending. Other warps see it behind a barrier of the CTA.
__device__ __forceinline__ void find_few_pairs(Routing& smem, const Index* gmem_topk_idx, int64_t idx_stride, int num_pairs) {
    const int lane = threadIdx.x % kLanes;
    int64_t id = -1;
    if (lane < num_pairs) id = ld_routing(gmem_topk_idx + (lane / kTopk) * idx_stride + lane % kTopk);
    const bool used = uint64_t(id) < uint64_t(kExperts);
    const uint32_t key = used ? uint32_t(id) : kUnused;
    const uint32_t same = __match_any_sync(kFull, key), before = (1u << lane) - 1;
    const int first_lane = __ffs(int(same)) - 1;
    const bool leads = used && lane == first_lane;
    const uint32_t leaders = __ballot_sync(kFull, leads);
    int32_t upto = leads ? __popc(same) : 0;
    const int32_t own = upto;
#pragma unroll
    for (int d = 1; d < kLanes; d *= 2) {
        const int32_t other = __shfl_up_sync(kFull, upto, d);
        if (lane >= d) upto += other;
    }
    const int32_t start = __shfl_sync(kFull, upto - own, first_lane);
    if (leads) {
        const int rank = __popc(leaders & before);
        smem.expert[rank] = uint16_t(key);
        smem.first[rank] = uint16_t(start);
    }
    if (lane < num_pairs) smem.ids[lane] = uint16_t(key);
    if (used) smem.pairs[start + __popc(same & before)] = uint16_t(lane);
    if (lane == kLanes - 1) {
        smem.num_distinct = __popc(leaders);
        smem.first[__popc(leaders)] = uint16_t(upto);
    }
    __syncwarp();
}

// Who wants which expert, by whichever way fits the batch. All warps of the CTA call it; all see the result.
__device__ __forceinline__ void find(Routing& smem, const Index* gmem_topk_idx, int64_t idx_stride, int num_pairs) {
    if (kMostPairs > kFewPairs && num_pairs > kFewPairs) {
        find_pairs(smem, gmem_topk_idx, idx_stride, num_pairs);
    } else {
        if (threadIdx.x < kLanes) find_few_pairs(smem, gmem_topk_idx, idx_stride, num_pairs);
        __syncthreads();
    }
}

// The sums of kTiles x 8 columns. The first and the second mma of every record add to sums of their own: half the chain of
// instructions that wait for each other. Block scales multiply the two together, record by record.
constexpr int kChains = Format::kBlockScale ? 1 : 2;
template <int kTiles>
struct Sums {
    float d[kTiles][kChains][4];

    __device__ __forceinline__ Sums() {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int c = 0; c < kChains; ++c)
#pragma unroll
                for (int i = 0; i < 4; ++i) d[t][c][i] = 0.f;
    }
    __device__ __forceinline__ float total(int tile, int i) const {
        return kChains == 1 ? d[tile][0][i] : d[tile][0][i] + d[tile][kChains - 1][i];
    }
};

// Where a lane finds its 8 activations of record i of a run, column g of tile t. A lane beyond the last column reads
// another's, or what an earlier expert left: columns are independent of each other, and nobody looks at the sums of those that
// stand for no pair.
struct StagedColumns {
    uint32_t smem;
    __device__ __forceinline__ uint4 load(int record, int tile) const {
        return ld_shared_128(smem + (record * kStaged + tile * kColumns) * 64);
    }
};
template <int kTiles>
struct GlobalColumns {
    const uint16_t* gmem[kTiles];
    __device__ __forceinline__ uint4 load(int record, int tile) const {
        return ld_activations(gmem[tile] + record * kRecordCols);
    }
};

// The FP32 scales of 128 x 128 blocks that a run meets, of the panel's two halves. Where runs are aligned to blocks they are
// requested before the wait for the weights, else record by record.
template <int kRun>
struct BlockScales {
    static constexpr bool kUsed = Format::kBlockScale, kAhead = kUsed && kRun % 4 == 0;
    static constexpr int kBlocks = kAhead ? kRun / 4 : 1;
    const float *gmem_low, *gmem_high;
    float low[kBlocks], high[kBlocks];

    // Scales of the run that starts at `record` of the panel.
    __device__ __forceinline__ BlockScales(const float* low_row, const float* high_row, int record) {
        if constexpr (kUsed) {
            gmem_low = low_row;
            gmem_high = high_row;
        }
        if constexpr (kAhead) {
#pragma unroll
            for (int i = 0; i < kBlocks; ++i) {
                low[i] = ld_scale_f32(low_row + record / 4 + i);
                high[i] = ld_scale_f32(high_row + record / 4 + i);
            }
        }
    }
    __device__ __forceinline__ float2 at(int record, int i) const {
        if constexpr (kAhead) return {low[i / 4], high[i / 4]};
        return {ld_scale_f32(gmem_low + (record + i) / 4), ld_scale_f32(gmem_high + (record + i) / 4)};
    }
};

// Adds the products of kRun records at `smem_run` with kTiles x 8 columns, in groups: what a group reads is requested before
// anything of it is multiplied. Tiles go to `sums` from tile kFirst on. `record` is the run's place in the panel.
template <int kRun, int kFirst, int kTiles, int kAll, class Columns>
__device__ __forceinline__ void add_run(Sums<kAll>& sums, uint32_t smem_run, const Columns& columns, int lane,
                                        const BlockScales<kRun>& scales, int record) {
    constexpr bool kSmall = sizeof(typename Format::Raw) <= 20;  // BF16 takes 32 bytes a lane
    constexpr int kGroup = kTiles == 1 ? 4 : kSmall && kRun % 2 == 0 ? 2 : 1;
    constexpr bool kWhole = kRun % kGroup == 0;
    static_assert(kTiles <= 2, "more would not fit the registers");
#pragma unroll(kTiles == 1 ? kRun : 1)
    for (int first = 0; first < kRun; first += kGroup) {
        typename Format::Raw raw[kGroup];
        uint4 x[kGroup][kTiles];
#pragma unroll
        for (int i = 0; i < kGroup && (kWhole || first + i < kRun); ++i) {
            raw[i] = Format::load(smem_run + (first + i) * Format::kRecordBytes, lane);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) x[i][t] = columns.load(first + i, t);
        }
#pragma unroll
        for (int i = 0; i < kGroup && (kWhole || first + i < kRun); ++i) {
            Operands w;
            Format::unpack(raw[i], w);
            float2 scale;
            if constexpr (Format::kBlockScale) scale = scales.at(record, first + i);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) {
                const uint4 x_tile = x[i][t];
                float(&sum)[kChains][4] = sums.d[kFirst + t];
                if constexpr (Format::kBlockScale) {
                    float part[4] = {0.f, 0.f, 0.f, 0.f};
                    multiply(part, w, x_tile);
                    sum[0][0] = fmaf(scale.x, part[0], sum[0][0]);
                    sum[0][1] = fmaf(scale.x, part[1], sum[0][1]);
                    sum[0][2] = fmaf(scale.y, part[2], sum[0][2]);
                    sum[0][3] = fmaf(scale.y, part[3], sum[0][3]);
                } else {
                    mma_bf16(sum[0], w.a[0][0], w.a[0][1], w.a[0][2], w.a[0][3], x_tile.x, x_tile.y);
                    mma_bf16(sum[kChains - 1], w.a[1][0], w.a[1][1], w.a[1][2], w.a[1][3], x_tile.z, x_tile.w);
                }
            }
        }
    }
}

// The same with columns read from global memory, `gmem_of(column)` their first value of the run for this lane: two tiles at a
// time, the run decoded again for the next two, since more would not fit the registers.
template <int kRun, int kTiles, int kFirst = 0, class GmemOf>
__device__ __forceinline__ void add_global(Sums<kTiles>& sums, uint32_t smem_run, int lane, const BlockScales<kRun>& scales,
                                           int record, const GmemOf& gmem_of) {
    constexpr int kPass = kTiles < 2 ? kTiles : 2;
    GlobalColumns<kPass> columns;
#pragma unroll
    for (int t = 0; t < kPass; ++t) columns.gmem[t] = gmem_of((kFirst + t) * kColumns + lane / 4);
    add_run<kRun, kFirst, kPass>(sums, smem_run, columns, lane, scales, record);
    if constexpr (kFirst + kPass < kTiles) add_global<kRun, kTiles, kFirst + kPass>(sums, smem_run, lane, scales, record, gmem_of);
}
