// ep_experts_products.cuh   128 rows of weights times up to 64 tokens: what the consumer warpgroups do with the stages.
//
// Sums are formed on the tensor cores over a group of columns that share a token's scale (128 or 64), then multiplied
// by the row's and the token's scale and added in FP32. Two groups alternate: the registers of one are decoded while
// the products of the other run. The order of additions depends on nothing but the sizes of the layer.
#pragma once
#include "ep_experts_common.cuh"

struct Consumer {
    int warp, lane;  // of the 8 consumer warps
    StageRing ring;
};

// A stage in use: its address, and that of its barrier.
struct UsedStage {
    uint32_t address, barrier;
};

template <int N, class Format, bool kSecond>
struct Products {
    static constexpr int kGroupColumns = kSecond ? 64 : 128;
    static constexpr int kSteps = kGroupColumns / 32;
    static constexpr int kGroupsOfChunk = kChunkColumns / kGroupColumns;
    static constexpr int kGroupsOfStage = kStageColumns / kGroupColumns;
    static constexpr int kGroups = kSecond ? kNeuronTasks : kHiddenPadded / kGroupColumns;

    Consumer& me;
    float sum[N / 2];
    float part[2][N / 2];
    uint32_t a[2][kSteps][kStepRegisters];
    RowScales rows[2];
    UsedStage stage[2];

    __device__ __forceinline__ explicit Products(Consumer& consumer) : me(consumer) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) sum[i] = part[0][i] = part[1][i] = 0.f;
    }

    // Starts the products of a group, the `kPlace`th of its stage, in buffer b.
    template <int b, int kPlace>
    __device__ __forceinline__ void start(bool last) {
        if (kPlace == 0) me.ring.wait_full();
        stage[b] = {me.ring.stage(), me.ring.barrier()};
        const uint32_t chunk = stage[b].address + kPlace / kGroupsOfChunk * kWeightChunkBytes<Format>;
        rows[b] = Format::scales(chunk, me.warp, me.lane);
        Format::template decode<kSteps>(chunk, smem_start(), rows[b], kPlace % kGroupsOfChunk * kSteps, me.warp, me.lane,
                                        a[b]);
        const uint64_t image = b_descriptor(stage[b].address + kImageAt, N);
        warpgroup_arrive();
#pragma unroll
        for (int s = 0; s < kSteps; ++s) multiply(part[b], a[b][s], image, kPlace * kSteps + s, s > 0);
        warpgroup_commit();
        if (kPlace == kGroupsOfStage - 1 || last) me.ring.advance();
    }

    // 32 columns, step `step` of the stage: one product of E4M3, or two of FP16. A product reads 32 bytes of every
    // token, 2 N units of 16 bytes.
    static __device__ __forceinline__ void multiply(float (&d)[N / 2], const uint32_t (&a)[kStepRegisters],
                                                    uint64_t image, int step, int adds) {
        if constexpr (kFp8) {
            wgmma_e4m3<N>(d, a[0], a[1], a[2], a[3], image + step * 2 * N, adds);
        } else {
            wgmma_f16<N>(d, a[0], a[1], a[2], a[3], image + step * 4 * N, adds);
            wgmma_f16<N>(d, a[4], a[5], a[6], a[7], image + (step * 4 * N + 2 * N), 1);
        }
    }

    // Adds the finished sums of buffer b.
    template <int b, int kPlace, bool kMayBeLast = false>
    __device__ __forceinline__ void finish(bool last) {
        hold(part[b]);
        const uint32_t scales = stage[b].address + kScalesAt + (kFp8 || kSecond ? kPlace : 0) * kBlockM * 4;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const uint2 bits = ld_shared_64(scales + (8 * j + 2 * (me.lane % 4)) * 4);
            const float x[2] = {__uint_as_float(bits.x), __uint_as_float(bits.y)};
#pragma unroll
            for (int i = 0; i < 4; ++i)
                sum[4 * j + i] =
                    fmaf(part[b][4 * j + i], (i < 2 ? rows[b].low : rows[b].high) * x[i % 2], sum[4 * j + i]);
        }
        // No branch on what is known at run time: behind one the compiler takes the lanes for being at different stages.
        if constexpr (kPlace == kGroupsOfStage - 1 || kMayBeLast) {
            __syncwarp();
            StageRing::release(stage[b].barrier, me.lane == 0 && (kPlace == kGroupsOfStage - 1 || last));
        }
    }

    // `count` groups, one behind the other: while one is on the tensor cores the next is decoded. At the end none is:
    // products in flight over the end of a loop are beyond what the compiler follows, it would run all of them one at a
    // time.
    template <int count, int done = 0>
    __device__ __forceinline__ void run_some(bool last) {
        start<done % 2, done % kGroupsOfStage>(last && done == count - 1);
        if constexpr (done > 0) {
            warpgroup_wait<1>();
            finish<(done - 1) % 2, (done - 1) % kGroupsOfStage>(false);
        }
        if constexpr (done + 1 < count) {
            run_some<count, done + 1>(last);
        } else {
            warpgroup_wait<0>();
            finish<done % 2, done % kGroupsOfStage, true>(last);
        }
    }

    // All of the task's groups. The last ones are code of their own, unless they fill a turn of the loop and a register
    // is left for its counter.
    __device__ __forceinline__ void run() {
        constexpr int kAtOnce = 4;
        static_assert(kAtOnce % kGroupsOfStage == 0, "a turn of the loop begins with a stage");
        constexpr bool kAllInLoop = kGroups % kAtOnce == 0 && N < 64;
        constexpr int kRest = kAllInLoop ? 0 : (kGroups - 1) % kAtOnce + 1, kInLoop = kGroups - kRest;
#pragma unroll 1
        for (int i = 0; i < kInLoop; i += kAtOnce) run_some<kAtOnce>(kAllInLoop && i == kInLoop - kAtOnce);
        if constexpr (!kAllInLoop) run_some<kRest>(true);
    }
};
