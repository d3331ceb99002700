// tile_outputs.cuh   From dot products of down to outputs: the sum over a token's slots, in their order.
#pragma once
#include "tile_smem.cuh"

constexpr int kQuad = 4;  // rows of a panel that a thread adds up at once

// Rows [first_row, first_row + 4 * kQuads) of each panel, by `num_threads` threads of which this is `thread`. All dot
// products and weights must be there.
template <int kQuads>
__device__ __forceinline__ void sum_up(const Smem& smem, const Args& args, int first_panel, int num_panels,
                                       int first_row, int thread, int num_threads) {
#pragma unroll 1
    for (int i = thread; i < args.num_tokens * num_panels * kQuads; i += num_threads) {
        const int row = first_row + i % kQuads * kQuad, of_unit = kMostPanels == 1 ? 0 : i / kQuads / args.num_tokens;
        const int token = i / kQuads - of_unit * args.num_tokens, panel = first_panel + of_unit;
        float y[kQuad] = {0.f, 0.f, 0.f, 0.f};
        // No branch, so that the loads of several slots are on their way at once.
#pragma unroll 8
        for (int slot = 0; slot < kSlots; ++slot) {
            const int pair = token * kSlots + slot;
            const uint4 bits = kParts == 1
                                   ? ld_shared_128(smem_address(&smem.partial.dots[of_unit * kMaxPairs + pair][row]))
                                   : ld_activations(args.gmem_dots + int64_t(pair) * kHidden + panel * 16 + row);
            const float dots[kQuad] = {__uint_as_float(bits.x), __uint_as_float(bits.y), __uint_as_float(bits.z),
                                       __uint_as_float(bits.w)};
            const bool used = smem.routing.ids[pair] != kUnused;
            const float weight = smem.weights[pair];
#pragma unroll
            for (int r = 0; r < kQuad; ++r) y[r] = used ? fmaf(weight, dots[r], y[r]) : y[r];
        }
        uint16_t* gmem_out = args.gmem_out + token * args.out_stride + panel * 16 + row;
#pragma unroll
        for (int r = 0; r < kQuad; ++r) gmem_out[r] = cvt_f32_bf16(y[r]);
    }
}
