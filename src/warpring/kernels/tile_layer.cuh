// tile_layer.cuh   A layer in tile layout, as its kernels see it: panels and units, and what turns sums into activations
// and outputs.
//
// Compile-time parameters beside those of tile_routing.cuh (macros set by kernels/tile.py and panels.py):
//   WARPRING_HIDDEN, WARPRING_INTERMEDIATE, WARPRING_FORMAT
//   WARPRING_SPLIT          warps that share the columns of a panel of gate_up; decides the order of sums
//   WARPRING_TEAMS          so many times kSplit warps multiply panels of gate_up, each team its own
//   WARPRING_GATE_UP_RUN, WARPRING_DOWN_RUN   records of a unit; decide the order of sums too
#pragma once
#include "activation.cuh"
#include "tile_multiply.cuh"
#include "tile_routing.cuh"

constexpr int kHidden = WARPRING_HIDDEN;
constexpr int kIntermediate = WARPRING_INTERMEDIATE;
static_assert(kHidden % 32 == 0 && kIntermediate % 32 == 0, "rows are whole records");

constexpr int kSplit = WARPRING_SPLIT, kTeams = WARPRING_TEAMS;

// A panel is 16 rows: 8 neurons' gate and up rows, or 16 outputs. It streams in units, runs of records.
constexpr int kGateUpPanels = kIntermediate / 8, kDownPanels = kHidden / 16;
constexpr int kGateUpRecords = kHidden / kRecordCols, kDownRecords = kIntermediate / kRecordCols;
constexpr int kGateUpRun = WARPRING_GATE_UP_RUN, kDownRun = WARPRING_DOWN_RUN;
constexpr int kGateUpUnits = kGateUpRecords / kGateUpRun, kDownUnits = kDownRecords / kDownRun;
constexpr int kPasses = kGateUpUnits / kSplit;  // units of a consumer in a panel of gate_up
static_assert(kPasses * kSplit * kGateUpRun == kGateUpRecords && kDownUnits * kDownRun == kDownRecords,
              "panels split evenly");
constexpr int kUnitBytes = kGateUpRun * Format::kRecordBytes, kDownUnitBytes = kDownRun * Format::kRecordBytes;
static_assert(kDownUnitBytes <= kUnitBytes, "a unit of down takes the place of one of gate_up");

// What finishing one neuron takes.
struct Neuron {
    float gate_scale, up_scale, gate_bias, up_bias;

    template <class Args>
    __device__ __forceinline__ Neuron(const Args& args, int64_t expert, int neuron) {
        const int64_t gate = expert * 2 * kIntermediate + neuron, up = gate + kIntermediate;
        gate_scale = args.gmem_w13_matrix_scale[expert * 2];
        up_scale = args.gmem_w13_matrix_scale[expert * 2 + 1];
        if (args.gmem_w13_row_scale != nullptr) {
            gate_scale *= args.gmem_w13_row_scale[gate];
            up_scale *= args.gmem_w13_row_scale[up];
        }
        gate_bias = args.gmem_w13_bias != nullptr ? args.gmem_w13_bias[gate] : 0.f;
        up_bias = args.gmem_w13_bias != nullptr ? args.gmem_w13_bias[up] : 0.f;
    }
    // BF16, of the sums.
    template <class Args>
    __device__ __forceinline__ uint16_t activation(const Args& args, float gate, float up) const {
        const float g = fmaf(gate, gate_scale, gate_bias), u = fmaf(up, up_scale, up_bias);
        return cvt_f32_bf16(gated_activation(g, u, {args.alpha, args.limit, args.up_offset}));
    }
};

// The block scales of a run of gate_up from record `first` of a panel on, and the same of down.
template <class Args>
__device__ __forceinline__ BlockScales<kGateUpRun> gate_up_scales(const Args& args, int64_t expert, int panel, int first) {
    const float *gmem_low = nullptr, *gmem_high = nullptr;
    if constexpr (Format::kBlockScale) {
        constexpr int kCols = ceil_div(kHidden, 128), kRows = ceil_div(kIntermediate, 128);
        gmem_low = args.gmem_w13_block_scale + (expert * 2 * kRows + panel * 8 / 128) * kCols;
        gmem_high = gmem_low + kRows * kCols;
    }
    return {gmem_low, gmem_high, first};
}
template <class Args>
__device__ __forceinline__ BlockScales<kDownRun> down_scales(const Args& args, int64_t expert, int panel, int first) {
    const float* gmem = nullptr;
    if constexpr (Format::kBlockScale)  // 16 rows lie in one block of 128
        gmem = args.gmem_w2_block_scale + (expert * ceil_div(kHidden, 128) + panel * 16 / 128) * ceil_div(kIntermediate, 128);
    return {gmem, gmem, first};
}

// What makes an output of a sum of down.
struct OutputRow {
    float scale, bias = 0.f;

    template <class Args>
    __device__ __forceinline__ OutputRow(const Args& args, int64_t expert, int row) {
        scale = args.gmem_w2_matrix_scale[expert];
        if (args.gmem_w2_row_scale != nullptr) scale *= args.gmem_w2_row_scale[expert * kHidden + row];
        if (args.gmem_w2_bias != nullptr) bias = args.gmem_w2_bias[expert * kHidden + row];
    }
};
