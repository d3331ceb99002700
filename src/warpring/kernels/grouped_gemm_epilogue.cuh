// grouped_gemm_epilogue.cuh   From sums to the image of act (first GEMM), or to dot products in FP32 (second).
#pragma once
#include "activation.cuh"
#include "grouped_gemm_smem.cuh"

// What finishing rows g and g + 8 of this warp's panel takes. Beyond the last panel: of some other.
struct RowConstants {
    float low_scale, high_scale, low_bias, high_bias;

    __device__ __forceinline__ void load(const Args& args, const Task& task, int warp, int g) {
        const int panel = min(task.tile * kTaskPanels + warp, kPanels - 1);
        const int64_t matrix = int64_t(task.expert) * kHalves;
        const int64_t low = matrix * kRows + panel * (16 / kHalves) + g, high = low + (kFirst ? kRows : 8);
        low_scale = ld_scale_f32(args.gmem_matrix_scale + matrix);
        high_scale = kFirst ? ld_scale_f32(args.gmem_matrix_scale + matrix + 1) : low_scale;
        if (args.gmem_row_scale != nullptr) {
            low_scale *= ld_scale_f32(args.gmem_row_scale + low);
            high_scale *= ld_scale_f32(args.gmem_row_scale + high);
        }
        low_bias = args.gmem_bias != nullptr ? ld_scale_f32(args.gmem_bias + low) : 0.f;
        high_bias = args.gmem_bias != nullptr ? ld_scale_f32(args.gmem_bias + high) : 0.f;
    }
};

// A warpgroup's half of the chunk of act: 32 neurons, one record.
template <int N>
__device__ __forceinline__ void finish_first(const Args& args, const Task& task, const RowConstants& rows, int warp,
                                             int lane, const float (&sum)[N / 2]) {
    int32_t at[2] = {warp, lane};
    hold(at);  // places of all tokens would take registers while products are formed
    warp = at[0], lane = at[1];
    const int g = lane / 4, q = lane % 4, warpgroup = warp / 4;
    const ActivationArgs activation{args.alpha, args.limit, args.up_offset};
    uint8_t* smem_turn = smem_start() + kTurnAt;
    named_barrier_sync(1 + warpgroup, kWarpgroupThreads);  // the chunk of the task before has been read
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
        float act[2];
#pragma unroll
        for (int c = 0; c < 2; ++c)
            act[c] = gated_activation(fmaf(sum[4 * j + c], rows.low_scale, rows.low_bias),
                                      fmaf(sum[4 * j + 2 + c], rows.high_scale, rows.high_bias), activation);
        // Neurons g and g ^ 1 share a word: one lane of both writes that of token 2 q, the other that of token 2 q + 1.
        const bool odd = g % 2;
        const float other = __shfl_xor_sync(kFullWarp, odd ? act[0] : act[1], 4);
        const uint32_t word = odd ? cvt_f32_bf16x2(act[1], other) : cvt_f32_bf16x2(other, act[0]);
        const int offset = unit_offset(8 * j + 2 * q + odd, warpgroup * 4 + g / 2) + warp % 4 * 4;
        *reinterpret_cast<uint32_t*>(smem_turn + offset) = word;
    }
    named_barrier_sync(1 + warpgroup, kWarpgroupThreads);
    if (warpgroup * 4 >= task.num_panels()) return;
    uint8_t* gmem_chunk = static_cast<uint8_t*>(args.gmem_out) + int64_t(task.first) * image_row_bytes(kRows) +
                          int64_t(task.tile) * task.count * kChunkRowBytes;
#pragma unroll 4
    for (int i = warp % 4 * kLanes + lane; i < task.count * 4; i += kWarpgroupThreads) {
        const int offset = unit_offset(i / 4, warpgroup * 4 + i % 4);
        *reinterpret_cast<uint4*>(gmem_chunk + offset) = *reinterpret_cast<const uint4*>(smem_turn + offset);
    }
}

template <int N>
__device__ __forceinline__ void finish_second(const Args& args, const Task& task, const RowConstants& rows, int warp,
                                              int lane, const float (&sum)[N / 2]) {
    int32_t at[2] = {warp, lane};
    hold(at);
    warp = at[0], lane = at[1];
    if (warp >= task.num_panels()) return;
    const int g = lane / 4, q = lane % 4;
    float* gmem_dots =
        static_cast<float*>(args.gmem_out) + int64_t(task.first) * kRows + task.tile * kTaskRows + warp * 16 + g;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int token = 8 * j + 2 * q + c;
            if (token >= task.count) continue;
            gmem_dots[int64_t(token) * kRows] = fmaf(sum[4 * j + c], rows.low_scale, rows.low_bias);
            gmem_dots[int64_t(token) * kRows + 8] = fmaf(sum[4 * j + 2 + c], rows.high_scale, rows.high_bias);
        }
    }
}
