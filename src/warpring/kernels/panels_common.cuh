// panels_common.cuh   What both kernels of the tile path's form for few tokens share: products of records that go from global
// memory to registers.
//
// Compile-time parameters: those of tile_layer.cuh (macros set by kernels/panels.py).
#pragma once
#include "tile_layer.cuh"

// A lane's part of a run of records.
template <int kRun>
struct Run {
    typename Format::Raw raw[kRun];

    __device__ __forceinline__ void load(const uint8_t* gmem_run, int lane) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) raw[i] = Format::load(gmem_run, lane, i);
    }
    // `gmem_row`: BF16, from the run's first column on. All eight columns of a product are that row; the first is wanted.
    __device__ __forceinline__ void add_to(Sums<1>& sums, const uint16_t* gmem_row, int lane,
                                           const BlockScales<kRun>& scales) const {
        gmem_row += lane % 4 * 8;
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
            Loaded<1, 1> one;
            one.raw[0] = raw[i];
            one.x[0][0] = ld_activations(gmem_row + i * kRecordCols);
            add_group(sums, one, scales, i);
        }
    }
};

// The sums of a panel's 16 rows, by the lanes that hold the first column.
__device__ __forceinline__ void store_rows(float (&smem)[16], const Sums<1>& sums, int lane) {
    if (lane % 4 != 0) return;
    smem[lane / 4] = sums.total(0, 0);
    smem[lane / 4 + 8] = sums.total(0, 2);
}
