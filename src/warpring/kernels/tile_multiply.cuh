// tile_multiply.cuh   A run of records from shared memory times the columns of an expert, on the tensor cores.
#pragma once
#include "tile_formats.cuh"

using Format = WARPRING_FORMAT;
constexpr int kColumns = 8;  // pairs of one mma

// The sums of kTiles x 8 columns. The first and the second mma of every record add to sums of their own: half the chain
// of instructions that wait for each other. Block scales multiply the two together, record by record.
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

// The sums of several units, added up in their order.
template <int kTiles>
struct Totals {
    float d[kTiles][4] = {};

    __device__ __forceinline__ void add(const Sums<kTiles>& unit) {
#pragma unroll
        for (int t = 0; t < kTiles; ++t)
#pragma unroll
            for (int i = 0; i < 4; ++i) d[t][i] += unit.total(t, i);
    }
};

// Where a lane finds its 8 activations of a record, of column lane / 4 of each tile. A lane beyond the last column
// reads another's: columns are independent of each other, and nobody looks at the sums of those that stand for no pair.
template <int kTiles>
struct Columns {
    uint32_t smem[kTiles];
    __device__ __forceinline__ uint4 load(int record, int tile) const {
        return ld_shared_128(smem[tile] + record * 64);
    }
};

// The FP32 scales of 128 x 128 blocks that a run meets, of the panel's two halves. Where runs are aligned to blocks
// they are requested a run ahead, else record by record.
template <int kRun>
struct BlockScales {
    static constexpr bool kUsed = Format::kBlockScale, kAhead = kUsed && kRun % 4 == 0;
    static constexpr int kBlocks = kAhead ? kRun / 4 : 1;
    const float *gmem_low, *gmem_high;
    int record;
    float low[kBlocks], high[kBlocks];

    // Scales of the run that starts at `record` of a panel.
    __device__ __forceinline__ BlockScales(const float* low_row, const float* high_row, int first) : record(first) {
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
    __device__ __forceinline__ float2 at(int i) const {
        if constexpr (kAhead) return {low[i / 4], high[i / 4]};
        return {ld_scale_f32(gmem_low + (record + i) / 4), ld_scale_f32(gmem_high + (record + i) / 4)};
    }
};

// Records are multiplied in groups, while those of the next group are on their way from shared memory.
__host__ __device__ constexpr int group_size(int run, int most) {
    return run % most == 0 ? most : group_size(run, most - 1);
}
template <int kRun, int kTiles>
constexpr int kGroupSize = group_size(kRun, kTiles == 1 ? 2 : 1);

template <int kGroup, int kTiles>
struct Loaded {
    typename Format::Raw raw[kGroup];
    uint4 x[kGroup][kTiles];

    // Records `first` and on of the run at `smem_run`; `record` is the run's place in the panel, and in the columns.
    __device__ __forceinline__ void load(uint32_t smem_run, const Columns<kTiles>& columns, int lane, int first,
                                         int record) {
#pragma unroll
        for (int i = 0; i < kGroup; ++i) {
            raw[i] = Format::load(smem_run, lane, first + i);
#pragma unroll
            for (int t = 0; t < kTiles; ++t) x[i][t] = columns.load(record + first + i, t);
        }
    }
};

template <int kGroup, int kTiles, class Scales>
__device__ __forceinline__ void add_group(Sums<kTiles>& sums, const Loaded<kGroup, kTiles>& loaded,
                                          const Scales& scales, int first) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
        Operands w;
        Format::unpack(loaded.raw[i], w);
        float2 scale;
        if constexpr (Format::kBlockScale) scale = scales.at(first + i);
#pragma unroll
        for (int t = 0; t < kTiles; ++t) {
            const uint4 x = loaded.x[i][t];
            float (&sum)[kChains][4] = sums.d[t];
            if constexpr (Format::kBlockScale) {
                float part[4] = {0.f, 0.f, 0.f, 0.f};
                mma_bf16(part, w.a[0][0], w.a[0][1], w.a[0][2], w.a[0][3], x.x, x.y);
                mma_bf16(part, w.a[1][0], w.a[1][1], w.a[1][2], w.a[1][3], x.z, x.w);
                sum[0][0] = fmaf(scale.x, part[0], sum[0][0]);
                sum[0][1] = fmaf(scale.x, part[1], sum[0][1]);
                sum[0][2] = fmaf(scale.y, part[2], sum[0][2]);
                sum[0][3] = fmaf(scale.y, part[3], sum[0][3]);
            } else {
                mma_bf16(sum[0], w.a[0][0], w.a[0][1], w.a[0][2], w.a[0][3], x.x, x.y);
                mma_bf16(sum[kChains - 1], w.a[1][0], w.a[1][1], w.a[1][2], w.a[1][3], x.z, x.w);
            }
        }
    }
}

// Adds the products of the run at `smem_run`, whose first group `loaded` holds; `load_next` loads the first of the run
// behind it.
template <int kRun, int kTiles, class LoadNext>
__device__ __forceinline__ void add_run(Sums<kTiles>& sums, Loaded<kGroupSize<kRun, kTiles>, kTiles>& loaded,
                                        uint32_t smem_run, const Columns<kTiles>& columns, int lane,
                                        const BlockScales<kRun>& scales, const LoadNext& load_next) {
    constexpr int kGroup = kGroupSize<kRun, kTiles>, kLast = kRun - kGroup;
#pragma unroll(kTiles == 1 ? kRun : 2)
    for (int first = 0; first < kLast; first += kGroup) {
        Loaded<kGroup, kTiles> ahead;
        ahead.load(smem_run, columns, lane, first + kGroup, scales.record);
        add_group(sums, loaded, scales, first);
        loaded = ahead;
    }
    Loaded<kGroup, kTiles> ahead = loaded;
    load_next(ahead);
    add_group(sums, loaded, scales, kLast);
    loaded = ahead;
}
